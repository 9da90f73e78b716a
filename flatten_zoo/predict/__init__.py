"""Classes and features of one's own pictures, by a model or an exported file."""
