"""What operators and models cost."""
