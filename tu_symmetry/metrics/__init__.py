"""Metrics of posteriors and of weight-space symmetries, as torchmetrics classes.

Their pure functions are in :mod:`tu_symmetry.metrics.functional`. Each class loads on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
