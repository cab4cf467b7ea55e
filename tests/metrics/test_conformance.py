"""All metrics by torchmetrics' habits: whatever way batches take to a metric, its value is that of them all.

Each case is a metric and its batches, whose numbers every precision holds exactly.
"""

from __future__ import annotations

import functools
import io
import json
import os
import pickle
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from drawn import generator, normal
from processes import side_by_side
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

import tu_symmetry as tus
from tu_symmetry import metrics
from tu_symmetry.metrics.functional import (
    discrepancy_test,
    network_discrepancy,
    pairwise_mutual_information,
    predictive_agreement,
    predictive_total_variation,
    representation_costs,
)
from tu_symmetry.states import unstack

Batch = dict[str, Any]
KEPT: dict[str, Callable[[Any], Any]] = {  # how metrics are copied and kept
    "pickle": lambda metric: pickle.loads(pickle.dumps(metric)),
    "clone": lambda metric: metric.clone(),
    "to": lambda metric: metric.to("cpu"),
}


class Case(NamedTuple):
    """A metric by its name and options, and what it is updated with."""

    make: Callable[[], Metric]
    batches: list[Batch]

    def filled(self, batches: Iterable[Batch] | None = None) -> Metric:
        metric = self.make()
        for batch in self.batches if batches is None else batches:
            metric.update(**batch)
        return metric


def probabilities(*shape: int, seed: int) -> Tensor:
    """Multiples of 1/16."""
    bins = torch.randint(shape[-1], (*shape[:-1], 16), generator=generator(seed))
    return nn.functional.one_hot(bins, shape[-1]).double().mean(-2)


@functools.cache
def graph() -> tus.SymmetryGraph:
    found = tus.discover_symmetries(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.zeros(2, 3))
    found.require_verified()
    return found


def networks(count: int, seed: int) -> dict[str, Tensor]:
    shapes = enumerate(graph().shapes.items(), seed)
    return {name: normal(count, *shape, seed=k).bfloat16().double() for k, (name, shape) in shapes}


@functools.cache
def cases() -> dict[str, Case]:
    pairs = [
        {"probs_a": probabilities(3, n, 4, seed=n), "probs_b": probabilities(n, 4, seed=n + 100)} for n in (5, 1, 25)
    ]
    members = [{"probs": batch["probs_a"]} for batch in pairs]
    sets = [{"states": networks(n, 10 * n), "reference": n > 4} for n in (5, 3, 4, 6)]
    alone = [{"states": batch["states"]} for batch in sets]
    elements = [{"permutation": {"a": torch.tensor(p)}} for p in ([1, 0, 2], [1, 2, 0], [0, 1, 2])]
    mmd, homogeneity = metrics.MaximumMeanDiscrepancy, metrics.MarginalHomogeneity
    return {
        "PredictiveAgreement": Case(metrics.PredictiveAgreement, pairs),
        "PredictiveTotalVariation": Case(metrics.PredictiveTotalVariation, pairs),
        "TranspositionCount": Case(metrics.TranspositionCount, elements),
        "PairwiseMutualInformation": Case(lambda: metrics.PairwiseMutualInformation(3), members),
        "RepresentationCost": Case(lambda: metrics.RepresentationCost(graph()), alone),
        "MaximumMeanDiscrepancy": Case(mmd, sets),
        "MaximumMeanDiscrepancy graph": Case(lambda: mmd(graph()), sets),
        "MarginalHomogeneity": Case(lambda: homogeneity(graph(), num_resamples=39), alone),
    }


def numbers(value: Tensor | dict[str, Tensor]) -> dict[str, Any]:
    by_name = value if isinstance(value, dict) else {"value": value}
    return {f"{name} {k}": float(v) for name, t in by_name.items() for k, v in enumerate(t.flatten())}


def close(value: Any, tolerance: float = 1e-12) -> Any:
    return pytest.approx(numbers(value), rel=tolerance, abs=tolerance)


def changed(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """A batch with something done to each of its tensors."""
    if isinstance(value, dict):
        return {k: changed(v, change) for k, v in value.items()}
    return change(value) if isinstance(value, Tensor) else value


@pytest.fixture(params=[*cases()])
def case(request: pytest.FixtureRequest) -> Case:
    return cases()[request.param]


def test_no_metric_is_left_out() -> None:
    assert {name.split()[0] for name in cases()} == set(metrics.__all__) - {"functional"}


def test_values_are_those_of_the_functions() -> None:
    """On all batches at once."""

    def whole(name: str, key: str, batches: slice | Sequence[int] = slice(None)) -> Any:
        every = cases()[name].batches
        found = [b[key] for b in (every[batches] if isinstance(batches, slice) else [every[i] for i in batches])]
        if isinstance(found[0], dict):
            return {n: torch.cat([states[n] for states in found]) for n in found[0]}
        return torch.cat(found, dim=-2)

    pair = [whole("PredictiveAgreement", key) for key in ("probs_a", "probs_b")]
    sets = [whole("MaximumMeanDiscrepancy", "states", places) for places in ((1, 2), (0, 3))]
    costs = representation_costs(graph(), whole("RepresentationCost", "states"))
    information = pairwise_mutual_information(whole("PairwiseMutualInformation", "probs"))
    expected = {
        "PredictiveAgreement": predictive_agreement(*pair),
        "PredictiveTotalVariation": predictive_total_variation(*pair),
        "PairwiseMutualInformation": information.sum() / 6,
        "RepresentationCost": {n: getattr(costs, n).mean() for n in ("mass", "minimal_mass", "ratio")},
        "MaximumMeanDiscrepancy": network_discrepancy(*sets),
        "MaximumMeanDiscrepancy graph": network_discrepancy(*sets, graph=graph()),
        "TranspositionCount": torch.tensor((1 + 2 + 0) / 3),
    }
    for name, value in expected.items():
        assert numbers(cases()[name].filled().compute()) == close(value, 1e-7), name


def test_lists_of_states_are_stacks() -> None:
    for name in ("MaximumMeanDiscrepancy", "MaximumMeanDiscrepancy graph", "MarginalHomogeneity", "RepresentationCost"):
        case = cases()[name]
        stacked, listed = case.filled(), case.filled(())
        for batch in case.batches:
            listed.update(**(batch | {"states": unstack(batch["states"])}))
        assert numbers(listed.compute()) == close(stacked.compute()), name
    x, y = ({n: t.clone() for n, t in b["states"].items()} for b in cases()["MaximumMeanDiscrepancy"].batches[:2])
    pairs = (x, y), (unstack(x), unstack(y))
    one, two = (discrepancy_test(*p, permutations=9, bootstraps=0, generator=generator(0)) for p in pairs)
    assert one.p_value == two.p_value and one.value == pytest.approx(two.value)


@pytest.mark.parametrize("way", KEPT)
def test_copies_go_on_by_themselves(case: Case, way: str) -> None:
    expected = case.filled().compute()
    metric = case.filled(case.batches[:2])
    copy = KEPT[way](metric)
    for each in {id(m): m for m in (copy, metric)}.values():
        for batch in case.batches[2:]:
            each.update(**batch)
        assert numbers(each.compute()) == close(expected)


def test_after_a_reset_nothing_is_left(case: Case) -> None:
    metric = case.filled([*case.batches, *case.batches[:1]])
    metric.compute()
    metric.reset()
    for batch in case.batches:
        metric.update(**batch)
    assert numbers(metric.compute()) == close(case.filled().compute())


@pytest.mark.parametrize("share", [0, 1, 2, None])
def test_metrics_of_parts_are_merged(case: Case, share: int | None) -> None:
    """Into an empty one, of an empty one, and of parts of different sizes."""
    metric, other = case.filled(case.batches[:share]), case.filled(case.batches[share:] if share is not None else [])
    other.merge_state(metric)
    with pytest.warns(UserWarning, match="before the ``update``") if share is None else nullcontext():
        assert numbers(other.compute()) == close(case.filled().compute())


@pytest.mark.filterwarnings("ignore:.*before the ``update``")
@pytest.mark.parametrize("count", [2, None])
def test_states_are_stored(case: Case, count: int | None) -> None:
    """Through a file, of all batches or before more of them; the copies share nothing."""
    metric = case.filled(case.batches[:count])
    assert not metric.state_dict()
    metric.persistent(True)
    file = io.BytesIO()
    torch.save(metric.state_dict(), file)
    file.seek(0)
    stored = torch.load(file, weights_only=True)
    copies = [case.make() for _ in range(2)]
    for copy in copies:
        copy.load_state_dict(stored)
    for copy in copies:
        for batch in case.batches[count:] if count else ():
            copy.update(**batch)
    for copy in copies:
        assert numbers(copy.compute()) == close(case.filled().compute())


def test_forward_is_the_batch_alone_and_adds_it(case: Case) -> None:
    metric = case.make()
    for batch in case.batches:
        if isinstance(metric, metrics.MaximumMeanDiscrepancy):
            with pytest.raises(NotImplementedError, match=r"call update\(\.\.\.\) for each batch"):
                metric(**batch)
            metric.update(**batch)
        else:
            assert numbers(metric(**batch)) == close(case.filled([batch]).compute())
    assert numbers(metric.compute()) == close(case.filled().compute())


@pytest.mark.parametrize("method", ["forward", "update"])
def test_a_batch_that_is_refused_changes_nothing(case: Case, method: str) -> None:
    metric = case.filled()
    if method == "forward" and isinstance(metric, metrics.MaximumMeanDiscrepancy):
        return  # refuses all
    broken = {k: v.bool() if isinstance(v, Tensor) else v for k, v in case.batches[0].items()}
    broken |= {k: {"0.weight": torch.ones(2, 2)} for k in ("states", "permutation") if k in broken}
    with pytest.raises((ValueError, tus.SymmetryError)):
        getattr(metric, method)(**broken)
    if method == "forward" and isinstance(metric, metrics.MarginalHomogeneity):  # what fails after the batch was added
        with pytest.raises(ValueError, match="at least 2 samples"):
            metric(networks(1, 0))
    assert numbers(metric.compute()) == close(case.filled().compute())


def test_other_numbers_of_networks_and_no_permutations_are_refused() -> None:
    with pytest.raises(ValueError, match="num_members=3"):
        metrics.PairwiseMutualInformation(3).update(probabilities(2, 5, 3, seed=0))
    with pytest.raises(ValueError, match="at least 2"):
        metrics.PairwiseMutualInformation(1)
    for wrong in ({"a": torch.tensor([0, 0, 1])}, {"a": torch.tensor([0.0, 1.0])}):
        with pytest.raises(tus.SymmetryError, match=r"repeated|integer"):
            metrics.TranspositionCount().update(wrong)


def test_inputs_may_change_afterwards(case: Case) -> None:
    metric = case.make()
    for batch in case.batches:
        own = changed(batch, Tensor.clone)
        metric.update(**own)
        changed(own, Tensor.zero_)
    assert numbers(metric.compute()) == close(case.filled().compute())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_precisions(case: Case, dtype: torch.dtype) -> None:
    """Of inputs, and of what the metric is asked to be: sums are neither rounded nor do they overflow."""
    expected = case.filled().compute()
    narrow = [changed(batch, lambda t: t.to(dtype) if t.is_floating_point() else t) for batch in case.batches]
    assert numbers(case.filled(narrow).compute()) == close(expected, 1e-5)
    metric = case.make().set_dtype(dtype).to(dtype)
    for batch in case.batches:
        metric.update(**batch)
    holder = nn.ModuleList([metric]).to(dtype).half()
    assert numbers(holder[0].compute()) == close(expected)


def test_pairs_in_a_collection() -> None:
    """After a first batch by which all states that could be equal are: networks in canonical form, one of two right."""
    eye = torch.eye(2, dtype=torch.float64)
    form = tus.remove_symmetries(graph(), networks(4, 0), scale="unit_norm")
    batches: list[Batch] = [
        {"probs_a": eye, "probs_b": eye[:1].expand(2, 2), "probs": eye.expand(3, 2, 2)},
        {"probs_a": probabilities(9, 2, seed=1), "probs_b": probabilities(9, 2, seed=2)},
    ]  # fmt: skip
    batches[0] |= {"states": form, "reference": True, "permutation": {"a": torch.tensor([1, 0])}}
    batches[1] |= {"states": networks(5, 20), "reference": False, "permutation": {"a": torch.tensor([1, 0])}}
    batches[1]["probs"] = probabilities(3, 9, 2, seed=3)

    def made() -> dict[str, Metric]:
        return {name.replace(" ", "_"): case.make() for name, case in cases().items()}

    def update(metric: Any) -> Any:
        for batch in batches:
            metric.update(**batch)
        return metric.compute()

    singles = {name: update(MetricCollection({name: metric})) for name, metric in made().items()}
    collection = MetricCollection(made())  # type: ignore[arg-type]
    for _ in range(2):
        found = update(collection)
        for name, expected in singles.items():
            own = {key: found[key] for key in expected}
            assert numbers(own) == pytest.approx(numbers(expected), rel=1e-12, nan_ok=True), name
        collection.reset()
    assert all(len(names) == 1 for names in collection.compute_groups.values())


@functools.cache
def whole() -> dict[str, Any]:
    return values(lambda batches: batches)


def values(share: Callable[[list[Batch]], list[Batch]], device: torch.device | str = "cpu") -> dict[str, Any]:
    found = {}
    for name, case in cases().items():
        metric = case.make().to(device)
        for batch in share(case.batches):
            metric.update(**changed(batch, lambda t: t.to(device)))
        found[name] = numbers(metric.compute())
    return found


def same(found: dict[str, Any], tolerance: float = 1e-12) -> bool:
    return all(found[name] == pytest.approx(v, rel=tolerance, abs=tolerance) for name, v in whole().items())


def test_on_a_device_they_are_those_of_the_cpu(cuda: torch.device) -> None:
    assert same(values(lambda batches: batches, cuda), 1e-8)


SHARES = {"unequal": (slice(0, 1), slice(1, None)), "empty": (slice(0), slice(None))}


def refusals(rank: int) -> list[str]:
    """Where no process has networks, and where each has those of another architecture."""
    found = []
    for other in (False, True):
        metric = metrics.MaximumMeanDiscrepancy()
        if other:
            metric.update({"w": normal(3, 2 + rank)}, reference=bool(rank))
        with pytest.raises(ValueError, match=r"no samples|no reference|different architectures") as error:
            metric.compute()
        found.append(str(error.value))
    return found


def worker(rank: int, folder: Path) -> None:
    warnings.filterwarnings("ignore", message=".*before the ``update``")
    store = dist.FileStore(str(folder / "store"), 2)  # no port, which another process could take meanwhile
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=2))
    found: dict[str, Any] = {}
    for how, shares in SHARES.items():
        found[how] = values(lambda batches, own=shares[rank]: batches[own])  # type: ignore[misc]
    found["refusals"] = refusals(rank)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    os._exit(0)  # a thread of gloo that still runs would abort the interpreter on its way out


def test_two_processes_equal_one(tmp_path: Path) -> None:
    side_by_side(worker, tmp_path, count=2)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert all(same(found[how]) for how in SHARES)
        assert ["different" in message for message in found["refusals"]] == [False, True]
