"""Transfers between neighbouring stages, and buffers that live from tick to tick."""
