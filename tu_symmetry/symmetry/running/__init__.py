"""Running networks with given weights, and telling whether two states compute the same.

Weights are drawn in ``weights.py``, inputs in ``inputs.py``; ``probe.py`` runs a network, in the arithmetic of
``precision.py``; ``comparison.py`` decides. With these, ``symmetry/verification.py`` tests the groups of a graph on
random weights, and ``symmetry/certificate.py`` measures what a transformation did to a user's own.
"""
