"""Data with a NaN: no statistic, no loss and no choice of networks is made of it in silence; the batch is named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from toy_networks import Normed as Net

import tu_symmetry as tus
from tu_symmetry import cli
from tu_symmetry.symmetry.running.weights import random_state

BATCHES, BAD = 5, 3


NETWORK = Net().double().eval()
GRAPH = tus.discover_symmetries(NETWORK, torch.randn(2, 4, dtype=torch.float64))


def states() -> list[dict[str, Tensor]]:
    return [random_state(NETWORK, torch.Generator().manual_seed(k)) for k in range(3)]


def loader(bad: float | None = None, batch: int = BAD) -> list[tuple[Tensor, Tensor]]:
    """Batches, one of which holds a number that is none."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for k in range(BATCHES):
        x = torch.randn(8, 4, generator=generator)
        if bad is not None and k == batch:
            x[2, 1] = bad
        found.append((x, torch.randint(3, (8,), generator=generator)))
    return found


def doubled(data: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    return [(x.double(), y) for x, y in data]


def once(data: list[Any]) -> Iterator[Any]:
    """Batches that can be read one time."""
    yield from data


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "reestimate_batchnorm": lambda s, data: tus.reestimate_batchnorm(NETWORK, s[0], data),
    "reestimate_batchnorm, read once": lambda s, data: tus.reestimate_batchnorm(NETWORK, s[0], once(data)),
    "repair": lambda s, data: tus.repair(NETWORK, s, [0.5, 0.25, 0.25], s[0], data),
    "merge, batchnorm": lambda s, data: tus.merge(GRAPH, s, NETWORK, data, correction="batchnorm"),
    "merge, repair": lambda s, data: tus.merge(GRAPH, s, NETWORK, data, correction="repair"),
    "merge, measured": lambda s, data: tus.merge(GRAPH, s, NETWORK, loss=F.cross_entropy, validation=data),
    "merge, read once": lambda s, data: tus.merge(GRAPH, s, NETWORK, loss=F.cross_entropy, validation=once(data)),
}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", CALLS)
def test_the_batch_is_named(name: str, bad: float) -> None:
    CALLS[name](states(), doubled(loader()))
    with pytest.raises(ValueError, match=rf"batch {BAD} of the data .*, and it holds such numbers itself"):
        CALLS[name](states(), doubled(loader(bad)))


@pytest.mark.parametrize("name", [name for name in CALLS if "once" not in name])
def test_a_network_that_diverges_is_no_fault_of_the_data(name: str) -> None:
    """Inputs that are finite, and overflow in the network."""
    data = doubled(loader())
    data[BAD] = (torch.full_like(data[BAD][0], 1.7e308), data[BAD][1])
    with pytest.raises(ValueError, match=rf"batch {BAD} .*its numbers are finite|batch {BAD} .*its inputs are finite"):
        CALLS[name](states(), data)


def difference(outputs: Tensor, targets: Tensor) -> Tensor:
    """Zero, or NaN where twice an output is infinite."""
    return (2 * outputs - 2 * outputs).mean()


def test_the_network_is_named_before_anything_is_matched(monkeypatch: pytest.MonkeyPatch) -> None:
    given = states()
    given[1]["5.bias"] = torch.full_like(given[1]["5.bias"], 1e308)  # finite; its loss is not
    monkeypatch.setattr("tu_symmetry.alignment.over.weight_matching", lambda *a: pytest.fail("matched"))
    with pytest.raises(ValueError, match=r"states\[1\]: the loss is NaN on batch 0"):
        tus.merge(GRAPH, given, NETWORK, validation=doubled(loader()), loss=difference)


def test_statistics_that_a_precision_does_not_hold_are_refused() -> None:
    state = {n: t.half() if t.is_floating_point() else t for n, t in states()[0].items()}
    data = [x.half() * 2000 for x, _ in loader()]
    with pytest.raises(ValueError, match=r"'1.running_var' would hold .* torch.float16 does not hold"):
        tus.reestimate_batchnorm(Net().half().eval(), state, data)


def bad() -> list[tuple[Tensor, Tensor]]:
    return loader(math.nan)


def bad_statistics() -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    return loader(), loader(math.nan)


def merged(folder: Path, *more: str) -> int:
    for k, state in enumerate(states()):
        torch.save({n: t.float() if t.is_floating_point() else t for n, t in state.items()}, folder / f"{k}.pt")
    files = [str(folder / f"{k}.pt") for k in range(3)]
    words = ["merge", *files, "--model", f"{__name__}.Net", "--input", "2,4", "--out", str(folder / "m.safetensors")]
    return cli.main([*words, *more])


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("bad", []),
        ("bad", ["--correction", "batchnorm"]),
        ("bad_statistics", ["--correction", "batchnorm"]),
        ("bad_statistics", ["--correction", "repair"]),
    ],
)
def test_the_command_writes_nothing(
    name: str, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert merged(tmp_path, "--data", f"{__name__}.{name}", *more) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tu-symmetry")]
    assert len(lines) == 1 and f"batch {BAD} of the data" in lines[0]
    assert not list(tmp_path.glob("m.*safetensors")) and not list(tmp_path.glob("m.report*"))


def test_reports_are_json_that_everybody_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A metric may be NaN; JSON has no such number."""
    monkeypatch.setattr("tu_symmetry.checkpoints.merge.accuracy", lambda outputs, targets: outputs.sum() * math.nan)
    assert merged(tmp_path, "--data", f"{__name__}.loader") == 0

    def refuse(text: str) -> None:
        raise AssertionError(text)

    content = json.loads((tmp_path / "m.report.json").read_text(), parse_constant=refuse)
    assert content["scores"]["aligned"]["accuracy"] is None


def test_weights_as_large_as_numbers_can_be() -> None:
    merged = tus.merge(GRAPH, states()[:2], NETWORK, weights=[1e308, 1e308])
    assert merged.weights == [0.5, 0.5]
    merged = tus.merge(GRAPH, states()[:2], NETWORK, weights=torch.tensor([1.0, 3.0]))
    assert merged.weights == [0.25, 0.75]
    with pytest.raises(ValueError, match="not all 0"):
        tus.merge(GRAPH, states()[:2], NETWORK, weights=[0.0, 0.0])


def test_a_text_is_no_number() -> None:
    for call in (
        lambda: tus.merge(GRAPH, states()[:2], NETWORK, weights=["1", "2"]),
        lambda: tus.interpolate(*states()[:2], "0.5"),
    ):
        with pytest.raises(TypeError, match=r"must be a number, got '\d(\.\d)?' \(str\)"):
            call()


def test_the_mean_of_two_architectures_is_refused() -> None:
    one = states()[0]
    for other in (
        nn.Linear(4, 6).double().state_dict(),
        {n: t for n, t in one.items() if n != "5.bias"},
        {**one, "more": torch.zeros(2)},
        {**one, "5.bias": torch.zeros(4, dtype=torch.float64)},
    ):
        for pair in ([one, other], [other, one]):
            with pytest.raises(ValueError, match=r"states\[1\] is of another architecture than states\[0\]"):
                tus.mean_state(pair)
    half = {n: t.half() if t.is_floating_point() else t for n, t in one.items()}
    assert tus.mean_state([one, half]).keys() == one.keys()  # of two precisions there is one
