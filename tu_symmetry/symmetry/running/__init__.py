"""Running networks with given weights, and telling whether two states compute the same."""
