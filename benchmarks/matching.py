"""Weight matching against the ``rebasin`` package and against the bare matrix products."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tu_symmetry as tus
from benchmarks._measure import figure, interleave, times
from benchmarks._report import Goal, Section, Settings
from tu_symmetry.alignment.matching import weight_distance
from tu_symmetry.symmetry.verification import random_state
from tu_symmetry.tables.grid import Grid

MODELS = ("resnet18", "vgg16_bn", "resnet50")
INSTALL = "not installed: pip install --no-deps rebasin==0.0.47 torchview graphviz tqdm"
DEFAULT, DESCENT, PEER, GRAMS = "Frank-Wolfe (default)", "descent", "rebasin 0.0.47", "Gram matrices of one sweep"
_NOISE = 0.1
_PRODUCTS = {getattr(torch.ops.aten, name) for name in ("mm", "addmm", "bmm", "baddbmm")}
State = dict[str, Tensor]


@dataclass(frozen=True)
class Pair:
    """Two networks to be matched.

    Attributes:
        name: ``independent`` or ``planted``.
        reference: the state that stays.
        state: the state to be permuted.
    """

    name: str
    reference: State
    state: State


def run(settings: Settings) -> Section:
    """Match each pair of each model with each method, in turn."""
    rows, data = [], []
    for name in ("small",) if settings.quick else MODELS:
        model = _build(name)
        inputs = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(3))
        graph = tus.discover_symmetries(model, inputs)
        graph.require_verified()
        for pair in _pairs(graph, model):
            settings.say(f"{name}, {pair.name}")
            repeats = 1 if settings.quick or name == "vgg16_bn" else 3
            for record in _measure(graph, model, pair, inputs, repeats, settings):
                data.append({"model": name, "pair": pair.name, **record})
                rows.append(_row(data[-1]))
    header = [
        "model, pair, method", "seconds", "rebasin takes", "of it in\nproducts", "total to\nproducts",
        "total to one\nsweep's products", "distance\nbefore", "distance\nafter", "output\nerror",
    ]  # fmt: skip
    text = (
        "Two networks of torchvision's architecture in float32. *Independent*: both drawn at random. *Planted*: the "
        f"second is the first with Gaussian noise ({_NOISE:g} of each tensor's standard deviation) and a uniformly "
        "random permutation of every group. Normalization statistics and affine parameters are random too: with those "
        "of a fresh network, a permutation that forgets them would go unnoticed.\n\n"
        "*Seconds*: `weight_matching` with a verified graph, or the calculation of permutations by `rebasin` with its "
        "tracing done beforehand (it does coordinate descent; ours stands beside the default for comparison). In turn, "
        "median of three (vgg16_bn: once). *In products*: time inside PyTorch's matrix products (`aten::mm` and its "
        "kin) during one more run, and the total against it: the Gram matrices of all iterations count, everything "
        "else is overhead. *One sweep's products*: the bare time of one float32 product `A @ B.T` for each permuted "
        "axis of each tensor, `[units, everything else]` each, copied into that layout beforehand. *Distance*: L2 over "
        "parameters. *Output error*: of the permuted network in evaluation mode against itself before, relative L2 "
        "over four images; about 1e-6 is rounding, more is another function."
    )
    return Section(
        "Weight matching",
        text,
        [Grid("Time, distance, and whether the function stays", header, rows)],
        _goals(data),
        data,
        packages=("rebasin",),
    )


def _build(name: str) -> nn.Module:
    if name == "small":
        layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(8, 4)).eval()
    import torchvision

    model: nn.Module = getattr(torchvision.models, name)().eval()
    return model


def _pairs(graph: tus.SymmetryGraph, model: nn.Module) -> list[Pair]:
    generator = torch.Generator().manual_seed(0)
    reference, other = ({n: t.clone() for n, t in random_state(model, generator).items()} for _ in range(2))
    noisy = {
        n: t + _NOISE * t.std() * torch.randn(t.shape, generator=generator)
        if t.is_floating_point() and n not in graph.buffers and t.numel() > 1
        else t
        for n, t in reference.items()
    }
    permutation = tus.random_permutation(graph, generator=generator)
    planted = tus.apply_permutation(graph, permutation, noisy)
    return [Pair("independent", reference, other), Pair("planted", reference, planted)]


def _measure(
    graph: tus.SymmetryGraph, model: nn.Module, pair: Pair, inputs: Tensor, repeats: int, settings: Settings
) -> list[dict[str, Any]]:
    ours = {
        DEFAULT: lambda: tus.weight_matching(graph, pair.reference, pair.state).permutation,
        DESCENT: lambda: tus.weight_matching(graph, pair.reference, pair.state, method="descent").permutation,
    }
    candidates: dict[str, Callable[[], Callable[[], Any]]] = {n: lambda f=f: f for n, f in ours.items()}  # type: ignore[misc]
    candidates[PEER] = lambda: _peer(model, pair, inputs)
    candidates[GRAMS] = lambda: one_sweep(graph, pair)
    outcomes = interleave(candidates, repeats, settings.say)
    before = weight_distance(graph, pair.reference, pair.state)
    expected = _outputs(model, pair.state, inputs)
    found = []
    for name, outcome in outcomes.items():
        if name == GRAMS:
            continue
        record: dict[str, Any] = {"method": name, "seconds": outcome.median, "repeats": outcome.seconds}
        record |= {"error": outcome.error, "before": before, "sweep": outcomes[GRAMS].median}
        record["peer_seconds"] = outcomes[PEER].median
        if outcome.error is None:
            moved = outcome.value if name == PEER else tus.apply_permutation(graph, outcome.value, pair.state)
            actual = _outputs(model, moved, inputs)
            record["after"] = weight_distance(graph, pair.reference, moved)
            record["output_error"] = float((actual - expected).norm() / expected.norm())
        if name in ours:
            record["products"], record["counted"] = _products(ours[name])
        found.append(record)
    return found


def _peer(model: nn.Module, pair: Pair, inputs: Tensor) -> Callable[[], State]:
    """One run of ``rebasin``, its models built and traced beforehand; it permutes its second model in place."""
    try:
        import rebasin
    except ImportError as error:
        raise ImportError(INSTALL) from error
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    first.load_state_dict(pair.reference)
    second.load_state_dict(pair.state)
    torch.manual_seed(0)  # it draws the order of its groups from the global generator
    matcher = rebasin.PermutationCoordinateDescent(first, second, inputs)

    def call() -> State:
        matcher.calculate_permutations()
        matcher.apply_permutations()
        return {n: t.detach() for n, t in second.state_dict().items()}

    return call


def one_sweep(graph: tus.SymmetryGraph, pair: Pair) -> Callable[[], None]:
    """The bare products of one sweep: one for each permuted axis of each parameter."""
    operands = []
    done = set()
    for group in graph.permutations:
        for member in group.members:
            if member.parameter in graph.buffers or (member.parameter, member.axis) in done:
                continue
            done.add((member.parameter, member.axis))
            units = member.index.reshape(-1, member.index.shape[-1])
            if member.within_axis is not None:
                units = torch.arange(graph.shapes[member.parameter][member.axis]).unsqueeze(-1)
            sides = [
                s[member.parameter].movedim(member.axis, 0)[units.reshape(-1)].reshape(len(units), -1).contiguous()
                for s in (pair.reference, pair.state)
            ]
            operands.append(sides)

    def call() -> None:
        for a, b in operands:
            a @ b.T

    return call


class _ProductClock(TorchDispatchMode):
    """Adds up the time inside matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket not in _PRODUCTS:
            return func(*args, **(kwargs or {}))
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self.seconds += time.perf_counter() - start
        return result


def _products(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds inside matrix products during a call, and the call's own seconds while they are counted."""
    start = time.perf_counter()
    with _ProductClock() as clock:
        call()
    return clock.seconds, time.perf_counter() - start


def _outputs(model: nn.Module, state: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    with torch.no_grad():
        outputs: Tensor = torch.func.functional_call(model, dict(state), (inputs,))
    return outputs.double()


def _row(record: dict[str, Any]) -> list[str]:
    title = f"{record['model']}, {record['pair']}, {record['method']}"
    if record["error"] is not None:
        return [title, record["error"], *["–"] * 7]
    products = record.get("products")
    share = None if products is None else f"{figure(products)} s of {figure(record['counted'])}"
    return [
        title,
        figure(record["seconds"]),
        times(record["peer_seconds"], record["seconds"]),
        share or "–",
        "–" if products is None else times(record["counted"], products),
        times(record["seconds"], record["sweep"]),
        figure(record["before"], 5),
        figure(record["after"], 5),
        f"{record['output_error']:.1e}",
    ]


def _goals(data: list[dict[str, Any]]) -> list[Goal]:
    goals = []
    for method in (DEFAULT, DESCENT):
        own = [d for d in data if d["method"] == method and d["error"] is None]
        ratios = {f"{d['model']} {d['pair']}": d["peer_seconds"] / d["seconds"] for d in own if d["peer_seconds"]}
        text = ", ".join(f"{n} {figure(r)}×" for n, r in ratios.items()) or "rebasin did not run"
        held = bool(ratios) and min(ratios.values()) >= 10
        goals.append(Goal(f"{method}: at least 10 times as fast as rebasin", held, text))
        shares = {f"{d['model']} {d['pair']}": d["counted"] / d["products"] for d in own}
        text = ", ".join(f"{n} {figure(r)}×" for n, r in shares.items())
        goals.append(Goal(f"{method}: total within 1.2 of its own products", max(shares.values()) <= 1.2, text))
        worst = max((d["output_error"] for d in own), default=float("nan"))
        goals.append(
            Goal(f"{method}: the permuted network computes the same", worst < 1e-4, f"worst error {worst:.1e}")
        )
    for pair in sorted({d["pair"] for d in data}):
        text, held = [], True
        for model in dict.fromkeys(d["model"] for d in data):
            after = {d["method"]: d["after"] for d in data if (d["model"], d["pair"]) == (model, pair) and "after" in d}
            if PEER in after:
                held &= after[DEFAULT] <= after[PEER] * (1 + 1e-6)
                text.append(f"{model} {figure(after[DEFAULT], 5)} against {figure(after[PEER], 5)}")
        goals.append(
            Goal(f"{pair}: the default ends no farther away than rebasin", held and bool(text), "; ".join(text))
        )
    return goals
