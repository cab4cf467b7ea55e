"""Words of a command line and names in a configuration: one grammar of values, one way to an object."""

from __future__ import annotations

import collections
import json
import os.path
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tu_symmetry.configs import ConfigError, parse_assignments, read_mapping, resolve


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-3", 1e-3),
        ("(3, 4)", (3, 4)),
        ("[relu, tanh]", ["relu", "tanh"]),
        ("{lr: 0.1}", {"lr": 0.1}),
        ("true", True),
        ("False", False),
        ("none", None),
        ("null", None),
        ("", None),
        ("resnet18", "resnet18"),
        ("'3'", "3"),
        ("runs/a b=c", "runs/a b=c"),
    ],
)
def test_a_value_is_a_python_literal_or_else_yaml(text: str, value: Any) -> None:
    found = parse_assignments([f"key={text}"], "--init")["key"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("value", [0, -1.5, True, None, "word", [1, "a", None], {"a": [1.5, {"b": False}]}])
def test_what_python_and_json_write_is_read_back(value: Any) -> None:
    for text in (repr(value), json.dumps(value)):
        assert parse_assignments([f"key={text}"], "--init") == {"key": value}


@pytest.mark.parametrize("text", ["key", "=3", "1a=3", "a.b=3", "key=[1, 2", "key=*a", "key={[]: 1}"])
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
    "path", ["nowhere_at_all.Net", "torch.nn.Linaer", "Linear", "", "a..b", "raises_at_import.Net"]
)
def test_names_that_lead_nowhere_are_refused(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raises_at_import.py").write_text("raise RuntimeError('no luck')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="cannot import") as error:
        resolve(path)
    assert path in str(error.value) and ("no luck" in str(error.value)) == path.startswith("raises")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"a: 1\nb: 2\na: 3\n", "'a' stands twice"), (b"[1, 2]", "must hold a mapping"), (b"a: Gr\xf6\xdfe", "UTF-8")],
)
def test_a_file_that_holds_no_mapping_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=f"(?s)own.*{message}"):
        read_mapping(tmp_path / "own.yaml")


def test_what_a_package_holds_stands_before_its_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "two_things").mkdir()
    (tmp_path / "two_things" / "report.py").write_text("def report(): pass\n")
    (tmp_path / "two_things" / "__init__.py").write_text("from two_things.report import report\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert callable(resolve("two_things.report"))
