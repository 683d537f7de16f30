"""The maths, as pure functions of arrays; NNX and Linen modules are shells over it."""
