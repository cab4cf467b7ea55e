"""The symmetries of an architecture as data: what discovery returns, which verifies, prints and draws itself."""

from __future__ import annotations

import copy
import os
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tu_symmetry.reporting.brief import Brief
from tu_symmetry.states import SymmetryError, check_tensor
from tu_symmetry.symmetry.drawing import to_html, to_picture
from tu_symmetry.symmetry.groups import (
    Group,
    LinearGroup,
    NormalizationGroup,
    PermutationGroup,
    PermutationMember,
    Pin,
    ScaleGroup,
    ScaleTerm,
    SignGroup,
    some,
)
from tu_symmetry.symmetry.quantizers import Format, export
from tu_symmetry.symmetry.report import describe, summary
from tu_symmetry.symmetry.running.probe import Probe
from tu_symmetry.symmetry.verification import verify, verify_as
from tu_symmetry.transfer import numbers

if TYPE_CHECKING:
    from typing import Self


@dataclass(eq=False, repr=False)
class SymmetryGraph(Brief):
    """The symmetries of one architecture, as :func:`discover_symmetries` finds them. ``print(graph)`` is readable.

    A graph keeps no weights. Its ``probe`` is a copy of the module without values and the example inputs in float64, so
    that a graph verifies itself before it first transforms weights, and certifies every transformation. Pickling leaves
    it out, and ``verify_symmetries(graph, model, example_inputs)`` gives a graph one.

    Attributes:
        permutations: parents before the groups nested in them.
        aliases: for each tensor the names under which the state dict holds it (tied weights have several).
        buffers: names that are buffers, not parameters.
        unknown_operators: operators without a rule that were met (everything they touch is pinned).
        scale_terms: for each tensor, the terms of its log-scale under all scale and normalization groups.
        signs: units whose entries may all change their sign.
        linears: units that matrices may mix.
        guesses: linear groups that no rule proves; verification takes those that hold among ``linears``.
        sign_terms: for each tensor, the signs of all sign groups that multiply it, as ``scale_terms`` tells factors.
        branch: None, or the line where ``forward`` branches on values: the groups hold for inputs that go the same way.
        constants: buffers whose values the network reads: the symmetries are those of a network with these values.
        kinds: for each tensor ``"real"``, ``"complex"``, ``"integer"`` or ``"boolean"``; empty where it is not known.
        positions: whether the network finds positions by comparing numbers (``argmax``), among which some may be equal.
        unreached: parameters that no example input reaches: what they could meet is pinned.
        left_out: optional arguments of ``forward`` that no example gives, but for flags and integers, which were tried.
        training: ``"as evaluation"`` where nothing in the network asks for the mode, ``"followed"``, or why it was not.
        failed: groups that were taken out because they failed verification: name to reason.
        by_hand: names of the groups that :meth:`with_permutation` added.
        probe: None where it was lost by pickling.
        narrow: None, or the graph of a narrow network with the same tensors, on which this one's groups are verified.
    """

    permutations: tuple[PermutationGroup, ...]
    scales: tuple[ScaleGroup, ...]
    normalizations: tuple[NormalizationGroup, ...]
    shapes: dict[str, tuple[int, ...]]
    aliases: dict[str, tuple[str, ...]]
    buffers: frozenset[str] = frozenset()
    pinned: tuple[Pin, ...] = ()
    unknown_operators: tuple[str, ...] = ()
    scale_terms: dict[str, tuple[ScaleTerm, ...]] = field(default_factory=dict)
    signs: tuple[SignGroup, ...] = ()
    sign_terms: dict[str, tuple[ScaleTerm, ...]] = field(default_factory=dict)
    linears: tuple[LinearGroup, ...] = ()
    guesses: tuple[LinearGroup, ...] = field(default=(), repr=False)
    architecture: str = ""
    branch: str | None = None
    constants: dict[str, Tensor] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    positions: bool = False
    unreached: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    training: str = "as evaluation"
    verified: bool = False
    failed: dict[str, str] = field(default_factory=dict)
    by_hand: frozenset[str] = frozenset()
    probe: Probe | None = field(default=None, repr=False)
    narrow: SymmetryGraph | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"probe": None}  # modules are not pickled: they may be of any class

    def __copy__(self) -> Self:
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return replace(self, **{f.name: copy.deepcopy(getattr(self, f.name), memo) for f in fields(self)})

    def __getitem__(self, name: str) -> Group:
        for group in self.groups():
            if group.name == name:
                return group
        raise KeyError(str(self.unknown_group(name, (g.name for g in self.groups()))))

    def groups(self) -> Iterator[Group]:
        """All groups: permutations, scales, normalizations, signs, then linear maps."""
        return iter((*self.permutations, *self.scales, *self.normalizations, *self.signs, *self.linears))

    def children(self, name: str) -> tuple[PermutationGroup, ...]:
        """The permutation groups nested directly in the group ``name``."""
        return tuple(g for g in self.permutations if g.parent == name)

    @property
    def log10_permutations(self) -> float:
        """log10 of the number of weight vectors that permutations make equivalent."""
        return sum(g.log10_order for g in self.permutations)

    def without(self, *names: str) -> Self:
        """The graph without some groups; what is nested in them stays, in blocks that stay where they are."""
        for name in names:
            self[name]
        return self._without({g: "left out by hand" for g in self.groups() if g.name in names})

    def _take_out(self, reasons: Mapping[Group, str]) -> None:
        """Take groups out of this very graph: claims that failed verification."""
        vars(self).update(vars(self._without(reasons)))
        self.failed = self.failed | {group.name: reason for group, reason in reasons.items()}

    def _take_in(self, proven: Iterable[LinearGroup]) -> None:
        """Take groups in that verification has proven."""
        self.linears = (*self.linears, *proven)

    def _without(self, reasons: Mapping[Group, str]) -> Self:
        gone = {g.name: g for g in self.permutations if g in reasons}
        pins = [
            Pin(m.parameter, m.axis, self.shapes[m.parameter][m.axis], reasons[g])
            for g in gone.values()
            for m in g.members
        ]
        return replace(
            self,
            permutations=tuple(
                replace(g, parent=None) if g.parent in gone else g for g in self.permutations if g not in reasons
            ),
            scales=tuple(g for g in self.scales if g not in reasons),
            normalizations=tuple(g for g in self.normalizations if g not in reasons),
            scale_terms=_terms_without(self.scale_terms, (*self.scales, *self.normalizations), reasons),
            signs=tuple(g for g in self.signs if g not in reasons),
            sign_terms=_terms_without(self.sign_terms, self.signs, reasons),
            linears=tuple(g for g in self.linears if g not in reasons),
            guesses=tuple(g for g in self.guesses if g not in reasons),
            pinned=(*self.pinned, *dict.fromkeys(pins)),
            by_hand=self.by_hand - gone.keys(),
        )

    def with_permutation(self, name: str, axes: Mapping[str, int]) -> Self:
        """The graph with one more permutation group, given by hand; it is verified before weights are transformed.

        ``axes`` names, for each parameter and buffer that the group moves, the axis along which its units lie.

        Raises:
            SymmetryError: if a name is unknown or taken, axes differ in size, or another group moves one of them.
        """
        if "/" in name or any(g.name == name or g.name.startswith(name + "/") for g in self.groups()):
            raise SymmetryError(f"the name {name!r} is taken (by a group, or as the parent of one), or holds a slash")
        alias = {other: first for first, names in self.aliases.items() for other in names}
        unknown = [n for n in axes if n not in alias]
        if unknown or not axes:
            raise SymmetryError(f"not in the state dict: {some(unknown)}; the names are {some(sorted(alias))}")
        given = {alias[n]: axis % len(self.shapes[alias[n]]) for n, axis in axes.items()}
        sizes = {f"{n}[{axis}]": self.shapes[n][axis] for n, axis in given.items()}
        if len(set(sizes.values())) != 1:
            told = ", ".join(f"{place}: {size}" for place, size in sizes.items())
            raise SymmetryError(f"the axes of one group must have one size, but they have {told}")
        owners = {(m.parameter, m.axis): g.name for g in self.permutations for m in g.members}
        for n, axis in (place for place in given.items() if place in owners):
            raise SymmetryError(
                f"{n}[{axis}] is already moved by the group {owners[n, axis]!r}; take that one out first: "
                f"graph.without({owners[n, axis]!r})"
            )
        (size,) = set(sizes.values())
        units = torch.arange(size, device="cpu").unsqueeze(1)
        members = tuple(PermutationMember(n, axis, units) for n, axis in given.items())
        return replace(
            self,
            permutations=(*self.permutations, PermutationGroup(name, size, members)),
            pinned=tuple(p for p in self.pinned if given.get(p.parameter) != p.axis),
            by_hand=self.by_hand | {name},
            verified=False,
        )

    def unknown_group(self, name: str, groups: Iterable[str]) -> SymmetryError:
        """The error for a name that none of ``groups`` has: it may have failed verification."""
        if name in self.failed:
            return SymmetryError(f"the group {name!r} was taken out of this graph, because it {self.failed[name]}")
        return SymmetryError(f"no group {name!r} in this graph; it has {sorted(groups)}")

    def require_verified(self) -> None:
        """Verify now if that has not happened yet; without a probe that is a SymmetryError."""
        if not self.verified and self.narrow is not None:
            verify_as(self, self.narrow)
        if not self.verified and self.probe is not None:
            verify(self, self.probe)
        if not self.verified:
            raise SymmetryError(
                "this symmetry graph has not been verified and holds no network to verify it with; "
                "call verify_symmetries(graph, model, example_inputs) first"
            )

    def check_state(self, state: Mapping[str, Tensor], *, finite: bool = True, name: str = "state") -> int:
        """Check that a state dict, or a stack of them with leading sample axes, belongs to this architecture.

        Returns the number of leading sample axes. With ``finite`` NaN and infinite values are refused too. Errors call
        the state ``name``.

        Raises:
            TypeError: not a mapping of names to tensors.
            SymmetryError: other names, shapes or kinds of tensors, NaN, and other values of the ``constants``.
        """
        if not isinstance(state, Mapping):
            raise TypeError(
                f"{name} is a {type(state).__name__}, not a state dict; for a module pass module.state_dict()"
            )
        known = {alias for names in self.aliases.values() for alias in names}
        missing = sorted(known - state.keys())
        extra = sorted(map(str, state.keys() - known))
        if missing or extra:
            wrapped = any(k.startswith(("model.", "module.", "net.")) for k in extra)
            hint = " Names with a prefix such as 'model.' come from a wrapping module: strip the prefix."
            raise SymmetryError(
                f"{name} is not a state dict of {self.architecture or 'the discovered architecture'}: "
                f"missing {some(missing)}, unexpected {some(extra)}.{hint if wrapped else ''}"
            )
        leading: int | None = None
        counts: dict[str, Tensor] = {}
        for key, alias in ((key, alias) for key, names in self.aliases.items() for alias in names):
            shape, given, constant = self.shapes[key], state[alias], self.constants.get(key)
            if constant is not None and isinstance(given, Tensor) and given.layout != torch.strided:
                given = given.to_dense()  # a sparse matrix that no group moves
            tensor = check_tensor(given, f"{name}[{alias!r}]", self.kinds.get(key), values=finite)
            axes = tensor.ndim - len(shape)
            leading = axes if leading is None else leading
            if axes != leading or axes < 0 or tuple(tensor.shape[axes:]) != shape:
                raise SymmetryError(
                    f"{name}[{alias!r}] has shape {tuple(tensor.shape)}, but the architecture that the graph was "
                    f"discovered on has {shape} (leading sample axes must be the same for all tensors)"
                )
            if finite and (tensor.is_floating_point() or tensor.is_complex()):
                counts[alias] = (~torch.isfinite(tensor)).sum()
            if constant is not None and not bool((tensor.detach().cpu() == constant).all()):
                raise SymmetryError(
                    f"{name}[{alias!r}] differs from the one that the symmetries were discovered with. The forward "
                    "pass reads its values (an index, a mask): discover the symmetries on a model with this state"
                )
        for alias, bad in zip(counts, numbers(list(counts.values())), strict=True):
            if bad:
                raise SymmetryError(
                    f"{name}[{alias!r}] holds {bad:.0f} NaN or infinite values; it comes from a diverged run or a "
                    "damaged file"
                )
        return leading or 0

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """The graph as a self-contained HTML page, also written to ``path`` if one is given."""
        return to_html(self, path)

    def _repr_html_(self) -> str:
        """The drawing of :meth:`to_html` alone, for notebooks."""
        return to_picture(self)

    def export(self, format: Format) -> list[Any] | dict[str, Any]:
        """The groups as what modifiers of llm-compressor take for ``mappings``: layers by name or regular expression.

        Verified on first use. ``"awq"``: ``{"smooth_layer": ..., "balance_layers": [...]}`` for each kind of layer:
        what the smooth layer makes may be divided by factors, and the columns of the others multiplied by them.
        ``"smoothquant"``: ``[[balance layers], smooth layer]``, without smooth layers that make other units too.
        ``"spinquant"``: ``mappings`` and ``norm_mappings``, for rotations of the residual stream and of values. What
        mappings cannot say (grouped queries, stacked experts) is left out; ``tu-symmetry inspect --format`` says why.

        Raises:
            SymmetryError: an unknown format, or a network without what the names of SpinQuant stand for.
        """
        return export(self, format)

    def facts(self) -> list[tuple[str, str]]:
        """What the graph holds, in a line for each kind of group."""
        wanted = ("state", "permutations", "scales", "normalizations", "signs", "linears", "failed")
        return [("of", self.architecture or "a network"), *(fact for fact in summary(self) if fact[0] in wanted)]

    def __str__(self) -> str:
        return describe(self)


def _terms_without(
    terms: Mapping[str, tuple[ScaleTerm, ...]], groups: Iterable[ScaleGroup | SignGroup], gone: Container[Group]
) -> dict[str, tuple[ScaleTerm, ...]]:
    """The terms of all tensors in the factors of the groups that stay."""
    stays = [g not in gone for g in groups for _ in range(g.size)]
    kept = torch.tensor([*stays, False], device="cpu")  # the last entry answers for the index -1
    renumbered = torch.where(kept, kept.cumsum(0) - 1, -1)
    left = {
        name: tuple(replace(t, index=renumbered[t.index]) for t in held if (renumbered[t.index] >= 0).any())
        for name, held in terms.items()
    }
    return {name: held for name, held in left.items() if held}
