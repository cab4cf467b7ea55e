"""Room: posterior."""
