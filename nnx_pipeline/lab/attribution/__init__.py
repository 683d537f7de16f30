"""Attributes what the device-memory heap holds at its peak to source lines and roles."""
