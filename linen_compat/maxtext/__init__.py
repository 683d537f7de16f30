"""MaxText's configuration files."""
