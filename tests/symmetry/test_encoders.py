"""Encoders, and decoders that read one: their groups, counted by hand from the mathematics for each module.

All have streams of 24 units, 4 heads of 6, 20 inner units and 2 layers. ``HEADS`` may be permuted, and units of queries
and keys and units of values in each. Streams behind LayerNorm have one sign, behind RMSNorm one for each unit, and none
where GELU makes them; gains, and what reads them, have signs of their own.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import tu_symmetry as tus

D, HEADS, MLP = (24,), [(4,), (4, 6), (4, 6)], (20,)
UNITS = 24 + 24  # signs of queries with keys, and of values
MAPS = 2 * 4 * 36  # entries of the matrices of one attention: queries with keys, and values, of each head
BERT = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 20}
VISION = {"image_size": 8, "patch_size": 4}
IMAGES, TOKENS = torch.randn(2, 3, 8, 8), torch.randint(3, 30, (2, 7))


class Logits(nn.Module):
    """A network of transformers without what it returns beside its logits."""

    def __init__(self, model: nn.Module, name: str = "logits", **kwargs: Any) -> None:
        super().__init__()
        self.model, self.name, self.kwargs = model, name, kwargs

    def forward(self, *inputs: Tensor) -> Tensor:
        return getattr(self.model(*inputs, **self.kwargs), self.name)


class DiTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.modulation = nn.LayerNorm(24, elementwise_affine=False), nn.Linear(24, 6 * 24)
        self.qkv, self.out, self.up, self.down = (nn.Linear(*s) for s in ((24, 72), (24, 24), (24, 20), (20, 24)))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        a, b, gate, *more = self.modulation(F.silu(c))[:, None].chunk(6, -1)
        q, k, v = self.qkv(self.norm(x) * (1 + b) + a).unflatten(-1, (3, 4, 6)).permute(2, 0, 3, 1, 4)
        x = x + gate * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        a, b, gate = more
        return x + gate * self.down(F.gelu(self.up(self.norm(x) * (1 + b) + a), approximate="tanh"))


class DiT(nn.Module):
    """The diffusion transformer of arXiv 2212.09748, whose positions are a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.positions = nn.Conv2d(3, 24, 4, 4), nn.Parameter(torch.randn(1, 4, 24))
        self.time, self.label = nn.Sequential(nn.Linear(16, 18), nn.SiLU(), nn.Linear(18, 24)), nn.Embedding(9, 24)
        self.blocks = nn.ModuleList([DiTBlock(), DiTBlock()])
        self.norm, self.modulation = nn.LayerNorm(24, elementwise_affine=False), nn.Linear(24, 48)
        self.head = nn.Linear(24, 48)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        angles = t[:, None] * torch.exp(-torch.arange(8) / 2)
        c = self.time(torch.cat([angles.cos(), angles.sin()], -1)) + self.label(y)
        h = self.patches(x).flatten(2).mT + self.positions
        for block in self.blocks:
            h = block(h, c)
        shift, scale = self.modulation(F.silu(c))[:, None].chunk(2, -1)
        return self.head(self.norm(h) * (1 + scale) + shift)


def vit() -> tuple[nn.Module, Any]:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**BERT, **VISION, num_labels=5)), IMAGES


def clip() -> tuple[nn.Module, Any]:
    text = BERT | {"vocab_size": 31, "max_position_embeddings": 16, "eos_token_id": 30}
    config = transformers.CLIPConfig(text_config=text, vision_config=BERT | VISION, projection_dim=16)
    return Logits(transformers.CLIPModel(config), "logits_per_image"), (TOKENS, IMAGES)


def t5(**options: Any) -> tuple[nn.Module, Any]:
    sizes = {"d_model": 24, "d_kv": 6, "d_ff": 20, "num_layers": 2, "num_heads": 4, "vocab_size": 31}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, **options)
    return Logits(transformers.T5ForConditionalGeneration(config), use_cache=False), (TOKENS, None, TOKENS)


def whisper() -> tuple[nn.Module, Any]:
    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder")
             for what, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 20))}  # fmt: skip
    more = {"num_mel_bins": 10, "max_source_positions": 8, "max_target_positions": 16, "vocab_size": 31}
    config = transformers.WhisperConfig(d_model=24, **sizes, **more, pad_token_id=0, decoder_start_token_id=1)
    model = transformers.WhisperForConditionalGeneration(config)
    return Logits(model, use_cache=False), (torch.randn(2, 10, 16), None, TOKENS)


def diffusers_dit() -> tuple[nn.Module, Any]:
    diffusers = pytest.importorskip("diffusers")
    sizes = {"num_attention_heads": 4, "attention_head_dim": 6, "num_layers": 2, "num_embeds_ada_norm": 9}
    model = diffusers.DiTTransformer2DModel(**sizes, sample_size=8, in_channels=3, norm_num_groups=1)
    return Logits(model, "sample"), (IMAGES, torch.tensor([3, 5]), torch.tensor([1, 2]))


LAYER = 2 * 24 + UNITS  # signs of two gains, and of an attention
# network, permutations, signs, entries of all matrices
NETWORKS = {
    # the gain of the last norm, which the head reads, has signs of its own
    "ViT": (vit, [D, *2 * [*HEADS, MLP]], 1 + 24 + 2 * LAYER, 2 * MAPS),
    # two towers, that of images with a norm before its stream; rotations of the 16 common units are not found: 16 * 16
    "CLIP": (clip, [D, D, (16,), *4 * [*HEADS, MLP]], (1 + 24) + (1 + 1 + 24) + 4 * LAYER + 16, 4 * MAPS),
    # one embedding for both streams and the head, and one table of relative positions for the heads of all layers
    "T5": (t5, [D, *2 * [(4,), *2 * HEADS[1:]], *2 * HEADS, *4 * [MLP]], 24 + 2 * LAYER + 24 + 2 * (LAYER + 24 + UNITS),
           6 * MAPS),
    "Whisper": (whisper, [D, D, D, *6 * HEADS, *4 * [MLP]], 2 * LAYER + 24 + 1 + 2 * (LAYER + 24 + UNITS), 6 * MAPS),
    # gates and what they multiply have signs
    "DiT": (DiT, [D, (18,), D, *2 * [*HEADS, MLP]], 1 + 2 * (2 * 24 + UNITS), 2 * MAPS),
    # positions are constants, which fix the stream; each block embeds steps and labels for itself; 4 * 24 inner units
    "DiT of diffusers": (diffusers_dit, [*2 * [D, D, *HEADS, (96,)]], 2 * (2 * 24 + UNITS), 2 * MAPS),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_encoders(name: str) -> None:
    torch.manual_seed(0)
    make, permutations, signs, entries = NETWORKS[name]
    found: Any = make()
    model, inputs = (found, (IMAGES, torch.rand(2), torch.tensor([1, 2]))) if isinstance(found, nn.Module) else found
    graph = tus.discover_symmetries(model.eval(), inputs)
    tus.verify_symmetries(graph, model, inputs, on_failure="raise")
    assert graph.unknown_operators == ()
    assert sorted(g.shape for g in graph.permutations) == sorted(permutations)
    always = [g for g in graph.linears if not g.constant]
    assert (sum(g.size for g in graph.signs), sum(math.prod(g.shape) for g in always)) == (signs, entries)
    streams = [(g.subgroup, g.size) for g in graph.linears if g.constant]
    assert streams == [("centered", 24)] * {"ViT": 1, "CLIP": 2, "Whisper": 1}.get(
        name, 0
    )  # T5 drops entries of its own
