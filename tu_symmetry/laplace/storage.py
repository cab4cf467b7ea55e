"""Files of a fitted Laplace approximation: one safetensors file, with its structure as JSON in the header.

The network's weights are not in it, only a digest of them: a curvature belongs to the weights at which it was taken.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tu_symmetry.files import FileError, read_safetensors, write_safetensors
from tu_symmetry.laplace.blocks import Block, CoupledBlock, DenseBlock, DiagonalBlock, KroneckerBlock
from tu_symmetry.laplace.curvature import Options, Summary
from tu_symmetry.laplace.determinants import Hyperprior
from tu_symmetry.laplace.fitted import FittedCurvature, FittedLaplace
from tu_symmetry.laplace.groups import PriorGroups
from tu_symmetry.laplace.likelihood import make_likelihood
from tu_symmetry.laplace.mode import Mode
from tu_symmetry.laplace.tangent import LastLayerModel, TangentModel, digest_of

_FORMAT = "tu_symmetry.laplace"
_VERSION = 7
_KINDS: dict[str, type[Block]] = {kind.kind: kind for kind in (KroneckerBlock, DenseBlock, DiagonalBlock, CoupledBlock)}


class LaplaceFileError(FileError):
    """A file that is truncated, changed, foreign, or of another network; the message names it."""


def save(fitted: FittedLaplace, path: str | os.PathLike[str]) -> None:
    """Write a fitted approximation, whole or not at all."""
    blocks, solution, layer = fitted.curvature.blocks, vars(fitted.solution), getattr(fitted.tangent, "layer", None)
    tensors = {"log_precision": fitted.log_precision, "theta": solution["theta"]}
    tensors |= {f"group_of.{name}": number for name, number in fitted.groups.of.items()}
    for i, block in enumerate(blocks):
        tensors |= {f"block{i}.{key}": t for key, t in {**block.tensors(), "groups": block.groups}.items()}
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "fingerprint": digest_of(fitted.state),
        "likelihood": fitted.likelihood.name,
        "likelihood_options": fitted.likelihood.config(),
        "prior": fitted.prior,
        "evaluate_at": fitted.evaluate_at,
        "options": asdict(fitted.options),
        "parameters": list(fitted.tangent.names),
        "layer": layer,
        "whole": list(fitted.curvature.whole),
        "groups": list(fitted.groups.names),
        "noise_variance": fitted.noise_variance,
        "noise_fixed": fitted.noise_fixed,
        "temperature": fitted.temperature,
        "sharpness": fitted.sharpness,
        "hyperprior": {key: _finite(value) for key, value in asdict(fitted.hyperprior).items()},
        "summary": asdict(fitted.summary),
        "solution": {key: _finite(value) for key, value in solution.items() if key != "theta"},
        "blocks": [{"kind": block.kind, "name": block.name, "start": block.start} for block in blocks],
    }
    write_safetensors(Path(path), tensors, {"laplace": json.dumps(content, allow_nan=False)})


def load(path: str | os.PathLike[str], model: nn.Module) -> FittedLaplace:
    """Read a fitted approximation of a network; predictions are bit-equal to those before :func:`save`."""
    path = Path(path)
    content, tensors = _read(path)
    known = {name for name, _ in model.named_parameters()}
    foreign = [name for name in content["parameters"] if name not in known]
    if foreign:
        raise LaplaceFileError(f"{path} belongs to another network: this one has no parameters {foreign[:6]}")
    options = Options(**_known(Options, content["options"]))
    likelihood = make_likelihood(content["likelihood"], content["likelihood_options"])
    if options.curvature == "last_layer":
        tangent: TangentModel = LastLayerModel(model, content["layer"], class_axis=likelihood.class_axis)
    else:
        tangent = TangentModel(model, content["parameters"], class_axis=likelihood.class_axis)
    if tangent.fingerprint() != content["fingerprint"]:
        raise LaplaceFileError(
            f"{path} was fitted at other weights than this network's; load its checkpoint, or fit again"
        )
    device, names = next(model.parameters()).device, content["groups"]
    groups = PriorGroups(tangent.slots, {name: names[int(tensors[f"group_of.{name}"])] for name in tangent.names})
    blocks = tuple(_block(i, entry, tensors, device) for i, entry in enumerate(content["blocks"]))
    solution: dict[str, Any] = {key: math.nan if v is None else v for key, v in content["solution"].items()}
    return FittedLaplace.begin(
        tangent,
        likelihood,
        options,
        FittedCurvature(blocks, Summary(**_known(Summary, content["summary"])), groups, tuple(content["whole"])),
        prior=content["prior"],
        evaluate_at=content["evaluate_at"],
        log_precision=tensors["log_precision"],
        noise_variance=content["noise_variance"],
        noise_fixed=content["noise_fixed"],
        hyperprior=Hyperprior(**{key: math.inf if v is None else v for key, v in content["hyperprior"].items()}),
        solution=Mode(tensors["theta"].to(device), **solution),
        temperature=content["temperature"],
        sharpness=content["sharpness"],
    )


def _block(number: int, entry: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> Block:
    prefix = f"block{number}."
    own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    groups = own.pop("groups")
    moved = {name: t.to(device) for name, t in own.items()}
    return _KINDS[entry["kind"]](entry["name"], entry["start"], groups, **moved)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file; LinearizedLaplace.save writes one")
    try:
        tensors, header = read_safetensors(path)
        content = json.loads(header.metadata.get("laplace", "{}"))
    except (FileError, json.JSONDecodeError) as error:
        raise LaplaceFileError(f"{path} cannot be read: {error}") from error
    if content.get("format") != _FORMAT or content.get("version") != _VERSION or content.get("groups") is None:
        raise LaplaceFileError(
            f"{path} holds no Laplace approximation of this version, {_FORMAT} {_VERSION}, but "
            f"{content.get('format')} {content.get('version')}: fit and save again"
        )
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.isnan().any():
            raise LaplaceFileError(f"{path} holds NaN in {name!r}; fit and save again")
    return content, tensors


def _known(kind: Any, content: Mapping[str, Any]) -> dict[str, Any]:
    """What a dataclass takes: older files have more, which a fit alone needs."""
    return {field.name: content[field.name] for field in fields(kind) if field.name in content}


def _finite(value: Any) -> Any:
    """JSON has neither NaN nor infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
