"""What is installed: declared packages and no others, extras that are named where they are missing, true metadata."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from recipe_runs import run_table

import tu_symmetry
from tu_symmetry._extras import MissingExtraError
from tu_symmetry.configs import resolve

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tu_symmetry"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
DISTRIBUTIONS = {  # where a package is called otherwise than the distribution that has it
    "PIL": "pillow",
    "laplace": "laplace-torch",
    "pyro": "pyro-ppl",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=;, ]", r)[0].lower().replace("_", "-") for r in requirements}


def imports(node: ast.AST, extra: str | None = None) -> Iterator[tuple[str, str | None]]:
    """Every package that is imported below a node, with the extra of the `from_extra` around it."""
    if isinstance(node, ast.With):
        for item in node.items:
            call = item.context_expr
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "from_extra":
                extra = ast.literal_eval(call.args[0])
    if isinstance(node, ast.Import):
        yield from ((alias.name.partition(".")[0], extra) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        yield node.module.partition(".")[0], extra
    for child in ast.iter_child_nodes(node):
        yield from imports(child, extra)


@pytest.mark.parametrize("room", sorted({p.relative_to(PACKAGE).parts[0] for p in PACKAGE.rglob("*.py")}))
def test_everything_imported_is_declared_and_extras_are_guarded(room: str) -> None:
    runtime = names_of(PROJECT["dependencies"])
    for path in [PACKAGE / room] if room.endswith(".py") else sorted((PACKAGE / room).rglob("*.py")):
        for package, extra in imports(ast.parse(path.read_text(encoding="utf-8"))):
            if package in sys.stdlib_module_names or package == "tu_symmetry":
                continue
            distribution = DISTRIBUTIONS.get(package, package.replace("_", "-"))
            allowed = runtime if extra is None else names_of(EXTRAS[extra])
            assert distribution in allowed, f"{path.relative_to(ROOT)} imports {package}, declared nowhere ({extra=})"


USES: dict[str, tuple[str, tuple[Any, ...], str]] = {  # a function: the package it takes, its arguments, the extra
    "posterior.hamiltonian.chain_diagnostics": ("arviz_stats", ({"a": torch.zeros(9, 1)},), "sampling"),
}


@pytest.mark.parametrize("name", USES)
def test_what_is_missing_is_said_with_the_extra_that_brings_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package, arguments, extra = USES[name]
    for module in {package, *(m for m in sys.modules if m.startswith(f"{package}."))}:
        monkeypatch.setitem(sys.modules, module, None)  # as Python marks what cannot be imported
    with pytest.raises(MissingExtraError, match=re.escape(f"pip install 'tu-symmetry[{extra}]'")) as caught:
        resolve(f"tu_symmetry.{name}")(*arguments)
    assert repr(package) in str(caught.value) and caught.value.name == package


def test_the_command_line_says_it_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tu_symmetry.cli import main
    from tu_symmetry.cli.main import COMMANDS

    def missing(arguments: Any) -> int:
        raise MissingExtraError("HMC cannot be had: pip install 'tu-symmetry[sampling]'")

    monkeypatch.setitem(COMMANDS, "recipes", ("", lambda parser: missing))
    assert main(["recipes"]) == 2
    assert capsys.readouterr().err == "tu-symmetry: HMC cannot be had: pip install 'tu-symmetry[sampling]'\n"


def test_the_extra_all_has_all_that_users_need() -> None:
    (everything,) = EXTRAS["all"]
    assert set(re.findall(r"[a-z]+", everything.partition("[")[2])) == set(EXTRAS) - {"all", "dev"}


def test_metadata_agree_with_each_other() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == tu_symmetry.__version__ and citation["license"] == PROJECT["license"]
    assert [a["name"] for a in citation["authors"]] == [a["name"] for a in PROJECT["authors"]]
    assert {"cff-version", "title", "message", "authors"} <= set(citation)
    papers = {r["url"] for r in citation["references"]}
    assert {u for u in PROJECT["urls"].values() if "arxiv" in u} <= papers
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(url in readme for url in papers)
    minors = {c.rpartition("3.")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)}
    lowest, below = re.findall(r"3\.(\d+)", PROJECT["requires-python"])
    assert minors == {str(k) for k in range(int(lowest), int(below))}


def test_the_recipe_of_the_contributors_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for name, text in re.findall(r"^```yaml\n# (\S+)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(text)
    (module,) = re.findall(r"^```python\n(import math\n.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "my_experiment.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    results, shown = run_table(tmp_path, tmp_path / "out")
    assert results["count"]["powers"]["128"] == pytest.approx(215.586, abs=1e-3)
    assert "3 layers counted" in shown


def test_every_recipe_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tu_symmetry.tables.library import configurations, find_recipe, library

    names = {p.parent.relative_to(ROOT / "recipes").as_posix() for p in (ROOT / "recipes").rglob("table.yaml")}
    assert set(library()) == names and "symmetry_aware/mnist-small" in names
    assert find_recipe("symmetry_aware/mnist-small") == ROOT / "recipes" / "symmetry_aware" / "mnist-small"
    monkeypatch.chdir(tmp_path)
    assert find_recipe("recipes/symmetry_aware/mnist-small") == find_recipe("symmetry_aware/mnist-small")
    assert set(configurations()) == {"lightning/mnist_ensemble_rebasin.yaml"}  # what no table runs


def test_configurations_of_recipes_are_found_without_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """README's `fit --config recipes/...` runs where there are no recipes; a file that is there is taken."""
    from tu_symmetry.cli import main
    from tu_symmetry.tables.library import find_configuration, with_configurations

    monkeypatch.chdir(tmp_path)
    name, shipped = "lightning/mnist_ensemble_rebasin.yaml", ROOT / "recipes/lightning/mnist_ensemble_rebasin.yaml"
    for typed in (name, f"recipes/{name}", f"./recipes/{name}"):
        assert find_configuration(typed) == str(shipped)
    words = ["fit", "--config", name, f"--config=recipes/{name}", "-c", "mine.yaml", "--data.root", name]
    found = ["fit", "--config", str(shipped), f"--config={shipped}", "-c", "mine.yaml", "--data.root", name]
    assert with_configurations(words) == found
    for other in ("../README.md", "recipes/../README.md", "lightning", "lightning/README.md", str(tmp_path / name)):
        assert find_configuration(other) == other
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", f"recipes/{name}", "--print_config"])
    assert end.value.code == 0 and "tu_symmetry.callbacks.Rebasin" in capsys.readouterr().out
    (tmp_path / "lightning").mkdir()
    (tmp_path / name).write_text("trainer: {max_epochs: 3}\n")
    assert find_configuration(name) == name
