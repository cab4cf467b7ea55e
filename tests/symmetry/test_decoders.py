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

import tu_symmetry as tus

SIZES = {
    "vocab_size": 31, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GPT2 = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_inner": 20, "n_positions": 32}
MOE = {"head_dim": 6, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 6}
LATENT = {
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "moe_intermediate_size": 12, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6,
    "v_head_dim": 6, "num_key_value_heads": 4,
}  # fmt: skip
STREAM, NORM, PAIRS, VALUES, GATED = 24, 24, 2 * 3, 2 * 6, 20
PLAIN = STREAM + NORM + 2 * (2 * NORM + PAIRS + VALUES + GATED)  # RMSNorm with gains before attention and MLP
# name, options, signs, entries of all matrices
DECODERS = [
    ("Llama", {}, PLAIN, 2 * 72),
    ("Qwen2", {}, PLAIN, 2 * 72),
    ("Mistral", {"head_dim": 6}, PLAIN, 2 * 72),
    ("Phi3", {}, PLAIN, 2 * 72),
    ("Granite", {}, PLAIN, 2 * 72),
    (
        "Mixtral",
        {"num_local_experts": 4},
        PLAIN + 2 * (4 * 20 - GATED),
        2 * 72,
    ),  # each expert has inner units of its own
    # norms of queries and of keys have gains: each of 2 + 4 heads and both gains turn their 3 pairs, two ways cancel
    ("Qwen3", {"head_dim": 6}, PLAIN + 2 * (6 * 3 + 3 - PAIRS) - 2 * 3, 2 * 72),
    ("Qwen3Moe", MOE, PLAIN + 2 * (6 * 3 + 3 - PAIRS) - 2 * 3 + 2 * (4 * 12 - GATED), 2 * 72),
    # experts are gated by SiLU and 1 + x: no sign may turn their units
    ("GptOss", GPT_OSS, STREAM + NORM + 2 * (2 * NORM + PAIRS + VALUES), 2 * 72),
    # norms multiply by 1 + w, which no sign may turn
    ("Gemma", {"head_dim": 6}, STREAM + 2 * (PAIRS + VALUES + GATED), 2 * 72),
    ("Gemma2", {"head_dim": 6}, STREAM + 2 * (PAIRS + VALUES + GATED), 2 * 72),
    ("Gemma3Text", {"head_dim": 6}, STREAM + 2 * (PAIRS + VALUES + GATED), 2 * 72),
    # norms of what attention and MLP return, and of all queries and keys
    ("Olmo2", {}, STREAM + NORM + 2 * (24 + 12 + 6 + VALUES + GATED + 2 * NORM), 2 * 72),
    # LayerNorm: one sign of the stream; a norm for both branches
    ("Cohere2", {}, 1 + 2 * (NORM + PAIRS + VALUES + GATED), 2 * 72),
    ("Starcoder2", {}, 1 + 2 * (2 * NORM + PAIRS + VALUES), 2 * 72),
    # a quarter of each head is rotated: one pair, and four units that a matrix mixes
    ("GPTNeoX", {}, 1 + NORM + 2 * (2 * NORM + 4 * (1 + 4) + 24), 2 * 4 * (16 + 36)),
    ("StableLm", {}, 1 + NORM + 2 * (2 * NORM + 2 * (1 + 5) + VALUES + GATED), 2 * 2 * (25 + 36)),
    ("GPT2", GPT2, 1 + 2 * (2 * NORM + 24 + 24), 2 * 4 * (36 + 36)),
    ("DeepseekV3", LATENT, 388, 2 * 4 * (36 + 36)),
]
# blocks of groups of other matrices: of the stream where all gains are equal, and of pairs under rotary positions, but
# gains of norms of queries and keys keep from it (here a head of StableLM has no whole pair)
PAIRED = {"orthogonal": 1, "complex": 2 * PAIRS}
ROTATED = dict.fromkeys(
    ("Llama", "Qwen2", "Mistral", "Phi3", "Granite", "Mixtral", "GptOss", "Gemma", "Gemma2"), PAIRED
) | {
    **{name: {"orthogonal": 1} for name in ("Qwen3", "Qwen3Moe", "Gemma3Text", "Olmo2")},
    "Cohere2": {"complex": 2 * PAIRS},  # its norm subtracts a mean by hand
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
