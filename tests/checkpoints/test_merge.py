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
from toy_networks import Killed, counted, tree
from toy_networks import Normed as Net

import tu_symmetry as tus
from tu_symmetry import cli
from tu_symmetry.alignment import align as matching
from tu_symmetry.alignment import merging
from tu_symmetry.checkpoints.barriers import load_data
from tu_symmetry.checkpoints.merge import merge_files, working_folder
from tu_symmetry.files import FileError, FolderInUseError
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
    assert merge(paths, out, "--alpha", "0.3") == 0
    found = expected(2, weights=[0.7, 0.3]).state
    for name, tensor in tus.load_state(out).items():
        torch.testing.assert_close(tensor, found[name])
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
        (paths[:2], out, ["--only", "9.*"], "no permutation group"),
        (paths, out, ["--weights", "1", "2"], "3 finite numbers"),
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_network_and_a_tensor_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """While safetensors files are averaged; the module itself has no weights."""
    paths = [tmp_path / f"{k}.safetensors" for k in range(3)]
    first = Deep().state_dict()
    for k, path in enumerate(paths):
        save_file({n: (t * (0.9 - 0.1 * k)).to(dtype) for n, t in first.items()}, path)
    network = sum(t.numel() * dtype.itemsize for t in first.values())
    largest = max(t.numel() for t in first.values()) * 4  # in which it is averaged
    del first
    real, real_merge = merging.between, merging.merge

    def looking(*args: Any) -> Any:
        Alive.look()
        return real(*args)

    def measured(*args: Any, **kwargs: Any) -> Any:
        gc.collect()
        Alive.base, Alive.most = 0, 0
        Alive.base = Alive.look()
        Alive.most = 0
        return real_merge(*args, **kwargs)

    monkeypatch.setattr(merging, "between", looking)
    monkeypatch.setattr("tu_symmetry.checkpoints.merge.merge", measured)
    words = ["--model", f"{__name__}.Deep", "--input", "2,64", "--dtype", str(dtype).removeprefix("torch.")]
    out = ["--reference", "none", "--out", str(tmp_path / "merged.safetensors")]
    assert cli.main(["merge", *map(str, paths), *words, *out]) == 0
    assert network / 2 < Alive.most <= network + 3 * largest + 4096, f"{Alive.most / network:.1f} networks"


@pytest.mark.parametrize("more", [[], ["--correction", "batchnorm", "--points", "4"]])
def test_an_interrupted_merge_goes_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]) -> None:
    paths, whole, out = write(tmp_path, 4), tmp_path / "whole.safetensors", tmp_path / "merged.safetensors"
    data = ["--data", f"{__name__}.loader"] if more else []
    assert merge(paths, whole, *data, *more) == 0
    expected = tree(tmp_path)
    left = counted(monkeypatch, matching, "weight_matching")
    left.calls = 2
    with pytest.raises(Killed):
        merge(paths, out, *data, *more)
    state = tmp_path / "merged.merging"
    assert not out.exists() and len(list(state.glob("*.safetensors"))) == 2 + 4 * bool(more)
    left.calls = 10
    assert merge(paths, out, *data, *more) == 0
    assert left.used == 3, "a network was matched twice"
    assert not state.exists()
    found = {name: content for name, content in tree(tmp_path).items() if name.startswith("merged.")}
    assert found == {n.replace("whole.", "merged."): c for n, c in expected.items() if n.startswith("whole.")}


def test_what_is_kept_is_of_one_merge_and_sealed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths, out, folder = write(tmp_path, 3), tmp_path / "merged.safetensors", tmp_path / "merged.merging"
    with pytest.raises(KeyboardInterrupt), working_folder(folder, "one") as kept:
        kept["permutation/1"] = {"0": torch.arange(8)}
        raise KeyboardInterrupt
    path = next(folder.glob("*.safetensors"))
    with pytest.raises(KeyboardInterrupt), working_folder(folder, "one") as kept:
        kept["scores/0"] = {"loss": 0.1}
        with pytest.raises(FolderInUseError), working_folder(folder, "one"):
            pass
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt), working_folder(folder, "one") as kept:
        assert kept["scores/0"] == {"loss": 0.1} and torch.equal(kept["permutation/1"]["0"], torch.arange(8))
        raise KeyboardInterrupt
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(FileError, match="deleting it has it found again"), working_folder(folder, "one"):
        pass
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


def test_a_merge_that_is_killed_at_any_write_goes_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a rename on nothing changes on the disk any more, as after SIGKILL."""
    monkeypatch.setattr("tu_symmetry.checkpoints.merge._give_back", lambda **_: None)  # takes most of the time
    model = Net()
    graph = tus.discover_symmetries(model, torch.randn(2, 4))
    (tmp_path / "in").mkdir()
    paths = write(tmp_path / "in", 3)
    options: dict[str, Any] = {"data": load_data(f"{__name__}.loader", [], 40, torch.float32), "prefix": "model."}

    def run(name: str) -> dict[str, bytes]:
        (tmp_path / name).mkdir(exist_ok=True)
        merge_files(graph, paths, tmp_path / name / "m.safetensors", model, correction="batchnorm", **options)
        return tree(tmp_path / name)

    with monkeypatch.context() as patch:
        left = counted(patch, os, "replace")
        expected = run("alone")
    assert set(expected) == {"m.safetensors", "m.report.md", "m.report.json"}
    for moment in range(left.used):
        with monkeypatch.context() as patch:
            mortal = counted(patch, os, "replace")
            mortal.calls = moment
            for place, name in ((Path, "unlink"), (os, "rmdir"), (os, "unlink")):
                patch.setattr(place, name, mortal.while_alive(getattr(place, name)))
            with pytest.raises(Killed):
                run(str(moment))
        assert run(str(moment)) == expected, moment
