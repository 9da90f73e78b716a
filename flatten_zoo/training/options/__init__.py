"""What a person asks for: declared, read and checked."""
