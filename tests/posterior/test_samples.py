"""Sample stores: what is written comes back, kill -9 leaves a readable store, foreign files are named and left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.states import SampleFileError, stack_states
from tu_symmetry.states import unstack as unstack_states


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def state(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
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
    opened = SampleStore.open(store.folder)
    assert opened.metadata == {"architecture": "net", "method": "hmc", "seed": 3, "step_size": 0.1}
    for s in (store, opened):
        assert len(s) == 6
        assert s.chains == [0, 0, 0, 1, 1, 2]
        assert s.steps == [10, 20, 30, 1, 2, 3]
        for i, found in enumerate(s):
            assert same(found, state(i))
            assert same(s[i], state(i))
        assert same(s[-1], state(5))
        assert [same(a, state(i)) for a, i in zip(s[1:3], (1, 2), strict=True)] == [True, True]
        assert same(s.stack([4, 0, 4]), stack_states([state(4), state(0), state(4)]))
        assert same(s.stack(torch.tensor([-1])), stack_states([state(5)]))
        assert same(s.load(), stack_states([state(i) for i in range(6)]))
        with pytest.raises(IndexError):
            s[6]


def test_stacking_and_unstacking_are_inverse() -> None:
    states = [state(i) for i in range(3)]
    assert all(same(a, b) for a, b in zip(unstack_states(stack_states(states)), states, strict=True))
    with pytest.raises(ValueError, match="empty"):
        stack_states([])
    with pytest.raises(ValueError, match=r"states\[1\] is of another architecture.*missing \['half'\]"):
        stack_states([states[0], {n: t for n, t in states[1].items() if n != "half"}])


def test_tied_weights_are_written_under_both_names(tmp_path: Path) -> None:
    w = torch.randn(3, 3)
    SampleStore.create(tmp_path / "s", architecture="tied", method="m").append({"a": w, "b": w, "c": w.T}, step=0)
    back = SampleStore.open(tmp_path / "s")[0]
    assert torch.equal(back["a"], w) and torch.equal(back["b"], w) and torch.equal(back["c"], w.T)


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


def test_states_that_do_not_belong_are_refused(store: SampleStore) -> None:
    before = files(store.folder)
    good = state(9)
    for bad, message in [
        ({n: t for n, t in good.items() if n != "0.bias"}, r"missing \['0.bias'\]"),
        (good | {"more": torch.zeros(1)}, r"unexpected \['more'\]"),
        (good | {"0.bias": torch.zeros(5)}, r"'0.bias' is torch.float32 of shape \(5,\), expected"),
        (good | {"half": torch.zeros(2)}, r"'half' is torch.float32"),
        (good | {"0.bias": torch.tensor([0.0, float("nan"), 0, 0])}, "'0.bias' holds NaN"),
    ]:
        with pytest.raises(ValueError, match=message):
            store.append(bad, step=99)
    with pytest.raises(ValueError, match=r"\(0, 20\)"):
        store.append(good, chain=0, step=20)
    with pytest.raises(ValueError, match="one entry for each of 2 steps"):
        store.append(stack_states([good]), step=[50, 51])
    with pytest.raises(ValueError, match="sequence of steps"):
        store.append([good], step=50)
    with pytest.raises(ValueError, match="1 chains for 2 steps"):
        store.append([good, good], chain=[0], step=[50, 51])
    with pytest.raises(ValueError, match="without tensors"):
        store.append({}, step=50)
    assert files(store.folder) == before
    assert len(store) == 6


def test_a_store_is_never_overwritten(store: SampleStore, tmp_path: Path) -> None:
    before = files(tmp_path)
    with pytest.raises(FileExistsError, match="not empty"):
        SampleStore.create(store.folder, architecture="net", method="hmc")
    assert files(tmp_path) == before
    (tmp_path / "empty").mkdir()
    assert len(SampleStore.create(tmp_path / "empty", architecture="net", method="hmc")) == 0
    with pytest.raises(ValueError, match="has 0 samples"):
        SampleStore.open(tmp_path / "empty").load()


@pytest.mark.parametrize("kind", ["foreign", "architecture"])
def test_damaged_and_foreign_files_are_named_and_left(store: SampleStore, kind: str) -> None:
    shard = store.records[1].shard
    if kind == "foreign":
        shard = store.folder / "model.safetensors"
        save_file({"w": torch.zeros(2)}, shard)
    else:
        other = SampleStore.create(store.folder.parent / "o", architecture="net", method="hmc")
        other.append({"w": torch.zeros(2)}, step=0)
        shard = shard.with_name("00000009-other.safetensors")
        other.records[0].shard.rename(shard)
    before = files(store.folder)
    with pytest.raises(SampleFileError, match=shard.name.replace(".", r"\.")):
        SampleStore.open(store.folder)
    assert files(store.folder) == before


def test_opening_what_is_no_store(store: SampleStore, tmp_path: Path) -> None:
    with pytest.raises(SampleFileError, match=r"no sample store: it has no store\.json"):
        SampleStore.open(tmp_path / "nothing")
    assert len(SampleStore.open(store.folder, like=state(0))) == 6
    with pytest.raises(SampleFileError, match="is of another architecture than the state that was given"):
        SampleStore.open(store.folder, like=nn.Linear(2, 2).state_dict())
