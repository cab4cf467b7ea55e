"""Table 1 of arXiv 2206.08900: test log-likelihood for precisions chosen by the evidence in four ways, by architecture.

The evidence is evaluated at the trained weights, M(θ~), or at the joint stationary point, M(θ*) (Recommendation 1), for
a single precision or one for each normalized group (Recommendation 2). Beside these: the network itself, and M(θ*) with
groups but without the hyperprior, which shows what the evidence alone does to normalized groups.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tu_symmetry.datamodules import ImageDataModule
from tu_symmetry.evaluation import Batches
from tu_symmetry.experiments.linearized_laplace.choices import NETWORK, Choice, parse_all
from tu_symmetry.experiments.linearized_laplace.networks import matrices
from tu_symmetry.experiments.linearized_laplace.sources import network_scores, scores
from tu_symmetry.experiments.study import Images
from tu_symmetry.files import digest_folder
from tu_symmetry.laplace.determinants import Hyperprior
from tu_symmetry.laplace.groups import Prior, prior_groups
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.laplace.report import EvidenceResult, NotConvergedWarning, PrunedGroupWarning
from tu_symmetry.laplace.tangent import TangentModel
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.reporting.progress import Display
from tu_symmetry.states import State
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.tables.outcome import Outcome
from tu_symmetry.tables.parts import Parts

CHOICES = (
    "tangent_mode/single",
    "tangent_mode/per_group",
    "tangent_mode/per_group/flat",
    "map/single",
    "map/per_group",
)


@dataclass(frozen=True)
class Trained:
    """Trained networks of one architecture.

    Attributes:
        model: the architecture; its own weights do not matter.
        samples: folder of the sample store that holds the networks.
    """

    model: nn.Module
    samples: Path


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


def optimize_evidence(
    out: Path,
    networks: dict[str, Trained],
    data: ImageDataModule,
    settings: Settings = Settings(),
    choices: Sequence[str] = CHOICES,
    device: str = "auto",
) -> Outcome:
    """Choose precisions in every way for every network; test NLL, precisions and effective dimensions.

    Every row of every network is kept in ``out/parts`` as soon as it is there; cut and called again, the others follow.

    Args:
        out: folder of the results.
        networks: column of the table to its networks.
        data: the data that the networks were trained on; NLLs are of its test set.
        settings: how the evidence is optimized.
        choices: rows of the table, ``tangent_mode`` or ``map``, ``/single`` or ``/per_group``, and ``/flat`` for no
            hyperprior.
        device: ``cpu``, ``cuda``, or ``auto`` for a GPU where there is one.

    Raises:
        ValueError: a choice that is none.
        FileError: ``out`` holds parts that were made from something else.
    """
    rows = parse_all(choices)
    images = Images(data, device)
    digest = images.digest()
    states = {
        name: list(SampleStore.open(found.samples, like=found.model.state_dict())) for name, found in networks.items()
    }
    kept = {
        name: Parts(out / "parts", [asdict(settings), digest, name, repr(found.model), digest_folder(found.samples)])
        for name, found in networks.items()
    }
    graphs: dict[str, SymmetryGraph] = {}
    results: dict[str, dict[str, list[Any]]] = {}
    keys = [NETWORK, *(choice.key for choice in rows)]
    jobs = [(k, name) for k in range(max(map(len, states.values()))) for name in networks if k < len(states[name])]
    with Display().track("evidence", len(jobs) * len(keys)) as tracker:
        for number, (k, name) in enumerate(jobs):
            work = Work(networks[name].model, states[name][k], images, settings, name, graphs)
            for done, key in enumerate(keys, 1):
                found = kept[name].take(f"{name}-{k}-{key}", partial(work.row, key))
                results.setdefault(key, {}).setdefault(name, []).append(found)
                tracker.update(number * len(keys) + done, network=name, choice=key)
    itself = results.pop(NETWORK)
    every = [row for by_name in results.values() for found in by_name.values() for row in found]
    open_ends = sum(not row["converged"] for row in every)
    return Outcome(
        {
            "networks": itself,
            "rows": results,
            "parameters": {n: sum(p.numel() for p in t.model.parameters()) for n, t in networks.items()},
            "sizes": images.sizes,
        },
        f"{len(every)} evidences, {open_ends} of them not converged to the tolerances",
    )


@dataclass(frozen=True)
class Subject:
    """A network, its data in batches, and the parameters of each prior group."""

    model: nn.Module
    train: Batches
    test: Batches
    groups: dict[str, list[str]]


class Work:
    """One network, which is put into its architecture, and differentiated, when the first row asks for it."""

    def __init__(
        self,
        model: nn.Module,
        state: State,
        images: Images,
        settings: Settings,
        name: str,
        graphs: dict[str, SymmetryGraph],
    ) -> None:
        self.architecture, self.state, self.images, self.settings = model, state, images, settings
        self.name, self.graphs = name, graphs

    def row(self, key: str) -> dict[str, Any]:
        """What the table says of one choice, or of the network itself."""
        if key == NETWORK:
            return network_scores(self.model, self.images, self.settings.batch_size)
        return _measure(self.subject, self.settings, Choice.parse(key))

    @cached_property
    def model(self) -> nn.Module:
        """The network."""
        model = self.architecture.to(self.images.device).eval()
        model.load_state_dict(self.state)
        return model

    @cached_property
    def subject(self) -> Subject:
        """The network as the evidence takes it."""
        images, names = self.images, matrices(self.model)
        if self.name not in self.graphs:
            self.graphs[self.name] = discover_symmetries(self.model, images.train.x[:2])
        graph = self.graphs[self.name]
        # without normalization there are no groups of Recommendation 2; the paper has numbers for FixUp all the same
        prior: Prior = "per_group" if any(g.members for g in graph.normalizations) else "per_layer"
        partition = prior_groups(TangentModel(self.model, names).slots, prior, normalizations=graph.normalizations)
        groups: dict[str, list[str]] = {}
        for name, number in partition.of.items():
            groups.setdefault(partition.names[int(number)], []).append(name)
        size = self.settings.batch_size
        train, test = Batches(images.train.x, images.train.y, size), Batches(images.test.x, images.test.y, size)
        return Subject(self.model, train, test, groups)


def approximate(subject: Subject, settings: Settings, choice: Choice) -> tuple[LinearizedLaplace, EvidenceResult]:
    """A fitted approximation with the precisions of one choice, and how their search ended."""
    la = LinearizedLaplace(
        subject.model,
        evaluate_at="map" if choice.where == "map" else "tangent_mode",
        prior=choice.prior,
        groups=subject.groups if choice.prior == "per_group" else None,
        parameters=[name for names in subject.groups.values() for name in names],
    )
    la.fit(subject.train)
    return la, chosen(la, choice, settings)


def chosen(la: LinearizedLaplace, choice: Choice, settings: Settings, progress: Any = None) -> EvidenceResult:
    """Have the evidence choose precisions; what its warnings would say stands in the tables."""
    with warnings.catch_warnings():
        for kind in (PrunedGroupWarning, NotConvergedWarning):
            warnings.simplefilter("ignore", kind)
        return la.optimize_evidence(
            hyperprior=None if choice.flat else Hyperprior(),
            tolerance=settings.tolerance,
            mode_tolerance=settings.mode_tolerance,
            max_iterations=settings.max_iterations,
            progress=progress,
        )


def groups_of(la: LinearizedLaplace) -> dict[str, dict[str, Any]]:
    """Precision, effective dimension and number of weights of each group."""
    return {g.name: {"precision": g.precision, "gamma": g.gamma, "size": g.size} for g in la.report()}


def _measure(subject: Subject, settings: Settings, choice: Choice) -> dict[str, Any]:
    la, result = approximate(subject, settings, choice)
    p = torch.cat([la.predictive(x, num_samples=settings.num_samples) for x, _ in subject.test])
    return scores(p.double(), subject.test.y) | {
        "log_evidence": result.log_marginal_likelihood,
        "iterations": result.iterations,
        "gradient_norm": result.gradient_norm,
        "converged": result.converged,
        "pruned": sum(g.pruned for g in la.report()),
        "groups": groups_of(la),
    }
