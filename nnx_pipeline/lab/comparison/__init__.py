"""Compares two programs: their figures, the numbers that they compute, and how figures grow."""
