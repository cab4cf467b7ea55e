"""Table 1 of arXiv 2206.08900: test log-likelihood for precisions chosen by the evidence in four ways, by architecture.

The evidence is evaluated at the trained weights, M(θ~), or at the joint stationary point, M(θ*) (Recommendation 1), for
a single precision or one for each normalized group (Recommendation 2). Beside these: the network itself, and M(θ*) with
groups but without the hyperprior, which shows what the evidence alone does to normalized groups.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tu_symmetry.datamodules import ImageDataModule
from tu_symmetry.evaluation import Batches
from tu_symmetry.experiments.linearized_laplace import rows as paper
from tu_symmetry.experiments.linearized_laplace.networks import matrices
from tu_symmetry.experiments.linearized_laplace.rows import NETWORK, Choice
from tu_symmetry.experiments.study import Images, tracked
from tu_symmetry.files import digest_folder
from tu_symmetry.laplace.determinants import Hyperprior
from tu_symmetry.laplace.fitted import FittedLaplace
from tu_symmetry.laplace.groups import Prior
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.laplace.report import EvidenceResult, NotConvergedWarning, PrunedGroupWarning
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.states import State
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.tables.outcome import Outcome, Parts
from tu_symmetry.tables.report import Found, Report, table

CHOICES = (
    "tangent_mode/single",
    "tangent_mode/per_group",
    "tangent_mode/per_group/flat",
    "map/single",
    "map/per_group",
)
CHANGES = {  # title to what is compared with what
    "θ* instead of θ~, single λ": ("tangent_mode/single", "map/single"),
    "θ* instead of θ~, several λ": ("tangent_mode/per_group", "map/per_group"),
    "several λ instead of one, θ*": ("tangent_mode/per_group", "tangent_mode/single"),
    "several λ instead of one, θ~": ("map/per_group", "map/single"),
    "no hyperprior, θ*, several λ": ("tangent_mode/per_group/flat", "tangent_mode/per_group"),
    "Laplace (θ*, single λ) instead of the network": ("tangent_mode/single", NETWORK),
    "Laplace (θ*, several λ) instead of the network": ("tangent_mode/per_group", NETWORK),
}


@dataclass(frozen=True)
class Settings:
    """How the evidence is optimized, and the predictive computed.

    Attributes:
        batch_size: the batch size of all passes over the data.
        tolerance: largest change of a log precision at convergence.
        mode_tolerance: gradient norm of theta* in posterior standard deviations.
        max_iterations: largest number of directions that the search tries; None for its own limit.
        num_samples: the number of samples of the Monte-Carlo predictive.
    """

    batch_size: int = 250
    tolerance: float = 1e-2
    mode_tolerance: float = 0.1
    max_iterations: int | None = None
    num_samples: int = 500


DEFAULTS = Settings()


@dataclass(frozen=True)
class Trained:
    """Trained networks of one architecture, in the folder of a sample store."""

    model: nn.Module
    samples: Path

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(p.numel() for p in self.model.parameters())

    def store(self) -> SampleStore:
        """The networks."""
        return SampleStore.open(self.samples, like=self.model.state_dict())

    def parts(self, out: Path, *made_from: Any) -> Parts:
        """Parts of results about the networks."""
        return Parts(out / "parts", [*made_from, repr(self.model), digest_folder(self.samples)])


class Work:
    """All rows of one network, which is put into its architecture when the first row asks for it.

    Args:
        trained: the architecture.
        state: the network.
        images: the data.
        settings: how the evidence is optimized.
        graphs: the symmetries of each architecture that was seen, by its text.
        place: path and begin of the names of files about the network.
    """

    def __init__(
        self, trained: Trained, state: State, images: Images, settings: Settings, graphs: dict[str, Any], place: Path
    ) -> None:
        self.trained, self.state, self.images, self.settings = trained, state, images, settings
        self.graphs, self.place = graphs, place
        size = settings.batch_size
        self.train = Batches(images.train.x, images.train.y, size)
        self.test = Batches(images.test.x, images.test.y, size)
        self._fitted: dict[str, FittedLaplace] = {}

    @cached_property
    def model(self) -> nn.Module:
        """The network."""
        model = self.trained.model.to(self.images.device).eval()
        model.load_state_dict(self.state)
        return model

    @property
    def graph(self) -> SymmetryGraph:
        """The architecture's symmetries."""
        key = repr(self.model)
        if key not in self.graphs:
            self.graphs[key] = discover_symmetries(self.model, self.images.train.x[:2])
        found: SymmetryGraph = self.graphs[key]
        return found

    def start(self, choice: Choice) -> LinearizedLaplace:
        """A Laplace approximation at its initial precisions; each prior's curvature is fitted once."""
        if choice.prior not in self._fitted:
            prior: Prior = choice.prior
            # without normalization there are no such groups; the paper has numbers for FixUp all the same
            if prior == "per_group" and not any(g.members for g in self.graph.normalizations):
                prior = "per_layer"
            la = LinearizedLaplace(self.model, graph=self.graph, prior=prior, parameters=matrices(self.model))
            self._fitted[choice.prior] = la.fit(self.train).fitted
        fitted = self._fitted[choice.prior].restarted(evaluate_at="map" if choice.where == "map" else "tangent_mode")
        return LinearizedLaplace.from_fitted(fitted, self.train)

    def optimize(self, choice: Choice) -> tuple[LinearizedLaplace, EvidenceResult, float]:
        """Precisions and weights by the evidence; how far a last refresh of the curvature moved a log precision."""
        la = self.start(choice)
        return la, chosen(la, choice, self.settings), 0.0

    def row(self, key: str) -> dict[str, Any]:
        """What a table says of one choice, or of the network itself."""
        if key == NETWORK:
            return paper.network_scores(self.model, self.images, self.settings.batch_size)
        la, result, moved = self.optimize(Choice.parse(key))

        def probabilities(x: Tensor) -> Tensor:
            parts = x.split(self.settings.batch_size)
            return torch.cat([la.predictive(part, num_samples=self.settings.num_samples) for part in parts]).double()

        other = None if self.images.other is None else probabilities(self.images.other)
        groups = la.report()
        facts = {g.name: {"center": g.center, "squared_norm": g.squared_norm} for g in groups}
        return paper.scores(probabilities(self.test.x), self.test.y, other) | {
            "log_evidence": result.log_marginal_likelihood,
            "iterations": result.iterations,
            "change": result.change,
            "gradient_norm": result.gradient_norm,
            "converged": result.converged,
            "moved": moved,
            "settled": moved <= self.settings.tolerance,
            "gamma": sum(g.gamma for g in groups),
            "pruned": sum(g.pruned for g in groups),
            "groups": {name: own | facts[name] for name, own in groups_of(la).items()},
        }


def chosen(la: LinearizedLaplace, choice: Choice, settings: Settings) -> EvidenceResult:
    """Have the evidence choose precisions; what its warnings would say stands in the tables."""
    with warnings.catch_warnings():
        for kind in (PrunedGroupWarning, NotConvergedWarning):
            warnings.simplefilter("ignore", kind)
        return la.optimize_evidence(
            hyperprior=None if choice.flat else Hyperprior(),
            tolerance=settings.tolerance,
            mode_tolerance=settings.mode_tolerance,
            max_iterations=settings.max_iterations,
        )


def groups_of(la: LinearizedLaplace) -> dict[str, dict[str, Any]]:
    """Precision, effective dimension and number of weights of each group."""
    return {g.name: {"precision": g.precision, "gamma": g.gamma, "size": g.size} for g in la.report()}


def optimize_evidence(
    out: Path,
    networks: dict[str, Trained],
    data: ImageDataModule,
    settings: Settings = DEFAULTS,
    choices: Sequence[str] = CHOICES,
    device: str = "auto",
) -> Outcome:
    """Choose precisions in every way for every network; test NLL, precisions and effective dimensions.

    Args:
        out: every row of every network is kept in its ``parts`` at once; cut and called again, the others follow.
        networks: column of the table to its networks.
        choices: rows of the table, ``tangent_mode`` or ``map``, ``/single`` or ``/per_group``, and ``/flat`` for no
            hyperprior.
    """
    results, sizes = all_rows(Work, out, networks, data, settings, paper.parse_all(choices), device)
    itself = results.pop(NETWORK)
    every = [row for by_name in results.values() for found in by_name.values() for row in found]
    parameters = {name: trained.size for name, trained in networks.items()}
    return Outcome(
        {"networks": itself, "rows": results, "parameters": parameters, "sizes": sizes},
        f"{len(every)} evidences, {sum(not row['converged'] for row in every)} of them not converged to the tolerances",
    )


def all_rows(
    kind: type[Work],
    out: Path,
    networks: dict[str, Trained],
    data: ImageDataModule,
    settings: Settings,
    choices: Sequence[Choice],
    device: str,
) -> tuple[dict[str, dict[str, list[Any]]], dict[str, int]]:
    """Choice to name to the row of each network, kept in ``out/parts`` one by one; and the numbers of images."""
    images = Images(data, device)
    digest = images.digest()
    states = {name: list(found.store()) for name, found in networks.items()}
    kept = {name: found.parts(out, asdict(settings), digest, name) for name, found in networks.items()}
    graphs: dict[str, Any] = {}
    results: dict[str, dict[str, list[Any]]] = {}
    jobs = [(k, name) for k in range(max(map(len, states.values()))) for name in networks if k < len(states[name])]
    for k, name in tracked("evidence", jobs, lambda job: job[1]):
        work = kind(networks[name], states[name][k], images, settings, graphs, out / "parts" / f"{name}-{k}")
        for key in (NETWORK, *(choice.key for choice in choices)):
            row = kept[name].take(f"{name}-{k}-{key}", work.row, key)
            results.setdefault(key, {}).setdefault(name, []).append(row)
    return results, images.sizes


def report_architectures(out: Path, recipe: str, evidence: dict[str, Path]) -> Outcome:
    """Write ``report.md``: a table like the paper's for every training length, and what became of the groups.

    Args:
        evidence: title, ``after 40 epochs`` for example, to the folder of :func:`optimize_evidence`.
    """
    page = Report(out, recipe)
    for title, folder in evidence.items():
        page.add(*architecture_tables(Outcome.load(folder).results, title, page.table.paper))
    return page.done()


def architecture_tables(found: Found, title: str, published: Found) -> list[Grid]:
    """Test NLLs beside the paper's; what one change of the method does to the same networks; effective dimensions."""
    networks, rows = found["networks"], found["rows"]
    everything = {NETWORK: networks, **rows}

    def quality(row: tuple[str, str], name: str) -> str:
        key, column = row
        runs = everything[key][name]
        text = paper.cell([run[column] for run in runs])
        if key == NETWORK:
            return text
        theirs, error = published.get(key, {}).get(name), published.get(f"{key}/error", {}).get(name)
        beside = "" if theirs is None or error is None else f"{theirs:.3f} ± {error:.3f}"
        return f"{text}{paper.marks(runs)}\n{beside}"

    def difference(change: tuple[str, str], name: str) -> str:
        after, before = (everything[key][name] for key in change)
        gaps = [a["nll"] - b["nll"] for a, b in zip(after, before, strict=True)]
        return paper.cell(gaps, sign="+") + paper.marks([*after, *before])

    def dimension(by_name: Found, name: str) -> str:
        runs = by_name[name]
        gamma = sum(sum(g["gamma"] for g in run["groups"].values()) for run in runs) / len(runs)
        pruned, count = sum(run["pruned"] for run in runs), sum(len(run["groups"]) for run in runs)
        of_groups = f"{pruned}/{count} pruned, " if count > len(runs) else ""
        return (
            f"{gamma:.0f}{paper.marks(runs)}\n{of_groups}{sum(run['converged'] for run in runs)}/{len(runs)} converged"
        )

    def made(heading: str, lines: dict[str, Any], show: Any, caption: str) -> Grid:
        columns = {name: lambda line, name=name: show(line, name) for name in networks}
        return table(f"{heading} {title}", lines, columns, caption)

    lines = {paper.ITSELF: (NETWORK, "nll"), "the same, training data": (NETWORK, "train_nll")}
    lines |= {paper.title_of(key): (key, "nll") for key in rows}
    changes = {change: keys for change, keys in CHANGES.items() if set(keys) <= everything.keys()}
    return [
        made(
            "Test NLL",
            lines,
            quality,
            f"test NLL (nats), mean ± standard error over seeds; second line: the paper's. {paper.OPEN_CAPTION}. Each "
            "FixUp cell of several λ has one for each layer, for it has no normalized groups.",
        ),
        made(
            "What each choice changes",
            changes,
            difference,
            "difference of test NLL (nats) on the same networks, mean ± standard error over seeds; negative helps. "
            f"{paper.OPEN_CAPTION}",
        ),
        made(
            "Effective dimension",
            {paper.title_of(key): by_name for key, by_name in rows.items()},
            dimension,
            "effective directions that the data determine, mean over seeds; second line: pruned groups and converged "
            f"evidences of all seeds. {paper.OPEN_CAPTION}",
        ),
    ]
