"""The worker pool: workers that cannot be called from outside pull jobs and push their tokens (PROTOCOL.md, "Pool")."""
