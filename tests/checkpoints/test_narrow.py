"""Networks of files that are matched, moved and averaged tensor by tensor, and verified on a narrow network."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from toy_networks import killed_at_any_write, tree

import tu_symmetry as tus
from tu_symmetry import cli
from tu_symmetry.alignment import matching
from tu_symmetry.checkpoints.align import align_files
from tu_symmetry.checkpoints.architecture import Architecture
from tu_symmetry.checkpoints.merge import merge_files
from tu_symmetry.files import TensorFile
from tu_symmetry.states import open_state
from tu_symmetry.symmetry.action import Permuted
from tu_symmetry.symmetry.running import probe


class Layers(nn.Module):
    """A network of any width; its last layer reads a buffer that no file holds."""

    def __init__(self, width: int = 20, depth: int = 2) -> None:
        super().__init__()
        sizes = [6, *[width] * depth]
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.head = nn.Linear(width, 3)
        self.register_buffer("factor", torch.tensor([1.0, 2.0, 3.0]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.hidden:
            x = torch.relu(layer(x))
        return self.head(x) * self.factor


def write(folder: Path) -> tuple[list[Path], dict[str, Tensor]]:
    """A network in two files with an index, and a permuted one in one file; the first one's weights."""
    generator = torch.Generator().manual_seed(0)
    state = {n: torch.randn(t.shape, generator=generator) for n, t in Layers().state_dict().items()}
    graph = tus.discover_symmetries(Layers(), torch.randn(2, 6))
    moved = tus.apply_permutation(graph, tus.random_permutation(graph, generator=generator), state)
    names = list(state)
    for k, part in enumerate((names[:3], names[3:])):
        save_file({n: state[n] for n in part}, folder / f"{k}.safetensors")
    held = {n: f"{int(k >= 3)}.safetensors" for k, n in enumerate(names)}
    (folder / "a.safetensors.index.json").write_text(json.dumps({"weight_map": held}))
    save_file({n: t.contiguous() for n, t in moved.items()}, folder / "b.safetensors")
    return [folder / "a.safetensors.index.json", folder / "b.safetensors"], state


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the sizes, no network counts as fitting into memory."""
    monkeypatch.setattr(matching, "_MOST_KEPT", -1)
    monkeypatch.setattr(probe, "_LARGE", 1)


@pytest.mark.usefixtures("large")
def test_the_commands_with_a_narrow_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Planted units are all found; the certificate is of the wide network; refusals are one line."""
    files, state = write(tmp_path)
    words = [*map(str, files), "--model", f"{__name__}.Layers", "--input", "2,6"]
    assert cli.main(["align", *words, "--narrow", "width=4", "--out", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["files"][1]["transpositions"] > 20 and report["files"][1]["distance_after"] == 0
    assert 0 <= report["files"][1]["output_change"] <= report["files"][1]["output_change_allowed"]
    aligned = load_file(tmp_path / "out" / report["files"][1]["aligned"])
    assert all(torch.equal(aligned[n], t) for n, t in state.items())
    assert cli.main(["merge", *words, "--narrow", "width=4", "--out", str(tmp_path / "m.safetensors")]) == 0
    assert all(torch.equal(load_file(tmp_path / "m.safetensors")[n], t) for n, t in state.items())
    capsys.readouterr()
    for narrow, message in (("depth=3", "tensors of other names"), ("width=x", "fails")):
        assert cli.main(["align", *words, "--narrow", narrow, "--out", str(tmp_path / "no")]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "no").exists()


def test_a_group_that_a_narrow_network_lacks_is_left_out(tmp_path: Path) -> None:
    from rich.console import Console

    graph = Architecture(f"{__name__}.Layers", ["2,6"], narrow=["width=1"]).discover(Console(stderr=True))
    assert graph.permutations and all(not any(p.stride()) for p in graph.probe.module.parameters())  # type: ignore[union-attr]
    with pytest.warns(tus.SymmetryWarning, match="no counterpart of .* groups"):
        graph.require_verified()
    assert not graph.permutations and graph.verified


@pytest.mark.usefixtures("large")
def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """At any write, to the files of a run that was never cut, which are those of networks that fit."""
    (tmp_path / "in").mkdir()
    files, _ = write(tmp_path / "in")
    graph = tus.discover_symmetries(Layers(), torch.randn(2, 6))

    def run(name: str) -> dict[str, bytes]:
        (tmp_path / name).mkdir(exist_ok=True)
        align_files(graph, files, tmp_path / name / "aligned")
        merge_files(graph, files, tmp_path / name / "merged.safetensors", Layers())
        return tree(tmp_path / name)

    found: Any = killed_at_any_write(run)
    assert len(found) >= 8


def test_a_question_for_a_name_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a file has a name is known without its tensor; :class:`Mapping` would read it."""
    files, _ = write(tmp_path)
    state = open_state(files[0])
    monkeypatch.setattr(TensorFile, "__getitem__", lambda self, name: pytest.fail(f"{name} was read"))
    graph = tus.discover_symmetries(Layers(), torch.randn(2, 6))
    permuted = Permuted(graph, {}, state)
    assert all(name in state and name in permuted for name in state) and "none" not in permuted
