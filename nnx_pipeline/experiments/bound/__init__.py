"""What a training step must hold and how long it must take, from config and mesh alone."""
