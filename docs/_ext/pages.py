"""Pages that nobody writes by hand: the reference, the recipes, contributing and the changelog.

They are made from what is in the repository when the site is built, so that a public name or a recipe cannot be missing
and a table cannot be old. They land in `docs/generated/`, which git ignores.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"

ROOMS = {
    "core": "Functions and classes that most need",
    "symmetry": "Symmetries: groups and certificates",
    "alignment": "Alignment: what it returns",
    "scaling": "Positive scales: canonical forms and mass",
    "laplace": "Linearized Laplace, in the space of weights and of outputs",
    "likelihoods": "Likelihoods",
    "rules": "Rules for operators of your own",
    "metrics": "Metrics, as torchmetrics classes",
    "callbacks": "Lightning callbacks",
    "routines": "Routines and post-processing for TorchUncertainty",
    "datamodules": "Data modules",
}


def write(docs: Path) -> None:
    """Write every page below ``generated/``; files whose text is the same are left alone."""
    made = docs / "generated"
    for name, text in {**reference(), **recipes(made), **copies(made)}.items():
        path = made / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


# -- reference ---------------------------------------------------------------------------------------------------------


def public_names() -> dict[str, dict[str, str]]:
    """Room to public name to where its documentation is found (``module.name``)."""
    import tu_symmetry

    found: dict[str, dict[str, str]] = {room: {} for room in ROOMS}
    top = tu_symmetry.__all__
    for package in (*ROOMS, "metrics.functional"):
        if package != "core" and importlib.util.find_spec(f"tu_symmetry.{package}") is not None:
            module = importlib.import_module(f"tu_symmetry.{package}")
            for name in sorted(getattr(module, "__all__", ())):
                if name != "functional":
                    own = "tu_symmetry" if name in top else module.__name__
                    found[package.partition(".")[0]][name] = f"{own}.{name}"
    known = {name for names in found.values() for name in names}
    found["core"] = {name: f"tu_symmetry.{name}" for name in sorted(top) if name not in known and name not in ROOMS}
    return {room: names for room, names in found.items() if names}


def reference() -> dict[str, str]:
    """A page for each room."""
    pages, toc = {}, []
    for room, names in public_names().items():
        title = ROOMS[room]
        lines = [title, "=" * len(title), ""]
        for name, path in names.items():
            package, _, leaf = path.rpartition(".")
            value = getattr(importlib.import_module(package), leaf)
            lines += [name, "-" * len(name), ""]
            if isinstance(value, type):
                lines += [f".. autoclass:: {path}", ""]
            elif callable(value):
                lines += [f".. autofunction:: {path}", ""]
            elif isinstance(value, dict):  # words and what they mean
                meanings = [f"   - ``{word}``: {meaning.replace('`', '``')}" for word, meaning in value.items()]
                lines += [f".. data:: {path}", "", *meanings, ""]
            else:
                lines += [f".. autodata:: {path}", ""]
        pages[f"api/{room}.rst"] = "\n".join(lines)
        toc.append(room)
    title = "Reference"
    lines = [title, "=" * len(title), "", "Every public name, by room. All of it loads on first use.", ""]
    lines += [".. toctree::", "   :maxdepth: 1", "", *(f"   {room}" for room in toc), ""]
    pages["api/index.rst"] = "\n".join(lines)
    return pages


# -- recipes -----------------------------------------------------------------------------------------------------------


def readmes() -> list[Path]:
    """The README of every recipe and of every family of recipes."""
    return [p for p in sorted(RECIPES.rglob("README.md")) if p.parent != RECIPES]


def page_of(readme: Path) -> str:
    """Name of a README's page: ``compact_posterior/digits`` to ``compact_posterior--digits``."""
    return "--".join(readme.parent.relative_to(RECIPES).parts)


def relinked(text: str, source: Path, page: Path) -> str:
    """Markdown of a file of the repository whose links work from a page of the site."""
    known = {p.parent.resolve(): page_of(p) for p in readmes()}
    own = {
        (ROOT / "docs/architecture.md").resolve(): ROOT / "docs/architecture.md",
        (ROOT / "docs/mathematics.md").resolve(): ROOT / "docs/mathematics.md",
        (ROOT / "CHANGELOG.md").resolve(): ROOT / "docs/generated/changelog.md",
        (ROOT / "CONTRIBUTING.md").resolve(): ROOT / "docs/generated/contributing.md",
    }

    def relative(target: Path) -> str:
        return os.path.relpath(target, page.parent)

    def link(match: re.Match[str]) -> str:
        image, words, target, anchor = match.groups(default="")
        if "://" in target or not target:
            return match.group(0)
        place = (source.parent / target).resolve()
        if image:
            return f"![{words}]({relative(place)})"
        folder = place.parent if place.name == "README.md" else place
        if place in own:
            return f"[{words}]({relative(own[place])}{anchor})"
        if folder in known:
            return f"[{words}]({relative(ROOT / 'docs/generated/recipes' / (known[folder] + '.md'))})"
        if folder == RECIPES:
            return f"[{words}]({relative(ROOT / 'docs/generated/recipes/index.md')})"
        return f"{words} (`{place.relative_to(ROOT)}`)"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)]*)?\)", link, text)


def recipes(made: Path) -> dict[str, str]:
    """A page for each README, the list of all, and a page for each paper."""
    found: dict[str, str] = {}
    for readme in readmes():
        name = f"recipes/{page_of(readme)}.md"
        found[name] = relinked(readme.read_text(encoding="utf-8"), readme, made / name)
    overview = RECIPES / "README.md"
    toc = ["```{toctree}", ":hidden:", "", *(page_of(p) for p in readmes()), "```", ""]
    text = relinked(overview.read_text(encoding="utf-8"), overview, made / "recipes/index.md")
    found["recipes/index.md"] = "\n".join([text, "## Figures", "", *gallery(made), *toc])
    return found


def figures() -> Iterator[tuple[Path, Path]]:
    """The first figure of each recipe that has any, with the recipe's README."""
    for readme in readmes():
        named = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", readme.read_text(encoding="utf-8"))
        if named:
            yield readme, (readme.parent / named[0]).resolve()


def gallery(made: Path) -> list[str]:
    """Cards with the first figure of each recipe."""
    lines = ["::::{grid} 1 2 2 3", ":gutter: 3", ""]
    for readme, figure in figures():
        title = next(line[2:] for line in readme.read_text(encoding="utf-8").splitlines() if line.startswith("# "))
        lines += [
            f":::{{grid-item-card}} {title}",
            f":link: {page_of(readme)}",
            ":link-type: doc",
            f":img-bottom: {os.path.relpath(figure, made / 'recipes')}",
            ":::",
            "",
        ]
    return [*lines, "::::", ""]


def measured(families: tuple[str, ...]) -> str:
    """The rows of the recipes' overview that belong to a paper, as a Markdown table."""
    rows = []
    for line in (RECIPES / "README.md").read_text(encoding="utf-8").splitlines():
        cells = [c.strip() for c in line.strip("|").split("|")]
        target = re.match(r"\[.*?\]\((\w+)", cells[0])
        if line.startswith("|") and target and target.group(1) in families:
            rows.append(line)
    return "\n".join(["| recipe | what | where it runs | measured |", "|---|---|---|---|", *rows])


def titles_of(families: tuple[str, ...]) -> list[str]:
    """What the tables of a paper's recipes are called, and what they are about, as the recipes themselves say."""
    lines = []
    for path in sorted(RECIPES.rglob("table.yaml")):
        relative = path.parent.relative_to(RECIPES)
        if relative.parts[0] not in families:
            continue
        table = yaml.safe_load(path.read_text(encoding="utf-8"))
        parts = [str(table.get(key, "")).strip().rstrip(".") for key in ("source", "note")]
        said = " ".join(f"{part}." for part in parts if part)
        lines.append(f"`{relative.as_posix()}`: *{table['title']}*\n: {said or 'see its page.'}\n")
    return lines


# -- files of the repository -------------------------------------------------------------------------------------------


def copies(made: Path) -> dict[str, str]:
    """Contributing, the changelog, and the papers with the recipes that belong to them."""
    found = {}
    for source in ("CHANGELOG.md", "CONTRIBUTING.md"):
        name = source.lower()
        found[name] = relinked((ROOT / source).read_text(encoding="utf-8"), ROOT / source, made / name)
    for page in sorted((ROOT / "docs/papers").glob("*.md")):
        name = f"papers/{page.name}"
        found[name] = filled(page, made / name)
    names = "\n".join(p.stem for p in sorted((ROOT / "docs/papers").glob("*.md")))
    found["papers/index.md"] = (
        "# Papers\n\nWhat was reproduced of each paper, and what was not.\n\n"
        f"```{{toctree}}\n:maxdepth: 1\n\n{names}\n```\n"
    )
    return found


def filled(page: Path, target: Path) -> str:
    """A paper's page, with the state of its recipes in place of ``{{ recipes: FAMILY, ... }}``."""

    def state(match: re.Match[str]) -> str:
        families = tuple(word.strip() for word in match.group(1).split(","))
        table = relinked(measured(families), RECIPES / "README.md", target)
        return f"{table}\n\n### What each table is\n\n" + "\n".join(titles_of(families))

    return re.sub(r"\{\{ recipes: ([\w, ]+) \}\}", state, relinked(page.read_text(encoding="utf-8"), page, target))
