"""Predictions under a shift of the images: networks and their linearized Laplace on test images that are rotated.

The kind of figure that the talk on arXiv 2206.08900 shows of linearized Laplace under distribution shift (there of
another work, a ResNet-18 with cross-validated precisions), for precisions that the evidence chooses in each of the
paper's ways.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from tu_symmetry.datamodules import ImageDataModule
from tu_symmetry.experiments.linearized_laplace.choices import NETWORK, Choice, parse_all
from tu_symmetry.experiments.linearized_laplace.evidence import Settings, Trained, Work, approximate, groups_of
from tu_symmetry.experiments.linearized_laplace.sources import scores
from tu_symmetry.experiments.study import Images
from tu_symmetry.files import digest_folder
from tu_symmetry.laplace.predictive import Drawer, tempered_predictives
from tu_symmetry.laplace.report import LaplaceHurtsWarning
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.reporting.progress import Display
from tu_symmetry.tables.outcome import Outcome
from tu_symmetry.tables.parts import Parts, digest_tensors

CHOICES = ("map/single", "map/per_group", "tangent_mode/single", "tangent_mode/per_group")
CALIBRATED = "/calibrated"  # behind a choice: with the temperature of the unrotated validation images
ANGLES = tuple(range(0, 181, 30))
DEFAULTS = Settings()


def rotate(x: Tensor, angle: float) -> Tensor:
    """Images ``[n, channels, size, size]`` turned counterclockwise about their middle, bilinear between the pixels.

    What comes from outside is black, the smallest value of the images (0, or what normalization makes of it).

    Args:
        x: square images.
        angle: in degrees; multiples of 90 move every pixel to another one exactly.

    Raises:
        ValueError: images that are not square.
    """
    if x.ndim != 4 or x.shape[-1] != x.shape[-2]:
        raise ValueError(f"images have shape {tuple(x.shape)}, and [n, channels, size, size] are rotated")
    quarters, rest = divmod(angle, 90)
    x = torch.rot90(x, int(quarters), (2, 3))
    if rest == 0:
        return x
    black, turn = x.amin(), math.radians(rest)
    matrix = x.new_tensor([[math.cos(turn), -math.sin(turn), 0.0], [math.sin(turn), math.cos(turn), 0.0]])
    where = affine_grid(matrix.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return grid_sample(x - black, where, align_corners=False) + black


def measure_rotations(
    out: Path,
    networks: Trained,
    data: ImageDataModule,
    settings: Settings = DEFAULTS,
    choices: Sequence[str] = CHOICES,
    angles: Sequence[float] = ANGLES,
    device: str = "auto",
) -> Outcome:
    """Test NLL, accuracy and calibration error at every angle: of the networks, and of every choice of precisions.

    Each choice twice: the posterior of the evidence, and with the temperature that ``calibrate`` chooses on the
    validation images, which are not rotated. Every row of every network is kept in ``out/parts``.

    Args:
        out: folder of the results.
        networks: trained networks of one architecture.
        data: what they were trained on, with ``val_size`` images for the temperature; test images are rotated.
        settings: how the evidence is optimized.
        choices: ``tangent_mode`` or ``map``, ``/single`` or ``/per_group``, and ``/flat`` for no hyperprior.
        angles: degrees, counterclockwise.
        device: ``cpu``, ``cuda``, or ``auto`` for a GPU where there is one.

    Raises:
        ValueError: a choice that is none, no validation images, no angle.
        FileError: ``out`` holds parts that were made from something else.
    """
    rows = parse_all(choices)
    if data.val_size < 1:
        raise ValueError("data: val_size must be at least 1, for the temperature is chosen on validation images")
    if not angles:
        raise ValueError("angles: name at least one")
    images = Images(data, device)
    held_out = (data.val.x.to(images.device), data.val.y.to(images.device))
    turned = {f"{angle:g}": rotate(images.test.x, angle) for angle in angles}
    states = list(SampleStore.open(networks.samples, like=networks.model.state_dict()))
    identity = [
        settings.__dict__, images.digest(), digest_tensors(*held_out), list(turned), repr(networks.model),
        digest_folder(networks.samples),
    ]  # fmt: skip
    parts, graphs = Parts(out / "parts", identity), dict[str, Any]()
    results: dict[str, list[Any]] = {}
    keys = [NETWORK, *(choice.key for choice in rows)]
    with Display().track("rotations", len(states) * len(keys)) as tracker:
        for k, state in enumerate(states):
            work = Work(networks.model, state, images, settings, "network", graphs)
            for done, key in enumerate(keys, 1):
                found = parts.take(f"{k}-{key}", partial(_rows, work, key, held_out, turned))
                for name, row in found.items():
                    results.setdefault(name, []).append(row)
                tracker.update(k * len(keys) + done, choice=key)
    every = [row for key, runs in results.items() if key != NETWORK for row in runs]
    return Outcome(
        {
            "angles": list(angles),
            "rows": results,
            "parameters": sum(p.numel() for p in networks.model.parameters()),
            "sizes": images.sizes | {"validation": len(held_out[0])},
        },
        f"{len(states)} networks; {sum(not row['converged'] for row in every)} of {len(every)} rows from an evidence "
        "that had not converged",
    )


def _rows(
    work: Work, key: str, held_out: tuple[Tensor, Tensor], turned: dict[str, Tensor]
) -> dict[str, dict[str, Any]]:
    """Scores of one network: its own, or those of one choice by the evidence and calibrated, from one pass for both."""
    y, size, samples = work.images.test.y, work.settings.batch_size, work.settings.num_samples

    def at_angles(predict: Callable[[Tensor], list[Tensor]]) -> list[dict[str, Any]]:
        found: dict[str, list[Tensor]] = {}
        for angle, x in turned.items():
            batches = [predict(part) for part in x.split(size)]
            found[angle] = [torch.cat(own).double() for own in zip(*batches, strict=True)]
        count = len(next(iter(found.values())))
        return [{"by_angle": {angle: scores(p[k], y) for angle, p in found.items()}} for k in range(count)]

    if key == NETWORK:
        with torch.no_grad():
            (itself,) = at_angles(lambda x: [work.model(x).softmax(-1)])
        return {NETWORK: itself | {"converged": True}}
    la, result = approximate(work.subject, work.settings, Choice.parse(key))
    facts = {
        "converged": result.converged,
        "groups": groups_of(la),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LaplaceHurtsWarning)  # the table says it
        temperature = la.calibrate([held_out], num_samples=samples).temperature
    predict = partial(
        tempered_predictives,
        la.fitted,
        Drawer(),
        temperatures=[1.0, temperature],
        num_samples=samples,
        link_approx="mc",
        covariance="auto",
        seed=0,
    )
    plain, cooled = at_angles(predict)
    return {key: facts | plain, key + CALIBRATED: facts | {"temperature": temperature} | cooled}
