"""Where arrays are laid out on the mesh, and what is done to any array whatever it means."""
