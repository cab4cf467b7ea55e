"""Simulated computed tomography: images seen through few line integrals, with noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from tu_symmetry.datamodules.readers import DataFileError, IDXName, read_idx_images

_NARROW = 1e-3  # a projected pixel side below this is taken as this wide: an error of 1e-7


@dataclass(eq=False)  # not frozen, since Lightning's plugins for other precisions write into a copy
class TomographyProblem:
    """Measurements to reconstruct images from, one entry for each pair of an image and a geometry.

    Measurements of different length are padded with zeros; rows of the operator are zero there.

    Attributes:
        truth: images ``[problems, 1, height, width]``, values in [0, 1].
        operator: line integrals ``[problems, values, pixels]``, dense or sparse (``sparse_coo``).
        measurements: ``[problems, values]``.
        counts: how many measurements are real, int64 ``[problems]``.
        back_projection: filtered back-projections ``[problems, 1, height, width]``.
        image: number of the image in its data set, int64 ``[problems]``.
        num_angles: number of angles, int64 ``[problems]``.
        noise: standard deviation of the noise over the mean absolute measurement, float64 ``[problems]``.
    """

    truth: Tensor
    operator: Tensor
    measurements: Tensor
    counts: Tensor
    back_projection: Tensor
    image: Tensor
    num_angles: Tensor
    noise: Tensor

    def __len__(self) -> int:
        return len(self.truth)

    def to(self, device: torch.device) -> TomographyProblem:
        """The same on a device."""
        return replace(self, **{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def strip_projector(size: int, num_angles: int, num_bins: int, bin_width: float) -> Tensor:
    """Parallel-beam projections of unit pixels, averaged over each detector bin: ``[angles * bins, size * size]``.

    A square seen under an angle is a trapezoid: two boxes of widths ``|cos|`` and ``|sin|``, convolved. Its integral
    over a bin is a second difference of ``max(t, 0)^2 / 2``. Angles are equidistant in ``[0, pi)``, from 0, where the
    detector lies along a row of the image.
    """
    if min(size, num_angles, num_bins) < 1 or not bin_width > 0:
        raise ValueError(f"a geometry needs positive sizes: {size=}, {num_angles=}, {num_bins=}, {bin_width=}")
    angles = torch.arange(num_angles, dtype=torch.float64, device="cpu") * math.pi / num_angles
    along = torch.arange(size, dtype=torch.float64, device="cpu") - (size - 1) / 2
    rows, columns = torch.meshgrid(-along, along, indexing="ij")  # the first row is the upper one
    edges = (torch.arange(num_bins + 1, dtype=torch.float64, device="cpu") - num_bins / 2) * bin_width
    found = []
    for angle in angles:
        center = columns.reshape(-1) * angle.cos() + rows.reshape(-1) * angle.sin()
        a, b = angle.cos().abs().clamp(min=_NARROW), angle.sin().abs().clamp(min=_NARROW)
        t = edges.unsqueeze(1) - center
        half, cross = (a + b) / 2, (a - b) / 2
        ramps = [(t + shift).clamp(min=0).square() / 2 for shift in (half, cross, -cross, -half)]
        mass = (ramps[0] - ramps[1] - ramps[2] + ramps[3]) / (a * b)
        found.append((mass[1:] - mass[:-1]).clamp(min=0) / bin_width)
    return torch.cat(found)


def back_projected(measurements: Tensor, operator: Tensor, num_angles: int, bin_width: float) -> Tensor:
    """Filtered back-projection ``[pixels]`` with the ramp filter, of ``[num_angles * bins]`` measurements."""
    sinogram = measurements.view(num_angles, -1)
    length = 2 ** math.ceil(math.log2(2 * sinogram.shape[1]))
    # the ramp's impulse response on the bins: its Fourier transform is |f| without the offset of a sampled ramp
    place = torch.fft.fftfreq(length, 1 / length, dtype=torch.float64).round()
    response = torch.where(place.long() % 2 != 0, -1 / (math.pi * place.clamp(min=-length)).square(), 0.0)
    response[0] = 0.25
    ramp = torch.fft.fft(response).real.to(sinogram) / bin_width
    filtered = torch.fft.ifft(torch.fft.fft(sinogram, n=length) * ramp).real[:, : sinogram.shape[1]]
    return math.pi / num_angles * bin_width * (filtered.reshape(-1) @ operator)


def repeated(problem: TomographyProblem, steps: int) -> DataLoader[Any]:
    """A loader whose batches are the whole problem, ``steps`` times."""
    problems: Any = [problem] * steps
    return DataLoader(problems, batch_size=1, collate_fn=itemgetter(0))


class _ProblemDataModule(LightningDataModule):
    """The whole problem at every step, ``steps_per_epoch`` times an epoch; the routine copies it to the device once."""

    problem: TomographyProblem | None = None

    def __init__(self, steps_per_epoch: int) -> None:
        super().__init__()
        if steps_per_epoch < 1:
            raise ValueError(f"steps_per_epoch={steps_per_epoch} has to be at least 1")
        self.steps_per_epoch = steps_per_epoch

    def setup(self, stage: str | None = None) -> None:
        """Read and measure once."""
        if self.problem is None:
            self.problem = self.read()

    def read(self) -> TomographyProblem:
        """The problem."""
        raise NotImplementedError

    def train_dataloader(self) -> DataLoader[Any]:
        """The whole problem, ``steps_per_epoch`` times."""
        assert self.problem is not None
        return repeated(self.problem, self.steps_per_epoch)

    def test_dataloader(self) -> DataLoader[Any]:
        """The whole problem, once."""
        assert self.problem is not None
        return repeated(self.problem, 1)


class TomographyDataModule(_ProblemDataModule):
    """Test images of an MNIST-like data set as tomography problems: every image with every geometry and noise.

    ``y = A x + noise * mean|A x| * eps`` with ``eps`` standard normal from ``numpy.random.default_rng(seed + image)``.
    A batch is the whole :class:`TomographyProblem`, which is ``problem`` after ``setup``. ``images`` are their numbers,
    or how many from the first; ``bin_width`` is in pixels. For ``root`` see
    :class:`~tu_symmetry.datamodules.IDXDataModule`.
    """

    def __init__(
        self,
        root: str | Path = "data",
        dataset: IDXName = "kmnist",
        *,
        images: int | list[int] = 2,
        num_angles: int | list[int] = 5,
        noise: float | list[float] = 0.1,
        num_bins: int = 41,
        bin_width: float = 0.9658,
        steps_per_epoch: int = 500,
        seed: int = 1,
    ) -> None:
        super().__init__(steps_per_epoch)
        self.root, self.dataset, self.seed = Path(root), dataset, seed
        self.images = list(range(images)) if isinstance(images, int) else list(images)
        self.num_angles = [num_angles] if isinstance(num_angles, int) else list(num_angles)
        self.noise = [float(noise)] if isinstance(noise, (int, float)) else [float(n) for n in noise]
        if not self.images or not self.num_angles or not self.noise or min(self.num_angles) < 1 or min(self.images) < 0:
            raise ValueError(f"nothing to measure: images {images}, num_angles {num_angles}, noise {noise}")
        if min(self.noise) < 0 or not all(math.isfinite(n) for n in self.noise):
            raise ValueError(f"noise is a share of the mean measurement, at least 0; got {noise}")
        self.num_bins, self.bin_width = num_bins, bin_width

    def read(self) -> TomographyProblem:
        """Read the images and measure them."""
        found = read_idx_images(self.root, self.dataset, "test").x
        if max(self.images) >= len(found):
            raise DataFileError(f"image {max(self.images)} is wanted, {self.dataset} has {len(found)} test images")
        return measured(
            found[self.images].double() / 255,
            self.images,
            {a: strip_projector(found.shape[-1], a, self.num_bins, self.bin_width) for a in self.num_angles},
            self.noise,
            bin_width=self.bin_width,
            seed=self.seed,
        )


_WALNUT = {
    "operator.npz": "the projection matrix [values, height * width] of one slice, as scipy.sparse.save_npz writes it",
    "measurements.npy": "the measured line integrals [values]",
    "truth.npy": "the reconstruction from all projections [height, width], in the same units",
}


class ScannedTomographyDataModule(_ProblemDataModule):
    """One measured slice (the walnut) from three files that the user has made of downloaded data.

    In ``root/walnut``: ``operator.npz``, ``measurements.npy`` and ``truth.npy``. There is no filtered back-projection
    for an arbitrary geometry: the network's input is ``A^T y``, scaled to fit the measurements. The operator stays
    sparse (a dense one of 7,680 measurements of 501 x 501 pixels has 7.7 GB in float32).
    """

    def __init__(self, root: str | Path = "data", *, num_angles: int = 60, steps_per_epoch: int = 100) -> None:
        super().__init__(steps_per_epoch)
        self.root, self.num_angles = Path(root), num_angles

    def read(self) -> TomographyProblem:
        """Read the files."""
        folder = self.root / "walnut"
        lacking = [f"{folder / name}: {what}" for name, what in _WALNUT.items() if not (folder / name).is_file()]
        if lacking:
            raise DataFileError(
                "these files are missing; make them from Zenodo records 2686726 (the scans) and 7282279, which this "
                f"library does not download: {'; '.join(lacking)}"
            )
        operator = scipy.sparse.load_npz(folder / "operator.npz")
        measurements, truth = (np.load(folder / name) for name in ("measurements.npy", "truth.npy"))
        if truth.ndim != 2 or operator.shape != (measurements.size, truth.size):
            raise DataFileError(
                f"{folder}: an operator {operator.shape}, {measurements.size} measurements and an image {truth.shape} "
                "do not belong together; the operator is [values, height * width]"
            )
        y = measurements.reshape(-1).astype(np.float64)
        back = operator.T @ y
        seen = operator @ back
        back = back * float(seen @ y) / max(float(seen @ seen), 1e-300)
        found = operator.astype(np.float32).tocoo()
        places = torch.from_numpy(np.stack([np.zeros_like(found.row), found.row, found.col]).astype(np.int64))
        values = torch.from_numpy(found.data)
        entries = torch.sparse_coo_tensor(places, values, (1, *found.shape), check_invariants=True)
        return TomographyProblem(
            truth=torch.from_numpy(truth.astype(np.float32))[None, None],
            operator=entries.coalesce(),
            measurements=torch.from_numpy(y.astype(np.float32))[None],
            counts=torch.tensor([y.size], device="cpu"),
            back_projection=torch.from_numpy(back.astype(np.float32)).view(1, 1, *truth.shape),
            image=torch.zeros(1, dtype=torch.int64, device="cpu"),
            num_angles=torch.tensor([self.num_angles], device="cpu"),
            noise=torch.full((1,), torch.nan, dtype=torch.float64, device="cpu"),
        )


def measured(
    images: Tensor,
    numbers: Sequence[int],
    operators: dict[int, Tensor],
    noise: Sequence[float],
    *,
    bin_width: float = 1.0,
    seed: int = 1,
) -> TomographyProblem:
    """Simulate the measurements of images ``[n, 1, height, width]``, float64, every one with every operator and noise.

    Operators are ``[values, pixels]`` by their number of angles; the numbers of the images seed the noise, which is a
    standard deviation over the mean absolute measurement.
    """
    most = max(len(a) for a in operators.values())
    rows: list[tuple[Tensor, ...]] = []
    for level in noise:
        for angles, operator in operators.items():
            padded = torch.zeros(most, operator.shape[1], device="cpu")
            padded[: len(operator)] = operator.float()
            for number, image in zip(numbers, images, strict=True):
                clean = operator @ image.reshape(-1)
                drawn = torch.from_numpy(np.random.default_rng(seed + number).normal(size=len(clean)))
                y = clean + level * clean.abs().mean() * drawn
                values = torch.zeros(most, device="cpu")
                values[: len(y)] = y.float()
                back = back_projected(y, operator, angles, bin_width).view(image.shape).float()
                count, own, seen = torch.tensor([len(y), number, angles], device="cpu")
                share = torch.tensor(level, device="cpu").double()
                rows.append((image.float(), padded, values, count, back, own, seen, share))
    return TomographyProblem(*(torch.stack(list(column)) for column in zip(*rows, strict=True)))
