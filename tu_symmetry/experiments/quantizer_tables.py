"""The tables that llm-compressor keeps by hand for AWQ and SmoothQuant, compared with the symmetries that are found.

Each row names a layer whose outputs are divided by factors and layers whose columns take these over. Every row is tried
on random weights in float64, and what holds beside the rows is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tu_symmetry._extras import from_extra
from tu_symmetry.experiments.study import tracked
from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.quantizers import match, named_by, smoothings
from tu_symmetry.symmetry.running.weights import random_state
from tu_symmetry.tables.outcome import Outcome, Parts
from tu_symmetry.tables.report import Found, Report, table

_EXACT = 1e-9  # a relative change that is rounding
VERDICTS = ("holds", "skipped", "fails", "not applied", "missing")
Row = tuple[str, list[str]]  # a smooth layer and its balance layers
Rotations = dict[str, list[str]]  # the layers of each role
State = dict[str, Tensor]


class Experts(nn.ModuleList):
    """Experts as modules of their own, as llm-compressor makes them of stacked weights; all see every token."""

    def __init__(self, stacked: Any) -> None:
        count, width, hidden = stacked.down_proj.shape
        if "Llama4" in type(stacked).__name__:
            width, hidden = hidden, width
        sizes = {"up_proj": (width, hidden), "gate_proj": (width, hidden), "down_proj": (hidden, width)}
        super().__init__(
            nn.ModuleDict({name: nn.Linear(*size, bias=False, device="cpu") for name, size in sizes.items()})
            for _ in range(count)
        )
        self.activations = [stacked.act_fn]  # in a list, since modules that are attributes count as experts

    def forward(self, x: Tensor, index: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """The weighted sum of what the chosen experts make; without a choice each expert has its own share of rows."""
        rows = x.chunk(len(self)) if index is None or weights is None else [x] * len(self)
        made = [
            one["down_proj"](self.activations[0](one["gate_proj"](own)) * one["up_proj"](own))  # type: ignore[index]
            for one, own in zip(self, rows, strict=True)
        ]
        if index is None or weights is None:
            return torch.cat(made)
        share = (nn.functional.one_hot(index, len(self)).to(x.dtype) * weights.unsqueeze(-1).to(x.dtype)).sum(1)
        return sum(share[:, k, None] * own for k, own in enumerate(made))


def build(architecture: Mapping[str, Any], offsets: Sequence[str] = ()) -> nn.Module:
    """A small network with random weights, with norms and experts as llm-compressor's modifiers see them.

    ``architecture`` holds the class of transformers (``model``), that of its configuration, and options of it.
    """
    with from_extra("quantizers", purpose="The audit of quantizers' tables"):
        import transformers

    config = getattr(transformers, architecture["config"])(**architecture["options"], use_cache=False)
    model: nn.Module = getattr(transformers, architecture["model"])(config)
    for name, module in list(model.named_modules()):
        if type(module).__name__ in offsets:
            eps = getattr(module, "eps", None) or module.variance_epsilon
            model.set_submodule(name, nn.RMSNorm(len(module.weight), eps, device="cpu"))
        elif isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
            model.set_submodule(name, Experts(module))
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
    registries: dict[str, dict[str, list[Row]]],
    architectures: dict[str, dict[str, Any]],
    offsets: list[str],
    rotations: Rotations,
) -> Outcome:
    """Try every row of every table on its architecture, and list what holds beside.

    Args:
        out: gets a part for each architecture.
        registries: quantizer to its tables by name, each rows of a smooth layer and its balance layers.
        architectures: see :func:`build`; and for quantizers (``awq``, ...) the names of their tables.
        offsets: classes of norms that multiply by one and their weight, for which llm-compressor puts plain ones.
        rotations: layers that SpinQuant rotates, by the names of its mapping; its rows are norms that are folded.
    """
    found = {}
    for name in tracked("audit", list(architectures), lambda name: name):
        own = architectures[name]
        tables = {quantizer: held[own[quantizer]] for quantizer, held in registries.items() if quantizer in own}
        given = own, tables, offsets, rotations
        found[name] = Parts(out / "parts", given).take(name, audited, *given)
    verdicts = [row["verdict"] for rows in found.values() for own in rows.values() for row in own]
    tried = len(verdicts) - verdicts.count("missing")
    return Outcome({"found": found}, f"{verdicts.count('fails')} of {tried} rows change what the network computes")


def audited(
    architecture: Mapping[str, Any], tables: Mapping[str, list[Row]], offsets: list[str], rotations: Rotations
) -> dict[str, list[dict[str, Any]]]:
    """For each quantizer the rows of its table, what is found of each, and what holds without a row."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = build(architecture, offsets)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 30, (2, 7), generator=generator, device="cpu")
    inputs: Any = tokens
    if architecture.get("inputs", 1) == 2:
        inputs = torch.randn(2, 8, 14, dtype=torch.float64, generator=generator, device="cpu"), None, tokens
    graph = discover_symmetries(model, inputs)
    state = random_state(model, generator)
    found = {}
    for quantizer, rows in tables.items():
        claims = [c for row in rows for c in _tried(graph, state, row, quantizer, generator)]
        said = {(c.smooth, frozenset(c.balance)) for c in claims if c.verdict in ("holds", "skipped")}
        unsaid = [s for s in smoothings(graph) if not s.problem and (s.smooth, frozenset(s.balance)) not in said]
        if quantizer == "smoothquant":  # which smooths norms alone
            unsaid = [s for s in unsaid if state[f"{s.smooth}.weight"].ndim == 1]
        more = (Claim(s.smooth, s.balance, "missing") for s in unsaid)
        claims += _turned(graph, state, rotations) if quantizer == "spinquant" else more
        found[quantizer] = [c._asdict() for c in claims]
    return found


def _tried(graph: SymmetryGraph, state: State, row: Row, quantizer: str, draw: torch.Generator) -> Iterator[Claim]:
    """A claim for each set of layers that a row names, or one that says why it names none."""
    assert graph.probe is not None
    smooth, balance = row
    try:
        sets = match([name for name, _ in graph.probe.module.named_modules()], smooth, balance)
        why = "names no layers here"
    except SymmetryError as error:
        sets, why = [], str(error)
    if not sets:
        yield Claim(smooth, tuple(balance), "not applied", why=why)
    for makes, *reads in sets:
        names = tuple(name for own in reads for name in own)
        if len(makes) > 1:
            why = f"{len(makes)} smooth layers in one set, as {makes[0]} and {makes[1]}"
            yield Claim(smooth, tuple(balance), "not applied", why=why)
            continue
        try:
            change = _change(graph, state, _scaled(state, makes[0], names, quantizer, draw))
        except SymmetryError as error:
            verdict = "skipped" if names[0].endswith(".o_proj") else "not applied"
            yield Claim(makes[0], names, verdict, why=str(error))
            continue
        exact = {s.smooth: {*s.balance} for s in smoothings(graph) if s.balance}
        others = {
            "also read by": exact.get(makes[0], set()).difference(names),
            "they read": {one for one, own in exact.items() if own.intersection(names) and one != makes[0]},
        }
        why = "; ".join(f"{how} {_short(layers)}" for how, layers in others.items() if layers) or "no factor is free"
        yield Claim(makes[0], names, *(("holds", change) if change < _EXACT else ("fails", change, why)))


def _scaled(
    state: State, smooth: str, balance: Sequence[str], quantizer: str, generator: torch.Generator
) -> dict[str, Tensor]:
    """The weights after a row is used with random factors, in the way of the quantizer.

    Raises:
        SymmetryError: shapes to which the factors do not fit, or a layer without weights.
    """
    empty = {name for name in (smooth, *balance) if f"{name}.weight" not in state}
    if empty:
        raise SymmetryError(f"{_short(empty)} has no weights")
    columns, rows = {state[f"{name}.weight"].shape[-1] for name in balance}, len(state[f"{smooth}.weight"])
    size = min(columns)
    factors = torch.exp(0.5 * torch.randn(size, dtype=torch.float64, generator=generator, device="cpu"))
    fused = quantizer == "awq" and rows > size and not (balance[0].endswith(".o_proj") and rows != 3 * size)
    if len(columns) > 1 or (rows != size and not fused) or (fused and f"{smooth}.bias" in state):
        raise SymmetryError(f"{rows} rows, and {' and '.join(map(str, sorted(columns)))} columns that read them")
    moved = {f"{name}.weight": state[f"{name}.weight"] * factors for name in balance}
    for name in {f"{smooth}.weight", f"{smooth}.bias"} & state.keys():
        moved[name] = state[name].clone()
        moved[name].transpose(0, -1)[..., -size:] /= factors
    return {**state, **moved}


def _turned(graph: SymmetryGraph, state: State, rotations: Rotations) -> Iterator[Claim]:
    """A claim for each kind of layers that SpinQuant rotates, beside those that are found, and for its first step."""
    modules = [parameter.rpartition(".")[0] for parameter in graph.shapes]
    exported: Any = graph.export("spinquant")
    found = exported["mappings"]
    for role, targets in rotations.items():
        free = [found[role]] if isinstance(found[role], str) else found[role]
        named, turned = ({m for m in modules if any(named_by(m, t) for t in own)} for own in (targets, free))
        yield Claim(role, tuple(sorted(named)), "holds" if named == turned else "fails")
    embedding = f"{found['embedding']}.weight"
    change = _change(graph, state, state | {embedding: state[embedding] - state[embedding].mean(-1, keepdim=True)})
    yield Claim("centered embeddings", (), "holds" if change < _EXACT else "fails", change, "RMSNorm sees a mean")


def _change(graph: SymmetryGraph, before: State, after: State) -> float:
    assert graph.probe is not None
    pairs = zip(graph.probe.run(before), graph.probe.run(after), strict=True)
    return max(float((new - old).abs().max() / old.abs().max()) for old, new in pairs if old.is_floating_point())


def _short(names: set[str]) -> str:
    return ", ".join(dict.fromkeys("experts" if ".experts." in name else _written(name) for name in sorted(names)))


def _written(name: str) -> str:
    """A name without its path and numbers, a pattern as it is."""
    parts = [part for part in name.split(".") if not part.isdigit() and part not in ("model", "layers")]
    return name if name.startswith("re:") else ".".join(parts)


def report(out: Path, recipe: str, found: Path) -> Outcome:
    """Write ``report.md``: the tables, what fails and why, and what is missing. From the folder of :func:`audit`."""
    page, results = Report(out, recipe), Outcome.load(found).results["found"]
    columns: dict[str, Any] = {v: lambda rows, v=v: str(sum(r["verdict"] == v for r in rows)) for v in VERDICTS}
    columns["change"] = lambda rows: f"{most:.2g}" if (most := max(r["change"] for r in rows)) >= _EXACT else "—"
    caption = (
        "Sets of layers that a row names. Skipped: the quantizer leaves them out for their shapes, as grouped queries. "
        "Not applied: the row names no set of layers, or one that cannot be scaled. Missing: it holds, without a row. "
        "Change: the largest relative change of outputs."
    )
    for quantizer in dict.fromkeys(q for own in results.values() for q in own):
        audits = {name: own[quantizer] for name, own in results.items() if quantizer in own}
        page.add(table(quantizer, audits, columns, caption, "architecture"))
        for title, verdicts in (("does not hold", ("fails", "not applied")), ("holds and has no row", ("missing",))):
            page.list(f"{quantizer}: what {title}", [*_lines(audits, verdicts)] or ["nothing"])
    return page.done()


def _lines(audits: Mapping[str, Sequence[Found]], verdicts: Sequence[str]) -> Iterator[str]:
    """A line for each kind of row with these verdicts, with the architectures that have it."""
    kinds: dict[str, dict[str, float]] = {}
    for name, rows in audits.items():
        for row in (row for row in rows if row["verdict"] in verdicts):
            balance = ", ".join(f"`{b}`" for b in dict.fromkeys(map(_written, row["balance"])))
            why = row["why"]
            text = f"`{_written(row['smooth'])}`{balance and f' → {balance}'}{why and f' ({why})'}"
            held = kinds.setdefault(text, {})
            held[name] = max(held.get(name, 0.0), row["change"])
    for text, changes in kinds.items():
        yield f"{text}: {'; '.join(f'{n} ({change:.2g})' if change else n for n, change in changes.items())}"
