"""Commands of papers give on a GPU what they give on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, TensorDataset

from tu_symmetry.datamodules.tomography import measured, strip_projector
from tu_symmetry.experiments.deep_image_prior import UNet, dropout_posterior, linearized_posterior, sampled_posterior
from tu_symmetry.experiments.symmetry_aware import SmallLeNet
from tu_symmetry.experiments.symmetry_aware.evaluation import evaluate
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.routines.deep_image_prior import Reconstructions

pytestmark = pytest.mark.usefixtures("cuda")


class Digits(LightningDataModule):
    """Random images, and others that are out of distribution."""

    def test_dataloader(self) -> list[DataLoader[Any]]:
        generator = torch.Generator().manual_seed(0)
        images = torch.rand(2, 24, 1, 28, 28, generator=generator)
        labels = torch.arange(24) % 10
        return [DataLoader(TensorDataset(x, labels), batch_size=10) for x in images]


def assert_close(found: Any, expected: Any) -> None:
    """Equal trees whose numbers agree to the rounding of single precision."""
    (a, one), (b, two) = (tree_flatten(tree) for tree in (found, expected))
    assert one == two
    for x, y in zip(a, b, strict=True):
        assert x == (pytest.approx(y, rel=1e-4, abs=1e-6, nan_ok=True) if isinstance(y, float) else y)


def test_posterior_quality(tmp_path: Path) -> None:
    def stored(name: str, count: int) -> Path:
        store = SampleStore.create(tmp_path / name / "samples", architecture="SmallLeNet", method="test")
        store.append([SmallLeNet().state_dict() for _ in range(count)], step=range(count))
        return tmp_path / name

    torch.manual_seed(0)
    reference, runs = stored("reference", 7), {"a": [stored(f"run_{k}", 4) for k in range(2)]}
    found = {
        device: evaluate(
            tmp_path / "out", SmallLeNet(), Digits(), reference, runs, runs, ood={"x": Digits()}, num_samples=4,
            resamples=4, device=device,
        ).results
        for device in ("cpu", "cuda", "auto")
    }  # fmt: skip
    assert_close(found["cuda"], found["cpu"])
    assert found["auto"] == found["cuda"]


def test_deep_image_priors(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    truth = (torch.rand(1, 1, 8, 8, generator=generator, dtype=torch.float64) > 0.6).double()
    problem = measured(truth, [3], {4: strip_projector(8, 4, 11, 1.1)}, [0.1], bin_width=1.1)
    torch.manual_seed(0)
    plain, dropout = UNet((4, 4), (2,)), UNet((4, 4), (2,), dropout=0.2)
    found: dict[str, dict[str, Any]] = {}
    for name, model in (("plain", plain), ("dropout", dropout)):
        states = {n: t.detach().unsqueeze(0) for n, t in model.state_dict().items()}
        images = model(problem.back_projection.float()).detach()
        Reconstructions(states, images, torch.zeros(1), problem).save(tmp_path / name)
    for device in ("cpu", "cuda"):
        linearized = linearized_posterior(tmp_path / device, tmp_path / "plain", plain, 1e-3, joint=True, device=device)
        drawn = dropout_posterior(tmp_path, tmp_path / "dropout", dropout, 4000, device=device)
        sampled = sampled_posterior(
            tmp_path, tmp_path / "plain", plain, num_steps=2, num_probes=4, num_samples=40, rank=10, patches=[1, 2],
            max_iterations=200, device=device,
        )  # fmt: skip
        found[device] = {"linearized": linearized.results, "sampled": sampled.results}
        for entry in found[device].values():
            entry.pop("seconds", None)
        found[device]["masks"] = drawn.results["rows"][0]
    masks = [found[device].pop("masks") for device in ("cpu", "cuda")]  # other masks: 4,000 of them
    assert masks[1]["psnr"] == pytest.approx(masks[0]["psnr"], rel=0.02)
    assert masks[1]["log_likelihood"] == pytest.approx(masks[0]["log_likelihood"], rel=0.05)
    assert_close(found["cuda"], found["cpu"])
