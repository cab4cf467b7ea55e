"""Real architectures: torchvision's and TorchUncertainty's, with the groups that they are known to have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision
from torch import nn

import tu_symmetry as tus


def check(model: nn.Module, shape: tuple[int, ...], expected: list[Any] | int) -> tus.SymmetryGraph:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    graph = tus.discover_symmetries(model, x)
    tus.verify_symmetries(graph, model, x)
    assert graph.unknown_operators == ()
    found = sorted(g.size for g in graph.permutations)
    assert (len(found) == expected) if isinstance(expected, int) else (found == sorted(expected))
    return graph


def test_torchvision_resnet18_has_twelve_groups() -> None:
    """Four residual streams, tied over their stages, and one inner width for each of the eight blocks."""
    streams, inner = [64, 128, 256, 512], [64, 64, 128, 128, 256, 256, 512, 512]
    graph = check(torchvision.models.resnet18(), (1, 3, 64, 64), streams + inner)
    assert sum(g.size for g in graph.normalizations) == 4800  # every channel before each of the twenty BatchNorms
    assert {m.parameter for m in graph["conv1"].members} >= {
        "bn1.running_mean",
        "bn1.running_var",
        "layer2.0.conv1.weight",
    }


def test_torchvision_vgg11_bn_has_every_hidden_width() -> None:
    graph = check(torchvision.models.vgg11_bn(), (1, 3, 32, 32), [64, 128, 256, 256, 512, 512, 512, 512, 4096, 4096])
    flattened = next(
        m for g in graph.permutations for m in g.members if m.parameter == "classifier.0.weight" and m.axis == 1
    )
    assert tuple(flattened.index.shape) == (512, 49)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("alexnet", 7), ("vgg16", 15), ("resnext50_32x4d", 53), ("squeezenet1_1", 25), ("densenet121", 120),
        ("mobilenet_v2", 25), ("mobilenet_v3_small", 27), ("mnasnet0_5", 25), ("efficientnet_b0", 40),
        ("regnet_x_400mf", 71), ("regnet_y_400mf", 69), ("convnext_tiny", 22), ("vit_b_16", 49), ("swin_t", 52),
    ],
)  # fmt: skip
def test_torchvision_families(name: str, groups: int) -> None:
    check(getattr(torchvision.models, name)(), (1, 3, 224, 224), groups)


def test_torch_uncertainty_backbones() -> None:
    from torch_uncertainty.layers import FilterResponseNorm2d
    from torch_uncertainty.models.classification import lenet, resnet
    from torch_uncertainty.models.mlp import mlp

    eighteen = [64, 128, 256, 512, 64, 64, 128, 128, 256, 256, 512, 512]
    twenty = [16, 32, 64, *[16] * 3, *[32] * 3, *[64] * 3]
    shape = (2, 3, 32, 32)
    for arch, widths in ((18, eighteen), (20, twenty)):
        for norm in (nn.BatchNorm2d, FilterResponseNorm2d):
            model = resnet(3, 10, arch=arch, conv_bias=False, style="cifar", normalization_layer=norm)
            graph = check(model, shape, widths)
            assert sum(g.size for g in graph.scales) == sum(widths)
    check(lenet(in_channels=1, num_classes=10), (2, 1, 28, 28), 4)
    check(mlp(in_features=8, num_outputs=3, hidden_dims=[10, 12]), (2, 8), [10, 12])
