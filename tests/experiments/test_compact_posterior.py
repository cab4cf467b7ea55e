"""The recipes of arXiv 2401.00611: every file is a configuration of its command, and the demo runs end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_runs import RECIPES, commands_of, run_table

from tu_symmetry.datamodules import DigitsDataModule
from tu_symmetry.experiments.compact_posterior import compare
from tu_symmetry.experiments.compact_posterior.posteriors import Runs, weight_space
from tu_symmetry.posterior.compact import CompactPosterior
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.symmetry.action import permute_tensors
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.elements import invert, random_permutation
from tu_symmetry.tables.logs import last_values, logged_curve
from tu_symmetry.tables.models import MLP

PAPER = RECIPES / "compact_posterior"
DIGITS = PAPER / "digits"
SMALL = {"data.train_size": 150, "data.test_size": 60, "model.hidden": [8]}
TINY = [
    *(f"{name}.{'' if key.startswith('data') else 'routine.'}{key}={value}"
      for name in ("ensemble", "hmc", "vi") for key, value in SMALL.items()),
    *(f"{name}.command.{key}={value}"
      for name in ("comparison", "pruning", "interpolation") for key, value in SMALL.items()),
    "ensemble.routine.num_members=3",
    "ensemble.data.orders=3",
    "ensemble.trainer.max_epochs=4",
    "hmc.trainer.max_epochs=86",
    "hmc.routine.burn_in=2",
    "hmc.routine.leapfrog_steps=4",
    "vi.trainer.max_epochs=4",
    "comparison.command.num_samples=5",
    "comparison.command.repeats=2",
    "pruning.command.num_samples=3",
    "pruning.command.keep=[1.0, 0.5]",
    "interpolation.command.points=5",
    "interpolation.command.pairs=2",
]  # fmt: skip


def test_the_reference_predictive_of_mnist_is_the_papers() -> None:
    """The 1,000 samples linspace(500, 9899) of the chain's 9,900 after burn-in are stored, and all stored are used."""
    commands = commands_of(PAPER / "mnist")
    content = commands["hmc"].content
    options = content["routine"]["init_args"]
    assert content["trainer"]["max_epochs"] - options["burn_in"] == 9900
    assert options["stored"] == [500, 9899, 1000]
    (fit,) = [c for c in content["trainer"]["callbacks"] if c["class_path"].endswith("FitCompactPosterior")]
    assert "num_samples" not in fit["init_args"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    out = tmp_path_factory.mktemp("tiny")
    results, text = run_table(DIGITS, out, TINY)
    return out, results, text


def test_digits_run_end_to_end(tiny: tuple[Path, dict[str, Any], str]) -> None:
    out, results, text = tiny
    found = results["comparison"]["rows"]
    assert found["agreement"]["hmc/sample"] == 1 and found["tv"]["hmc/sample"] == 0
    for row in ("agreement", "tv", "accuracy", "mean_accuracy"):
        assert all(v is None or 0 <= v <= 1 for v in found[row].values())
    assert set(found["mean_accuracy"]) == {"hmc/q_d", "hmc/q_r", "ensemble/q_d", "ensemble/q_r", "vi/q"}
    for row in ("agreement", "tv", "accuracy", "nll", "storage"):
        assert {
            f"{run}/{rival}"
            for run in ("hmc", "ensemble")
            for rival in ("member", "noise", "q_d, low rank", "q_r, low rank")
        } <= set(found[row])
    assert [found["storage"][f"ensemble/{c}"] for c in ("sample", "q_r", "member", "q_r, low rank")] == [3, 2, 1, 3]
    assert found["storage"]["hmc/q_d, low rank"] == found["storage"]["hmc/as_many"] == 21
    assert "0.8249" in text and f"{found['agreement']['hmc/q_r']:.4f}" in text  # the paper's value and ours
    runs = Runs(out / "none", out / "ensemble", out / "vi")  # without the chain: the same numbers of what needs none
    model, data = MLP(64, 10, [8]), DigitsDataModule(train_size=150, test_size=60)
    alone = compare(out, model, data, runs, num_samples=5, repeats=2, hmc=False).results["rows"]
    assert set(alone) == {"accuracy", "nll", "mean_accuracy", "storage"}
    for row, values in alone.items():
        assert values == {column: found[row][column] for column in found[row] if not column.startswith("hmc")}
    q_r = CompactPosterior.load(out / "ensemble" / "q_r.safetensors")
    assert len(q_r.metadata["transpositions"]) == 3 and q_r.metadata["transpositions"][0] == 0  # the reference
    assert len(SampleStore.open(out / "hmc" / "samples")) == 84
    _, acceptance = logged_curve(out / "hmc", "hmc/acceptance")
    assert len(acceptance) == 86 and all(0 <= a <= 1 for a in acceptance)
    assert any(name.startswith("hmc/ess") for name in last_values(out / "hmc"))


def test_digits_report(tiny: tuple[Path, dict[str, Any], str]) -> None:
    out, _, _ = tiny
    text = (out / "report" / "report.md").read_text()
    assert "acceptance rate" in text and "0.8249" in text and "Ensemble: q_r, low rank" in text
    assert "| HMC, ensemble |" in text
    for name in ("sigma.png", "pruning.png", "interpolation.png", "dynamics.png"):
        assert name in text
        assert (out / "report" / name).read_bytes().startswith(b"\x89PNG")


def test_pruning_keeps_everything_at_one(tiny: tuple[Path, dict[str, Any], str]) -> None:
    _, results, _ = tiny
    curves = results["pruning"]["curves"]
    assert curves["ensemble mean, own σ"][0] == results["comparison"]["rows"]["mean_accuracy"]["ensemble/q_r"]
    assert curves["ensemble mean, HMC's σ"][0] == curves["ensemble mean, random order"][0]


def test_interpolations_start_and_end_alike(tiny: tuple[Path, dict[str, Any], str]) -> None:
    """An alignment changes no function: the losses at both ends are the same before and after."""
    _, results, _ = tiny
    for source in ("ensemble", "hmc"):
        before, after = (results["interpolation"][f"{source}/{when}"]["loss"] for when in ("before", "after"))
        for a, b in zip(before, after, strict=True):
            assert (a[0], a[-1]) == pytest.approx((b[0], b[-1]), rel=1e-5)


def test_the_dynamics_end_at_the_interpolation(tiny: tuple[Path, dict[str, Any], str]) -> None:
    """The last snapshot is the trained ensemble: the losses of its ends and middles are those of the segments."""
    _, results, _ = tiny
    found = results["interpolation"]
    assert found["dynamics"]["steps"] == [2, 4, 6, 8]  # two batches of 100 out of 150 in an epoch
    for when in ("before", "after"):
        for k, losses in enumerate(found[f"ensemble/{when}"]["loss"]):
            own = [found["dynamics"]["training"][name][k][-1] for name in ("W_0", when, "W_1")]
            assert own == pytest.approx([losses[0], losses[2], losses[-1]], rel=1e-5)
    assert set(found["dynamics"]["test"]) == {"W_0", "W_1", "before", "after"}


def test_weight_space_sees_a_copy_of_permuted_units() -> None:
    """A posterior and the same with permuted units: apart before, equal after; another's scale is no permutation's."""
    model = MLP(4, 3, [6]).double()
    graph = discover_symmetries(model, torch.zeros(2, 4, dtype=torch.float64))
    g = torch.Generator().manual_seed(0)
    mean, std = ({n: torch.rand(t.shape, generator=g).double() for n, t in model.state_dict().items()} for _ in "ab")
    p = random_permutation(graph, generator=g)
    moved = [permute_tensors(graph, p, part) for part in (mean, {n: 3 * t for n, t in std.items()})]
    found = weight_space(graph, {"a": CompactPosterior(mean, std), "b": CompactPosterior(*moved)}, {"b": invert(p)})
    assert list(found) == ["a, b"] and found["a, b"]["scale"] == pytest.approx([1 / 3])
    (far, near), (low, one) = found["a, b"]["distance"], found["a, b"]["order"]
    assert far > 0.1 and near == 0 and low < 0.9 and one == pytest.approx(1)
