"""The linearized Laplace recipes at a tiny size: what their rows mean, and that they resume."""

from __future__ import annotations

import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import nn

from tu_symmetry.configs import ConfigError, parse
from tu_symmetry.laplace.jacobians import Tangent, features
from tu_symmetry.laplace.model import LinearizedLaplace
from tu_symmetry.reporting.progress import Display
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.tables import laplace, laplace_toy
from tu_symmetry.tables.data import load_data
from tu_symmetry.tables.engine import run_table
from tu_symmetry.tables.laplace_networks import ARCHITECTURES, matrices
from tu_symmetry.tables.laplace_toy import BatchNormMLP, sample_curve
from tu_symmetry.tables.recipe import DataConfig, load_recipe
from tu_symmetry.tables.stage import stage_kind

pytestmark = pytest.mark.filterwarnings("ignore")

RECIPES = Path(__file__).parents[2] / "recipes" / "linearized_laplace"
TOY = ["network.hidden=[6, 5]", "network.train_size=30", "network.steps=150", "bands.points=21"]
SMALL = {"CNN": {"width": 2}, "FixUp": {"width": 2}}
TABLE = [
    "data.name=digits", "data.train_size=60", "data.test_size=40",
    *(f"{s}.architectures={json.dumps(SMALL)}" for s in ("networks", "early_networks")),
    "networks.seeds=2", "early_networks.seeds=1", "networks.epochs=6", "early_networks.epochs=1",
    *(f"{s}.choices=[tangent_mode/per_group, map/single]" for s in ("evidence", "early_evidence")),
    "evidence.num_samples=50", "evidence.max_iterations=4",
]  # fmt: skip


def run(name: str, out: Path, overrides: list[str]) -> dict[str, Any]:
    return run_table(
        RECIPES / name, out=out, overrides=overrides, display=Display(Console(file=io.StringIO(), width=120))
    )


# ---------------------------------------------------------------------- toy


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("toy")
    return out, run("toy", out, TOY)


def test_the_toy_network_has_2600_weights() -> None:
    model = BatchNormMLP()
    sizes = {name: p.numel() for name, p in model.named_parameters() if name in model.matrices}
    assert list(sizes.values()) == [50, 2500, 50]


def test_the_curve_has_a_gap() -> None:
    x, y = sample_curve(200, 0.0, torch.Generator().manual_seed(0))
    assert x.abs().min() >= 0.5 and (x < 0).sum() == 100
    torch.testing.assert_close(y, torch.sin(3 * x) + 0.5 * x)


def test_bands(toy: tuple[Path, dict[str, Any]]) -> None:
    out, results = toy
    rows = results["bands"]["rows"]
    assert list(rows) == ["100", "10", "5", "1", "0.1", *laplace_toy.CHOICES]
    bands = load_file(out / "bands" / "bands.safetensors")
    spreads = [bands[f"{name}/epistemic"] for name in ("100", "10", "5", "1", "0.1")]
    for narrow, wide in pairwise(spreads):
        assert (narrow < wide).all()  # a smaller precision leaves more uncertainty everywhere
    for name in rows:
        torch.testing.assert_close(bands[f"{name}/mean"], bands["100/mean"])  # the mean is the network's
    assert len(rows["map/single"]["groups"]) == 1 and len(rows["map/per_group"]["groups"]) == 3
    assert rows["tangent_mode/per_group"]["log_evidence"] > rows["tangent_mode/single"]["log_evidence"]


def test_bands_equal_a_hand_computation(toy: tuple[Path, dict[str, Any]]) -> None:
    out, results = toy
    stored = load_file(out / "network" / "network.safetensors")
    model = BatchNormMLP(6, 5).double().eval()
    model.load_state_dict({k.removeprefix("model."): t for k, t in stored.items() if k.startswith("model.")})
    la = LinearizedLaplace(
        model, "regression", prior="single", evaluate_at="map", parameters=model.matrices, noise_variance=0.04
    ).fit([(stored["train_x"], stored["train_y"])])
    la.set_precision(5.0)
    bands = load_file(out / "bands" / "bands.safetensors")
    expected = la.predictive(bands["grid"].unsqueeze(-1))
    torch.testing.assert_close(bands["5/epistemic"], expected.epistemic.squeeze(-1).sqrt())
    test = la.predictive(stored["test_x"])
    normal = torch.distributions.Normal(test.mean, test.variance.sqrt())
    assert results["bands"]["rows"]["5"]["nll"] == pytest.approx(-float(normal.log_prob(stored["test_y"]).mean()))


def test_the_toy_report(toy: tuple[Path, dict[str, Any]]) -> None:
    out, results = toy
    text = (out / "report" / "report.md").read_text()
    assert (out / "report" / "bands.png").read_bytes().startswith(b"\x89PNG")
    for name, row in results["bands"]["rows"].items():
        assert f"| {laplace_toy._name(name)} |" in text and f"{row['nll']:.3f}" in text


# ---------------------------------------------------------------------- table 1


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("table")
    return out, run("table1", out, TABLE)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_has_the_groups_that_it_should(name: str) -> None:
    arguments = {"width": 4} | ({"size": 8, "patch": 2, "depth": 1, "heads": 2} if name == "T-Former" else {})
    torch.manual_seed(0)
    model = ARCHITECTURES[name](num_classes=4, **arguments).eval()
    with torch.no_grad():
        for p in model.parameters():  # zero-initialized branches would hide everything
            p.add_(0.3 * torch.randn(p.shape))
    x = torch.randn(6, 1, 8, 8)
    assert model(x).shape == (6, 4)
    graph = discover_symmetries(model, x)
    assert bool(graph.normalizations) == (name != "FixUp")
    own = dict(model.named_parameters())
    uncertain = matrices(model)
    modules = {n.rpartition(".")[0] for n in uncertain}
    assert all(isinstance(model.get_submodule(m), (nn.Linear, nn.Conv2d)) for m in modules)
    assert sum(p.ndim >= 2 for p in own.values()) == sum(own[n].ndim >= 2 for n in uncertain) + (name == "T-Former")
    la = LinearizedLaplace(model, graph=graph, evaluate_at="map", parameters=uncertain).fit([(x, torch.arange(6) % 4)])
    la.optimize_evidence()
    assert len(la.report()) > 1 or name == "FixUp"


def test_rows_equal_a_hand_computation(table: tuple[Path, dict[str, Any]]) -> None:
    out, results = table
    data = load_data(DataConfig("digits", 60, 40), Path())
    model = ARCHITECTURES["CNN"](num_classes=data.num_classes, width=2).eval()
    model.load_state_dict(load_file(out / "networks" / "CNN-1.safetensors"))
    with torch.no_grad():
        plain = nn.functional.cross_entropy(model(data.test_x), data.test_y)
    assert results["networks"]["networks"]["CNN"][1]["nll"] == pytest.approx(float(plain), rel=1e-5)
    graph = discover_symmetries(model, data.train_x[:2])
    for choice, prior in (("tangent_mode/per_group", "per_group"), ("map/single", "single")):
        row = results["evidence"]["rows"][choice]["CNN"][1]
        la = LinearizedLaplace(model, graph=graph, prior=prior, evaluate_at="map", parameters=matrices(model))  # type: ignore
        la.fit([(data.train_x, data.train_y)])
        la.set_precision({name: group["precision"] for name, group in row["groups"].items()})
        p = la.predictive(data.test_x, num_samples=50)
        nll = float(-p[torch.arange(40), data.test_y].log().mean())
        assert row["nll"] == pytest.approx(nll, rel=1e-3)
        assert sum(g["gamma"] for g in row["groups"].values()) == pytest.approx(
            sum(g.gamma for g in la.report()), rel=1e-3
        )
    assert len(results["evidence"]["rows"]["tangent_mode/per_group"]["FixUp"][0]["groups"]) > 3  # one for each layer


def test_the_table_stands_beside_the_papers(table: tuple[Path, dict[str, Any]]) -> None:
    out, results = table
    text = (out / "report" / "report.md").read_text()
    values = torch.tensor([r["nll"] for r in results["evidence"]["rows"]["map/single"]["CNN"]], dtype=torch.float64)
    error = values.std() / 2**0.5
    assert f"{values.mean():.3f} ± {error:.3f} *0.253 ± 0.001*" in text  # the paper's CNN
    assert "after 6 epochs" in text and "after 1 epochs" in text


def test_an_interrupted_table_goes_on(
    table: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, whole = table
    measure, calls = laplace._measure, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(arguments[-1])
        if len(calls) == 4:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(laplace, "_measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("table1", tmp_path, TABLE)
    resumed = run("table1", tmp_path, TABLE)
    assert resumed["evidence"]["rows"] == whole["evidence"]["rows"]
    assert len(calls) == 1 + 2 * 2 * 2 + 2 * 2  # one was cut off, none was done twice


TABLES = ["table1", "table1-mnist-small", "table1-mnist"]


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_differ_in_size_alone(name: str) -> None:
    recipe = load_recipe(RECIPES / name)
    assert recipe.table.paper == load_recipe(RECIPES / "table1").table.paper
    options = {n: parse(stage_kind(s.stage).options, s.options, n) for n, s in recipe.stages.items()}
    assert list(options) == ["networks", "evidence", "early_networks", "early_evidence", "report"]
    assert list(options["networks"].architectures) == list(ARCHITECTURES)
    early, late = options["early_networks"], options["networks"]
    assert early.epochs < late.epochs and early.architectures == late.architectures and early.pool == late.pool
    assert options["evidence"] == options["early_evidence"]
    image = {"digits": 8, "mnist": 28}[recipe.table.data.name] // late.pool
    for architecture, arguments in late.architectures.items():
        assert ARCHITECTURES[architecture](num_classes=10, **arguments)(torch.rand(2, 1, image, image)).shape == (2, 10)


def test_images_are_averaged_over_squares() -> None:
    data = load_data(DataConfig("digits", 10, 10), Path())
    small = laplace.pooled(data, 2)
    assert small.train_x.shape == (10, 1, 4, 4) and small.test_x.shape == (10, 1, 4, 4)
    torch.testing.assert_close(small.train_x[3, 0, 1, 2], data.train_x[3, 0, 2:4, 4:6].mean())


@pytest.mark.parametrize("name", ["CNN", "T-Former"])
def test_the_tangent_of_a_network_has_its_evidence_and_predictive(name: str) -> None:
    arguments = {"width": 2} | ({"size": 8, "patch": 4, "depth": 1, "heads": 2} if name == "T-Former" else {})
    torch.manual_seed(0)
    model = ARCHITECTURES[name](num_classes=3, **arguments).double().eval()
    x, y = torch.rand(30, 1, 8, 8, dtype=torch.float64), torch.arange(30) % 3
    names = matrices(model)
    rows = features(model, names, x, chunk=7)
    tangent = Tangent(model, names)
    torch.testing.assert_close(tangent(rows), model(x))
    found = []
    for module, inputs in ((model, x), (tangent, rows)):
        la = LinearizedLaplace(module, prior="single", evaluate_at="tangent_mode", curvature="full", parameters=names)
        result = la.fit([(inputs, y)]).optimize_evidence(tolerance=1e-4, mode_tolerance=1e-4)
        found.append((result.log_marginal_likelihood, la.log_precision, la.theta, la.predictive(inputs)))
    torch.testing.assert_close(found[0][1:], found[1][1:], rtol=1e-5, atol=1e-7)
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-8)


def test_the_full_curvature_of_a_table_is_the_networks(tmp_path: Path) -> None:
    full = ["evidence.curvature=full", "early_evidence.curvature=full", "networks.pool=2", "early_networks.pool=2"]
    one = [
        f"{s}.{what}" for s in ("networks", "early_networks") for what in ("architectures={CNN: {width: 2}}", "seeds=1")
    ]
    results = run("table1-mnist-small", tmp_path, [*TABLE, *full, *one])
    data = laplace.pooled(load_data(DataConfig("digits", 60, 40), Path()), 2)
    model = ARCHITECTURES["CNN"](num_classes=data.num_classes, width=2).eval()
    model.load_state_dict(load_file(tmp_path / "networks" / "CNN-0.safetensors"))
    row = results["evidence"]["rows"]["tangent_mode/per_group"]["CNN"][0]
    la = LinearizedLaplace(model.double(), evaluate_at="map", curvature="full", parameters=matrices(model))
    la.fit([(data.train_x.double(), data.train_y)])
    la.set_precision({name: group["precision"] for name, group in row["groups"].items()})
    p = la.predictive(data.test_x.double(), num_samples=50)
    assert row["nll"] == pytest.approx(float(-p[torch.arange(40), data.test_y].log().mean()), rel=1e-3)


def test_what_a_choice_changes_is_taken_over_the_same_networks(table: tuple[Path, dict[str, Any]]) -> None:
    out, results = table
    rows, networks = results["evidence"]["rows"], results["networks"]["networks"]
    gains = torch.tensor(
        [a["nll"] - b["nll"] for a, b in zip(rows["tangent_mode/per_group"]["CNN"], networks["CNN"], strict=True)],
        dtype=torch.float64,
    )
    line = next(
        line
        for line in (out / "report" / "report.md").read_text().splitlines()
        if line.startswith("| Laplace (θ*, several λ) instead of the network")
    )
    assert line.split("|")[2].strip() == f"{gains.mean():+.3f} ± {gains.std() / 2**0.5:.3f}"


def test_unknown_names_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'VGG' is not known"):
        run("table1", tmp_path / "a", [*TABLE, "networks.architectures={VGG: {}}"])
    with pytest.raises(ConfigError, match="write tangent_mode or map"):
        run("table1", tmp_path / "b", [*TABLE, "evidence.choices=[theta/single]"])
