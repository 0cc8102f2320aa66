"""What yields the chunks of a generation."""
