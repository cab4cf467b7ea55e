"""What is typed and does not fit: one line, and nothing of an earlier run is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tu_symmetry.cli import main

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    mlp = {"in_features": 64, "num_classes": 10, "hidden": [4]}
    model = {"class_path": "tu_symmetry.tables.models.MLP", "init_args": mlp}
    routine = {"num_members": 2, "data_order": "shared", "model": model}
    trainer = {
        "accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "default_root_dir": str(tmp_path / "run"),
        "callbacks": [{"class_path": "LastCheckpoint", "init_args": {"every_seconds": 0}}],
    }  # fmt: skip
    data = {"class_path": "DigitsDataModule", "init_args": {"train_size": 40, "test_size": 10, "batch_size": 20}}
    content = {"trainer": trainer, "routine": {"class_path": "MembersRoutine", "init_args": routine}, "data": data}
    path = tmp_path / "fit.yaml"
    path.write_text(yaml.safe_dump({"seed_everything": 0, **content}))
    return path


def said(capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    """The only line on standard error of a command that ends with status 2."""
    capsys.readouterr()
    try:
        status = main([str(word) for word in words])
    except SystemExit as end:
        status = int(end.code or 0)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tu-symmetry")]
    assert status == 2 and len(lines) == 1, (status, lines)
    return lines[0]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_members:", "num_member:", "MembersRoutine: Option 'num_member' is not accepted"),
        ("every_seconds", "every_second", "LastCheckpoint: Option 'every_second' is not accepted"),
        ("max_epochs", "max_epochz", "max_epochz"),
        ("num_members: 2", "num_members: two", "num_members: Expected a int. Got value: two"),
        ("", "--trainer.max_epochz=3", "trainer.max_epochz"),
        ("", "--routine.num_menbers=3", "num_menbers"),
        ("", "--routine=MembersRutine", "MembersRutine"),
        ("", "--config=nowhere.yaml", "nowhere.yaml"),
    ],
)
def test_a_mistake_in_a_file_or_a_flag_is_one_line(
    old: str, new: str, message: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if old:
        config.write_text(config.read_text().replace(old, new))
    assert message in said(capsys, "fit", "--config", config, *([] if old else [new]))


def test_a_checkpoint_that_cannot_be_taken_is_one_line_and_the_earlier_run_is_left_alone(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "--config", str(config)]) == 0
    folder = tmp_path / "run"
    last = folder / "checkpoints" / "last.ckpt"
    before = (folder / "config.yaml").read_bytes()
    content = last.read_bytes()
    more = ["fit", "--config", config, "--trainer.max_epochs=2"]
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    for k, damaged in enumerate((content[: len(content) // 2], b"", b"no zip", bytes(flipped))):
        path = tmp_path / f"{k}.ckpt"
        path.write_bytes(damaged)
        assert "is truncated, or" in said(capsys, *more, f"--ckpt_path={path}")
    torch.save(torch.load(last, weights_only=True)["state_dict"], tmp_path / "weights.ckpt")
    assert "no trainer of Lightning has written it" in said(capsys, *more, f"--ckpt_path={tmp_path}/weights.ckpt")
    for name in ("lst", str(folder / "checkpoints")):
        assert f"--ckpt_path {name}: there is no such file" in said(capsys, *more, f"--ckpt_path={name}")
    foreign = "--routine.model.hidden=[5]"
    assert "is of another network than the configuration's" in said(capsys, *more, foreign, f"--ckpt_path={last}")
    assert (folder / "config.yaml").read_bytes() == before and last.read_bytes() == content
    assert main([*map(str, more), f"--ckpt_path={last}"]) == 0
    assert torch.load(last, weights_only=True)["epoch"] == 1
    assert b"max_epochs: 2" in (folder / "config.yaml").read_bytes()
