"""Ways to follow a stream: parse, call the core, encode."""
