"""Table 2 of arXiv 2206.08900: one residual network on color images, Kronecker factors, evidence in several ways.

A choice names where the evidence is evaluated, the prior, and whether the hyperprior is left out, as in
``tangent_mode/per_group/flat``:

- ``map``: at the trained weights, M(θ~);
- ``tangent_mode``: at the joint stationary point, M(θ*), with the curvature at the network's own outputs (the paper's
  "simple", as we read it);
- ``full``: the same with the curvature at the outputs of the tangent model at θ*, which is taken anew where θ* has
  moved (the paper's "full", as we read it).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tu_symmetry.configs import ConfigError
from tu_symmetry.evaluation import Batches
from tu_symmetry.files import read_json, read_tensors, write_json, write_safetensors
from tu_symmetry.laplace.curvature import fit_curvature
from tu_symmetry.laplace.evidence import Hyperprior
from tu_symmetry.laplace.fitted import FittedLaplace
from tu_symmetry.laplace.jacobians import StoredJacobian
from tu_symmetry.laplace.likelihood import Categorical
from tu_symmetry.laplace.model import LinearizedLaplace, NotConvergedWarning, PrunedGroupWarning
from tu_symmetry.laplace.tangent import TangentModel
from tu_symmetry.reporting.progress import Tracker
from tu_symmetry.states import unstack
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.tables.barriers import MEMBERS, MembersOptions, train_members
from tu_symmetry.tables.images import read_images
from tu_symmetry.tables.laplace_networks import matrices
from tu_symmetry.tables.models import build_model
from tu_symmetry.tables.recipe import ModelConfig
from tu_symmetry.tables.stage import Results, StageContext, stage

_Where: TypeAlias = Literal["map", "tangent_mode", "full"]
_Prior: TypeAlias = Literal["single", "per_group"]
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
class EvidenceOptions:
    """How the evidence is optimized, and the predictive computed.

    Attributes:
        choices: rows of the table; a ``full`` choice comes after the ``tangent_mode`` one of the same prior and
            hyperprior.
        batch_size: of all passes over the data.
        tolerance: largest change of a log precision at convergence.
        mode_tolerance: distance of theta* in posterior standard deviations, over all directions together.
        max_iterations: largest number of alternations between theta* and the precisions.
        refreshes: how often a ``full`` choice takes the curvature anew.
        num_samples: of the outputs of every image for the predictive.
        stored_jacobian: keep the training data's Jacobian in memory (images x classes x weights numbers), which makes
            theta* many times faster to find.
    """

    choices: list[str] = field(default_factory=lambda: list(CHOICES))
    batch_size: int = 250
    tolerance: float = 0.05
    mode_tolerance: float = 1.0
    max_iterations: int = 20
    refreshes: int = field(default=2, metadata={"least": 0})
    num_samples: int = 500
    stored_jacobian: bool = False


class Choice(NamedTuple):
    """A row of the table.

    Attributes:
        where: ``map``, ``tangent_mode`` or ``full``.
        prior: ``single`` or ``per_group``.
        flat: without hyperprior.
    """

    where: _Where
    prior: _Prior
    flat: bool

    @classmethod
    def parse(cls, text: str) -> Choice:
        """Read ``WHERE/PRIOR`` or ``WHERE/PRIOR/flat``.

        Raises:
            ConfigError: anything else.
        """
        where, _, rest = text.partition("/")
        prior, _, last = rest.partition("/")
        if where not in get_args(_Where) or prior not in get_args(_Prior) or last not in ("", "flat"):
            raise ConfigError(
                f"choice {text!r}: write map, tangent_mode or full, /, single or per_group, and /flat if wanted"
            )
        return cls(cast(_Where, where), cast(_Prior, prior), bool(last))

    @property
    def key(self) -> str:
        """As it is written in a recipe."""
        return f"{self.where}/{self.prior}" + ("/flat" if self.flat else "")

    @property
    def file(self) -> str:
        """The stem of its files."""
        return self.key.replace("/", "-")


@stage(inputs=("images",))
def train_networks(context: StageContext, options: MembersOptions) -> Results:
    """Train the networks, as :func:`tu_symmetry.tables.barriers.train_members` does, on the prepared images."""
    data, other = read_images(context.inputs["images"], context.device)
    found = train_members(replace(context, data=data), options)
    rows = []
    for state in unstack(read_tensors(context.folder / MEMBERS, device=context.device)):
        model = build_model(ModelConfig(**found["model"]), data).to(context.device).eval()
        model.load_state_dict(state)
        with torch.no_grad():
            train = F.cross_entropy(_logits(model, data.train_x), data.train_y)
            p = _logits(model, data.test_x).double().softmax(-1)
            p_other = None if other is None else _logits(model, other).double().softmax(-1)
        rows.append({"train_nll": float(train)} | scores(p, data.test_y, p_other))
    accuracy = sum(r["accuracy"] for r in rows) / len(rows)
    return found | {
        "networks": rows,
        "parameters": sum(p.numel() for p in model.parameters()),
        "epochs": options.epochs,
        "headline": f"{len(rows)} networks, test accuracy {100 * accuracy:.1f} %",
    }


def _logits(model: nn.Module, x: Tensor, batch_size: int = 500) -> Tensor:
    return torch.cat([model(part) for part in x.split(batch_size)])


def scores(p: Tensor, y: Tensor, other: Tensor | None) -> dict[str, float]:
    """Quality of predictive probabilities.

    Args:
        p: of the test images, ``[n, classes]``.
        y: their classes, ``[n]``.
        other: of out-of-distribution images, ``[m, classes]``, or None.

    Returns:
        ``nll`` (nats), ``accuracy``, ``ece`` (15 bins, L1) and, with ``other``, ``auroc``: the probability that an
        out-of-distribution image has the greater predictive entropy.
    """
    from torchmetrics.functional.classification import binary_auroc, multiclass_calibration_error

    found = {
        "nll": float(-p.gather(-1, y.unsqueeze(-1)).clamp(min=1e-30).log().mean()),
        "accuracy": float((p.argmax(-1) == y).double().mean()),
        "ece": float(multiclass_calibration_error(p, y, num_classes=p.shape[-1], n_bins=15, norm="l1")),
    }
    if other is not None:
        entropy = torch.special.entr(torch.cat([p, other])).sum(-1)
        target = torch.arange(len(entropy), device=p.device) >= len(p)
        found["auroc"] = float(binary_auroc(entropy / entropy.max(), target.long()))
    return found


@stage(inputs=("images", "networks"))
def optimize_evidence(context: StageContext, options: EvidenceOptions) -> Results:
    """Choose precisions in every way for every network: quality of the predictive, precisions, effective dimensions."""
    choices = [Choice.parse(text) for text in options.choices]
    for number, choice in enumerate(choices):
        if choice.where == "full" and choice._replace(where="tangent_mode") not in choices[:number]:
            raise ConfigError(
                f"choice {choice.key!r} starts from {choice._replace(where='tangent_mode').key!r}: list it first"
            )
    data, other = read_images(context.inputs["images"], context.device)
    source = context.inputs["networks"]
    states = list(unstack(read_tensors(source.folder / MEMBERS, device=context.device)))
    rows: dict[str, list[Any]] = {choice.key: [] for choice in choices}
    graph: SymmetryGraph | None = None
    with context.track("evidence", len(states) * len(choices)) as tracker:
        for seed, state in enumerate(states):
            folder = context.folder / f"network-{seed}"
            folder.mkdir(exist_ok=True)
            missing = [c for c in choices if not (folder / f"{c.file}.json").exists()]
            if missing:
                model = build_model(ModelConfig(**source.results["model"]), data).to(context.device).eval()
                model.load_state_dict(state)
                graph = graph or discover_symmetries(model, data.train_x[:2])
                train = Batches(data.train_x, data.train_y, options.batch_size)
                work = _Work(model, graph, train, options, folder, tracker)
            for number, choice in enumerate(choices):
                path = folder / f"{choice.file}.json"
                if not path.exists():
                    la, found = work.optimize(choice, seed * len(choices) + number)
                    scored = found | scores(*_predict(la, options, data.test_x, data.test_y, other))
                    write_json(path, scored, seal=True)
                rows[choice.key].append(read_json(path)[0])
                tracker.update(seed * len(choices) + number + 1, choice=choice.key)
    open_ends = sum(not r["converged"] for found in rows.values() for r in found)
    total = sum(len(found) for found in rows.values())
    return {
        "rows": rows,
        "sizes": context.inputs["images"].results,
        "headline": f"{total} evidences, {open_ends} of them not converged to the tolerances",
    }


def _predict(
    la: LinearizedLaplace, options: EvidenceOptions, x: Tensor, y: Tensor, other: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    def probabilities(images: Tensor) -> Tensor:
        parts = images.split(options.batch_size)
        return torch.cat([la.predictive(part, num_samples=options.num_samples) for part in parts]).double()

    return probabilities(x), y, None if other is None else probabilities(other)


class _OutputsAt(Categorical):
    """Softmax classification whose Hessian is taken at given logits, row by row in the order of one pass."""

    def __init__(self, network: Tensor, logits: Tensor) -> None:
        self.network, self.logits, self.read = network, logits, 0

    def hessian_root(self, outputs: Tensor) -> Tensor:
        """Root of the Hessian at the next rows of the given logits, in place of the network's outputs."""
        rows = slice(self.read, self.read + len(outputs))
        torch.testing.assert_close(outputs, self.network[rows], rtol=1e-3, atol=1e-3)
        self.read += len(outputs)
        return super().hessian_root(self.logits[rows])


class _Work:
    """All choices for one network; curvatures and the Jacobian are kept between them."""

    def __init__(
        self,
        model: nn.Module,
        graph: SymmetryGraph,
        train: Batches,
        options: EvidenceOptions,
        folder: Path,
        tracker: Tracker,
    ) -> None:
        self.model, self.graph, self.train, self.options = model, graph, train, options
        self.folder, self.tracker = folder, tracker
        self._fitted: dict[str, FittedLaplace] = {}
        self._tangent: TangentModel | None = None

    def optimize(self, choice: Choice, done: int) -> tuple[LinearizedLaplace, dict[str, Any]]:
        """Precisions and weights by the evidence, and what the table says of them."""

        def progress(info: Mapping[str, Any]) -> None:
            what = "gradient_norm" if "gradient_norm" in info else "change" if "change" in info else "samples"
            self.tracker.update(done, **{what: float(info[what])})

        la = self._start(choice, progress)
        moved = 0.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrunedGroupWarning)  # the table says it
            warnings.simplefilter("ignore", NotConvergedWarning)
            if choice.where == "full":
                la = self._resumed(la, choice._replace(where="tangent_mode"))
                for _ in range(self.options.refreshes):
                    before = la.log_precision
                    la = self._retaken(la, progress)
                    result = self._evidence(la, choice, progress)
                    moved = float((la.log_precision - before).abs().max())
            else:
                result = self._evidence(la, choice, progress)
        found = {"theta": la.theta, "log_precision": la.log_precision}
        write_safetensors(self.folder / f"{choice.file}.safetensors", found)
        groups = la.report()
        return la, {
            "log_evidence": result.log_marginal_likelihood,
            "iterations": result.iterations,
            "change": result.change,
            "gradient_norm": result.gradient_norm,
            "converged": result.converged,
            "moved": moved,
            "gamma": sum(g.gamma for g in groups),
            "pruned": sum(g.pruned for g in groups),
            "groups": {
                g.name: {
                    "precision": g.precision,
                    "center": g.center,
                    "gamma": g.gamma,
                    "size": g.size,
                    "squared_norm": g.squared_norm,
                }
                for g in groups
            },
        }

    def _evidence(self, la: LinearizedLaplace, choice: Choice, progress: Callable[[dict[str, Any]], None]) -> Any:
        return la.optimize_evidence(
            hyperprior=None if choice.flat else Hyperprior(),
            tolerance=self.options.tolerance,
            mode_tolerance=self.options.mode_tolerance,
            max_iterations=self.options.max_iterations,
            progress=progress,
        )

    def _start(self, choice: Choice, progress: Callable[[dict[str, Any]], None]) -> LinearizedLaplace:
        """A Laplace approximation at its initial precisions, with the curvature of its prior's first choice."""
        if choice.prior not in self._fitted:
            first = LinearizedLaplace(
                self.model, graph=self.graph, prior=choice.prior, parameters=matrices(self.model)
            ).fit(self.train, progress=progress)
            self._fitted[choice.prior] = first.fitted
        fitted = self._fitted[choice.prior].restarted(evaluate_at="map" if choice.where == "map" else "tangent_mode")
        if choice.where != "map" and self.options.stored_jacobian:
            if self._tangent is None:
                self._tangent = StoredJacobian(
                    fitted.tangent, self.train, shown=lambda samples: progress({"samples": samples})
                )
            fitted = fitted.with_tangent(self._tangent)
        return LinearizedLaplace.from_fitted(fitted, self.train)

    def _resumed(self, la: LinearizedLaplace, earlier: Choice) -> LinearizedLaplace:
        """The same curvature with the precisions and weights of another choice."""
        found = read_tensors(self.folder / f"{earlier.file}.safetensors")
        fitted = la.fitted.with_hyperparameters(found["log_precision"]).with_theta(found["theta"])
        return LinearizedLaplace.from_fitted(fitted, self.train)

    def _retaken(self, la: LinearizedLaplace, progress: Callable[[dict[str, Any]], None]) -> LinearizedLaplace:
        """The same precisions and weights with the curvature at the outputs of the tangent model at theta*."""
        fitted = la.fitted
        pairs = [fitted.tangent.jvp(x, fitted.theta - fitted.tangent.point()) for x, _ in self.train]
        network = torch.cat([outputs for outputs, _ in pairs])
        change = torch.cat([product for _, product in pairs])
        blocks, summary = fit_curvature(
            fitted.tangent,
            _OutputsAt(network, network + change),
            self.train,
            fitted.groups,
            fitted.options,
            whole=fitted.curvature.whole,
            progress=progress,
        )
        return LinearizedLaplace.from_fitted(fitted.with_curvature(blocks, summary), self.train)
