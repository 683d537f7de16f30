"""Models and training states loaded from checkpoints, saved, checked and converted."""
