"""Compact Gaussian posteriors of networks (arXiv 2401.00611, section 3): q_d as they are, q_r in one basin."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from tu_symmetry.alignment.align import align as align_states
from tu_symmetry.evaluation import evaluating, forward, labeled_batches
from tu_symmetry.files import FileError, read_safetensors, write_safetensors
from tu_symmetry.posterior.assessment import TEMPERATURES, Assessment, assessed
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.states import (
    SampleFileError,
    State,
    States,
    SymmetryError,
    as_given,
    layout_of,
    require_alike,
    require_same,
    require_state,
    unstack,
)
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.randomness import leaves_randomness, own_generator

_FORMAT = "tu_symmetry.compact"
_VERSION = "1"


class CompactPosterior:
    """A diagonal Gaussian ``N(mean, diag std^2)`` over the weights of one architecture.

    Running statistics and other buffers have a mean and are never sampled; integer ones are the first network's. Tied
    weights are one weight under several names. Use :meth:`from_states` or :meth:`load`.

    Attributes:
        mean: full state dict, names in alphabetical order.
        std: standard deviations of the weights.
        metadata: architecture, number of networks, whether they were aligned and how.
    """

    def __init__(
        self,
        mean: Mapping[str, Tensor],
        std: Mapping[str, Tensor],
        *,
        aliases: Mapping[str, Sequence[str]] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Put a posterior together; ``aliases`` has all names of each weight that has several."""
        self.mean: State = as_given(mean, {name: mean[name] for name in sorted(mean)})
        self.std: State = {name: std[name] for name in sorted(std)}
        self.metadata = dict(metadata or {})
        names = {alias: group for group in map(tuple, (aliases or {}).values()) for alias in group}
        self._tied = {name: names.get(name, (name,)) for name in self.std}
        if (unknown := self.std.keys() - self.mean.keys()) or not self.std:
            raise ValueError(f"mean and std are not of the same network: {sorted(unknown)[:6]}")
        for name, t in self.mean.items():
            if t.is_floating_point() and not torch.isfinite(t).all():
                raise ValueError(f"mean[{name!r}] holds NaN or infinite values: leave out diverged networks")
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
        graph: SymmetryGraph,
        *,
        align: bool = True,
        **options: Any,
    ) -> CompactPosterior:
        """Fit the posterior to at least two networks, in float64; it has their precision, float32 at least.

        Args:
            states: a stack, a list of state dicts, or a store.
            graph: the architecture's symmetry graph.
            align: True for q_r, False for q_d.
            options: what :func:`tu_symmetry.align` takes besides.

        Raises:
            SymmetryError: states of another architecture, NaN or infinite weights.
        """
        members: Sequence[Mapping[str, Tensor]] = states if isinstance(states, SampleStore) else unstack(states)
        count = len(members)
        if count < 2:
            raise ValueError(
                f"a posterior needs at least two networks, got {count}: the standard deviation of one is undefined"
            )
        metadata: dict[str, Any] = {"networks": count, "aligned": align}
        if align:
            alignment = align_states(graph, list(members), **options)
            members = alignment.states
            metadata["match_on"] = options.get("match_on", "weights")
            metadata["transpositions"] = alignment.transpositions
            if alignment.certificates:
                worst = max(alignment.certificates, key=lambda c: c.change)
                metadata["certificate"] = {"change": worst.change, "allowed": worst.allowed}
            else:
                metadata["uncertified"] = alignment.uncertified
        else:
            for k, member in enumerate(members):
                if graph.check_state(member, name=f"states[{k}]"):
                    raise SymmetryError(f"states[{k}] has extra leading axes; pass a stack whole, not in a list")
        first = members[0]
        mean, std = _moments(members, graph)
        metadata["architecture"] = graph.architecture
        return cls(
            as_given(first, {n: mean[n].to(_precision(t)) if n in mean else t.clone() for n, t in first.items()}),
            {n: t.to(_precision(first[n])) for n, t in std.items()},
            aliases={name: names for name, names in graph.aliases.items() if len(names) > 1},
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
        """Put a posterior together from means and standard deviations by the names of ``model.named_parameters()``.

        Tied weights and buffers are taken from the model, whose class is the architecture in the metadata.
        """
        owners = {id(p): name for name, p in model.named_parameters()}
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

    def sigma(self) -> Tensor:
        """All standard deviations, flat ``[weights]``, in the order of the names; tied weights once."""
        return torch.cat([self.std[name].flatten() for name in self._free()])

    def sample(self, num_samples: int, *, generator: torch.Generator | None = None) -> State:
        """Draw a stack ``[num_samples, ...]`` of full states; buffers are repeated."""
        if num_samples < 1:
            raise ValueError(f"cannot draw {num_samples} networks")
        generator = own_generator(generator)
        stack = as_given(self.mean, {n: t.expand(num_samples, *t.shape).clone() for n, t in self.mean.items()})
        for name in self._free():
            shape, sigma = (num_samples, *self.std[name].shape), self.std[name]
            noise = torch.randn(shape, generator=generator, dtype=sigma.dtype, device=generator.device)
            draw = stack[name] + sigma * noise.to(sigma.device)
            stack |= {alias: draw for alias in self._tied[name]}
        return stack

    def pruning_mask(self, keep_fraction: float) -> dict[str, Tensor]:
        """Which weights to keep when pruning by standard deviation (arXiv 2401.00611, Figure 5).

        True for ``round(keep_fraction * weights)`` weights, those of lowest sigma (the first of equals), and buffers.
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

    def to(self, device: str | torch.device) -> CompactPosterior:
        """The same posterior on another device."""
        mean, std = ({n: t.to(device) for n, t in part.items()} for part in (self.mean, self.std))
        return self._of(as_given(self.mean, mean), std)

    def tempered(self, temperature: float) -> CompactPosterior:
        """The posterior with its variances times ``temperature``: at 0 every draw is the mean."""
        if not 0 <= temperature < math.inf:
            raise ValueError(f"temperature={temperature} has to be finite and not negative: it multiplies variances")
        return self._of(self.mean, {n: t * temperature**0.5 for n, t in self.std.items()})

    def isotropic(self, state: Mapping[str, Tensor]) -> CompactPosterior:
        """The rival that needs no fit: one network, each weight with this posterior's :meth:`rms`."""
        require_alike(state, self.mean, "the state", "the posterior's mean")
        mean = as_given(state, {n: t.to(self.mean[n]) for n, t in state.items()})
        return self._of(mean, {n: torch.full_like(t, self.rms()) for n, t in self.std.items()})

    def rms(self) -> float:
        """The root mean square of the standard deviations."""
        return float(self.sigma().double().square().mean().sqrt())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file (``mean/NAME``, ``std/NAME``) whole or not at all."""
        parts = {"mean": self.mean, "std": self.std}
        header = {
            "format": _FORMAT,
            "version": _VERSION,
            "metadata": json.dumps(self.metadata),
            "aliases": json.dumps(self._aliases()),
            "shapes": json.dumps({name: list(t.shape) for name, t in self.mean.items()}),
        }
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_safetensors(Path(path), {f"{p}/{n}": t for p, held in parts.items() for n, t in held.items()}, header)

    @classmethod
    def load(cls, path: str | os.PathLike[str], graph: SymmetryGraph | None = None) -> CompactPosterior:
        """Read what :meth:`save` wrote; with a graph, of this architecture."""
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
        parts = {
            part: {name.removeprefix(f"{part}/"): t for name, t in tensors.items() if name.startswith(f"{part}/")}
            for part in ("mean", "std")
        }
        try:
            if graph is not None:
                graph.check_state(parts["mean"], name=str(path))
            aliases, metadata = json.loads(header["aliases"]), json.loads(header["metadata"])
            return cls(**parts, aliases=aliases, metadata=metadata)
        except SymmetryError as error:
            raise SampleFileError(str(error)) from error
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise SampleFileError(f"{path} is damaged: {error}") from error

    def as_module(
        self, model: nn.Module, num_samples: int, *, generator: torch.Generator | None = None
    ) -> CompactEnsemble:
        """``num_samples`` draws as one module, see :class:`CompactEnsemble`."""
        return CompactEnsemble(model, self.sample(num_samples, generator=generator))

    @leaves_randomness
    def assess(
        self,
        model: nn.Module,
        states: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] | SampleStore,
        validation_loader: Iterable[Any],
        *,
        num_samples: int = 30,
        generator: torch.Generator | None = None,
    ) -> Assessment:
        """Measure a classifier's posterior on held-out data beside the networks it is of and what one line gives.

        Args:
            model: a module of the architecture, left as it is; its outputs are logits ``[batch, classes]``.
            states: the networks that the posterior was fitted to, as in :meth:`from_states`; the first is the one of
                the rivals.
            validation_loader: batches ``(inputs, classes)`` that no network was trained on; they are kept in memory.
            num_samples: draws in each predictive. The same ones, scaled, serve all temperatures: 0, and 1e-4 to 10 in
                halves of a decade.
            generator: of the draws.

        Raises:
            SymmetryError: states of another architecture.
            ValueError: outputs or targets of another shape, an empty loader, an NLL that is NaN.
        """
        members: Sequence[Mapping[str, Tensor]] = states if isinstance(states, SampleStore) else unstack(states)
        generator, device = own_generator(generator), next(iter(self.mean.values())).device
        data = list(labeled_batches(validation_loader, device))
        targets = torch.cat([y for _, y in data])
        own, noisy = (q.sample(num_samples, generator=generator) for q in (self, self.isotropic(members[0])))

        def predictive(networks: Iterable[Mapping[str, Tensor]], scale: float = 1.0) -> Tensor:
            each = []
            for network in networks:
                state = {n: torch.lerp(self.mean[n], t, scale) if scale != 1 and n in self.std else t.to(self.mean[n])
                         for n, t in network.items()}  # fmt: skip
                outputs = torch.cat([forward(model, state, x) for x, _ in data])
                fit = outputs.ndim == 2 and targets.shape == outputs.shape[:1] and not targets.is_floating_point()
                if not fit or not 0 <= int(targets.min()) <= int(targets.max()) < outputs.shape[1]:
                    raise ValueError(
                        "only classifiers are assessed: outputs have to be logits [batch, classes], one for each class "
                        f"of the targets [batch], but have shapes {tuple(outputs.shape)} and {tuple(targets.shape)}"
                    )
                each.append(outputs.double().softmax(-1))
            return torch.stack(each).mean(0)

        with evaluating(model):
            rivals = {"ensemble": members, "one member": [members[0]], "one member with noise": unstack(noisy)}
            found = {name: predictive(networks) for name, networks in rivals.items()}
            heated = {t: predictive(unstack(own) if t else [self.mean], t**0.5 or 1.0) for t in TEMPERATURES}
        return assessed(found, heated, targets, len(members))

    def _of(self, mean: State, std: Mapping[str, Tensor]) -> CompactPosterior:
        return CompactPosterior(mean, std, aliases=self._aliases(), metadata=self.metadata)

    def _free(self) -> list[str]:
        """Weight names without the further names of tied ones."""
        return [name for name in self.std if name == min(self._tied[name])]

    def _aliases(self) -> dict[str, tuple[str, ...]]:
        return {name: self._tied[name] for name in self._free() if len(self._tied[name]) > 1}


class CompactEnsemble(nn.Module):
    """Networks of one architecture in one module, always in ``eval`` mode, for routines with ``is_ensemble=True``.

    ``forward`` maps a batch ``[B, ...]`` to ``[n * B, C]``, all inputs of the first network first.

    Args:
        model: a module of the architecture; it is copied, and its own weights do not matter.
        states: a stack ``[n, ...]`` of full states.
    """

    def __init__(self, model: nn.Module, states: Mapping[str, Tensor]) -> None:
        super().__init__()
        found = layout_of(states, stacked=True)
        own = layout_of(model.state_dict())
        expected = {name: e._replace(dtype=found[name].dtype) if name in found else e for name, e in own.items()}
        require_same(found, expected, "what was drawn", f"the {type(model).__name__}")
        self.template = copy.deepcopy(model).requires_grad_(False).eval()
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

        def one(state: State) -> Tensor:
            return functional_call(self.template, state, (x,), tie_weights=False)

        return vmap(one)({name: getattr(self, f"states_{i}") for i, name in enumerate(self._names)}).flatten(0, 1)


def sample_low_rank(
    states: States,
    graph: SymmetryGraph,
    num_samples: int,
    *,
    rank: int | None = None,
    generator: torch.Generator | None = None,
) -> State:
    """Draw a stack ``[num_samples, ...]`` from the Gaussian with the networks' covariance, not its diagonal alone.

    It is that of arXiv 2401.00611's code: with the thin SVD ``U S V^T`` of the centered stack of M networks, which
    :func:`tu_symmetry.align` has aligned, a draw is ``mean + sum_k z_k S_k V_k / sqrt(M - 1)`` over the first ``rank``
    directions. Draws lie in the affine span of the networks, and at full rank have their mean and covariance. What is
    to be stored are 1 + rank networks. Buffers are those of :class:`CompactPosterior`.

    Args:
        states: at least two networks, as a list or a stack.
        graph: the architecture's symmetry graph.
        num_samples: number of draws.
        rank: number of directions, those of most variance; None for M - 1.
        generator: of the draws.

    Raises:
        SymmetryError: states of another architecture, NaN or infinite weights.
        ValueError: a rank that M networks do not have, or no draw.
    """
    members = unstack(states)
    q, count = CompactPosterior.from_states(members, graph, align=False), len(members)
    rank = count - 1 if rank is None else rank
    if not 1 <= rank < count or num_samples < 1:
        raise ValueError(
            f"rank={rank} and num_samples={num_samples}: {count} networks span at most {count - 1} directions around "
            "their mean; give a rank from 1 to that, and at least one draw"
        )

    def centered(name: str) -> Tensor:
        return torch.stack([m[name].double() - q.mean[name] for m in members]).flatten(1)

    free = q._free()
    gram = torch.stack([x @ x.T for x in map(centered, free)]).sum(0)
    top = torch.linalg.eigh(gram).eigenvectors[:, -rank:]
    generator = own_generator(generator)
    noise = torch.randn(num_samples, count, generator=generator, dtype=q.std[free[0]].dtype, device=generator.device)
    # projected: U is unique up to signs, which differ between processors, and U U^T is unique
    mixed = noise.to(gram) @ top @ top.T / (count - 1) ** 0.5
    stack = as_given(q.mean, {n: t.expand(num_samples, *t.shape).clone() for n, t in q.mean.items()})
    for name in free:
        draw = stack[name] + (mixed @ centered(name)).reshape(stack[name].shape).to(stack[name].dtype)
        stack |= {alias: draw for alias in q._tied[name]}
    return stack


def prune(state: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> State:
    """Set the weights of a state, or of a stack, to zero where the boolean mask of single states' shapes is False."""
    if unknown := sorted(require_state(mask, "mask").keys() - require_state(state, "state").keys()):
        raise ValueError(f"the mask is of another architecture: the state has no {unknown[:6]}")
    pruned = {n: t * mask[n].to(t.device, t.dtype) if n in mask else t.clone() for n, t in state.items()}
    return as_given(state, pruned)


def _moments(members: Sequence[Mapping[str, Tensor]], graph: SymmetryGraph) -> tuple[State, State]:
    """Means of all floating-point entries, and standard deviations of the weights, in float64, in two passes."""
    buffers = {alias for name in graph.buffers for alias in graph.aliases.get(name, (name,))}
    mean: State = {}
    for member in members:
        for name, t in member.items():
            if t.is_floating_point():
                mean[name] = mean[name] + t.double() if name in mean else t.double()
    mean = {name: total / len(members) for name, total in mean.items()}
    norms = {name: torch.zeros_like(t) for name, t in mean.items() if name not in buffers}
    for member in members:
        for name, norm in norms.items():
            norms[name] = torch.hypot(norm, member[name].double() - mean[name])  # whose squares may leave the range
    return mean, {name: norm / (len(members) - 1) ** 0.5 for name, norm in norms.items()}


def _precision(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)
