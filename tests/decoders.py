"""Small decoders of transformers: options, and the signs and entries of matrices that each has, counted by hand."""

from __future__ import annotations

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
