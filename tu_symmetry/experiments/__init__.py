"""Room: experiments. What one paper needs and nobody else; the folders mirror those of ``recipes/``."""
