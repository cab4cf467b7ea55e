"""Discrepancies with their uncertainty: MMDAgg's definition, exactness of the test, named removals, streaming."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from drawn import generator, normal
from torch import Tensor, nn

import tu_symmetry as tus
from tu_symmetry.metrics.functional import (
    Removal,
    discrepancy_test,
    network_discrepancy,
    removal,
)
from tu_symmetry.metrics.functional.discrepancy import kernel_discrepancies, pairwise_distances
from tu_symmetry.metrics.functional.two_sample import _u_statistics
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.scaling.removal import removal_element
from tu_symmetry.symmetry.action import permute_tensors, scale_tensors


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("width", [3, 1024, 2600])
def test_distances_of_close_and_of_wide_rows(power: int, width: int) -> None:
    """Those of rows that almost agree are no rounding of large squares; equal rows have distance 0 and no NaN slope."""
    x = 100 + 1e-3 * normal(7, width)
    x[3] = x[5]
    expected = (x[:, None] - x[None]).abs().pow(power).sum(-1).pow(1 / power)
    torch.testing.assert_close(pairwise_distances(x, power), expected, rtol=1e-12, atol=1e-12)
    single = x.float()
    expected = (single.double()[:, None] - single.double()[None]).abs().pow(power).sum(-1).pow(1 / power)
    torch.testing.assert_close(pairwise_distances(single, power), expected, rtol=1e-5, atol=0)
    leaf = x.clone().requires_grad_()
    pairwise_distances(leaf, power).sum().backward()
    assert leaf.grad is not None and torch.isfinite(leaf.grad).all() and leaf.grad.abs().sum() > 0


def mmdagg_values(x: np.ndarray, y: np.ndarray) -> list[float]:
    """The statistics of the ``mmdagg`` package (Laplace, then Gaussian), written out."""
    m, n = len(x), len(y)
    z = np.concatenate([x, y])
    values = []
    for power in (1, 2):
        pooled = (np.abs(z[:, None] - z[None]) ** power).sum(-1) ** (1 / power)
        between = pooled[m:, :m].ravel()
        between = between + (between == 0) * np.median(between)
        dd = np.sort(between)
        low = max(dd[int(np.floor(len(dd) * 0.05))], 0.1) if between.min() < 0.1 else between.min()
        low, high = low / 2, 2 * max(between.max(), 0.3)
        for i in range(10):
            bandwidth = (high / low) ** (i / 9) * low
            d = pooled / bandwidth
            k = np.exp(-d) if power == 1 else np.exp(-(d**2))
            np.fill_diagonal(k, 0)
            v11 = np.concatenate([np.ones(m), -np.ones(n)])
            v10, v01 = np.concatenate([np.ones(m), np.zeros(n)]), np.concatenate([np.zeros(m), -np.ones(n)])
            values.append(
                v10 @ k @ v10 * (n - m + 1) / (m * n * (m - 1))
                + v01 @ k @ v01 * (m - n + 1) / (m * n * (n - 1))
                + v11 @ k @ v11 / (m * n)
            )
    return values


@pytest.mark.parametrize("scale", [1.0, 0.01, 30.0])
def test_values_are_those_of_mmdagg(scale: float) -> None:
    x, y = scale * normal(11, 4), scale * (0.6 * normal(11, 4, seed=1) + 0.4)
    found = kernel_discrepancies(x, y)
    np.testing.assert_allclose(found.flatten().numpy(), mmdagg_values(x.numpy(), y.numpy()), atol=1e-12)
    unequal = normal(17, 4, seed=2)
    test = discrepancy_test({"w": x}, {"w": unequal}, permutations=1, bootstraps=0)
    assert test.value == pytest.approx(np.mean(mmdagg_values(x.numpy(), unequal.numpy())), abs=1e-12)


def test_the_permutation_test_has_its_level_and_sees_a_shift() -> None:
    found = []
    for seed in range(120):
        x, y = ({"w": normal(n, 3, seed=2 * seed + k)} for k, n in ((0, 12), (1, 9)))
        source = generator(seed)
        found.append(discrepancy_test(x, y, permutations=39, bootstraps=0, generator=source).p_value)
    values = torch.tensor(found, dtype=torch.float64)
    for level in (0.1, 0.25, 0.5):
        assert abs(float((values <= level + 1e-9).double().mean()) - level) < 3 * (level * (1 - level) / 120) ** 0.5
    x, y = {"w": normal(12, 3)}, {"w": normal(9, 3, seed=1) + 1.5}
    shifted = discrepancy_test(x, y, bootstraps=0, generator=generator())
    assert shifted.p_value == pytest.approx(1 / 200)


def test_the_interval_covers_the_value_of_the_distributions() -> None:
    """Far from zero 19 in 20 intervals hold the discrepancy of large samples (within three standard errors)."""
    large = [{"w": normal(600, 2, seed=50 + k) + k} for k in (0, 1)]
    truth = discrepancy_test(*large, permutations=1, bootstraps=0).value
    covered = 0
    for seed in range(60):
        x, y = ({"w": normal(40, 2, seed=100 + 2 * seed + k) + k} for k in (0, 1))
        source = generator(seed)
        low, high = discrepancy_test(x, y, permutations=1, bootstraps=150, generator=source).interval
        covered += low <= truth <= high
    assert covered / 60 > 0.95 - 3 * (0.95 * 0.05 / 60) ** 0.5


def test_replicates_weigh_whole_runs() -> None:
    """Ten copies of five networks tell as much as the five: by runs the interval is as wide as theirs."""
    few, y = normal(5, 3), {"w": normal(20, 3, seed=1) + 1}
    copies = few.repeat_interleave(10, 0) + 1e-3 * normal(50, 3, seed=2)
    runs = torch.arange(5).repeat_interleave(10)

    def width(x: Tensor, groups: tuple[Tensor | None, None]) -> float:
        source = generator()
        low, high = discrepancy_test({"w": x}, y, permutations=1, groups=groups, generator=source).interval
        return high - low

    assert width(copies, (runs, None)) == pytest.approx(width(few, (None, None)), rel=0.15)
    assert width(copies, (None, None)) < 0.8 * width(few, (None, None))  # what networks alone would claim
    with pytest.raises(ValueError, match="groups has the shape"):
        width(copies, (runs[:4], None))


def test_a_run_that_is_drawn_twice_is_not_twice_as_close() -> None:
    """The interval by runs surrounds the estimate: networks of one run are alike, whichever copy they are in."""
    centers = 3 * normal(10, 4, seed=3)
    x = {"w": centers.repeat_interleave(10, 0) + 0.1 * normal(100, 4, seed=4)}
    y = {"w": 3 * normal(60, 4, seed=5)}
    runs = torch.arange(10).repeat_interleave(10)
    source = generator()
    found = discrepancy_test(x, y, permutations=1, bootstraps=400, groups=(runs, None), generator=source)
    assert found.interval[0] < found.value < found.interval[1]
    kernel = torch.rand(6, 6, dtype=torch.float64)
    kernel = (kernel + kernel.T).fill_diagonal_(0)
    own = torch.tensor([0, 0, 1, 1, 2, 2])  # the first set is runs 0 (drawn twice) and 1, the second run 2
    weights = torch.tensor([[2, 2, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1]], dtype=torch.float64).T
    drawn = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 2), (2, 3)]  # (copy of a run, network)
    pairs = [(p, q) for p in drawn for q in drawn if p[1] != q[1] and (p[0] == q[0] or p[1] // 2 != q[1] // 2)]
    inside = torch.stack([kernel[p[1], q[1]] for p, q in pairs]).mean()
    across = torch.stack([kernel[p[1], j] for p in drawn for j in (4, 5)]).mean()
    assert float(_u_statistics(kernel, weights, own)[0]) == pytest.approx(float(inside + kernel[4, 5] - 2 * across))


def test_equal_sizes_and_what_was_aggregated() -> None:
    x, y = (
        {"a.w": normal(6, 3), "a.b": normal(6, 2, seed=1)},
        {"a.w": normal(15, 3, seed=2), "a.b": normal(15, 2, seed=3)},
    )
    plain = discrepancy_test(x, y)
    assert plain.sizes == (6, 15) and plain.removed == "nothing"
    assert plain.value == pytest.approx(float(network_discrepancy(x, y)), abs=1e-12)
    assert plain.aggregation == (
        "mean over 2 tensors of the mean over 20 kernels (laplace, gaussian, 10 bandwidths each)"
    )
    assert discrepancy_test(x, y, sizes="equal").sizes == (6, 6)
    found, expected = discrepancy_test(x, y, level="layer"), network_discrepancy(x, y, level="layer")
    assert found.value == pytest.approx(float(expected), abs=1e-12) and "1 layers" in found.aggregation


def test_wrong_arguments_one_network_and_a_diverged_one_are_refused() -> None:
    x = {"w": normal(4, 2)}
    with pytest.raises(ValueError, match="sizes must be"):
        discrepancy_test(x, x, sizes="same")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="permutations must be"):
        discrepancy_test(x, x, permutations=0)
    with pytest.raises(ValueError, match="at least two"):
        discrepancy_test({"w": x["w"][:1]}, x)
    with pytest.raises(ValueError, match="diverged"):
        discrepancy_test({"w": x["w"] * torch.nan}, x)
    with pytest.raises(ValueError, match="two architectures"):
        discrepancy_test({"v": x["w"]}, x)
    with pytest.raises(ValueError, match="features"):
        discrepancy_test({"w": normal(4, 3)}, x)


class Branching(nn.Module):
    """A residual block with batch normalization, and a head of nested units."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.inner, self.outer = nn.Conv2d(4, 3, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        return self.head((x + self.outer(self.inner(x).relu())).mean((2, 3)))


MODEL = Branching().double().eval()


def stack(count: int, seed: int) -> dict[str, Tensor]:
    states = {}
    for k, (name, t) in enumerate(MODEL.state_dict().items()):
        if t.is_floating_point():
            draw = normal(count, *t.shape, seed=seed + k)
            states[name] = 0.3 + draw.abs() if "var" in name else draw
        else:
            states[name] = t.expand(count, *t.shape).clone()
    return states


@pytest.fixture(scope="module")
def graph() -> tus.SymmetryGraph:
    found = tus.discover_symmetries(MODEL, normal(2, 1, 5, 5))
    found.require_verified()
    return found


REMOVALS = ["paper", "min_mass", "aligned"]


def named(name: str) -> Removal:
    if name == "aligned":
        return removal("min_mass", align_to={n: t[0] for n, t in stack(1, 90).items()})
    return removal(name)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", REMOVALS)
def test_the_element_is_what_the_removal_applies(graph: tus.SymmetryGraph, name: str) -> None:
    chosen = named(name)
    states = stack(3, 0)
    whole = chosen.apply(graph, states)
    for i in range(3):
        state = {n: t[i] for n, t in states.items()}
        scale, permutation = chosen.element(graph, state)
        for tensor, value in state.items():  # one tensor at a time
            alone = permute_tensors(graph, permutation, scale_tensors(graph, scale, {tensor: value}))[tensor]
            torch.testing.assert_close(alone, whole[tensor][i], rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="this is a stack"):
        removal_element(graph, states)


def test_removals_are_named_and_are_the_papers(graph: tus.SymmetryGraph) -> None:
    assert named("paper").name == "unit_norm, sorted by the largest weight"
    assert named("aligned").name == "min_mass, aligned"
    form = named("paper").apply(graph, stack(2, 0))
    inner = form["inner.weight"].flatten(2)
    torch.testing.assert_close(inner.norm(dim=-1), torch.ones(2, 3).double())
    largest = inner.amax(-1)
    assert bool((largest[:, :-1] >= largest[:, 1:]).all())
    x, y = stack(5, 0), stack(6, 40)
    values = {name: discrepancy_test(x, y, graph=graph, removed=named(name), bootstraps=0) for name in REMOVALS}
    assert len({round(v.value, 9) for v in values.values()}) == 3
    assert discrepancy_test(x, y, graph=graph, bootstraps=0).value == values["paper"].value  # what NS is by default
    assert values["aligned"].removed == "min_mass, aligned"
    with pytest.raises(ValueError, match="removal must be one of"):
        removal("best")  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "level"), [(None, "tensor"), ("paper", "layer"), ("aligned", "network")])
def test_streaming_from_shards_equals_memory(
    graph: tus.SymmetryGraph, tmp_path: Path, name: str | None, level: str
) -> None:
    x, y = stack(5, 0), stack(7, 40)
    stores = []
    for k, states in enumerate((x, y)):
        store = SampleStore.create(tmp_path / str(k), architecture="Branching", method="normal")
        half = {n: t[:3] for n, t in states.items()}, {n: t[3:] for n, t in states.items()}
        for start, part in zip((0, 3), half, strict=True):
            store.append(part, step=range(start, start + len(part["head.bias"])))
        stores.append(store)
    options = {"level": level} if name is None else {"level": level, "graph": graph, "removed": named(name)}
    whole = discrepancy_test(x, y, generator=generator(), **options)  # type: ignore[arg-type]
    parts = discrepancy_test(
        *stores, generator=generator(), memory=4 * 12 * 5, **options  # type: ignore[arg-type]
    )  # fmt: skip
    assert parts.value == pytest.approx(whole.value, abs=1e-6) and parts.p_value == whole.p_value
    assert parts.interval == pytest.approx(whole.interval, abs=1e-6)
    assert (parts.aggregation, parts.removed, parts.sizes) == (whole.aggregation, whole.removed, whole.sizes)
