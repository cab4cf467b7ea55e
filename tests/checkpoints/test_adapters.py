"""``tu-symmetry merge`` on files of LoRA adapters, with the configuration that PEFT writes beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import tu_symmetry as tus
from tu_symmetry import cli


def write(folder: Path, seed: int, *, rank: int, alpha: float, **config: object) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state = {
        "base_model.model.q.lora_A.weight": torch.randn(rank, 6, generator=generator),
        "base_model.model.q.lora_B.weight": torch.randn(4, rank, generator=generator),
    }
    folder.mkdir()
    save_file(state, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": ["q"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return state


def product(state: dict[str, Tensor]) -> Tensor:
    return state["base_model.model.q.lora_B.weight"] @ state["base_model.model.q.lora_A.weight"]


def test_folders_of_peft_merge_with_their_scales(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "a", 0, rank=2, alpha=8.0)
    two = write(tmp_path / "b", 1, rank=4, alpha=6.0, use_rslora=True)
    out = tmp_path / "out" / "adapter_model.safetensors"
    words = ["merge", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(out)]
    assert cli.main([*words, "--alpha", "0.25"]) == 0
    assert "2 adapters merged" in capsys.readouterr().out
    expected = 0.75 * (8 / 2) * product(one) + 0.25 * (6 / 4**0.5) * product(two)
    state = tus.load_state(out)
    config = json.loads((out.parent / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    assert config["r"] == state["base_model.model.q.lora_A.weight"].shape[0] == 4 and not config["use_rslora"]
    torch.testing.assert_close(scale * product(state), expected)
    assert config["target_modules"] == ["q"]
    assert cli.main([*words, "--rank", "1"]) == 0  # its own results are replaced
    assert torch.linalg.matrix_rank(product(tus.load_state(out))) == 1


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a", 0, rank=2, alpha=8.0)
    write(tmp_path / "b", 1, rank=2, alpha=8.0, use_dora=True)
    torch.save({"0.weight": torch.ones(2, 2)}, tmp_path / "whole.pt")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "adapter_config.json").write_text("{}")
    a, b, whole = (str(tmp_path / name) for name in ("a", "b", "whole.pt"))
    for words, message in (
        ([a, b, "--out", str(tmp_path / "m.safetensors")], "is of DoRA"),
        ([a, whole, "--out", str(tmp_path / "m.safetensors")], "one kind at a time"),
        ([a, "--out", str(tmp_path / "m.safetensors")], "at least two"),
        ([a, f"{a}/adapter_model.safetensors", "--out", str(tmp_path / "m.pt")], "NAME.safetensors"),
        ([whole, whole, "--out", str(tmp_path / "m.safetensors")], "does not say what network it is of"),
        ([whole, "--rank", "2", "--out", str(tmp_path / "m.safetensors")], "--rank is of LoRA adapters"),
    ):
        assert cli.main(["merge", *words]) == 2
        assert message in capsys.readouterr().err
    write(tmp_path / "c", 1, rank=2, alpha=8.0)
    assert cli.main(["merge", a, str(tmp_path / "c"), "--out", str(tmp_path / "mine" / "m.safetensors")]) == 2
    assert "was not written by this command" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    ["[]", "{", '{"lora_alpha": "16"}', '{"lora_alpha": NaN}', '{"alpha_pattern": [1]}', '{"alpha_pattern": {"(": 1}}'],
)
def test_configurations_that_are_none_are_named(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, 0, rank=2, alpha=8.0)
    (tmp_path / "b" / "adapter_config.json").write_text(content)
    words = [str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "m.safetensors")]
    assert cli.main(["merge", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and ("adapter_config.json" in error or "is no pattern" in error), error
    assert not (tmp_path / "m.safetensors").exists()


def test_shares_of_any_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = write(tmp_path / "a", 0, rank=2, alpha=2.0)
    write(tmp_path / "b", 0, rank=2, alpha=2.0)
    out = tmp_path / "m" / "adapter_model.safetensors"
    words = ["merge", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(out), "--weights"]
    for weights in (["1", "-1"], ["0", "0"], ["nan", "1"], ["inf", "1"]):
        assert cli.main([*words, *weights]) == 2
        assert "finite numbers whose sum is not 0" in capsys.readouterr().err and not out.exists()
    assert cli.main([*words, "1e308", "1e308"]) == 0
    torch.testing.assert_close(product(tus.load_state(out)), product(state))
