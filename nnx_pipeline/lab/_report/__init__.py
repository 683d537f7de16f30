"""Shows results as tables for the terminal, as pictures and as JSON."""
