"""How group elements act on weights, and on everything that is shaped like weights (gradients, averages).

Functions take a state dict (or a stack of states with leading sample axes) and return a new one of the same type.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tu_symmetry.files import Views, layouts_of
from tu_symmetry.states import SymmetryError, as_given
from tu_symmetry.symmetry.elements import (
    LogScale,
    Maps,
    SignedPermutation,
    Signs,
    block_origin,
    check_elements,
    check_permutation,
    compose,
    invert,
    parent_of,
)
from tu_symmetry.symmetry.groups import LinearGroup, PermutationMember
from tu_symmetry.transfer import moved as on_device
from tu_symmetry.transfer import numbers

if TYPE_CHECKING:
    from tu_symmetry.symmetry.graph import SymmetryGraph


def apply_permutation(
    graph: SymmetryGraph, permutation: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Permute the hidden units of a network: ``new[j] = old[p[j]]`` on every axis that a group moves.

    Args:
        graph: the architecture's symmetry graph (verified on first use).
        permutation: group name to LongTensor ``[*blocks, size]``; groups that are left out stay as they are.
        state: state dict, or a stack of states with leading sample axes; every sample is permuted alike. Tensors that
            no group moves are shared with what is returned.
    """
    graph.require_verified()
    graph.check_state(state, finite=False)
    return permute_tensors(graph, permutation, state)


def permute_tensors(
    graph: SymmetryGraph, permutation: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """As :func:`apply_permutation`, for any subset of the tensors and without checks of their names."""
    moved = as_given(tensors, tensors)
    for name, steps in _steps(graph, permutation, tensors).items():
        moved[name] = _stepped(tensors[name], steps)
    return moved


def permute_tensors_(graph: SymmetryGraph, permutation: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """As :func:`permute_tensors`, in place and piece by piece; names that hold the same tensor object move once."""
    once = {id(tensors[name]): (tensors[name], steps) for name, steps in _steps(graph, permutation, tensors).items()}
    for tensor, steps in once.values():
        for member, p, ndim in steps:
            held = {tensor.ndim - ndim + k for k in (member.axis, member.within_axis) if k is not None}
            for piece, _ in _pieces(tensor, min(set(range(tensor.ndim)) - held, default=None)):
                piece.copy_(permute_axis(piece, member, p, ndim))


_PIECE = 2**22  # entries


def _pieces(tensor: Tensor, axis: int | None) -> Iterator[tuple[Tensor, slice]]:
    """Views of a tensor, cut along an axis, of few enough entries that working on one takes little memory."""
    length = 1 if axis is None else tensor.shape[axis]
    step = max(1, min(length, _PIECE * length // max(tensor.numel(), 1)))
    for start in range(0, length, step):
        rows = slice(start, min(start + step, length))
        yield tensor if axis is None else tensor.narrow(axis, start, rows.stop - start), rows


class Permuted(Views):
    """Tensors of a network with permuted units, each permuted when it is asked for (and read from a file, say)."""

    def __init__(self, graph: SymmetryGraph, permutation: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        self._held = tensors
        self.as_given = getattr(tensors, "as_given", tensors)  # of whose type states made of this are
        self._steps = _steps(graph, permutation, tensors, read=False)

    @property
    def layouts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor, which no permutation changes."""
        return layouts_of(self._held)

    def __getitem__(self, name: str) -> Tensor:
        return _stepped(self._held[name], self._steps.get(name, ()))


Step = tuple[PermutationMember, Tensor, int]  # see permute_axis


def _stepped(tensor: Tensor, steps: Sequence[Step]) -> Tensor:
    for step in steps:
        tensor = permute_axis(tensor, *step)
    return tensor


def _steps(
    graph: SymmetryGraph, permutation: Mapping[str, Tensor], tensors: Mapping[str, Tensor], *, read: bool = True
) -> dict[str, list[Step]]:
    """For each name among the tensors the axes that have to be permuted, in order, and how."""
    check_permutation(permutation)
    known = {g.name: g for g in graph.permutations}
    for name, p in permutation.items():
        if name not in known:
            raise graph.unknown_group(name, known)
        if tuple(p.shape) != known[name].shape:
            raise SymmetryError(f"permutation[{name!r}] has shape {tuple(p.shape)}, the group {known[name].shape}")
    # Nested groups first: a permutation names the units of a block by the block's old content, then blocks move whole.
    found = []
    for group in reversed(graph.permutations):
        if group.name not in permutation:
            continue
        p = permutation[group.name]
        if parent_of(group.name, permutation) is not None:
            by_old_block = torch.empty_like(p)
            by_old_block[block_origin(group.name, permutation)] = p
            p = by_old_block
        found += [(member, p) for member in group.members]
    first = next(iter(tensors.values()), None) if read else None
    if first is not None:
        there = iter(on_device([t for m, p in found for t in (m.index, m.within, p) if t is not None], first.device))
        found = [
            (replace(m, index=next(there), within=m.within if m.within is None else next(there)), next(there))
            for m, _ in found
        ]
    steps: dict[str, list[Step]] = {}
    for member, p in found:
        for name in graph.aliases[member.parameter]:
            if not read or name in tensors:
                steps.setdefault(name, []).append((member, p, len(graph.shapes[member.parameter])))
    return steps


def permute_axis(tensor: Tensor, member: PermutationMember, p: Tensor, ndim: int) -> Tensor:
    """Permute one tensor along one member's axis; ``ndim`` is its number of axes without leading sample axes."""
    axis = tensor.ndim - ndim + member.axis
    index, p = member.index.to(tensor.device), p.to(tensor.device)
    size, copies = index.shape[-2:]
    moved = torch.gather(index, -2, p.unsqueeze(-1).expand(index.shape))
    source = torch.arange(tensor.shape[axis], device=tensor.device)
    if member.within_axis is None:
        source[index.reshape(-1)] = moved.reshape(-1)
        return tensor.index_select(axis, source)
    assert member.within is not None
    rows_axis = tensor.ndim - ndim + member.within_axis
    rows = member.within.to(tensor.device)
    blocks = rows.reshape(-1, rows.shape[-1])
    targets = index.reshape(len(blocks), size * copies) if member.index.ndim > 2 else index.reshape(1, -1)
    grid = source.repeat(tensor.shape[rows_axis], 1)
    for block_rows, target, origin in zip(blocks, targets, moved.reshape(targets.shape), strict=True):
        grid[block_rows.unsqueeze(-1), target] = origin
    shape = [1] * tensor.ndim
    shape[rows_axis], shape[axis] = grid.shape
    grid = (grid if rows_axis < axis else grid.T).reshape(shape)
    return torch.take_along_dim(tensor, grid, dim=axis)


def apply_scale(graph: SymmetryGraph, log_scale: LogScale, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Multiply weights by positive factors that leave the function unchanged (up to epsilon, if a group is not exact).

    Args:
        graph: the architecture's symmetry graph (verified on first use).
        log_scale: group name to natural-log factors ``[size]``, for scale and normalization groups; others stay.
        state: state dict, or a stack of states with leading sample axes; every sample is scaled alike.

    Raises:
        SymmetryError: what does not belong to the graph, NaN, or weights that leave the range of their dtype.
    """
    graph.require_verified()
    graph.check_state(state, finite=False)
    return scale_tensors(graph, log_scale, state)


def scale_tensors(
    graph: SymmetryGraph, log_scale: LogScale, tensors: Mapping[str, Tensor], *, power: float = 1.0
) -> dict[str, Tensor]:
    """As :func:`apply_scale`, for any subset of the tensors; factors are raised to ``power``.

    ``power=-1`` moves gradients and momenta (they scale inversely to the weights), ``power=-2`` their squares.
    """
    scaled = as_given(tensors, tensors)
    for name, logs in _log_factors(graph, log_scale, tensors, power):
        if power == 1.0:
            _require_range(scaled[name], logs, name)
        scaled[name] = scaled[name].clone()
        _multiply_(scaled[name], logs)
    return scaled


def apply_signs(graph: SymmetryGraph, signs: Signs, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Turn the signs of weights that belong to hidden units, which leaves the function unchanged, to the last bit.

    Law: signs undo themselves.

    Args:
        graph: the architecture's symmetry graph (verified on first use).
        signs: group name to ``[size]`` of 1 and -1, for sign groups; others stay.
        state: state dict, or a stack of states with leading sample axes; every sample is turned alike.

    Raises:
        SymmetryError: what does not belong to the graph, and signs that are neither 1 nor -1.
    """
    graph.require_verified()
    graph.check_state(state, finite=False)
    return sign_tensors(graph, signs, state)


def sign_tensors(graph: SymmetryGraph, signs: Signs, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As :func:`apply_signs`, for any subset of the tensors; gradients and momenta turn as weights do."""
    turned = as_given(tensors, tensors)
    for name, factor in sign_factors(graph, signs, tensors):
        turned[name] = turned[name] * factor.to(turned[name])
    return turned


def sign_tensors_(graph: SymmetryGraph, signs: Signs, tensors: Mapping[str, Tensor]) -> None:
    """As :func:`sign_tensors`, in place; names that hold the same tensor object are turned once."""
    for name, factor in {id(tensors[name]): (name, f) for name, f in sign_factors(graph, signs, tensors)}.values():
        tensors[name].mul_(factor.to(tensors[name]))


def sign_factors(graph: SymmetryGraph, signs: Signs, tensors: Container[str]) -> Iterator[tuple[str, Tensor]]:
    """The names of tensors of which entries turn, and for each a tensor of 1 and -1 that broadcasts against it."""
    flat = _flat_signs(graph, signs)
    for parameter, terms in graph.sign_terms.items():
        factors = [flat[term.index] for term in terms]
        if any(bool((f < 0).any()) for f in factors):
            factor = math.prod(factors[1:], start=factors[0])
            yield from ((name, factor) for name in graph.aliases[parameter] if name in tensors)


def _flat_signs(graph: SymmetryGraph, signs: Signs) -> Tensor:
    """The signs of all groups one after the other, and a 1 that answers for the index -1."""
    check_elements(signs, "signs")
    known = {g.name for g in graph.signs}
    for name in sorted(signs.keys() - known):
        raise graph.unknown_group(name, known)
    parts = []
    for group in graph.signs:
        value = signs.get(group.name, torch.ones(group.size, dtype=torch.int64, device="cpu"))
        if tuple(value.shape) != (group.size,) or not bool((value.abs() == 1).all()):
            raise SymmetryError(
                f"signs[{group.name!r}] of shape {tuple(value.shape)} must be ({group.size},) numbers, each 1 or -1"
            )
        parts.append(value.detach().to("cpu", torch.int64))
    return torch.cat([*parts, torch.ones(1, dtype=torch.int64, device="cpu")])


def apply_linear(graph: SymmetryGraph, maps: Maps, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Mix units by matrices, which leaves the function unchanged: what makes them by ``A``, what reads them to match.

    Law: the product of two elements acts as one after the other; a group's ``subgroup`` tells which there are.

    Args:
        graph: the architecture's symmetry graph (verified on first use).
        maps: group name to ``[*blocks, size, size]``, for linear groups; others stay. The new unit ``j`` is
            ``sum_k A[j, k]`` of the old ones ``k``. It is computed in float64, and returned in the state's dtypes.
        state: state dict, or a stack of states with leading sample axes; every sample is mixed alike.

    Raises:
        SymmetryError: what does not belong to the graph, matrices that are not of a group's ``subgroup``, and gains
            that are not folded where a group asks for it.
    """
    graph.require_verified()
    graph.check_state(state, finite=False)
    for group in graph.linears:
        if group.name in maps and (gain := unfolded(graph, group, state)):
            raise SymmetryError(
                f"the group {group.name!r} mixes units that the gain {gain!r} multiplies one by one: its entries have "
                "to be equal. Fold the norms into what reads them first, state = tu_symmetry.fold_norms(graph, state); "
                "a gain that is still there is read by tensors that have other readers (a head that is tied to the "
                "embedding)"
            )
    return linear_tensors(graph, maps, state)


def unfolded(graph: SymmetryGraph, group: LinearGroup, state: Mapping[str, Tensor]) -> str:
    """The first gain with different entries that keeps a linear group from acting on a state; empty if none does."""
    for name in group.constant:
        gain = state[name].detach().to(torch.float64)
        if not torch.allclose(gain, gain.mean(-1, keepdim=True), rtol=1e-6, atol=0):
            return name
    return ""


def linear_tensors(graph: SymmetryGraph, maps: Maps, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As :func:`apply_linear`, for any subset of the tensors."""
    check_elements(maps, "maps")
    groups = {g.name: g for g in graph.linears}
    for name in sorted(maps.keys() - groups.keys()):
        raise graph.unknown_group(name, groups)
    return mix_tensors({groups[name]: given for name, given in maps.items()}, graph, tensors)


def mix_tensors(
    maps: Mapping[LinearGroup, Tensor], graph: SymmetryGraph, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """As :func:`linear_tensors`, for groups that need not be among the graph's."""
    mixed = as_given(tensors, tensors)
    for group, given in maps.items():
        matrices = given.detach().to(torch.float64)
        inverse = _inverse_transposed(group, matrices)
        for member in group.members:
            own = matrices if member.exponent > 0 else inverse
            for alias in graph.aliases[member.parameter]:
                if alias in mixed:
                    ndim = len(graph.shapes[member.parameter])
                    wide = torch.promote_types(mixed[alias].dtype, torch.float64)
                    mixed[alias] = mix_axis(mixed[alias].to(wide), member, own, ndim).to(mixed[alias].dtype)
    return mixed


def _inverse_transposed(group: LinearGroup, matrices: Tensor) -> Tensor:
    """The inverse of each matrix, transposed; refuses matrices that are no elements of a group."""
    if tuple(matrices.shape) != group.shape:
        raise SymmetryError(f"maps[{group.name!r}] has shape {tuple(matrices.shape)}, the group {group.shape}")
    found, wrong = torch.linalg.inv_ex(matrices)
    if bool(wrong.any()) or not bool(torch.isfinite(found).all()):
        raise SymmetryError(f"maps[{group.name!r}] holds a singular matrix, or NaN: units would be lost")
    found = found.mT
    sums = matrices.sum(-1)
    laws = {
        "general": (True, ""),
        "orthogonal": (
            _alike(found, matrices),
            "orthogonal: the same tensor makes and reads these units, or a norm reads them",
        ),
        "centered": (
            _alike(found, matrices) and _alike(sums, sums.mean(-1, keepdim=True)),
            "orthogonal, with rows that all have the same sum: LayerNorm subtracts a mean of these units",
        ),
        "complex": (
            _alike(_quarter(matrices), matrices) if group.subgroup == "complex" else True,
            "of the form [[a, -b], [b, a]]: rotary positions rotate these pairs of units",
        ),
    }
    holds, law = laws[group.subgroup]
    if not holds:
        raise SymmetryError(f"maps[{group.name!r}] must be {law}")
    return found


def _alike(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b.expand_as(a), rtol=0, atol=1e-6)


def _quarter(matrices: Tensor) -> Tensor:
    """Matrices of two rows in coordinates that are rotated by a right angle; complex numbers are the same there."""
    quarter = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=matrices.dtype, device=matrices.device)
    return quarter @ matrices @ quarter.mT


def mix_axis(tensor: Tensor, member: PermutationMember, matrices: Tensor, ndim: int) -> Tensor:
    """Mix one tensor along one member's axis; ``ndim`` is its number of axes without leading sample axes."""
    axis = tensor.ndim - ndim + member.axis
    index = member.index.reshape(-1, *member.index.shape[-2:]).to(tensor.device)
    own = matrices.reshape(-1, *matrices.shape[-2:]).to(tensor.device, tensor.dtype)
    moved = tensor.movedim(axis, -1).clone()
    if member.within is None or member.within_axis is None:
        moved[..., index] = torch.einsum("bjk,...bkc->...bjc", own, moved[..., index])
        return moved.movedim(-1, axis)
    rows_axis = tensor.ndim - ndim + member.within_axis
    moved = moved.movedim(rows_axis - (rows_axis > axis), 0)
    for rows, at, matrix in zip(member.within.reshape(len(index), -1).to(tensor.device), index, own, strict=True):
        part = moved[rows]
        part[..., at] = torch.einsum("jk,...kc->...jc", matrix, part[..., at])
        moved[rows] = part
    return moved.movedim(0, rows_axis - (rows_axis > axis)).movedim(-1, axis)


def apply_signed(graph: SymmetryGraph, element: SignedPermutation, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As :func:`apply_permutation` and then :func:`apply_signs`."""
    return apply_signs(graph, element.signs, apply_permutation(graph, element.permutation, state))


def signed_tensors(
    graph: SymmetryGraph, element: SignedPermutation, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """As :func:`apply_signed`, for any subset of the tensors."""
    moved = permute_tensors(graph, element.permutation, tensors)
    return sign_tensors(graph, element.signs, moved) if element.signs else moved


def permuted_signs(graph: SymmetryGraph, permutation: Mapping[str, Tensor], signs: Signs) -> Signs:
    """The signs that do after a permutation what the given ones do before it."""
    flat = _flat_signs(graph, signs)
    moved = flat.clone()
    steps = _steps(graph, permutation, {}, read=False)
    for parameter, terms in graph.sign_terms.items():
        for term in terms:
            index = term.index
            for member, p, ndim in steps.get(parameter, ()):
                if index.shape[member.axis] > 1:
                    if member.within_axis is not None:
                        wide = list(index.shape)
                        wide[member.within_axis] = graph.shapes[parameter][member.within_axis]
                        index = index.expand(wide)
                    index = permute_axis(index, member, p, ndim)
            here = term.index.expand(index.shape)
            moved[here[here >= 0]] = flat[index[here >= 0]]
    parts = moved[:-1].split([g.size for g in graph.signs])
    return {g.name: part.clone() for g, part in zip(graph.signs, parts, strict=True)}


def compose_signed(graph: SymmetryGraph, p: SignedPermutation, q: SignedPermutation) -> SignedPermutation:
    """The element that acts as ``q`` first and as ``p`` then."""
    signs = permuted_signs(graph, p.permutation, q.signs) if q.signs else {}
    signs |= {name: own * signs[name] if name in signs else own for name, own in p.signs.items()}
    return SignedPermutation(compose(p.permutation, q.permutation), signs)


def invert_signed(graph: SymmetryGraph, p: SignedPermutation) -> SignedPermutation:
    """The inverse element; composed with ``p``, in either order, it leaves everything as it is."""
    back = invert(p.permutation)
    return SignedPermutation(back, permuted_signs(graph, back, p.signs) if p.signs else {})


def scale_tensors_(graph: SymmetryGraph, log_scale: LogScale, tensors: Mapping[str, Tensor]) -> None:
    """As :func:`scale_tensors`, in place; names that hold the same tensor object are scaled once."""
    require_range(graph, log_scale, tensors)
    done: set[int] = set()
    for name, logs in _log_factors(graph, log_scale, tensors):
        if id(tensors[name]) not in done:
            _multiply_(tensors[name], logs)
        done.add(id(tensors[name]))


def require_range(graph: SymmetryGraph, log_scale: LogScale, tensors: Mapping[str, Tensor]) -> None:
    """Raise a SymmetryError if :func:`scale_tensors` would take a weight out of the range of its dtype."""
    for name, logs in _log_factors(graph, log_scale, tensors):
        _require_range(tensors[name], logs, name)


def _log_factors(
    graph: SymmetryGraph, log_scale: LogScale, tensors: Mapping[str, Tensor], power: float = 1.0
) -> Iterator[tuple[str, list[Tensor]]]:
    """The names of tensors that change, and float64 terms of the logarithms of their factors, which broadcast."""
    check_elements(log_scale, "log_scale")
    groups = (*graph.scales, *graph.normalizations)
    known = {g.name for g in groups}
    for name in sorted(log_scale.keys() - known):
        raise graph.unknown_group(name, known)
    parts = []
    for group in groups:
        value = log_scale.get(group.name, torch.zeros(group.size, dtype=torch.float64, device="cpu"))
        if tuple(value.shape) != (group.size,):
            raise SymmetryError(f"log_scale[{group.name!r}] has shape {tuple(value.shape)}, expected ({group.size},)")
        if not torch.isfinite(value).all():
            raise SymmetryError(f"log_scale[{group.name!r}] holds NaN or infinite values")
        parts.append(value.detach().to(torch.float64).cpu())
    flat = torch.cat([*parts, torch.zeros(1, dtype=torch.float64, device="cpu")])  # the zero answers for index -1
    for parameter, terms in graph.scale_terms.items():
        names = [name for name in graph.aliases[parameter] if name in tensors]
        logs = [power * term.exponent * flat[term.index] for term in terms] if names else []
        if any(log.any() for log in logs):
            yield from ((name, logs) for name in names)


_SINGLE = 40.0  # sums of log-factors up to here keep single-precision factors normal, with room to spare
_DOUBLE = 600.0  # the same for double precision
_LOST, _LOST_SUBNORMAL = 0.01, 0.5  # share of a tensor's norm that rounding below the normal range may take


def _multiply_(tensor: Tensor, logs: Sequence[Tensor]) -> None:
    """``tensor *= exp(sum(logs))``, rounded once; factors are made piece by piece."""
    ndim = max(log.ndim for log in logs)
    furthest = sum(float(log.abs().max()) for log in logs if log.numel())
    precision = torch.promote_types(tensor.dtype, torch.float64 if furthest > _SINGLE else torch.float32)
    times = max(1, math.ceil(furthest / _DOUBLE))  # exp(800) overflows, though 1e-200 exp(800) is 1e147
    for piece, rows in _pieces(tensor, tensor.ndim - ndim if ndim else None):
        factor = torch.ones((), dtype=torch.float64, device="cpu")
        for log in logs:  # a product over axes takes few exponentials
            own = log[rows] if log.ndim == ndim > 0 and log.shape[0] > 1 else log
            factor = factor * torch.exp(own / times)
        factor = factor.to(piece.device, precision)
        product = piece * factor
        for _ in range(times - 1):
            product *= factor
        piece.copy_(product)


def _require_range(tensor: Tensor, logs: Sequence[Tensor], name: str) -> None:
    """Raise if scaling takes entries out of the range of their dtype; one may become zero where the norm stays."""
    if tensor.numel() == 0 or tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()):
        return
    largest = largest_entry(tensor)
    furthest = sum(float(log.abs().max()) for log in logs if log.numel())
    held = torch.finfo(tensor.dtype)
    if largest == 0 or (
        math.log(largest) + furthest < math.log(held.max) - 1 and math.log(largest) - furthest > math.log(held.tiny) + 5
    ):
        return
    sizes = tensor.detach().abs()
    wide = sizes.to(torch.float64, copy=True)
    finite = torch.isfinite(wide)
    _multiply_(wide, logs)
    rounded = wide.to(sizes.dtype).double()
    norm = float(torch.where(finite, wide, 0.0).max())  # in units of the largest, whose square may leave the range
    lost = float(((wide - rounded) / norm)[finite].norm() / (wide / norm)[finite].norm()) if norm > 0 else 1.0
    if not lost <= (_LOST if largest >= held.tiny else _LOST_SUBNORMAL):
        raise SymmetryError(
            f"{name!r} would leave the range of {tensor.dtype} ({held.tiny:.1e} to {held.max:.1e}): its largest entry "
            f"{largest:.1e} becomes {norm:.1e}. Convert the state to a wider dtype first, or leave the scale as it is"
        )


def largest_entry(tensor: Tensor) -> float:
    """The largest magnitude among the finite entries of a tensor, 0 if there are none."""
    own = tensor.detach().abs() if tensor.is_complex() else tensor.detach()
    if own.numel() == 0:
        return 0.0
    low, high = numbers(torch.aminmax(own))
    if not math.isfinite(low) or not math.isfinite(high):
        return float(own.abs().nan_to_num(0.0, posinf=0.0).max())
    return max(-low, high)
