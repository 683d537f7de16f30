"""Reads the optimized HLO text and the buffer assignment of a compiled program."""
