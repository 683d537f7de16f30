"""Linen-style classes and checkpoints beside `nnx_pipeline`."""
