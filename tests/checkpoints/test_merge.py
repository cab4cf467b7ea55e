"""``tu-symmetry merge``: what it writes is what ``tu_symmetry.merge`` returns, and nothing of others is overwritten."""

from __future__ import annotations

import gc
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from toy_networks import Normed as Net
from toy_networks import tree

import tu_symmetry as tus
from tu_symmetry import cli
from tu_symmetry.alignment import align as matching
from tu_symmetry.alignment import merging
from tu_symmetry.checkpoints.barriers import load_data
from tu_symmetry.checkpoints.merge import merge_files, working_folder
from tu_symmetry.files import FileError
from tu_symmetry.symmetry.running.weights import random_state


def loader(count: int = 40) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 4, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(3, (count,), generator=generator)), batch_size=16)


def states(count: int) -> list[dict[str, Tensor]]:
    found = [random_state(Net(), torch.Generator().manual_seed(k)) for k in range(count)]
    return [{n: t.float() if t.is_floating_point() else t for n, t in state.items()} for state in found]


def write(folder: Path, count: int) -> list[Path]:
    """Plain files and a Lightning checkpoint with a prefix."""
    paths = [folder / f"{k}.{'ckpt' if k == 1 else 'pt'}" for k in range(count)]
    for k, (path, state) in enumerate(zip(paths, states(count), strict=True)):
        torch.save({"state_dict": {f"model.{n}": t for n, t in state.items()}} if k == 1 else state, path)
    return paths


def merge(paths: list[Path], out: Path, *more: str) -> int:
    words = ["--model", f"{__name__}.Net", "--input", "2,4", "--prefix", "model.", "--out", str(out)]
    return cli.main(["merge", *map(str, paths), *words, *more])


def expected(count: int, **options: Any) -> tus.alignment.Merged:
    model = Net()
    return tus.merge(tus.discover_symmetries(model, torch.randn(2, 4)), states(count), model, **options)


def test_the_merged_file_and_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths, out = write(tmp_path, 3), tmp_path / "out" / "merged.safetensors"
    data = ["--data", f"{__name__}.loader", "--correction", "repair"]
    assert merge(paths, out, *data, "--weights", "1", "2", "1") == 0
    printed = capsys.readouterr()
    assert "statistics corrected" in printed.out + printed.err
    batches = list(loader())
    found = expected(
        3,
        dataloader=[x for x, _ in batches],
        correction="repair",
        weights=[1, 2, 1],
        loss=F.cross_entropy,
        validation=[(x, y) for x, y in batches],
    )
    state = tus.load_state(out)
    assert state.keys() == found.state.keys()
    for name, tensor in found.state.items():
        torch.testing.assert_close(state[name], tensor)
    report = json.loads(out.with_name("merged.report.json").read_text())
    assert report["weights"] == [0.25, 0.5, 0.25] and report["transpositions"] == found.transpositions
    assert [f["sha256"] for f in report["files"]] == [hashlib.sha256(p.read_bytes()).hexdigest() for p in paths]
    for step in ("naive", "aligned", "corrected"):
        assert report["scores"][step]["loss"] == pytest.approx(found.scores[step]["loss"], rel=1e-5)
        assert 0 <= report["scores"][step]["accuracy"] <= 1
        assert report["barriers"][step] == pytest.approx(found.barriers[step], abs=1e-5)
    text = out.with_name("merged.report.md").read_text()
    assert "averaged as they are" in text and all(str(p) in text for p in paths)
    assert merge(paths, out) == 0  # its own results are replaced
    plain = expected(3).state
    assert all(torch.equal(t, plain[n]) for n, t in tus.load_state(out).items())


def test_the_share_of_the_second_network(tmp_path: Path) -> None:
    paths, out = write(tmp_path, 2), tmp_path / "merged.safetensors"
    assert merge(paths, out, "--alpha", "0.25", "--reference", "none") == 0
    one, two = states(2)
    torch.testing.assert_close(tus.load_state(out)["0.weight"], torch.lerp(one["0.weight"], two["0.weight"], 0.25))


def test_what_cannot_be_merged_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths, out = write(tmp_path, 3), tmp_path / "merged.safetensors"
    (tmp_path / "mine.safetensors").write_bytes(b"of another program")
    (tmp_path / "other.report.md").write_text("notes")
    torch.save({n: t * torch.nan for n, t in states(1)[0].items()}, tmp_path / "nan.pt")
    torch.save({n: t.double() for n, t in states(1)[0].items()}, tmp_path / "wide.pt")
    before = tree(tmp_path)
    for given, target, more, message in (
        (paths, out, ["--alpha", "0.3"], "there are 3: use --weights"),
        (paths[:2], out, ["--alpha", "2"], "between 0 and 1"),
        (paths[:2], out, ["--alpha", "x"], "no number"),
        (paths, out, ["--weights", "1", "2"], "3 finite numbers"),
        (paths, out, ["--weights", "greedy"], "no number"),
        (paths, out, ["--correction", "batchnorm"], "pass --data"),
        (paths[:1], out, [], "at least two"),
        ([tmp_path / "wide.pt", *paths], out, ["--data", f"{__name__}.loader"], "pass --dtype float64"),
        ([*paths, tmp_path / "nan.pt"], out, [], "nan.pt"),
        (paths, tmp_path / "merged.pt", [], "NAME.safetensors"),
        (paths, tmp_path / "mine.safetensors", [], "was not written by this command"),
        (paths, tmp_path / "other.safetensors", [], "was not written by this command"),
    ):
        assert merge(given, target, *more) == 2
        assert message in capsys.readouterr().err
        assert tree(tmp_path) == before


class Deep(nn.Sequential):
    """Twelve tensors of one size, so that a network is twelve of them."""

    def __init__(self) -> None:
        super().__init__(*[m for _ in range(12) for m in (nn.Linear(64, 64, bias=False), nn.Tanh())])


def flat(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that finds every network as good as any other, so that all of them go into the soup."""
    Alive.look()
    return 0 * F.mse_loss(outputs, targets)


def pairs() -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).half()
    return [(x, torch.zeros_like(x))]


class Alive:
    """The most bytes that all tensors of this process took together, as far as anybody looked."""

    base = most = 0

    @classmethod
    def look(cls) -> int:
        held = {}
        for found in gc.get_objects():
            if type(found) in (Tensor, nn.Parameter) and found.layout == torch.strided and not found.is_meta:
                storage = found.untyped_storage()
                held[storage.data_ptr()] = storage.nbytes()
        cls.most = max(cls.most, sum(held.values()) - cls.base)
        return sum(held.values())


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_two_networks_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """The module itself has no weights."""
    precision: torch.dtype = getattr(torch, dtype)
    paths = [tmp_path / f"{k}.safetensors" for k in range(2)]
    torch.manual_seed(0)
    first = Deep().state_dict()
    for k, path in enumerate(paths):
        save_file({n: (t * (0.9 - 0.1 * k)).to(precision) for n, t in first.items()}, path)
    network = sum(t.numel() * precision.itemsize for t in first.values())
    largest = max(t.numel() for t in first.values()) * 4  # in which it is averaged
    del first
    real, calls = merging.between, [0]

    def counted(*args: Any) -> Any:
        found = real(*args)
        calls[0] += 1
        if calls[0] % 11 == 0:
            Alive.look()
        return found

    def data() -> Any:
        return [(x.to(precision), y.to(precision)) for x, y in pairs()]

    monkeypatch.setattr(merging, "between", counted)
    monkeypatch.setattr("tu_symmetry.checkpoints.barriers.resolve", lambda name: flat if "flat" in name else data)
    options = ["--alpha", "0.3"]
    out = tmp_path / "merged.safetensors"
    words = ["--model", f"{__name__}.Deep", "--input", "2,64", "--dtype", dtype, "--reference", "none"]
    real_merge = merging.merge

    def measured(*args: Any, **kwargs: Any) -> Any:
        gc.collect()
        Alive.base, Alive.most = 0, 0
        Alive.base = Alive.look()
        Alive.most = 0
        return real_merge(*args, **kwargs)

    monkeypatch.setattr("tu_symmetry.checkpoints.merge.merge", measured)
    assert cli.main(["merge", *map(str, paths), *words, *options, "--out", str(out)]) == 0
    assert network < Alive.most <= 2 * network + 3 * largest + 4096, f"{Alive.most / network:.1f} networks"


class Killed(BaseException):
    """As SIGKILL: nothing catches it."""


@pytest.mark.parametrize("more", [[], ["--correction", "batchnorm", "--points", "4"]])
def test_an_interrupted_merge_goes_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]) -> None:
    paths, whole, out = write(tmp_path, 4), tmp_path / "whole.safetensors", tmp_path / "merged.safetensors"
    data = ["--data", f"{__name__}.loader"] if more else []
    assert merge(paths, whole, *data, *more) == 0
    expected = tree(tmp_path)
    real = matching.weight_matching
    left, matched = [2], []

    def mortal(*args: Any, **kwargs: Any) -> Any:
        if not left[0]:
            raise Killed
        left[0] -= 1
        matched.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(matching, "weight_matching", mortal)
    with pytest.raises(Killed):
        merge(paths, out, *data, *more)
    state = tmp_path / "merged.merging"
    assert not out.exists() and (state / "permutation-2.safetensors").is_file()
    left[0] = 10
    assert merge(paths, out, *data, *more) == 0
    assert len(matched) == 3, "a network was matched twice"
    assert not state.exists()
    found = {name: content for name, content in tree(tmp_path).items() if name.startswith("merged.")}
    assert found == {
        name.replace("whole.", "merged."): expected[name] for name in expected if name.startswith("whole.")
    }


def test_what_is_kept_is_of_one_merge_and_sealed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths, out = write(tmp_path, 3), tmp_path / "merged.safetensors"
    folder = tmp_path / "merged.merging"
    with pytest.raises(KeyboardInterrupt), working_folder(folder, "one") as kept:
        kept["permutation/1"] = {"0": torch.arange(8)}
        kept["scores/0"] = {"loss": 0.1}
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt), working_folder(folder, "one") as kept:
        assert kept["scores/0"] == {"loss": 0.1} and torch.equal(kept["permutation/1"]["0"], torch.arange(8))
        with pytest.raises(FileError, match="in use"), working_folder(folder, "one"):
            pass
        raise KeyboardInterrupt
    path = folder / "permutation-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(FileError, match="deleting it has it found again"), working_folder(folder, "one") as kept:
        _ = kept["permutation/1"]
    path.unlink()
    with pytest.raises(KeyError), working_folder(folder, "another") as kept:
        _ = kept["scores/0"]
    assert merge(paths, out) == 0 and not folder.exists()  # a third one: it begins anew
    folder.mkdir()
    (folder / "mine.txt").write_text("notes")
    assert merge(paths, out) == 2 and (folder / "mine.txt").exists()
    assert "was not written by this command" in capsys.readouterr().err


def test_points_and_partial_alignment(tmp_path: Path) -> None:
    paths, out = write(tmp_path, 2), tmp_path / "merged.safetensors"
    assert merge(paths, out, "--data", f"{__name__}.loader", "--points", "5", "--only", "3.*", "5.*") == 0
    report = json.loads(out.with_name("merged.report.json").read_text())
    assert set(report["lines"]) == {"naive", "aligned"}
    graph, (one, two) = tus.discover_symmetries(Net(), torch.randn(2, 4)), states(2)
    kept = graph.without(*(g.name for g in graph.permutations if g.size == 8))
    assert [g.size for g in kept.permutations] == [6]
    aligned = tus.align(kept, [two], reference=one).states[0]
    batches = list(loader())
    for step, end in (("naive", two), ("aligned", aligned)):
        (line,) = report["lines"][step]
        path = tus.loss_barrier(Net(), one, end, batches, F.cross_entropy, points=5)
        assert line["losses"] == pytest.approx(path.losses, rel=1e-4) and len(line["ratios"]) == 5
    torch.testing.assert_close(tus.load_state(out)["0.weight"], (one["0.weight"] + two["0.weight"]) / 2)
    assert "Largest excess over the lines" in out.with_name("merged.report.md").read_text()
    assert merge(paths, out, "--only", "9.*") == 2


def test_a_merge_that_is_killed_at_any_write_goes_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in front of each rename, and behind it, as by SIGKILL: from then on nothing changes on the disk."""
    monkeypatch.setattr("tu_symmetry.checkpoints.merge._give_back", lambda **_: None)  # takes most of the time
    torch.manual_seed(0)
    model = Net()
    graph = tus.discover_symmetries(model, torch.randn(2, 4))
    (tmp_path / "in").mkdir()
    paths = write(tmp_path / "in", 3)
    options: dict[str, Any] = {"data": load_data(f"{__name__}.loader", [], 40, torch.float32), "prefix": "model."}
    options |= {"correction": "batchnorm"}
    real, left, behind = os.replace, [0], [False]

    def mortal(*names: Any) -> None:
        left[0] -= 1
        if left[0] > 0 or (left[0] == 0 and behind[0]) or left[0] < -1000:
            real(*names)
        if -1000 < left[0] <= 0:
            raise Killed

    def run(folder: Path, moment: int) -> dict[str, bytes]:
        """What is there after a run that is killed at its renames from ``moment`` on, and one that is not."""
        folder.mkdir()
        for life in (moment, -2000):
            left[0] = life
            with monkeypatch.context() as patch:
                patch.setattr(os, "replace", mortal)
                for place, name in ((Path, "unlink"), (os, "rmdir"), (os, "unlink")) if life > 0 else ():
                    alive = getattr(place, name)
                    patch.setattr(place, name, lambda *a, alive=alive, **k: alive(*a, **k) if left[0] > 0 else None)
                try:
                    merge_files(graph, paths, folder / "m.safetensors", model, **options)
                    assert life < 0, "it was to be killed"
                except Killed:
                    assert life > 0
        return tree(folder)

    (tmp_path / "alone").mkdir()
    merge_files(graph, paths, tmp_path / "alone" / "m.safetensors", model, **options)
    expected = tree(tmp_path / "alone")
    assert set(expected) == {"m.safetensors", "m.report.md", "m.report.json"}
    for moment in (1, 5, 9, 11):
        for behind[0] in (False, True):
            assert run(tmp_path / f"{moment}{behind[0]}", moment) == expected, (moment, behind[0])
