"""Real architectures: torchvision's and TorchUncertainty's, with the groups that they are known to have."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import nn
from zoo import Net

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
    moved = {m.parameter for m in graph["conv1"].members}
    assert moved >= {"bn1.running_mean", "bn1.running_var", "layer2.0.conv1.weight"}


TORCHVISION = [
    ("alexnet", 224, 7), ("vgg11_bn", 224, 10), ("resnext50_32x4d", 224, 53), ("squeezenet1_1", 224, 25),
    ("densenet121", 224, 120), ("mobilenet_v2", 224, 25), ("mobilenet_v3_small", 224, 27), ("mnasnet0_5", 224, 25),
    ("efficientnet_b0", 224, 40), ("regnet_x_400mf", 224, 71), ("regnet_y_400mf", 224, 69), ("convnext_tiny", 224, 22),
    ("vit_b_16", 224, 49), ("swin_t", 224, 52), ("inception_v3", 299, 96), ("googlenet", 224, 61),
    ("shufflenet_v2_x0_5", 224, 80), ("efficientnet_v2_s", 224, 75), ("swin_v2_t", 224, 76), ("maxvit_t", 224, 117),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "side", "groups"), TORCHVISION, ids=[name for name, _, _ in TORCHVISION])
def test_torchvision_families(name: str, side: int, groups: int) -> None:
    options = {"init_weights": False} if name in ("inception_v3", "googlenet") else {}
    check(getattr(torchvision.models, name)(**options), (1, 3, side, side), groups)


TIMM = [
    ("beit_base_patch16_224", 224, 49), ("cait_xxs24_224", 224, 153), ("coat_tiny", 224, 40),
    ("convit_tiny", 224, 49), ("convmixer_768_32", 224, 33), ("cpubone_nano", 224, 30),
    ("crossvit_tiny_240", 240, 80), ("cs3darknet_focus_s", 256, 26), ("csatv2", 512, 50), ("cspnext_tiny", 224, 26),
    ("davit_tiny", 224, 52), ("deit_tiny_patch16_224", 224, 49), ("densenet121", 224, 120), ("dla34", 224, 25),
    ("dpn48b", 224, 73), ("eca_botnext26ts_256", 256, 59), ("edgenext_xx_small", 256, 28),
    ("efficientformer_l1", 224, 23), ("efficientformerv2_s0", 224, 42), ("efficientvim_m1", 224, 28),
    ("efficientvit_b0", 224, 37), ("efficientvit_m0", 224, 65), ("eva02_tiny_patch14_224", 224, 36),
    ("fasternet_t0", 224, 35), ("fastvit_t8", 256, 16), ("focalnet_tiny_srf", 224, 40), ("gcvit_xxtiny", 224, 56),
    ("ghostnet_050", 224, 31), ("gmlp_ti16_224", 224, 31), ("hardcorenas_b", 224, 30), ("hgnetv2_b0", 224, 30),
    ("hiera_tiny_224", 224, 51), ("hrnet_w18_small", 224, 45), ("iformer_t", 224, 32),
    ("inception_next_atto", 224, 29), ("inception_resnet_v2", 299, 204), ("inception_v3", 299, 94),
    ("inception_v4", 299, 149), ("lcnet_035", 224, 17), ("lcnetv2_small", 224, 20), ("legacy_seresnet18", 224, 20),
    ("levit_128", 224, 62), ("lowformer_b0", 224, 46), ("mobilenetv5_base", 256, 72), ("mobilevit_xxs", 256, 61),
    ("mvitv2_tiny", 224, 33), ("nest_tiny", 224, 51), ("nextvit_small", 224, 74), ("pit_ti_224", 224, 51),
    ("poolformer_s12", 224, 16), ("pvt_v2_b0", 224, 40), ("rdnet_tiny", 224, 49), ("regnety_006", 224, 65),
    ("repghostnet_050", 224, 31), ("repvit_m1", 224, 41), ("res2next50", 224, 117), ("resnest14d", 224, 23),
    ("resnet18", 224, 12), ("resnetv2_18", 224, 12), ("rexnet_100", 224, 46), ("sam2_hiera_tiny", 512, 50),
    ("samvit_base_patch16_224", 224, 49), ("selecsls42", 224, 41), ("sequencer2d_s", 224, 94), ("shvit_s1", 224, 45),
    ("skresnet18", 224, 24), ("starnet_s100", 224, 13), ("swiftformer_xs", 224, 29),
    ("swin_tiny_patch4_window7_224", 224, 52), ("swinv2_cr_tiny_384", 384, 64), ("swinv2_tiny_window8_256", 256, 64),
    ("test_byobnet", 160, 14), ("test_coatnet", 160, 21),
    ("test_vit_relpos", 160, 46), ("tiny_vit_5m_224", 224, 50),
    ("tinynet_e", 106, 28), ("tnt_s_legacy_patch16_224", 224, 98), ("tresnet_m", 224, 57),
    ("twins_svt_small", 224, 83), ("visformer_tiny", 224, 57), ("vit_tiny_r_s16_p8_224", 224, 51),
    ("vitamin_small_224", 224, 66), ("vovnet39a", 224, 39), ("xception", 299, 28), ("xception41p", 299, 33),
    ("xcit_nano_12_p8_384", 384, 59),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "side", "groups"), TIMM, ids=[name for name, _, _ in TIMM])
def test_timm_families(name: str, side: int, groups: int) -> None:
    check(timm.create_model(name), (1, 3, side, side), groups)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "groups"), [("convnext", 13), ("mambaout", 18), ("nfnet", 28), ("vit", 25)])
def test_small_timm_networks(name: str, groups: int) -> None:
    check(timm.create_model(f"test_{name}"), (1, 3, 160, 160), groups)


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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["batched", "masked", "mimo", "lpbnn", "packed"])
def test_ensembles_in_one_network(kind: str) -> None:
    """Members share their units (batched, masked, mimo), or have streams and widths of their own (packed)."""
    resnet = importlib.import_module("torch_uncertainty.models.classification.resnet")
    options = {"masked": {"scale": 2.0}, "packed": {"alpha": 2, "gamma": 1}}.get(kind, {})
    build = getattr(resnet, f"{kind}_resnet")
    model = build(3, 10, arch=20, num_estimators=4, conv_bias=False, style="cifar", **options)
    groups = {"packed": 48, "lpbnn": 72}.get(kind, 12)
    check(model, (4, 3, 32, 32), groups)


def test_checks_of_a_distribution_are_no_branches() -> None:
    def mixture(m: Net, x: torch.Tensor) -> torch.Tensor:
        kind = torch.distributions.Categorical(logits=m.share)
        place = torch.distributions.Normal(m.b(torch.relu(m.a(x))), torch.nn.functional.softplus(m.share))
        return m.c(place.mean * kind.probs + place.log_prob(torch.ones_like(m.share)))

    before = torch.distributions.Distribution._validate_args
    check(Net(mixture, a=(4, 8), b=(8, 5), c=(5, 2), share=nn.Parameter(torch.randn(5))), (3, 4), [8, 5])
    assert torch.distributions.Distribution._validate_args is before


@pytest.mark.slow
def test_large_torch_uncertainty_backbones() -> None:
    names = ("inception_time", "vgg", "wideresnet")
    inception_time, vgg, wideresnet = (
        importlib.import_module(f"torch_uncertainty.models.classification.{name}") for name in names
    )
    image, series = (4, 3, 32, 32), (4, 3, 64)
    check(wideresnet.wideresnet28x10(3, 10, conv_bias=False, dropout_rate=0.3, style="cifar"), image, 16)
    check(vgg.vgg(3, 10, arch=11, style="cifar"), image, 10)
    check(vgg.packed_vgg(3, 10, arch=11, num_estimators=4, alpha=2, gamma=1, style="cifar"), image, 40)
    check(inception_time.inception_time(3, 10, kernel_size=40), series, 25)
    check(inception_time.packed_inception_time(3, 10, num_estimators=4, alpha=2), series, 88)
    check(inception_time.batched_inception_time(3, 10, num_estimators=4), series, 25)
    check(inception_time.bayesian_inception_time(3, 10, kernel_size=8).core_model, series, 25)
