"""What the zoo must be faster than, and by how much it is."""
