"""Decoders of transformers, small and with random weights: their groups, counted by hand for each layer.

With a stream of 24 units, 4 heads of 6 (2 of keys and values where queries are grouped), 20 inner units and 2 layers:
signs of the stream, of the gains of the last norm, and for each layer those of gains and what reads them, of pairs of
units under rotary positions (3 for each head of keys), of values, and of the linear half of a gated layer; matrices of
36 entries for the values of each head of values, and for its queries and keys where no positions rotate them.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
import transformers
from decoders import DECODERS, GPT_OSS, LATENT, MOE, PAIRS, SIZES

import tu_symmetry as tus

# blocks of groups of other matrices: of the stream where all gains are equal, and of pairs under rotary positions, but
# gains of norms of queries and keys keep from it (here a head of StableLM has no whole pair)
PAIRED = {"orthogonal": 1, "complex": 2 * PAIRS}
ROTATED = dict.fromkeys(
    ("Llama", "Qwen2", "Mistral", "Phi3", "Granite", "Mixtral", "GptOss", "Gemma", "Gemma2"), PAIRED
) | {
    **{name: {"orthogonal": 1} for name in ("Qwen3", "Qwen3Moe", "Gemma3Text", "Olmo2")},
    "Cohere2": {"centered": 1, "complex": 2 * PAIRS},
    "Starcoder2": {"centered": 1, "complex": 2 * PAIRS},
    "GPTNeoX": {"centered": 1, "complex": 2 * 4},
    "StableLm": {"centered": 1},
    "GPT2": {},
    "DeepseekV3": {"orthogonal": 1 + 2 * 2, "complex": 2 * 2},  # latent units of queries, and of keys and values
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "signs", "entries"), DECODERS, ids=[name for name, *_ in DECODERS])
def test_decoders(name: str, options: dict[str, int], signs: int, entries: int) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | options, use_cache=False)
    head = "GPT2LMHeadModel" if name == "GPT2" else f"{name.removesuffix('Text')}ForCausalLM"
    model, tokens = getattr(transformers, head)(config).eval(), torch.randint(3, 30, (2, 7))
    graph = tus.discover_symmetries(model, tokens)
    tus.verify_symmetries(graph, model, tokens, on_failure="raise")
    assert graph.unknown_operators == ()
    general = [g for g in graph.linears if g.subgroup == "general"]
    assert (sum(g.size for g in graph.signs), sum(math.prod(g.shape) for g in general)) == (signs, entries)
    others = Counter({g.subgroup: 0 for g in graph.linears if g.subgroup != "general"})
    for group in (g for g in graph.linears if g not in general):
        assert group.size in ((2,) if group.subgroup == "complex" else (8, 24) if name == "DeepseekV3" else (24,))
        assert bool(group.constant) == (group.subgroup != "complex")
        others[group.subgroup] += math.prod(group.blocks)
    assert dict(others) == ROTATED[name]


# name, options, groups of the experts' own units in each layer, whether the experts may be permuted
DEALT = [
    ("Mixtral", {"num_local_experts": 4, "pad_token_id": None}, 20, True),
    ("Mixtral", {"num_local_experts": 4}, 20, False),  # the embedding of padding is zero, as are the router's outputs
    ("Qwen3Moe", MOE | {"pad_token_id": None}, 12, True),
    ("GptOss", GPT_OSS, 20, True),
    ("DeepseekV3", LATENT, 12, False),  # sigmoids may saturate
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize(("name", "options", "units", "movable"), DEALT)
def test_experts_of_decoders(name: str, options: dict[str, int | None], units: int, movable: bool, way: str) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | options, use_cache=False)
    model, tokens = getattr(transformers, f"{name}ForCausalLM")(config).eval(), torch.randint(3, 30, (2, 7))
    model.set_experts_implementation(way)
    graph = tus.discover_symmetries(model, tokens)
    tus.verify_symmetries(graph, model, tokens, on_failure="raise")
    layers = 1 if name == "DeepseekV3" else 2
    own = [g.shape for g in graph.permutations if any("mlp.experts.down_proj" in m.parameter for m in g.members)]
    expected = [(4,), (4, units)] if movable else [(units,)] * 4
    assert sorted(s for s in own if s != (24,)) == sorted(expected * layers)
