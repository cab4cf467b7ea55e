"""The toy posterior and the representation cost: recipes at toy size, and the parts that their numbers rest on."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.tables.engine import run_table
from tu_symmetry.tables.progress import Display
from tu_symmetry.tables.recipe import load_recipe, parse
from tu_symmetry.tables.representation import ConvNet, RunsOptions
from tu_symmetry.tables.stage import stage_kind
from tu_symmetry.tables.toy_posterior import (
    FORMS,
    NetworksOptions,
    Perceptron,
    cluster_shares,
    rescaled,
    sorted_by_output,
)

RECIPES = Path(__file__).parents[1] / "recipes"
TOY = RECIPES / "symmetry_toy"
COST = RECIPES / "representation_cost" / "mnist"
TINY_TOY = ["networks.networks=150", "removal.neighbors=4", "removal.radius=0.2"]
TINY_COST = [
    "data.name=digits",
    "data.train_size=256",
    "data.test_size=100",
    "model.channels=[3, 4]",
    "model.hidden=8",
    "runs.weight_decays=[0.0, 0.05]",
    "runs.seeds=2",
    "runs.epochs=6",
    "runs.batch_size=16",
]


def run(folder: Path, out: Path, overrides: list[str]) -> tuple[dict[str, Any], str]:
    console = Console(record=True, width=80, file=io.StringIO())
    display = Display(console)
    results = run_table(folder, out=out, overrides=overrides, display=display)
    display.tables(results)
    return results, console.export_text()


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    out = tmp_path_factory.mktemp("toy")
    return (out, *run(TOY, out, TINY_TOY))


@pytest.fixture(scope="module")
def cost(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    out = tmp_path_factory.mktemp("cost")
    return (out, *run(COST, out, TINY_COST))


def test_the_toy_recipe_is_the_papers_protocol() -> None:
    config = load_recipe(TOY).stages["networks"]
    options = parse(stage_kind(config.stage).options, config.options, "networks")
    assert isinstance(options, NetworksOptions)
    assert (options.networks, options.points, options.learning_rate) == (10_000, 200, 2.0)
    assert (options.batch_size, options.epochs, options.largest_loss) == (10, 10, 0.01)


@pytest.mark.parametrize("folder", ["mnist", "fashion-mnist"])
def test_the_cost_recipes_compare_decay_with_none(folder: str) -> None:
    config = load_recipe(RECIPES / "representation_cost" / folder).stages["runs"]
    options = parse(stage_kind(config.stage).options, config.options, "runs")
    assert isinstance(options, RunsOptions)
    assert options.weight_decays[0] == 0 < min(options.weight_decays[1:]) and options.seeds >= 3


def weights(forms: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    return forms[f"{name}/hidden.weight"], forms[f"{name}/output.weight"][:, 0]


def test_toy_forms(toy: tuple[Path, dict[str, Any], str]) -> None:
    """Each form by the paper's words, from the raw weights: rows of norm 3, last layer's weights in order."""
    out, results, _ = toy
    forms = load_file(out / "removal" / FORMS)
    hidden, output = weights(forms, "raw")
    kept = results["networks"]["kept"]
    assert hidden.shape == (kept, 2, 2) and 20 < kept < 150
    norm = hidden.norm(dim=-1)
    scaled = hidden * 3 / norm.unsqueeze(-1), output * norm / 3
    torch.testing.assert_close(weights(forms, "scaled"), scaled)
    order = scaled[1].argsort(-1)
    both = scaled[0].gather(1, order.unsqueeze(-1).expand(-1, -1, 2)), scaled[1].gather(1, order)
    torch.testing.assert_close(weights(forms, "both"), both)
    hidden, output = weights(forms, "cost")
    torch.testing.assert_close(hidden.norm(dim=-1), output.abs(), rtol=1e-6, atol=1e-9)  # a unit's sides balance
    assert (output.diff(dim=-1) >= 0).all()
    assert results["removal"]["output_error"] < 1e-12


def test_toy_numbers(toy: tuple[Path, dict[str, Any], str]) -> None:
    out, results, text = toy
    forms = load_file(out / "removal" / FORMS)
    numbers = results["removal"]["forms"]
    for name in ("raw", "scaled", "sorted", "both"):
        hidden, output = weights(forms, name)
        variance = sum(float(w[:, i].var()) for w in (hidden.flatten(1), output) for i in range(w.shape[1]))
        assert numbers[name]["variance"] == pytest.approx(variance)
    assert numbers["raw"]["modes"] == 2 and numbers["sorted"]["modes"] == 1
    assert numbers["both"]["modes"] == numbers["cost"]["modes"] == 1
    assert numbers["both"]["variance"] < 0.1 * numbers["raw"]["variance"]
    assert f"{numbers['both']['variance']:.3g}" in text
    assert (out / "report" / "posterior.png").read_bytes().startswith(b"\x89PNG")


def test_a_training_that_fits_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="of 10 networks 0 end with a mean loss of at most 1e-09"):
        run(TOY, tmp_path, ["networks.networks=10", "networks.largest_loss=1.0e-9"])


@pytest.mark.parametrize("bias", [False, True])
def test_perceptrons_are_rescaled_and_sorted_without_change(bias: bool) -> None:
    torch.manual_seed(1)
    model = Perceptron(bias).double()
    x = torch.randn(20, 2, dtype=torch.float64)
    graph = discover_symmetries(model, x[:2])
    expected = model(x)
    state = {k: t.clone() for k, t in model.state_dict().items()}
    for norm in (3.0, None):
        made = sorted_by_output(graph, rescaled(graph, state, norm))
        model.load_state_dict(made)
        torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-13)
        if norm is not None:
            torch.testing.assert_close(made["hidden.weight"].norm(dim=-1), torch.full((2,), norm, dtype=torch.float64))


def test_modes_are_counted_where_they_were_planted() -> None:
    generator = torch.Generator().manual_seed(0)
    centers = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    sizes = (60, 30, 10)
    points = torch.cat([c + 0.02 * torch.randn(n, 2, generator=generator) for c, n in zip(centers, sizes, strict=True)])
    assert cluster_shares(points.double(), 0.1, 5) == pytest.approx([0.6, 0.3, 0.1])
    assert cluster_shares(points.double(), 0.1, 20) == pytest.approx([0.6, 0.3])
    assert cluster_shares(7 * points.double(), 0.1, 5) == pytest.approx([0.6, 0.3, 0.1])  # in units of the rms norm
    assert cluster_shares(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), 0.1, 5) == []


def test_cost_runs(cost: tuple[Path, dict[str, Any], str]) -> None:
    out, results, _ = cost
    runs = results["runs"]["runs"]
    assert [(r["weight_decay"], r["seed"]) for r in runs] == [(0.0, 0), (0.0, 1), (0.05, 0), (0.05, 1)]
    states = load_file(out / "runs" / "states.safetensors")
    for i, r in enumerate(runs):
        assert r["step"] == [0, 16, 32, 48, 64, 80, 96]
        assert r["ratio"] == pytest.approx([m / c for m, c in zip(r["mass"], r["minimal_mass"], strict=True)])
        last = sum(float(t[i // 2, i % 2].square().sum()) for t in states.values())
        assert r["mass"][-1] == pytest.approx(last, rel=1e-5)
        assert min(r["ratio"]) > 1
    for seed in (0, 1):  # the same start, another way
        plain, decayed = runs[seed], runs[2 + seed]
        assert plain["mass"][0] == decayed["mass"][0]
        assert decayed["mass"][-1] < plain["mass"][-1]
        assert decayed["ratio"][-1] < plain["ratio"][-1]


def test_cost_profiles_and_report(cost: tuple[Path, dict[str, Any], str]) -> None:
    """A profile passes through the network's own mass at factor one; around the optimum one is the lowest point."""
    out, results, text = cost
    found = results["profiles"]
    middle = min(range(81), key=lambda i: abs(found["log_factors"][i]))
    assert found["log_factors"][middle] == pytest.approx(0, abs=1e-12)
    for i, r in enumerate(results["runs"]["runs"]):
        mine = found["profiles"][f"{r['weight_decay']:g}"]
        assert set(mine["last"]) == {"conv1", "conv2", "hidden"}
        for group in mine["last"]:
            last, optimum = mine["last"][group][i % 2], mine["optimum"][group][i % 2]
            assert last[middle] == pytest.approx(r["ratio"][-1], rel=1e-5)
            assert min(last) >= 1 - 1e-9
            lowest = found["log_factors"][last.index(min(last))]
            assert lowest == pytest.approx(mine["minimum"][group][i % 2], abs=0.013)  # half a step of the grid
            assert min(optimum) == optimum[middle] == pytest.approx(1, rel=1e-6)
    last = [r["ratio"][-1] for r in results["runs"]["runs"][2:]]
    assert f"{sum(last) / 2:.4f}" in text
    assert "mass.png" in (out / "report" / "report.md").read_text()
    assert (out / "report" / "mass.png").read_bytes().startswith(b"\x89PNG")


def test_cost_runs_survive_an_interruption(
    cost: tuple[Path, dict[str, Any], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tu_symmetry.tables.representation as module

    _, whole, _ = cost
    train, calls = module._train, []

    def interrupted(*arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return train(*arguments, **keywords)

    monkeypatch.setattr(module, "_train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(COST, tmp_path, TINY_COST)
    resumed, text = run(COST, tmp_path, TINY_COST)
    assert "resuming" in text and len(calls) == 5  # two runs were done, the third was cut off
    assert resumed["runs"] == whole["runs"]


@pytest.mark.parametrize("side", [8, 28])
def test_every_hidden_unit_of_the_conv_net_can_be_rescaled(side: int) -> None:
    graph = discover_symmetries(ConvNet(side**2, 10, channels=(3, 5), hidden=7), torch.randn(2, 1, side, side))
    graph.require_verified()
    assert {g.name: g.size for g in graph.scales} == {"conv1": 3, "conv2": 5, "hidden": 7}
    assert math.prod(graph.shapes["hidden.weight"]) == 7 * 5 * (side // 4) ** 2
