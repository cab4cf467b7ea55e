"""No command overwrites or deletes what it reads, whichever option names it and however it is spelled."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from toy_networks import net, tree

from tu_symmetry import cli
from tu_symmetry.files import SCRATCH

MODEL = ["--model", "toy_networks.net", "--input", "1,4"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three networks, and two results of this library, so that nothing but their use protects them."""
    folder = tmp_path_factory.mktemp("made")
    torch.manual_seed(0)
    for name in ("x", "y", "z"):
        torch.save(net().state_dict(), folder / f"{name}.pt")
    x, y, z = (str(folder / f"{name}.pt") for name in ("x", "y", "z"))
    assert cli.main(["align", x, y, z, *MODEL, "--out", str(folder / "q")]) == 0
    assert cli.main(["merge", x, y, *MODEL, "--out", str(folder / "r.safetensors")]) == 0
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that one works in, with copies of them."""
    shutil.copytree(made, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def symbolic(path: str) -> str:
    os.symlink(os.path.abspath(path), "link.safetensors")
    return "link.safetensors"


def hard(path: str) -> str:
    os.link(path, "hard.safetensors")
    return "hard.safetensors"


def through_a_folder(path: str) -> str:
    os.symlink(os.path.abspath("."), "folder")
    return f"folder/{path}"


SPELLINGS: list[Callable[[str], str]] = [str, os.path.abspath, "q/../{}".format, symbolic, hard, through_a_folder]
COMMANDS: dict[str, tuple[str, list[str]]] = {  # the result that is read, and the words, with IN for how it is spelled
    "align, reference": ("q/x.safetensors", ["align", "x.pt", "y.pt", "--reference", "IN", "--out", "q"]),
    "align, checkpoint": ("q/x.safetensors", ["align", "x.pt", "y.pt", "IN", "--out", "q"]),
    "merge, reference": ("r.safetensors", ["merge", "x.pt", "y.pt", "--reference", "IN", "--out", "r.safetensors"]),
    "merge, checkpoint": ("r.safetensors", ["merge", "x.pt", "IN", "--out", "r.safetensors"]),
}


@pytest.mark.parametrize("spelled", SPELLINGS, ids=range(len(SPELLINGS)))
@pytest.mark.parametrize("name", COMMANDS)
def test_a_result_that_is_read_is_not_written(
    name: str, spelled: Callable[[str], str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, words = COMMANDS[name]
    given = spelled(path)
    before = tree(here)
    capsys.readouterr()
    assert cli.main([word if word != "IN" else given for word in [*words, *MODEL]]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tu-symmetry")]
    assert len(lines) == 1 and "is read by this command" in lines[0] and Path(path).name in lines[0]
    assert tree(here) == before


def test_other_spellings_of_the_result_are_found_too(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    through_a_folder("x.pt")
    before = tree(here)
    assert cli.main(["merge", "x.pt", "r.safetensors", *MODEL, "--out", "folder/r.safetensors"]) == 2
    assert cli.main(["align", "x.pt", *MODEL, "--reference", "q/x.safetensors", "--out", "folder/q"]) == 2
    assert "is read by this command" in capsys.readouterr().err and tree(here) == before


def test_parts_of_an_index_and_of_a_working_folder_are_read_too(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {n: t for n, t in torch.load("x.pt").items()}
    index = {"weight_map": dict.fromkeys(state, "r.safetensors")}
    Path("m.safetensors.index.json").write_text(json.dumps(index))
    Path("s.merging").mkdir()
    torch.save(state, "s.merging/permutation-1.safetensors")
    before = tree(here)
    for words in (
        ["merge", "x.pt", "m.safetensors.index.json", "--out", "r.safetensors"],
        ["merge", "x.pt", "s.merging/permutation-1.safetensors", "--out", "s.safetensors"],
        ["merge", "x.pt", "y.pt", "--reference", "s.merging/permutation-1.safetensors", "--out", "s.safetensors"],
    ):
        capsys.readouterr()
        assert cli.main([*words, *MODEL]) == 2, words
        assert "is read by this command" in capsys.readouterr().err, words
        assert tree(here) == before


def half_written(folder: Path, name: str) -> None:
    (folder / f".{name}.1a2b3c4d.tmp").write_bytes(b"half")
    assert SCRATCH.fullmatch(f".{name}.1a2b3c4d.tmp")


def test_what_a_killed_merge_leaves_is_taken_away(here: Path) -> None:
    words = ["merge", "x.pt", "y.pt", *MODEL, "--out", "r.safetensors"]
    before = tree(here)
    for name in ("r.safetensors", "r.report.md", "r.report.json"):
        half_written(here, name)
    (here / ".r.merging.1a2b3c4d.tmp").mkdir()  # killed while it took its folder away
    half_written(here, "another.safetensors")  # of somebody else
    assert cli.main(words) == 0
    after = {n: c for n, c in tree(here).items() if "another" not in n}
    assert after.keys() == before.keys() and after["r.safetensors"] != b"half"
    assert (here / ".another.safetensors.1a2b3c4d.tmp").exists()
