"""What the tests share: the zoo's graphs, states and outputs, planted permutations, and modules made of a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from cases import CASES, BasicBlock, Case
from torch import Tensor, nn
from written import Made

import tu_symmetry as tus
from tu_symmetry.symmetry.running.weights import random_state

_GRAPHS: dict[str, tuple[nn.Module, tus.SymmetryGraph]] = {}

every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


def some_cases(test: Any) -> Any:
    """One case in three, where test_laws.py has all: the others are slow."""
    return pytest.mark.sampled(3)(every_case(test))


def discovered(case: Case) -> tuple[nn.Module, tus.SymmetryGraph]:
    if case.name not in _GRAPHS:
        torch.manual_seed(0)
        model = case.build().double().eval()
        _GRAPHS[case.name] = model, tus.discover_symmetries(model, case.inputs())
    return _GRAPHS[case.name]


def outputs(model: nn.Module, state: dict[str, Tensor], inputs: tuple) -> Tensor:  # type: ignore[type-arg]
    with torch.no_grad():
        out = torch.func.functional_call(model, state, inputs, tie_weights=False)
    return torch.cat([o.flatten() for o in out]) if isinstance(out, tuple) else out.flatten()


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / a.abs().max())


def weights(case: Case, seed: int = 3) -> tuple[nn.Module, tus.SymmetryGraph, dict[str, Tensor]]:
    model, graph = discovered(case)
    return model, graph, random_state(model, torch.Generator().manual_seed(seed))


def named(name: str) -> tuple[nn.Module, tus.SymmetryGraph, dict[str, Tensor]]:
    return weights(next(c for c in CASES if c.name == name))


def scale_only(graph: tus.SymmetryGraph, seed: int) -> dict[str, Tensor]:
    draw = tus.random_scale(graph, generator=torch.Generator().manual_seed(seed), std=0.4)
    return {g.name: draw[g.name] for g in graph.scales}


def small(*layers: nn.Module, inputs: tuple[int, ...] = (2, 4)) -> tuple[tus.SymmetryGraph, dict[str, Tensor]]:
    model = nn.Sequential(*layers).double().eval()
    graph = tus.discover_symmetries(model, torch.randn(inputs, dtype=torch.float64))
    return graph, random_state(model, torch.Generator().manual_seed(0))


def assert_equal_states(a: Mapping[str, Tensor], b: Mapping[str, Tensor], rtol: float = 1e-7) -> None:
    for name, tensor in a.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(b[name], tensor, rtol=rtol, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def planted(
    case: Case, seed: int, noise: float = 0.0
) -> tuple[tus.SymmetryGraph, dict[str, Tensor], dict[str, Tensor]]:
    model, graph = discovered(case)
    generator = torch.Generator().manual_seed(seed)
    reference = random_state(model, generator)
    noisy = {
        n: t + noise * float(t.std()) * torch.randn(t.shape, generator=generator, dtype=t.dtype)
        if t.is_floating_point() and t.numel() > 1
        else t
        for n, t in reference.items()
    }
    return graph, reference, tus.apply_permutation(graph, tus.random_permutation(graph, generator=generator), noisy)


def tied_resnet(width: int, blocks: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), *(BasicBlock(width, width, nn.Identity) for _ in range(blocks)),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10),
    )  # fmt: skip


def llama() -> tuple[nn.Module, Tensor]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), torch.randint(60, (2, 7), generator=torch.Generator().manual_seed(0))


def vit() -> tuple[nn.Module, Tensor]:
    import torchvision

    shape = {"image_size": 8, "patch_size": 4, "num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 48}
    return torchvision.models.VisionTransformer(**shape, num_classes=10), torch.randn(2, 3, 8, 8)


class Net(Made):
    """A function of named layers, parameters and buffers."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.hold(parts)
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def refused_by_torch(model: nn.Module, inputs: tuple[Any, ...], *, since: tuple[int, int] = (2, 14)) -> bool:
    """Whether a release of torch before ``since`` cannot export a network that runs.

    From that release on everything has to be found, so that no test passes for a network that is broken.
    """
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) >= since:
        return False
    model.eval()(*inputs)
    try:
        torch.export.export(model, inputs, strict=False)
    except Exception:  # whatever torch raises at an operator that it cannot trace
        return True
    return False
