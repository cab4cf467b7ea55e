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
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import side_by_side
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

import tu_symmetry as tus
from tu_symmetry import metrics
from tu_symmetry.metrics.functional import removal

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


def drawn(*shape: int, seed: int) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.bfloat16().double()


def probabilities(*shape: int, seed: int) -> Tensor:
    """Multiples of 1/16."""
    bins = torch.randint(shape[-1], (*shape[:-1], 16), generator=torch.Generator().manual_seed(seed))
    return nn.functional.one_hot(bins, shape[-1]).double().mean(-2)


@functools.cache
def graph() -> tus.SymmetryGraph:
    found = tus.discover_symmetries(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.zeros(2, 3))
    found.require_verified()
    return found


def networks(count: int, seed: int) -> dict[str, Tensor]:
    return {name: drawn(count, *shape, seed=seed + k) for k, (name, shape) in enumerate(graph().shapes.items())}


def first(states: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t[0] for name, t in states.items()}


@functools.cache
def cases() -> dict[str, Case]:
    pairs = [
        {"probs_a": probabilities(3, n, 4, seed=n), "probs_b": probabilities(n, 4, seed=n + 100)} for n in (5, 1, 25)
    ]
    members = [{"probs": batch["probs_a"]} for batch in pairs]
    sets = [{"states": networks(n, 10 * n), "reference": n > 4} for n in (5, 3, 4, 6)]
    alone = [{"states": batch["states"]} for batch in sets]
    elements = [{"permutation": {"a": torch.tensor(p)}} for p in ([1, 0, 2], [1, 2, 0], [0, 1, 2])]
    mmd, homogeneity, cost = metrics.MaximumMeanDiscrepancy, metrics.MarginalHomogeneity, metrics.RepresentationCost
    aligned = removal("min_mass", align_to=first(networks(1, 90)))
    return {
        "PredictiveAgreement": Case(metrics.PredictiveAgreement, pairs),
        "PredictiveTotalVariation": Case(metrics.PredictiveTotalVariation, pairs),
        "TranspositionCount": Case(metrics.TranspositionCount, elements),
        "PairwiseMutualInformation": Case(lambda: metrics.PairwiseMutualInformation(3), members),
        "RepresentationCost": Case(lambda: cost(graph()), alone),
        "RepresentationCost weights": Case(lambda: cost(graph(), parameters="*.weight"), alone),
        "MaximumMeanDiscrepancy": Case(mmd, sets),
        "MaximumMeanDiscrepancy network": Case(lambda: mmd(level="network"), sets),
        "MaximumMeanDiscrepancy graph": Case(lambda: mmd(graph=graph(), level="network"), sets),
        "MaximumMeanDiscrepancy aligned": Case(lambda: mmd(graph=graph(), removed=aligned), sets),
        "MaximumMeanDiscrepancy layers": Case(lambda: mmd(level="layer"), sets),
        "MarginalHomogeneity": Case(lambda: homogeneity(graph(), num_resamples=39), alone),
    }


def numbers(value: Tensor | dict[str, Tensor]) -> dict[str, Any]:
    by_name = value if isinstance(value, dict) else {"value": value}
    return {f"{name} {k}": float(v) for name, t in by_name.items() for k, v in enumerate(t.flatten())}


def close(value: Any, tolerance: float = 1e-12) -> Any:
    return pytest.approx(numbers(value), rel=tolerance, abs=tolerance)


@pytest.fixture(params=[*cases()])
def case(request: pytest.FixtureRequest) -> Case:
    return cases()[request.param]


def test_no_metric_is_left_out() -> None:
    assert {name.split()[0] for name in cases()} == set(metrics.__all__) - {"functional"}


@pytest.mark.parametrize("way", KEPT)
def test_copies_go_on_by_themselves(case: Case, way: str) -> None:
    expected = case.filled().compute()
    metric = case.filled(case.batches[:2])
    copy = KEPT[way](metric)
    for batch in case.batches[2:]:
        copy.update(**batch)
    assert numbers(copy.compute()) == close(expected)
    if copy is not metric:
        for batch in case.batches[2:]:
            metric.update(**batch)
        assert numbers(metric.compute()) == close(expected)


def test_after_a_reset_nothing_is_left(case: Case) -> None:
    expected = case.filled().compute()
    metric = case.filled([*case.batches, *case.batches[:1]])
    metric.compute()
    metric.reset()
    for batch in case.batches:
        metric.update(**batch)
    assert numbers(metric.compute()) == close(expected)


@pytest.mark.parametrize("share", [0, 1, 2, None])
def test_metrics_of_parts_are_merged(case: Case, share: int | None) -> None:
    """Into an empty one, of an empty one, and of parts of different sizes."""
    metric, other = case.filled(case.batches[:share]), case.filled(case.batches[share:] if share is not None else [])
    other.merge_state(metric)
    with pytest.warns(UserWarning, match="before the ``update``") if share is None else nullcontext():
        assert numbers(other.compute()) == close(case.filled().compute())


@pytest.mark.filterwarnings("ignore:.*before the ``update``")
def test_states_are_stored(case: Case) -> None:
    """Through a file, at once or before more batches; the copies share nothing."""
    metric = case.filled(case.batches[:2])
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
        for batch in case.batches[2:]:
            copy.update(**batch)
    for copy in copies:
        assert numbers(copy.compute()) == close(case.filled().compute())
    whole, restored = case.filled(), case.make()
    whole.persistent(True)
    restored.load_state_dict(whole.state_dict())
    assert numbers(restored.compute()) == close(whole.compute())


def test_forward_is_the_batch_alone_and_adds_it(case: Case) -> None:
    metric = case.make()
    if isinstance(metric, metrics.MaximumMeanDiscrepancy):
        for batch in case.batches:
            with pytest.raises(NotImplementedError, match=r"call update\(\.\.\.\) for each batch"):
                metric(**batch)
            metric.update(**batch)
    else:
        for batch in case.batches:
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
    assert numbers(metric.compute()) == close(case.filled().compute())


def test_one_network_has_no_p_value_and_loses_no_others() -> None:
    """What fails after the batch was added."""
    case = cases()["MarginalHomogeneity"]
    metric = case.filled()
    with pytest.raises(ValueError, match="at least 2 samples"):
        metric({name: t[:1] for name, t in networks(1, 0).items()})
    assert numbers(metric.compute()) == close(case.filled().compute())


def test_inputs_may_change_afterwards(case: Case) -> None:
    def copied(batch: Batch) -> Batch:
        return {k: copied(v) if isinstance(v, dict) else v.clone() if isinstance(v, Tensor) else v
                for k, v in batch.items()}  # fmt: skip

    metric = case.make()
    for batch in map(copied, case.batches):
        metric.update(**batch)
        for value in batch.values():
            for t in value.values() if isinstance(value, dict) else [value]:
                if isinstance(t, Tensor):
                    t.zero_()
    assert numbers(metric.compute()) == close(case.filled().compute())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_precisions(case: Case, dtype: torch.dtype) -> None:
    """Of inputs, and of what the metric is asked to be: sums are neither rounded nor do they overflow."""

    def narrow(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: narrow(v) for k, v in value.items()}
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    expected = case.filled().compute()
    assert numbers(case.filled([narrow(batch) for batch in case.batches]).compute()) == close(expected, 1e-5)
    metric = case.make().set_dtype(dtype).to(dtype)
    for batch in case.batches:
        metric.update(**batch)
    holder = nn.ModuleList([metric]).to(dtype).half()
    assert numbers(holder[0].compute()) == close(expected)


def test_pairs_in_a_collection() -> None:
    """After a first batch by which all states that could be equal are: networks in canonical form, one of two right."""
    eye = torch.eye(2, dtype=torch.float64)
    form = tus.remove_symmetries(graph(), networks(4, 0), scale="unit_norm")
    even = {"probs_a": eye, "probs_b": eye[:1].expand(2, 2), "probs": eye.expand(3, 2, 2), "permutation": [1, 0]}
    batches: list[Batch] = [
        even | {"states": form, "reference": True},
        even | {"states": networks(5, 20), "reference": False},
    ]
    batches[1] |= {"probs_a": probabilities(9, 2, seed=1), "probs_b": probabilities(9, 2, seed=2)}
    batches[1]["probs"] = probabilities(3, 9, 2, seed=3)
    for batch in batches:
        batch["permutation"] = torch.tensor(batch["permutation"])

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
            own = {k: v for k, v in found.items() if k == name or k.startswith(f"{name}_")}
            own = {k: v for k, v in own.items() if k in expected or k.removeprefix(f"{name}_") in expected}
            value = pytest.approx([*numbers(expected).values()], rel=1e-12, nan_ok=True)
            assert [*numbers(own).values()] == value, name
        collection.reset()
    assert all(len(names) == 1 for names in collection.compute_groups.values())


def test_every_metric_has_a_plot(case: Case) -> None:
    from matplotlib import pyplot as plt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    metric = case.filled()
    figure, axes = metric.plot()
    assert isinstance(figure, Figure)
    every = np.ravel(np.asarray(axes, dtype=object))
    assert all(isinstance(a, Axes) and len(a.lines) + len(a.collections) + len(a.images) > 0 for a in every)
    given, ax = plt.subplots()
    again, own = metric.plot(metric.compute(), ax)
    assert (again is given or again is None) and own is ax
    plt.close("all")


@functools.cache
def whole() -> dict[str, Any]:
    return values(lambda batches: batches)


def values(share: Callable[[list[Batch]], list[Batch]], device: torch.device | str = "cpu") -> dict[str, Any]:
    def at(value: Any) -> Any:
        return {k: at(v) for k, v in value.items()} if isinstance(value, dict) else (
            value.to(device) if isinstance(value, Tensor) else value)  # fmt: skip

    found = {}
    for name, case in cases().items():
        metric = case.make().to(device)
        for batch in share(case.batches):
            metric.update(**at(batch))
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
            metric.update({"w": drawn(3, 2 + rank, seed=0)}, reference=bool(rank))
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
