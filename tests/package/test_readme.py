"""Every Python block of the README and the docs runs without a warning, every YAML block is accepted, links exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from reader import warned

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
WITH_CODE = [page for page in PAGES if "```python" in page.read_text(encoding="utf-8")]


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """(line number, text) of every fenced block of a language."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [(text[: match.start(1)].count("\n"), match.group(1)) for match in found]


def two_checkpoints() -> dict[str, object]:
    """Names that the README's first block takes from its tutorial, and files ``a.pt`` and ``b.pt``."""
    import torch

    tutorial = (ROOT / "docs" / "tutorials" / "1_merge.py").read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "example"}
    exec(tutorial.partition("# %%\n# What may be permuted")[0], names)
    for name, network in zip("ab", names["networks"], strict=True):
        torch.save(network.state_dict(), f"{name}.pt")
    return {
        "__name__": "example",
        "model": names["perceptron"](),
        "images": names["images"],
        "batches": names["training"],
        "held_out": names["test"],
    }


def same(shown: str, printed: str) -> bool:
    """Whether two lines agree but for a tenth of each number: trained networks differ from machine to machine."""
    number = r"\d+\.\d+"
    ours, theirs = (list(map(float, re.findall(number, line))) for line in (shown, printed))
    return re.sub(number, "#", shown) == re.sub(number, "#", printed) and ours == pytest.approx(theirs, rel=0.1)


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_python_blocks_run_in_order_and_print_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = blocks(page, "python")
    assert found
    names: dict[str, object] = two_checkpoints() if page.name == "README.md" else {"__name__": "example"}
    with warned(page) as unwelcome:
        for line, block in found:
            source = "\n" * line + block  # so that a traceback has the page's line numbers
            exec(compile(source, str(page), "exec"), names)
    assert unwelcome == []
    printed = capsys.readouterr().out.splitlines()
    shown = [line for _, block in blocks(page, "text") for line in block.splitlines() if line != "..."]
    assert [line for line in shown if not any(same(line, other) for other in printed)] == []


def test_yaml_blocks_are_accepted() -> None:
    from jsonargparse import ArgumentParser
    from lightning.pytorch import Callback

    callbacks = []
    for _, block in blocks(ROOT / "README.md", "yaml"):
        callbacks += yaml.safe_load(block)["trainer"]["callbacks"]
    assert callbacks
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--callbacks", type=list[Callback])
    parsed = parser.instantiate(parser.parse_object({"callbacks": callbacks}))
    assert [type(c).__name__ for c in parsed.callbacks] == [c["class_path"].rpartition(".")[2] for c in callbacks]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_commands_name_recipes_targets_and_subcommands_that_exist() -> None:
    from tu_symmetry.cli import COMMANDS, LIGHTNING

    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    lines = [line for _, block in blocks(ROOT / "README.md", "sh") for line in block.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    for program, first, *rest in (w for w in words if len(w) > 1):
        if program == "make":
            assert first in targets
        elif program.endswith("tu-symmetry"):
            assert first in COMMANDS | LIGHTNING
            assert all((ROOT / w).exists() for w in rest if w.startswith("recipes/"))
