"""Checkpoints in remote storage, as fsspec reaches it: memory here, and files by their URLs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from toy_networks import Net

import tu_symmetry as tus
from tu_symmetry import cli
from tu_symmetry.checkpoints.files import find_checkpoints
from tu_symmetry.files import FileError
from tu_symmetry.states import SampleFileError

MODEL = ["--model", "toy_networks.Net", "--input", "1,4"]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def network(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(t.shape, generator=generator) for n, t in Net().state_dict().items()}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of networks of every kind, and the same in memory."""
    monkeypatch.chdir(tmp_path)
    nets = tmp_path / "nets"
    nets.mkdir()
    torch.save(network(0), nets / "a.pt")
    dcp.save(network(1), checkpoint_id=nets / "b", no_dist=True)
    index = {"weight_map": dict.fromkeys(network(2), "parts/c.safetensors")}
    (nets / "c.safetensors.index.json").write_text(json.dumps(index))
    (nets / "parts").mkdir()
    save_file(network(2), nets / "parts" / "c.safetensors")
    memory = fsspec.filesystem("memory")
    memory.put(str(nets), "/bucket/nets", recursive=True)
    yield tmp_path
    memory.rm("/bucket", recursive=True)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_urls_are_aligned_as_files_are(kind: str, here: Path) -> None:
    root = "memory://bucket/nets" if kind == "memory" else (here / "nets").as_uri()
    names = ["a.pt", "b", "c.safetensors.index.json"]
    for seed, name in enumerate(names):
        found = tus.load_state(f"{root}/{name}")
        assert all(torch.equal(t, network(seed)[n]) for n, t in found.items())
    assert [path.name for path in find_checkpoints([f"{root}/*"])] == names
    assert [path.name for path in find_checkpoints([f"{root}/b/*", f"{root}/?.pt"])] == ["b", "a.pt"]
    assert cli.main(["align", *(f"nets/{name}" for name in names), *MODEL, "--out", "files"]) == 0
    words = ["align", f"{root}/a.pt", f"{root}/[bc]*", *MODEL, "--reference", f"{root}/a.pt"]
    assert cli.main([*words, "--out", "urls"]) == 0
    for path in (here / "files").glob("*.safetensors"):
        found, wanted = tus.load_state(here / "urls" / path.name), tus.load_state(path)
        assert found.keys() == wanted.keys() and all(torch.equal(t, wanted[n]) for n, t in found.items())


def test_what_changes_there_is_read_again(here: Path) -> None:
    url = "memory://bucket/nets/a.pt"
    first = tus.load_state(url)
    torch.save(network(3), here / "a.pt")
    fsspec.filesystem("memory").put(str(here / "a.pt"), "/bucket/nets/a.pt")
    second = tus.load_state(url)
    assert all(torch.equal(t, network(0)[n]) for n, t in first.items())
    assert all(torch.equal(t, network(3)[n]) for n, t in second.items())


ERRORS = {
    "nothing there": ("memory://bucket/none.pt", "stands for 0 networks"),
    "no such storage": ("nowhere://bucket/a.pt", r"cannot be read \(ValueError: Protocol not known: nowhere"),
    "several": ("memory://bucket/nets/*", "stands for 3 networks"),
    "a folder of networks": ("memory://bucket/nets", "stands for 0 networks"),
    "another folder": ("memory://bucket/../a.pt", r"'\.\.' in its name|stands for 0"),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_name_the_url(kind: str, here: Path) -> None:
    url, message = ERRORS[kind]
    with pytest.raises(SampleFileError, match=message):
        tus.load_state(url)
    if kind != "several":
        with pytest.raises(FileError, match=r"is no file|cannot be read|'\.\.' in its name"):
            find_checkpoints([url])


def test_results_are_written_to_this_machine(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command, out in (("align", "memory://bucket/out"), ("merge", "memory://bucket/out.safetensors")):
        with pytest.raises(SystemExit):
            cli.main([command, "nets/a.pt", "nets/b", *MODEL, "--out", out])
        assert "results are written to this machine alone" in capsys.readouterr().err
