"""What this paper's recipes write: one report a file."""
