"""The command line `nnx-pipeline`."""
