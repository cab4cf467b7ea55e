"""Aligning checkpoint files: every kind of file, interruptions, and files that do not belong."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from toy_networks import Net, killed_at_any_write, tree

from tu_symmetry import cli, files, states
from tu_symmetry.alignment.align import align
from tu_symmetry.alignment.moves import Move, move_tensors
from tu_symmetry.checkpoints.align import align_files
from tu_symmetry.checkpoints.files import find_checkpoints, output_names
from tu_symmetry.files import FileError
from tu_symmetry.symmetry.action import apply_linear, apply_permutation, apply_scale, apply_signs
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.elements import (
    invert,
    random_linear,
    random_permutation,
    random_scale,
    random_signs,
    transposition_count,
)
from tu_symmetry.symmetry.graph import SymmetryGraph

MODES = ("first", "universe")
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def graph() -> SymmetryGraph:
    return discover_symmetries(Net(), torch.zeros(1, 4))


def planted(graph: SymmetryGraph, count: int) -> tuple[list[State], list[dict[str, Tensor]]]:
    """A network and permuted copies of it; the planted elements."""
    generator = torch.Generator().manual_seed(0)
    first = {n: torch.randn(t.shape, generator=generator) for n, t in Net().state_dict().items()}
    elements = [random_permutation(graph, generator=generator) for _ in range(count - 1)]
    return [first, *(apply_permutation(graph, p, first) for p in elements)], elements


def noisy(graph: SymmetryGraph, count: int) -> list[State]:
    """Permuted copies of a network with so much noise that matching moves units in several sweeps."""
    generator = torch.Generator().manual_seed(1)
    return [{n: t + torch.randn(t.shape, generator=generator) for n, t in s.items()} for s in planted(graph, count)[0]]


def write(tmp_path: Path, states: list[State]) -> list[Path]:
    folder = tmp_path / "in"
    folder.mkdir()
    files = [folder / f"net{k}.pt" for k in range(len(states))]
    for file, state in zip(files, states, strict=True):
        torch.save(state, file)
    return files


def test_every_kind_of_file_is_aligned(graph: SymmetryGraph, tmp_path: Path) -> None:
    """With and without a prefix, which is taken off where it is, and in two precisions."""
    states, elements = planted(graph, 4)
    prefixed = [{f"model.{n}": t for n, t in s.items()} for s in states]
    files = [tmp_path / name for name in ("a.pt", "b.ckpt", "c.safetensors", "d.pt")]
    torch.save(prefixed[0], files[0])
    torch.save({"state_dict": {**prefixed[1], "loss.weight": torch.ones(2)}, "epoch": 3}, files[1])
    save_file({n: t.contiguous() for n, t in prefixed[2].items()}, files[2])
    torch.save({n: t.double() for n, t in states[3].items()}, files[3])
    out = tmp_path / "out"
    with pytest.raises(FileError, match=r"a.pt .* \(option --prefix model.\)"):
        align_files(graph, files, out)
    result = align_files(graph, files, out, prefix="model.")
    assert [f.source for f in result.files] == [str(p) for p in files]
    assert result.files[0].transpositions == 0 and result.files[0].distance_before == 0
    for file, element in zip(result.files, [None, *elements], strict=True):
        aligned, found = load_file(out / file.aligned), load_file(out / file.permutation)
        for name, tensor in states[0].items():
            assert torch.equal(aligned[name], tensor.to(aligned[name]))
        assert file.distance_after == 0
        if element is not None:
            expected = invert(element)
            assert file.distance_before > 1 and file.transpositions == transposition_count(element)
            assert found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in found)
        with safe_open(out / file.aligned, framework="pt") as opened:
            header = json.loads(opened.metadata()["tu_symmetry.aligned"])
        assert header["source_sha256"] == hashlib.sha256(Path(file.source).read_bytes()).hexdigest()
        assert header["reference_sha256"] == hashlib.sha256(files[0].read_bytes()).hexdigest()
    report = json.loads((out / "report.json").read_text())
    assert [f["transpositions"] for f in report["files"]] == [f.transpositions for f in result.files]
    assert report["prefix"] == "model."
    markdown = (out / "report.md").read_text()
    assert all(f"| {p.name} |" in markdown for p in files)


@pytest.mark.parametrize("reference", MODES)
def test_files_are_aligned_over_signs(reference: Any, graph: SymmetryGraph, tmp_path: Path) -> None:
    """Units of tanh that were turned: by the command, as in memory, and skipped when it is given again."""
    states, _ = planted(graph, 3)
    generator = torch.Generator().manual_seed(3)
    turned = [states[0], *(apply_signs(graph, random_signs(graph, generator=generator), s) for s in states[1:])]
    files, out = write(tmp_path, turned), tmp_path / "out"
    over: Any = ("permutations", "signs")
    result = align_files(graph, files, out, reference=reference, over=over)
    expected = align(graph, turned, reference=reference, over=over)
    for k, file in enumerate(result.files):
        aligned, found = load_file(out / file.aligned), load_file(out / file.permutation)
        assert file.distance_after == pytest.approx(0, abs=1e-5)
        assert all(torch.equal(aligned[n], expected.states[k][n]) for n in aligned)
        signs = {n.removeprefix("signs:"): t for n, t in found.items() if n.startswith("signs:")}
        assert all(torch.equal(signs[n], t) for n, t in expected.signs[k].items())
    assert align_files(graph, files, out, reference=reference, over=over).skipped == 3
    assert align_files(graph, files, out, reference=reference).skipped == 0


class Encoder(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(12, 3, 10, dropout=0.0, activation="relu", batch_first=True)


@pytest.mark.parametrize("reference", [*MODES, "medoid", "mean"])
def test_files_are_aligned_over_all_symmetries(
    reference: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command, as in memory; the file of what moved a network, moves it again; reports say what moved."""
    words: Any = ("permutations", "signs", "scales", "rotations")
    graph = discover_symmetries(Encoder(), torch.zeros(1, 2, 12))
    generator = torch.Generator().manual_seed(0)
    first = {n: torch.randn(t.shape, generator=generator) for n, t in Encoder().state_dict().items()}
    states = [first]
    for seed in (1, 2):
        generator.manual_seed(seed)
        scales = {g.name: random_scale(graph, generator=generator, std=0.3)[g.name] for g in graph.scales if g.exact}
        moved = apply_linear(graph, random_linear(graph, generator=generator), apply_scale(graph, scales, first))
        states.append(apply_permutation(graph, random_permutation(graph, generator=generator), moved))
    files, out = write(tmp_path, states), tmp_path / "out"
    line = ["--model", f"{__name__}.Encoder", "--input", "1,2,12", "--out", str(out), "--over", *words]
    assert cli.main(["align", *map(str, files), *line, "--reference", reference]) == 0
    capsys.readouterr()
    expected = align(graph, states, reference=reference, over=words)
    report = json.loads((out / "report.json").read_text())
    assert report["over"] == list(words)
    for k, file in enumerate(report["files"]):
        aligned, found = load_file(out / file["aligned"]), load_file(out / file["permutation"])
        for name, tensor in expected.states[k].items():
            torch.testing.assert_close(aligned[name], tensor, rtol=1e-4, atol=1e-5)
        again = move_tensors(graph, Move.of(found), states[k])
        assert all(torch.equal(again[n], aligned[n]) for n in aligned)
        assert file["distance_after"] < 1e-3 and file["output_change"] <= file["output_change_allowed"]
        counts = expected.moves[k].counts()
        moved = file["moved"]
        assert moved["sign_changes"] == counts["sign_changes"] and moved["mixed_blocks"] == counts["mixed_blocks"] > 0
        assert moved["largest_factor"] == pytest.approx(counts["largest_factor"], rel=1e-4) != 1
    text = (out / "report.md").read_text()
    assert "| NoT | signs, largest factor, mixed blocks |" in text
    assert "least mass" in text
    assert align_files(graph, files, out, reference=reference, over=words).skipped == 3
    assert align_files(graph, files, out, reference=reference, over=words[:3]).skipped == 0
    assert cli.main(["align", *map(str, files), *line, "--over", "scales"]) == 2
    assert "pass 'permutations', and beside it" in capsys.readouterr().err


def test_what_is_done_is_skipped_and_anything_else_redone(graph: SymmetryGraph, tmp_path: Path) -> None:
    states, _ = planted(graph, 4)
    files, out = write(tmp_path, states), tmp_path / "out"
    assert align_files(graph, files, out).skipped == 0
    before, times = tree(out), {p.name: p.stat().st_mtime_ns for p in out.glob("net*")}
    assert align_files(graph, files, out).skipped == 4
    assert tree(out) == before and {p.name: p.stat().st_mtime_ns for p in out.glob("net*")} == times
    (out / "net1.permutation.safetensors").unlink()
    torch.save({n: 2 * t for n, t in states[2].items()}, files[2])
    assert align_files(graph, files, out).skipped == 2
    assert torch.equal(load_file(out / "net2.safetensors")["0.weight"], 2 * states[0]["0.weight"])
    assert tree(out)["net1.permutation.safetensors"] == before["net1.permutation.safetensors"]
    assert align_files(graph, files, out, reference=files[1]).skipped == 0
    assert torch.equal(load_file(out / "net0.safetensors")["0.weight"], states[1]["0.weight"])


@pytest.mark.parametrize("mode", MODES)
def test_never_more_than_two_networks_are_in_memory(
    mode: Any, graph: SymmetryGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write(tmp_path, planted(graph, 8)[0])
    alive: list[weakref.ref[Tensor]] = []
    most, load = 0, states.open_state

    def counting(path: Path, **options: str) -> Mapping[str, Tensor]:
        nonlocal most
        state = load(path, **options)
        alive.append(weakref.ref(state["0.weight"]))
        most = max(most, sum(r() is not None for r in alive))
        return state

    monkeypatch.setattr("tu_symmetry.alignment.networks.open_state", counting)
    align_files(graph, files, tmp_path / "out", reference=mode)
    assert len(alive) >= 17 and most <= 2  # each is checked and aligned, to a reference


def test_the_mean_is_a_file_that_distances_are_measured_to(graph: SymmetryGraph, tmp_path: Path) -> None:
    result = align_files(graph, write(tmp_path, noisy(graph, 4)), tmp_path / "out", reference="universe")
    aligned = [load_file(tmp_path / "out" / file.aligned) for file in result.files]
    mean = load_file(tmp_path / "out" / "mean.safetensors")
    for name in mean:
        torch.testing.assert_close(mean[name], torch.stack([a[name] for a in aligned]).mean(0))
    squares = sum(float((a[n] - mean[n]).square().sum()) for a in aligned for n in mean)
    assert sum(f.distance_after**2 for f in result.files) == pytest.approx(squares, rel=1e-5)


class Residual(nn.Module):
    """Two blocks on one stream: the groups of all layers depend on one another."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.first = nn.ModuleList(nn.Linear(6, 7) for _ in range(2))
        self.second = nn.ModuleList(nn.Linear(7, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for first, second in zip(self.first, self.second, strict=True):
            x = x + second(torch.relu(first(x)))
        return self.head(x)


@pytest.mark.parametrize("network", [Net, Residual])
@pytest.mark.parametrize("reference", [*MODES, "given"])
def test_files_and_states_are_aligned_alike(reference: Any, network: type[nn.Module], tmp_path: Path) -> None:
    """Every word has one meaning: the command and the function give the same permutations, bit by bit."""
    generator = torch.Generator().manual_seed(3)
    states = [
        {n: torch.randn(t.shape, generator=generator) for n, t in network().state_dict().items()} for _ in "12345"
    ]
    architecture = discover_symmetries(network(), torch.zeros(1, 4))
    files, given = write(tmp_path, states), reference == "given"
    found = align(architecture, states[given:], reference=states[0] if given else reference)
    words = ["align", *map(str, files[given:]), "--out", str(tmp_path / "out")]
    words += ["--reference", str(files[0]) if given else reference]
    assert cli.main([*words, "--model", f"{__name__}.{network.__name__}", "--input", "1,4"]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert len(report["files"]) == len(found.permutations)
    for entry, expected, state in zip(report["files"], found.permutations, found.states, strict=True):
        permutation = load_file(tmp_path / "out" / entry["permutation"])
        assert permutation.keys() == expected.keys() and all(torch.equal(permutation[g], expected[g]) for g in expected)
        weights = load_file(tmp_path / "out" / entry["aligned"])
        assert all(torch.equal(weights[n], state[n]) for n in state)
    distances = [entry["distance_after"] for entry in report["files"]]
    assert distances == pytest.approx(found.distances_after, rel=1e-5, abs=1e-5)
    if reference == "universe":
        assert "the last one moved nothing" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_is_killed_at_any_write_goes_on_to_identical_bytes(
    mode: Any, graph: SymmetryGraph, tmp_path: Path
) -> None:
    files = write(tmp_path, noisy(graph, 3))

    def run(name: str) -> dict[str, bytes]:
        align_files(graph, files, tmp_path / name, reference=mode)
        return tree(tmp_path / name)

    assert len(killed_at_any_write(run)) >= 8


@pytest.mark.parametrize("mode", MODES)
def test_every_bad_file_is_named_before_anything_is_written(mode: Any, graph: SymmetryGraph, tmp_path: Path) -> None:
    states, out = noisy(graph, 6), tmp_path / "out"
    files = write(tmp_path, states)
    align_files(graph, files[:3], out, reference=mode)
    before = tree(out)
    bad = [files[3].with_suffix(".ckpt"), files[4].with_suffix(".safetensors"), files[5]]
    torch.save({"state_dict": states[3]}, bad[0])
    bad[0].write_bytes(bad[0].read_bytes()[:-200])
    save_file({n: t if n != "2.bias" else t / 0 for n, t in states[4].items()}, bad[1])
    torch.save(Net(hidden=9).state_dict(), bad[2])
    with pytest.raises(FileError, match="3 of 6 files cannot be aligned") as raised:
        align_files(graph, [*files[:3], *bad], out, reference=mode)
    lines = str(raised.value).splitlines()[1:]
    for line, name, reason in zip(lines, bad, ("truncated", "NaN or infinite", "shape"), strict=True):
        assert str(name) in line and reason in line
    with pytest.raises(FileError, match=bad[1].name):
        align_files(graph, files[:3], tmp_path / "none", reference=bad[1])
    assert tree(out) == before and not (tmp_path / "none").exists()
    assert align_files(graph, files[:3], out, reference=mode).skipped == 3 and tree(out) == before


def test_foreign_files_are_never_overwritten(graph: SymmetryGraph, tmp_path: Path) -> None:
    states, _ = planted(graph, 2)
    files, out = write(tmp_path, states), tmp_path / "out"
    out.mkdir()
    save_file(states[1], tmp_path / "foreign", metadata={"format": "pt"})
    foreign = [(n, (tmp_path / "foreign").read_bytes()) for n in ("net1.safetensors", "net1.permutation.safetensors")]
    texts = ["{}", '[{"format": "tu_symmetry.aligned"}]', json.dumps('"format": "tu_symmetry.aligned"'), "[" * 99999]
    foreign += [("report.md", b"notes"), *(("report.json", text.encode()) for text in texts)]
    for name, content in foreign:
        (out / name).write_bytes(content)
        with pytest.raises(FileError, match=f"{name} was not written by this command"):
            align_files(graph, files, out)
        assert tree(out) == {name: content}
        (out / name).unlink()


def test_names_tell_checkpoints_apart() -> None:
    assert output_names([Path("runs/a.pt"), Path("runs/b.pt")]) == ["a", "b"]
    assert output_names([Path("runs/0/last.ckpt"), Path("runs/1/last.ckpt")]) == ["0-last", "1-last"]
    assert output_names([Path("runs/a.pt"), Path("runs/a.ckpt")]) == ["a-pt", "a-ckpt"]
    with pytest.raises(FileError, match="tell them apart"):
        output_names([Path("r/a/b.pt"), Path("r/a-b.pt"), Path("r/b.pt")])


def test_globs_and_what_they_do_not_find(tmp_path: Path) -> None:
    for k in (10, 2, 1):
        (tmp_path / f"{k}.pt").touch()
    found = find_checkpoints([str(tmp_path / "2.pt"), str(tmp_path / "*.pt")])
    assert [p.name for p in found] == ["2.pt", "1.pt", "10.pt"]
    for pattern in (tmp_path / "x*.pt", tmp_path):
        with pytest.raises(FileError, match="is no file"):
            find_checkpoints([pattern])


def test_a_file_is_aligned_once_however_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graph: SymmetryGraph
) -> None:
    """And where all files have one name, the report says which is the reference; its table is cut on the screen."""
    for folder, state in zip(("x", "y"), planted(graph, 2)[0], strict=True):
        (tmp_path / folder).mkdir()
        torch.save(state, tmp_path / folder / "last.pt")
    monkeypatch.chdir(tmp_path)
    absolute = str(tmp_path / "x" / "last.pt")
    found = find_checkpoints(["x/last.pt", absolute, "./x/../x/last.pt", "*/last.pt"])
    assert found == [Path("x/last.pt"), Path("y/last.pt")]
    result = align_files(graph, found, tmp_path / "out")
    assert result.grid().title == "2 checkpoints of Net aligned to x/last.pt"
    assert [row[0] for row in result.grid(limit=1).rows] == ["x/last.pt", "... 1 more in report.md"]
    assert align_files(graph, found[:1], tmp_path / "one").grid().title == "1 checkpoint of Net aligned to last.pt"


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_a_result_that_was_changed_is_refused(damage: str, graph: SymmetryGraph, tmp_path: Path) -> None:
    """Each of the files that a run uses again, whatever is wrong with it; a deleted one is made again."""
    files, out = write(tmp_path, noisy(graph, 3)), tmp_path / "out"
    align_files(graph, files, out, reference="universe")
    whole = tree(out)
    for name in ("net1.safetensors", "net1.permutation.safetensors"):
        path = out / name
        if damage == "flipped":
            path.write_bytes(whole[name][:-2] + bytes([whole[name][-2] ^ 1]) + whole[name][-1:])
        else:
            path.write_bytes(whole[name][:-9])
        before = tree(out)
        with pytest.raises(FileError, match=path.name.replace(".", r"\.")) as raised:
            align_files(graph, files, out, reference="universe")
        assert "\n" not in str(raised.value) and tree(out) == before
        path.write_bytes(whole[name])
    for name in ("net1.safetensors", "net1.permutation.safetensors", "mean.safetensors", "report.json"):
        (out / name).unlink()
        align_files(graph, files, out, reference="universe")
        assert tree(out) == whole


@pytest.mark.parametrize("pair", [("net0", "net1"), ("net2", "net1")])
def test_results_that_were_swapped_are_made_again(pair: tuple[str, str], graph: SymmetryGraph, tmp_path: Path) -> None:
    files, out = write(tmp_path, noisy(graph, 3)), tmp_path / "out"
    align_files(graph, files, out)
    whole = tree(out)
    first, second = (out / f"{name}.safetensors" for name in pair)
    first.write_bytes(whole[second.name])
    second.write_bytes(whole[first.name])
    assert align_files(graph, files, out).skipped == 1
    assert tree(out) == whole


def test_two_runs_do_not_write_one_folder(graph: SymmetryGraph, tmp_path: Path) -> None:
    paths, out = write(tmp_path, noisy(graph, 2)), tmp_path / "out"
    out.mkdir()
    with files.lock_folder(out), pytest.raises(files.FolderInUseError):
        align_files(graph, paths, out)
    assert not tree(out)
