"""Sums and tables that processes share: what two of them find is what one finds, and an error in one ends both."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dual_oracles import NOISE, PHI, case
from laplace_oracles import convolutional, data, mlp
from processes import side_by_side
from torch import Tensor, nn
from toy_networks import Net

import tu_symmetry as tus
from tu_symmetry.laplace.dual.jacobian import FlatTangentModel, ObservedTangent
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.metrics.functional import discrepancy_test, maximum_mean_discrepancy, network_discrepancy
from tu_symmetry.metrics.functional.two_sample import vectors_test
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.processes import ElsewhereError, by_first, count, dealt, gathered, rank, shared, together

Found = dict[str, Any]


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def networks(number: int, seed: int, dtype: torch.dtype = torch.float64) -> list[dict[str, Tensor]]:
    every = Net().state_dict().items()
    return [
        {n: normal(*t.shape, seed=100 * (seed + k) + place, dtype=dtype) for place, (n, t) in enumerate(every)}
        for k in range(number)
    ]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def write(folder: Path) -> list[Path]:
    """Two stores of networks."""
    for k, number in enumerate((5, 3)):
        store = SampleStore.create(folder / str(k), architecture="network", method="normal")
        for step, state in enumerate(networks(number, 10 * k, torch.float32)):
            store.append(state, step=step)
    return [folder / str(k) for k in range(2)]


def discrepancies(stores: list[Path]) -> Found:
    graph = tus.discover_symmetries(Net().double(), torch.zeros(1, 4, dtype=torch.float64))
    x, y = networks(5, 0), networks(3, 10)
    options: Any = {"permutations": 19, "bootstraps": 20}
    found: Found = {"networks": network_discrepancy(x, y), "of functions": network_discrepancy(x, y, graph=graph)}
    metric = tus.MaximumMeanDiscrepancy(graph)
    metric.update(x, reference=False)
    metric.update(y, reference=True)
    found["metric"] = metric.compute()
    for dtype in (torch.float32, torch.float64):  # of three pieces, and of one
        sets = [{n: normal(k, d, seed=k + d, dtype=dtype) for n, d in (("a", 2500), ("b", 7))} for k in (6, 5)]
        found[f"long {dtype}"] = maximum_mean_discrepancy(sets[0]["a"], sets[1]["a"])
        found[f"test {dtype}"] = vars(vectors_test(*sets, sizes="equal", generator=generator(), **options))
    opened = [SampleStore.open(path) for path in stores]
    for memory in (2**30, 8 * 4 * 20):  # of twenty columns at a time
        tested = discrepancy_test(*opened, graph=graph, generator=generator(), memory=memory, **options)
        found[f"streamed {memory}"] = vars(tested)
    return found


def tables() -> Found:
    """What is the same bit for bit."""
    graph = tus.discover_symmetries(Net(), torch.zeros(1, 4))
    states = networks(5, 0, torch.float32)
    stack = {n: torch.stack([s[n] for s in states]) for n in states[0]}
    removed = [tus.remove_symmetries(graph, stack, signs=signs) for signs in (False, True)]
    loader = [(normal(8, 4, seed=k, dtype=torch.float32), torch.arange(8) % 3) for k in range(2)]
    cross_entropy = nn.functional.cross_entropy
    every = tus.alignment.loss_barriers(Net(), states, loader, cross_entropy, points=4)
    some = tus.alignment.loss_barriers(
        Net(), states, iter(loader), cross_entropy, pairs=[(0, 1), (4, 2), (0, 2)], points=3, merge=lambda s, ratio: s
    )
    return {
        "removed": removed,
        "every": {k: vars(b) for k, b in every.items()},
        "some": [vars(b) for b in some.values()],
    }


LAPLACES: list[tuple[str, dict[str, Any]]] = [
    ("classification", {"curvature": "kfac", "evaluate_at": "map"}),
    ("classification", {"curvature": "last_layer", "evaluate_at": "map"}),
    ("classification", {"curvature": "full", "parameters": ["3", "7"], "evaluate_at": "map"}),
    ("regression", {"curvature": "diag", "evaluate_at": "map"}),
    ("regression", {"curvature": "kfac", "kfac_approx": "reduce", "evaluate_at": "map"}),
]


def laplaces(part: slice = slice(None)) -> Found:
    """From the whole loader, or a part of its batches: of five samples, two, one and one."""
    found: Found = {}
    for k, (kind, options) in enumerate(LAPLACES):
        x, y = data(2, 5, 5, outputs=3, kind=kind)
        loader = list(zip(x.split([5, 2, 1, 1]), y.split([5, 2, 1, 1]), strict=True))[part]
        la = LinearizedLaplace(convolutional(), kind, prior="per_layer", **options).fit(loader)  # type: ignore[arg-type]
        own = found[f"{k}"] = {"summary": vars(la.summary), "evidence": la.log_marginal_likelihood()}
        own["optimum"] = la.optimize_evidence().log_marginal_likelihood
        own["precision"] = la.log_precision
        for rows in (7, 1):  # shared, and not
            own[f"predictive {rows}"] = tuple(la.predictive(x[:rows], num_samples=5))
            own[f"covariance {rows}"] = la.function_covariance(x[:rows])
            own[f"epistemic {rows}"] = la.epistemic(x[:rows], num_samples=3)
            own[f"joint {rows}"] = la.predictive(x[:rows], num_samples=3, joint=True)
            own[f"functions {rows}"] = la.function_samples(x[:rows], 3)
        own["temperature"] = la.calibrate(loader, held_out=False).temperature
        own["nll"] = la.calibrate(loader, held_out=False, standard_errors=1.0).calibrated.nll
    return found


def joint() -> Found:
    """The joint optimum, linearized once or in every product; and the curvature of members, each in a process."""
    found: Found = {}
    for kind, memory in (("classification", 1 << 30), ("regression", 0)):
        x, y = data(2, 5, 5, outputs=3, kind=kind)
        loader = list(zip(x.split(4), y.split(4), strict=True))
        la = LinearizedLaplace(convolutional(), kind, prior="per_layer").fit(loader)  # type: ignore[arg-type]
        result = la.optimize_evidence(memory=memory)
        assert result.converged
        found[kind] = (result.log_marginal_likelihood, la.log_precision, la.theta)
    return found


def duals() -> Found:
    """The exact and the matrix-free evidence of an image network; conjugate gradients to 1e-12 of the right side."""
    own = case(7)
    exact = own.fitted("tangent_mode")
    shapes = {n: tuple(p.shape) for n, p in own.model.named_parameters()}
    operator = ObservedTangent(FlatTangentModel(own.model, own.names), own.x, own.observation)
    options: Any = {"tolerance": 1e-12, "max_iterations": 200, "rank": 5, "num_samples": 8}
    sampled = tus.laplace.SampledEvidence(operator, [p.resolve(shapes) for p in own.priors], own.y, **options)
    phi = {"ab": PHI[:2], "c": PHI[2:3]}
    return {
        "kernels": exact.kernels,
        "evidence": exact.value_and_gradient(PHI),
        "covariance": exact.function_covariance(),
        "gradient": sampled.gradient(phi, NOISE),
        "samples": sampled.samples(phi, NOISE, count=5),
        "factor": sampled.factor(phi, NOISE),
    }


def large() -> list[Any]:
    """Tensors of each kind that are sent by themselves, beside others that are not."""

    def made(k: int) -> Found:
        x = normal(300, 50, seed=k)
        kinds = {str(t): x.to(t) for t in (torch.bfloat16, torch.complex64, torch.bool, torch.int64)}
        return {"x": x, "again": [x, x[:2], x.T], "conjugate": (1j * x).conj(), "empty": x[:0], "none": None, **kinds}

    return [shared(3, made), by_first(lambda: made(5)), gathered(made(6))[0]]


def members() -> Found:
    x, y = data(4, outputs=3)

    def fitted(k: int) -> tuple[int, float]:
        la = LinearizedLaplace(mlp(seed=k), prior="single", evaluate_at="map").fit([(x, y)])
        with together():
            return count(), la.log_marginal_likelihood()

    return {"members": shared(3, fitted)}


def everything(stores: list[Path]) -> Found:
    sums = {"discrepancies": discrepancies(stores), "laplaces": laplaces(), "members": members()}
    return {"sums": sums, "tables": [tables(), large()], "joint": joint(), "duals": duals()}


def failures(stores: list[Path]) -> list[str]:
    """What this process says where something goes wrong in the other one alone."""
    x, y = data(4, outputs=3)

    def spoiled() -> Iterator[tuple[Tensor, Tensor]]:
        yield x, y
        if rank() == 1:
            raise OSError("the disk is gone")

    class Loader:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return spoiled()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if torch.distributed.get_rank() == 1:
            raise OSError("the loss is gone")
        return nn.functional.cross_entropy(outputs, targets)

    class Torn(SampleStore):
        def tensor(self, index: int, name: str) -> Tensor:
            if torch.distributed.get_rank() == 1:
                raise OSError("the store is gone")
            return super().tensor(index, name)

    fitted = LinearizedLaplace(mlp(), prior="single", evaluate_at="map").fit([(x, y)])
    searched = LinearizedLaplace(mlp(), prior="single").fit([(x, y)])
    states = networks(3, 0, torch.float32)
    loader = [(torch.zeros(4, 4), torch.arange(4) % 3)]
    calls: list[Callable[[], Any]] = [
        lambda: LinearizedLaplace(mlp(), prior="single").fit(Loader()),
        lambda: fitted.calibrate(Loader()),
        lambda: searched.optimize_evidence(Loader()),
        lambda: LinearizedLaplace(mlp(), prior="single").fit([(x[:1], y[:1])]),
        lambda: LinearizedLaplace(mlp(seed=rank()), prior="single").fit([(x, y)]),
        lambda: shared(3 + rank(), str),
        lambda: tus.alignment.loss_barriers(Net(), states, loader, loss, points=3),
        lambda: discrepancy_test(*(Torn.open(path) for path in stores), permutations=1, generator=generator()),
    ]
    said = []
    for call in calls:
        with pytest.raises((OSError, ElsewhereError, RuntimeError, ValueError)) as caught:
            call()
        said.append(f"{caught.type.__name__}: {caught.value}")
    return said


def worker(number: int, folder: Path, stores: list[Path]) -> None:
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=number, world_size=2)
    with together():
        found = everything(stores)
        x, y = normal(6, 3, seed=0), normal(5, 3, seed=1)
        found["unseeded"] = vars(vectors_test({"": x}, {"": y}, permutations=9))
        found["dealt"] = dealt([1, 1, 5, 2, 2])
        found["failures"] = failures(stores)
    rows = [networks(5, 0), networks(3, 10)][number]
    metric = tus.MaximumMeanDiscrepancy()  # each process has rows of its own
    metric.update(rows, reference=bool(number))
    found["metric of shares"] = metric.compute()
    found["laplaces of shares"] = laplaces(slice(2) if number else slice(2, None))
    torch.save(found, folder / f"{number}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write(tmp_path_factory.mktemp("stores"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, stores: list[Path]) -> list[Found]:
    """What each of two processes finds."""
    folder = tmp_path_factory.mktemp("two")
    side_by_side(worker, folder, stores, count=2)
    return [torch.load(folder / f"{k}.pt", weights_only=False) for k in range(2)]


@pytest.fixture(scope="module")
def one(stores: list[Path]) -> Found:
    """What one process finds."""
    return everything(stores)


def same(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    """Both to so many digits; of tensors, of the largest entry."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            same(found[name], expected[name], tolerance)
    elif isinstance(expected, (list, tuple)):
        for one, other in zip(found, expected, strict=True):
            same(one, other, tolerance)
    elif isinstance(expected, Tensor):
        assert found.dtype == expected.dtype
        assert found.stride() == expected.stride()
        scale = float(expected.abs().max()) if tolerance else 0.0
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * scale)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=tolerance, abs=tolerance, nan_ok=True)
    else:
        assert found == expected


def test_sums_of_two_processes_are_those_of_one(two: list[Found], one: Found) -> None:
    for found in two:
        same(found["sums"], one["sums"])


def test_tables_of_two_processes_are_those_of_one_bit_for_bit(two: list[Found], one: Found) -> None:
    for found in two:
        same(found["tables"], one["tables"], 0)


def test_both_processes_have_the_very_same(two: list[Found]) -> None:
    for name in ("sums", "tables", "joint", "duals", "unseeded", "dealt"):
        same(two[0][name], two[1][name], 0)
    assert two[0]["dealt"] == [1, 0, 0, 1, 1]


def test_the_joint_optimum_of_two_processes_is_that_of_one(two: list[Found], one: Found) -> None:
    for found in two:
        same(found["joint"], one["joint"], 1e-6)


def test_the_dual_evidence_of_two_processes_is_that_of_one(two: list[Found], one: Found) -> None:
    for found in two:
        same(found["duals"], one["duals"], 1e-9)


def test_processes_with_shares_of_their_own_find_what_one_finds_of_all(two: list[Found]) -> None:
    for found in two:
        same(found["metric of shares"], network_discrepancy(networks(5, 0), networks(3, 10)))
        for name, expected in laplaces().items():
            same(found["laplaces of shares"][name], expected)


def test_what_goes_wrong_in_one_process_is_raised_in_both(two: list[Found]) -> None:
    told, said = two[0]["failures"], two[1]["failures"]
    assert all(line.startswith(("ElsewhereError: process 1", "RuntimeError: another process")) for line in told[:3])
    assert all(line == "OSError: the disk is gone" for line in said[:3])
    assert "too few samples for 2 processes" in told[3] + said[3] and "another process" in told[3] + said[3]
    assert "different weights" in told[4] and told[4] == said[4]
    assert "different sizes, [3, 4]" in told[5] and told[5] == said[5]
    assert told[6:] == [f"ElsewhereError: process 1 failed: the {what} is gone" for what in ("loss", "store")]
    assert said[6:] == [f"OSError: the {what} is gone" for what in ("loss", "store")]


SCRIPT = """
import os, sys
import torch
from tu_symmetry.processes import gathered, rank, together

with together():
    gathered(None)
    if rank() == 1:
        os._exit(9)
    gathered(torch.zeros(10**6))
"""


@pytest.mark.slow
def test_a_process_that_dies_ends_the_others(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*torchrun, str(script)], env=environment, capture_output=True, timeout=120, check=False)
    assert done.returncode != 0
