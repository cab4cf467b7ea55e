"""One order and one set of words in every public signature.

Operands come first, the graph before all others, and are required; what has a default is an option, and an option after
the second argument is passed by name. So arguments can be added anywhere without breaking a call.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import public

import tu_symmetry as tus

PACKAGE = Path(tus.__file__ or "").parent
GRAPH_SECOND = {
    "CompactPosterior.from_states",  # of what class it makes one: the states
    "CompactPosterior.load",  # a file; the graph is needed for nothing but a check
}
OTHER_WORDS = {
    "draws": "num_samples",
    "n": "num_samples",
    "n_samples": "num_samples",
    "rng": "generator",
    "max_iter": "max_iterations",
    "max_sweeps": "max_iterations",
    "sweeps": "max_iterations",
    "iterations": "max_iterations",
}
# what may be left out, and is no option, or stands where the class that it extends has it
OPERANDS = {"canonicalize": {"method"}, "merge": {"dataloader"}, "LaplaceRegressionRoutine.__init__": {"loss"}}
SEEDED = {"verify_symmetries", "posterior_ensemble"}  # repeatable by default; named in a YAML file, where no object is


def public_callables() -> Iterator[tuple[str, Any]]:
    """Functions, constructors that are written by hand, and public methods of all that is exported."""
    for path, value in public.names():
        name = path.rpartition(".")[2]
        if inspect.isfunction(value):
            yield name, value
        if not inspect.isclass(value):
            continue
        hooks = {m for base in value.__mro__[1:] if not base.__module__.startswith("tu_symmetry") for m in vars(base)}
        for attribute, member in vars(value).items():
            function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
            generated = attribute == "__init__" and dataclasses.is_dataclass(value)
            own = attribute == "__init__" or not (attribute.startswith("_") or attribute in hooks)
            if inspect.isfunction(function) and own and not generated:
                yield f"{name}.{attribute}", function


def parameters(function: Any) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]


def test_operands_come_first_and_options_are_passed_by_name() -> None:
    for name, function in public_callables():
        by_position = [p for p in parameters(function) if p.kind is p.POSITIONAL_OR_KEYWORD]
        late = [p.name for p in by_position[2:] if p.default is not p.empty and p.name not in OPERANDS.get(name, ())]
        assert not late, f"{name}: options after the second argument are keyword-only: {late}"
        names = [p.name for p in by_position]
        assert "graph" not in names[1:] or name in GRAPH_SECOND, f"{name}: the graph comes first"


def test_one_word_for_one_thing() -> None:
    for name, function in public_callables():
        found = {p.name: OTHER_WORDS[p.name] for p in parameters(function) if p.name in OTHER_WORDS}
        assert not found, f"{name}: what stands for which: {found}"
        if "." not in name and name not in SEEDED:
            assert "seed" not in {p.name for p in parameters(function)}, f"{name}: functions take a generator"


def test_every_argument_is_in_the_glossary() -> None:
    """The table of names in ``docs/glossary.md``; a new name is decided there."""
    page = (PACKAGE.parent / "docs" / "glossary.md").read_text(encoding="utf-8").partition("## Names of arguments")[2]
    decided = {
        word for row in page.splitlines() for word in re.findall(r"`(\w+)`", row.split("|")[1] if "|" in row else "")
    }
    missing = {p.name: name for name, function in public_callables() for p in parameters(function)}
    assert not {argument: missing[argument] for argument in missing.keys() - decided}


def test_the_walk_sees_functions_constructors_and_methods() -> None:
    seen = {name for name, _ in public_callables()}
    assert {"align", "Rebasin.__init__", "CompactPosterior.sample", "CompactPosterior.load"} <= seen
    assert not {"Rebasin.on_train_start", "Alignment.__init__"} & seen
