"""The toy posterior and the representation cost: every file parses, both run end to end, and the parts are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_runs import RECIPES, commands_of, run_table, shortened
from safetensors.torch import load_file
from torch import Tensor

from tu_symmetry.experiments.symmetry_toy import (
    FORMS,
    Perceptron,
    TwoGroupsDataModule,
    cluster_shares,
    in_window,
    mixture_tests,
    remove,
)
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.tables.commands import load_table
from tu_symmetry.tables.logs import last_weights

TOY = RECIPES / "symmetry_toy"
COST = RECIPES / "representation_cost" / "mnist"
NETWORKS = 150
TINY_TOY = [
    f"networks.routine.num_members={NETWORKS}",
    f"networks.data.orders={NETWORKS}",
    "networks.routine.model={bias: false, initial_std: 1.0}",
    "removal.command.model.bias=false",
    *(
        f"{name}={{centers: [[1.0, 0.0], [0.0, 1.0]], spread: 0.2}}"
        for name in ("networks.data", "removal.command.data")
    ),
    "removal.command.neighbors=4",
    "removal.command.radius=0.2",
]
FITS = ["none_0", "none_1", "strong_0", "strong_1"]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    out = tmp_path_factory.mktemp("toy")
    return (out, *run_table(TOY, out, TINY_TOY))


@pytest.fixture(scope="module")
def cost(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """The recipe's own files with fewer rows, on images of its size that need no download."""

    def edit(command: dict[str, Any], content: dict[str, Any]) -> None:
        data = content.get("data") or content["command"]["init_args"].get("data")
        if data is not None:
            data["class_path"] = "tu_symmetry.datamodules.DigitsDataModule"
            data["init_args"] = {k: v for k, v in data["init_args"].items() if k not in ("dataset", "root")}
        if "copies" in command:
            command["copies"] = 2

    folder, out = (tmp_path_factory.mktemp(name) for name in ("recipe", "cost"))
    shortened(COST, folder, ("none", "strong", "profiles", "report"), edit)
    sizes = {"data.train_size": 256, "data.test_size": 100}
    sizes |= {"model.in_features": 64, "model.channels": [3, 4], "model.hidden": 8}
    runs = {decay: [f"{out}/{kind}_{s}" for s in range(2)] for decay, kind in (("0", "none"), ("0.05", "strong"))}
    tiny = [f"profiles.command.{key}={value}" for key, value in sizes.items()]
    tiny.append(f"profiles.command.runs={runs}")
    for name in FITS:
        tiny += [f"{name}.{'' if k.startswith('data') else 'routine.'}{k}={v}" for k, v in sizes.items()]
        tiny += [f"{name}.data.batch_size=16", f"{name}.trainer.max_epochs=6", f"{name}.trainer.accelerator=cpu"]
        if name.startswith("strong"):
            tiny.append(f"{name}.optimizer.weight_decay=0.05")
    return (out, *run_table(folder, out, tiny))


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_the_cost_recipes_compare_decay_with_none(name: str) -> None:
    """Every weight decay has the same seeds, and the profiles name each run under its own decay."""
    folder = RECIPES / "representation_cost" / name
    commands = load_table(folder).commands
    runs: dict[str, list[str]] = {}
    for c in (c for c in commands if c.command == "fit"):
        mine = runs.setdefault(f"{c.set['optimizer.weight_decay']:g}", [])
        assert c.set["seed_everything"] == c.set["data.seed"] == len(mine)
        mine.append(f"$root/{c.name}")
    assert len(runs) == 3 and "0" in runs and all(len(mine) == 3 for mine in runs.values())
    assert commands_of(folder)["profiles"].content["command"]["init_args"]["runs"] == runs


def test_the_networks_that_fit_are_kept(toy: tuple[Path, dict[str, Any], str]) -> None:
    out, results, _ = toy
    trained = SampleStore.open(out / "networks" / "samples").load()
    x, y = TwoGroupsDataModule().points.x, TwoGroupsDataModule().points.y
    hidden, output = trained["hidden.weight"], trained["output.weight"][:, 0]
    outputs = torch.einsum("nh,nhp->np", output, torch.einsum("nhi,pi->nhp", hidden, x).relu())
    losses = torch.nn.functional.softplus((1 - 2 * y) * outputs).mean(1)
    assert results["removal"]["kept"] == int((losses <= 0.01).sum())
    assert results["removal"]["trained"] == NETWORKS
    with pytest.raises(ValueError, match="of 150 networks 0 end with a mean loss of at most 1e-09"):
        remove(out, Perceptron(), TwoGroupsDataModule(), out / "networks" / "samples", largest_loss=1e-9)


def weights(forms: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    return forms[f"{name}/hidden.weight"], forms[f"{name}/output.weight"][:, 0]


def test_toy_forms(toy: tuple[Path, dict[str, Any], str]) -> None:
    """Each form by the paper's words, from the raw weights: rows of norm 3, last layer's weights in order."""
    out, results, _ = toy
    forms = load_file(out / "removal" / FORMS)
    hidden, output = raw = weights(forms, "raw")
    kept = results["removal"]["kept"]
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
    own = weights(forms, "own")  # the raw networks, each in one of its two orders
    same, turned = (
        (own[0] - h).abs().amax((1, 2)) + (own[1] - o).abs().amax(1) < 1e-9 for h, o in (raw, [w.flip(1) for w in raw])
    )
    assert (same | turned).all() and 0.2 < same.double().mean() < 0.8
    drawn = weights(forms, "mixture")  # functions are kept, factors are those of all units
    for k, products in enumerate((both[0].norm(dim=-1) * both[1], drawn[0].norm(dim=-1) * drawn[1])):
        torch.testing.assert_close(products.sort(-1).values, (norm * raw[1]).sort(-1).values, msg=str(k))
    torch.testing.assert_close(drawn[0].norm(dim=-1).flatten().sort().values, norm.flatten().sort().values)


def test_scales_that_depend_on_the_network_are_no_mixture() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 2, dtype=torch.float64, generator=generator)
    stretched = x * (1 + 3 * (x[:, :1] > 0))
    tests = mixture_tests(
        {"output.weight": stretched.flip(1)},
        {"output.weight": x},
        raw={"output.weight": stretched},
        generator=generator,
    )
    assert tests["raw"]["p_value"] > 0.05 and tests["mixture"]["p_value"] == 0.005
    assert tests["mixture"]["value"] > 10 * abs(tests["raw"]["value"])


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
    assert "least mass" in text
    for name in ("posterior", "mixture"):
        assert (out / "report" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_window_counts_variance_and_signs() -> None:
    weights = torch.tensor([[1.0, 2.0], [-1.0, 2.0], [-3.0, -1.0], [5.0, 0.0], [3.0, -1.0]])
    found = in_window(weights, 4.0)
    assert found["in_window"] == 0.8 and found["signs"] == {"--": 1, "-+": 1, "+-": 1, "++": 1}
    assert found["window_variance"] == pytest.approx(float(weights[[0, 1, 2, 4]].var(0).sum()))


def test_points_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "points.csv").write_text("x,y,label\n0.5,-1,0\n2,3,1\n")
    points = TwoGroupsDataModule(file=tmp_path / "points.csv").points
    assert points.x.tolist() == [[0.5, -1.0], [2.0, 3.0]] and points.y.tolist() == [0.0, 1.0]
    torch.manual_seed(0)
    bound = 1 / 2**0.5  # torch's own initialization of two inputs
    drawn = Perceptron(bias=True, initial_std=None).hidden
    assert drawn.weight.abs().max() <= bound and drawn.bias.abs().max() <= bound


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
    runs = results["profiles"]["runs"]
    assert [(r["weight_decay"], r["seed"]) for r in runs] == [("0", 0), ("0", 1), ("0.05", 0), ("0.05", 1)]
    for r, name in zip(runs, FITS, strict=True):
        assert r["step"] == [0, 16, 32, 48, 64, 80, 96]
        assert r["ratio"] == pytest.approx([m / c for m, c in zip(r["mass"], r["minimal_mass"], strict=True)])
        last = sum(float(t.square().sum()) for t in last_weights(out / name).values())
        assert r["mass"][-1] == pytest.approx(last, rel=1e-5)
        assert min(r["ratio"]) > 1
    for seed in (0, 1):  # the same start, another way
        plain, decayed = runs[seed], runs[2 + seed]
        assert plain["mass"][0] == decayed["mass"][0]
        assert decayed["mass"][-1] < plain["mass"][-1]
        assert decayed["ratio"][-1] < plain["ratio"][-1]
    assert runs[0]["mass"][0] != runs[1]["mass"][0]


def test_cost_profiles_and_report(cost: tuple[Path, dict[str, Any], str]) -> None:
    """A profile passes through the network's own mass at factor one; around the optimum one is the lowest point."""
    out, results, text = cost
    found = results["profiles"]
    middle = min(range(81), key=lambda i: abs(found["log_factors"][i]))
    assert found["log_factors"][middle] == pytest.approx(0, abs=1e-12)
    for i, r in enumerate(found["runs"]):
        mine = found["profiles"][r["weight_decay"]]
        assert set(mine["last"]) == {"conv1", "conv2", "hidden"}
        for group in mine["last"]:
            last, optimum = mine["last"][group][i % 2], mine["optimum"][group][i % 2]
            assert last[middle] == pytest.approx(r["ratio"][-1], rel=1e-5)
            assert min(last) >= 1 - 1e-9
            lowest = found["log_factors"][last.index(min(last))]
            assert lowest == pytest.approx(mine["minimum"][group][i % 2], abs=0.013)  # half a step of the grid
            assert min(optimum) == optimum[middle] == pytest.approx(1, rel=1e-6)
    last = [r["ratio"][-1] for r in found["runs"][2:]]
    assert f"{sum(last) / 2:.4f}" in text
    assert "mass.png" in (out / "report" / "report.md").read_text()
    assert (out / "report" / "mass.png").read_bytes().startswith(b"\x89PNG")
