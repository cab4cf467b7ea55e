"""Networks from the ``config.json`` that diffusers writes beside their weights, with inputs that fit it.

Only the class and its sizes are taken from the file: the class has to be one of diffusers' own models, of the families
that people merge (UNets, autoencoders, DiT).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from tu_symmetry.checkpoints.architecture import ArchitectureError, discovered, step, weightless
from tu_symmetry.files import FileError, read_json
from tu_symmetry.symmetry.graph import SymmetryGraph

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
_BATCH, _TOKENS = 2, 5


@dataclass(frozen=True)
class Pretrained:
    """A network that a ``config.json`` describes: the file's path, what it says, the precision of the module."""

    path: Path
    config: dict[str, Any]
    dtype: torch.dtype = torch.float32

    @classmethod
    def beside(cls, weights: Path, *, dtype: torch.dtype = torch.float32) -> Pretrained:
        """From the folder of a file of weights."""
        path = weights.parent / "config.json"
        hint = "say what the network is with --model and --input"
        if not path.is_file():
            raise ArchitectureError(f"{weights} does not say what network it is of (there is no {path}): {hint}")
        try:
            config = read_json(path)[0]
        except FileError as error:
            raise ArchitectureError(f"{error}: {hint}") from error
        name = config.get("_class_name")
        if not isinstance(name, str):
            raise ArchitectureError(f"{path} was not written by diffusers (it has no _class_name): {hint}")
        if name not in _INPUTS:
            raise ArchitectureError(
                f"{path} is of a {name}, and inputs are made for {', '.join(_INPUTS)} alone: {hint}"
            )
        return cls(path, config, dtype)

    def build(self) -> nn.Module:
        """The module, in evaluation mode; its weights have no values and take no memory, whatever its size."""
        try:
            import diffusers
        except ImportError as error:
            raise ArchitectureError(f"{self.path} describes a network of diffusers: pip install diffusers") from error
        name = self.config["_class_name"]
        try:
            with torch.random.fork_rng(devices=[]), _on_meta():
                module: nn.Module = getattr(diffusers, name).from_config(self.config)
        except Exception as error:
            raise ArchitectureError(
                f"diffusers {diffusers.__version__} makes no {name} of {self.path}: {type(error).__name__}: {error}"
            ) from error
        return weightless(module, self.dtype).eval()

    def inputs(self) -> Inputs:
        """Random positional and keyword arguments of ``forward``, as small as the network takes them."""
        generator = torch.Generator().manual_seed(0)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=self.dtype, device="cpu")

        try:
            return _INPUTS[self.config["_class_name"]](self.config, noise)
        except (KeyError, TypeError, RuntimeError) as error:
            raise ArchitectureError(
                f"{self.path} does not say what inputs the network takes ({error!r}): say it with --model and --input"
            ) from error

    def discover(self, console: Console, *, verify: bool = True) -> SymmetryGraph:
        """Build the module, find its symmetries and verify them, saying on ``console`` what takes how long."""
        with step(console, f"building {self.config['_class_name']} from {self.path}"):
            module = self.build()
        args, kwargs = self.inputs()
        return discovered(console, module, args, kwargs, verify=verify)


@contextmanager
def _on_meta() -> Iterator[None]:
    """Parameters go to the meta device as modules take them; buffers keep their values."""
    plain = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:  # one that is there already is tied
            param = nn.Parameter(param.to("meta"), param.requires_grad)
        plain(self, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]


def _unet(config: dict[str, Any], noise: Callable[..., Tensor]) -> Inputs:
    """Noisy latents, times, embedded text, and the sizes and pooled text that SDXL adds."""
    added = config.get("addition_embed_type")
    plain = ("encoder_hid_dim_type", "time_cond_proj_dim", "class_embed_type", "num_class_embeds")
    odd = [name for name in plain if config.get(name) is not None]
    if odd or added not in (None, "text_time"):
        name = odd[0] if odd else "addition_embed_type"
        raise ArchitectureError(f"this UNet takes inputs of {name}={config[name]!r}: say them with --model and --input")
    size = 2 ** len(config["down_block_types"])
    text = noise(_BATCH, _TOKENS, config.get("cross_attention_dim") or 1280)
    args = (noise(_BATCH, config["in_channels"], size, size), torch.tensor([7, 423], device="cpu"), text)
    if added is None:
        return args, {}
    pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
    sizes = 512 + 256 * noise(_BATCH, 6)
    return args, {"added_cond_kwargs": {"text_embeds": noise(_BATCH, pooled), "time_ids": sizes}}


def _autoencoder(config: dict[str, Any], noise: Callable[..., Tensor]) -> Inputs:
    """Images."""
    size = 2 ** len(config["down_block_types"])
    return (noise(_BATCH, config["in_channels"], size, size),), {}


def _dit(config: dict[str, Any], noise: Callable[..., Tensor]) -> Inputs:
    """Latents of the one size that its positions are made for, times and classes."""
    size = config["sample_size"]
    times, classes = torch.tensor([7, 423], device="cpu"), torch.tensor([0, 1], device="cpu")
    return (noise(_BATCH, config["in_channels"], size, size), times, classes), {}


_INPUTS: dict[str, Callable[[dict[str, Any], Callable[..., Tensor]], Inputs]] = {
    "UNet2DConditionModel": _unet,
    "AutoencoderKL": _autoencoder,
    "DiTTransformer2DModel": _dit,
}
