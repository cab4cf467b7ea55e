"""Every metric on two processes equals the metric on one, and that on a device the one on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torchmetrics import Metric

import tu_symmetry as tus
from tu_symmetry.metrics import (
    FunctionalDiversity,
    MarginalHomogeneity,
    MaximumMeanDiscrepancy,
    PairwiseMutualInformation,
    PredictiveAgreement,
    PredictiveTotalVariation,
    QuotientDistance,
    RepresentationCost,
    TranspositionCount,
)

ELEMENTS = [{"a": torch.tensor([1, 0, 2]), "b": torch.tensor([3, 0, 1, 2])}, {"a": torch.tensor([0, 1, 2])}]
WHOLE = slice(None)
SHARES = (slice(0, 5), slice(5, None))


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def networks(share: slice, seed: int) -> dict[str, Tensor]:
    return {"w": normal(12, 3, 2, seed=seed)[share], "b": 0.5 + normal(12, 3, seed=seed + 1)[share]}


def perceptrons(share: slice, seed: int) -> dict[str, Tensor]:
    shapes = {"0.weight": (4, 3), "0.bias": (4,), "2.weight": (2, 4), "2.bias": (2,)}
    return {n: normal(12, *shape, seed=seed + k)[share] for k, (n, shape) in enumerate(shapes.items())}


def values(
    share: slice, elements: list[dict[str, Tensor]], graph: tus.SymmetryGraph, device: torch.device | str = "cpu"
) -> dict[str, float]:
    def at(states: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: t.to(device) for name, t in states.items()}

    a, b = (2 * normal(3, 31, 4, seed=0)).softmax(-1)[:, share], (2 * normal(31, 4, seed=1)).softmax(-1)[share]
    a, b = a.to(device), b.to(device)
    metrics: dict[str, Metric] = {
        "agreement": PredictiveAgreement(),
        "variation": PredictiveTotalVariation(),
        "transpositions": TranspositionCount(),
        "information": PairwiseMutualInformation(3),
        "discrepancy": MaximumMeanDiscrepancy(),
    }
    metrics |= {
        "discrepancy without symmetries": MaximumMeanDiscrepancy(graph=graph, level="layer"),
        "homogeneity": MarginalHomogeneity(graph, num_resamples=39),
    }
    metrics = {name: metric.to(device) for name, metric in metrics.items()}
    metrics["discrepancy without symmetries"].update(at(perceptrons(share, 10)), reference=True)
    metrics["discrepancy without symmetries"].update(at(perceptrons(share, 20)), reference=False)
    metrics["homogeneity"].update(at(perceptrons(share, 10)))
    cost = RepresentationCost(graph).to(device)
    cost.update(at(perceptrons(share, 10)))
    metrics["agreement"].update(a, b)
    metrics["variation"].update(a, b)
    metrics["information"].update(a)
    for element in elements:
        metrics["transpositions"].update(at(element))
    metrics["discrepancy"].update(at(networks(share, 2)), reference=True)
    metrics["discrepancy"].update(at(networks(share, 4)), reference=False)
    found = {name: float(metric.compute()) for name, metric in metrics.items()}
    quotient = QuotientDistance(graph, at({n: t[0] for n, t in perceptrons(WHOLE, 20).items()})).to(device)
    quotient.update(at(perceptrons(share, 20)), reference=True)
    quotient.update(at(perceptrons(share, 10)), reference=False)
    diversity = FunctionalDiversity(3).to(device)
    diversity.update(a, ood=False)
    diversity.update((3 * normal(3, 31, 4, seed=7)).softmax(-1)[:, share].to(device), ood=True)
    for metric in (cost, quotient, diversity):
        found |= {name: float(value) for name, value in metric.compute().items()}
    test = metrics["discrepancy without symmetries"].compute_test()  # type: ignore[operator]
    return found | {"p-value": test.p_value, "low": test.interval[0], "high": test.interval[1], "test": test.value}


def worker(rank: int, folder: Path, graph: tus.SymmetryGraph) -> None:
    store = dist.FileStore(str(folder / "store"), 2)  # no port, which another process could take meanwhile
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    (folder / f"{rank}.json").write_text(json.dumps(values(SHARES[rank], ELEMENTS[rank : rank + 1], graph)))
    dist.destroy_process_group()


def discovered() -> tus.SymmetryGraph:
    graph = tus.discover_symmetries(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(2, 3))
    graph.require_verified()
    return graph


def test_on_a_device_they_are_those_of_the_cpu(cuda: torch.device) -> None:
    graph = discovered()
    assert values(WHOLE, ELEMENTS, graph, cuda) == pytest.approx(values(WHOLE, ELEMENTS, graph), rel=1e-8, abs=1e-10)


def test_two_processes_equal_one(tmp_path: Path) -> None:
    graph = discovered()
    mp.spawn(worker, args=(tmp_path, graph), nprocs=2)
    expected = values(WHOLE, ELEMENTS, graph)
    assert all(values(share, ELEMENTS[:1], graph)["variation"] != expected["variation"] for share in SHARES)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == pytest.approx(expected, abs=1e-13)
