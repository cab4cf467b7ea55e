"""``$root``, ``$name`` and ``$data_root`` in configurations."""

from __future__ import annotations

from pathlib import Path

import pytest
from jsonargparse import ArgumentParser

from tu_symmetry.cli import main
from tu_symmetry.configs import ConfigError
from tu_symmetry.tables.functions import add_folders, with_folders
from tu_symmetry.tables.outcome import Outcome


def filled(*words: str) -> dict:
    parser = ArgumentParser()
    parser.add_argument("--config", action="config")
    add_folders(parser)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=dict[str, list[Path]])
    parser.add_argument("--text", type=str)
    return with_folders(parser.parse_args(list(words))).as_dict()


def test_folders_are_filled_in_wherever_they_stand() -> None:
    runs = "{a: [$root/a, $data_root/b], c: [d]}"
    found = filled("--root=r", "--name=n", "--data_root=x", "--out=$root/$name", f"--runs={runs}", "--text=$rooted $1")
    assert found["out"] == Path("r/n") and found["text"] == "$rooted $1"
    assert found["runs"] == {"a": [Path("r/a"), Path("x/b")], "c": [Path("d")]}


def test_the_name_is_that_of_the_last_file(tmp_path: Path) -> None:
    for name, text in (("base", "{out: $root/$name, text: a}"), ("own", "{text: $data_root}")):
        (tmp_path / f"{name}.yaml").write_text(text)
    files = [f"--config={tmp_path / name}.yaml" for name in ("base", "own")]
    assert filled(*files)["out"] == Path("runs/own") and filled(*files)["text"] == "data"
    assert filled(*files, "--name=other")["out"] == Path("runs/other")
    with pytest.raises(ConfigError, match=r"say what \$name is \(--name"):
        filled("--out=$root/$name")


def test_a_function_writes_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "walk.yaml").write_text("command: {class_path: toy_functions.walk, init_args: {out: $root/$name}}\n")
    assert main(["run", "--config", "walk.yaml"]) == 0 == main(["run", "-c", "walk.yaml", "--root=r", "--name=n"])
    assert Outcome.load("runs/walk").results == Outcome.load("r/n").results
