"""Several processes, and signals to them."""
