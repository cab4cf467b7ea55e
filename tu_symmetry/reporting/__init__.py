"""How results are shown: grids, plots, progress, and the machine that made them."""
