"""Where in a LightningModule the networks are, and the averages of weights that mirror them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from tu_symmetry import modules
from tu_symmetry.modules import AVERAGES, uncompiled
from tu_symmetry.routines.members import MembersRoutine

ModuleSource = str | Callable[[LightningModule], Any]


def resolve_modules(source: ModuleSource, pl_module: LightningModule, *, argument: str) -> list[nn.Module]:
    """The modules that an attribute path (``"model.core_models"``) or a callable finds in ``pl_module``."""
    if callable(source):
        found = source(pl_module)
    else:
        try:
            found = attrgetter(source)(pl_module)
        except AttributeError as error:
            children = [name for name, _ in pl_module.named_children()]
            raise ValueError(
                f"{argument}={source!r} leads nowhere in {type(pl_module).__name__} ({error}); "
                f"its submodules are {children}"
            ) from error
    single = not isinstance(found, Iterable) or (isinstance(found, nn.Module) and not isinstance(found, nn.ModuleList))
    modules = [found] if single else list(found)
    if not modules or not all(isinstance(m, nn.Module) for m in modules):
        kinds = [type(m).__name__ for m in modules]
        raise TypeError(f"{argument}={source!r} must find modules in {type(pl_module).__name__}, it found {kinds}")
    return [uncompiled(m) for m in modules]


def find_members(pl_module: LightningModule, source: ModuleSource | None, *, least: int = 1) -> list[nn.Module]:
    """The networks that a callback works on, at least so many.

    Without a source: the first ``core_models`` list anywhere in the module (TorchUncertainty's deep ensembles, also
    inside its EMA or SWA wrappers), or the network of the routine without those wrappers.
    """
    container = _core_models(pl_module)
    if source is not None:
        members = resolve_modules(source, pl_module, argument="members")
    elif container is not None:
        members = [uncompiled(m) for m in container]
    else:
        network = network_of(pl_module, argument="members")
        while isinstance(inner := getattr(network, "core_model", None), nn.Module):
            network = inner
        members = [uncompiled(network)]
    if len(members) < least:
        raise ValueError(
            f"{len(members)} network was found in {type(pl_module).__name__}, and {least} are needed: TorchUncertainty "
            "calls them 'core_models'; say where yours are, for example members='model.networks' or "
            "members=lambda module: module.networks"
        )
    return members


def trained_networks(pl_module: LightningModule, source: ModuleSource | None) -> list[nn.Module]:
    """To read weights from: copies of the members of a ``MembersRoutine``, else what :func:`find_members` finds."""
    if source is None and isinstance(pl_module, MembersRoutine):
        return [pl_module.member(i) for i in range(pl_module.num_members)]
    return find_members(pl_module, source)


def network_of(pl_module: LightningModule, *, argument: str) -> nn.Module:
    """The network that a LightningModule trains: its ``model``, or else its only submodule with weights."""

    def advice(attribute: str) -> str:
        return f"{argument}={attribute!r}, or {argument}=lambda module: module for all of them as one"

    return modules.network_of(pl_module, name=type(pl_module).__name__, advice=advice)


def _core_models(pl_module: LightningModule) -> nn.ModuleList | None:
    for name, module in pl_module.named_modules():
        *parents, last = name.split(".")
        if last == "core_models" and isinstance(module, nn.ModuleList) and not set(parents) & set(AVERAGES):
            return module
    return None


def shards_weights(trainer: Trainer) -> bool:
    """Whether each process has a part of every weight alone."""
    strategy = type(trainer.strategy).__name__
    return any(word in strategy for word in ("FSDP", "DeepSpeed", "ModelParallel"))


def require_whole_weights(trainer: Trainer) -> None:
    """Raise a ValueError where the strategy shards the weights over processes."""
    if shards_weights(trainer):
        raise ValueError(
            f"{type(trainer.strategy).__name__} shards the weights over processes, and symmetries act on whole "
            "tensors: use DDP or one device"
        )


@contextmanager
def on_training_device(trainer: Trainer, pl_module: LightningModule) -> Iterator[None]:
    """The LightningModule on the device of the training, from which Lightning takes it before ``on_fit_end``.

    What is drawn meanwhile, by loaders for one, leaves the global random states as they were.
    """
    before = pl_module.device
    pl_module.to(trainer.strategy.root_device)
    try:
        with isolate_rng(include_cuda=trainer.strategy.root_device.type == "cuda"):
            yield
    finally:
        pl_module.to(before)


def check_same_architecture(members: list[nn.Module]) -> None:
    """Raise a ValueError that names the first difference unless all members have one architecture."""
    reference, *others = map(_signature, members)
    for i, signature in enumerate(others, start=1):
        if odd := next((name for name in reference | signature if reference.get(name) != signature.get(name)), None):
            raise ValueError(
                f"members 0 and {i} have different architectures: {odd!r} is {reference.get(odd, 'missing')} in "
                f"member 0 and {signature.get(odd, 'missing')} in member {i}"
            )


def _signature(module: nn.Module) -> dict[str, str]:
    kinds = {f"{name or 'network'} (module)": type(m).__qualname__ for name, m in module.named_modules()}
    return kinds | {name: f"a tensor of shape {tuple(t.shape)}" for name, t in module.state_dict().items()}


def mirrored_modules(trainer: Trainer, pl_module: LightningModule, member: nn.Module) -> Iterator[nn.Module]:
    """Running averages of ``member``'s weights: in TorchUncertainty's EMA, SWA and SWAG, in Lightning's callbacks."""
    for wrapper in pl_module.modules():
        name = _name_within(getattr(wrapper, "core_model", None), member)
        if name is None:
            continue
        averages = [getattr(wrapper, a, None) for a in AVERAGES]
        if hasattr(wrapper, "swag_stats"):
            averages += getattr(wrapper, "samples", [])
        yield from (uncompiled(a.get_submodule(name)) for a in averages if isinstance(a, nn.Module))
    name = _name_within(pl_module, member)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        average = getattr(callback, "_average_model", None)
        if isinstance(average, nn.Module) and name is not None:
            root = average.module if isinstance(average, torch.optim.swa_utils.AveragedModel) else average
            yield uncompiled(root.get_submodule(name))


def swag_statistics(pl_module: LightningModule, member: nn.Module) -> Iterator[tuple[dict[str, Tensor], str]]:
    """TorchUncertainty's SWAG statistics of ``member``: the dictionary, and the prefix of the member's names in it."""
    for wrapper in pl_module.modules():
        name = _name_within(getattr(wrapper, "core_model", None), member)
        if name is not None and isinstance(stats := getattr(wrapper, "swag_stats", None), dict):
            yield stats, f"{wrapper.prfx}{name}." if name else str(wrapper.prfx)


def _name_within(root: Any, module: nn.Module) -> str | None:
    if not isinstance(root, nn.Module):
        return None
    return next((name for name, m in root.named_modules() if uncompiled(m) is module), None)


def example_from(batch: Any) -> tuple[Any, ...]:
    """Two samples of a batch (the first of its tensors), as the positional arguments of a member."""
    inputs = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if not isinstance(inputs, Tensor) or inputs.ndim == 0:
        raise TypeError(
            f"cannot tell the input of a member from a batch of type {type(batch).__name__}: set example_input_array "
            "in the LightningModule"
        )
    inputs = inputs[:2].detach().cpu().clone()
    return (inputs if len(inputs) == 2 else inputs.repeat(2, *(1 for _ in inputs.shape[1:])),)


def as_input(value: Any, dtype: torch.dtype) -> Any:
    """A tensor on the CPU, in the given precision if it is floating; everything else as it is."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(device="cpu", dtype=dtype if value.is_floating_point() else None)


def copy_of(member: nn.Module) -> nn.Module:
    """A copy for evaluation, which nothing trains."""
    return copy.deepcopy(member).eval().requires_grad_(False)


def detached_state(module: nn.Module) -> dict[str, Tensor]:
    """The state dict itself (no copy), without gradients."""
    return {name: t.detach() for name, t in module.state_dict().items()}
