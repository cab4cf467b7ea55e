"""The tables that llm-compressor keeps by hand for AWQ and SmoothQuant, compared with the symmetries that are found.

Each row names a layer whose outputs are divided by factors and layers whose columns take these over. Every row is tried
on random weights in float64, and what holds beside the rows is told.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tu_symmetry._extras import from_extra
from tu_symmetry.experiments.study import tracked
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.quantizers import Smoothing, match, smoothings
from tu_symmetry.symmetry.running.weights import random_state
from tu_symmetry.tables.outcome import Outcome, Parts
from tu_symmetry.tables.report import Found, Report

_EXACT = 1e-9  # a relative change that is rounding
_TOKENS = (2, 7)
VERDICTS = {
    "holds": "#4477aa",
    "skipped": "#bbccee",
    "fails": "#ee6677",
    "not applied": "#ccbb44",
    "missing": "#dddddd",
}


class PlainNorm(nn.Module):
    """RMSNorm that multiplies by its weight: llm-compressor puts it where a norm multiplies by one and its weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width, device="cpu")), eps

    def forward(self, x: Tensor) -> Tensor:
        """The normalized entries, times the weight."""
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Expert(nn.Module):
    """One expert as linear layers."""

    def __init__(self, width: int, hidden: int, activation: nn.Module) -> None:
        super().__init__()
        self.up_proj, self.gate_proj = (nn.Linear(width, hidden, bias=False, device="cpu") for _ in range(2))
        self.down_proj = nn.Linear(hidden, width, bias=False, device="cpu")
        self.act_fn = activation

    def forward(self, x: Tensor) -> Tensor:
        """What the expert makes of every token."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.ModuleList):
    """Experts as modules of their own, as llm-compressor makes them of stacked weights; all see every token."""

    def forward(self, x: Tensor, index: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """The weighted sum of what the chosen experts make; without a choice each expert has its own share of rows."""
        if index is None or weights is None:
            return torch.cat([one(rows) for one, rows in zip(self, x.chunk(len(self)), strict=True)])
        share = (nn.functional.one_hot(index, len(self)).to(x.dtype) * weights.unsqueeze(-1).to(x.dtype)).sum(1)
        return sum(share[:, k, None] * one(x) for k, one in enumerate(self))


def build(architecture: Mapping[str, Any], offsets: Sequence[str] = ()) -> nn.Module:
    """A small network with random weights, with norms and experts as llm-compressor's modifiers see them.

    ``architecture`` holds the class of transformers (``model``), that of its configuration, and options of it.
    """
    with from_extra("quantizers", purpose="The audit of quantizers' tables"):
        import transformers

    config = getattr(transformers, architecture["config"])(**architecture["options"], use_cache=False)
    model: nn.Module = getattr(transformers, architecture["model"])(config).eval()
    for name, module in list(model.named_modules()):
        if type(module).__name__ in offsets:
            weight, eps = module.weight, getattr(module, "eps", None) or module.variance_epsilon
            model.set_submodule(name, PlainNorm(len(weight), eps))
        elif isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
            count, *sizes = module.down_proj.shape
            width, hidden = sizes if "Llama4" not in type(module).__name__ else sizes[::-1]
            made = (Expert(width, hidden, module.act_fn) for _ in range(count))
            model.set_submodule(name, Experts(made))
    return model.double().eval()


class Claim(NamedTuple):
    """One row of a table, resolved: ``change`` of the outputs, relative to the largest of them."""

    smooth: str
    balance: tuple[str, ...]
    verdict: str
    change: float = 0.0
    why: str = ""


def audit(
    out: Path,
    registries: dict[str, dict[str, list[tuple[str, list[str]]]]],
    architectures: dict[str, dict[str, Any]],
    offsets: list[str],
    rotations: dict[str, Any],
    seed: int = 0,
) -> Outcome:
    """Try every row of every table on its architecture, and list what holds beside.

    Args:
        out: gets a part for each architecture.
        registries: quantizer to its tables by name, each rows of a smooth layer and its balance layers.
        architectures: see :func:`build`; and for each quantizer the name of its table (``awq``, ``smoothquant``).
        offsets: classes of norms that multiply by one and their weight, for which llm-compressor puts plain ones.
    """
    found = {}
    for name in tracked("audit", list(architectures), lambda name: name):
        own = architectures[name]
        tables = {q: {own[q]: held[own[q]]} for q, held in registries.items() if q in own}
        given = own, tables, offsets, rotations, seed
        found[name] = Parts(out / "parts", given).take(name, audited, *given)
    failing = sum(row["verdict"] == "fails" for rows in found.values() for own in rows.values() for row in own)
    rows = sum(row["verdict"] != "missing" for rows in found.values() for own in rows.values() for row in own)
    return Outcome({"found": found}, f"{failing} of {rows} rows change what the network computes")


def audited(
    architecture: Mapping[str, Any],
    registries: Mapping[str, Mapping[str, Any]],
    offsets: Sequence[str],
    rotations: Mapping[str, Any],
    seed: int,
) -> dict[str, list[dict[str, Any]]]:
    """For each quantizer the rows of its table, what is found of each, and what holds without a row."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = build(architecture, offsets)
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(3, 30, _TOKENS, generator=generator, device="cpu")
    inputs: Any = first
    if architecture.get("inputs", 1) == 2:
        inputs = torch.randn(2, 8, 14, dtype=torch.float64, generator=generator, device="cpu"), None, first
    graph = discover_symmetries(model, inputs)
    state = random_state(model, generator)
    holding = smoothings(graph)
    found = {}
    for quantizer, own in registries.items():
        if quantizer in architecture:
            claims = [
                c
                for smooth, balance in own[architecture[quantizer]]
                for c in tried(graph, model, state, smooth, balance, quantizer, generator)
            ]
            vectors = {name for name, shape in graph.shapes.items() if len(shape) == 1}
            unsaid = _missing(claims, [s for s in holding if quantizer == "awq" or f"{s.smooth}.weight" in vectors])
            found[quantizer] = [c._asdict() for c in (*_told(claims, holding), *unsaid)]
    if "spinquant" in architecture:
        found["spinquant"] = [c._asdict() for c in turned(graph, model, state, rotations, generator)]
    return found


def turned(
    graph: SymmetryGraph,
    model: Any,
    state: Mapping[str, Tensor],
    rotations: Mapping[str, Any],
    generator: torch.Generator,
) -> Iterator[Claim]:
    """A claim for each step of SpinQuant: centered embeddings, folded norms, the stream rotated (R1), values (R2)."""
    names = [name for name, _ in model.named_modules()]
    layers = {
        role: [n for n in names for t in targets if re.match(t.removeprefix("re:"), n)]
        for role, targets in rotations.items()
        if role != "norms"
    }
    embedding = f"{layers['embedding'][0]}.weight"
    centered = {embedding: state[embedding] - state[embedding].mean(-1, keepdim=True)}
    folded = dict(state)
    for norm, linears in rotations["norms"]:
        for (one, *_), *reads in match(names, norm, linears):
            gain = folded[f"{one}.weight"]
            folded |= {f"{n}.weight": folded[f"{n}.weight"] * gain for own in reads for n in own}
            folded[f"{one}.weight"] = torch.ones_like(gain)

    def rotation(size: int) -> Tensor:
        return torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator, device="cpu")).Q

    turn, heads = rotation(folded[embedding].shape[1]), rotation(model.config.head_dim)
    stream = folded | {embedding: folded[embedding] @ turn.T}
    stream |= {f"{n}.weight": turn @ folded[f"{n}.weight"] for n in layers["writes"]}
    stream |= {f"{n}.weight": folded[f"{n}.weight"] @ turn.T for n in layers["reads"]}
    values = dict(stream)
    for v, o in zip(layers["v"], layers["o"], strict=True):
        made, read = (values[f"{n}.weight"] for n in (v, o))
        values[f"{v}.weight"] = (heads @ made.reshape(-1, len(heads), made.shape[1])).reshape(made.shape)
        values[f"{o}.weight"] = (read.reshape(len(read), -1, len(heads)) @ heads.T).reshape(read.shape)
    steps = {"centered embeddings": dict(state) | centered, "folded norms": folded, "R1": stream, "R2": values}
    for before, (step, after) in zip((state, state, folded, stream), steps.items(), strict=True):
        change = _change(graph, before, after)
        why = "RMSNorm sees a mean" if change >= _EXACT and "centered" in step else ""
        yield Claim(step, (), "holds" if change < _EXACT else "fails", change, why)


def tried(
    graph: SymmetryGraph,
    model: nn.Module,
    state: Mapping[str, Tensor],
    smooth: str,
    balance: Sequence[str],
    quantizer: str,
    generator: torch.Generator,
) -> Iterator[Claim]:
    """A claim for each set of layers that a row names, or one that says why it names none."""
    try:
        sets = match([name for name, _ in model.named_modules()], smooth, balance)
    except SymmetryError as error:
        yield Claim(smooth, tuple(balance), "not applied", why=str(error))
        return
    if not sets:
        yield Claim(smooth, tuple(balance), "not applied", why="names no layers here")
    for makes, *reads in sets:
        names = tuple(name for own in reads for name in own)
        if len(makes) > 1:
            why = f"{len(makes)} smooth layers in one set, as {makes[0]} and {makes[1]}"
            yield Claim(smooth, tuple(balance), "not applied", why=why)
            continue
        try:
            moved = scaled(state, makes[0], names, quantizer, generator)
        except SymmetryError as error:
            verdict = "skipped" if names[0].endswith(".o_proj") else "not applied"
            yield Claim(makes[0], names, verdict, why=str(error))
            continue
        change = _change(graph, state, moved)
        yield Claim(makes[0], names, "holds" if change < _EXACT else "fails", change)


def scaled(
    state: Mapping[str, Tensor], smooth: str, balance: Sequence[str], quantizer: str, generator: torch.Generator
) -> dict[str, Tensor]:
    """The weights after a row is used with random factors, in the way of the quantizer.

    Raises:
        SymmetryError: shapes to which the factors do not fit, or a layer without weights.
    """
    empty = [name for name in (smooth, *balance) if f"{name}.weight" not in state]
    if empty:
        raise SymmetryError(f"{_short(set(empty))} has no weights")
    columns, rows = {state[f"{name}.weight"].shape[-1] for name in balance}, len(state[f"{smooth}.weight"])
    size = min(columns)
    factors = torch.exp(0.5 * torch.randn(size, dtype=torch.float64, generator=generator, device="cpu"))
    fused = quantizer == "awq" and rows > size and not (balance[0].endswith(".o_proj") and rows != 3 * size)
    if len(columns) > 1 or (rows != size and not fused) or (fused and f"{smooth}.bias" in state):
        raise SymmetryError(f"{rows} rows, and {' and '.join(map(str, sorted(columns)))} columns that read them")
    moved = dict(state)
    for name in (n for n in (f"{smooth}.weight", f"{smooth}.bias") if n in state):
        moved[name] = state[name].clone()
        moved[name][-size:] /= factors if state[name].ndim == 1 else factors[:, None]
    return moved | {f"{name}.weight": state[f"{name}.weight"] * factors for name in balance}


def _change(graph: SymmetryGraph, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    assert graph.probe is not None
    pairs = zip(graph.probe.run(before), graph.probe.run(after), strict=True)
    return max(float((new - old).abs().max() / old.abs().max()) for old, new in pairs if old.is_floating_point())


def _told(claims: Sequence[Claim], holding: Sequence[Smoothing]) -> Iterator[Claim]:
    """The claims, those that fail with what else reads what the smooth layer makes, or with what is read instead."""
    exact = {s.smooth: {*s.balance} for s in holding if s.balance}
    for claim in claims:
        reads, named = exact.get(claim.smooth, set()), {*claim.balance}
        instead = {smooth for smooth, balance in exact.items() if balance & named and smooth != claim.smooth}
        told = [f"also read by {_short(reads - named)}"] * bool(reads - named)
        told += [f"they read {_short(instead)}"] * bool(instead)
        yield claim._replace(why="; ".join(told) or "no factor is free") if claim.verdict == "fails" else claim


def _missing(claims: Sequence[Claim], holding: Sequence[Smoothing]) -> Iterator[Claim]:
    """What a table could say and does not; SmoothQuant smooths norms alone."""
    said = {(c.smooth, frozenset(c.balance)) for c in claims if c.verdict in ("holds", "skipped")}
    for s in holding:
        if not s.problem and (s.smooth, frozenset(s.balance)) not in said:
            yield Claim(s.smooth, s.balance, "missing")


def _short(names: set[str]) -> str:
    shown = dict.fromkeys("experts" if ".experts." in name else _written(name) for name in sorted(names))
    return ", ".join(shown)


def report(out: Path, recipe: str, found: Path) -> Outcome:
    """Write ``report.md``: the tables, what fails and why, and what is missing. From the folder of :func:`audit`."""
    page, results = Report(out, recipe), Outcome.load(found).results["found"]
    for quantizer in dict.fromkeys(q for own in results.values() for q in own):
        page.add(summary(results, quantizer))
        for title, verdicts in (("does not hold", ("fails", "not applied")), ("holds and has no row", ("missing",))):
            told = list(lines(results, quantizer, verdicts))
            page.list(f"{quantizer}: what {title}", told or ["nothing"])
    page.figure("audit", draw, results, alt="what became of every row")
    return page.done()


def summary(results: Found, quantizer: str) -> Grid:
    """How many rows of each architecture hold."""
    body = []
    for name, own in results.items():
        if quantizer in own:
            counts = Counter(row["verdict"] for row in own[quantizer])
            largest = max((row["change"] for row in own[quantizer]), default=0.0)
            cells = [str(counts[verdict]) for verdict in VERDICTS]
            body.append([name, *cells, f"{largest:.2g}" if largest >= _EXACT else "—"])
    caption = (
        "Sets of layers that a row names. Skipped: the quantizer leaves them out for their shapes, as grouped queries. "
        "Not applied: the row names no set of layers, or one that cannot be scaled. Missing: it holds, without a row. "
        "Change: the largest relative change of outputs."
    )
    return Grid(f"{quantizer}", ["architecture", *VERDICTS, "change"], body, caption)


def lines(results: Found, quantizer: str, verdicts: Sequence[str]) -> Iterator[str]:
    """A line for each kind of row with these verdicts, with the architectures that have it."""
    kinds: dict[tuple[str, str], dict[str, float]] = {}
    for name, own in results.items():
        for row in own.get(quantizer, ()):
            if row["verdict"] in verdicts:
                balance = ", ".join(f"`{b}`" for b in dict.fromkeys(map(_written, row["balance"])))
                text = f"`{_written(row['smooth'])}`{' → ' * bool(balance)}{balance}"
                held = kinds.setdefault((text, row["why"]), {})
                held[name] = max(held.get(name, 0.0), row["change"])
    for (text, why), changes in kinds.items():
        of = "; ".join(f"{name} ({change:.2g})" if change else name for name, change in changes.items())
        yield f"{text}{f' ({why})' if why else ''}: {of}"


def _written(name: str) -> str:
    """A name without its path and numbers, a pattern as it is."""
    if name.startswith("re:"):
        return name
    parts = [part for part in name.split(".") if not part.isdigit() and part not in ("model", "layers")]
    return ".".join(parts)


def draw(path: Path, results: Found) -> None:
    """For each architecture and table the share of sets of each verdict."""
    quantizers = list(dict.fromkeys(q for own in results.values() for q in own if q != "spinquant"))
    with plots.figure(path, len(quantizers), width=5.5, height=0.24 * len(results) + 0.8) as axes:
        for ax, quantizer in zip(axes, quantizers, strict=True):
            named = [name for name, own in results.items() if quantizer in own]
            left = np.zeros(len(named))
            for verdict, color in VERDICTS.items():
                width = [
                    sum(row["verdict"] == verdict for row in results[name][quantizer]) / len(results[name][quantizer])
                    for name in named
                ]
                ax.barh(named, width, left=left, color=color, label=verdict)
                left += width
            ax.set(title=quantizer, xlabel="share of sets of layers", xlim=(0, 1))
            ax.invert_yaxis()
        axes[0].legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=5, fontsize=7)
