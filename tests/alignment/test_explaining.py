"""What is left of a barrier, on planted cases: an order, stale statistics, a stream's shared order, other units."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from zoo import some_cases, weights

import tu_symmetry as tus
from tu_symmetry.alignment import likeness, preflight
from tu_symmetry.alignment.explaining import overall
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.symmetry.running.weights import random_state

State = dict[str, Tensor]


def network(*, norm: bool = False) -> tuple[nn.Module, tus.SymmetryGraph, list[Any]]:
    middle = [nn.BatchNorm1d(8)] if norm else []
    model = nn.Sequential(nn.Linear(5, 8), *middle, nn.ReLU(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    graph = tus.discover_symmetries(model.eval(), torch.randn(3, 5, dtype=torch.float64))
    generator = torch.Generator().manual_seed(9)
    data = [
        (torch.randn(40, 5, generator=generator, dtype=torch.float64), torch.randint(3, (40,), generator=generator))
        for _ in range(3)
    ]
    return model, graph, data


def drawn(model: nn.Module, seed: int) -> State:
    return random_state(model, torch.Generator().manual_seed(seed))


def permuted(graph: tus.SymmetryGraph, state: State, seed: int = 5) -> State:
    return tus.apply_permutation(
        graph, tus.random_permutation(graph, generator=torch.Generator().manual_seed(seed)), state
    )


def test_correlations_are_those_of_a_slow_oracle() -> None:
    """Every order of the units of the first group is tried."""
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    graph = tus.discover_symmetries(model, torch.randn(2, 4, dtype=torch.float64))
    a, b = drawn(model, 0), drawn(model, 1)
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    units = [(x @ s["0.weight"].T + s["0.bias"]).relu() for s in (a, b)]
    correlations = torch.corrcoef(torch.cat(units, 1).T)[:5, 5:].nan_to_num(0.0)
    (found,) = likeness(graph, model, a, b, [x[:25], x[25:]]).values()
    best = max(float(correlations[range(5), p].mean()) for p in map(list, itertools.permutations(range(5))))
    assert (found.units, found.places) == (5, 1)
    assert found.matched == pytest.approx(float(correlations.diagonal().mean()))
    assert found.best == pytest.approx(best) and found.untied == pytest.approx(best)


@some_cases
def test_laws_of_likeness_hold_in_every_architecture(case: Case) -> None:
    model, graph, a = weights(case, 4)
    inputs = case.inputs()
    if len(inputs) != 1 or not isinstance(inputs[0], Tensor):
        return
    b = weights(case, 5)[2] | {n: a[n] for n in graph.constants}
    copy = permuted(graph, a)
    same, moved, other = (likeness(graph, model, a, one, [inputs[0]]) for one in (a, copy, b))
    assert same.keys() == moved.keys() == other.keys()
    for name, one in other.items():
        assert one.matched <= one.best + 1e-9 and one.best <= one.untied + 1e-9 and one.untied <= 1 + 1e-9
        assert moved[name].best == pytest.approx(same[name].matched) == pytest.approx(same[name].untied)


def test_a_permuted_copy_is_all_in_the_matching() -> None:
    model, graph, data = network()
    state = drawn(model, 0)
    merged = tus.merge(graph, [state, permuted(graph, state)], model, data, loss=cross_entropy)
    found = merged.explain()
    assert found.barrier is not None and found.barrier == merged.barriers["naive"] and abs(found.barrier) > 0.01
    assert found.matching == pytest.approx(found.barrier) and found.statistics == 0
    assert found.left == pytest.approx(0, abs=1e-9) and found.distance_after == pytest.approx(0, abs=1e-9)
    assert found.distance_before > 1
    for part in (found.better_order, found.ties, found.unexplained):
        assert part == pytest.approx(0, abs=1e-9)
    assert overall(found.given).matched < 0.9


def test_stale_statistics_are_all_in_the_statistics() -> None:
    """The same function with another size before its normalization: the mean's running variance is not its own."""
    model, graph, data = network(norm=True)
    first = tus.reestimate_batchnorm(model, drawn(model, 0), data)
    size = 6.0
    second = first | {n: size * first[n] for n in ("0.weight", "0.bias", "1.running_mean")}
    second["1.running_var"] = size**2 * first["1.running_var"]
    model[1].eps = 1e-12  # type: ignore[operator]
    merged = tus.merge(graph, [first, second], model, data, correction="batchnorm", loss=cross_entropy)
    found = merged.explain()
    assert found.barrier is not None and found.matching == pytest.approx(0, abs=1e-7)
    assert abs(found.barrier) > 1e-3 and found.statistics == pytest.approx(found.barrier)
    assert found.left == pytest.approx(0, abs=1e-7)


def test_the_parts_add_up_and_two_other_networks_have_other_units(tmp_path: Path) -> None:
    model, graph, data = network(norm=True)
    states = [tus.reestimate_batchnorm(model, drawn(model, seed), data) for seed in (0, 1)]
    merged = tus.merge(graph, states, model, data, correction="batchnorm", loss=cross_entropy)
    found, barriers = merged.explain(), merged.barriers
    assert found.barrier == barriers["naive"] and found.left == barriers["corrected"]
    assert found.matching is not None and found.statistics is not None and found.left is not None
    assert found.matching + found.statistics + found.left == pytest.approx(found.barrier)
    first, second = (barriers[a] - barriers[b] for a, b in (("naive", "aligned"), ("naive_corrected", "corrected")))
    assert found.matching == pytest.approx((first + second) / 2)
    assert found.unexplained > 0.1 and found.ties == pytest.approx(0, abs=1e-12) and found.better_order >= -1e-12
    lacks = found.better_order + found.ties + found.unexplained
    assert lacks == pytest.approx(1 - overall(found.matched).matched)
    for grid in (found.grid(), found.groups()):
        assert Grid(**json.loads(json.dumps(grid.to_dict()))) == grid and grid.markdown().startswith("| ")
    assert [row[0] for row in found.groups().rows] == [*found.matched, "all"]
    found.draw(tmp_path / "explained.png")
    assert (tmp_path / "explained.png").stat().st_size > 1000


class Stream(nn.Module):
    """Two linear layers write into a stream, which two others read before and after the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 6), nn.Linear(5, 6)
        self.early, self.late = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        out: Tensor = self.early(first.relu()) + self.late((first + self.b(x)).relu())
        return out


def test_what_a_stream_loses_by_its_shared_order_is_in_the_ties() -> None:
    """Each place is a permuted copy of the other network's, in an order of its own."""
    model = Stream().double()
    graph = tus.discover_symmetries(model, torch.randn(2, 5, dtype=torch.float64))
    one = drawn(model, 0)
    p, q = torch.tensor([1, 2, 3, 4, 5, 0]), torch.tensor([3, 0, 1, 5, 2, 4])
    other = dict(one)
    for kind in ("weight", "bias"):
        other[f"a.{kind}"] = one[f"a.{kind}"][p]
        other[f"b.{kind}"] = (one[f"a.{kind}"] + one[f"b.{kind}"])[q] - one[f"a.{kind}"][p]
    x = torch.randn(80, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    merged = tus.merge(graph, [one, other], model)
    found = merged.explain([x])
    assert found.ties > 0.1 and found.unexplained == pytest.approx(0, abs=1e-9)
    assert found.barrier is None and found.left is None and found.grid().rows[0][1] == ""
    assert next(iter(found.matched.values())).places == 2


def test_a_preflight_says_what_the_merge_says() -> None:
    model, graph, data = network()
    state = drawn(model, 0)
    states = [state, permuted(graph, state), drawn(model, 1)]
    found = preflight(graph, states, model, data)
    explained = tus.merge(graph, states, model, data).explain()
    assert (found.distance_before, found.distance_after) == (explained.distance_before, explained.distance_after)
    for mine, other in ((found.given, explained.given), (found.matched, explained.matched)):
        for name, one in mine.items():
            assert vars(one) == pytest.approx(vars(other[name]))
    assert found.correlation == overall(found.matched).matched
    assert found.groups().rows == explained.groups().rows and found.distance_after <= found.distance_before
    copies = preflight(graph, states[:2], model, [x for x, _ in data])
    assert copies.correlation == pytest.approx(1)
    assert copies.verdict != preflight(graph, [state, drawn(model, 3)], model, data).verdict


def test_shares_count_and_what_cannot_be_explained_is_named() -> None:
    model, graph, data = network()
    states = [drawn(model, seed) for seed in range(3)]
    pair = tus.merge(graph, states[:2], model, data).explain()
    weighted = tus.merge(graph, states, model, data, weights=[1, 1, 0]).explain()
    assert vars(overall(weighted.matched)) == pytest.approx(vars(overall(pair.matched)))
    assert weighted.distance_after == pytest.approx(pair.distance_after)
    with pytest.raises(ValueError, match="nothing was merged"):
        tus.merge(graph, states, model, data, weights=[1, 0, 0]).explain()
    with pytest.raises(ValueError, match=r"merged.explain\(dataloader\)"):
        tus.merge(graph, states, model).explain()
    merged = tus.merge(graph, states, model, data)
    again = pickle.loads(pickle.dumps(merged))
    assert again.given is None and "given" not in repr(merged)
    with pytest.raises(ValueError, match="pickled"):
        again.explain()
    still = nn.Linear(5, 3).double()
    with pytest.raises(ValueError, match="no layer of Linear shows units"):
        preflight(tus.discover_symmetries(still, data[0][0][:2]), [drawn(still, 0), drawn(still, 1)], still, data)
