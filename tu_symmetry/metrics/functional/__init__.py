"""Room: metrics/functional."""
