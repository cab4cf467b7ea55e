"""The audit of quantizers' tables: planted rows get the verdicts that they deserve, and the recipe's files run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_runs import RECIPES, run_table, shortened
from zoo import relative

from tu_symmetry.configs import merged, read_mapping
from tu_symmetry.experiments.quantizer_tables import Experts, audited, build

RECIPE = RECIPES / "inspect" / "quantizer_tables"
FILES = ("audit", "registry", "architectures")


def arguments() -> dict[str, Any]:
    found: dict[str, Any] = merged([read_mapping(RECIPE / f"{name}.yaml") for name in FILES])
    return found["command"]["init_args"]


GIVEN = arguments()


def test_every_table_is_used_and_every_architecture_has_one() -> None:
    for quantizer, tables in GIVEN["registries"].items():
        assert {own[quantizer] for own in GIVEN["architectures"].values() if quantizer in own} == {*tables}
    assert all({"awq", "smoothquant"} & own.keys() for own in GIVEN["architectures"].values())


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "Qwen2MoeForCausalLM", "Llama4ForConditionalGeneration (text)"])
def test_experts_as_layers_compute_what_stacked_ones_do(name: str) -> None:
    import transformers

    own = GIVEN["architectures"][name]
    torch.manual_seed(0)
    config = getattr(transformers, own["config"])(**own["options"], use_cache=False)
    stacked = getattr(transformers, own["model"])(config).eval()
    for parameter in stacked.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    layers = build(own).float()  # stacked ones have no double precision
    layers.load_state_dict(stacked.state_dict(), strict=False)
    for path, experts in ((n, m) for n, m in layers.named_modules() if isinstance(m, Experts)):
        held = stacked.get_submodule(path)
        for one, made, read in zip(experts, held.gate_up_proj, held.down_proj, strict=True):
            made, read = (made.T, read.T) if "Llama4" in name else (made, read)
            one["gate_proj"].weight.data, one["up_proj"].weight.data = made.chunk(2)
            one["down_proj"].weight.data = read
    tokens = torch.randint(3, 30, (2, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert relative(stacked(tokens).logits, layers(tokens).logits) < 1e-4


def test_norms_that_multiply_by_one_and_their_weight_are_replaced() -> None:
    own = GIVEN["architectures"]["Gemma2ForCausalLM"]
    assert "norm" in " ".join(n for n, m in build(own, GIVEN["offsets"]).named_modules() if type(m) is torch.nn.RMSNorm)


def test_planted_rows_get_their_verdicts() -> None:
    rows = [
        ["re:.*input_layernorm$", ["re:.*q_proj$", "re:.*k_proj$", "re:.*v_proj$"]],
        ["re:.*v_proj$", ["re:.*o_proj$"]],
        ["re:.*post_attention_layernorm$", ["re:.*gate_proj$"]],
        ["re:.*gate_proj$", ["re:.*down_proj$"]],
        ["re:.*act_fn$", ["re:.*down_proj$"]],
        ["re:.*nothing$", ["re:.*down_proj$"]],
    ]
    own = GIVEN["architectures"]["LlamaForCausalLM"] | {"awq": "planted"}
    found = audited(own, {"awq": rows}, [], GIVEN["rotations"])
    told = {(row["smooth"].rpartition(".")[2], row["verdict"]): row for row in found["awq"]}
    assert told.keys() == {
        ("input_layernorm", "holds"), ("v_proj", "skipped"), ("post_attention_layernorm", "fails"),
        ("gate_proj", "fails"), ("act_fn", "not applied"), ("*nothing$", "not applied"),
        ("post_attention_layernorm", "missing"), ("up_proj", "missing"), ("norm", "missing"),
    }  # fmt: skip
    assert told["post_attention_layernorm", "fails"]["why"] == "also read by mlp.up_proj"
    assert told["gate_proj", "fails"]["change"] > 1e-3 > 1e-9 > told["input_layernorm", "holds"]["change"]


def test_what_spinquant_rotates_holds_but_for_its_first_step() -> None:
    own, rows = GIVEN["architectures"]["LlamaForCausalLM"], GIVEN["registries"]["spinquant"]["default"]
    found = audited(own, {"spinquant": rows}, [], GIVEN["rotations"])["spinquant"]
    verdicts = {row["smooth"]: row["verdict"] for row in found}
    assert verdicts.pop("centered embeddings") == "fails" and {*verdicts.values()} == {"holds"}
    assert {*GIVEN["rotations"]} < verdicts.keys() and len(found) == 5 + len(GIVEN["rotations"]) + 1
    planted = GIVEN["rotations"] | {"attn_v": ["re:.*k_proj$"]}
    rows = audited(own, {"spinquant": rows}, [], planted)["spinquant"]
    assert {row["smooth"] for row in rows if row["verdict"] == "fails"} == {"attn_v", "centered embeddings"}


@pytest.mark.slow
def test_the_recipe_runs_end_to_end(tmp_path: Path) -> None:
    def edit(command: dict[str, Any], content: dict[str, Any]) -> None:
        given = content["command"]["init_args"]
        if "architectures" in given:
            given["architectures"] = {n: given["architectures"][n] for n in ("LlamaForCausalLM", "Gemma2ForCausalLM")}

    shortened(RECIPE, tmp_path / "recipe", ("audit", "report"), edit)
    results, shown = run_table(tmp_path / "recipe", tmp_path / "out")
    report = (tmp_path / "out" / "report" / "report.md").read_text()
    assert "they read pre_feedforward_layernorm" in report and "`centered embeddings`" in report
    assert "awq" in shown
    assert {row["verdict"] for row in results["audit"]["found"]["Gemma2ForCausalLM"]["smoothquant"]} >= {
        "fails",
        "missing",
    }
