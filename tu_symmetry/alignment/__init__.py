"""Room: alignment."""
