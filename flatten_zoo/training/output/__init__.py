"""What a run leaves and says."""
