"""Room: scaling."""
