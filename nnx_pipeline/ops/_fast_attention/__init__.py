"""Attention whose scores never exist as a whole: in plain JAX, and by the kernels of a platform."""
