"""Curvature against dense Gauss-Newton matrices where it is exact, and by its definition where it is not."""

from __future__ import annotations

import copy

import pytest
import torch
from backpack import backpack as extensions
from backpack import extend
from backpack.extensions import DiagGGNExact, SqrtGGNExact
from laplace_oracles import (
    SelfAttention,
    cnn,
    data,
    dense_covariance,
    dense_curvature,
    exact_ggn,
    fitted,
    mlp,
    output_matrices,
    randomize,
    slot,
)
from torch import Tensor, nn

from tu_symmetry.laplace.likelihood import make_likelihood
from tu_symmetry.laplace.linearized import LinearizedLaplace

RTOL = 1e-9
both_approximations = pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])


def same_blocks(la: LinearizedLaplace, exact: Tensor) -> None:
    """The curvature is the exact one, apart from what lies between blocks."""
    kept = torch.zeros_like(exact)
    for block in la.posterior.blocks:
        own = slice(block.start, block.stop)
        kept[own, own] = exact[own, own]
    torch.testing.assert_close(dense_curvature(la), kept, rtol=RTOL, atol=1e-9)


@pytest.mark.parametrize("kind", ["classification", "regression"])
@pytest.mark.parametrize(
    ("curvature", "parameters"), [("full", None), ("full", ["2.bias", "0"]), ("diag", None), ("last_layer", None)]
)
def test_exact_curvatures_are_those_of_the_gauss_newton_matrix(
    curvature: str, parameters: list[str] | None, kind: str
) -> None:
    model, (x, y) = mlp(), data(4, outputs=3, kind=kind)
    la = fitted(model, x, y, kind, curvature=curvature, parameters=parameters)
    exact = exact_ggn(model, la.tangent.names, x, y, kind)
    names = ("2.weight", "2.bias") if curvature == "last_layer" else ("0.weight", "0.bias", "2.bias")
    assert la.tangent.names == names or (parameters is None and curvature != "last_layer")
    exact = torch.diag(exact.diagonal()) if curvature == "diag" else exact
    torch.testing.assert_close(dense_curvature(la), exact, rtol=RTOL, atol=1e-9)


@pytest.mark.parametrize("curvature", ["full", "kfac"])
@pytest.mark.parametrize(("kind", "matters"), [("regression", False), ("binary", True), ("classification", True)])
def test_where_the_output_hessian_is_taken_matters_unless_noise_is_gaussian(
    kind: str, matters: bool, curvature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paper's choice of the Hessian's evaluation point: any outputs in place of the network's."""
    model, (x, y) = mlp(), data(4, outputs=3, kind="classification" if kind == "classification" else "regression")
    y = y.sigmoid() if kind == "binary" else y
    here, likelihood = dense_curvature(fitted(model, x, y, kind, curvature=curvature)), make_likelihood(kind)  # type: ignore[arg-type]
    root = likelihood.hessian_root
    monkeypatch.setattr(likelihood, "hessian_root", lambda outputs, targets: root(outputs.flip(-1).square(), targets))
    there = dense_curvature(fitted(model, x, y, likelihood, curvature=curvature))
    assert torch.equal(here, there) != matters
    assert float((there - here).norm() / here.norm()) > 0.05 or not matters


def backpack(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The generalized Gauss-Newton matrix and its diagonal by BackPACK, which shares no code with ours."""
    own, loss = extend(copy.deepcopy(model)), extend(nn.CrossEntropyLoss(reduction="sum"))
    with extensions(DiagGGNExact(), SqrtGGNExact()):
        loss(own(x), y).backward()
    diagonal = torch.cat([p.diag_ggn_exact.flatten() for p in own.parameters()])
    root = torch.cat([p.sqrt_ggn_exact.flatten(0, 1).flatten(1) for p in own.parameters()], dim=1)
    return root.T @ root, diagonal


@pytest.mark.filterwarnings("ignore:.*backward hook:UserWarning", "ignore::FutureWarning")
def test_exact_curvatures_are_those_of_backpack() -> None:
    model = randomize(
        nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Sigmoid(), nn.Conv2d(4, 4, 2, groups=2), nn.ReLU(),
            nn.Flatten(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 3),
        )
    )  # fmt: skip
    x, y = data(2, 6, 6, outputs=3)
    whole, diagonal = backpack(model, x, y)
    torch.testing.assert_close(dense_curvature(fitted(model, x, y, curvature="full")), whole, rtol=RTOL, atol=1e-9)
    found = dense_curvature(fitted(model, x, y, curvature="diag")).diagonal()
    torch.testing.assert_close(found, diagonal, rtol=RTOL, atol=1e-10)


@both_approximations
def test_kfac_is_exact_for_one_sample_and_for_linear_networks(kfac_approx: str) -> None:
    """Of a Gaussian likelihood, where gradients of the outputs do not depend on the data."""
    model, (x, y) = mlp(), data(4, outputs=3, samples=1)
    la = fitted(model, x, y, kfac_approx=kfac_approx)
    same_blocks(la, exact_ggn(model, la.tangent.names, x, y, "classification"))
    model = randomize(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3, bias=False), nn.Linear(3, 2)))
    x, y = data(4, outputs=2, kind="regression")
    la = fitted(model, x, y, "regression", kfac_approx=kfac_approx)
    same_blocks(la, exact_ggn(model, la.tangent.names, x, y, "regression"))


class Shared(nn.Module):
    def __init__(self, pooled: bool, convolution: bool) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, 4, 2) if convolution else nn.Linear(3, 4)
        self.pooled, self.convolution = pooled, convolution
        self.second = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.mT).mT if self.convolution else self.first(x)
        return self.second(x.sum(1)) if self.pooled else self.second(x).flatten(1)


@pytest.mark.parametrize(("pooled", "convolution"), [(True, False), (True, True), (False, False)])
def test_which_approximation_is_exact_where_positions_share_a_weight(pooled: bool, convolution: bool) -> None:
    """Propositions 1 and 2 of arXiv 2311.00636: ``reduce`` for pooled positions, ``expand`` for a loss at every one."""
    model = randomize(Shared(pooled, convolution))
    x, y = data(5, 3, outputs=2 if pooled else 10, kind="regression")
    right, wrong = ("reduce", "expand") if pooled else ("expand", "reduce")
    la, other = (fitted(model, x, y, "regression", kfac_approx=kind) for kind in (right, wrong))
    exact = exact_ggn(model, la.tangent.names, x, y, "regression")
    same_blocks(la, exact)
    own = slot(la, "first.weight")
    assert (dense_curvature(other) - exact)[own, own].norm() > 0.1 * exact[own, own].norm()


def by_definition(model: nn.Module, x: Tensor, y: Tensor, rows: Tensor, after: Tensor, reduce: bool) -> Tensor:
    """``A x G`` of a layer whose input rows ``[batch, positions, features]`` and output Jacobians are given.

    ``after``: ``[batch, outputs of the net, positions, outputs of the layer]``.
    """
    middle = output_matrices("classification", model(x), y)
    if reduce:
        rows, after = rows.mean(1, keepdim=True), after.sum(2, keepdim=True)
    a = torch.einsum("nti,ntj->ij", rows, rows) / (rows.shape[0] * rows.shape[1])
    g = torch.einsum("ncto,ncd,ndtp->op", after, middle, after)
    return torch.kron(g.contiguous(), a.contiguous())


@pytest.mark.parametrize("reduce", [False, True])
def test_factors_of_a_convolution_follow_their_definition(reduce: bool) -> None:
    first, tail = nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Linear(27, 3))
    model = randomize(nn.Sequential(first, tail))
    x, y = data(2, 5, 5, outputs=3)
    la = fitted(model, x, y, kfac_approx="reduce" if reduce else "expand")
    rows = nn.functional.unfold(x, 3, stride=2, padding=1).mT
    after = torch.stack([torch.func.jacrev(tail)(h.unsqueeze(0))[0, :, 0] for h in first(x).detach()])
    after = after.flatten(3).transpose(2, 3).detach()
    expected = by_definition(model, x, y, rows, after, reduce).detach()
    own = slot(la, "0.weight")
    torch.testing.assert_close(dense_curvature(la)[own, own], expected, rtol=RTOL, atol=1e-10)


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("role", ["q", "k", "v"])
def test_factors_of_attention_projections_follow_their_definition(role: str, reduce: bool) -> None:
    model = randomize(SelfAttention(False))
    x, y = data(3, 4, outputs=3)
    la = fitted(model, x, y, kfac_approx="reduce" if reduce else "expand")
    attention = model.attention
    place = "qkv".index(role)

    def from_projection(addition: Tensor, row: Tensor) -> Tensor:
        """The network's output with ``addition`` added to one projection of one sample."""
        parts = nn.functional.linear(row, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1)
        heads = [(p + addition if i == place else p).unflatten(-1, (2, 2)).transpose(0, 1) for i, p in enumerate(parts)]
        scores = heads[0] @ heads[1].mT / 2**0.5
        scores = scores.masked_fill(torch.ones(3, 3, dtype=torch.bool).triu(1), -torch.inf)
        mixed = (scores.softmax(-1) @ heads[2]).transpose(0, 1).flatten(1)
        return model.head(attention.out_proj(mixed).mean(0))  # type: ignore[operator]

    zero = torch.zeros(3, 4, dtype=torch.float64)
    torch.testing.assert_close(torch.stack([from_projection(zero, row) for row in x]), model(x))
    after = torch.stack([torch.func.jacrev(from_projection)(zero, row) for row in x]).detach()
    expected = by_definition(model, x, y, x, after, reduce).detach()
    own = slot(la, "attention.in_proj_weight")
    piece = slice(own.start + 16 * place, own.start + 16 * place + 16)
    torch.testing.assert_close(dense_curvature(la)[piece, piece], expected, rtol=RTOL, atol=1e-10)


@pytest.mark.parametrize("kind", ["classification", "regression"])
@pytest.mark.parametrize("curvature", ["full", "kfac"])
def test_the_monte_carlo_fisher_converges_to_the_exact_one(curvature: str, kind: str) -> None:
    """Of so many copies of the data, for each of which it draws anew."""
    model, (x, y) = mlp(), data(4, outputs=3, kind=kind)
    exact = dense_curvature(fitted(model, x, y, kind, curvature=curvature))
    errors = []
    for draws in (1, 200):
        many = x.repeat(draws, 1), y.repeat(draws, *[1] * (y.ndim - 1))
        la = fitted(model, *many, kind, curvature=curvature, fisher_type="mc")
        errors.append(float((dense_curvature(la) / draws - exact).norm() / exact.norm()))
    assert errors[1] < 0.12 < errors[0]


@pytest.mark.parametrize("curvature", ["kfac", "full", "diag"])
@pytest.mark.parametrize("prior", ["single", "per_tensor", "per_group"])
def test_posterior_covariance_is_the_inverse_of_curvature_plus_prior(prior: str, curvature: str) -> None:
    model, (x, y) = cnn(), data(2, 6, 6, outputs=3, kind="regression")
    la = fitted(model, x, y, "regression", curvature=curvature, prior=prior, noise_variance=0.3)
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(len(la.prior_groups), generator=generator, dtype=torch.float64)
    la.set_precision(dict(zip(la.prior_groups.names, (3 * spread).exp().tolist(), strict=True)))
    assert len(la.prior_groups) > (1 if prior != "single" else 0)
    expected, eye = dense_covariance(la), torch.eye(la.tangent.size, dtype=torch.float64)
    torch.testing.assert_close(la.posterior.covariance_product(eye), expected, rtol=1e-8, atol=1e-10)
    root = la.posterior.sample(eye).T
    torch.testing.assert_close(root @ root.T, expected, rtol=1e-8, atol=1e-10)


def test_the_model_is_left_as_it_was() -> None:
    model, (x, y) = cnn(), data(2, 6, 6, outputs=3)
    model.train()
    model[4].eval()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    fitted(model, x, y)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())
