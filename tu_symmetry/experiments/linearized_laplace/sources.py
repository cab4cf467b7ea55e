"""Small images, and how good a predictive is."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from tu_symmetry.datamodules import IDXDataModule
from tu_symmetry.datamodules.readers import LabeledImages
from tu_symmetry.experiments.study import Images


class SmallIDXDataModule(IDXDataModule):
    """An MNIST-like data set whose images are averaged over squares, and rounded to bytes again.

    Args:
        pool: height and width of the squares; 2 makes 14 x 14 pixels of 28 x 28.
        kwargs: the options of :class:`~tu_symmetry.datamodules.IDXDataModule`.

    Raises:
        ValueError: squares that do not fit 28 pixels.
    """

    def __init__(self, pool: int = 2, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        if pool < 1 or 28 % pool:
            raise ValueError(f"pool must divide 28, got {pool}")
        self.pool = pool
        self.input_shape = (1, 28 // pool, 28 // pool)

    def read(self, part: str) -> LabeledImages:
        """Read a whole part."""
        found = super().read(part)  # type: ignore[arg-type]
        small = interpolate(found.x.float(), scale_factor=1 / self.pool, mode="area")
        return LabeledImages(small.round().to(torch.uint8), found.y)


def scores(p: Tensor, y: Tensor, other: Tensor | None = None) -> dict[str, float]:
    """Quality of predictive probabilities.

    Args:
        p: the probabilities of the test images, ``[n, classes]``.
        y: their classes, ``[n]``.
        other: the probabilities of out-of-distribution images, ``[m, classes]``, or None.

    Returns:
        ``nll`` (nats), ``accuracy``, ``ece`` (15 bins, L1) and, with ``other``, ``auroc``: the probability that an
        out-of-distribution image has the greater predictive entropy.
    """
    from torchmetrics.functional.classification import binary_auroc, multiclass_calibration_error

    found = {
        "nll": float(-p.gather(-1, y.unsqueeze(-1)).clamp(min=1e-30).log().mean()),
        "accuracy": float((p.argmax(-1) == y).double().mean()),
        "ece": float(multiclass_calibration_error(p, y, num_classes=p.shape[-1], n_bins=15, norm="l1")),
    }
    if other is not None:
        entropy = torch.special.entr(torch.cat([p, other])).sum(-1)
        target = torch.arange(len(entropy), device=p.device) >= len(p)
        found["auroc"] = float(binary_auroc(entropy / entropy.max(), target.long()))
    return found


@torch.no_grad()
def network_scores(model: nn.Module, images: Images, batch_size: int) -> dict[str, float]:
    """Quality of a network itself, and ``train_nll``, its loss on the training images (nats)."""

    def logits(x: Tensor) -> Tensor:
        return torch.cat([model(part) for part in x.split(batch_size)])

    other = None if images.other is None else logits(images.other).double().softmax(-1)
    train = cross_entropy(logits(images.train.x), images.train.y)
    return {"train_nll": float(train)} | scores(logits(images.test.x).double().softmax(-1), images.test.y, other)
