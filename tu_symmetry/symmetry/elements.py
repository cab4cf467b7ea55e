"""Group elements: drawing, composing, inverting and counting permutations; drawing scales and signs.

A permutation is a ``dict`` from group name to a LongTensor ``[*blocks, size]``; it acts by indexing,
``new[j] = old[p[j]]``. In a nested group ``parent/own`` the unit ``j`` of the block ``b`` comes from the unit
``p_own[b, j]`` of the block ``p_parent[b]``; the names alone say how groups nest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.randomness import own_generator
from tu_symmetry.transfer import moved as on_device

if TYPE_CHECKING:
    from tu_symmetry.symmetry.graph import SymmetryGraph
    from tu_symmetry.symmetry.groups import LinearGroup

Permutation = dict[str, Tensor]
LogScale = dict[str, Tensor]
Signs = dict[str, Tensor]
Maps = dict[str, Tensor]


class SignedPermutation(NamedTuple):
    """A permutation and signs, of which the permutation acts first."""

    permutation: Permutation
    signs: Signs


def identity_permutation(graph: SymmetryGraph) -> Permutation:
    """The identity permutation: name to ``arange(size)``, repeated for each block."""
    return {g.name: torch.arange(g.size, device="cpu").expand(g.shape).clone() for g in graph.permutations}


def identity_element(graph: SymmetryGraph) -> SignedPermutation:
    """The identity permutation, and no signs."""
    return SignedPermutation(identity_permutation(graph), {})


def random_permutation(graph: SymmetryGraph, *, generator: torch.Generator | None = None) -> Permutation:
    """A uniformly random permutation for every group; name to LongTensor ``[*blocks, size]`` on the CPU."""
    source = own_generator(generator)
    return {
        g.name: torch.rand(g.shape, generator=source, dtype=torch.float64, device=source.device).argsort(dim=-1).cpu()
        for g in graph.permutations
    }


def random_scale(graph: SymmetryGraph, *, generator: torch.Generator | None = None, std: float = 1.0) -> LogScale:
    """Independent normal log-factors for every scale and normalization group; name to float64 ``[size]`` on the CPU."""
    source = own_generator(generator)
    return {
        g.name: std * torch.randn(g.size, generator=source, dtype=torch.float64, device=source.device).cpu()
        for g in (*graph.scales, *graph.normalizations)
    }


def random_signs(graph: SymmetryGraph, *, generator: torch.Generator | None = None) -> Signs:
    """Independent signs for every sign group, 1 or -1 with equal chance; name to int64 ``[size]`` on the CPU."""
    source = own_generator(generator)
    return {
        g.name: 2 * torch.randint(2, (g.size,), generator=source, device=source.device).cpu() - 1 for g in graph.signs
    }


def random_linear(
    graph: SymmetryGraph, *, generator: torch.Generator | None = None, std: float = 0.3, folded: bool = False
) -> Maps:
    """Random matrices for every linear group; name to float64 ``[*blocks, size, size]`` on the CPU.

    Groups that act only where norms are folded (:func:`~tu_symmetry.fold_norms`) are among them if ``folded``.

    They are orthogonal from left and right, with singular values between whose logarithms have the deviation ``std``,
    all 1 where a group is orthogonal; or rotations of pairs, times a number whose logarithm has it.
    """
    source = own_generator(generator)
    return {g.name: random_matrices(g, source, std=std) for g in graph.linears if folded or not g.constant}


def random_matrices(group: LinearGroup, generator: torch.Generator, *, std: float = 0.3) -> Tensor:
    """Random elements of one linear group, see :func:`random_linear`."""

    def drawn(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device).cpu()

    if group.subgroup == "complex":
        angle, size = 4 * drawn(group.blocks), torch.exp(std * drawn(group.blocks))
        a, b = size * angle.cos(), size * angle.sin()
        return torch.stack([torch.stack([a, -b], -1), torch.stack([b, a], -1)], -2)
    if group.subgroup == "centered":
        apart = apart_from_ones(group.size)
        inner = torch.linalg.qr(drawn((*group.blocks, group.size - 1, group.size - 1))).Q
        sign = 1 - 2 * (drawn((*group.blocks, 1, 1)) < 0).to(inner.dtype)
        return apart @ inner @ apart.mT + sign / group.size
    left, right = (torch.linalg.qr(drawn(group.shape)).Q for _ in range(2))
    spread = torch.exp((0.0 if group.orthogonal else std) * drawn(group.shape[:-1]))
    return left * spread.unsqueeze(-2) @ right


def closest_matrices(group: LinearGroup, gram: Tensor) -> Tensor:
    """The elements of one group, of unit scale, whose inner product with matrices ``[*blocks, size, size]`` is largest.

    Orthogonal Procrustes (Schonemann 1966), for pairs of units over rotations.
    """
    if group.subgroup == "complex":
        a, b = gram[..., 0, 0] + gram[..., 1, 1], gram[..., 1, 0] - gram[..., 0, 1]
        size = torch.hypot(a, b)
        a, b = (torch.where(size > 0, part / size, start) for part, start in ((a, 1.0), (b, 0.0)))
        return torch.stack([torch.stack([a, -b], -1), torch.stack([b, a], -1)], -2)
    apart = apart_from_ones(group.size) if group.subgroup == "centered" else None
    left, _, right = torch.linalg.svd(gram if apart is None else apart.mT @ gram @ apart)
    if apart is None:
        return left @ right
    sign = 1 - 2 * (gram.sum((-2, -1), keepdim=True) < 0).to(gram.dtype)
    return apart @ left @ right @ apart.mT + sign / group.size


def apart_from_ones(size: int) -> Tensor:
    """An orthonormal basis of the vectors whose entries add up to zero, float64 ``[size, size - 1]``."""
    columns = torch.eye(size, dtype=torch.float64, device="cpu")
    columns[:, 0] = 1.0
    return torch.linalg.qr(columns).Q[:, 1:]


def parent_of(name: str, permutation: Mapping[str, Tensor]) -> str | None:
    """Name of the nearest group in ``permutation`` that ``name`` is nested in, or None."""
    parent = name.rpartition("/")[0]
    while parent and parent not in permutation:
        parent = parent.rpartition("/")[0]
    return parent or None


def check_permutation(permutation: Mapping[str, Tensor]) -> None:
    """Raise unless every value is an integer tensor whose last axis holds each of ``0..size-1`` once."""
    check_elements(permutation, "permutation")
    for name, p in permutation.items():
        if p.dtype not in (torch.int64, torch.int32) or p.ndim == 0:
            raise SymmetryError(f"permutation[{name!r}] must be an integer tensor, got {p.dtype} of {tuple(p.shape)}")
    on_host = on_device(list(permutation.values()), torch.device("cpu"))
    for name, p in zip(permutation, on_host, strict=True):
        if not torch.equal(p.sort(dim=-1).values, torch.arange(p.shape[-1], device="cpu").expand(p.shape).to(p)):
            raise SymmetryError(f"permutation[{name!r}] is no permutation: an index is missing or repeated")


def check_elements(element: Mapping[str, Tensor], what: str) -> None:
    """Raise unless an element is a mapping of group names to tensors of real numbers or integers."""
    if not isinstance(element, Mapping):
        raise SymmetryError(f"{what} is a {type(element).__name__}, not a mapping of group names to tensors")
    for name, value in element.items():
        if not isinstance(value, Tensor) or value.is_complex() or value.dtype == torch.bool:
            kind = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise SymmetryError(f"{what}[{name!r}] is {kind}; pass a tensor, such as torch.as_tensor(...) makes one")


def block_origin(name: str, permutation: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """For each block of a group the block that it comes from: one index tensor ``[*blocks]`` for each level."""
    blocks = permutation[name].shape[:-1]
    parent = parent_of(name, permutation)
    moved = () if parent is None else (*block_origin(parent, permutation), permutation[parent])
    still = blocks[len(moved) :]  # blocks that no group moves stay where they are
    moved = tuple(m.reshape(*m.shape, *[1] * (len(moved) + len(still) - m.ndim)) for m in moved)
    grids = (torch.arange(b, device="cpu").reshape(-1, *[1] * (len(still) - 1 - k)) for k, b in enumerate(still))
    return tuple(torch.broadcast_to(origin, blocks) for origin in (*moved, *grids))


def compose(p: Mapping[str, Tensor], q: Mapping[str, Tensor]) -> Permutation:
    """Element that acts as ``q`` first and as ``p`` then; both are of the same groups."""
    check_permutation(p)
    check_permutation(q)
    if p.keys() != q.keys() or any(p[n].shape != q[n].shape for n in p):
        raise SymmetryError(f"cannot compose elements of different groups: {sorted(p)} and {sorted(q)}")
    return {name: q[name][(*(o.unsqueeze(-1) for o in block_origin(name, p)), p[name])] for name in p}


def invert(p: Mapping[str, Tensor]) -> Permutation:
    """The inverse permutation; composed with ``p``, in either order, it is the identity."""
    check_permutation(p)
    inverse: Permutation = {}
    for name in sorted(p, key=lambda n: n.count("/")):  # parents first
        own = p[name].argsort(dim=-1)
        if parent_of(name, p) is not None:  # the block b of the inverse undoes the block that came from b
            own = own[block_origin(name, inverse | {name: own})]
        inverse[name] = own
    return {name: inverse[name] for name in p}


def transposition_count(p: Mapping[str, Tensor] | Tensor) -> int:
    """Number of transpositions (NoT): how many pairwise swaps of units make up the permutation.

    For one permutation of n units this is n minus its number of cycles (arXiv 2401.00611, section 2), and groups add
    up. In a nested group each cycle of blocks contributes its length minus one, and the NoT of the product of the inner
    permutations along it: the fewest swaps when as few blocks as possible are swapped first.

    Args:
        p: a permutation, or one LongTensor ``[..., n]`` whose leading axes are independent permutations.
    """
    check_permutation({"p": p} if isinstance(p, Tensor) else p)
    if isinstance(p, Tensor):
        return sum(len(row) - len(_cycles(row)) for row in p.reshape(-1, p.shape[-1]).tolist())
    total = 0
    for name, own in p.items():
        if parent_of(name, p) is None:
            total += transposition_count(own)
            continue
        rows = own.reshape(-1, own.shape[-1])
        numbers = torch.arange(rows.shape[0], device="cpu").reshape(own.shape[:-1])
        for cycle in _cycles(numbers[block_origin(name, p)].flatten().tolist()):
            product = torch.arange(own.shape[-1], device="cpu")
            for block in cycle:  # follow units from block to block until the cycle closes
                product = rows[block][product]
            total += transposition_count(product)
    return total


def _cycles(p: list[int]) -> list[list[int]]:
    cycles, seen = [], set[int]()
    for start in range(len(p)):
        cycle, j = [], start
        while j not in seen:
            seen.add(j)
            cycle.append(j)
            j = p[j]
        if cycle:
            cycles.append(cycle)
    return cycles
