"""Room: tables."""
