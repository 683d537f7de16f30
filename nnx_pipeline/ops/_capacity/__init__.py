"""Experts that each take a limited number of choices, and exchange rows of fixed shapes."""
