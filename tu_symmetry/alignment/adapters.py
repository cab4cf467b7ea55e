"""Merging low-rank adapters (LoRA): what counts is the product of their factors, not the factors.

An adapter adds ``B A`` to a weight, with ``B`` of shape ``[out, r]`` and ``A`` of shape ``[r, in]``. For any
invertible ``M`` the factors ``B M^-1`` and ``M A`` add the same: the symmetry of an adapter is the whole of GL(r), and
permutations of its ranks are a small part of that. So the average of the factors means nothing. Of an adapter and its
own copy with the ranks turned around it is ``(B + B P^-1)/2 (A + P A)/2``, and with ``M = -1`` it is zero.

Nothing has to be aligned here, since the products themselves can be averaged, whatever the factors::

    sum_k w_k B_k A_k = [w_1 B_1, w_2 B_2, ...] [A_1; A_2; ...]         rank r_1 + r_2 + ..., exact

and where a rank ``r`` is wanted, the best one of that rank (in the Frobenius norm, Eckart and Young) comes from its
singular values. These are found in the small space of the factors: with ``B = Q_B R_B`` and ``A^T = Q_A R_A`` the
singular values of ``B A`` are those of ``R_B R_A^T``, which has as many rows as there are ranks; the product itself, of
the size of a weight, is never formed.

Hidden units need no alignment either where the adapters were trained on one network. Adapters of *different* networks
add to other weights: merge the networks then, with their adapters folded in.

Laws (tests/alignment/test_adapters.py, float64): the merged product is the weighted mean of the products where the rank
allows; it does not change under GL(r) of any adapter; at a lower rank its error is what a dense singular value
decomposition leaves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tu_symmetry.reporting.brief import Brief, span
from tu_symmetry.states import State, SymmetryError, as_given, check_number, require_state

# names of the two factors: PEFT (also with the adapter's name), its embeddings, diffusers, kohya
_PAIRS = (
    (r"\.lora_A(\.[^.]+)?\.weight", r".lora_B\1.weight"),
    (r"\.lora_embedding_A(\.[^.]+)?()$", r".lora_embedding_B\1"),
    (r"\.lora\.down\.weight()", r".lora.up.weight"),
    (r"\.lora_down\.weight()", r".lora_up.weight"),
    (r"_lora\.down\.weight()", r"_lora.up.weight"),
)
_OTHERS = ("lora_magnitude_vector", "dora_scale", "hada_", "lokr_", "lora_mid", "glora", ".diff")


@dataclass(frozen=True, repr=False)
class MergedAdapters(Brief):
    """A merged adapter, and how far it is from the mean of what the adapters add.

    Attributes:
        state: its tensors, under the names of the first adapter. The scale of an adapter (``alpha / rank``) is part of
            the factors: read it with ``alpha = rank``.
        ranks: rank of each layer in it.
        errors: for each layer, Frobenius norm of what is missing, relative to that of the mean; 0 where it is exact.
        factor_errors: the same for the mean of the factors, which is what averaging files does; for comparison. NaN
            where their ranks differ.
    """

    state: State
    ranks: dict[str, int]
    errors: dict[str, float]
    factor_errors: dict[str, float]

    def facts(self) -> list[tuple[str, str]]:
        """Layers, ranks and errors."""
        naive = [e for e in self.factor_errors.values() if not math.isnan(e)]
        return [
            ("layers", str(len(self.ranks))),
            ("rank", span(list(self.ranks.values()))),
            ("relative error", span(list(self.errors.values()))),
            ("of the mean of the factors", span(naive)),
        ]


def is_adapter(names: Sequence[str]) -> bool:
    """Whether tensors of these names are an adapter."""
    return any(re.search(down, name) for name in names for down, _ in _PAIRS)


def factor_names(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """The names of ``A`` and ``B`` of each layer.

    Raises:
        SymmetryError: a factor without its partner, or an adapter that is no product of two factors.
    """
    other = [name for name in names for word in _OTHERS if word in name]
    if other:
        raise SymmetryError(
            f"{other[0]!r} is part of an adapter that is no product of two factors (DoRA, LoHa, LoKr, ...); fold each "
            "adapter into its network, and merge the networks"
        )
    known, found = set(names), {}
    for name in names:
        for down, up in _PAIRS:
            match = re.search(down, name)
            if match is None:
                continue
            partner = name[: match.start()] + match.expand(up) + name[match.end() :]
            if partner not in known:
                raise SymmetryError(f"the adapter has {name!r}, but not {partner!r}")
            found[name[: match.start()]] = (name, partner)
            break
    return found


def merge_adapters(
    adapters: Sequence[Mapping[str, Tensor]],
    *,
    weights: Sequence[float] | None = None,
    scales: Sequence[Mapping[str, float]] | None = None,
    rank: int | None = None,
) -> MergedAdapters:
    """Average what adapters of one network add to its weights.

    A layer that only some adapters have counts as zero in the others, as it does when they are used. Tensors that are
    no factors (biases, trained heads) are averaged over the adapters that have them.

    Args:
        adapters: at least one; their tensors by PEFT's, diffusers' or kohya's names. ``LAYER.alpha`` is read as kohya
            means it: what is added is ``alpha / r`` times the product.
        weights: share of each; equal if left out. They need not sum to one, and one may be negative, to take away what
            an adapter does.
        scales: for each adapter and layer, the factor of the product, where it does not stand in the tensors (PEFT's
            ``lora_alpha / r``); 1 where none is given.
        rank: bound on the rank of each layer of the merged adapter; the sum of the ranks if left out, which is exact.

    Raises:
        TypeError: weights or a rank that are no numbers.
        SymmetryError: tensors that are no adapter, layers of other shapes, NaN or infinite values.
        ValueError: no adapters, weights or scales of another number, a rank below 1.
    """
    held = [dict(require_state(a, f"adapters[{k}]")) for k, a in enumerate(adapters)]
    for k, adapter in enumerate(held):
        for name, tensor in adapter.items():
            _require_finite(tensor, f"adapters[{k}][{name!r}]")
    if not held:
        raise ValueError("there is no adapter to merge: the list is empty")
    for value in () if weights is None else weights:
        check_number(value, "a weight")
    shares = [1 / len(held)] * len(held) if weights is None else [float(w) for w in weights]
    if len(shares) != len(held) or not all(math.isfinite(w) for w in shares):
        raise ValueError(f"weights must be {len(held)} finite numbers, got {shares}")
    if scales is not None and len(scales) != len(held):
        raise ValueError(f"scales must be {len(held)} mappings, one for each adapter, got {len(scales)}")
    if rank is not None:
        check_number(rank, "rank", whole=True)
    if rank is not None and rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    pairs = [factor_names(list(a)) for a in held]
    if not all(pairs):
        k = next(k for k, found in enumerate(pairs) if not found)
        raise SymmetryError(f"adapters[{k}] holds no factors of an adapter, but {sorted(held[k])[:3]}")
    state: State = {}
    ranks: dict[str, int] = {}
    errors: dict[str, float] = {}
    naive: dict[str, float] = {}
    for layer in dict.fromkeys(layer for found in pairs for layer in found):
        inside = [k for k in range(len(held)) if layer in pairs[k]]
        down, up = pairs[inside[0]][layer]
        first = held[inside[0]]
        embedding = "lora_embedding" in down
        factors = [_factors(held[k], *pairs[k][layer], layer, {} if scales is None else scales[k]) for k in inside]
        _require_alike(layer, factors)
        ups = [shares[k] * b for k, (_, b) in zip(inside, factors, strict=True)]
        downs = [a for a, _ in factors]
        made_b, made_a, ranks[layer], errors[layer] = _product(torch.cat(ups, 1), torch.cat(downs, 0), rank)
        naive[layer] = _factor_error(ups, downs, [shares[k] for k in inside])
        shape_a, shape_b = first[down].shape, first[up].shape
        state[down] = made_a.reshape(ranks[layer], *shape_a[1:]).to(first[down])
        state[up] = made_b.reshape(shape_b[0], ranks[layer], *shape_b[2:]).to(first[up])
        if not embedding and f"{layer}.alpha" in first:
            state[f"{layer}.alpha"] = torch.full_like(first[f"{layer}.alpha"], ranks[layer])
    parts = {name for found in pairs for pair in found.values() for name in pair}
    alphas = {f"{layer}.alpha" for layer in ranks}
    for name in dict.fromkeys(n for a in held for n in a if n not in parts and n not in alphas):
        state[name] = _mean([(shares[k], held[k][name]) for k in range(len(held)) if name in held[k]], name)
    for name, tensor in state.items():
        _require_finite(tensor, f"the merged {name!r} (in {tensor.dtype})")
    return MergedAdapters(as_given(adapters[0], state), ranks, errors, naive)


def _require_finite(tensor: Tensor, what: str) -> None:
    if not torch.isfinite(tensor).all():
        raise SymmetryError(f"{what} holds NaN or infinite values; a diverged run or a damaged file may be the cause")


def _factors(
    adapter: Mapping[str, Tensor], down: str, up: str, layer: str, scales: Mapping[str, float]
) -> tuple[Tensor, Tensor]:
    """``A [r, in]`` and ``B [out, r]`` in double precision, with the scale in ``B``."""
    a, b = adapter[down].double(), adapter[up].double()
    if a.ndim < 2 or b.ndim < 2 or a.shape[0] != b.shape[1] or math.prod(b.shape[2:]) != 1:
        raise SymmetryError(
            f"{down!r} of shape {tuple(a.shape)} and {up!r} of shape {tuple(b.shape)} are no factors [r, in, ...] and "
            "[out, r] of one product"
        )
    scale = float(scales.get(layer, 1.0))
    if f"{layer}.alpha" in adapter:
        scale *= float(adapter[f"{layer}.alpha"]) / a.shape[0]
    return a.flatten(1), scale * b.flatten(1)


def _require_alike(layer: str, factors: Sequence[tuple[Tensor, Tensor]]) -> None:
    shapes = {(b.shape[0], a.shape[1]) for a, b in factors}
    if len(shapes) > 1:
        raise SymmetryError(f"the adapters add matrices of different shapes to {layer!r}: {sorted(shapes)}")


def _product(b: Tensor, a: Tensor, rank: int | None) -> tuple[Tensor, Tensor, int, float]:
    """Factors of ``b a`` of at most a rank, balanced, and the relative error.

    >>> one = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    >>> _product(torch.cat([one, one], 1), torch.cat([one.T, one.T], 0), 1)[2:]  # rank 2 by name, 1 in truth
    (1, 0.0)
    """
    q_b, r_b = torch.linalg.qr(b)
    q_a, r_a = torch.linalg.qr(a.T)
    u, s, vh = torch.linalg.svd(r_b @ r_a.T)
    kept = min(len(s), b.shape[1] if rank is None else rank)
    total, rest = float(s.square().sum().sqrt()), float(s[kept:].square().sum().sqrt())
    floor = torch.finfo(torch.float64).eps * len(s) * max(total, torch.finfo(torch.float64).tiny)
    root = s[:kept].sqrt()
    return q_b @ u[:, :kept] * root, (root[:, None] * vh[:kept]) @ q_a.T, kept, 0.0 if rest <= floor else rest / total


def _factor_error(ups: Sequence[Tensor], downs: Sequence[Tensor], shares: Sequence[float]) -> float:
    """Relative error of the product of averaged factors, in the small space too."""
    if len({a.shape for a in downs}) > 1:
        return math.nan
    b, a = sum(ups), sum(w * a for w, a in zip(shares, downs, strict=True))
    assert isinstance(a, Tensor) and isinstance(b, Tensor)
    mean = (torch.cat(list(ups), 1), torch.cat(list(downs), 0))
    difference = (torch.cat([*ups, -b], 1), torch.cat([*downs, a], 0))
    norms = []
    for left, right in (difference, mean):
        norms.append(float((torch.linalg.qr(left)[1] @ torch.linalg.qr(right.T)[1].T).norm()))
    return norms[0] / norms[1] if norms[1] else 0.0


def _mean(parts: Sequence[tuple[float, Tensor]], name: str) -> Tensor:
    if len({t.shape for _, t in parts}) > 1:
        raise SymmetryError(f"the adapters hold {name!r} in different shapes")
    first, total = parts[0][1], sum(w for w, _ in parts)
    if not first.is_floating_point() or total == 0:
        return first.clone()
    return sum((w / total * t.double() for w, t in parts), torch.zeros((), dtype=torch.float64, device="cpu")).to(first)
