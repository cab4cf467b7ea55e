"""Tables: the commands of a recipe folder, run in order, resumed where they stopped, reported beside the paper."""
