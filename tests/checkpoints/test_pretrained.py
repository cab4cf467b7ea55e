"""Networks of diffusers from the folders that it saves: small ones with the layouts of SD 1.5, SDXL and DiT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import tu_symmetry as tus
from tu_symmetry import cli
from tu_symmetry.checkpoints.architecture import ArchitectureError
from tu_symmetry.checkpoints.pretrained import Pretrained

UNET = {"sample_size": 8, "layers_per_block": 1, "block_out_channels": (8, 16), "norm_num_groups": 4}
CROSS_DOWN, CROSS_UP = "CrossAttnDownBlock2D", "CrossAttnUpBlock2D"
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    # convolutions around the transformers; attention_head_dim is the number of heads, of growing width
    "sd15": (
        "UNet2DConditionModel",
        {
            **UNET,
            "down_block_types": (CROSS_DOWN, "DownBlock2D"),
            "up_block_types": ("UpBlock2D", CROSS_UP),
            "cross_attention_dim": 6,
            "attention_head_dim": 2,
        },
    ),
    # linear projections, several transformer layers where the image is small, sizes and pooled text as conditions
    "sdxl": (
        "UNet2DConditionModel",
        {
            **UNET,
            "down_block_types": ("DownBlock2D", CROSS_DOWN),
            "up_block_types": (CROSS_UP, "UpBlock2D"),
            "cross_attention_dim": 6,
            "attention_head_dim": (2, 4),
            "transformer_layers_per_block": (1, 2),
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 2,
            "projection_class_embeddings_input_dim": 5 + 12,
        },
    ),
    "vae": (
        "AutoencoderKL",
        {
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "block_out_channels": (8, 16),
            "layers_per_block": 1,
            "norm_num_groups": 4,
            "sample_size": 8,
        },
    ),
    "dit": (
        "DiTTransformer2DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 6,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 2,
            "sample_size": 4,
            "num_embeds_ada_norm": 5,
        },
    ),
}
pytestmark = pytest.mark.filterwarnings("ignore")


def save(folder: Path, name: str, seed: int) -> nn.Module:
    kind, config = CONFIGS[name]
    torch.manual_seed(seed)
    model: Any = getattr(diffusers, kind)(**config).eval()
    for p in model.parameters():  # norms, biases and zero-initialized heads too
        p.data += 0.1 * torch.randn_like(p)
    model.save_pretrained(folder)
    return model


def outputs(model: nn.Module, state: dict[str, Tensor], inputs: Any) -> Tensor:
    with torch.no_grad():
        return torch.func.functional_call(model, state, inputs[0], inputs[1]).sample


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_folders_merge_with_ratios_and_permuted_copies_merge_into_themselves(name: str, tmp_path: Path) -> None:
    one = save(tmp_path / "one", name, 0)
    folder = Pretrained.beside(tmp_path / "one" / "diffusion_pytorch_model.safetensors")
    graph = folder.discover(Console(quiet=True))
    assert not graph.unknown_operators and not graph.failed and len(graph.permutations) > 5
    p = tus.random_permutation(graph, generator=torch.Generator().manual_seed(3))
    state = {n: t.detach().clone() for n, t in one.state_dict().items()}
    two: Any = save(tmp_path / "two", name, 1)
    two.load_state_dict(tus.apply_permutation(graph, p, state))
    two.save_pretrained(tmp_path / "two")
    inputs, out = folder.inputs(), tmp_path / "merged.safetensors"
    expected = outputs(one, state, inputs)

    def merge(*more: str) -> dict[str, Tensor]:
        words = ["merge", str(tmp_path / "one"), str(tmp_path / "two"), "--out", str(out), *more]
        assert cli.main(words) == 0
        return tus.load_state(out)

    merged = merge("--alpha", "0.3")
    close = {"rtol": 1e-3, "atol": 1e-3 * float(expected.abs().max())}
    torch.testing.assert_close(outputs(one, merged, inputs), expected, **close)  # a merge of one function with itself
    naive = outputs(one, merge("--alpha", "0.3", "--reference", "none"), inputs)
    assert float((naive - expected).abs().max()) > 20 * close["atol"], "vacuous"
    # A ratio of one is the second network, in part aligned.
    part = {"dit": "transformer_blocks.", "vae": "encoder."}.get(name, "down_blocks.")
    merged = merge("--alpha", "1", "--only", f"{part}*")
    outside = [g.name for g in graph.permutations if not all(m.parameter.startswith(part) for m in g.members)]
    assert 0 < len(outside) < len(graph.permutations)
    aligned = tus.align(graph.without(*outside), [two.state_dict()], reference=state).states[0]
    for n, t in merged.items():
        torch.testing.assert_close(t, aligned[n].detach(), rtol=1e-5, atol=1e-6)


def test_what_a_folder_has_to_say(tmp_path: Path) -> None:
    weights = tmp_path / "diffusion_pytorch_model.safetensors"
    with pytest.raises(ArchitectureError, match=r"there is no .*config.json.*--model and --input"):
        Pretrained.beside(weights)
    config = tmp_path / "config.json"
    for content, message in (
        ("{", "no JSON"),
        ("[]", "holds list, not a JSON object"),
        ('{"_class_name": ["x"]}', "no _class_name"),
        (json.dumps({"model_type": "bert"}), "no _class_name"),
        (json.dumps({"_class_name": "Kandinsky"}), "is of a Kandinsky, and inputs are made for UNet2DConditionModel"),
    ):
        config.write_text(content)
        with pytest.raises(ArchitectureError, match=message):
            Pretrained.beside(weights)
    config.write_text(json.dumps({"_class_name": "UNet2DConditionModel", "block_out_channels": [8], "layers": "x"}))
    with pytest.raises(ArchitectureError, match="makes no UNet2DConditionModel"):
        Pretrained.beside(weights).build()
    with pytest.raises(ArchitectureError, match=r"does not say what inputs the network takes .*down_block_types"):
        Pretrained.beside(weights).inputs()
