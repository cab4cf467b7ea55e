"""Tables: the stages of a recipe folder, run in order, resumed where they stopped, and reported beside the paper."""
