"""Weight-space symmetries in Bayesian deep learning: find them, verify them, remove them, measure what is left.

The package is lazy: ``import tu_symmetry`` loads nothing heavy, a name loads its module on first use.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
