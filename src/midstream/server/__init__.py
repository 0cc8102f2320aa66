"""The gateway as a process: composition, settings, keys, metrics."""
