"""Table 2 of arXiv 2206.08900: one residual network on color images, Kronecker factors, evidence in several ways.

The paper's two rows for theta* are read as follows: "simple" has the curvature at the network's own outputs
(``tangent_mode``), "full" at the outputs of the tangent model at theta*, where it is taken anew as theta* moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import torch
from torch import Tensor, nn

from tu_symmetry.datamodules import ImageDataModule
from tu_symmetry.experiments.linearized_laplace import rows as paper
from tu_symmetry.experiments.linearized_laplace.evidence import Settings, Trained, Work, all_rows, chosen
from tu_symmetry.experiments.linearized_laplace.rows import NETWORK, Choice, Runs, Where
from tu_symmetry.files import read_tensors, write_safetensors
from tu_symmetry.laplace.curvature import fit_curvature
from tu_symmetry.laplace.likelihood import Categorical
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.laplace.report import EvidenceResult
from tu_symmetry.laplace.tangent import Linearization, TangentModel, evaluating, jacobians
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import Grid, mean_and_error
from tu_symmetry.tables.outcome import Outcome
from tu_symmetry.tables.report import Found, Report, table

CHOICES = (
    "map/single",
    "map/per_group",
    "map/per_group/flat",
    "tangent_mode/single",
    "tangent_mode/per_group",
    "tangent_mode/per_group/flat",
    "full/single",
    "full/per_group",
)
COLUMNS = {"nll": "NLL", "accuracy": "accuracy %", "ece": "ECE %", "auroc": "OOD AUROC %"}


class StoredJacobian(TangentModel):
    """The tangent model with the Jacobian of every batch of a data set in memory: ``samples x outputs x size``.

    Products with the stored batches are matrix products, an order of magnitude faster than automatic differentiation.
    A batch is known by its place in memory, so it has to come from the same tensors again.

    Args:
        tangent: the network and its chosen parameters.
        data: the data set ``(inputs, targets)``, in the batches of the passes to come.
        chunk: samples differentiated at once.
    """

    def __init__(self, tangent: TangentModel, data: Iterable[Any], chunk: int = 50) -> None:
        super().__init__(tangent.model, tangent.names, class_axis=tangent.class_axis)
        self._stored: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._kept: list[Tensor] = []  # while they live, nothing else has their places in memory
        for inputs, _ in data:
            with evaluating(tangent.model):
                outputs = self.outputs(inputs)
                found = outputs.new_empty(*outputs.shape, self.size)
                for start in range(0, len(inputs), chunk):
                    part = inputs[start : start + chunk]
                    found[start : start + chunk] = jacobians(self, part, outputs.shape[1:])
            self._stored[self._key(inputs)] = outputs, found
            self._kept.append(inputs)

    joins = False  # a joined batch would have another place in memory

    def linearize(self, inputs: Any) -> Linearization:
        """The stored Jacobian."""
        outputs, _ = self.jvp(inputs, self.point())
        return Linearization(
            outputs, lambda vector: self.jvp(inputs, vector)[1], lambda cotangent: self.vjp(inputs, cotangent)
        )

    @staticmethod
    def _key(inputs: Any) -> tuple[int, int]:
        return (inputs.data_ptr(), len(inputs)) if isinstance(inputs, Tensor) else (0, 0)

    def jvp(self, inputs: Any, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs, and the Jacobian times a flat vector, both ``[batch, outputs]``."""
        if self._key(inputs) not in self._stored:
            return super().jvp(inputs, vector)
        outputs, jacobian = self._stored[self._key(inputs)]
        return outputs, jacobian @ vector

    def vjp(self, inputs: Any, cotangent: Tensor) -> Tensor:
        """The transposed Jacobian times ``[batch, outputs]``, summed over the batch: a flat vector."""
        if self._key(inputs) not in self._stored:
            return super().vjp(inputs, cotangent)
        jacobian = self._stored[self._key(inputs)][1]
        return cotangent.flatten() @ jacobian.flatten(0, 1)


@dataclass(frozen=True)
class KroneckerSettings(Settings):
    """How the evidence is optimized, and the predictive computed; for networks whose factors are kept between rows.

    Attributes:
        mode_tolerance: distance of theta* in posterior standard deviations, over all directions together.
        refreshes: how often a ``full`` choice takes the curvature anew at most, until the precisions stay; 1 or more.
        stored_jacobian: keep the training data's Jacobian in memory (images x classes x weights numbers), which makes
            theta* many times faster to find.
    """

    tolerance: float = 0.05
    mode_tolerance: float = 1.0
    refreshes: int = 2
    stored_jacobian: bool = False


def optimize_kronecker_evidence(
    out: Path,
    model: nn.Module,
    networks: Path,
    data: ImageDataModule,
    settings: KroneckerSettings = KroneckerSettings(),
    choices: Sequence[str] = CHOICES,
    device: str = "auto",
) -> Outcome:
    """Choose precisions in every way for every network: quality of the predictive, precisions, effective dimensions.

    Args:
        out: every row is kept in its ``parts`` at once; cut and called again, the others follow.
        data: the data that the networks were trained on, without augmentation.
        choices: rows of the table, ``tangent_mode``, ``map`` or ``full``, ``/single`` or ``/per_group``, and ``/flat``
            for no hyperprior; a ``full`` one comes after the ``tangent_mode`` one that it starts from.
    """
    rows = read_choices(choices, settings.refreshes)
    trained = Trained(model, networks)
    found, sizes = all_rows(KroneckerWork, out, {"network": trained}, data, settings, rows, device)
    results = {key: by_name["network"] for key, by_name in found.items()}
    itself = results.pop(NETWORK)
    every = [row for runs in results.values() for row in runs]
    return Outcome(
        {"networks": itself, "rows": results, "parameters": trained.size, "sizes": sizes},
        f"{len(every)} evidences, {sum(not row['converged'] for row in every)} of them not converged to the tolerances",
    )


def read_choices(texts: Sequence[str], refreshes: int) -> list[Choice]:
    """Read the rows of the table."""
    choices = paper.parse_all(texts, get_args(Where))
    for number, choice in enumerate(choices):
        start = choice._replace(where="tangent_mode")
        if choice.where == "full" and start not in choices[:number]:
            raise ValueError(f"choice {choice.key!r} starts from {start.key!r}: list that first")
        if choice.where == "full" and refreshes < 1:
            raise ValueError(
                f"refreshes is {refreshes}, but choice {choice.key!r} takes the curvature anew once or more: raise it, "
                "or leave the choice out"
            )
    return choices


class OutputsAt(Categorical):
    """Softmax classification whose Hessian is taken at given logits, row by row in the order of one pass."""

    def __init__(self, network: Tensor, logits: Tensor) -> None:
        super().__init__()
        self.network, self.logits, self.read = network, logits, 0

    def hessian_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Root of the Hessian at the next rows of the given logits, in place of the network's outputs."""
        rows = slice(self.read, self.read + len(outputs))
        torch.testing.assert_close(outputs, self.network[rows], rtol=1e-3, atol=1e-3)
        self.read += len(outputs)
        return super().hessian_root(self.logits[rows], targets)


class KroneckerWork(Work):
    """All rows of one network, with those that take the curvature anew; the Jacobian is kept between them."""

    settings: KroneckerSettings
    _tangent: TangentModel | None = None

    def start(self, choice: Choice) -> LinearizedLaplace:
        """A Laplace approximation at its initial precisions."""
        la = super().start(choice)
        if choice.where == "map" or not self.settings.stored_jacobian:
            return la
        if self._tangent is None:
            self._tangent = StoredJacobian(la.fitted.tangent, self.train)
        return LinearizedLaplace.from_fitted(la.fitted.with_tangent(self._tangent), self.train)

    def optimize(self, choice: Choice) -> tuple[LinearizedLaplace, EvidenceResult, float]:
        """Precisions and weights by the evidence, which are kept for choices that start from them."""
        moved = 0.0
        if choice.where == "full":
            la = self.resumed(self.start(choice), choice._replace(where="tangent_mode"))
            for _ in range(self.settings.refreshes):
                before = la.log_precision
                la = self.retaken(la)
                result = chosen(la, choice, self.settings)
                moved = float((la.log_precision - before).abs().max())
                if moved <= self.settings.tolerance:
                    break
        else:
            la, result, _ = super().optimize(choice)
        self.place.parent.mkdir(parents=True, exist_ok=True)
        write_safetensors(self._file(choice), {"theta": la.theta, "log_precision": la.log_precision})
        return la, result, moved

    def _file(self, choice: Choice) -> Path:
        return self.place.with_name(f"{self.place.name}-{choice.key.replace('/', '-')}.safetensors")

    def resumed(self, la: LinearizedLaplace, earlier: Choice) -> LinearizedLaplace:
        """The same curvature with the precisions and weights of another choice."""
        found = read_tensors(self._file(earlier))
        fitted = la.fitted.with_hyperparameters(found["log_precision"]).with_theta(found["theta"])
        return LinearizedLaplace.from_fitted(fitted, self.train)

    def retaken(self, la: LinearizedLaplace) -> LinearizedLaplace:
        """The same precisions and weights with the curvature at the outputs of the tangent model at theta*."""
        fitted = la.fitted
        pairs = [fitted.tangent.jvp(x, fitted.theta - fitted.tangent.point()) for x, _ in self.train]
        network, change = (torch.cat(own) for own in zip(*pairs, strict=True))
        blocks, summary = fit_curvature(
            fitted.tangent,
            OutputsAt(network, network + change),
            self.train,
            fitted.groups,
            fitted.options,
            whole=fitted.curvature.whole,
        )
        return LinearizedLaplace.from_fitted(fitted.with_curvature(blocks, summary), self.train)


def report_residual(out: Path, recipe: str, evidence: Path) -> Outcome:
    """Write ``report.md`` and ``evidence.png``, from the folder of :func:`optimize_kronecker_evidence`."""
    page, found = Report(out, recipe), Outcome.load(evidence).results
    rows: dict[str, Runs] = {NETWORK: found["networks"], **found["rows"]}
    page.add(paper.images_line(f"{len(rows[NETWORK])} networks of {found['parameters']:,} parameters", found))
    page.add(quality_table(rows, page.table.paper, page.table.title), dimension_table(found["rows"]))
    if several := _several(found["rows"]):
        page.add(group_table(several))
    page.figure("evidence", draw_evidence, rows, title="Figure", alt="test likelihood and groups")
    return page.done()


def _several(rows: Mapping[str, Runs]) -> dict[str, Runs]:
    """The rows with several groups."""
    return {key: runs for key, runs in rows.items() if all(len(run.get("groups", ())) > 1 for run in runs)}


def quality_table(rows: Mapping[str, Runs], published: Found, title: str) -> Grid:
    """Test NLL beside the paper's, accuracy, calibration, detection."""

    def show(key: str, column: str) -> str:
        runs, theirs = rows[key], published.get(key, {})
        if column != "nll":
            return paper.cell([100 * run[column] for run in runs], 1) + paper.marks(runs)
        known = theirs.get("nll") is not None and theirs.get("error") is not None
        beside = f"\n{theirs['nll']:.3f} ± {theirs['error']:.3f}" if known else ""
        return paper.cell([run["nll"] for run in runs]) + paper.marks(runs) + beside

    columns: dict[str, Any] = {
        name: lambda key, column=column: show(key, column)
        for column, name in COLUMNS.items()
        if all(column in run for runs in rows.values() for run in runs)
    }
    caption = (
        "mean ± standard error over networks; second line: the paper's NLL, which has an offset (compare orderings and "
        f"gaps). AUROC: of the predictive entropy. {paper.OPEN_CAPTION}. {paper.MOVING}: the last refresh of the "
        "curvature still moved a log precision by more than the tolerance, so that this is no fixed point"
    )
    return table(title, {paper.title_of(key): key for key in rows}, columns, caption)


def dimension_table(rows: Mapping[str, Runs]) -> Grid:
    """What the evidence chose, and how its optimization ended."""

    def precisions(runs: Runs) -> list[float]:
        return [g["precision"] for run in runs for g in run["groups"].values()]

    columns = {
        "eff. dimension": lambda runs: f"{fmean(run['gamma'] for run in runs):.0f}",
        "λ": lambda runs: f"{min(precisions(runs)):.3g} to {max(precisions(runs)):.3g}",
        "pruned groups": lambda runs: f"{sum(run['pruned'] for run in runs)}/{len(precisions(runs))}",
        "log evidence": lambda runs: f"{fmean(run['log_evidence'] for run in runs):.0f}",
        "iterations": lambda runs: "/".join(str(run["iterations"]) for run in runs),
        "converged": lambda runs: f"{sum(run['converged'] for run in runs)}/{len(runs)}",
        "largest change": lambda runs: f"{max(run['change'] for run in runs):.2g}",
    }
    made = table(
        "Effective dimensions and precisions", {paper.title_of(k) + paper.marks(r): r for k, r in rows.items()}, columns
    )
    caption = (
        "means over networks; λ: smallest and largest of all groups; log evidence in nats, over the training data; "
        "largest change: of a log λ in the last iteration, and from before to after the last refresh of the curvature"
    )
    moved = [f"{max(run['moved'] for run in runs):.2g}" if k.startswith("full") else "" for k, runs in rows.items()]
    body = [[*row, text] for row, text in zip(made.rows, moved, strict=True)]
    return Grid(made.title, [*made.header, "by a refresh"], body, caption)


def group_table(rows: Mapping[str, Runs]) -> Grid:
    """Precision and effective dimension of each group."""

    def show(runs: Runs, name: str) -> str:
        found = [run["groups"][name] for run in runs]
        log_mean = torch.tensor([g["precision"] for g in found], dtype=torch.float64, device="cpu").log().mean()
        return f"{log_mean.exp().item():.3g} ({fmean(g['gamma'] for g in found):.0f})"

    first = next(iter(rows.values()))[0]["groups"]
    columns: dict[str, Any] = {
        paper.title_of(key) + paper.marks(runs): lambda name, runs=runs: show(runs, name) for key, runs in rows.items()
    }
    caption = (
        "λ (geometric mean over networks) and in brackets the effective dimension; behind each group its weights. "
        f"{paper.OPEN_CAPTION}"
    )
    return table("Precisions by group", {f"{n} ({first[n]['size']:,})": n for n in first}, columns, caption)


def draw_evidence(path: Path, rows: Mapping[str, Runs]) -> None:
    """Test NLL of every row, and the precision of every group relative to its center; crosses had not converged."""
    several = _several(rows)
    with plots.figure(path, 2 if several else 1, width=5.4, height=3.6) as axes:
        for place, (key, runs) in enumerate(reversed(list(rows.items()))):
            mean, error = mean_and_error([run["nll"] for run in runs])
            color = plots.GRAY if key == NETWORK else paper.COLORS[key.partition("/")[0]]
            face = "white" if key.endswith("/flat") else color
            shape = "x" if paper.OPEN in paper.marks(runs) else "o"
            axes[0].errorbar(mean, place, xerr=error, fmt=shape, color=color, markerfacecolor=face, capsize=2)
        axes[0].set_yticks(range(len(rows)), [paper.title_of(key) for key in reversed(list(rows))])
        axes[0].set(title="Test NLL", xlabel="nats, mean ± standard error over networks; ×: had not converged")
        if several:
            names = list(next(iter(several.values()))[0]["groups"])
            for key, runs in several.items():
                relative = [
                    fmean(run["groups"][n]["precision"] / run["groups"][n]["center"] for run in runs) for n in names
                ]
                axes[1].plot(
                    range(len(names)),
                    relative,
                    marker="x" if paper.OPEN in paper.marks(runs) else "o",
                    color=paper.COLORS[key.partition("/")[0]],
                    linestyle=":" if key.endswith("/flat") else "-",
                    label=paper.title_of(key),
                )
            axes[1].set_xticks(range(len(names)), names, rotation=90, fontsize=6)
            axes[1].set(title="Precision of each group", ylabel=r"$\lambda_g$ over its center", yscale="log")
            axes[1].legend(loc="best", fontsize=6)
