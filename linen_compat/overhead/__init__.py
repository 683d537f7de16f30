"""Measures what each style, native or wrapped, costs to trace, lower, compile and call."""
