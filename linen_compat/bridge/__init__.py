"""Wrappers between NNX and Linen that build a module's graph once, not at every apply."""

from linen_compat.bridge.to_linen import NNXAsLinen, to_linen
from linen_compat.bridge.to_nnx import LinenAsNNX, to_nnx

__all__ = ["LinenAsNNX", "NNXAsLinen", "to_linen", "to_nnx"]
