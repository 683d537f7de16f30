"""Checkpoint formats: each is read and written one array of one layer at a time."""
