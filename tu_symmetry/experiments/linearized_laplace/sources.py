"""What the commands of this paper read, trained networks and images, and how good a predictive is."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from tu_symmetry.datamodules import IDXDataModule, ImageDataModule
from tu_symmetry.datamodules.readers import LabeledImages
from tu_symmetry.evaluation import chosen_device
from tu_symmetry.tables.parts import digest_tensors


class SmallIDXDataModule(IDXDataModule):
    """An MNIST-like data set whose images are averaged over squares, and rounded to bytes again.

    Args:
        pool: height and width of the squares; 2 makes 14 x 14 pixels of 28 x 28.
        kwargs: of :class:`~tu_symmetry.datamodules.IDXDataModule`.

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


class Images:
    """Training, test and, if there are any, out-of-distribution images on one device.

    Args:
        data: what reads them.
        device: ``cpu``, ``cuda``, or ``auto`` for a GPU where there is one.

    Attributes:
        train_x: training images, in order; ``train_y`` their classes.
        test_x: test images; ``test_y`` their classes.
        other: out-of-distribution images, None without ``eval_ood``.
        sizes: numbers of images.
    """

    def __init__(self, data: ImageDataModule, device: str = "auto") -> None:
        self.device = chosen_device(device)
        data.prepare_data()
        self.train_x, self.train_y = data.train.x.to(self.device), data.train.y.to(self.device)
        self.test_x, self.test_y = data.test.x.to(self.device), data.test.y.to(self.device)
        self.other = data.ood.x.to(self.device) if data.eval_ood else None
        self.sizes = {"training": len(self.train_x), "test": len(self.test_x)}
        if self.other is not None:
            self.sizes["out-of-distribution"] = len(self.other)

    def digest(self) -> str:
        """Of all images and classes."""
        other = () if self.other is None else (self.other,)
        return digest_tensors(self.train_x, self.train_y, self.test_x, self.test_y, *other)


def scores(p: Tensor, y: Tensor, other: Tensor | None = None) -> dict[str, float]:
    """Quality of predictive probabilities.

    Args:
        p: of the test images, ``[n, classes]``.
        y: their classes, ``[n]``.
        other: of out-of-distribution images, ``[m, classes]``, or None.

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
    train = cross_entropy(logits(images.train_x), images.train_y)
    return {"train_nll": float(train)} | scores(logits(images.test_x).double().softmax(-1), images.test_y, other)
