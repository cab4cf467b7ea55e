"""Exported mappings: what they name, in the formats of llm-compressor, may be scaled and rotated."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
import yaml
from decoders import DECODERS, SIZES
from torch import Tensor, nn
from toy_networks import Blocks
from zoo import small

import tu_symmetry as tus
from tu_symmetry.cli import main
from tu_symmetry.symmetry.quantizers import left_out, match, pattern, smoothings
from tu_symmetry.symmetry.running.weights import random_state

Weights = dict[str, Tensor]
FAST = {"Llama"}
every_decoder = pytest.mark.parametrize(
    ("name", "options"),
    [pytest.param(n, o, id=n, marks=() if n in FAST else pytest.mark.slow) for n, o, *_ in DECODERS],
)


def decoder(name: str, **options: Any) -> tuple[nn.Module, tus.SymmetryGraph]:
    config = getattr(transformers, f"{name}Config")
    config = config(**{**SIZES, **options}, use_cache=False)
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    tokens = torch.randint(3, 30, (2, 7), generator=torch.Generator().manual_seed(0))
    return model, tus.discover_symmetries(model, tokens)


def logits(graph: tus.SymmetryGraph, state: Weights) -> Tensor:
    """In float64 throughout, where norms of transformers compute in float32."""
    assert graph.probe is not None
    return next(t for t in graph.probe.run(state) if t.ndim == 3)


def matching(model: nn.Module, target: str, below: str = "") -> list[str]:
    """The modules that a target names, below another one."""
    whole = target.removeprefix("re:") if target.startswith("re:") else f"{re.escape(target)}$"
    inside = [name for name, _ in model.named_modules() if not below or name.startswith(f"{below}.")]
    return [name for name in inside if re.match(whole, name)]


def resolved(model: nn.Module, smooth: str, balance: list[str]) -> Iterator[tuple[str, list[str]]]:
    """For each smooth layer its balance layers, which are in the least module that holds one for each target."""
    for name in matching(model, smooth):
        parent = name
        while parent and not all(matching(model, target, parent) for target in balance):
            parent = parent.rpartition(".")[0]
        yield name, [found for target in balance for found in matching(model, target, parent)]


def smoothed(state: Weights, smooth: str, balance: list[str], generator: torch.Generator) -> Weights:
    """What AWQ does with a mapping: the last rows of the smooth layer are divided, columns are multiplied."""
    moved = dict(state)
    columns = state[f"{balance[0]}.weight"].shape[1]
    factors = torch.exp(0.5 * torch.randn(columns, dtype=torch.float64, generator=generator))
    for name in (f"{smooth}.weight", f"{smooth}.bias"):
        if name in state:
            moved[name] = state[name].clone()
            moved[name][-columns:] /= factors if state[name].ndim == 1 else factors[:, None]
    for name in balance:
        moved[f"{name}.weight"] = state[f"{name}.weight"] * factors
    return moved


def rotation(size: int, generator: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator)).Q


@every_decoder
def test_what_a_mapping_names_may_be_scaled(name: str, options: dict[str, Any]) -> None:
    model, graph = decoder(name, **options)
    generator = torch.Generator().manual_seed(1)
    state = random_state(model, generator)
    before = logits(graph, state)
    pairs = []
    for mapping in graph.export("awq"):
        for smooth, balance in resolved(model, mapping["smooth_layer"], mapping["balance_layers"]):
            pairs.append((smooth, {*balance}))
            state = smoothed(state, smooth, balance, generator)
            torch.testing.assert_close(logits(graph, state), before, rtol=1e-8, atol=1e-9)
    found = [(s.smooth, {*s.balance}) for s in smoothings(graph) if not s.problem]
    assert sorted(pairs, key=str) == sorted(found, key=str)


def test_llama_has_the_mappings_that_are_written_by_hand(tmp_path: Any) -> None:
    _, graph = decoder("Llama", num_key_value_heads=4)
    layer = r"re:model\.layers\.\d+\."
    attention = [rf"{layer}self_attn\.{n}_proj$" for n in "qkv"]
    mlp = [rf"{layer}mlp\.{n}_proj$" for n in ("gate", "up")]
    wanted = {
        rf"{layer}input_layernorm$": attention,
        rf"{layer}self_attn\.v_proj$": [rf"{layer}self_attn\.o_proj$"],
        rf"{layer}post_attention_layernorm$": mlp,
        rf"{layer}mlp\.up_proj$": [rf"{layer}mlp\.down_proj$"],
        "model.norm": ["lm_head"],
    }
    awq = graph.export("awq")
    assert {m["smooth_layer"]: m["balance_layers"] for m in awq} == wanted
    assert graph.export("smoothquant") == [[m["balance_layers"], m["smooth_layer"]] for m in awq]
    assert yaml.safe_load(yaml.safe_dump(awq)) == awq


@pytest.mark.parametrize(
    ("name", "options"), [("Llama", {}), pytest.param("Qwen2", {"num_key_value_heads": 4}, marks=pytest.mark.slow)]
)
def test_what_spinquant_is_told_may_be_rotated(name: str, options: dict[str, Any]) -> None:
    model, graph = decoder(name, **options)
    generator = torch.Generator().manual_seed(1)
    state = random_state(model, generator)
    before = logits(graph, state)
    told = graph.export("spinquant")
    roles = told["mappings"]
    assert (roles["embedding"], roles["lm_head"], roles["attn_head_dim"]) == ("model.embed_tokens", "lm_head", 6)
    for mapping in told["norm_mappings"]:
        for norm, linears in resolved(model, mapping["norm"], mapping["linears"]):
            gain = state[f"{norm}.weight"]
            state |= {f"{n}.weight": state[f"{n}.weight"] * gain for n in linears}
            state[f"{norm}.weight"] = torch.ones_like(gain)
    turn = rotation(24, generator)
    state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"] @ turn.T
    for target in (roles["attn_o"], *roles["mlp_out"]):
        state |= {f"{n}.weight": turn @ state[f"{n}.weight"] for n in matching(model, target)}
    for target in (roles["attn_q"], roles["attn_k"], roles["attn_v"], *roles["mlp_in"], roles["lm_head"]):
        state |= {f"{n}.weight": state[f"{n}.weight"] @ turn.T for n in matching(model, target)}
    turn = rotation(roles["attn_head_dim"], generator)
    for v, o in zip(matching(model, roles["attn_v"]), matching(model, roles["attn_o"]), strict=True):
        assert v.rpartition(".")[0] in matching(model, roles["attn"])
        for name in (n for n in (f"{v}.weight", f"{v}.bias") if n in state):
            heads = state[name].reshape(-1, 6, state[name].numel() // len(state[name]))
            state[name] = (turn @ heads).reshape(state[name].shape)
        state[f"{o}.weight"] = (state[f"{o}.weight"].reshape(24, -1, 6) @ turn.T).reshape(24, -1)
    torch.testing.assert_close(logits(graph, state), before, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        pytest.param("Gemma2", {"head_dim": 6}, "Untie the head", marks=pytest.mark.slow),
        pytest.param("Starcoder2", {}, "LayerNorm subtracts a mean", marks=pytest.mark.slow),
        ("Phi3", {}, "one layer each of queries, keys and values"),
        pytest.param("Cohere2", {}, "no embedding makes a stream", marks=pytest.mark.slow),
    ],
)
def test_spinquant_refuses_what_its_names_cannot_say(name: str, options: dict[str, Any], why: str) -> None:
    _, graph = decoder(name, **options)
    with pytest.raises(tus.SymmetryError, match=why):
        graph.export("spinquant")


def test_what_holds_and_no_mapping_can_say_is_left_out_with_its_reason() -> None:
    _, graph = decoder("Mixtral", num_local_experts=4)
    told = left_out(graph, "awq")
    assert "grouped queries" in told["model.layers.*.self_attn.v_proj -> model.layers.*.self_attn.o_proj"]
    assert any("experts in one tensor" in why for why in told.values())
    assert not any("o_proj" in str(m) or "gate" in str(m) for m in graph.export("awq"))
    _, fused = decoder("Phi3", num_key_value_heads=4)
    assert {m["smooth_layer"].rpartition("_")[0][-3:] for m in fused.export("awq")} >= {"qkv", "_up"}
    assert not any("qkv_proj" in smooth or "gate_up" in smooth for _, smooth in fused.export("smoothquant"))
    assert (
        "all of its rows"
        in left_out(fused, "smoothquant")["model.layers.*.mlp.gate_up_proj -> model.layers.*.mlp.down_proj"]
    )
    with pytest.raises(tus.SymmetryError, match="give one of awq, smoothquant, spinquant"):
        graph.export("gptq")  # type: ignore[arg-type]


def test_layers_that_differ_are_named_apart() -> None:
    graph = tus.discover_symmetries(Blocks(), torch.randn(2, 4))
    assert graph.export("awq") == [
        {"smooth_layer": r"re:blocks\.(0|2)\.a$", "balance_layers": [r"re:blocks\.(0|2)\.b$"]},
        {"smooth_layer": "blocks.1.a", "balance_layers": ["blocks.1.b", "blocks.1.c"]},
    ]


def test_a_pattern_matches_its_names_alone() -> None:
    modules = [f"layers.{k}.experts.{e}" for k in range(3) for e in range(2)]
    for names in (modules, modules[:2], modules[1:5:2], modules[1:3], modules[:1]):
        told = pattern(names, modules).removeprefix("re:")
        assert [m for m in modules if re.fullmatch(told, m)] == names


def test_convolutions_are_left_out() -> None:
    graph, _ = small(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3), inputs=(2, 2, 4, 4))
    assert graph.scales and graph.export("awq") == []
    assert "a convolution" in left_out(graph, "awq")["* -> *"]


def test_a_mapping_means_sets_of_modules_that_end_with_their_parent() -> None:
    experts = [f"layers.{k}.experts.{e}.{n}" for k in (0, 1) for e in (1, 10) for n in ("up", "down")]
    modules = [name for k in (0, 1) for name in (f"layers.{k}.norm", *(e for e in experts if e[7] == str(k)))]
    assert match(modules, "re:.*up$", ["re:.*down$"]) == [
        [[n], [n.removesuffix("up") + "down"]] for n in experts if n.endswith("up")
    ]
    per_layer = match(modules, "re:.*norm$", ["re:.*up$"])
    assert [(len(norm), len(up)) for norm, up in per_layer] == [(1, 2), (1, 2)]
    with pytest.raises(tus.SymmetryError, match="the last set of modules lacks"):
        match(modules, "re:.*norm$", ["re:.*gate$"])
    with pytest.raises(tus.SymmetryError, match="two targets"):
        match(modules, "re:.*norm$", ["re:.*up$", "re:.*(up|down)$"])
    assert match(modules, "re:.*none$", ["re:.*nothing$"]) == []


def test_the_command_prints_yaml_that_is_what_export_returns(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inspect", "--model", "toy_networks.Blocks", "--input", "2,4", "--format"]
    assert main([*words, "awq"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == tus.discover_symmetries(Blocks(), torch.randn(2, 4)).export("awq")
