"""Table 2 of arXiv 2206.08900: one residual network on color images, Kronecker factors, evidence in several ways.

The paper's two rows for theta* are read as follows: "simple" has the curvature at the network's own outputs
(``tangent_mode``), "full" at the outputs of the tangent model at theta*, where it is taken anew as theta* moves
(``full``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from tu_symmetry.datamodules import ImageDataModule
from tu_symmetry.evaluation import Batches
from tu_symmetry.experiments.linearized_laplace.choices import NETWORK, Choice, Where, parse_all
from tu_symmetry.experiments.linearized_laplace.evidence import Settings, chosen, groups_of
from tu_symmetry.experiments.linearized_laplace.jacobians import StoredJacobian
from tu_symmetry.experiments.linearized_laplace.networks import matrices
from tu_symmetry.experiments.linearized_laplace.sources import network_scores, scores
from tu_symmetry.experiments.study import Images
from tu_symmetry.files import digest_folder, read_tensors, write_safetensors
from tu_symmetry.laplace.curvature import fit_curvature
from tu_symmetry.laplace.fitted import FittedLaplace
from tu_symmetry.laplace.groups import Prior
from tu_symmetry.laplace.likelihood import Categorical
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.laplace.tangent import TangentModel
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.reporting.progress import Display
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.tables.outcome import Outcome
from tu_symmetry.tables.parts import Parts

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

    Every row of every network is kept in ``out/network-K`` as soon as it is there; cut and called again, the others
    follow.

    Args:
        out: folder of the results.
        model: the architecture; its own weights do not matter.
        networks: folder of the sample store that holds the networks.
        data: the data that the networks were trained on, without augmentation.
        settings: how the evidence is optimized.
        choices: rows of the table, ``tangent_mode``, ``map`` or ``full``, ``/single`` or ``/per_group``, and ``/flat``
            for no hyperprior; a ``full`` one comes after the ``tangent_mode`` one that it starts from.
        device: ``cpu``, ``cuda``, or ``auto`` for a GPU where there is one.

    Raises:
        ValueError: a choice that is none, or a ``full`` one that has nothing to start from or takes no curvature.
        FileError: ``out`` holds parts that were made from something else.
    """
    rows = read_choices(choices, settings.refreshes)
    images = Images(data, device)
    states = list(SampleStore.open(networks, like=model.state_dict()))
    made_from = [asdict(settings), images.digest(), repr(model), digest_folder(networks)]
    model = model.to(images.device).eval()
    results: dict[str, list[Any]] = {key: [] for key in (NETWORK, *(choice.key for choice in rows))}
    graph: SymmetryGraph | None = None
    with Display().track("evidence", len(states) * len(results)) as tracker:
        for number, state in enumerate(states):
            model.load_state_dict(state)
            graph = graph or discover_symmetries(model, images.train.x[:2])
            parts = Parts(out / f"network-{number}", [*made_from, number])
            before = number * len(results)
            work = Work(model, graph, images, settings, parts.folder)
            itself = partial(network_scores, model, images, settings.batch_size)
            results[NETWORK].append(parts.take(NETWORK, itself))
            for done, choice in enumerate(rows, 1):
                work.shown = partial(tracker.update, before + done, choice=choice.key)
                results[choice.key].append(parts.take(choice.key, partial(work.row, choice)))
                tracker.update(before + done + 1, choice=choice.key)
    itself_rows = results.pop(NETWORK)
    open_ends = sum(not row["converged"] for found in results.values() for row in found)
    return Outcome(
        {
            "networks": itself_rows,
            "rows": results,
            "parameters": sum(p.numel() for p in model.parameters()),
            "sizes": images.sizes,
        },
        f"{len(states) * len(rows)} evidences, {open_ends} of them not converged to the tolerances",
    )


def read_choices(texts: Sequence[str], refreshes: int) -> list[Choice]:
    """Read the rows of the table.

    Raises:
        ValueError: a choice that is none, or a ``full`` one that has nothing to start from or takes no curvature.
    """
    choices = parse_all(texts, get_args(Where))
    for number, choice in enumerate(choices):
        if choice.where != "full":
            continue
        start = choice._replace(where="tangent_mode")
        if start not in choices[:number]:
            raise ValueError(f"choice {choice.key!r} starts from {start.key!r}: list that first")
        if refreshes < 1:
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


class Work:
    """All choices for one network; curvatures and the Jacobian are kept between them.

    Args:
        model: the network.
        graph: its symmetries.
        images: the data.
        settings: how the evidence is optimized.
        folder: the folder of ``theta*`` and the precisions of each choice.

    Attributes:
        shown: called with a figure of the work in progress.
    """

    def __init__(
        self, model: nn.Module, graph: SymmetryGraph, images: Images, settings: KroneckerSettings, folder: Path
    ) -> None:
        self.model, self.graph, self.images, self.settings, self.folder = model, graph, images, settings, folder
        self.train = Batches(images.train.x, images.train.y, settings.batch_size)
        self.shown: Callable[..., None] = lambda **info: None
        self._fitted: dict[str, FittedLaplace] = {}
        self._tangent: TangentModel | None = None

    def row(self, choice: Choice) -> dict[str, Any]:
        """What the table says of one choice."""
        la, found = self.optimize(choice)

        def probabilities(x: Tensor) -> Tensor:
            parts = x.split(self.settings.batch_size)
            return torch.cat([la.predictive(part, num_samples=self.settings.num_samples) for part in parts]).double()

        other = None if self.images.other is None else probabilities(self.images.other)
        return found | scores(probabilities(self.images.test.x), self.images.test.y, other)

    def optimize(self, choice: Choice) -> tuple[LinearizedLaplace, dict[str, Any]]:
        """Precisions and weights by the evidence, and what the table says of them."""
        la = self.start(choice)
        moved = 0.0
        if choice.where == "full":
            la = self.resumed(la, choice._replace(where="tangent_mode"))
            for _ in range(self.settings.refreshes):
                before = la.log_precision
                la = self.retaken(la)
                result = chosen(la, choice, self.settings, self._progress)
                moved = float((la.log_precision - before).abs().max())
                if moved <= self.settings.tolerance:
                    break
        else:
            result = chosen(la, choice, self.settings, self._progress)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_safetensors(self._file(choice), {"theta": la.theta, "log_precision": la.log_precision})
        groups = la.report()
        return la, {
            "log_evidence": result.log_marginal_likelihood,
            "iterations": result.iterations,
            "change": result.change,
            "gradient_norm": result.gradient_norm,
            "converged": result.converged,
            "moved": moved,
            "settled": moved <= self.settings.tolerance,
            "gamma": sum(g.gamma for g in groups),
            "pruned": sum(g.pruned for g in groups),
            "groups": {
                g.name: groups_of(la)[g.name] | {"center": g.center, "squared_norm": g.squared_norm} for g in groups
            },
        }

    def _file(self, choice: Choice) -> Path:
        return self.folder / f"{choice.key.replace('/', '-')}.safetensors"

    def _progress(self, info: Mapping[str, Any]) -> None:
        what = "gradient_norm" if "gradient_norm" in info else "change" if "change" in info else "samples"
        self.shown(**{what: float(info[what])})

    def start(self, choice: Choice) -> LinearizedLaplace:
        """A Laplace approximation at its initial precisions; each prior's curvature is fitted once.

        A network without normalization has no groups of Recommendation 2: several precisions are one for each layer.
        """
        if choice.prior not in self._fitted:
            prior: Prior = choice.prior
            if prior == "per_group" and not any(g.members for g in self.graph.normalizations):
                prior = "per_layer"  # no groups of Recommendation 2; the paper has numbers for FixUp all the same
            first = LinearizedLaplace(self.model, graph=self.graph, prior=prior, parameters=matrices(self.model)).fit(
                self.train, progress=self._progress
            )
            self._fitted[choice.prior] = first.fitted
        fitted = self._fitted[choice.prior].restarted(evaluate_at="map" if choice.where == "map" else "tangent_mode")
        if choice.where != "map" and self.settings.stored_jacobian:
            if self._tangent is None:
                self._tangent = StoredJacobian(
                    fitted.tangent, self.train, shown=lambda samples: self._progress({"samples": samples})
                )
            fitted = fitted.with_tangent(self._tangent)
        return LinearizedLaplace.from_fitted(fitted, self.train)

    def resumed(self, la: LinearizedLaplace, earlier: Choice) -> LinearizedLaplace:
        """The same curvature with the precisions and weights of another choice."""
        found = read_tensors(self._file(earlier))
        fitted = la.fitted.with_hyperparameters(found["log_precision"]).with_theta(found["theta"])
        return LinearizedLaplace.from_fitted(fitted, self.train)

    def retaken(self, la: LinearizedLaplace) -> LinearizedLaplace:
        """The same precisions and weights with the curvature at the outputs of the tangent model at theta*."""
        fitted = la.fitted
        pairs = [fitted.tangent.jvp(x, fitted.theta - fitted.tangent.point()) for x, _ in self.train]
        network = torch.cat([outputs for outputs, _ in pairs])
        change = torch.cat([product for _, product in pairs])
        blocks, summary = fit_curvature(
            fitted.tangent,
            OutputsAt(network, network + change),
            self.train,
            fitted.groups,
            fitted.options,
            whole=fitted.curvature.whole,
            progress=self._progress,
        )
        return LinearizedLaplace.from_fitted(fitted.with_curvature(blocks, summary), self.train)
