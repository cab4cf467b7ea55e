"""What `align`, `merge` and `inspect` do with checkpoint files."""
