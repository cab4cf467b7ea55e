"""Room: callbacks."""
