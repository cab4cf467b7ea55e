"""Parts of results: made once, kept at once, and never mistaken for those of other arguments."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tu_symmetry.files import FileError
from tu_symmetry.tables.outcome import Parts, digest_tensors


def test_a_part_is_made_once_and_read_afterwards(tmp_path: Path) -> None:
    calls = []

    def make() -> dict[str, object]:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return {"value": 0.1 + 0.2, "endless": math.inf, "tensor": torch.arange(3)}

    options = {"networks": 3, "rate": 0.5}
    with pytest.raises(KeyboardInterrupt):
        Parts(tmp_path / "parts", options).take("a/b", make)
    for _ in range(3):
        found = Parts(tmp_path / "parts", options).take("a/b", make)
        assert found == {"value": 0.1 + 0.2, "endless": None, "tensor": [0, 1, 2]}
    assert len(calls) == 2


def test_parts_of_other_arguments_and_changed_ones_are_refused(tmp_path: Path) -> None:
    parts = Parts(tmp_path, {"epochs": 3})
    parts.take("a", lambda: {"value": 1})
    with pytest.raises(FileError, match="made with other options"):
        Parts(tmp_path, {"epochs": 4}).take("a", lambda: {"value": 2})
    assert parts.take("a", lambda: {"value": 3}) == {"value": 1}
    content = json.loads(parts.path("a").read_text())
    content["part"]["value"] = 2
    parts.path("a").write_text(json.dumps(content))
    with pytest.raises(FileError):
        parts.take("a", lambda: {"value": 1})


def test_digests_tell_tensors_apart() -> None:
    x = torch.arange(6.0)
    same = digest_tensors(x, x + 1)
    assert digest_tensors(x.clone(), x + 1) == same
    others = [(x + 1, x), (x.view(2, 3), x + 1), (x.double(), x + 1), (x,), (torch.cat([x, x + 1]),)]
    assert len({same, *(digest_tensors(*t) for t in others)}) == 6
