"""The documentation site: no public name and no recipe is missing, docstrings' examples run, tutorials run (slow)."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import public
import pytest
import torch

import tu_symmetry

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "tu_symmetry"
EXAMPLES = sorted(p.relative_to(ROOT) for p in PACKAGE.rglob("*.py") if ">>> " in p.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    """What makes the pages that nobody writes by hand."""
    spec = importlib.util.spec_from_file_location("docs_pages", DOCS / "_ext" / "pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_has_every_public_name(pages: ModuleType) -> None:
    text = "\n".join(pages.reference().values())
    documented = set(re.findall(r"^\.\. (?:auto\w+|data):: (\S+)$", text, flags=re.MULTILINE))
    functional = {
        f"metrics.functional.{name}" for name in importlib.import_module("tu_symmetry.metrics.functional").__all__
    }
    assert {f"tu_symmetry.{name}" for name in {name for name, _ in public.names()} | functional} <= documented


def test_every_recipe_has_a_page_and_a_paper(pages: ModuleType, tmp_path: Path) -> None:
    made = pages.recipes(DOCS / "generated")
    assert {f"recipes/{pages.page_of(p)}.md" for p in pages.readmes()} < set(made)
    papers = "\n".join(p.read_text(encoding="utf-8") for p in (DOCS / "papers").glob("*.md"))
    named = {f.strip() for m in re.findall(r"\{\{ recipes: ([\w, ]+) \}\}", papers) for f in m.split(",")}
    assert named == {p.name for p in pages.RECIPES.iterdir() if p.is_dir()}
    numbers = set(re.findall(r"arxiv\.org/abs/([\d.]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert numbers <= set(re.findall(r"arxiv\.org/abs/([\d.]+)", papers))


def test_links_and_figures_of_the_pages_exist(pages: ModuleType) -> None:
    made = DOCS / "generated"
    texts = {**pages.recipes(made), **pages.copies(made), **pages.reference()}
    written = {(made / name).resolve() for name in texts}
    for name, text in texts.items():
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            place = ((made / name).parent / target).resolve()
            assert "://" in target or place in written or place.is_file(), f"{name} links to {target}"
        for figure in re.findall(r":img-bottom: (\S+)", text):
            assert ((made / name).parent / figure).resolve().is_file()


def test_the_front_page_names_what_the_reference_has_and_shows_figures_that_exist(pages: ModuleType) -> None:
    text, reference = (DOCS / "index.md").read_text(encoding="utf-8"), "\n".join(pages.reference().values())
    documented = set(re.findall(r"^\.\. auto\w+:: (\S+)$", reference, flags=re.MULTILINE))
    named = set(re.findall(r"`~(tu_symmetry\.[\w.]+)`", text))
    assert named and named <= documented
    pictures = [(DOCS / figure).resolve() for figure in re.findall(r":img-top: (\S+)", text)]
    assert len(set(pictures)) == 4 and all(p.is_file() for p in pictures)


def test_a_papers_page_shows_what_the_recipes_say(pages: ModuleType) -> None:
    text = pages.filled(DOCS / "papers" / "compact-posterior.md", DOCS / "generated/papers/compact-posterior.md")
    assert "compact_posterior--digits.md" in text and "| ensemble and VI |" in text and "{{" not in text
    assert "*Compact posterior, digits 8x8, MLP 64-128-10*" in text


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.as_posix())
def test_examples_of_docstrings_run(path: Path) -> None:
    module = importlib.import_module(".".join(path.with_suffix("").parts))
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    found = [t for t in finder.find(module, extraglobs={"torch": torch, "tus": tu_symmetry}) if t.examples]
    assert found
    for test in found:
        torch.manual_seed(0)
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((DOCS / "tutorials").glob("*.py")), ids=lambda p: p.stem)
def test_tutorials_run_and_warn_only_of_what_their_page_explains(path: Path, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "reader", path],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stdout, done.stderr
    said = re.findall(r"^(\w+) at (.*)$", done.stderr, flags=re.MULTILINE)
    page = path.read_text(encoding="utf-8")
    assert [(kind, text) for kind, text in said if f"``{kind}``" not in page] == []
