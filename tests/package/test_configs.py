"""Words of a command line and names in a configuration: one grammar of values, one way to an object."""

from __future__ import annotations

import collections
import json
import os.path
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import nn

from tu_symmetry.configs import ConfigError, parse, parse_assignments, parse_value, resolve


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-3", 1e-3),
        ("(3, 4)", (3, 4)),
        ("[64, 64]", [64, 64]),
        ("[relu, tanh]", ["relu", "tanh"]),
        ("{lr: 0.1}", {"lr": 0.1}),
        ("{'lr': 0.1}", {"lr": 0.1}),
        ("true", True),
        ("False", False),
        ("None", None),
        ("none", None),
        ("null", None),
        ("", None),
        ("resnet18", "resnet18"),
        ("'3'", "3"),
        ("runs/a b=c", "runs/a b=c"),
        ("torch.nn.ReLU", "torch.nn.ReLU"),
    ],
)
def test_a_value_is_a_python_literal_or_else_yaml(text: str, value: Any) -> None:
    found = parse_value(text, "--init")
    assert found == value and type(found) is type(value)
    assert parse_assignments([f"key={text}"], "--init") == {"key": value}


@pytest.mark.parametrize("value", [0, -1.5, True, None, "word", [1, "a", None], {"a": [1.5, {"b": False}]}])
def test_what_python_and_json_write_is_read_back(value: Any) -> None:
    assert parse_value(repr(value), "--init") == value
    assert parse_value(json.dumps(value), "--init") == value


@pytest.mark.parametrize("text", ["key", "=3", "1a=3", "a b=3", "a.b=3", "key=[1, 2", "key=*a", "key={[]: 1}"])
def test_words_that_are_no_assignment_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--init") as error:
        parse_assignments(["first=1", text], "--init")
    assert text.partition("=")[0] in str(error.value)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("torch.nn.Linear", nn.Linear),
        ("torch.nn:Linear", nn.Linear),
        ("torch.nn.Linear.forward", nn.Linear.forward),
        ("os.path.join", os.path.join),
        ("collections.abc", collections.abc),
    ],
)
def test_names_of_modules_classes_and_what_is_in_them(path: str, found: Any) -> None:
    assert resolve(path) is found


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere_at_all.Net", "no module 'nowhere_at_all'"),
        ("torch.nn.Linaer", r"torch\.nn has no 'Linaer'"),
        ("torch.nn.Linear.forwards", r"torch\.nn\.Linear has no 'forwards'"),
        ("Linear", "no dotted name"),
        ("", "no dotted name"),
        (".", "cannot import"),
        ("a..b", "cannot import"),
        ("torch..nn", "cannot import"),
    ],
)
def test_names_that_lead_nowhere_say_where_they_end(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(path)


def test_a_module_that_fails_to_import_says_why(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails_to_import.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "raises_at_import.py").write_text("raise RuntimeError('no luck')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"importing fails_to_import fails.*not_installed_anywhere"):
        resolve("fails_to_import.Net")
    with pytest.raises(ConfigError, match="importing raises_at_import fails: RuntimeError: no luck"):
        resolve("raises_at_import.Net")


@dataclass(frozen=True)
class Inner:
    """A part of a configuration."""

    name: str = "digits"
    size: int | None = None


@dataclass(frozen=True)
class Outer:
    """A configuration."""

    title: str
    rate: float = 0.1
    inner: Inner = field(default_factory=Inner)
    more: dict[str, Any] = field(default_factory=dict)


def test_parse_reads_numbers_as_people_write_them() -> None:
    found = parse(Outer, {"title": "T", "rate": 1, "inner": {"size": 3}, "more": {"hidden": [3], "x": 1e-3}}, "t")
    assert found == Outer("T", 1.0, Inner("digits", 3), {"hidden": [3], "x": 1e-3})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"titel": "T"}, "unknown key 'titel'.*did you mean 'title'"),
        ({}, "required: title"),
        ({"title": "T", "inner": {"nam": "x"}}, "inner.*'nam'"),
        ({"title": "T", "rate": "fast"}, "rate"),
        ({"title": None}, "title has no value"),
    ],
)
def test_errors_name_the_place_and_the_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)somewhere.*{message}"):
        parse(Outer, values, "somewhere")
