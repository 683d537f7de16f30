"""Experts that compute the tokens which are sent to them, and no others."""
