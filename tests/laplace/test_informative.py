"""Rows of the informative observations: which are chosen, what they are, and the joint optimum of their model."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from laplace_oracles import data, randomize
from torch import Tensor, nn

from tu_symmetry.laplace import informative, joint, subspace
from tu_symmetry.laplace.evidence import Hyperprior
from tu_symmetry.laplace.informative import Informative, choose, most_rows
from tu_symmetry.laplace.jacobians import jacobians
from tu_symmetry.laplace.kept import KeptData
from tu_symmetry.laplace.model import LinearizedLaplace
from tu_symmetry.laplace.tangent import evaluating


def network() -> nn.Module:
    return randomize(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))


def fitted(kind: str = "classification", samples: int = 30, **options: Any) -> tuple[LinearizedLaplace, KeptData]:
    """An approximation, and its data in two chunks."""
    x, y = data(4, outputs=3, kind=kind, samples=samples)
    half = samples // 2 + 1
    la = LinearizedLaplace(network(), kind, **{"prior": "per_layer", **options}).fit([(x, y)])  # type: ignore[arg-type]
    with evaluating(la.model):
        return la, KeptData(la.tangent, la.likelihood, [(x[:half], y[:half]), (x[half:], y[half:])], budget=0)


def curvature(la: LinearizedLaplace, found: KeptData, linear: list[Tensor]) -> Tensor:
    """The whole Gauss-Newton matrix, sample by sample from its definition."""
    whole = torch.zeros(la.tangent.size, la.tangent.size, dtype=torch.float64)
    for inputs, outputs, targets in zip(found.chunks, linear, found.targets, strict=True):
        jacobian = jacobians(la.tangent, inputs, outputs.shape[1:])
        for j, own, target in zip(jacobian, outputs, targets, strict=True):
            columns = la.likelihood.hessian_product(own[None], target[None], torch.eye(3, dtype=torch.float64)[:, None])
            whole += j.T @ columns.squeeze(1) @ j
    return whole


# ---------------------------------------------------------------------- which are chosen


def test_the_longest_columns_are_chosen() -> None:
    la, found = fitted()
    roots = [la.likelihood.hessian_root(o, t) for o, t in zip(found.outputs, found.targets, strict=True)]
    squares = torch.cat([root.square().sum(-1).flatten() for root in roots])
    chosen = choose(found, found.outputs, 7)
    taken = torch.cat([mask.flatten() for masks in chosen.masks for mask in masks])
    assert int(taken.sum()) == 7
    assert float(squares[taken].min()) >= float(squares[~taken].max())
    assert chosen.share == pytest.approx(float(squares[taken].sum() / squares.sum()), rel=1e-12)
    assert chosen.excess == pytest.approx(float(squares[taken].mean() / squares.mean()), rel=1e-12)
    every = choose(found, found.outputs, 1000)
    assert (every.share, every.excess) == pytest.approx((1.0, 1.0))


def test_pieces_of_a_chunk_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    la, found = fitted()
    whole = Informative(found, la.prior_groups, found.outputs, choose(found, found.outputs, 9))
    monkeypatch.setattr(informative, "_ENTRIES", 40)  # four samples of the roots, and one gradient at a time
    pieces = choose(found, found.outputs, 9)
    assert [len(masks) for masks in pieces.masks] == [4, 4]
    parts = Informative(found, la.prior_groups, found.outputs, pieces)
    torch.testing.assert_close(parts.grams.sum(0).diagonal().sort().values, whole.grams.sum(0).diagonal().sort().values)
    monkeypatch.undo()
    for terms in (1, 2, 5):
        monkeypatch.setattr(informative, "_TERMS", terms)
        parts = Informative(found, la.prior_groups, found.outputs, choose(found, found.outputs, 9))
        torch.testing.assert_close(parts.grams, whole.grams)


def test_inner_products_are_added_up_in_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of single precision only their terms are; an eigenvalue that is rounded below -1 has a Cholesky factor yet."""
    torch.manual_seed(0)
    la = LinearizedLaplace(nn.Linear(3000, 3), prior="single").fit([(torch.randn(9, 3000), torch.arange(9) % 3)])
    with evaluating(la.model):
        found = KeptData(la.tangent, la.likelihood, [(torch.randn(9, 3000), torch.arange(9) % 3)])
    errors = []
    for terms in (1, 1 << 20):
        monkeypatch.setattr(informative, "_TERMS", terms)
        own = Informative(found, la.prior_groups, found.outputs, choose(found, found.outputs, 27))
        assert own.rows.dtype == torch.float32
        exact = own.rows.double() @ own.rows.double().mT
        errors.append(float((own.grams[0] - exact).abs().max() / exact.max()))
    assert errors[0] < min(6e-8, errors[1])  # of single products only, which are not added to anything
    rho = torch.tensor([-40.0], dtype=torch.float64)
    own.grams[:, 1] = own.grams[:, 0]
    own.grams[:, :, 1] = own.grams[:, :, 0]
    rounding = 1e-7 * own.grams.max() * torch.eye(len(own.rows), dtype=torch.float64)
    own.grams += rounding
    above = own._factor(rho, 1.0).diagonal().square()
    own.grams -= 2 * rounding
    below = own._factor(rho, 1.0).diagonal().square()
    assert float((above / below).log().abs().max()) < 0.3  # whichever way eigenvalues of zero are rounded
    assert bool(own.covariance_product(rho, 1.0, torch.randn(la.tangent.size)).isfinite().all())


def test_observations_without_curvature_make_no_rows() -> None:
    _, found = fitted(samples=10)
    certain = [torch.full_like(outputs, -800.0) for outputs in found.outputs]
    for outputs in certain:
        outputs[:, 1] = 800.0
    certain[0][2] = torch.tensor([0.3, 0.1, -0.2], dtype=torch.float64)
    chosen = choose(found, certain, 20)
    assert sum(int(mask.sum()) for masks in chosen.masks for mask in masks) == 2  # of one sample, three classes
    assert chosen.share == pytest.approx(1.0)
    certain[0][2] = certain[0][1]
    nothing = choose(found, certain, 20)
    assert nothing.share == 0.0 and not any(bool(mask.any()) for masks in nothing.masks for mask in masks)


def test_how_many_rows_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    la, found = fitted(samples=200)
    groups, each = la.prior_groups, 8 * la.tangent.size
    assert most_rows(found, groups, 1 << 30) == 256  # of 600 outputs
    assert most_rows(found, groups, 100 * each) == 100
    assert most_rows(found, groups, 60 * each) == 0  # too few for their cost
    assert most_rows(found, groups, 0) == 0
    small = fitted(samples=10)[1]
    assert most_rows(small, groups, 1 << 30) == 30  # all
    assert most_rows(small, groups, 29 * each) == 0
    monkeypatch.setattr(informative, "_WORK", 600 * 3 - 1)
    assert most_rows(found, groups, 1 << 30) == 0
    monkeypatch.undo()
    monkeypatch.setattr(informative, "_ENTRIES", 2 * 80**2)
    assert most_rows(found, groups, 1 << 30) == 80  # Gram matrices of two groups


# ---------------------------------------------------------------------- what they are


@pytest.mark.parametrize("prior", ["single", "per_layer", "per_filter"])
def test_all_rows_make_the_whole_curvature(prior: str) -> None:
    la, found = fitted(prior=prior, groups={"first": ["0.weight"]} if prior == "per_filter" else None)
    own = Informative(found, la.prior_groups, found.outputs, choose(found, found.outputs, 1000))
    whole = curvature(la, found, found.outputs)
    torch.testing.assert_close(own.rows.mT @ own.rows, whole, rtol=1e-10, atol=1e-12)
    number = la.prior_groups.spread(torch.arange(len(la.prior_groups)))
    for g, gram in enumerate(own.grams):
        rows = own.rows[:, number == g]
        torch.testing.assert_close(gram, rows @ rows.mT, rtol=1e-10, atol=1e-12)
    rho = torch.linspace(-1, 2, len(la.prior_groups), dtype=torch.float64)
    vector = torch.randn(la.tangent.size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = torch.linalg.solve(whole / 0.3 + torch.diag(la.prior_groups.spread(rho.exp())), vector)
    torch.testing.assert_close(own.covariance_product(rho, 0.3, vector), expected, rtol=1e-8, atol=1e-10)


def test_rows_of_outputs_at_several_positions() -> None:
    """Every position is an observation: its rows are gradients of its own outputs."""
    model = randomize(nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.SiLU(), nn.Linear(5, 3)))
    x, _ = data(6, 4, outputs=3, samples=8)
    y = torch.randint(0, 3, (8, 6), generator=torch.Generator().manual_seed(2))
    la = LinearizedLaplace(model, prior="per_layer").fit([(x, y)])
    with evaluating(model):
        found = KeptData(la.tangent, la.likelihood, [(x, y)], budget=0)
        own = Informative(found, la.prior_groups, found.outputs, choose(found, found.outputs, 1000))
        vector = torch.randn(la.tangent.size, dtype=torch.float64)
        (pushed,) = found.push(vector)
        weighted = la.likelihood.hessian_product(found.outputs[0], found.targets[0], pushed[None])[0]
        expected = found.pull([weighted])
    assert len(own.rows) == 8 * 6 * 2
    torch.testing.assert_close(own.rows.mT @ (own.rows @ vector), expected, rtol=1e-9, atol=1e-11)


# ---------------------------------------------------------------------- their model's optimum


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_the_optimum_of_the_model_is_stationary_in_weights_and_precisions(kind: str) -> None:
    """Against the model written out with dense matrices, its derivatives by autograd."""
    la, found = fitted(kind)
    groups, fit = la.prior_groups, replace(la.fitted, hyperprior=Hyperprior(std=0.5))
    search = subspace._Search(fit, found, 1 << 30)
    point = search.start()
    variance = math.exp(point.tau)
    own = Informative(found, groups, found.outputs, choose(found, found.outputs, 1000))
    alone = search.gradient(point) - search.precision(point) * point.theta

    def model(theta: Tensor, rho: Tensor) -> Tensor:
        change = theta - point.theta
        energy = 0.5 * (rho.exp()[groups.spread(torch.arange(len(groups)))] * theta.square()).sum()
        spectrum = fit.curvature.determinants
        logs, counts = spectrum.logs, spectrum.counts  # type: ignore[attr-defined]
        energy = energy + 0.5 * (counts * nn.functional.softplus(logs - point.tau - rho.unsqueeze(-1))).sum()
        energy = energy + (rho - search.center).square().sum() / (2 * search.hyperprior.std**2)
        return alone @ change + 0.5 * (own.rows @ change).square().sum() / variance + energy

    theta, rho = point.theta, point.rho
    values = [float(model(theta, rho))]
    for _ in range(30):  # each moves precisions by a factor of e^2 at most
        bounds = (search.low, search.high)
        before = rho
        theta, rho = own.optimum(point.theta, alone, rho, variance, lambda r: search.energy(r, point.tau), bounds)
        assert float((rho - before).abs().max()) <= 2 + 1e-12
        values.append(float(model(theta, rho)))
    assert all(b <= a + 1e-9 for a, b in pairwise(values)) and values[-1] < values[0] - 0.1
    theta, rho = theta.requires_grad_(), rho.clone().requires_grad_()
    slopes = torch.autograd.grad(model(theta, rho), (theta, rho))
    inside = (rho > search.low + 1e-9) & (rho < search.high - 1e-9)
    assert bool(inside.all())
    assert float(slopes[0].abs().max()) < 1e-8
    assert float(slopes[1][inside].abs().max()) < 1e-3


def test_precisions_that_leave_next_to_no_prior() -> None:
    """Where adding one to the Gram matrix is lost in rounding, products stay finite, and descent directions."""
    la, found = fitted(samples=60)
    own = Informative(found, la.prior_groups, found.outputs, choose(found, found.outputs, 1000))
    vector = torch.randn(la.tangent.size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    rho = torch.full((2,), -45.0, dtype=torch.float64)
    product = own.covariance_product(rho, 1.0, vector)
    assert bool(product.isfinite().all()) and float(product @ vector) > 0


def test_precisions_on_a_bound_stay_there() -> None:
    la, found = fitted()
    search = subspace._Search(la.fitted, found, 1 << 30)
    point = search.start()
    own = Informative(found, la.prior_groups, found.outputs, choose(found, found.outputs, 1000))
    alone = search.gradient(point) - search.precision(point) * point.theta
    low = torch.stack([search.high[0], search.low[1]])
    rho = torch.stack([search.high[0], point.rho[1]])
    _, moved = own.optimum(point.theta, alone, rho, 1.0, lambda r: search.energy(r, point.tau), (low, search.high))
    assert float(moved[0]) == float(search.high[0])
    assert float(moved[1]) != float(rho[1])


# ---------------------------------------------------------------------- the joint optimum with them


def optimum(monkeypatch: pytest.MonkeyPatch, rows: int | None, kind: str, hyperprior: Hyperprior) -> tuple[float, int]:
    """The objective, and the number of directions, with so many rows at most; None for the library's own number."""
    if rows is not None:
        monkeypatch.setattr(subspace, "most_rows", lambda *_: rows)
    la, _ = fitted(kind, samples=60)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = la.optimize_evidence(hyperprior=hyperprior)
    assert result.converged and result.gradient_norm <= 1e-6 and result.gap <= 1e-6
    monkeypatch.undo()
    return la.fitted.objective(), result.iterations


@pytest.mark.parametrize("kind", ["classification", "regression"])
@pytest.mark.parametrize("hyperprior", [Hyperprior(), Hyperprior(std=0.5)])
def test_few_rows_and_none_end_at_the_same_point(
    kind: str, hyperprior: Hyperprior, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they are as good as any others (a regression's), so that none are made."""
    found = [optimum(monkeypatch, rows, kind, hyperprior) for rows in (None, 0, 40)]
    assert max(value for value, _ in found) - min(value for value, _ in found) < 1e-7
    assert 3 * found[0][1] < 2 * found[1][1]  # all of them: fewer directions


def test_the_preconditioned_gradient_comes_to_rows_that_hold_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two directions each time then, and the same optimum."""
    expected = optimum(monkeypatch, None, "classification", Hyperprior())
    monkeypatch.setattr(subspace, "_SHARE", 2.0)
    monkeypatch.setattr(subspace, "_EXCESS", 0.0)
    directions: list[int] = []
    propose = subspace._Search.propose

    def noted(self: subspace._Search, *given: Any) -> tuple[list[Tensor], float]:
        found = propose(self, *given)
        directions.append(len(found[0]))
        return found

    monkeypatch.setattr(subspace._Search, "propose", noted)
    found = optimum(monkeypatch, None, "classification", Hyperprior())
    assert set(directions) == {2}
    assert found[0] == pytest.approx(expected[0], abs=1e-7)


def test_a_model_that_leads_uphill_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient in its covariance takes its place."""
    expected = optimum(monkeypatch, None, "classification", Hyperprior())

    def uphill(self: Informative, theta: Tensor, gradient: Tensor, rho: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        whole = gradient + self.groups.spread(rho.exp()) * theta
        return theta + whole, rho

    monkeypatch.setattr(Informative, "optimum", uphill)
    found = optimum(monkeypatch, None, "classification", Hyperprior())
    assert found[0] == pytest.approx(expected[0], abs=1e-7)
    assert found[1] > expected[1]  # precisions lag behind


def test_rows_are_renewed_while_much_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    gradient, choice = subspace._Search.gradient, subspace.choose

    def counted(self: subspace._Search, point: subspace._Point) -> Tensor:
        seen.append(0)
        return gradient(self, point)

    chosen: list[int] = []

    def noted(found: KeptData, linear: list[Tensor], most: int) -> informative.Chosen:
        chosen.append(len(seen))
        return choice(found, linear, most)

    monkeypatch.setattr(subspace._Search, "gradient", counted)
    monkeypatch.setattr(subspace, "choose", noted)
    la, _ = fitted()
    result = la.optimize_evidence()
    assert result.converged
    assert chosen[:2] == [1, 3] and all(b - a == 2 for a, b in pairwise(chosen[:-1]))


def test_rows_of_a_quadratic_loss_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And as many as there may be, since they stay what they are."""
    chosen: list[int] = []
    choice = subspace.choose

    def noted(found: KeptData, linear: list[Tensor], most: int) -> informative.Chosen:
        chosen.append(most)
        return choice(found, linear, most)

    monkeypatch.setattr(subspace, "choose", noted)
    la, _ = fitted("regression", samples=200)
    result = la.optimize_evidence()
    assert result.converged and result.iterations < 12
    assert chosen == [600]


def test_a_precision_for_each_weight_has_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gram matrices of so many groups would not fit."""
    monkeypatch.setattr(informative, "_ENTRIES", 50_000)
    la, found = fitted(prior="diagonal", curvature="diag", samples=60)
    assert len(la.prior_groups) == la.tangent.size
    assert most_rows(found, la.prior_groups, 1 << 30) == 0
    assert la.optimize_evidence().converged


def test_large_networks_get_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """So much that the rows have room in it, of the half of what is free; small ones get what they always did."""
    free: list[torch.device] = []

    def counted(device: torch.device) -> int:
        free.append(device)
        return 12 << 30

    monkeypatch.setattr(joint, "free_memory", counted)
    assert joint.default_memory(torch.zeros(1 << 20)) == 2 << 30 and not free
    assert joint.default_memory(torch.zeros(1 << 21)) == 4 << 30
    large = torch.zeros(1).expand(1 << 24)
    assert joint.default_memory(large) == 6 << 30
    monkeypatch.setattr(joint, "free_memory", lambda _: 40 << 30)
    assert joint.default_memory(large) == 18 << 30  # 256 rows, and 2 GiB
    monkeypatch.setattr(joint, "free_memory", lambda _: 1 << 30)
    assert joint.default_memory(torch.zeros(1 << 21)) == 2 << 30


def test_rows_leave_room_for_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the memory is the rows', or all above 2 GiB; data that take more than is left are kept as well."""
    seen: list[int] = []
    optimum = joint.joint_optimum

    def noted(*given: Any, memory: int, **options: Any) -> subspace.Joint:
        seen.append(memory)
        return optimum(*given, memory=memory, **options)

    monkeypatch.setattr(joint, "joint_optimum", noted)
    monkeypatch.setattr(joint, "MOST_ROWS", 1 << 40)
    la, found = fitted()
    assert found.size == 30 * 8 * (4 + 1)  # float64 inputs, and labels
    for memory in (1 << 20, 2 << 30, 3 << 30, 4 << 30, 11 << 30):
        la.optimize_evidence(memory=memory)
        assert seen[-1] == max(memory // 2, memory - (2 << 30))
    memory = found.size + 100
    la.optimize_evidence(memory=memory)
    assert seen[-1] == 100
