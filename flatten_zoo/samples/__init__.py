"""Data sets that are made, not fetched: to try things on."""
