"""Orbax checkpoints: MaxText's in every layout, and this project's own."""
