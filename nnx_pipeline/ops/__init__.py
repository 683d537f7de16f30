"""The maths of the model as pure functions of arrays, called by both NNX and Linen modules."""
