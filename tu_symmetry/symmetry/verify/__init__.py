"""Running networks with given weights, and deciding whether two states compute the same.

Weights are drawn in ``weights.py``, inputs in ``inputs.py``; ``probe.py`` runs a network, in the arithmetic of
``precision.py``; ``comparison.py`` decides. ``verification.py`` tests the groups of a graph with random weights, and
``certificate.py`` measures what a transformation did to a user's own.
"""
