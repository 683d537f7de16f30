"""Frozen configs that check their values when made, presets, and overrides by `--set`."""
