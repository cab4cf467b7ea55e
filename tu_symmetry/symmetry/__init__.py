"""Symmetries of a module: found by tracing, verified numerically, and applied to weights."""
