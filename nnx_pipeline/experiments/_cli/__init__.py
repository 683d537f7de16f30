"""What `compare` does with presets and experiments."""
