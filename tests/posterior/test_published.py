"""Folders and archives of checkpoints become sample stores, and what cannot be read is said."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from drawn import normal
from safetensors.torch import save_file
from torch import Tensor

from tu_symmetry.posterior.published import collect_checkpoints, list_checkpoints
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.states import SampleFileError

FOLDER = "models/cifar100-resnet18"  # as the published data set has it
HALF = torch.float16


def network(seed: int, width: int = 3, dtype: torch.dtype = HALF) -> dict[str, Tensor]:
    return {"fc.weight": normal(width, 2, seed=seed, dtype=torch.float32).to(dtype), "steps": torch.tensor(seed)}


def archive(path: Path, numbers: range) -> None:
    """Networks in an archive, beside files that are none, in an order that is not that of their names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    contents = {"set/README.md": b"about", "set/._net_0.pt": b"resource fork"}
    for k in numbers:
        stream = io.BytesIO()
        torch.save({"state_dict": network(k)}, stream)
        contents[f"set/net_{k}.ckpt"] = stream.getvalue()
    with tarfile.open(path, "w:gz") as into:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            into.addfile(member, io.BytesIO(content))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Four kinds of files with numbers without leading zeros, another architecture, and two archives."""
    root = tmp_path / "data"
    for folder in ("small", "wide/run"):
        (root / folder).mkdir(parents=True)
    for k in range(12):
        state, path = network(k), root / "small" / f"net_{k}"
        if k % 4 == 2:
            save_file(state, path.with_suffix(".safetensors"))
        else:
            whole: Any = {"state_dict": state, "epoch": 3} if k % 4 == 1 else state
            torch.save(whole, path.with_suffix({0: ".pt", 1: ".ckpt", 3: ".pth"}[k % 4]))
    torch.save(network(0, 5), root / "wide/run/a.ckpt")
    (root / "README.md").write_text("about")
    archive(root / FOLDER / "cifar100-resnet18-0-7.tgz", range(8))
    archive(root / FOLDER / "cifar100-resnet18-8-11.tgz", range(8, 12))
    return root


def numbers(store: SampleStore) -> list[int]:
    return [int(state["steps"]) for state in store]


def test_what_is_there_is_listed(source: Path) -> None:
    found = list_checkpoints(source)
    assert list(found) == [FOLDER, "small", "wide/run"]
    assert [Path(f).stem for f in found["small"]] == [f"net_{k}" for k in range(12)]
    assert [Path(f).name for f in found[FOLDER]] == ["cifar100-resnet18-0-7.tgz", "cifar100-resnet18-8-11.tgz"]


@pytest.mark.parametrize("folder", ["small", FOLDER])
def test_a_folder_becomes_a_store(source: Path, tmp_path: Path, folder: str) -> None:
    seen = []
    store = collect_checkpoints(tmp_path / "out", source, folder=folder, progress=lambda p: seen.append(p["done"]))
    assert numbers(store) == store.chains == list(range(12)) and seen == list(range(1, 13))
    for k, state in enumerate(store):
        assert state["fc.weight"].dtype == HALF and torch.equal(state["fc.weight"], network(k)["fc.weight"])
    assert numbers(collect_checkpoints(tmp_path / "some", source, folder=folder, start=6, count=4)) == [6, 7, 8, 9]


@pytest.mark.parametrize("folder", ["small", FOLDER])
def test_an_interrupted_call_goes_on(source: Path, tmp_path: Path, folder: str) -> None:
    collect_checkpoints(tmp_path / "out", source, folder=folder, count=3)
    seen: list[str] = []
    store = collect_checkpoints(
        tmp_path / "out", source, folder=folder, count=10, progress=lambda p: seen.append(p["file"])
    )
    assert numbers(store) == store.chains == list(range(10)) and len(seen) == 7 and "net_3" in seen[0]
    with pytest.raises(SampleFileError, match="not of wide/run"):
        collect_checkpoints(tmp_path / "out", source, folder="wide/run")


def test_what_cannot_be_read_is_said(source: Path, tmp_path: Path) -> None:
    def refused(error: type[Exception], message: str, **options: Any) -> None:
        with pytest.raises(error, match=message):
            collect_checkpoints(tmp_path / "out", source, **options)

    refused(SampleFileError, r"no folder 'middle' .*'small': 12", folder="middle")
    refused(ValueError, "13 from number 0 on are wanted", folder="small", count=13)
    refused(ValueError, "at least 0 and 1", folder="small", start=-1)
    torch.save(network(0, 4), source / "small" / "net_7.pth")
    refused(SampleFileError, r"net_7.pth is of another architecture", folder="small")
    (source / "small" / "net_0.pt").write_bytes((source / "small" / "net_0.pt").read_bytes()[:100])
    with pytest.raises(SampleFileError, match=r"net_0\.pt"):
        collect_checkpoints(tmp_path / "cut", source, folder="small")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SampleFileError, match=r"holds no \.safetensors"):
        list_checkpoints(tmp_path / "empty")


def test_an_archive_whose_name_says_that_nothing_in_it_is_wanted_is_not_opened(source: Path, tmp_path: Path) -> None:
    (source / FOLDER / "cifar100-resnet18-0-7.tgz").write_bytes(b"never read")
    assert numbers(collect_checkpoints(tmp_path / "out", source, folder=FOLDER, start=8)) == [8, 9, 10, 11]
    with pytest.raises(ValueError, match=r"no more than 12 .* 9 from number 8"):
        collect_checkpoints(tmp_path / "more", source, folder=FOLDER, start=8, count=9)


def test_a_truncated_archive_keeps_what_was_read(source: Path, tmp_path: Path) -> None:
    path = source / FOLDER / "cifar100-resnet18-0-7.tgz"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 3 // 4])
    with pytest.raises(SampleFileError, match=r"0-7.tgz of .* cannot be read beyond \d networks"):
        collect_checkpoints(tmp_path / "out", source, folder=FOLDER)
    assert 0 < len(SampleStore.open(tmp_path / "out")) < 8
    path.write_bytes(whole)
    assert numbers(collect_checkpoints(tmp_path / "out", source, folder=FOLDER)) == list(range(12))


def test_a_data_set_is_fetched_file_by_file_and_its_archives_are_streams(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class System:
        def open(self, name: str, mode: str) -> io.BufferedReader:
            asked.append(name)
            return (source / name.removeprefix("datasets/someone/Networks/")).open("rb")

    def download(name: str, file: str, repo_type: str) -> str:
        asked.append(file)
        return str(source / file)

    def listed(name: str, repo_type: str) -> list[str]:
        if name != "someone/Networks" or repo_type != "dataset":
            raise ConnectionError("no route to host")
        return [p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file()]

    fakes = {"HfFileSystem": System, "hf_hub_download": download, "list_repo_files": listed}
    for name, fake in fakes.items():
        monkeypatch.setattr(huggingface_hub, name, fake)
    for folder in ("small", FOLDER):
        store = collect_checkpoints(tmp_path / Path(folder).name, "someone/Networks", folder=folder, count=3)
        assert numbers(store) == [0, 1, 2]
    streamed = f"datasets/someone/Networks/{FOLDER}/cifar100-resnet18-0-7.tgz"
    assert asked == ["small/net_0.pt", "small/net_1.ckpt", "small/net_2.safetensors", streamed]
    with pytest.raises(SampleFileError, match=r"no route to host.*hf download torch-uncertainty/Checkpoints"):
        list_checkpoints()


@pytest.mark.slow
def test_an_archive_of_several_gigabytes_takes_the_memory_of_two_networks(tmp_path: Path) -> None:
    size, count = 11_000_000, 160  # ResNet-18 in half precision, 22 MB: 3.5 GB in all
    torch.save({"weight": torch.ones(size, dtype=HALF)}, tmp_path / "one.pt")
    (tmp_path / "only").mkdir()
    with tarfile.open(tmp_path / "only" / "many.tgz", "w:gz", compresslevel=1) as into:
        for k in range(count):
            into.add(tmp_path / "one.pt", f"net_{k}.pt")
    program = (
        "import resource, sys\n"
        "from tu_symmetry.posterior import published\n"
        "published._PER_SHARD = 1\n"
        "before = []\n"
        "peak = lambda p: before.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
        "store = published.collect_checkpoints(sys.argv[1], sys.argv[2], start=30, count=120, progress=peak)\n"
        "print(len(store), (before[-1] - before[0]) * 1024)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "out"), str(tmp_path / "only")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert int(said[0]) == 120 and int(said[1]) < 2 * 2 * size
