"""Linearized Laplace: curvature, evidence, tangent linear model and predictive, with one precision per group."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
