"""Sample stores: what is written comes back, kill -9 leaves a readable store, foreign files are named and left.

Damage of every byte of a store is in ``tests/package/test_files.py``.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import generator
from safetensors.torch import save_file
from torch import Tensor, nn

from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.states import SampleFileError, stack_states


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def state(seed: int) -> dict[str, Tensor]:
    g = generator(seed)
    found = {
        n: torch.randn(t.shape, generator=g) if t.is_floating_point() else torch.tensor(seed)
        for n, t in net().state_dict().items()
    }
    return found | {"mask": torch.tensor([True, False]), "half": torch.randn(2, generator=g).half()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def store(tmp_path: Path) -> SampleStore:
    store = SampleStore.create(tmp_path / "s", architecture="net", method="hmc", seed=3, step_size=0.1)
    store.append(state(0), chain=0, step=10)
    store.append([state(1), state(2)], chain=0, step=[20, 30])
    store.append(stack_states([state(3), state(4), state(5)]), chain=[1, 1, 2], step=[1, 2, 3])
    return store


def test_everything_comes_back(store: SampleStore) -> None:
    opened = SampleStore.open(store.folder, like=state(0))
    assert opened.metadata == {"architecture": "net", "method": "hmc", "seed": 3, "step_size": 0.1}
    for s in (store, opened):
        assert s.chains == [0, 0, 0, 1, 1, 2] and s.steps == [10, 20, 30, 1, 2, 3]
        assert all(same(found, state(i)) for i, found in enumerate(s)) and len(s) == 6
        assert same(s[-1], state(5))
        assert same(s.stack([4, 0, 4]), stack_states([state(4), state(0), state(4)]))
        assert same(s.load(), stack_states([state(i) for i in range(6)]))
        with pytest.raises(IndexError):
            s[6]


def test_tied_weights_are_written_under_both_names(tmp_path: Path) -> None:
    w = torch.randn(3, 3)
    SampleStore.create(tmp_path / "s", architecture="tied", method="m").append({"a": w, "b": w, "c": w.T}, step=0)
    assert same(SampleStore.open(tmp_path / "s")[0], {"a": w, "b": w, "c": w.T})


def test_iteration_reads_lazily(tmp_path: Path) -> None:
    store = SampleStore.create(tmp_path / "s", architecture="a", method="m")
    for i in range(3):
        store.append({"w": torch.full((2,), float(i))}, step=i)
    walk = iter(SampleStore.open(tmp_path / "s"))
    assert float(next(walk)["w"][0]) == 0
    store.records[2].shard.unlink()
    assert float(next(walk)["w"][0]) == 1  # the third is not needed for it
    with pytest.raises(FileNotFoundError):
        next(walk)


KILLED = """
import sys, torch
from tu_symmetry.posterior.samples import SampleStore
store = SampleStore.create(sys.argv[1], architecture="a", method="m")
print("go", flush=True)
i = 0
while True:
    store.append({"w": torch.full((50_000,), float(i))}, step=i)
    i += 1
"""


def test_kill_9_leaves_a_store_that_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "go\n"
    while len(list(folder.glob("*.safetensors"))) < 5:
        assert process.poll() is None
    try:
        process.wait(random.Random(0).random() / 50)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    store = SampleStore.open(folder)
    assert len(store) >= 5 and store.steps == list(range(len(store)))
    for i, found in enumerate(store):
        assert torch.equal(found["w"], torch.full((50_000,), float(i)))
    store.append({"w": torch.zeros(50_000)}, step=len(store))
    assert SampleStore.open(folder).steps == store.steps


def test_two_writers_do_not_overwrite_each_other(store: SampleStore) -> None:
    other = SampleStore.open(store.folder)
    store.append(state(7), chain=7, step=0)
    other.append(state(8), chain=8, step=0)
    assert sorted(SampleStore.open(store.folder).chains) == [0, 0, 0, 1, 1, 2, 7, 8]


def test_whole_files_are_taken_back_and_a_kill_leaves_each_there_or_gone(tmp_path: Path) -> None:
    store = SampleStore.create(tmp_path / "s", architecture="net", method="test")
    own = {"w": torch.arange(3.0)}
    for step in (1, 2, 3):
        store.append(own, step=step)
    store.append([own, own], chain=[0, 1], step=[4, 4])
    with pytest.raises(ValueError, match="in one file with others"):
        store.discard([0], after=3)
    assert store.discard([0, 1], after=2) == 3 and store.steps == [1, 2]
    gone = store.records[1].shard
    content = gone.read_bytes()
    assert store.discard([0], after=1) == 1
    gone.write_bytes(content)  # as a kill between the log and the file leaves it
    again = SampleStore.open(tmp_path / "s")
    assert again.steps == [1]
    again.append(own, step=2)
    again.discard([7])
    assert not gone.exists() and SampleStore.open(tmp_path / "s").steps == [1, 2]
    again.mark(0, "a", done=True)
    assert again.marked(0) == ("a", True) and again.marked(1) == (None, False)
    (tmp_path / "s" / "run-0.json").write_text("{}")
    with pytest.raises(SampleFileError, match="counts as another run's"):
        again.marked(0)


GOOD = state(9)
REFUSALS: list[tuple[Any, dict[str, Any], str]] = [
    ({n: t for n, t in GOOD.items() if n != "0.bias"}, {}, r"missing \['0.bias'\]"),
    (GOOD | {"more": torch.zeros(1)}, {}, r"unexpected \['more'\]"),
    (GOOD | {"0.bias": torch.zeros(5)}, {}, r"'0.bias' is torch.float32 of shape \(5,\), expected"),
    (GOOD | {"half": torch.zeros(2)}, {}, r"'half' is torch.float32"),
    (GOOD | {"0.bias": torch.tensor([0.0, float("nan"), 0, 0])}, {}, "'0.bias' holds NaN"),
    (GOOD, {"chain": 0, "step": 20}, r"\(0, 20\)"),
    (stack_states([GOOD]), {"step": [50, 51]}, r"one entry for each of \[50, 51\]"),
    ([GOOD], {"step": 50}, "sequence of steps"),
    ([GOOD, GOOD], {"chain": [0], "step": [50, 51]}, "1 chains for 2 steps"),
    ({}, {}, "without tensors"),
]


def test_states_that_do_not_belong_are_refused_and_a_store_is_never_overwritten(store: SampleStore) -> None:
    before = files(store.folder)
    for states, options, message in REFUSALS:
        with pytest.raises(ValueError, match=message):
            store.append(states, **{"step": 99} | options)
    with pytest.raises(FileExistsError, match="not empty"):
        SampleStore.create(store.folder, architecture="net", method="hmc")
    assert files(store.folder) == before and len(store) == 6


@pytest.mark.parametrize("kind", ["foreign", "architecture"])
def test_foreign_files_are_named_and_left(store: SampleStore, kind: str) -> None:
    shard = store.folder / "model.safetensors"
    if kind == "foreign":
        save_file({"w": torch.zeros(2)}, shard)
    else:
        other = SampleStore.create(store.folder.parent / "o", architecture="net", method="hmc")
        other.append({"w": torch.zeros(2)}, step=0)
        other.records[0].shard.rename(shard)
    before = files(store.folder)
    with pytest.raises(SampleFileError, match=r"model\.safetensors"):
        SampleStore.open(store.folder)
    assert files(store.folder) == before


def test_opening_what_is_no_store_or_an_empty_one(store: SampleStore, tmp_path: Path) -> None:
    with pytest.raises(SampleFileError, match=r"no sample store: it has no store\.json"):
        SampleStore.open(tmp_path / "nothing")
    with pytest.raises(SampleFileError, match="is of another architecture than the state that was given"):
        SampleStore.open(store.folder, like=nn.Linear(2, 2).state_dict())
    SampleStore.create(tmp_path / "empty", architecture="net", method="hmc")
    with pytest.raises(ValueError, match="has 0 samples"):
        SampleStore.open(tmp_path / "empty").load()
