"""Weight matching against the ``rebasin`` package and against the bare matrix products."""

from __future__ import annotations

import copy
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn

import tu_symmetry as tus
from benchmarks._measure import both, figure, in_own_process, interleave, times
from benchmarks._report import Goal, Section, Settings
from tu_symmetry.alignment import gram, products
from tu_symmetry.alignment.matching import weight_distance
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.symmetry.running.weights import random_state

MODELS = ("resnet18", "resnet50", "vgg16_bn")
PAIRS = ("independent", "planted")
INSTALL = "not installed: pip install --no-deps rebasin==0.0.47 torchview graphviz tqdm"
DEFAULT, DESCENT, PEER, GRAMS = "Frank-Wolfe (default)", "descent", "rebasin 0.0.47", "Gram matrices of one sweep"
_NOISE = 0.1
State = dict[str, Tensor]


@dataclass(frozen=True)
class Pair:
    """Two networks to be matched.

    Attributes:
        reference: the state that stays.
        state: the state to be permuted.
    """

    reference: State
    state: State


def run(settings: Settings) -> Section:
    """Match each pair of each model with each method, in turn; each pair in a process of its own."""
    calls = _first_calls(settings)
    rows, data = [], []
    for name in ("small",) if settings.quick else MODELS:
        for pair in PAIRS:
            repeats = 3 if name == "resnet18" else 1
            settings.say(f"{name}, {pair}")
            if settings.quick:
                records = measure(name, pair, repeats)
            else:
                threads = str(torch.get_num_threads())
                try:
                    records = in_own_process("benchmarks.matching", name, pair, str(repeats), threads)
                except RuntimeError as error:
                    records = [{"model": name, "pair": pair, "method": "all", "error": str(error)[:160]}]
            for record in records:
                settings.say(f"{record['method']}: {record['error'] or 'CPU ' + figure(record['cpu']) + ' s'}")
                data.append(record)
                rows.append(_row(record))
    header = [
        "model, pair, method", "seconds", "rebasin takes", "cpu in\nproducts", "total to\nproducts",
        "total to one\nsweep's products", "distance\nbefore", "distance\nafter", "output\nerror",
    ]  # fmt: skip
    text = (
        "*The whole first call* is what a user who has two networks waits for, each method in a process of its own: "
        "discovery, verification, matching, the permuted state and its certificate, or `rebasin` with its tracing "
        "(imports do not count). The two networks are independent, which is the hardest case.\n\n"
        "Two networks of torchvision's architecture in float32. *Independent*: both drawn at random. *Planted*: the "
        f"second is the first with Gaussian noise ({_NOISE:g} of each tensor's standard deviation) and a uniformly "
        "random permutation of every group. Normalization statistics and affine parameters are random too: with those "
        "of a fresh network, a permutation that forgets them would go unnoticed.\n\n"
        "*Seconds*: `weight_matching` with a verified graph, the permutation applied, or the same by `rebasin` with "
        "its tracing done beforehand (it does coordinate descent; ours stands beside the default for comparison). In "
        "turn, median of three (resnet50 and vgg16_bn: once). *In products*: CPU time inside the matrix products that "
        "make Gram matrices during the last run, and that run's total against it: the products of all iterations "
        "count, everything else is overhead. *One sweep's products*: the bare time of one float32 product `A @ B.T` "
        "for each permuted axis of each tensor, `[units, everything else]` each, copied into that layout beforehand. "
        "*Distance*: L2 over parameters. *Output error*: of the permuted network in evaluation mode against itself "
        "before, relative L2 over four images; about 1e-6 is rounding, more is another function.\n\n"
        "Why goals are missed: on independent networks `rebasin` stops after few sweeps, farther away, while "
        "Frank-Wolfe makes the products of all tensors five times before its descent; and the assignments (SciPy's "
        "exact solver, one core, double precision) of groups of 512 to 2,048 units take about as long as the products, "
        "so that the total cannot be within 1.2 of these. In the whole first call Frank-Wolfe takes the largest share; "
        "what is left is verification (nine runs in double precision on two sets of weights), the certificate (three "
        "to six runs) and discovery, most of which is `torch.export`."
    )
    return Section(
        "Weight matching",
        text,
        [_calls_grid(calls), Grid("Time, distance, and whether the function stays", header, rows)],
        [*_calls_goals(calls), *_goals(data)],
        [*calls, *data],
        packages=("rebasin",),
    )


STEPS = ("discovery", "verification", "matching", "certificate")


def first_call(name: str, method: str) -> dict[str, Any]:
    """CPU seconds of all that a process does which matches two networks for the first time, by step."""
    model = _build(name)
    inputs = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(0)
    kinds = {n: t.dtype for n, t in model.state_dict().items()}
    pair = Pair(*({n: t.to(kinds[n]) for n, t in random_state(model, generator).items()} for _ in range(2)))
    found: dict[str, Any] = {"model": name, "call": method, "error": None}
    for lazy in ("discover_symmetries", "verify_symmetries", "weight_matching", "apply_permutation", "certify"):
        getattr(tus, lazy)  # which imports it
    peer = _peer(model, pair, inputs, trace=True) if method == PEER else None
    clock = [time.process_time()]
    if peer is not None:
        moved, _ = peer()
        clock.append(time.process_time())
        graph = tus.discover_symmetries(model, inputs)
    else:
        graph = tus.discover_symmetries(model, inputs)
        clock.append(time.process_time())
        graph.require_verified()
        clock.append(time.process_time())
        solver: Literal["frank_wolfe", "descent"] = "descent" if method == DESCENT else "frank_wolfe"
        matching = tus.weight_matching(graph, pair.reference, pair.state, solver=solver, look_again=False)
        clock.append(time.process_time())
        moved = tus.apply_permutation(graph, matching.permutation, pair.state)
        found["holds"] = tus.certify(graph, pair.state, moved).holds
        clock.append(time.process_time())
        found |= dict(zip(STEPS, (b - a for a, b in itertools.pairwise(clock)), strict=True))
    return found | {"cpu": clock[-1] - clock[0], "after": weight_distance(graph, pair.reference, moved)}


def _first_calls(settings: Settings) -> list[dict[str, Any]]:
    calls = []
    for name in ("small",) if settings.quick else ("resnet18", "resnet50"):
        for method in (DEFAULT, DESCENT, PEER):
            settings.say(f"{name}, whole first call, {method}")
            try:
                if settings.quick:
                    calls.append(first_call(name, method))
                else:
                    threads = str(torch.get_num_threads())
                    calls.append(in_own_process("benchmarks.matching", "call", name, method, threads))
            except (RuntimeError, ImportError) as error:
                calls.append({"model": name, "call": method, "error": str(error)[:160]})
    return calls


def _calls_grid(calls: list[dict[str, Any]]) -> Grid:
    rows = []
    for call in calls:
        title = f"{call['model']}, {call['call']}"
        if call["error"] is not None:
            rows.append([title, call["error"], *["–"] * (len(STEPS) + 2)])
            continue
        peer = next((c.get("cpu") for c in calls if (c["model"], c["call"]) == (call["model"], PEER)), None)
        steps = [figure(call[step]) if step in call else "–" for step in STEPS]
        rows.append([title, figure(call["cpu"]), times(peer, call["cpu"]), *steps, figure(call["after"], 5)])
    header = ["model, method", "CPU seconds", "rebasin takes", *STEPS, "distance\nafter"]
    return Grid("The whole first call", header, rows)


def _calls_goals(calls: list[dict[str, Any]]) -> list[Goal]:
    goals = []
    for method in (DEFAULT, DESCENT):
        ratios = {}
        for call in (c for c in calls if c["call"] == method and "cpu" in c):
            peer = next((c for c in calls if (c["model"], c["call"]) == (call["model"], PEER) and "cpu" in c), None)
            if peer is not None:
                ratios[call["model"]] = peer["cpu"] / call["cpu"]
        text = ", ".join(f"{n} {figure(r)}×" for n, r in ratios.items()) or "rebasin did not run"
        held = bool(ratios) and min(ratios.values()) >= 4
        goals.append(Goal(f"whole first call, {method}: at least 4 times as fast as rebasin's", held, text))
    return goals


def _build(name: str) -> nn.Module:
    if name == "small":
        layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(8, 4)).eval()
    import torchvision

    model: nn.Module = getattr(torchvision.models, name)().eval()
    return model


def _pair(graph: tus.SymmetryGraph, model: nn.Module, kind: str) -> Pair:
    generator = torch.Generator().manual_seed(0)
    kinds = {n: t.dtype for n, t in model.state_dict().items()}
    reference, other = ({n: t.to(kinds[n]) for n, t in random_state(model, generator).items()} for _ in range(2))
    if kind == "independent":
        return Pair(reference, other)
    noisy = {
        n: t + _NOISE * t.std() * torch.randn(t.shape, generator=generator)
        if t.is_floating_point() and n not in graph.buffers and t.numel() > 1
        else t
        for n, t in reference.items()
    }
    permutation = tus.random_permutation(graph, generator=generator)
    return Pair(reference, tus.apply_permutation(graph, permutation, noisy))


def measure(name: str, kind: str, repeats: int) -> list[dict[str, Any]]:
    """All figures of one pair: a record for each method."""
    model = _build(name)
    inputs = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(3))
    graph = tus.discover_symmetries(model, inputs)
    graph.require_verified()
    pair = _pair(graph, model, kind)

    def match(solver: Literal["frank_wolfe", "descent"]) -> tuple[State, float]:
        with _product_clock() as clock:
            found = tus.weight_matching(graph, pair.reference, pair.state, solver=solver, look_again=False)
        return tus.apply_permutation(graph, found.permutation, pair.state), sum(clock)

    candidates: dict[str, Callable[[], Callable[[], Any]]] = {
        DEFAULT: lambda: lambda: match("frank_wolfe"),
        DESCENT: lambda: lambda: match("descent"),
        PEER: lambda: _peer(model, pair, inputs),
        GRAMS: lambda: one_sweep(graph, pair),
    }
    outcomes = interleave(candidates, repeats)
    sweep, peer = outcomes.pop(GRAMS).median_cpu, outcomes[PEER].median_cpu
    expected = _outputs(model, pair.state, inputs)
    found = []
    for method, outcome in outcomes.items():
        record: dict[str, Any] = {"model": name, "pair": kind, "method": method, "error": outcome.error}
        record |= {"seconds": outcome.median, "cpu": outcome.median_cpu, "peer_cpu": peer, "sweep": sweep}
        record["before"] = weight_distance(graph, pair.reference, pair.state)
        if outcome.error is None:
            moved, inside = outcome.value
            actual = _outputs(model, moved, inputs)
            record["after"] = weight_distance(graph, pair.reference, moved)
            record["output_error"] = float((actual - expected).norm() / expected.norm())
            record["products"], record["counted"] = inside, outcome.cpu[-1]
        found.append(record)
    return found


def _peer(model: nn.Module, pair: Pair, inputs: Tensor, *, trace: bool = False) -> Callable[[], tuple[State, None]]:
    """One run of ``rebasin``, its models built beforehand, and traced but with ``trace``; its second is permuted."""
    try:
        import rebasin
    except ImportError as error:
        raise ImportError(INSTALL) from error
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    first.load_state_dict(pair.reference)
    second.load_state_dict(pair.state)
    torch.manual_seed(0)  # it draws the order of its groups from the global generator
    traced = None if trace else rebasin.PermutationCoordinateDescent(first, second, inputs)

    def call() -> tuple[State, None]:
        matcher = traced or rebasin.PermutationCoordinateDescent(first, second, inputs)
        matcher.calculate_permutations()
        matcher.apply_permutations()
        return {n: t.detach() for n, t in second.state_dict().items()}, None

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


@contextmanager
def _product_clock() -> Iterator[list[float]]:
    """Collects the CPU seconds of every Gram product inside the block, wherever the library makes one."""
    seconds: list[float] = []

    def timed(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*operands: Any) -> Tensor:
            start = time.process_time()
            result = product(*operands)
            seconds.append(time.process_time() - start)
            return result

        return call

    with ExitStack() as stack:
        for module, name in ((products, "_add_product"), (gram, "member_gram")):
            stack.enter_context(patch.object(module, name, timed(getattr(module, name))))
        yield seconds


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
        both(record["seconds"], record["cpu"]),
        times(record["peer_cpu"], record["cpu"]),
        share or "–",
        "–" if products is None else times(record["counted"], products),
        times(record["cpu"], record["sweep"]),
        figure(record["before"], 5),
        figure(record["after"], 5),
        f"{record['output_error']:.1e}",
    ]


def _goals(data: list[dict[str, Any]]) -> list[Goal]:
    goals = []
    for method in (DEFAULT, DESCENT):
        own = [d for d in data if d["method"] == method and d["error"] is None]
        ratios = {f"{d['model']} {d['pair']}": d["peer_cpu"] / d["cpu"] for d in own if d["peer_cpu"]}
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
        shown: list[str] = []
        held = True
        for model in dict.fromkeys(d["model"] for d in data):
            after = {d["method"]: d["after"] for d in data if (d["model"], d["pair"]) == (model, pair) and "after" in d}
            if PEER in after:
                held &= after[DEFAULT] <= after[PEER] * (1 + 1e-6)
                shown.append(f"{model} {figure(after[DEFAULT], 5)} against {figure(after[PEER], 5)}")
        goals.append(
            Goal(f"{pair}: the default ends no farther away than rebasin", held and bool(shown), "; ".join(shown))
        )
    return goals


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[4]))
    if sys.argv[1] == "call":
        print(json.dumps(first_call(sys.argv[2], sys.argv[3])))
    else:
        print(json.dumps(measure(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
