"""``tu-symmetry merge``: what it writes is what ``tu_symmetry.merge`` returns, and nothing of others is overwritten."""

from __future__ import annotations

import gc
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from toy_networks import Killed, counted, killed_at_any_write, tree
from toy_networks import Normed as Net

import tu_symmetry as tus
from tu_symmetry import cli
from tu_symmetry.alignment import merging, over
from tu_symmetry.checkpoints.data import load_data
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


def test_adapters_are_left_to_peft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for k in range(2):
        get_peft_model(Net(), LoraConfig(target_modules=["0", "3"], r=2)).save_pretrained(tmp_path / str(k))
    files = [tmp_path / str(k) / "adapter_model.safetensors" for k in range(2)]
    assert merge(files, tmp_path / "out.safetensors") == 2
    assert "adapters, which PEFT merges: model.add_weighted_adapter" in capsys.readouterr().err


def test_the_merged_file_and_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths, out = write(tmp_path, 3), tmp_path / "out" / "merged.safetensors"
    data = ["--data", f"{__name__}.loader", "--correction", "repair"]
    assert merge(paths, out, *data, "--weights", "1", "2", "1") == 0
    printed = capsys.readouterr()
    assert "statistics corrected" in printed.out + printed.err and "stale" not in printed.err
    assert printed.out.splitlines()[-1] == f"3 networks merged into {out}"
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
    assert report["ensemble"]["loss"] == pytest.approx(found.ensemble["loss"], rel=1e-5)
    assert report["verdict"].startswith("loss of merged")
    for step in ("naive", "naive_corrected", "aligned", "corrected"):
        assert report["scores"][step]["loss"] == pytest.approx(found.scores[step]["loss"], rel=1e-5)
        assert 0 <= report["scores"][step]["accuracy"] <= 1
        assert report["barriers"][step] == pytest.approx(found.barriers[step], abs=1e-5)
    text = out.with_name("merged.report.md").read_text()
    assert "averaged as they are" in text and "ensemble of all" in text and all(str(p) in text for p in paths)
    assert report["model"] == "Normed" and report["correction"] == "repair"
    assert "Normed, correction: repair; barrier: " in text
    assert merge(paths, out, "--weights", "1", "0", "1") == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == f"2 of 3 networks merged into {out}"
    assert "warning: Normed has BatchNorm" in printed.err and "--correction batchnorm" in printed.err
    assert merge(paths, out) == 0  # its own results are replaced
    plain = expected(3).state
    assert all(torch.equal(t, plain[n]) for n, t in tus.load_state(out).items())


def test_networks_are_merged_over_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command, as in memory, after an interruption too; the report says what moved."""
    words: Any = ("permutations", "scales")
    paths, out = write(tmp_path, 3), tmp_path / "merged.safetensors"
    found = expected(3, over=words)
    left = counted(monkeypatch, over, "weight_matching")
    left.calls = 1
    with pytest.raises(Killed):
        merge(paths, out, "--over", *words)
    left.calls = 10
    assert merge(paths, out, "--over", *words) == 0 and left.used == 2
    assert not all(torch.equal(t, expected(3).state[n]) for n, t in found.state.items())
    assert all(torch.equal(t, found.state[n]) for n, t in tus.load_state(out).items())
    report = json.loads(out.with_name("merged.report.json").read_text())
    assert report["over"] == list(words)
    assert report["moved"] == [pytest.approx(move.counts()) for move in found.moves]
    assert min(moved["largest_factor"] for moved in report["moved"]) > 1
    text = out.with_name("merged.report.md").read_text()
    assert "| weight | NoT | signs, largest factor, mixed blocks |" in text


def test_what_cannot_be_merged_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths, out = write(tmp_path, 3), tmp_path / "merged.safetensors"
    (tmp_path / "mine.safetensors").write_bytes(b"of another program")
    (tmp_path / "other.report.md").write_text("notes")
    torch.save({n: t * torch.nan for n, t in states(1)[0].items()}, tmp_path / "nan.pt")
    torch.save({n: t.double() for n, t in states(1)[0].items()}, tmp_path / "wide.pt")
    heads = {n: torch.cat([t, t, t[:1]]) if n.startswith("5.") else t for n, t in states(1)[0].items()}
    torch.save(heads, tmp_path / "many.pt")
    before = tree(tmp_path)
    for given, target, more, message in (
        (paths, out, ["--weights", "1", "x"], "--weights"),
        (paths, out, ["--weights", "1", "2"], "3 finite numbers"),
        (paths, out, ["--correction", "batchnorm"], "pass --data"),
        (paths[:1], out, [], "at least two"),
        ([tmp_path / "wide.pt", *paths], out, ["--data", f"{__name__}.loader"], "pass --dtype float64"),
        ([*paths, tmp_path / "nan.pt"], out, [], "nan.pt"),
        ([tmp_path / "many.pt", *paths], out, [], "(option --init num_classes=7)"),
        (paths, tmp_path / "merged.pt", [], "NAME.safetensors"),
        (paths, tmp_path / "mine.safetensors", [], "was not written by this command"),
        (paths, tmp_path / "other.safetensors", [], "was not written by this command"),
    ):
        assert merge(given, target, *more) == 2
        assert message in capsys.readouterr().err
        assert tree(tmp_path) == before


def tensors_in_memory() -> int:
    """The bytes of all tensors of this process."""
    held = {}
    for found in gc.get_objects():
        if type(found) in (Tensor, nn.Parameter) and found.layout == torch.strided and not found.is_meta:
            storage = found.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_one_network_and_some_tensors_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While safetensors files are averaged."""
    states = [{str(n): torch.full((64, 64), float(k)) for n in range(12)} for k in range(3)]
    for k, state in enumerate(states):
        save_file(state, tmp_path / f"{k}.safetensors")
    network, largest = 12 * 64 * 64 * 4, 64 * 64 * 4
    del states, state
    seen, real = [0], merging.between

    def looking(*args: Any) -> Any:
        seen.append(tensors_in_memory())
        return real(*args)

    monkeypatch.setattr(merging, "between", looking)
    gc.collect()
    base = tensors_in_memory()
    tus.alignment.average(sorted(tmp_path.iterdir()), [0.2, 0.3, 0.5])
    assert network / 2 < max(seen) - base <= network + 3 * largest + 4096


@pytest.mark.parametrize("more", [[], ["--correction", "batchnorm"]])
def test_an_interrupted_merge_goes_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]) -> None:
    paths, whole, out = write(tmp_path, 4), tmp_path / "whole.safetensors", tmp_path / "merged.safetensors"
    data = ["--data", f"{__name__}.loader"] if more else []
    assert merge(paths, whole, *data, *more) == 0
    expected = tree(tmp_path)
    left = counted(monkeypatch, over, "weight_matching")
    left.calls = 2
    with pytest.raises(Killed):
        merge(paths, out, *data, *more)
    state = tmp_path / "merged.merging"
    assert not out.exists() and len(list(state.glob("*.safetensors"))) == 3 + 5 * bool(more)
    left.calls = 10
    assert merge(paths, out, *data, *more) == 0
    assert left.used == 3, "a network was matched twice"
    assert not state.exists()
    found = {name: content for name, content in tree(tmp_path).items() if name.startswith("merged.")}
    assert found == {n.replace("whole.", "merged."): c for n, c in expected.items() if n.startswith("whole.")}


def test_what_is_kept_is_of_one_merge_and_sealed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths, out, folder = write(tmp_path, 3), tmp_path / "merged.safetensors", tmp_path / "merged.merging"
    with pytest.raises(KeyboardInterrupt), working_folder(folder, "one") as kept:
        kept["move/1"] = {"0": torch.arange(8)}
        raise KeyboardInterrupt
    path = next(folder.glob("*.safetensors"))
    with pytest.raises(KeyboardInterrupt), working_folder(folder, "one") as kept:
        kept["scores/0"] = {"loss": 0.1}
        with pytest.raises(FolderInUseError), working_folder(folder, "one"):
            pass
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt), working_folder(folder, "one") as kept:
        assert kept["scores/0"] == {"loss": 0.1} and torch.equal(kept["move/1"]["0"], torch.arange(8))
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


def test_a_merge_that_is_killed_at_any_write_goes_further(tmp_path: Path) -> None:
    model = Net()
    graph = tus.discover_symmetries(model, torch.randn(2, 4))
    (tmp_path / "in").mkdir()
    paths = write(tmp_path / "in", 3)
    options: dict[str, Any] = {"data": load_data(f"{__name__}.loader", [], 40, torch.float32), "prefix": "model."}

    def run(name: str) -> dict[str, bytes]:
        (tmp_path / name).mkdir(exist_ok=True)
        merge_files(graph, paths, tmp_path / name / "m.safetensors", model, correction="batchnorm", **options)
        return tree(tmp_path / name)

    assert set(killed_at_any_write(run)) == {"m.safetensors", "m.report.md", "m.report.json"}
