"""Table 1 of arXiv 2206.08900: test log-likelihood for precisions chosen by the evidence in four ways, by architecture.

The evidence is evaluated at the trained weights, M(θ~), or at the joint stationary point, M(θ*) (Recommendation 1), for
a single precision or one for each normalized group (Recommendation 2). Beside these: the network itself, and M(θ*) with
groups but without the hyperprior, which shows what the evidence alone does to normalized groups.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy

from tu_symmetry.configs import ConfigError
from tu_symmetry.evaluation import Batches
from tu_symmetry.files import read_json, read_tensors, write_json, write_safetensors
from tu_symmetry.laplace.curvature import Curvature
from tu_symmetry.laplace.evidence import Hyperprior
from tu_symmetry.laplace.groups import Prior, prior_groups
from tu_symmetry.laplace.jacobians import Tangent, features
from tu_symmetry.laplace.mode import EvaluateAt
from tu_symmetry.laplace.model import LinearizedLaplace, NotConvergedWarning, PrunedGroupWarning
from tu_symmetry.laplace.tangent import TangentModel
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.tables.data import Data
from tu_symmetry.tables.laplace_networks import ARCHITECTURES, matrices
from tu_symmetry.tables.stage import Results, StageContext, stage

NETWORK = "network"  # the row of the network itself
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
class NetworksOptions:
    """Which networks are trained, and how.

    Attributes:
        architectures: name (a column of the paper's table) to the arguments of the network.
        seeds: number of networks of each architecture.
        epochs: over the training set.
        batch_size: of training.
        learning_rate: of Adam, annealed by a cosine to zero.
        pool: images are averaged over squares of so many pixels; 2 makes 14 x 14 pixels of 28 x 28.
    """

    architectures: dict[str, dict[str, Any]] = field(default_factory=lambda: {name: {} for name in ARCHITECTURES})
    seeds: int = 3
    epochs: int = 40
    batch_size: int = 100
    learning_rate: float = 3e-3
    pool: int = 1


@dataclass(frozen=True)
class EvidenceOptions:
    """How the evidence is optimized, and the predictive computed.

    Attributes:
        choices: rows of the table, ``EVALUATE_AT/PRIOR`` or ``EVALUATE_AT/PRIOR/flat`` (without hyperprior).
        curvature: ``full`` for small networks (it also makes finding theta* cheap), ``kfac`` for larger ones.
        batch_size: of all passes over the data.
        tolerance: largest change of a log precision at convergence.
        mode_tolerance: gradient norm of theta* in posterior standard deviations.
        max_iterations: largest number of alternations between theta* and the precisions.
        num_samples: of the Monte-Carlo predictive.
    """

    choices: list[str] = field(
        default_factory=lambda: [
            "tangent_mode/single",
            "tangent_mode/per_group",
            "tangent_mode/per_group/flat",
            "map/single",
            "map/per_group",
        ]
    )
    curvature: Curvature = "kfac"
    batch_size: int = 250
    tolerance: float = 1e-2
    mode_tolerance: float = 0.1
    max_iterations: int = 50
    num_samples: int = 500


@dataclass(frozen=True)
class ReportOptions:
    """A report has no options."""


def pooled(data: Data, pool: int) -> Data:
    """The data with images averaged over squares of ``pool`` pixels."""
    return replace(data, train_x=avg_pool2d(data.train_x, pool), test_x=avg_pool2d(data.test_x, pool))


def build(context: StageContext, architecture: str, arguments: Mapping[str, Any]) -> nn.Module:
    """A network of the table, with as many outputs as the data have classes.

    Raises:
        ConfigError: an architecture that the table does not know.
    """
    if architecture not in ARCHITECTURES:
        raise ConfigError(f"architecture {architecture!r} is not known; there are {', '.join(ARCHITECTURES)}")
    network: nn.Module = ARCHITECTURES[architecture](num_classes=context.data.num_classes, **arguments)
    return network.to(context.device)


@stage()
def train_networks(context: StageContext, options: NetworksOptions) -> Results:
    """Train the networks, one file each."""
    jobs = list(product(options.architectures, range(options.seeds)))
    data = pooled(context.data, options.pool)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in options.architectures}
    with context.track("training", len(jobs)) as tracker:
        for number, (architecture, seed) in enumerate(jobs):
            path = context.folder / f"{architecture}-{seed}.safetensors"
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(context.seed(f"initialization {architecture} {seed}"))
                model = build(context, architecture, options.architectures[architecture])
            if path.exists():
                model.load_state_dict(read_tensors(path, device=context.device))
            else:
                _train(data, options, model, context.generator(f"batches {architecture} {seed}"))
                write_safetensors(path, model.state_dict())
            rows[architecture].append(_quality(data, model.eval()))
            tracker.update(number + 1)
    sizes = {
        name: sum(p.numel() for p in build(context, name, a).parameters()) for name, a in options.architectures.items()
    }
    accuracy = {name: sum(r["accuracy"] for r in found) / len(found) for name, found in rows.items()}
    return {
        "networks": rows,
        "parameters": sizes,
        "architectures": options.architectures,
        "epochs": options.epochs,
        "pool": options.pool,
        "headline": "test accuracy " + ", ".join(f"{name} {100 * a:.1f} %" for name, a in accuracy.items()),
    }


def _train(data: Data, options: NetworksOptions, model: nn.Module, generator: torch.Generator) -> None:
    x, y = data.train_x, data.train_y
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    model.train()
    for _ in range(options.epochs):
        for batch in torch.randperm(len(x), generator=generator).to(x.device).split(options.batch_size):
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        schedule.step()


@torch.no_grad()
def _quality(data: Data, model: nn.Module) -> dict[str, float]:
    train = torch.cat([model(x) for x, _ in data.train])
    test = torch.cat([model(x) for x, _ in data.test])
    return {
        "train_nll": float(cross_entropy(train, data.train_y)),
        "nll": float(cross_entropy(test, data.test_y)),
        "accuracy": float((test.argmax(-1) == data.test_y).double().mean()),
    }


@stage(inputs=("networks",))
def optimize_evidence(context: StageContext, options: EvidenceOptions) -> Results:
    """Choose precisions in every way for every network; test NLL, precisions and effective dimensions."""
    trained = context.inputs["networks"].results
    data = pooled(context.data, trained["pool"])
    for choice in options.choices:
        _parse(choice)
    rows: dict[str, dict[str, list[Any]]] = {}
    total = sum(len(found) for found in trained["networks"].values()) * len(options.choices)
    done = 0
    with context.track("evidence", total) as tracker:
        for architecture, seed, model, graph in _networks(context, data):
            paths = {
                choice: context.folder / f"{architecture}-{seed}-{choice.replace('/', '-')}.json"
                for choice in options.choices
            }
            subject = None
            for choice, path in paths.items():
                if not path.exists():
                    subject = subject or _prepare(data, options, model, graph)
                    write_json(path, _measure(subject, options, choice), seal=True)
                found = read_json(path)[0]
                rows.setdefault(choice, {}).setdefault(architecture, []).append(found)
                done += 1
                tracker.update(done, architecture=architecture, choice=choice)
    open_ends = sum(not r["converged"] for by_name in rows.values() for found in by_name.values() for r in found)
    return {"rows": rows, "headline": f"{total} evidences, {open_ends} of them not converged to the tolerances"}


def _networks(context: StageContext, data: Data) -> Iterator[tuple[str, int, nn.Module, SymmetryGraph]]:
    source = context.inputs["networks"]
    graphs: dict[str, SymmetryGraph] = {}
    count = max(len(found) for found in source.results["networks"].values())
    for seed, (architecture, arguments) in product(range(count), source.results["architectures"].items()):
        model = build(context, architecture, arguments).eval()
        path = source.folder / f"{architecture}-{seed}.safetensors"
        model.load_state_dict(read_tensors(path, device=context.device))
        if architecture not in graphs:
            graphs[architecture] = discover_symmetries(model, data.train_x[:2])
        yield architecture, seed, model, graphs[architecture]


def _parse(choice: str) -> tuple[EvaluateAt, Literal["single", "per_group"], bool]:
    where, prior, *rest = choice.split("/")
    if where not in ("tangent_mode", "map") or prior not in ("single", "per_group") or rest not in ([], ["flat"]):
        raise ConfigError(f"choice {choice!r}: write tangent_mode or map, /, single or per_group, and /flat if wanted")
    return ("map" if where == "map" else "tangent_mode"), ("single" if prior == "single" else "per_group"), bool(rest)


@dataclass(frozen=True)
class _Subject:
    """A network (or its tangent model), data as it takes them, and the parameters of each prior group."""

    model: nn.Module
    train: Batches
    test: Batches
    groups: dict[str, list[str]]


def _prepare(data: Data, options: EvidenceOptions, model: nn.Module, graph: SymmetryGraph) -> _Subject:
    names = matrices(model)
    # without normalization there are no groups of Recommendation 2; the paper has numbers for FixUp all the same
    prior: Prior = "per_group" if any(g.members for g in graph.normalizations) else "per_layer"
    partition = prior_groups(TangentModel(model, names).slots, prior, normalizations=graph.normalizations)
    groups: dict[str, list[str]] = {}
    for name, number in partition.of.items():
        groups.setdefault(partition.names[int(number)], []).append(name)
    train_x, test_x = data.train_x, data.test_x
    if options.curvature == "full":
        # float64: eigenvalues of small networks' curvatures are too close to each other for float32
        train_x, test_x = (features(model, names, x).double() for x in (train_x, test_x))
        model = model.double()
        model = Tangent(model, names)
    size = options.batch_size
    return _Subject(model, Batches(train_x, data.train_y, size), Batches(test_x, data.test_y, size), groups)


def _measure(subject: _Subject, options: EvidenceOptions, choice: str) -> dict[str, Any]:
    evaluate_at, prior, flat = _parse(choice)
    la = LinearizedLaplace(
        subject.model,
        evaluate_at=evaluate_at,
        prior=prior,
        groups=subject.groups,
        curvature=options.curvature,
        parameters=[name for names in subject.groups.values() for name in names],
    )
    la.fit(subject.train)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrunedGroupWarning)  # the table says it
        warnings.simplefilter("ignore", NotConvergedWarning)
        result = la.optimize_evidence(
            hyperprior=None if flat else Hyperprior(),
            tolerance=options.tolerance,
            mode_tolerance=options.mode_tolerance,
            max_iterations=options.max_iterations,
        )
    p = torch.cat([la.predictive(x, num_samples=options.num_samples) for x, _ in subject.test])
    right = p.gather(-1, subject.test.y.unsqueeze(-1))
    groups = la.report()
    return {
        "nll": float(-right.clamp(min=1e-30).log().mean()),
        "accuracy": float((p.argmax(-1) == subject.test.y).double().mean()),
        "log_evidence": result.log_marginal_likelihood,
        "iterations": result.iterations,
        "gradient_norm": result.gradient_norm,
        "converged": result.converged,
        "pruned": sum(g.pruned for g in groups),
        "groups": {g.name: {"precision": g.precision, "gamma": g.gamma, "size": g.size} for g in groups},
    }


@stage(inputs=("networks", "evidence", "early_networks?", "early_evidence?"), reads_table=True)
def report(context: StageContext, options: ReportOptions) -> Results:
    """Write ``report.md``: a table like the paper's for every training length, and what became of the groups."""
    grids = []
    for prefix in ("", "early_"):
        if f"{prefix}evidence" in context.inputs:
            trained, found = (context.inputs[f"{prefix}{role}"].results for role in ("networks", "evidence"))
            epochs = f"{trained['epochs']} epochs"
            grids.append(_table(context, trained, found["rows"], epochs))
            grids.append(_differences(trained, found["rows"], epochs))
            grids.append(_groups(trained, found["rows"], epochs))
    environment = ", ".join(f"{k} {v}" for k, v in context.environment.items())
    parts = [f"# {context.table.title}", f"Reproduces: {context.table.source}.", context.table.note]
    parts += [f"## {g.title}\n\n{g.markdown()}" for g in grids] + [f"## Hardware and versions\n\n{environment}"]
    (context.folder / "report.md").write_text("\n\n".join(p for p in parts if p) + "\n", encoding="utf-8")
    return {"tables": [g.to_dict() for g in grids], "headline": f"{context.name}/report.md"}


def _table(context: StageContext, trained: Mapping[str, Any], rows: Mapping[str, Any], epochs: str) -> Grid:
    names = list(trained["networks"])
    body = [["network itself", *(_cell(trained["networks"][name]) for name in names)]]
    body.append(["the same, training data", *(_cell(trained["networks"][name], "train_nll") for name in names)])
    for choice, found in rows.items():
        paper, error = context.table.paper.get(choice, {}), context.table.paper.get(f"{choice}/error", {})
        cells = []
        for name in names:
            theirs = f"{paper[name]:.3f} ± {error[name]:.3f}" if name in paper and name in error else ""
            cells.append(f"{_cell(found[name])}\n{theirs}")
        body.append([_name(choice), *cells])
    caption = (
        "test NLL (nats), mean ± standard error over seeds; second line: the paper's. Each FixUp cell of several λ has "
        "one for each layer, for it has no normalized groups."
    )
    return Grid(f"Test NLL after {epochs}", ["", *names], body, caption)


def _differences(trained: Mapping[str, Any], rows: Mapping[str, Any], epochs: str) -> Grid:
    """What one change of the method does to the same networks, with every other choice held."""
    names = list(trained["networks"])
    everything = {NETWORK: trained["networks"], **rows}
    body = []
    for title, (after, before) in CHANGES.items():
        if after in everything and before in everything:
            cells = []
            for name in names:
                pairs = zip(everything[after][name], everything[before][name], strict=True)
                values = torch.tensor([a["nll"] - b["nll"] for a, b in pairs], dtype=torch.float64)
                cells.append(f"{values.mean().item():+.3f}" + (_error(values) if len(values) > 1 else ""))
            body.append([title, *cells])
    caption = "difference of test NLL (nats) on the same networks, mean ± standard error over seeds; negative helps"
    return Grid(f"What each choice changes after {epochs}", ["", *names], body, caption)


def _groups(trained: Mapping[str, Any], rows: Mapping[str, Any], epochs: str) -> Grid:
    """Effective dimensions and pruned groups."""
    body = []
    for choice, found in rows.items():
        cells = []
        for name in trained["networks"]:
            runs = found[name]
            gamma = sum(sum(g["gamma"] for g in r["groups"].values()) for r in runs) / len(runs)
            pruned, count = sum(r["pruned"] for r in runs), sum(len(r["groups"]) for r in runs)
            cells.append(f"{gamma:.0f}\n{pruned}/{count} pruned" if count > len(runs) else f"{gamma:.0f}")
        body.append([_name(choice), *cells])
    caption = "effective directions that the data determine, mean over seeds; second line: pruned groups of all seeds"
    return Grid(f"Effective dimension after {epochs}", ["", *trained["networks"]], body, caption)


def _cell(runs: list[Mapping[str, Any]], key: str = "nll") -> str:
    values = torch.tensor([r[key] for r in runs], dtype=torch.float64)
    return f"{values.mean().item():.3f}" + (_error(values) if len(values) > 1 else "")


def _error(values: Tensor) -> str:
    return f" ± {values.std().item() / len(values) ** 0.5:.3f}"


def _name(choice: str) -> str:
    evaluate_at, prior, flat = _parse(choice)
    where = "M(θ*)" if evaluate_at == "tangent_mode" else "M(θ~)"
    return f"{where}, {'single λ' if prior == 'single' else 'several λ'}{', no hyperprior' if flat else ''}"
