"""The recipe along a training at a tiny size: distances are what they say, parts resume, and what the report claims."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_runs import assert_goes_on
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tu_symmetry.datamodules import DigitsDataModule
from tu_symmetry.experiments.linearized_laplace import Settings, Trained, measure_training, report_training
from tu_symmetry.experiments.linearized_laplace.networks import matrices
from tu_symmetry.experiments.linearized_laplace.rows import OPEN
from tu_symmetry.experiments.linearized_laplace.training import by_epoch, early_stopping, training_claims
from tu_symmetry.files import FileError
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.metrics.functional import gaussian_wasserstein
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.tables.models import MLP
from tu_symmetry.tables.outcome import Outcome

pytestmark = pytest.mark.filterwarnings("ignore")

PRIORS: Any = ("single", "per_group")
SETTINGS = Settings(batch_size=40, tolerance=0.1, mode_tolerance=0.3, max_iterations=4, num_samples=32)
RECIPE = "linearized_laplace/training-small"
HIDDEN = [5]
STEPS = (6, 36)  # two batches an epoch


def digits(val_size: int = 30) -> DigitsDataModule:
    return DigitsDataModule(train_size=60, val_size=val_size, test_size=30, batch_size=40)


def network() -> MLP:
    return MLP(64, 10, HIDDEN)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module, dict[str, Any]]:
    """A network with two snapshots, the later of them as a module, and what was measured."""
    folder, data = tmp_path_factory.mktemp("training"), digits()
    store = SampleStore.create(folder / "samples", architecture="MLP", method="adam")
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(1, max(STEPS) + 1):
        optimizer.zero_grad()
        cross_entropy(model(data.train.x), data.train.y).backward()
        optimizer.step()
        if step in STEPS:
            store.append({name: t.detach().clone() for name, t in model.state_dict().items()}, chain=1, step=step)
    networks = {"MLP": Trained(network(), folder / "samples")}
    found = measure_training(folder / "out", networks, data, PRIORS, SETTINGS, device="cpu")
    found.save(folder / "out")
    return folder, model.eval(), found.results


def nll(p: Tensor, y: Tensor) -> float:
    return float(-p.detach().double().gather(1, y.unsqueeze(1)).log().mean())


def test_snapshots_are_measured_at_their_epochs(measured: tuple[Path, nn.Module, dict[str, Any]]) -> None:
    _, model, results = measured
    data, runs = digits(), results["runs"]["MLP"]
    assert [(run["chain"], run["epoch"]) for run in runs] == [(1, s / 2) for s in STEPS]
    own = runs[-1]
    with torch.no_grad():
        for column, pairs in (("train_nll", data.train), ("val_nll", data.val), ("nll", data.test)):
            assert own[column] == pytest.approx(nll(model(pairs.x).softmax(-1), pairs.y), rel=1e-5)
        scaled = own["scaled"]["sharpness"] * model(data.test.x)
        assert own["scaled"]["nll"] == pytest.approx(nll(scaled.softmax(-1), data.test.y), rel=1e-5)
    assert runs[0]["train_nll"] > own["train_nll"], "vacuous: nothing was learned"


@pytest.mark.parametrize("prior", PRIORS)
def test_distances_equal_a_hand_computation(prior: Any, measured: tuple[Path, nn.Module, dict[str, Any]]) -> None:
    """With the precisions of the rows: covariances, predictives, spreads; with the evidence's own weights: θ*."""
    _, model, results = measured
    data, own = digits(), results["runs"]["MLP"][-1][prior]
    covariances, predictives, spreads = [], [], []
    for where in ("map", "tangent_mode"):
        la = LinearizedLaplace(
            model, prior="single" if prior == "single" else "per_layer", evaluate_at=where, parameters=matrices(model)
        ).fit([(data.train.x, data.train.y)])
        if where == "tangent_mode":
            la.optimize_evidence(tolerance=0.1, mode_tolerance=0.3, max_iterations=4)
        assert len(own[where]["groups"]) == (1 if prior == "single" else 2)
        chosen = (g["precision"] for g in own[where]["groups"].values())
        la.set_precision(dict(zip((g.name for g in la.report()), chosen, strict=True)))
        covariances.append(la.function_covariance(data.test.x)[1])
        predictives.append(la.predictive(data.test.x, num_samples=32))
        spreads.append(covariances[-1].double().diagonal(dim1=-2, dim2=-1).sum(-1).sqrt())
        assert own[where]["spread"] == pytest.approx(float(spreads[-1].mean()), rel=1e-3)
        assert own[where]["nll"] == pytest.approx(nll(predictives[-1], data.test.y), rel=1e-3)
    distance = gaussian_wasserstein(*covariances)
    assert own["wasserstein"] == pytest.approx(float(distance.mean()), rel=1e-3)
    assert own["relative"] == pytest.approx(float((distance / spreads[1]).mean()), rel=1e-3)
    variation = (predictives[0] - predictives[1]).double().abs().sum(-1).mean() / 2
    assert own["total_variation"] == pytest.approx(float(variation), rel=1e-2)
    start = torch.cat([dict(model.named_parameters())[name].detach().flatten() for name in matrices(model)])
    way = la.theta - start
    assert own["relative_norm"] == pytest.approx(float(way.norm() / start.norm()), rel=0.05)
    length = (way @ la.posterior.precision_product(way)).sqrt()
    assert own["deviations"] == pytest.approx(float(length), rel=0.05)
    assert own["deviations"] > 0.5 and own["wasserstein"] > 0.01, "vacuous: nothing is apart"


def test_a_training_that_was_cut_goes_on(measured: tuple[Path, nn.Module, dict[str, Any]], tmp_path: Path) -> None:
    """Parts that are there are read, the others made; those of other data are not taken for these."""
    networks = {"MLP": Trained(network(), measured[0] / "samples")}

    def measure(out: Path, val_size: int = 30) -> Outcome:
        return measure_training(out, networks, digits(val_size), PRIORS, SETTINGS, device="cpu")

    assert assert_goes_on(measure, tmp_path, 1).results == measured[2]
    with pytest.raises(FileError, match="other options, or from other networks"):
        measure(tmp_path, 29)


def test_the_report_shows_them(measured: tuple[Path, nn.Module, dict[str, Any]]) -> None:
    folder, _, results = measured
    report_training(folder / "report", RECIPE, folder / "out")
    text = (folder / "report" / "report.md").read_text()
    assert (folder / "report" / "training.png").stat().st_size > 5000
    epochs = by_epoch(results["runs"]["MLP"])
    stop = early_stopping(epochs)
    assert f"{stop:g} (early stopping)" in text
    for runs in epochs.values():
        (own,) = (run["single"] for run in runs)
        assert f"| {own['wasserstein']:.2f}{'' if own['converged'] else OPEN} |" in text
    for line in training_claims(results):
        assert line in text


def planted(relative: dict[int, list[float]], open_ends: tuple[int, ...] = ()) -> dict[str, Any]:
    """Two networks that are best at epoch 2."""
    runs = []
    for epoch, values in relative.items():
        for chain, value in enumerate(values):
            row = {
                "relative": value, "wasserstein": 10 * value, "deviations": 3.0 + value, "relative_norm": 0.1,
                "total_variation": 0.2, "converged": epoch not in open_ends or chain == 0,
                "map": {"nll": 0.7, "converged": True}, "tangent_mode": {"nll": 0.4 + 0.01 * chain, "converged": True},
            }  # fmt: skip
            runs.append({"chain": chain, "epoch": epoch, "nll": 0.5, "val_nll": abs(epoch - 2) + 0.4, "single": row})
    return {"runs": {"net": runs}, "priors": ["single"]}


def test_claims_are_drawn_from_converged_rows_alone() -> None:
    grows = planted({1: [0.5, 0.6], 2: [0.4, 0.5], 8: [0.9, 1.0], 16: [0.02, 0.04]})
    found = list(training_claims(grows))
    assert "(epoch 16; more than 0.1 of the spread of M(θ*)): **did not hold**, 0.03 ± 0.01" in found[0]
    assert "(epoch 16 against 2): **did not hold**, -4.20 ± 0.40 logits" in found[1]
    assert "M(θ*) predicts better than M(θ~): **held**, test NLL +0.295 ± 0.005 nats" in found[4]
    cut = list(training_claims(planted({1: [0.5, 0.6], 2: [0.4, 0.5], 8: [0.9, 1.0], 16: [0.02, 0.04]}, (16,))))
    assert "(epoch 8; more than 0.1 of the spread of M(θ*)): **held**, 0.95 ± 0.05" in cut[0]
    assert "(epoch 8 against 2): **held**, +5.00 ± 0.00 logits" in cut[1]
    unsure = list(training_claims(planted({2: [0.4, 0.5], 8: [0.5, 0.4]})))
    assert "**not resolved (within one standard error)**, +0.000 ± 0.100 spreads" in unsure[2]
    assert "**no further conclusion**" in list(training_claims(planted({2: [0.4, 0.5], 8: [0.9, 1.0]}, (2,))))[1]
    (nothing,) = training_claims(planted({2: [0.4, 0.5], 8: [0.9, 1.0]}, open_ends=(2, 8)))
    assert "**no conclusion**" in nothing


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    store = SampleStore.create(tmp_path / "uneven", architecture="MLP", method="adam")
    for chain, step in ((0, 2), (1, 2), (1, 4)):
        store.append(network().state_dict(), chain=chain, step=step)
    networks = {"MLP": Trained(network(), tmp_path / "uneven")}
    for val_size, priors, match in (
        (0, PRIORS, "val_size must be at least 1"),
        (30, (), "priors: name single, per_group or both"),
        (30, PRIORS, "snapshots at different steps"),
    ):
        with pytest.raises(ValueError, match=match):
            measure_training(tmp_path, networks, digits(val_size), priors, SETTINGS)
