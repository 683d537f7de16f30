"""The command line `linen-compat`."""
