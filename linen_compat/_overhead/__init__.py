"""Measures what each style, native or wrapped, costs to trace, lower, compile and call."""

LOOPS = ("unrolled", "scan", "pipeline")  # that run the layers
