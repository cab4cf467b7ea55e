"""Metrics of posteriors and of weight-space symmetries, as torchmetrics classes; see also ``metrics.functional``."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
