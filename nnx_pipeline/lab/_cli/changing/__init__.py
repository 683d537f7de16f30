"""What commands do that change a function while it is traced."""
