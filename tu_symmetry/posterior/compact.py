"""Compact Gaussian posteriors of networks: q_d as they are, q_r after removing their permutation symmetry.

Source: arXiv 2401.00611, section 3. ``q = N(mean, diag sigma^2)`` over the weights, with mean and standard deviation
of the networks' weights, before (q_d) or after (q_r) they have been permuted into one basin.
"""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from tu_symmetry.alignment.align import MatchOn, Reference
from tu_symmetry.alignment.align import align as align_states
from tu_symmetry.files import FileError, read_safetensors, write_safetensors
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.states import (
    SampleFileError,
    State,
    SymmetryError,
    as_given,
    kind_of,
    layout_of,
    require_state,
    unstack,
)
from tu_symmetry.symmetry.action import largest_entry
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.randomness import own_generator

_FORMAT = "tu_symmetry.compact"
_VERSION = "1"


class CompactPosterior:
    """A Gaussian over the weights of one architecture: diagonal, or diagonal plus low rank.

    With ``M`` networks, their mean ``mu``, deviations ``D`` (``[weights, M]``) and variances ``sigma^2``:

    * rank 0: ``N(mu, diag sigma^2)``;
    * rank r > 0: ``N(mu, (diag sigma^2 + F F^T) / 2)``, the form of SWAG (arXiv 1902.02476, section 3.2), where
      ``F F^T`` is the best approximation of rank r to ``D D^T / (M - 1)``; it is exact for ``r >= M - 1``, and the
      marginal variances are then those of the diagonal form.

    Running statistics and other buffers are no weights: they have a mean and are never sampled; integer ones are the
    first network's. Tied weights are one weight under several names.

    Use :meth:`from_states` or :meth:`load`.

    Attributes:
        mean: full state dict (weights and buffers), names in alphabetical order.
        std: the standard deviations sigma, of the weights only.
        factors: the columns of ``F``, weight name to ``[r, *shape]``; empty for rank 0.
        metadata: architecture, number of networks, whether they were aligned and how, and the symmetry groups' sizes.
    """

    def __init__(
        self,
        mean: Mapping[str, Tensor],
        std: Mapping[str, Tensor],
        *,
        factors: Mapping[str, Tensor] | None = None,
        aliases: Mapping[str, Sequence[str]] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Put a posterior together.

        Args:
            mean: full state dict.
            std: standard deviations of the entries that are sampled.
            factors: low-rank factors, of the same names as ``std``.
            aliases: for each weight all its names, where it has several.
            metadata: anything that JSON can hold.

        Raises:
            ValueError: names or shapes that do not fit each other, means, factors or standard deviations that are not
                finite, negative standard deviations.
        """
        self.mean: State = as_given(mean, {name: mean[name] for name in sorted(mean)})
        self.std: State = {name: std[name] for name in sorted(std)}
        self.factors: State = {name: factors[name] for name in sorted(factors)} if factors else {}
        self.metadata = dict(metadata or {})
        names = {alias: group for group in map(tuple, (aliases or {}).values()) for alias in group}
        self._tied = {name: names.get(name, (name,)) for name in self.std}
        unknown = self.std.keys() - self.mean.keys() or self.factors.keys() ^ (self.std.keys() if factors else set())
        if unknown or not self.std:
            raise ValueError(f"mean, std and factors are not of the same network: {sorted(unknown)[:6]}")
        for what, tensors in (("mean", self.mean), ("factors", self.factors)):
            for name, t in tensors.items():
                if t.is_floating_point() and not torch.isfinite(t).all():
                    raise ValueError(f"{what}[{name!r}] holds NaN or infinite values, which no posterior has")
        for name, sigma in self.std.items():
            if sigma.shape != self.mean[name].shape or not torch.isfinite(sigma).all() or (sigma < 0).any():
                raise ValueError(
                    f"std[{name!r}] must be finite, not negative, and of shape {tuple(self.mean[name].shape)}; it has "
                    f"shape {tuple(sigma.shape)} and values from {sigma.min()} to {sigma.max()}"
                )

    @classmethod
    def from_states(
        cls,
        states: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] | SampleStore,
        graph: SymmetryGraph | None = None,
        *,
        align: bool = True,
        rank: int = 0,
        reference: Reference | Mapping[str, Tensor] = "first",
        match_on: MatchOn = "weights",
        model: nn.Module | None = None,
        dataloader: Iterable[Any] | None = None,
        buffers: Collection[str] | None = None,
        certify: bool = True,
    ) -> CompactPosterior:
        """Fit the posterior to networks.

        Args:
            states: at least two networks: a stack, a list of state dicts, or a store. A store is read one state at a
                time, unless the networks are to be aligned or a low-rank part is fitted.
            graph: the architecture's symmetry graph; needed for alignment.
            align: True for q_r, False for q_d. For other options of the alignment, align the states first, by
                :func:`tu_symmetry.align`, and pass them with False.
            rank: rank of the low-rank part, at most ``M - 1``.
            reference: see :func:`tu_symmetry.align`, also for what follows.
            match_on: ``weights``, or ``activations``.
            model: for activation matching.
            dataloader: for activation matching.
            buffers: without a graph, the names of the entries that are no weights; integer entries never are.
            certify: measure the change of outputs; the metadata take the network whose outputs changed most, as
                ``certificate``, or why nothing was measured, as ``uncertified``.

        Returns:
            The posterior. Moments are computed in float64 and rounded to the networks' precision (to float32 for
            networks in half precision).

        Raises:
            SymmetryError: states of another architecture, NaN or infinite weights.
            ValueError: a single network, a rank that the networks do not have, or nothing that says what is a buffer.
        """
        members: Sequence[Mapping[str, Tensor]]
        members = states if isinstance(states, SampleStore) else unstack(states)
        count = len(members)
        if count < 2:
            raise ValueError(
                f"a posterior needs at least two networks, got {count}: the standard deviation of one is undefined"
            )
        if not 0 <= rank < count:
            raise ValueError(f"rank {rank}: the deviations of {count} networks span at most rank {count - 1}")
        metadata: dict[str, Any] = {"networks": count, "aligned": align, "rank": rank}
        if align:
            if graph is None:
                raise ValueError(
                    "align=True needs the architecture's symmetry graph: pass discover_symmetries(model, x), or "
                    "align=False for q_d"
                )
            alignment = align_states(
                graph,
                list(members),
                reference=reference,
                match_on=match_on,
                model=model,
                dataloader=dataloader,
                certify=certify,
            )
            members = alignment.states
            metadata |= {
                "match_on": match_on,
                "reference": reference if isinstance(reference, str) else "given",
                "transpositions": alignment.transpositions,
            }
            if alignment.certificates:
                worst = max(alignment.certificates, key=lambda c: c.change)
                metadata["certificate"] = {"change": worst.change, "allowed": worst.allowed}
            else:
                metadata["uncertified"] = alignment.uncertified
        else:
            _check_states(members, graph)
        first = members[0]
        weights = _weights(first, graph, buffers)
        mean, squares, units = _moments(members, weights)
        std = {name: (total / (count - 1)).sqrt() / units[name] for name, total in squares.items()}
        aliases: dict[str, tuple[str, ...]] = {}
        if graph is not None:
            aliases = {name: names for name, names in graph.aliases.items() if len(names) > 1}
            metadata["architecture"] = graph.architecture
            metadata["groups"] = {g.name: list(g.shape) for g in graph.permutations}
        repeated = {alias for names in aliases.values() for alias in names[1:]}
        factors = _low_rank(members, mean, [n for n in weights if n not in repeated], rank) if rank else {}
        for names in aliases.values():
            factors |= {alias: factors[names[0]] for alias in names if names[0] in factors}
        return cls(
            as_given(first, {n: mean[n].to(_precision(t)) if n in mean else t.clone() for n, t in first.items()}),
            {n: t.to(_precision(first[n])) for n, t in std.items()},
            factors={n: t.to(_precision(first[n])) for n, t in factors.items()},
            aliases=aliases,
            metadata=metadata,
        )

    @classmethod
    def from_moments(
        cls,
        model: nn.Module,
        mean: Mapping[str, Tensor],
        std: Mapping[str, Tensor],
        *,
        metadata: Mapping[str, Any] | None = None,
    ) -> CompactPosterior:
        """Put a diagonal posterior together from the moments of a module's parameters.

        Args:
            model: a network of the architecture; tied weights and buffers are taken from it.
            mean: the mean of every parameter, by its name in ``named_parameters`` (tied ones once), on any device.
            std: likewise.
            metadata: anything that JSON can hold; the architecture is added.

        Raises:
            ValueError: moments of another network.
        """
        owners = {id(p): name for name, p in model.named_parameters()}
        if missing := sorted(set(owners.values()) ^ mean.keys() | set(owners.values()) ^ std.keys()):
            raise ValueError(f"the moments are not those of {type(model).__name__}: {missing[:6]} differ")
        held = model.state_dict(keep_vars=True)
        means: State = as_given(held, {})
        stds: State = {}
        aliases: dict[str, list[str]] = {}
        for name, t in held.items():
            if id(t) in owners:
                own = owners[id(t)]
                means[name], stds[name] = (part[own].detach().cpu().to(t.dtype) for part in (mean, std))
                aliases.setdefault(own, []).append(name)
            else:
                means[name] = t.detach().cpu().clone()
        return cls(
            means,
            stds,
            aliases={own: names for own, names in aliases.items() if len(names) > 1},
            metadata={"architecture": type(model).__name__, **(metadata or {})},
        )

    @property
    def rank(self) -> int:
        """Rank of the low-rank part, 0 for a diagonal posterior."""
        return len(next(iter(self.factors.values()))) if self.factors else 0

    def sigma(self) -> Tensor:
        """All standard deviations, flat ``[weights]``, in the order of the names; tied weights once."""
        return torch.cat([self.std[name].flatten() for name in self._free()])

    def sample(self, num_samples: int, *, generator: torch.Generator | None = None) -> State:
        """Draw networks.

        Args:
            num_samples: how many.
            generator: source of the noise, on any device; without one the draw cannot be repeated.

        Returns:
            A stack ``[num_samples, ...]`` of full states: weights are drawn, buffers repeated.
        """
        if num_samples < 1:
            raise ValueError(f"cannot draw {num_samples} networks")
        generator = own_generator(generator)
        stack = as_given(self.mean, {n: t.expand(num_samples, *t.shape).clone() for n, t in self.mean.items()})
        scale = math.sqrt(0.5) if self.factors else 1.0
        for name in self._free():
            shape, sigma = (num_samples, *self.std[name].shape), self.std[name]
            noise = torch.randn(shape, generator=generator, dtype=sigma.dtype, device=generator.device)
            draw = stack[name] + scale * sigma * noise.to(sigma.device)
            stack |= {alias: draw for alias in self._tied[name]}
        if self.factors:
            size = (num_samples, self.rank)
            common = torch.randn(size, generator=generator, dtype=torch.float64, device=generator.device)
            for name in self._free():
                factor = self.factors[name]
                draw = stack[name] + scale * torch.tensordot(common.to(factor), factor, dims=1)
                stack |= {alias: draw for alias in self._tied[name]}
        return stack

    def pruning_mask(self, keep_fraction: float) -> dict[str, Tensor]:
        """Which weights to keep when pruning by standard deviation (arXiv 2401.00611, Figure 5).

        Args:
            keep_fraction: share of all weights of the network that is kept, those of lowest sigma; exactly
                ``round(keep_fraction * weights)`` of them, ties going to the first.

        Returns:
            Boolean masks for every name of the state dict; True, which is to keep, for all of the buffers.
        """
        if not 0.0 <= keep_fraction <= 1.0:
            raise ValueError(f"keep_fraction is a share between 0 and 1, got {keep_fraction}")
        sigma = self.sigma()
        keep = torch.zeros(len(sigma), dtype=torch.bool, device=sigma.device)
        keep[sigma.argsort(stable=True)[: round(keep_fraction * len(sigma))]] = True
        masks = {name: torch.ones_like(t, dtype=torch.bool) for name, t in self.mean.items()}
        free = self._free()
        for name, part in zip(free, keep.split([self.std[n].numel() for n in free]), strict=True):
            masks |= {alias: part.reshape(self.std[name].shape) for alias in self._tied[name]}
        return masks

    def to(self, device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> CompactPosterior:
        """The same posterior on another device, or in another floating-point precision."""

        def move(tensors: State) -> State:
            moved = {n: t.to(device, dtype if t.is_floating_point() else None) for n, t in tensors.items()}
            return as_given(tensors, moved)

        return CompactPosterior(
            move(self.mean),
            move(self.std),
            factors=move(self.factors),
            aliases=self._aliases(),
            metadata=self.metadata,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file (``mean/NAME``, ``std/NAME``, ``factors/NAME``) whole or not at all."""
        parts = {"mean": self.mean, "std": self.std, "factors": self.factors}
        tensors = {f"{part}/{name}": t for part, content in parts.items() for name, t in content.items()}
        header = {
            "format": _FORMAT,
            "version": _VERSION,
            "metadata": json.dumps(self.metadata),
            "aliases": json.dumps(self._aliases()),
            "shapes": json.dumps({name: list(t.shape) for name, t in self.mean.items()}),
        }
        write_safetensors(Path(path), tensors, header)

    @classmethod
    def load(cls, path: str | os.PathLike[str], graph: SymmetryGraph | None = None) -> CompactPosterior:
        """Read what :meth:`save` wrote.

        Args:
            path: the file.
            graph: the posterior must be of this architecture.

        Raises:
            SampleFileError: a file that is truncated, foreign or was changed, NaN or infinite values in it, or a
                posterior of another architecture.
        """
        parts: dict[str, State] = {"mean": {}, "std": {}, "factors": {}}
        try:
            tensors, head = read_safetensors(path)
        except FileError as error:
            raise SampleFileError(str(error)) from error
        header = head.metadata
        if header.get("format") != _FORMAT or header.get("version") != _VERSION:
            raise SampleFileError(
                f"{path} holds no compact posterior (format {header.get('format')!r}, version "
                f"{header.get('version')!r}); CompactPosterior.save writes {_FORMAT!r} {_VERSION}"
            )
        for key, tensor in tensors.items():
            part, _, name = key.partition("/")
            if part not in parts:
                raise SampleFileError(f"{path} is damaged: it holds {key!r}, which is no part of a compact posterior")
            parts[part][name] = tensor
        if graph is not None:
            try:
                graph.check_state(parts["mean"], name=str(path))
            except SymmetryError as error:
                raise SampleFileError(str(error)) from error
        try:
            aliases, metadata = json.loads(header["aliases"]), json.loads(header["metadata"])
            return cls(**parts, aliases=aliases, metadata=metadata)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise SampleFileError(f"{path} is damaged: {error}") from error

    def as_module(
        self,
        model: nn.Module,
        num_samples: int,
        *,
        generator: torch.Generator | None = None,
        vectorize: bool = True,
    ) -> CompactEnsemble:
        """A module that evaluates ``num_samples`` draws as an ensemble, see :class:`CompactEnsemble`."""
        return CompactEnsemble(model, self.sample(num_samples, generator=generator), vectorize=vectorize)

    def __repr__(self) -> str:
        return f"CompactPosterior({len(self.sigma())} weights, rank {self.rank}, {self.metadata})"

    def _free(self) -> list[str]:
        """Weight names without the further names of tied ones."""
        return [name for name in self.std if name == min(self._tied[name])]

    def _aliases(self) -> dict[str, tuple[str, ...]]:
        return {name: self._tied[name] for name in self._free() if len(self._tied[name]) > 1}


class CompactEnsemble(nn.Module):
    """Networks of one architecture in one module, for a routine that evaluates ensembles.

    ``forward`` maps a batch ``[B, ...]`` to ``[n * B, C]``, all inputs of the first network first: what
    TorchUncertainty's routines expect with ``is_ensemble=True``. The networks are evaluated as in ``eval`` mode, also
    after ``train()``, and are not trained.

    Args:
        model: a module of the architecture; it is copied, and its own weights do not matter.
        states: a stack ``[n, ...]`` of full states.
        vectorize: evaluate all networks at once with ``torch.func.vmap``, which costs the memory of ``n`` batches and
            needs operators that vmap knows; False evaluates one after the other.

    Raises:
        ValueError: states that do not belong to the model.
    """

    def __init__(self, model: nn.Module, states: Mapping[str, Tensor], *, vectorize: bool = True) -> None:
        super().__init__()
        expected = {name: e.shape for name, e in layout_of(model.state_dict()).items()}
        found = {name: e.shape for name, e in layout_of(states, stacked=True).items()}
        if expected != found:
            wrong = sorted(n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n))
            raise ValueError(
                f"the states do not belong to {type(model).__name__}: {wrong[0]!r} has shape {found.get(wrong[0])} in "
                f"the states and {expected.get(wrong[0])} in the model ({len(wrong)} names differ)"
            )
        self.template = copy.deepcopy(model).requires_grad_(False).eval()
        self.vectorize = vectorize
        self.num_estimators = len(next(iter(states.values())))
        self._names = list(states)
        for i, name in enumerate(self._names):
            self.register_buffer(f"states_{i}", states[name].detach())

    def train(self, mode: bool = True) -> CompactEnsemble:
        """Set the flag, for callers that read it; the networks stay in ``eval`` mode."""
        super().train(mode)
        self.template.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Outputs ``[n * B, C]`` for inputs ``[B, ...]``."""
        states = {name: getattr(self, f"states_{i}") for i, name in enumerate(self._names)}

        def one(state: State) -> Tensor:
            return functional_call(self.template, state, (x,), tie_weights=False)

        if self.vectorize:
            return vmap(one)(states).flatten(0, 1)
        draws = ({name: t[i] for name, t in states.items()} for i in range(self.num_estimators))
        return torch.cat([one(draw) for draw in draws])


def prune(state: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> State:
    """Set the weights to zero where the mask is False.

    Args:
        state: a state, or a stack of states.
        mask: boolean, of single states' shapes; names that it lacks are left as they are.
    """
    require_state(state, "state")
    require_state(mask, "mask")
    unknown = sorted(mask.keys() - state.keys())
    if unknown:
        raise ValueError(f"the mask is of another architecture: the state has no {unknown[:6]}")
    pruned = {n: t * mask[n].to(t.device, t.dtype) if n in mask else t.clone() for n, t in state.items()}
    return as_given(state, pruned)


def _check_states(members: Iterable[Mapping[str, Tensor]], graph: SymmetryGraph | None) -> None:
    shapes: dict[str, tuple[int, ...]] | None = None
    first: Mapping[str, Tensor] | None = None
    for k, member in enumerate(members):
        if graph is not None:
            if graph.check_state(member, name=f"states[{k}]"):
                raise SymmetryError(f"states[{k}] has extra leading axes; pass a stack whole, not in a list")
            continue
        require_state(member, f"states[{k}]", like=first)
        first = first or member
        if not any(kind_of(t.dtype) == "real" for t in member.values()):
            dtypes = sorted({str(t.dtype) for t in member.values()})
            raise SymmetryError(
                f"states[{k}] holds no real floating-point numbers ({dtypes}), "
                "so there are no weights to fit a Gaussian to; integer checkpoints hold quantized weights: dequantize "
                "them first"
            )
        found = {n: e.shape for n, e in layout_of(member).items()}
        shapes = shapes or found
        if wrong := sorted(n for n in found.keys() | shapes.keys() if found.get(n) != shapes.get(n)):
            raise SymmetryError(f"states[{k}] is of another architecture than states[0]: {wrong[:6]} differ")
        for name, t in member.items():
            if t.is_floating_point() and not torch.isfinite(t).all():
                raise SymmetryError(f"states[{k}][{name!r}] holds NaN or infinite values: leave out diverged runs")


def _weights(state: Mapping[str, Tensor], graph: SymmetryGraph | None, buffers: Collection[str] | None) -> list[str]:
    """Names of the entries that are sampled."""
    floating = [name for name, t in state.items() if t.is_floating_point()]
    if graph is not None:
        skip = {alias for name in graph.buffers for alias in graph.aliases.get(name, (name,))}
        return [name for name in floating if name not in skip]
    if buffers is None and len(floating) < len(state):
        counters = sorted(state.keys() - set(floating))
        raise ValueError(
            f"the states hold buffers ({counters[0]!r}, ...), and only a graph or buffers= says which entries are no "
            "weights; without that running variances would be sampled"
        )
    unknown = sorted(set(buffers or ()) - state.keys())
    if unknown:
        raise ValueError(f"buffers names {unknown[:6]}, which the states do not have")
    return [name for name in floating if name not in (buffers or ())]


def _moments(members: Sequence[Mapping[str, Tensor]], weights: list[str]) -> tuple[State, State, dict[str, float]]:
    """Means of all floating-point entries and sums of squared deviations of the weights, in float64, in two passes.

    The third are what the deviations were multiplied by before they were squared: one, but for double-precision weights
    whose squares leave the range of float64.
    """
    mean: State = {}
    first = members[0]
    for member in members:
        for name, t in member.items():
            if t.is_floating_point():
                mean[name] = mean[name] + t.double() if name in mean else t.double()
    mean = {name: total / len(members) for name, total in mean.items()}
    for name, t in mean.items():
        if not torch.isfinite(t).all():
            raise SymmetryError(
                f"the sum of {name!r} over the networks leaves float64's range: leave out diverged runs"
            )
    squares = {name: torch.zeros_like(mean[name]) for name in weights}
    units = dict.fromkeys(weights, 1.0)
    for name in weights:
        if first[name].dtype == torch.float64:
            size = max(largest_entry(member[name].double() - mean[name]) for member in members)
            if size > 0 and not 1e-140 < size < 1e140:
                units[name] = 2.0 ** max(-1000, min(1000, -math.frexp(size)[1]))
    for member in members:
        for name in weights:
            squares[name] += ((member[name].double() - mean[name]) * units[name]).square()
    return mean, squares, units


def _low_rank(members: Sequence[Mapping[str, Tensor]], mean: State, weights: list[str], rank: int) -> State:
    """Factors ``[rank, *shape]`` of the best approximation ``F F^T`` to ``D D^T / (M - 1)``, from the M x M Gram."""
    count = len(members)
    deviations = {n: torch.stack([m[n].double() - mean[n] for m in members]) for n in weights}
    gram = sum((d.flatten(1) @ d.flatten(1).T for d in deviations.values()), torch.zeros((), device="cpu"))
    _, vectors = torch.linalg.eigh(gram)
    top = vectors[:, -rank:].flip(1).T / math.sqrt(count - 1)
    return {name: torch.tensordot(top, d, dims=1) for name, d in deviations.items()}


def _precision(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)
