"""Curvature against dense Gauss-Newton matrices where it is exact, and by its definition where it is not."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from backpack import backpack as extensions
from backpack import extend
from backpack.extensions import DiagGGNExact, SqrtGGNExact
from laplace_oracles import (
    data,
    dense_covariance,
    dense_curvature,
    exact_ggn,
    fitted,
    jacobian,
    mlp,
    output_matrices,
    posterior_covariance,
    randomize,
    slot,
)
from torch import Tensor, nn

from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.laplace.report import ReadElsewhereWarning

RTOL = 1e-9


def blocks_of(exact: Tensor, la: LinearizedLaplace) -> Tensor:
    """An exact matrix, with zeros where the approximation has no block."""
    kept = torch.zeros_like(exact)
    for block in la.posterior.blocks:
        own = slice(block.start, block.stop)
        kept[own, own] = exact[own, own]
    return kept


def cnn() -> nn.Module:
    return randomize(
        nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 2, groups=2, dilation=2, padding=1, padding_mode="circular"),
            nn.GroupNorm(2, 4),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(36, 3),
        )
    )


class Tokens(nn.Module):
    """Embedding, layer normalization and a linear layer over tokens, mean-pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4, padding_idx=0)
        self.norm = nn.LayerNorm(4)
        self.mix = nn.Linear(4, 5)
        self.scale = nn.RMSNorm(5)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.scale(self.mix(self.norm(self.table(tokens))))).mean(1))


class SelfAttention(nn.Module):
    def __init__(self, separate: bool, tokens: int = 3) -> None:
        super().__init__()
        sizes = {"kdim": 3, "vdim": 5} if separate else {}
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **sizes)
        self.separate = separate
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (x[..., :4], x[..., :3], x[..., :5]) if self.separate else (x, x, x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.head(self.attention(q, k, v, attn_mask=mask, need_weights=False)[0].mean(1))


# ---------------------------------------------------------------------- exact kinds


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, lambda: data(4, outputs=3)[0]),
    "cnn": (cnn, lambda: data(2, 6, 6, outputs=3)[0]),
    "tokens": (
        lambda: randomize(Tokens()),
        lambda: torch.randint(0, 6, (9, 4), generator=torch.Generator().manual_seed(3)),
    ),
    "attention": (lambda: randomize(SelfAttention(False)), lambda: data(3, 4, outputs=3)[0]),
}


@pytest.mark.parametrize("kind", ["classification", "regression"])
@pytest.mark.parametrize("name", list(NETWORKS))
def test_full_is_the_generalized_gauss_newton_matrix(name: str, kind: str) -> None:
    build, inputs = NETWORKS[name]
    model, x = build(), inputs()
    y = data(1, outputs=3, kind=kind)[1]
    la = fitted(model, x, y, kind, curvature="full")
    exact = exact_ggn(model, la.tangent.names, x, y, kind)
    torch.testing.assert_close(dense_curvature(la), exact, rtol=RTOL, atol=1e-9)


@pytest.mark.parametrize("fisher_type", ["type-2", "empirical"])
@pytest.mark.parametrize("name", list(NETWORKS))
def test_diag_is_the_diagonal(name: str, fisher_type: str) -> None:
    build, inputs = NETWORKS[name]
    model, x, y = build(), inputs(), data(1, outputs=3)[1]
    la = fitted(model, x, y, curvature="diag", fisher_type=fisher_type)
    exact = exact_ggn(model, la.tangent.names, x, y, "classification", fisher_type)
    torch.testing.assert_close(dense_curvature(la), torch.diag(exact.diagonal()), rtol=RTOL, atol=1e-10)


def test_last_layer_is_the_block_of_the_last_layer() -> None:
    model, (x, y) = mlp(), data(4, outputs=3)
    la = fitted(model, x, y, curvature="last_layer")
    assert la.tangent.names == ("2.weight", "2.bias")
    exact = exact_ggn(model, la.tangent.names, x, y, "classification")
    torch.testing.assert_close(dense_curvature(la), exact, rtol=RTOL, atol=1e-10)


def test_a_subset_of_the_parameters_is_that_block_of_the_full_matrix() -> None:
    model, (x, y) = mlp(), data(4, outputs=3)
    subset = fitted(model, x, y, curvature="full", parameters=["2.bias", "0"])
    assert subset.tangent.names == ("0.weight", "0.bias", "2.bias")
    everything = fitted(model, x, y, curvature="full")
    rows = torch.cat([torch.arange(slot(everything, n).start, slot(everything, n).stop) for n in subset.tangent.names])
    expected = dense_curvature(everything)[rows][:, rows]
    torch.testing.assert_close(dense_curvature(subset), expected, rtol=RTOL, atol=1e-10)


@pytest.mark.parametrize("curvature", ["full", "diag", "kfac"])
def test_frozen_parameters_stay_outside_and_change_nothing_else(curvature: str) -> None:
    """Weight frozen and bias not, a whole layer frozen in the middle: the others' blocks are those of the whole."""
    x, y = data(2, 6, 6, outputs=3)
    whole = fitted(cnn(), x, y, curvature=curvature)
    model = cnn()
    frozen = {"0.weight", "1.bias", "3.weight", "3.bias"}
    for name, p in model.named_parameters():
        p.requires_grad_(name not in frozen)
    part = fitted(model, x, y, curvature=curvature)
    assert set(part.tangent.names) == set(whole.tangent.names) - frozen
    for name in part.tangent.names:
        found = dense_curvature(part)[slot(part, name), slot(part, name)]
        expected = dense_curvature(whole)[slot(whole, name), slot(whole, name)]
        torch.testing.assert_close(found, expected, rtol=RTOL, atol=1e-12)


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


# ---------------------------------------------------------------------- where Kronecker factors are exact


@pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])
def test_kfac_of_one_sample_is_exact(kfac_approx: str) -> None:
    model, (x, y) = mlp(), data(4, outputs=3, samples=1)
    la = fitted(model, x, y, kfac_approx=kfac_approx)
    exact = exact_ggn(model, la.tangent.names, x, y, "classification")
    torch.testing.assert_close(dense_curvature(la), blocks_of(exact, la), rtol=RTOL, atol=1e-10)


@pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])
def test_kfac_of_a_linear_network_is_exact(kfac_approx: str) -> None:
    """Gaussian likelihood: gradients of the outputs do not depend on the data."""
    model = randomize(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3, bias=False), nn.Linear(3, 2)))
    x, y = data(4, outputs=2, kind="regression")
    la = fitted(model, x, y, "regression", kfac_approx=kfac_approx)
    exact = exact_ggn(model, la.tangent.names, x, y, "regression")
    torch.testing.assert_close(dense_curvature(la), blocks_of(exact, la), rtol=RTOL, atol=1e-10)


class Pooled(nn.Module):
    """A linear network over positions that adds up (or averages) them."""

    def __init__(self, convolution: bool) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, 4, 2) if convolution else nn.Linear(3, 4)
        self.convolution = convolution
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.mT).mT if self.convolution else self.first(x)
        return self.head(x.sum(1))


@pytest.mark.parametrize("convolution", [False, True])
def test_reduce_is_exact_for_linear_networks_that_pool(convolution: bool) -> None:
    """Proposition 2 of arXiv 2311.00636; expand is not exact there."""
    model = randomize(Pooled(convolution))
    x, y = data(5, 3, outputs=2, kind="regression")
    reduce = fitted(model, x, y, "regression", kfac_approx="reduce")
    exact = exact_ggn(model, reduce.tangent.names, x, y, "regression")
    torch.testing.assert_close(dense_curvature(reduce), blocks_of(exact, reduce), rtol=RTOL, atol=1e-9)
    expand = fitted(model, x, y, "regression", kfac_approx="expand")
    own = slot(expand, "first.weight")
    assert (dense_curvature(expand) - exact)[own, own].norm() > 0.1 * exact[own, own].norm()


class PerPosition(nn.Module):
    """A linear network whose outputs are all its positions' outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).flatten(1)


def test_expand_is_exact_for_linear_networks_with_a_loss_at_every_position() -> None:
    """Proposition 1 of arXiv 2311.00636; reduce is not exact there."""
    model = randomize(PerPosition())
    x, y = data(5, 3, outputs=10, kind="regression")
    expand = fitted(model, x, y, "regression", kfac_approx="expand")
    exact = exact_ggn(model, expand.tangent.names, x, y, "regression")
    torch.testing.assert_close(dense_curvature(expand), blocks_of(exact, expand), rtol=RTOL, atol=1e-9)
    reduce = fitted(model, x, y, "regression", kfac_approx="reduce")
    own = slot(reduce, "first.weight")
    assert (dense_curvature(reduce) - exact)[own, own].norm() > 0.1 * exact[own, own].norm()


CONVOLUTIONS = [
    (nn.Conv1d(2, 4, 5), (2, 5)),
    (nn.Conv2d(2, 4, 3), (2, 3, 3)),
    (nn.Conv2d(4, 6, (3, 2), groups=2), (4, 3, 2)),
    (nn.Conv2d(3, 6, 3, groups=3, bias=False), (3, 3, 3)),
    (nn.Conv2d(2, 4, 3, stride=4, padding=1), (2, 3, 3)),
    (nn.Conv2d(2, 4, 2, dilation=2), (2, 3, 3)),
    (nn.Conv3d(2, 4, 2), (2, 2, 2, 2)),
]


@pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])
@pytest.mark.parametrize(("convolution", "shape"), CONVOLUTIONS)
def test_convolutions_with_one_position_are_exact(
    convolution: nn.Module, shape: tuple[int, ...], kfac_approx: str
) -> None:
    """Every group of a grouped convolution has its own factors; blocks between groups are dropped."""
    width = convolution.weight.shape[0]  # type: ignore[union-attr,index]
    model = randomize(nn.Sequential(convolution, nn.Tanh(), nn.Flatten(), nn.Linear(int(width), 3)))  # type: ignore
    x, y = data(*shape, outputs=3, samples=1)
    la = fitted(model, x, y, kfac_approx=kfac_approx)
    exact = exact_ggn(model, la.tangent.names, x, y, "classification")
    found, own = dense_curvature(la), slot(la, "0.weight")
    size = (own.stop - own.start) // convolution.groups  # type: ignore[operator]
    for start in range(own.start, own.stop, int(size)):
        piece = slice(start, start + int(size))
        torch.testing.assert_close(found[piece, piece], exact[piece, piece], rtol=RTOL, atol=1e-10)
    for name in set(la.tangent.names) - {"0.weight"}:
        torch.testing.assert_close(
            found[slot(la, name), slot(la, name)], exact[slot(la, name), slot(la, name)], rtol=RTOL, atol=1e-10
        )


@pytest.mark.parametrize("separate", [False, True])
def test_attention_projections_of_one_token_are_exact(separate: bool) -> None:
    """With one token no position shares a weight (and query and key have no effect)."""
    model = randomize(SelfAttention(separate))
    x, y = data(1, 5 if separate else 4, outputs=3, samples=1)
    la = fitted(model, x, y)
    exact = exact_ggn(model, la.tangent.names, x, y, "classification")
    torch.testing.assert_close(dense_curvature(la), blocks_of(exact, la), rtol=RTOL, atol=1e-10)
    assert float(exact[slot(la, "attention.out_proj.weight")].abs().max()) > 1e-3


# ---------------------------------------------------------------------- Kronecker factors by their definition


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


@pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])
@pytest.mark.parametrize("name", list(NETWORKS))
def test_blocks_of_biases_normalizations_and_embeddings_are_exact(name: str, kfac_approx: str) -> None:
    build, inputs = NETWORKS[name]
    model, x, y = build(), inputs(), data(1, outputs=3)[1]
    la = fitted(model, x, y, kfac_approx=kfac_approx)
    exact, found = exact_ggn(model, la.tangent.names, x, y, "classification"), dense_curvature(la)
    compared = 0
    for block in la.posterior.blocks:
        own = slice(block.start, block.stop)
        if block.kind == "dense":
            torch.testing.assert_close(found[own, own], exact[own, own], rtol=RTOL, atol=1e-10)
        elif block.kind == "diagonal":
            torch.testing.assert_close(found[own, own], torch.diag(exact[own, own].diagonal()), rtol=RTOL, atol=1e-10)
        compared += block.kind != "kronecker"
    assert compared >= 2


def test_shared_biases_take_the_gradient_factor() -> None:
    """``bias='shared'``: ``sum g_t g_t^T`` over positions, as laplace-torch has it."""
    model = randomize(PerPosition())
    x, y = data(5, 3, outputs=10, kind="regression")
    la = fitted(model, x, y, "regression", bias="shared")
    weight = model.second.weight.detach()
    expected = weight.T @ weight * 9 * 5
    own = slot(la, "first.bias")
    torch.testing.assert_close(dense_curvature(la)[own, own], expected, rtol=RTOL, atol=1e-10)


# ---------------------------------------------------------------------- Monte-Carlo Fisher


@pytest.mark.parametrize("kind", ["classification", "regression"])
@pytest.mark.parametrize("curvature", ["full", "kfac"])
def test_the_monte_carlo_fisher_converges_to_the_exact_one(curvature: str, kind: str) -> None:
    model, (x, y) = mlp(), data(4, outputs=3, kind=kind)
    exact = dense_curvature(fitted(model, x, y, kind, curvature=curvature))
    errors = []
    for draws in (4, 200):
        la = fitted(model, x, y, kind, curvature=curvature, fisher_type="mc", mc_samples=draws,
                    generator=torch.Generator().manual_seed(0))  # fmt: skip
        errors.append(float((dense_curvature(la) - exact).norm() / exact.norm()))
    assert errors[1] < 0.12 < errors[0] < 1.0


# ---------------------------------------------------------------------- shared weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode, self.head = nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 3)
        self.decode.weight = nn.Parameter(self.encode.weight.detach().T.clone())
        self.again = nn.Linear(4, 5)
        self.again.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.decode(torch.tanh(self.encode(x) + self.again(x * x)))))


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


@pytest.mark.parametrize("dense_limit", [4096, 16])
@pytest.mark.parametrize(("build", "used"), [(Tied, ["encode.weight"]), (CalledTwice, ["layer.weight", "layer.bias"])])
def test_weights_used_twice_have_exact_blocks_beside_factors(
    build: type[nn.Module], used: list[str], dense_limit: int
) -> None:
    """And their diagonal, where they are long; the other parameters have factors as ever."""
    model, (x, y) = randomize(build()), data(4, outputs=3)
    with pytest.warns(ReadElsewhereWarning, match=f"{used[0]}.*tied, or called several times"):
        la = fitted(model, x, y, dense_limit=dense_limit)
    assert [*la.whole] == used
    exact, found = exact_ggn(model, la.tangent.names, x, y, "classification"), dense_curvature(la)
    for name in used:
        own = slot(la, name)
        block = exact[own, own]
        block = block if len(block) <= dense_limit else block.diagonal().diag()
        torch.testing.assert_close(found[own, own], block, rtol=RTOL, atol=1e-10)
    head = fitted(model, x, y, parameters=["head"], dense_limit=dense_limit)
    for leaf in ("head.weight", "head.bias"):
        own, alone = slot(la, leaf), slot(head, leaf)
        torch.testing.assert_close(found[own, own], dense_curvature(head)[alone, alone], rtol=RTOL, atol=1e-10)
    jac = jacobian(model, la.tangent.names, x)
    covariance = torch.einsum("nci,ij,ndj->ncd", jac, dense_covariance(la), jac)
    torch.testing.assert_close(la.function_covariance(x)[1], covariance, rtol=1e-8, atol=1e-10)


# ---------------------------------------------------------------------- the Gaussian that the blocks make


@pytest.mark.parametrize("curvature", ["kfac", "full", "diag"])
@pytest.mark.parametrize("prior", ["single", "per_tensor", "per_group"])
def test_posterior_covariance_is_the_inverse_of_curvature_plus_prior(prior: str, curvature: str) -> None:
    model, (x, y) = cnn(), data(2, 6, 6, outputs=3, kind="regression")
    la = fitted(model, x, y, "regression", curvature=curvature, prior=prior, noise_variance=0.3)
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(len(la.prior_groups), generator=generator, dtype=torch.float64)
    la.set_precision(dict(zip(la.prior_groups.names, (3 * spread).exp().tolist(), strict=True)))
    assert len(la.prior_groups) > (1 if prior != "single" else 0)
    expected = dense_covariance(la)
    torch.testing.assert_close(posterior_covariance(la.posterior), expected, rtol=1e-8, atol=1e-10)
    root = la.posterior.sample(torch.eye(la.tangent.size, dtype=torch.float64)).T
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
