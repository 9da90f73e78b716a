"""How fast models run on this machine, side by side."""
