"""Bytes into values and back, without I/O."""
