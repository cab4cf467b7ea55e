"""Round FitLaplace: the networks it is for, their likelihood, the parts that predict with it, and what it logs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from tu_symmetry.callbacks.members import ModuleSource, network_of, resolve_modules
from tu_symmetry.laplace.checks import made_in_inference_mode
from tu_symmetry.laplace.likelihood import Categorical, Likelihood, LikelihoodName, likelihood_of
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.laplace.report import Calibration, EvidenceResult
from tu_symmetry.modules import is_dropout_sampler, uncompiled

_SHOWN = 12  # groups that the printed summary names


@runtime_checkable
class LaplaceUser(Protocol):
    """A part of a LightningModule that predicts with a Laplace approximation once it has one."""

    def attach_laplace(self, laplace: LinearizedLaplace | None) -> None:
        """Take the approximation; None where the network is about to train, and an older one has no meaning."""


def find_networks(pl_module: LightningModule, source: ModuleSource | None) -> list[nn.Module]:
    """The network, or the members of an ensemble; networks within parts that use an approximation are meant."""
    if source is not None:
        found = resolve_modules(source, pl_module, argument="network")
    else:
        found = [network_of(pl_module, argument="network")]
    return [network for module in found for network in _within(module, pl_module)]


def _within(module: nn.Module, pl_module: LightningModule) -> list[nn.Module]:
    """The single networks in a module: members of an ensemble, cores of what predicts with an approximation."""
    module = uncompiled(module)
    members = getattr(module, "core_models", None)
    if isinstance(members, nn.ModuleList) and len(members):
        return [network for member in members for network in _within(member, pl_module)]
    core = getattr(module, "core_model", None)
    if isinstance(core, nn.Module) and (isinstance(module, LaplaceUser) or is_dropout_sampler(module)):
        return _within(core, pl_module)
    inner = [n for n in ("core_model", "ema_model", "swa_model") if isinstance(getattr(module, n, None), nn.Module)]
    if inner:
        path = next((name for name, m in pl_module.named_modules() if m is module), "model")
        raise ValueError(
            f"{type(module).__name__} holds several networks or averages of one ({', '.join(inner)}); say which "
            f"one predicts, for example network='{path}.{inner[-1]}'"
        )
    return [module]


def _own(user: Any, laplaces: Sequence[LinearizedLaplace]) -> LinearizedLaplace | None:
    """The only approximation, or that of the network which is part of the user."""
    if len(laplaces) == 1:
        return laplaces[0]
    parts = list(user.modules()) if isinstance(user, nn.Module) else []
    found = [la for la in laplaces if any(la.model is part for part in parts)]
    return found[0] if len(found) == 1 else None


def attach(pl_module: LightningModule, laplaces: Sequence[LinearizedLaplace]) -> None:
    """Give every user its approximation; None to all where there is none."""
    for module in pl_module.modules():
        if isinstance(module, LaplaceUser):
            module.attach_laplace(_own(module, laplaces) if laplaces else None)
        if callable(
            connect := getattr(module, "connect", None)
        ):  # a criterion that asks what the routine predicts with
            connect(getattr(pl_module, "post_processing", None))


def require_own(pl_module: LightningModule, laplaces: Sequence[LinearizedLaplace]) -> None:
    """Refuse a part of the LightningModule that could not tell which member's approximation is its own."""
    for module in pl_module.modules():
        if isinstance(module, LaplaceUser) and _own(module, laplaces) is None:
            raise ValueError(
                f"{type(module).__name__} predicts with one Laplace approximation, and the ensemble gets "
                f"{len(laplaces)}, one for each member: leave it out, and make each member a LaplaceEnsemble, "
                "deep_ensembles([LaplaceEnsemble(network, num_samples=10), ...])"
            )


def predictive_options(pl_module: LightningModule, laplace: LinearizedLaplace) -> dict[str, Any]:
    """With which the LightningModule will predict by an approximation; defaults where it does not say."""
    users: list[Any] = [module for module in pl_module.modules() if isinstance(module, LaplaceUser)]
    users.sort(key=lambda user: all(m is not laplace.model for m in getattr(user, "modules", list)()))  # own ones first
    return next((dict(user.predictive_options) for user in users if hasattr(user, "predictive_options")), {})


def training_likelihood(
    given: LikelihoodName | Likelihood | None, pl_module: LightningModule
) -> LikelihoodName | Likelihood:
    """What is given, or the likelihood of the LightningModule's ``loss``, or ``classification``."""
    loss = getattr(pl_module, "loss", None)
    if given is not None or not isinstance(loss, nn.Module):
        return given or "classification"
    from torch_uncertainty.routines import SegmentationRoutine

    found = likelihood_of(loss)
    if isinstance(found, Categorical) and isinstance(pl_module, SegmentationRoutine):
        found = Categorical(**found.config() | {"ignore_index": 255})  # which the routine leaves out itself
    if found is None or (found.noisy and hasattr(pl_module, "num_classes")):
        return "classification"
    return found


def leave_inference(network: nn.Module) -> None:
    """Exchange tensors that were made under inference mode, which autograd refuses, for ordinary ones."""
    made: dict[int, Any] = {}
    for module in network.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and made_in_inference_mode(parameter):
                made.setdefault(id(parameter), nn.Parameter(parameter.clone(), parameter.requires_grad))
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and made_in_inference_mode(buffer):
                module._buffers[name] = made.setdefault(id(buffer), buffer.clone())


@torch.no_grad()
def share_buffers(network: nn.Module) -> None:
    """Give every process the buffers of rank 0, as the checkpoint has them: running statistics differ by a batch."""
    for buffer in network.buffers():
        torch.distributed.broadcast(buffer, src=0)


def log_scalars(
    trainer: Trainer,
    laplaces: Sequence[LinearizedLaplace],
    evidence: Sequence[EvidenceResult],
    calibrations: Sequence[Calibration],
) -> None:
    """Scalars, means where there are several networks."""
    found: dict[str, list[float]] = {
        "gamma": [sum(row.gamma for row in la.report()) for la in laplaces],
        "log_evidence": [result.log_marginal_likelihood for result in evidence],
        "noise_variance": [la.noise_variance for la in laplaces if la.likelihood.noisy],
        "temperature": [calibration.temperature for calibration in calibrations],
    }
    for name in ("network", "scaled", "evidence", "calibrated"):
        found[f"held_out/{name}/nll"] = [getattr(c, name).nll for c in calibrations if c.held_out]
    scalars = {f"laplace/{name}": sum(values) / len(values) for name, values in found.items() if values}
    for logger in trainer.loggers:
        logger.log_metrics(scalars, step=trainer.global_step)
        logger.save()


def say(
    laplaces: Sequence[LinearizedLaplace], evidence: Sequence[EvidenceResult], calibrations: Sequence[Calibration]
) -> None:
    """Print the precisions of every network, where the evidence of one was stopped, and the temperatures."""
    for k, laplace in enumerate(laplaces):
        which = f" of member {k}" if len(laplaces) > 1 else ""
        rank_zero_info(_summary(laplace, which))
        if evidence and not evidence[k].converged:
            rank_zero_info(
                f"  The evidence{which} was stopped after {evidence[k].iterations} iterations; log precisions changed "
                f"by {evidence[k].change:.2g} in the last one, which is good to predict with. To compare networks by "
                f"their evidence (up to {evidence[k].gap:.3g} nats higher at these precisions), take "
                "FitLaplace(max_iterations=None)."
            )
    for calibration in calibrations:
        rank_zero_info(str(calibration))


def _summary(laplace: LinearizedLaplace, which: str) -> str:
    lines = [
        f"  {row.name}: lambda {row.precision:.4g}, gamma {row.gamma:.4g} of {row.size}{', pruned' * row.pruned}"
        for row in laplace.report()
    ]
    more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    head = f"Laplace approximation{which} from {laplace.summary.samples} training samples:"
    return "\n".join([head, *lines[:_SHOWN], *more])
