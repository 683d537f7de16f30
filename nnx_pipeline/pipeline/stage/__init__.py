"""One visit: the layers of all stages applied once, and the derivative of that."""
