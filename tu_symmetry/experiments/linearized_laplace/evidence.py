"""Tables 1 and 2 of arXiv 2206.08900: test likelihood for precisions chosen by the evidence in several ways.

The evidence is evaluated at the trained weights, M(θ~), or at the joint stationary point, M(θ*) (Recommendation 1), for
a single precision or one for each normalized group (Recommendation 2), with and without the hyperprior. Table 2's two
rows for θ* are read as follows: "simple" has the curvature at the network's own outputs (``tangent_mode``), "full" at
the outputs of the tangent model at θ*, where it is taken anew as θ* moves.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from tu_symmetry.datamodules import ImageDataModule
from tu_symmetry.evaluation import Batches
from tu_symmetry.experiments.linearized_laplace import rows as paper
from tu_symmetry.experiments.linearized_laplace.networks import matrices
from tu_symmetry.experiments.linearized_laplace.rows import NETWORK, Choice, Where
from tu_symmetry.experiments.study import Images, followed
from tu_symmetry.files import digest_folder, read_tensors, write_safetensors
from tu_symmetry.laplace.curvature import fit_curvature
from tu_symmetry.laplace.determinants import Hyperprior
from tu_symmetry.laplace.fitted import FittedLaplace
from tu_symmetry.laplace.function_posterior import tempered_predictives
from tu_symmetry.laplace.groups import Prior
from tu_symmetry.laplace.likelihood import Categorical
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.laplace.report import EvidenceResult, LaplaceHurtsWarning, NotConvergedWarning, PrunedGroupWarning
from tu_symmetry.laplace.tangent import Linearization, TangentModel, evaluating, jacobians
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.reporting.progress import Progress
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.tables.outcome import Outcome, Parts, digest_tensors

_KEPT_EVERY = 60.0  # seconds


@dataclass(frozen=True)
class Settings:
    """How the evidence is optimized, and the predictive computed.

    Attributes:
        batch_size: the batch size of all passes over the data; on a CPU some hundred images are fastest.
        tolerance: largest change of a log precision at convergence.
        mode_tolerance: gradient norm of theta* in posterior standard deviations, over all directions together.
        max_iterations: largest number of directions that the search tries; None for its own limit.
        num_samples: the number of samples of the Monte-Carlo predictive.
        refreshes: how often a ``full`` choice takes the curvature anew at most, until the precisions stay; 1 or more.
        stored_jacobian: keep the training data's Jacobian in memory (images x classes x weights numbers), which makes
            theta* many times faster to find.
    """

    batch_size: int = 250
    tolerance: float = 1e-2
    mode_tolerance: float = 0.1
    max_iterations: int | None = None
    num_samples: int = 500
    refreshes: int = 2
    stored_jacobian: bool = False


@dataclass
class Trained:
    """Trained networks of one architecture, in the folder of a sample store."""

    model: nn.Module
    samples: Path

    def __post_init__(self) -> None:
        self._graph: SymmetryGraph | None = None

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(p.numel() for p in self.model.parameters())

    def store(self) -> SampleStore:
        """The networks."""
        return SampleStore.open(self.samples, like=self.model.state_dict())

    def graph(self, x: Tensor) -> SymmetryGraph:
        """The architecture's symmetries, found with the first weights that ask for them."""
        if self._graph is None:
            self._graph = discover_symmetries(self.model, x)
        return self._graph

    def parts(self, out: Path, *made_from: Any) -> Parts:
        """Parts of results about the networks."""
        return Parts(out / "parts", [*made_from, repr(self.model), digest_folder(self.samples)])


class StoredJacobian(TangentModel):
    """The tangent model with the Jacobian of every batch of a data set in memory: ``samples x outputs x size``.

    A batch is known by its place in memory, so it has to come from the same tensors again.
    """

    joins = False  # a joined batch would have another place in memory

    def __init__(self, tangent: TangentModel, data: Iterable[Any]) -> None:
        super().__init__(tangent.model, tangent.names, class_axis=tangent.class_axis)
        self._kept: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # with the inputs, which keep their place
        for inputs, _ in data:
            with evaluating(tangent.model):
                outputs = self.outputs(inputs)
                parts = [jacobians(self, part, outputs.shape[1:]) for part in inputs.split(50)]
            self._kept[inputs.data_ptr()] = inputs, outputs, torch.cat(parts)

    def linearize(self, inputs: Any) -> Linearization:
        """The stored Jacobian."""
        _, outputs, jacobian = self._kept[inputs.data_ptr()]
        rows = jacobian.flatten(0, 1)
        return Linearization(outputs, lambda vector: jacobian @ vector, lambda cotangent: cotangent.flatten() @ rows)


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
    """All rows of one network of a store, which is put into its architecture when the first row asks for it.

    ``place`` begins the names of the files of where a search is, from which it goes on after a cut, and with ``full``
    choices of what these start from; None for no files. ``progress`` is told how far a row is.
    """

    def __init__(
        self,
        trained: Trained,
        number: int,
        images: Images,
        settings: Settings,
        place: Path | None = None,
        *,
        full: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.trained, self.number, self.images, self.settings = trained, number, images, settings
        self.place, self.full, self.progress = place, full, progress
        self.train = Batches(images.train.x, images.train.y, settings.batch_size)
        self.test = Batches(images.test.x, images.test.y, settings.batch_size)
        self._fitted: dict[tuple[str, str], FittedLaplace] = {}
        self._stored: TangentModel | None = None

    @cached_property
    def model(self) -> nn.Module:
        """The network."""
        model = self.trained.model.to(self.images.device).eval()
        model.load_state_dict(self.trained.store()[self.number])
        return model

    def start(self, choice: Choice) -> LinearizedLaplace:
        """A Laplace approximation at its initial precisions; each prior's curvature is fitted once."""
        kind, last = (choice.prior, choice.curvature), choice.curvature == "last_layer"
        if kind not in self._fitted:
            model, prior = self.model, choice.prior
            graph = self.trained.graph(self.images.train.x[:2])
            # without normalization there are no such groups; the paper has numbers for FixUp all the same
            several: Prior = "per_group" if any(g.members for g in graph.normalizations) else "per_layer"
            la = LinearizedLaplace(
                model,
                graph=graph,
                prior="single" if prior == "single" else several,
                curvature=choice.curvature,
                parameters=None if last else matrices(model),
            )
            self._fitted[kind] = la.fit(self.train, progress=self.progress).fitted
        fitted = self._fitted[kind].restarted(evaluate_at="map" if choice.where == "map" else "tangent_mode")
        if choice.where != "map" and self.settings.stored_jacobian and not last:
            self._stored = self._stored or StoredJacobian(fitted.tangent, self.train)
            fitted = fitted.with_tangent(self._stored)
        return LinearizedLaplace.from_fitted(fitted, self.train)

    def optimize(self, choice: Choice) -> tuple[LinearizedLaplace, EvidenceResult, float]:
        """Precisions and weights by the evidence; how far a last refresh of the curvature moved a log precision."""
        la, moved, done = self.start(choice), 0.0, 0
        if choice.where == "full":
            la = self.resumed(la, choice._replace(where="tangent_mode"))
            for _ in range(self.settings.refreshes):
                before, la = la.log_precision, self.retaken(la)
                result = chosen(la, choice, self.settings, self.progress)
                moved = float((la.log_precision - before).abs().max())
                if moved <= self.settings.tolerance:
                    break
        elif self.place is None:
            result = chosen(la, choice, self.settings, self.progress)
        else:
            file = self._file(choice, ".search")
            if file.exists():
                done, la = int(read_tensors(file)["iteration"]), self.resumed(la, choice, ".search")
            most = self.settings.max_iterations
            settings = replace(self.settings, max_iterations=None if most is None else max(1, most - done))
            result = chosen(la, choice, settings, self._keeping(file, done))
            result = replace(result, iterations=done + result.iterations)
        if self.full:
            write_safetensors(self._file(choice), {"theta": la.theta, "log_precision": la.log_precision})
        return la, result, moved

    def _file(self, choice: Choice, kind: str = "") -> Path:
        assert self.place is not None
        self.place.parent.mkdir(parents=True, exist_ok=True)
        return self.place.with_name(f"{self.place.name}-{choice.key.replace('/', '-')}{kind}.safetensors")

    def _keeping(self, file: Path, done: int) -> Progress:
        """Progress that writes where a search is, once a minute, and counts on from ``done`` directions."""
        last = time.monotonic()

        def keep(info: dict[str, Any]) -> None:
            nonlocal last
            if "iteration" in info:
                info = info | {"iteration": done + info["iteration"]}
            if self.progress is not None:
                self.progress(info)
            if "theta" in info and time.monotonic() - last > _KEPT_EVERY:
                iteration = torch.tensor(info["iteration"], device="cpu")
                write_safetensors(file, {"iteration": iteration} | {k: info[k] for k in ("theta", "log_precision")})
                last = time.monotonic()

        return keep

    def resumed(self, la: LinearizedLaplace, earlier: Choice, kind: str = "") -> LinearizedLaplace:
        """The same curvature with the precisions and weights of another choice, or of where a search was cut."""
        found = read_tensors(self._file(earlier, kind))
        fitted = la.fitted.with_hyperparameters(found["log_precision"]).with_theta(found["theta"])
        return LinearizedLaplace.from_fitted(fitted, self.train)

    def retaken(self, la: LinearizedLaplace) -> LinearizedLaplace:
        """The same precisions and weights with the curvature at the outputs of the tangent model at theta*."""
        fitted, pairs = la.fitted, []
        for x, _ in self.train:
            own = fitted.tangent.linearize(x)
            pairs.append((own.outputs, own.push(fitted.theta - fitted.tangent.point())))
        network, change = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        likelihood, whole = OutputsAt(network, network + change), fitted.curvature.whole
        blocks, summary = fit_curvature(
            fitted.tangent,
            likelihood,
            self.train,
            fitted.groups,
            fitted.options,
            whole=whole,
            progress=self.progress,
        )
        return LinearizedLaplace.from_fitted(fitted.with_curvature(blocks, summary), self.train)

    def calibrated(self, la: LinearizedLaplace) -> dict[str, float]:
        """Have temperature and sharpness chosen on the validation images, which the network was not trained on."""
        held_out = Batches(*self.images.held_out("posteriors are calibrated on"), self.settings.batch_size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LaplaceHurtsWarning)  # the table says it
            found = la.calibrate(held_out, num_samples=self.settings.num_samples)
        return {"temperature": found.temperature, "sharpness": found.sharpness}

    def predictives(self, la: LinearizedLaplace, x: Tensor) -> list[Tensor]:
        """Probabilities by the evidence, and calibrated, from one pass for both."""
        kinds = [(1.0, 1.0), (la.temperature, la.sharpness)]
        options: Any = {"num_samples": self.settings.num_samples, "link_approx": "mc", "covariance": "auto", "seed": 0}
        return tempered_predictives(la.fitted, x, kinds, **options)[1]

    def row(self, key: str) -> dict[str, Any]:
        """What a table says of one choice, or of the network itself."""
        size = self.settings.batch_size
        if key == NETWORK:
            return paper.network_scores(self.model, self.images, size)
        la, result, moved = self.optimize(choice := Choice.parse(key))
        calibration = self.calibrated(la)

        def probabilities(x: Tensor) -> list[Tensor]:
            parts, batches = x.split(size), []
            for part in parts:
                batches.append(self.predictives(la, part))
                if self.progress is not None:
                    self.progress({"stage": "prediction", "batch": len(batches), "batches": len(parts)})
            return [torch.cat(own).double() for own in zip(*batches, strict=True)]

        other = [None, None] if self.images.other is None else probabilities(self.images.other)
        plain, calibrated = (
            paper.scores(*own) for own in zip(probabilities(self.test.x), 2 * [self.test.y], other, strict=True)
        )
        if self.place is not None:
            self._file(choice, ".search").unlink(missing_ok=True)  # no earlier: predictions can be cut, too
        return plain | {
            "calibrated": calibrated | calibration,
            "log_evidence": result.log_marginal_likelihood,
            "iterations": result.iterations,
            "change": result.change,
            "converged": result.converged,
            "moved": moved,
            "settled": moved <= self.settings.tolerance,
            "gamma": sum(g.gamma for g in la.report()),
            "pruned": sum(g.pruned for g in la.report()),
            "groups": groups_of(la),
        }


def chosen(
    la: LinearizedLaplace, choice: Choice, settings: Settings, progress: Progress | None = None
) -> EvidenceResult:
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
    """Precision, its hyperprior's center, effective dimension and number of weights of each group."""
    return {
        g.name: {"precision": g.precision, "center": g.center, "gamma": g.gamma, "size": g.size} for g in la.report()
    }


def optimize_evidence(
    out: Path,
    networks: dict[str, Trained],
    data: ImageDataModule,
    choices: Sequence[str],
    settings: Settings,
    device: str = "auto",
) -> Outcome:
    """Choose precisions in every way (rows of the table) for every network (columns); test likelihoods and precisions.

    Every row of every network is kept in the ``parts`` of ``out`` at once. A choice is ``tangent_mode`` or ``map``,
    ``/single`` or ``/per_group``, and ``/flat`` for no hyperprior.
    """
    return all_rows(out, networks, data, paper.parse_all(choices), settings, device)


def optimize_kronecker_evidence(
    out: Path,
    model: nn.Module,
    networks: Path,
    data: ImageDataModule,
    choices: Sequence[str],
    settings: Settings,
    device: str = "auto",
) -> Outcome:
    """The same of one architecture, and with choices ``full``, each after the ``tangent_mode`` one it starts from."""
    rows = read_choices(choices, settings.refreshes)
    found = all_rows(out, {"network": Trained(model, networks)}, data, rows, settings, device)
    own = {key: by_name["network"] for key, by_name in found.results["rows"].items()}
    alone = {key: found.results[key]["network"] for key in ("networks", "parameters")}
    return Outcome({**found.results, "rows": own, **alone}, found.headline)


def read_choices(texts: Sequence[str], refreshes: int) -> list[Choice]:
    """Read the rows of a table with ``full`` choices."""
    choices = paper.parse_all(texts, get_args(Where))
    for number, choice in enumerate(choices):
        start = choice._replace(where="tangent_mode")
        if choice.where == "full" and start not in choices[:number]:
            raise ValueError(f"choice {choice.key!r} starts from {start.key!r}: list that first")
        if choice.where == "full" and refreshes < 1:
            raise ValueError(f"refreshes is {refreshes}, but choice {choice.key!r} takes the curvature anew: raise it")
    return choices


def all_rows(
    out: Path,
    networks: dict[str, Trained],
    data: ImageDataModule,
    choices: Sequence[Choice],
    settings: Settings,
    device: str,
) -> Outcome:
    """Choice to name to the row of each network, kept in ``out/parts`` one by one."""
    images = Images(data, device)
    digest = [images.digest(), digest_tensors(*images.held_out("networks are scaled and posteriors calibrated on"))]
    counts = {name: len(found.store()) for name, found in networks.items()}
    kept = {name: found.parts(out, asdict(settings), *digest, name) for name, found in networks.items()}
    full = any(choice.where == "full" for choice in choices)
    results: dict[str, dict[str, list[Any]]] = {}
    own = [(k, name) for k in range(max(counts.values())) for name in networks if k < counts[name]]
    jobs = [(*job, key) for job in own for key in (NETWORK, *(choice.key for choice in choices))]
    for (k, name, key), progress in followed("rows", jobs, lambda job: f"{job[1]}, {paper.title_of(job[2])}"):
        if key == NETWORK:
            place = out / "parts" / f"{name}-{k}-{kept[name].key[:16]}"  # other options are other files
            work = Work(networks[name], k, images, settings, place, full=full)
        work.progress = progress
        row = kept[name].take(f"{name}-{k}-{key}", work.row, key)
        results.setdefault(key, {}).setdefault(name, []).append(row)
    itself = results.pop(NETWORK)
    every = [row for by_name in results.values() for found in by_name.values() for row in found]
    parameters = {name: trained.size for name, trained in networks.items()}
    return Outcome(
        {"networks": itself, "rows": results, "parameters": parameters, "sizes": images.sizes},
        f"{len(every)} evidences, {sum(not row['converged'] for row in every)} of them not converged to the tolerances",
    )
