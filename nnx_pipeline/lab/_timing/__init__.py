"""Estimates how long a compiled program runs: compute, collectives, and what of these overlaps."""
