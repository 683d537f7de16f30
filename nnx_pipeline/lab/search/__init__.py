"""Searches that compile: what they may cost, and the largest number with which a program fits."""
