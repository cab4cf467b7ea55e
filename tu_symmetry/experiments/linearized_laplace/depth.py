"""Model selection by the evidence: networks of several depths on the toy's curves, exact evidences beside test NLLs.

The talk on arXiv 2206.08900 shows fits of 1, 5 and 20 hidden layers as the question that an evidence is to answer. With
few observations the evidence of the tangent model needs no Kronecker factors: :class:`DualLaplace` has it exactly.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr

from tu_symmetry.experiments.linearized_laplace.rows import Choice, cell, marks
from tu_symmetry.experiments.linearized_laplace.toy import (
    POINTS,
    REACH,
    BatchNormMLP,
    CurveDataModule,
    draw_band,
    judged,
    squared_error,
)
from tu_symmetry.experiments.study import tracked
from tu_symmetry.files import digest_folder
from tu_symmetry.laplace.dual.laplace import DualLaplace
from tu_symmetry.laplace.dual.optimize import BoundReachedWarning, optimize
from tu_symmetry.laplace.dual.priors import IsotropicPrior
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.states import State
from tu_symmetry.tables.outcome import Outcome, Parts, digest_tensors
from tu_symmetry.tables.report import Found, Report, table

CHOICES = [Choice(where, prior) for prior in ("per_group", "single") for where in ("tangent_mode", "map")]
SHOWN, FIRST = CHOICES[:2], CHOICES[0].key
RIVALS = {  # criteria of which less is better, beside the evidences
    "loss": "training error, batch statistics",
    "train": "training error, running statistics",
    "weights": "number of weights",
}


def compare_depths(out: Path, networks: dict[str, Path], data: CurveDataModule) -> Outcome:
    """Exact log evidence and test NLL of several :class:`BatchNormMLP` of each depth, for four choices of precisions.

    ``networks`` are folders of sample stores by what their depth is called. All weights are uncertain, BatchNorm's too,
    without hyperprior; the likelihood knows the noise of the data. Each network is kept in the ``parts`` of ``out``.
    """
    stores = {name: SampleStore.open(folder) for name, folder in networks.items()}
    given = digest_tensors(data.train.x, data.train.y, data.test.x, data.test.y)
    digests = [digest_folder(folder) for folder in networks.values()]
    parts = Parts(out / "parts", [*digests, given, data.noise, POINTS, REACH])
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in networks}
    jobs = [(name, k) for name, store in stores.items() for k in range(len(store))]
    for name, k in tracked("depths", jobs):
        rows[name].append(parts.take(f"{name}-{k}", _row, stores[name][k], data))
    every = [run[choice.key]["converged"] for runs in rows.values() for run in runs for choice in CHOICES]
    grid = torch.linspace(-REACH, REACH, POINTS, dtype=torch.float64, device="cpu")
    return Outcome(
        {"rows": rows, "grid": grid, "train_x": data.train.x[:, 0], "train_y": data.train.y},
        f"{len(every)} evidences, {every.count(False)} of them not converged",
    )


def _row(state: State, data: CurveDataModule) -> dict[str, Any]:
    """Errors of one network, and its evidence, test NLL and band for every choice."""
    units = {int(name.partition(".")[0]): len(w) for name, w in state.items() if w.ndim == 2}  # by place of the layer
    model = BatchNormMLP([units[place] for place in sorted(units)[:-1]]).double()
    train, test, variance = data.train, data.test, data.noise**2
    grid = torch.linspace(-REACH, REACH, POINTS, dtype=torch.float64, device="cpu").unsqueeze(-1)
    x, sizes = torch.cat([train.x, grid, test.x]), [len(train.x), POINTS, len(test.x)]
    with torch.no_grad():
        model.load_state_dict(state)
        loss = squared_error(model(train.x), train.y)
        model.load_state_dict(state)  # without what the running statistics have just seen
        own, mean, tested = model.eval()(x).split(sizes)
    found: dict[str, Any] = {
        "weights": sum(p.numel() for p in model.parameters()),
        "loss": math.sqrt(loss / len(train.x)),
        "train": math.sqrt(squared_error(own, train.y) / len(train.x)),
        "network": judged(test.y - tested[:, 0], variance)["nll"],
        "mean": mean[:, 0],
    }
    known, start = (math.log(variance), math.log(variance)), {"map": 0.0, "tangent_mode": 0.0}
    for prior in ("single", "per_group"):
        normalized = model.matrices[:-1] if prior == "per_group" else []
        groups = [[name] for name in normalized] + [[n for n, _ in model.named_parameters() if n not in normalized]]
        blocks = [IsotropicPrior(group) for group in groups]
        seen = torch.eye(len(train.x), len(x), dtype=torch.float64, device="cpu")
        la = DualLaplace(model, structured=blocks, observation=seen).fit([(x, train.y)])
        for choice in (choice for choice in CHOICES if choice.prior == prior):
            la.evaluate_at = "map" if choice.where == "map" else "tangent_mode"
            begin = la.initial(variance)
            begin[:-1] = start[choice.where]  # several λ from where a single one is best
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", BoundReachedWarning)  # a group that the evidence switches off
                best = optimize(la.value_and_gradient, begin, [*la.bounds()[:-1], known], la.names)
            la.phi, start[choice.where] = best.phi, float(best.phi[0])
            _, band, spread = la.function_covariance()[1].diagonal().clamp(min=0).split(sizes)
            nll = judged(test.y - tested[:, 0], spread + variance)["nll"]
            found[choice.key] = {"log_evidence": -best.objective, "nll": nll, "epistemic": band.sqrt()}
            found[choice.key]["converged"] = best.converged
    return found


def report_depths(out: Path, recipe: str, curves: dict[str, Path]) -> Outcome:
    """Write ``report.md`` with a table and the ranks of each curve, from the folders of :func:`compare_depths`."""
    page, found = Report(out, recipe), {name: Outcome.load(folder).results for name, folder in curves.items()}
    page.figure("depths", draw_depths, found, alt="bands of every depth")
    for name, own in found.items():
        page.add(depth_table(own, name), rank_table(own, f"Which depth each criterion chooses: {name}"))
    return page.done()


def depth_table(found: Found, title: str) -> Grid:
    """Errors, likelihoods and evidences of every depth, mean and standard error over networks."""

    def mean(digits: int, *path: str) -> Callable[[Any], str]:
        def show(runs: Any) -> str:
            last = runs if len(path) == 1 else [run[path[0]] for run in runs]
            return cell([run[path[-1]] for run in last], digits) + marks(last)

        return show

    columns: dict[str, Callable[[Any], str]] = {"weights": lambda runs: f"{runs[0]['weights']:,}"}
    columns |= {RIVALS[name]: mean(3, name) for name in ("loss", "train")} | {"test NLL, network": mean(3, "network")}
    columns |= {f"test NLL, {choice.title}": mean(3, choice.key, "nll") for choice in SHOWN}
    columns |= {f"log Z, {choice.title}": mean(1, choice.key, "log_evidence") for choice in SHOWN}
    caption = (
        "mean ± standard error over networks; errors: root mean squares; NLL of one value, evidence of all, in nats"
    )
    return table(title, found["rows"], columns, caption, "hidden layers")


def rank_table(found: Found, title: str) -> Grid:
    """Which depths each criterion chooses, its rank correlation with the networks' test NLL, what its choice costs."""
    names = list(found["rows"])
    runs = [[own[k] for own in found["rows"].values()] for k in range(len(found["rows"][names[0]]))]
    scores = {f"log Z, {c.title}": [[-row[c.key]["log_evidence"] for row in run] for run in runs] for c in CHOICES}
    scores |= {rival: [[row[key] for row in run] for run in runs] for key, rival in RIVALS.items()}
    nlls = [[row["network"] for row in run] for run in runs]
    columns: dict[str, Callable[[Any], str]] = {
        "layers chosen": lambda own: ", ".join(names[score.index(min(score))] for score in own),
        "rank correlation": lambda own: cell(
            [float(spearmanr(*pair).statistic) for pair in zip(own, nlls, strict=True)], 2
        ),
        "NLL lost": lambda own: cell([nll[s.index(min(s))] - min(nll) for s, nll in zip(own, nlls, strict=True)]),
    }
    caption = (
        "over the k-th networks of all depths, mean ± standard error; rank correlation with the networks' test NLL, "
        "and how much higher that is at the depth that is chosen than at the best (nats)"
    )
    return table(title, scores, columns, caption, "criterion")


def draw_depths(path: Path, curves: Mapping[str, Found]) -> None:
    """The band of the first network of every depth (columns) on every curve (rows), by the first choice."""
    with plots.grid(path, len(curves), max(len(f["rows"]) for f in curves.values()), 2.3, 2.4, sharey=True) as axes:
        for line, (title, found) in zip(axes, curves.items(), strict=True):
            line[0].set_ylabel(title)
            for ax, (name, runs) in zip(line, found["rows"].items(), strict=False):
                own = runs[0][FIRST]
                draw_band(ax, found, runs[0]["mean"], own["epistemic"], plots.BLUE)
                text = f"log Z {own['log_evidence']:.0f}, test NLL {own['nll']:.2f}{marks([own])}"
                ax.text(0.03, 0.03, text, transform=ax.transAxes, fontsize=8)
                ax.set(title=f"{name} hidden layer{'s' if name != '1' else ''}", ylim=(-4, 4), xlim=(-REACH, REACH))
