"""The toy and Table 1 of linearized Laplace at a tiny size: what the rows mean, the reports, and that they resume."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_runs import assert_goes_on, commands_of, plant_images, run_table, shortened
from torch import nn

from tu_symmetry.configs import resolve
from tu_symmetry.datamodules import DigitsDataModule
from tu_symmetry.experiments.linearized_laplace import (
    CNN,
    BatchNormMLP,
    CurveDataModule,
    FixUpResNet,
    PreActivationResNet,
    Settings,
    SmallIDXDataModule,
    Trained,
    Transformer,
    compare_depths,
    optimize_evidence,
    report_depths,
)
from tu_symmetry.experiments.linearized_laplace.depth import rank_table
from tu_symmetry.experiments.linearized_laplace.evidence import Work
from tu_symmetry.experiments.linearized_laplace.networks import matrices
from tu_symmetry.experiments.linearized_laplace.rows import OPEN, Choice, marks, parse_all, scores, title_of
from tu_symmetry.experiments.linearized_laplace.toy import band_title, bands_table
from tu_symmetry.experiments.rebasin import ResNet
from tu_symmetry.experiments.study import Images
from tu_symmetry.files import FileError, read_tensors
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.laplace.report import EvidenceResult
from tu_symmetry.posterior.network import initialized
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.tables.commands import load_table
from tu_symmetry.tables.logs import last_weights
from tu_symmetry.tables.outcome import Outcome

pytestmark = pytest.mark.filterwarnings("ignore")

RECIPES = Path(__file__).parents[2] / "recipes" / "linearized_laplace"
ARCHITECTURES: dict[str, Callable[..., nn.Module]] = {
    "T-Former": Transformer,
    "CNN": CNN,
    "ResNet": lambda **arguments: ResNet(in_channels=1, blocks=(1, 1), **arguments),
    "Pre-ResNet": PreActivationResNet,
    "FixUp": FixUpResNet,
}
COLUMNS = {"CNN": {"width": 2}, "FixUp": {"width": 2}}
SIZES = {"train_size": 60, "val_size": 50, "test_size": 40}
CHOICES = ["tangent_mode/per_group", "map/single"]


def shown(runs: list[dict[str, Any]], column: str = "nll") -> str:
    """Mean and standard error over two networks."""
    values = torch.tensor([run[column] for run in runs], dtype=torch.float64)
    return f"{values.mean():.3f} ± {values.std() / 2**0.5:.3f}"


def test_choices_read_what_they_write() -> None:
    for text in ("tangent_mode/per_group/flat", "map/single", "map/single/diag", "tangent_mode/single/last_layer"):
        assert Choice.parse(text).key == text
    assert title_of("tangent_mode/per_group/flat") == "M(θ*), several λ, no hyperprior"
    for wrong in ("theta/single", "map", "map/both", "map/single/round", "full/single"):
        with pytest.raises(ValueError, match="write map or tangent_mode"):
            parse_all([wrong])
    for several in ([], ["map/single", "map/per_group", "map/single"]):
        with pytest.raises(ValueError, match="at least one, and each once"):
            parse_all(several)


def test_scores_of_known_probabilities() -> None:
    p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.2, 0.8], [0.9, 0.1]], dtype=torch.float64)
    other = torch.tensor([[0.5, 0.5], [0.95, 0.05]], dtype=torch.float64)
    found = scores(p, torch.tensor([0, 0, 1, 1]), other)
    logs = torch.tensor([0.9, 0.9, 0.8, 0.1], dtype=torch.float64).log()
    assert found["accuracy"] == 0.75 and found["nll"] == pytest.approx(-float(logs.mean()))
    assert found["ece"] == pytest.approx(3 / 4 * abs(0.9 - 2 / 3) + 1 / 4 * 0.2, abs=1e-6)
    assert found["auroc"] == pytest.approx(0.5)  # (.5, .5) is above all four, (.95, .05) below


def test_numbers_from_optima_that_had_not_converged_are_marked() -> None:
    assert marks([{"converged": True}, {"converged": True}]) == "" == marks([{}])  # a network itself has no optimum
    assert marks([{"converged": True}, {"converged": False}]) == OPEN
    assert marks([{"converged": True, "settled": False}]) == "‡"
    row = {"nll": 1.0, "coverage": 0.5, "inside": 0.1, "gap": 0.2, "converged": False, "groups": {}}
    assert bands_table({"map/single": row}, "").rows[0][2:] == ["1.000†", "50.0 %†", "0.1†", "0.2†"]


def test_bands_and_their_report(tmp_path: Path) -> None:
    """Of known order, equal to a hand computation, in the figure and the table."""
    tiny = ["network.data.train_size=30", "network.trainer.max_epochs=60", "network.lr_scheduler.T_max=60"]
    tiny += ["network.trainer.enable_progress_bar=false", "bands.command.data.train_size=30"]
    tiny += [f"{place}.model.hidden=[6, 5]" for place in ("network.routine", "bands.command")]
    found = run_table(RECIPES / "toy", tmp_path, tiny)[0]["bands"]
    rows, fixed = found["rows"], ["100", "10", "5", "1", "0.1"]
    given = commands_of(RECIPES / "toy")["bands"].content["command"]["init_args"]
    assert list(rows) == [*fixed, *given["choices"]]
    for narrow, wide in pairwise(torch.tensor(rows[name]["epistemic"]) for name in fixed):
        assert (narrow < wide).all()  # a smaller precision leaves more uncertainty everywhere
    for name in rows:
        assert rows[name]["mean"] == pytest.approx(rows["100"]["mean"])  # the mean is the network's
    assert len(rows["map/single"]["groups"]) == 1 and len(rows["map/per_group"]["groups"]) == 3
    assert rows["tangent_mode/per_group"]["log_evidence"] > rows["tangent_mode/single"]["log_evidence"]
    data = CurveDataModule(train_size=30)
    model = BatchNormMLP([6, 5]).double().eval()
    model.load_state_dict(last_weights(tmp_path / "network"))
    la = LinearizedLaplace(
        model, "regression", prior="single", evaluate_at="map", parameters=model.matrices, noise_variance=0.04
    ).fit([(data.train.x, data.train.y.unsqueeze(-1))])
    la.set_precision(5.0)
    expected = la.predictive(torch.tensor(found["grid"], dtype=torch.float64).unsqueeze(-1))
    assert rows["5"]["epistemic"] == pytest.approx(expected.epistemic.squeeze(-1).sqrt().tolist())
    test = la.predictive(data.test.x)
    normal = torch.distributions.Normal(test.mean, test.variance.sqrt())
    assert rows["5"]["nll"] == pytest.approx(-float(normal.log_prob(data.test.y.unsqueeze(-1)).mean()))
    text = (tmp_path / "report" / "report.md").read_text()
    assert (tmp_path / "report" / "bands.png").read_bytes().startswith(b"\x89PNG")
    shown_rows = rows | found["rivals"]
    assert all(f"| {band_title(name)} |" in text and f"{row['nll']:.3f}" in text for name, row in shown_rows.items())
    known, residual = found["rivals"].values()
    with torch.no_grad():
        noise = [data.noise**2, float((model(data.train.x)[:, 0] - data.train.y).square().mean())]
        for rival, variance in zip((known, residual), noise, strict=True):
            normal = torch.distributions.Normal(model(data.test.x)[:, 0], variance**0.5)
            assert rival["nll"] == pytest.approx(-float(normal.log_prob(data.test.y).mean()))
    gaps = {name: [row["gap"] for row in same] for name, same in found["spreads"].items()}
    one = found["factors"].index(1.0)
    for name, spread in gaps.items():  # BatchNorm's epsilon is left out of them
        assert spread[one] == pytest.approx(rows[name]["gap"], rel=0.01)
    for where in ("map", "tangent_mode"):
        assert gaps[f"{where}/per_group"] == pytest.approx([gaps[f"{where}/per_group"][one]] * 5, rel=1e-3)
        assert max(gaps[f"{where}/single"]) > 1.1 * min(gaps[f"{where}/single"])
    exact, unbiased, *others = found["offsets"].values()  # of f - J theta~
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.running_mean = module.running_var = None
        bias = float(model[-1].bias.abs()) * 1000**0.5 / float(model(data.test.x).norm())
    assert exact < 1e-12 < bias == pytest.approx(unbiased, rel=1e-3) and min(others) > 0.1
    losses = {
        name: torch.tensor(found["along"][name], dtype=torch.float64) for name in ("ratios", "network", "tangent")
    }
    assert (losses["network"].diff() > 0).all()  # no mode: shrinking always pays
    squares = sum(float(p.detach().square().sum()) for n, p in model.named_parameters() if n in model.matrices[:2])
    gain = squares / 2 * (losses["ratios"][-1] ** 2 - losses["ratios"][0] ** 2)
    torch.testing.assert_close(losses["network"][-1] - losses["network"][0], gain)
    k, h = losses["ratios"][[0, 20, 40]], losses["tangent"][[0, 20, 40]]
    a, b, c = torch.linalg.solve(torch.stack([k**2, k, torch.ones(3, dtype=torch.float64)], 1), h)
    torch.testing.assert_close(a * losses["ratios"] ** 2 + b * losses["ratios"] + c, losses["tangent"])
    assert a > 0 > b  # a parabola with its minimum at a positive factor
    assert (tmp_path / "report" / "scale.png").read_bytes().startswith(b"\x89PNG")


def test_evidence_of_every_depth(tmp_path: Path) -> None:
    """At its maximum over one precision, found by hand, for any number of layers; what criteria choose; the report."""
    data, folders, states = CurveDataModule(train_size=20, test_size=30), {}, {}
    for name, hidden in (("1", [4]), ("4", [3] * 4)):
        store = SampleStore.create(folders.setdefault(name, tmp_path / name), architecture="MLP", method="none")
        for seed in range(2):
            states[name] = initialized(BatchNormMLP(hidden).double(), seed).state_dict()
            store.append(states[name], step=seed)
    outcome = compare_depths(tmp_path / "out", folders, data)
    outcome.save(tmp_path / "out")
    rows = outcome.results["rows"]
    for name, hidden in (("1", [4]), ("4", [3] * 4)):
        row, model = rows[name][1], BatchNormMLP(hidden).double().eval()
        model.load_state_dict(states[name])
        own = dict(model.named_parameters())
        per_weight = torch.func.jacrev(partial(torch.func.functional_call, model))(own, (data.train.x,))
        jacobian = torch.cat([per_weight[n].reshape(20, -1) for n in own], 1).detach()
        theta = torch.cat([p.reshape(-1) for p in own.values()]).detach()
        assert row["weights"] == len(theta)
        outputs = model(data.train.x)[:, 0].detach()
        error = {"tangent_mode": data.train.y - outputs + jacobian @ theta, "map": data.train.y - outputs}
        variances = torch.logspace(-12, 6, 1801, dtype=torch.float64)
        kernels = 0.04 * torch.eye(20, dtype=torch.float64) + variances.view(-1, 1, 1) * (jacobian @ jacobian.T)
        for where, residual in error.items():
            fit = residual.square().sum() / 0.04 + theta.square().sum() / variances
            if where == "tangent_mode":
                fit = torch.linalg.solve(kernels, residual) @ residual
            values = -0.5 * (kernels.logdet() + fit + 20 * math.log(2 * math.pi))
            assert row[f"{where}/single"]["log_evidence"] == pytest.approx(float(values.max()), abs=0.01)
            assert row[f"{where}/per_group"]["log_evidence"] >= row[f"{where}/single"]["log_evidence"] - 1e-6
            assert row[f"{where}/single"]["converged"]
        normal = torch.distributions.Normal(model(data.test.x)[:, 0].detach(), 0.2)
        assert row["network"] == pytest.approx(-float(normal.log_prob(data.test.y).mean()))
        assert row["train"] == pytest.approx(float(error["map"].square().mean().sqrt()))
        loss = (model.train()(data.train.x)[:, 0] - data.train.y).square().mean().sqrt()
        assert row["loss"] == pytest.approx(float(loss.detach())) != row["train"]
    report_depths(tmp_path / "report", "linearized_laplace/depth", {"curve": tmp_path / "out"})
    text = (tmp_path / "report" / "report.md").read_text()
    assert f"{rows['1'][0]['weights']} |" in text and (tmp_path / "report" / "depths.png").is_file()


def test_what_a_criterion_chooses_and_what_that_costs() -> None:
    def run(evidence: float, nll: float, weights: int) -> dict[str, Any]:
        keys = [f"{where}/{prior}" for where in ("map", "tangent_mode") for prior in ("single", "per_group")]
        errors = {"network": 2 * nll, "loss": -weights, "train": weights, "weights": weights}
        return errors | {key: {"log_evidence": evidence, "nll": nll} for key in keys}

    rows = {"1": [run(-5, 0.4, 1), run(-2, 0.1, 1)], "2": [run(-3, 0.2, 2), run(-4, 0.3, 2)]}
    rows["5"] = [run(-9, 0.7, 3), run(-9, 0.2, 3)]
    found = {row[0]: row[1:] for row in rank_table({"rows": rows}, "").rows}
    assert found["log Z, M(θ*), several λ"] == ["2, 1", "0.75 ± 0.25", "0.000 ± 0.000"]
    assert found["training error, batch statistics"][0] == "5, 5"
    assert found["number of weights"][::2] == ["1, 1", "0.200 ± 0.200"]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The recipe's own files, with two of its columns."""

    def edit(command: dict[str, Any], content: dict[str, Any]) -> None:
        name = command["name"].removesuffix("-early")
        arguments = content["command"]["init_args"] if "command" in content else content
        if "data" in arguments:
            arguments["data"]["init_args"] |= SIZES
        if "networks" in arguments:
            arguments["networks"] = {k: arguments["networks"][k] for k in COLUMNS}
            for k, network in arguments["networks"].items():
                network["model"]["init_args"] = COLUMNS[k]
            arguments["settings"] |= {"num_samples": 50, "max_iterations": 4}
            arguments["choices"] = CHOICES
        if "routine" in content:
            routine = content["routine"]["init_args"]
            routine["model"]["init_args"] = COLUMNS[{"cnn": "CNN", "fixup": "FixUp"}[name]]
            routine["num_members"] = content["data"]["init_args"]["orders"] = 2
            content["trainer"] |= {"max_epochs": 6, "enable_progress_bar": False, "accelerator": "cpu"}
            content["lr_scheduler"]["init_args"]["T_max"] = 6
        if command["name"].endswith("-early"):
            command["set"] |= {"trainer.max_epochs": 1, "lr_scheduler.T_max": 1}
        if name == "report":
            arguments["evidence"] = {"after 6 epochs": "$root/evidence", "after 1 epochs": "$root/early_evidence"}

    left = ("cnn", "fixup", "evidence", "cnn-early", "fixup-early", "early_evidence", "report")
    recipe = shortened(RECIPES / "table1", tmp_path_factory.mktemp("recipe"), left, edit)
    out = tmp_path_factory.mktemp("table")
    return out, run_table(recipe, out)[0]


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
    own, uncertain = dict(model.named_parameters()), matrices(model)
    modules = {n.rpartition(".")[0] for n in uncertain}
    assert all(isinstance(model.get_submodule(m), (nn.Linear, nn.Conv2d)) for m in modules)
    assert sum(p.ndim >= 2 for p in own.values()) == sum(own[n].ndim >= 2 for n in uncertain) + (name == "T-Former")
    la = LinearizedLaplace(model, graph=graph, evaluate_at="map", parameters=uncertain).fit([(x, torch.arange(6) % 4)])
    la.optimize_evidence()
    assert len(la.report()) > 1 or name == "FixUp"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_can_be_initialized_anew(name: str) -> None:
    """Members trained at once start from ``reset_parameters``: the same distribution as a new module."""
    model = ARCHITECTURES[name](num_classes=4)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7.0)
    first, second = initialized(model, 1), initialized(model, 2)
    torch.manual_seed(0)
    fresh = dict(ARCHITECTURES[name](num_classes=4).named_parameters())
    for (key, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        spread = float(fresh[key].detach().std()) if fresh[key].numel() > 1 else 0.0
        if spread == 0:
            assert torch.equal(a, fresh[key]) and torch.equal(b, fresh[key]), key  # a constant
        else:
            assert not (a == 7.0).any() and not torch.equal(a, b), key
        if a.numel() > 200:
            assert float(a.detach().std()) == pytest.approx(spread, rel=0.25), key


def test_fixup_starts_as_its_paper_says() -> None:
    model = FixUpResNet(width=8, blocks=(2, 2))
    for block in model.blocks:
        assert not block.conv2.weight.any() and not block.biases.any() and block.scale == 1
        fan_in = block.conv1.weight[0].numel()
        expected = (2 / fan_in) ** 0.5 / 4**0.5  # Kaiming's, over the square root of the number of branches
        assert float(block.conv1.weight.detach().std()) == pytest.approx(expected, rel=0.15)
    assert not model.head.weight.any() and not model.head.bias.any()


def test_rows_equal_a_hand_computation(table: tuple[Path, dict[str, Any]]) -> None:
    out, results = table
    data, found = DigitsDataModule(**SIZES), results["evidence"]
    model = CNN(width=2).eval()
    model.load_state_dict(SampleStore.open(out / "cnn" / "samples")[1])
    itself = found["networks"]["CNN"][1]
    with torch.no_grad():
        for column, own in (("nll", data.test), ("train_nll", data.train)):
            assert itself[column] == pytest.approx(float(nn.functional.cross_entropy(model(own.x), own.y)), rel=1e-5)
        logits, classes = model(data.val.x), data.val.y
        scales = [10 ** (k / 200) for k in range(-200, 201)]
        best = min(scales, key=lambda s: float(nn.functional.cross_entropy(s * logits, classes)))
        assert itself["scaled"]["sharpness"] == pytest.approx(best, rel=0.08)  # of a grid in steps of 12 %
        test = nn.functional.cross_entropy(itself["scaled"]["sharpness"] * model(data.test.x), data.test.y)
        assert itself["scaled"]["nll"] == pytest.approx(float(test), rel=1e-5)
    graph = discover_symmetries(model, data.train.x[:2])
    for choice in CHOICES:
        row, prior = found["rows"][choice]["CNN"][1], choice.partition("/")[2]
        la = LinearizedLaplace(model, graph=graph, prior=prior, evaluate_at="map", parameters=matrices(model))  # type: ignore
        la.fit([(data.train.x, data.train.y)])
        la.set_precision({name: group["precision"] for name, group in row["groups"].items()})
        p = la.predictive(data.test.x, num_samples=50)
        assert row["nll"] == pytest.approx(float(-p[torch.arange(40), data.test.y].log().mean()), rel=1e-3)
        assert row["gamma"] == pytest.approx(sum(g.gamma for g in la.report()), rel=1e-3)
    assert len(found["rows"]["tangent_mode/per_group"]["FixUp"][0]["groups"]) > 3  # one for each layer


def test_the_report_shows_them_beside_the_papers(table: tuple[Path, dict[str, Any]]) -> None:
    out, results = table
    text = (out / "report" / "report.md").read_text()
    assert f"{shown(results['evidence']['rows']['map/single']['CNN'])} *0.253 ± 0.001*" in text.replace(OPEN, "")
    assert "Test NLL after 6 epochs" in text and "Test NLL after 1 epochs" in text
    for kind in ("evidence", "early_evidence"):
        for by_name in results[kind]["rows"].values():
            for runs in by_name.values():
                assert f"{sum(r['converged'] for r in runs)}/2 converged" in text
                assert f"{shown(runs)}{'' if all(r['converged'] for r in runs) else OPEN} " in text
    rows, networks = results["evidence"]["rows"], results["evidence"]["networks"]
    pairs = zip(rows["tangent_mode/per_group"]["CNN"], networks["CNN"], strict=True)  # on the same networks
    gains = torch.tensor([a["nll"] - b["nll"] for a, b in pairs], dtype=torch.float64)
    scaled = [run["scaled"] for run in networks["CNN"]]
    assert f"| network, temperature scaled | {shown(scaled)} |" in text
    changes = text.partition("## What each choice changes after 6 epochs")[2]
    assert "| calibrated Laplace (θ*, several λ) instead of the scaled network |" in changes
    line = changes.partition("| Laplace (θ*, several λ) instead of the network")[2]
    assert line.split("|")[1].strip(f" {OPEN}") == f"{gains.mean():+.3f} ± {gains.std() / 2**0.5:.3f}"


def test_an_evidence_that_was_cut_goes_on(table: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    out, whole = table

    def measure(folder: Path, most: int = 4) -> Outcome:
        networks = {"CNN": Trained(CNN(width=2), out / "cnn" / "samples")}
        settings = Settings(1000, tolerance=0.1, mode_tolerance=0.5, num_samples=50, max_iterations=most)
        return optimize_evidence(folder, networks, DigitsDataModule(**SIZES), CHOICES, settings, device="cpu")

    found = assert_goes_on(measure, tmp_path)
    assert found.results["rows"] == {k: {"CNN": r["CNN"]} for k, r in whole["evidence"]["rows"].items()}
    with pytest.raises(FileError, match="other options, or from other networks or data"):
        measure(tmp_path, 5)
    with pytest.raises(FileError, match="is no sample store"):
        nowhere = {"CNN": Trained(CNN(width=2), tmp_path)}
        optimize_evidence(tmp_path, nowhere, DigitsDataModule(**SIZES), CHOICES, Settings())


@pytest.mark.parametrize("choice", ["tangent_mode/per_group", "tangent_mode/single/flat"])
def test_a_search_that_was_cut_goes_on(
    choice: str, table: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the weights and precisions of its last minute, to the same optimum."""
    data, trained, told = DigitsDataModule(**SIZES), Trained(CNN(width=2), table[0] / "cnn" / "samples"), []
    settings = Settings(30, tolerance=1e-3, mode_tolerance=0.01)

    def cut(info: dict[str, Any]) -> None:
        told.append(info)
        if info.get("iteration") == 3:
            raise KeyboardInterrupt

    def optimized(place: Path | None, progress: Any = None) -> tuple[LinearizedLaplace, EvidenceResult]:
        work = Work(trained, 0, Images(data, "cpu"), settings, place, progress=progress)
        return work.optimize(Choice.parse(choice))[:2]

    whole, found = optimized(None)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(time, "monotonic", count(step=100).__next__)
        optimized(tmp_path / "new" / "CNN-0", cut)
    (file,) = (tmp_path / "new").iterdir()
    kept = read_tensors(file)
    assert kept["iteration"] == 2 and torch.equal(kept["theta"], told[-2]["theta"])
    told.clear()
    la, again = optimized(tmp_path / "new" / "CNN-0", told.append)
    counted = [info for info in told if "iteration" in info]
    assert [info["iteration"] for info in counted] == list(range(2, again.iterations + 1))
    assert torch.equal(counted[0]["theta"], kept["theta"])
    assert found.converged and again.converged and again.iterations > 2
    torch.testing.assert_close(la.log_precision, whole.log_precision, atol=0.02, rtol=0)
    assert again.log_marginal_likelihood == pytest.approx(found.log_marginal_likelihood, abs=0.01)
    kept, settings = read_tensors(file), replace(settings, num_samples=5)  # predictions can be cut, too
    told.clear()
    row = Work(trained, 0, Images(data, "cpu"), settings, tmp_path / "new" / "CNN-0", progress=told.append).row(choice)
    assert torch.equal(next(info for info in told if "iteration" in info)["theta"], kept["theta"])
    assert row["converged"] and not file.exists()


def test_every_row_says_how_far_it_is(
    table: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Rows of large networks take hours: how many are done, which one is at work, and how far that is."""
    networks = {"CNN": Trained(CNN(width=2), table[0] / "cnn" / "samples")}
    settings = Settings(30, tolerance=0.1, mode_tolerance=0.5, num_samples=5, max_iterations=2)
    monkeypatch.setattr(time, "monotonic", count(step=20).__next__)  # a line every 15 seconds
    optimize_evidence(tmp_path, networks, DigitsDataModule(**SIZES), CHOICES[:1], settings, device="cpu")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rows done 0/4  of CNN, network itself" and lines[-1].startswith("rows done 4/4, ")
    for stage in ("curvature batch 2/2", "evidence iteration 2", "prediction batch 2/2"):
        now = [line.partition("  of CNN, M(θ*), several λ  now ") for line in lines]
        assert any(done.endswith(" left") and what.startswith(stage) for done, _, what in now), lines


@pytest.mark.parametrize(("name", "image"), [("table1", 8), ("table1-mnist-small", 14), ("table1-mnist", 28)])
def test_the_tables_differ_in_size_alone(name: str, image: int) -> None:
    table, first = load_table(RECIPES / name), load_table(RECIPES / "table1")
    assert table.paper == first.paper
    kinds = [[(c.name, c.command, c.needs) for c in one.commands] for one in (table, first)]
    assert kinds[0] == kinds[1]
    commands = commands_of(RECIPES / name)
    early, late = (commands[f"{p}evidence"].content["command"]["init_args"] for p in ("early_", ""))
    assert list(late["networks"]) == list(ARCHITECTURES) and early["settings"] == late["settings"]
    epochs = {}  # of every fit; its schedule ends with it
    for command in table.commands:
        if command.command == "fit":
            content = commands[command.name].content
            epochs[command.name] = command.set.get("trainer.max_epochs", content["trainer"]["max_epochs"])
            ends = command.set.get("lr_scheduler.T_max", content["lr_scheduler"]["init_args"]["T_max"])
            routine = content["routine"]["init_args"]
            assert ends == epochs[command.name] and routine["samples"] == "$root/$name/samples"
            assert routine["num_members"] == content["data"]["init_args"]["orders"]
    assert len({epochs[n] for n in epochs if n.endswith("-early")}) == 1
    assert all(epochs[f"{n}-early"] < epochs[n] for n in epochs if not n.endswith("-early"))
    titles = commands["report"].content["command"]["init_args"]["evidence"]
    assert list(titles) == [f"after {epochs[n]} epochs" for n in ("cnn", "cnn-early")]
    for network in late["networks"].values():
        model = resolve(network["model"]["class_path"])(**network["model"]["init_args"])
        assert model(torch.rand(2, 1, image, image)).shape == (2, 10)


def test_images_are_averaged_over_squares(tmp_path: Path) -> None:
    plant_images(tmp_path / "data")
    options: Any = {"dataset": "mnist", "root": tmp_path / "data", "train_size": 10}
    large, small = SmallIDXDataModule(pool=1, **options).train, SmallIDXDataModule(pool=2, **options).train
    assert small.x.shape == (10, 1, 14, 14) and torch.equal(small.y, large.y)
    torch.testing.assert_close(small.x, nn.functional.avg_pool2d(large.x, 2), rtol=0, atol=0.5 / 255 + 1e-6)
    with pytest.raises(ValueError, match="pool must divide 28"):
        SmallIDXDataModule(pool=3)
