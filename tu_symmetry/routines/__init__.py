"""Room: routines."""
