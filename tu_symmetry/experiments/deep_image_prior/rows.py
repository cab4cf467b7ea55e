"""The rows of the table: what is kept of each problem, and how its images are scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tu_symmetry.files import read_tensors, write_safetensors
from tu_symmetry.laplace.dual.laplace import gaussian_log_density
from tu_symmetry.routines.deep_image_prior import Reconstructions, image_quality
from tu_symmetry.tables.outcome import Outcome, Parts, digest_tensors

ARRAYS = "arrays.safetensors"

DIP = "DIP (variance 1)"
DIP_FITTED = "DIP (fitted variance)"
DROPOUT = "MC-dropout DIP"
EVIDENCE = "linearized (evidence)"
TV_SEED = "linearized (TV-PredCP, Jacobian weight 1)"
TV_CODE = "linearized (TV-PredCP, Jacobian weight lambda)"
JOINT = "linearized (evidence at theta*)"
ROWS = (DIP, DIP_FITTED, DROPOUT, EVIDENCE, TV_SEED, TV_CODE, JOINT)


@dataclass(frozen=True)
class Scored:
    """Which patches are scored, and how, as in the authors' code for the walnut.

    Attributes:
        inner: first and last row and column of the part that is scored, in whole patches; None for all.
        reweighted: halve the covariances of different pixels of a patch.
    """

    inner: tuple[int, int] | None = None
    reweighted: bool = False


class Rows:
    """What is kept of one problem for the table and the figures."""

    def __init__(self, found: Reconstructions, index: int) -> None:
        self.problem, self.index = found.problem, index
        self.entries: list[dict[str, Any]] = []
        self.arrays: dict[str, Tensor] = {}
        self.histories: dict[str, list[float]] = {}
        self.hyperparameters: dict[str, dict[str, float]] = {}

    def add(self, row: str, mean: Tensor, covariance: Tensor, extra: float, **further: Any) -> None:
        """Score the image: log-likelihood a pixel, PSNR, SSIM, and the normalized errors for the calibration."""
        problem, index = self.problem, self.index
        truth = problem.truth[index : index + 1].double()
        mean, covariance = mean.cpu().view(truth.shape), covariance.cpu()
        error = (truth - mean).reshape(-1)
        psnr, ssim = image_quality(mean, truth)
        deviation = (covariance.diagonal().clamp(min=0) + extra).sqrt()
        self.keep(row, mean=mean[0], deviation=deviation.view(truth.shape[1:]))
        self.entries.append(
            {
                "row": row,
                "problem": index,
                "image": int(problem.image[index]),
                "num_angles": int(problem.num_angles[index]),
                "noise": float(problem.noise[index]),
                "log_likelihood": gaussian_log_density(error, covariance, extra) / error.numel(),
                "psnr": float(psnr[0]),
                "ssim": float(ssim[0]),
                "normalized_errors": (error / deviation).tolist(),
                **further,
            }
        )

    def add_patches(
        self,
        row: str,
        mean: Tensor,
        drawn: Tensor,
        sides: Sequence[int],
        extra: float,
        scored: Scored | None = None,
        **further: Any,
    ) -> None:
        """Score the image by its patches, from deviations ``[samples, pixels]``; none of them for ``extra`` alone."""
        truth = self.problem.truth[self.index].double()
        mean = mean.double().cpu().view(truth.shape)
        part = slice(*scored.inner) if scored is not None and scored.inner is not None else slice(None)
        seen = (image[None, :, part, part] for image in (mean, truth))
        psnr, ssim = (float(q[0]) for q in image_quality(*seen))
        spread = torch.zeros(truth.numel(), dtype=torch.float64, device="cpu")
        for part in drawn.split(256):
            spread += part.double().square().sum(0) / max(1, len(drawn))
        self.keep(row, mean=mean, deviation=(spread + extra).sqrt().view(truth.shape))
        facts = {"row": row, "problem": self.index, "psnr": psnr, "ssim": ssim, **further}
        for side in sides:
            density = patch_log_density(truth - mean, drawn, side, extra, scored=scored)
            self.entries.append(facts | {"patch": side, "log_likelihood": density})

    def keep(self, row: str, **images: Tensor) -> None:
        """Images for the figures, by what they show."""
        for what, image in images.items():
            self.arrays[f"{self.index}.{ROWS.index(row)}.{what}"] = image.float().cpu().contiguous()

    def fitted(self, row: str, history: list[float], hyperparameters: dict[str, float]) -> None:
        """How the evidence of a row was optimized, and what it has chosen."""
        self.histories[row], self.hyperparameters[row] = history, hyperparameters


class Kept:
    """The rows of all problems, each in the ``parts`` of ``out`` as soon as it is made, with its images beside it."""

    def __init__(self, out: Path, reconstructions: Path, model: nn.Module, **options: Any) -> None:
        self.out, self.found = out, Reconstructions.load(reconstructions)
        given = digest_tensors(*self.found.states.values(), self.found.problem.truth, self.found.problem.measurements)
        self.parts = Parts(out / "parts", [given, repr(model), repr(options)])
        self.entries: list[dict[str, Any]] = []
        self.arrays: dict[str, Tensor] = {}
        self.histories: dict[str, dict[str, list[float]]] = {}
        self.hyperparameters: dict[str, dict[str, dict[str, float]]] = {}

    def take(self, name: str, index: int, make: Callable[..., dict[str, Any] | None], *arguments: Any) -> Any:
        """What ``make(rows, *arguments)`` returns, which adds rows of a problem, and is called where none are kept."""
        images = self.parts.path(name).with_suffix(".safetensors")

        def made() -> dict[str, Any]:
            rows = Rows(self.found, index)
            further = make(rows, *arguments)
            write_safetensors(images, rows.arrays)
            facts = {what: getattr(rows, what) for what in ("entries", "histories", "hyperparameters")}
            return facts | {"further": further}

        part = self.parts.take(name, made)
        self.entries += part["entries"]
        self.arrays |= read_tensors(images)
        for own, new in ((self.histories, part["histories"]), (self.hyperparameters, part["hyperparameters"])):
            for row, value in new.items():
                own.setdefault(row, {})[str(index)] = value
        return part["further"]

    def saved(self, headline: str, **further: Any) -> Outcome:
        """Write the images of all; everything else is the outcome."""
        write_safetensors(self.out / ARRAYS, self.arrays)
        count = len({e["problem"] for e in self.entries})
        return Outcome({"rows": self.entries, **further}, f"{count} posteriors {headline}")


def patch_log_density(
    error: Tensor, samples: Tensor, side: int, extra_variance: float, *, scored: Scored | None = None
) -> float:
    """Log density a pixel (nats) of an image under Gaussians of its patches, with the samples' covariances.

    Without samples pixels are independent, of the extra variance alone.

    ``error`` is the truth less the mean, ``[1, height, width]``; samples are deviations from the mean, ``[samples,
    height * width]``. Patches at the right and lower edge are smaller. ``scored``: see :class:`Scored`.
    """
    _, height, width = error.shape
    index = torch.arange(height * width, device="cpu").view(height, width)
    first, last = (0, max(height, width)) if scored is None or scored.inner is None else scored.inner
    if first >= min(last, height, width):
        raise ValueError(f"inner={(first, last)} lies outside the image of {height} x {width} pixels")
    total, pixels = 0.0, 0
    for top in range(first // side * side, min(last, height), side):
        for left in range(first // side * side, min(last, width), side):
            own = index[top : top + side, left : left + side].reshape(-1)
            drawn = samples[:, own].double()
            covariance = drawn.mT @ drawn / max(1, len(drawn))
            if scored is not None and scored.reweighted:
                covariance = 0.5 * (covariance + torch.diag(covariance.diagonal()))
            total += gaussian_log_density(error.reshape(-1)[own], covariance, extra_variance)
            pixels += len(own)
    return total / pixels
