"""Networks trained on different data, merged without the data: one round of federated learning.

Every client has a share of the digits with its own mixture of classes, and trains a network of its own, from its own
initialization. A server sees their weights alone: it aligns and averages them. What that is worth is measured on the
test images of all classes.
"""

from tu_symmetry.experiments.federated.clients import ClientDigitsDataModule
from tu_symmetry.experiments.federated.merging import merge_clients, report

__all__ = ["ClientDigitsDataModule", "merge_clients", "report"]
