"""Compiles programs for any platform, measures them, and keeps the results on disk."""
