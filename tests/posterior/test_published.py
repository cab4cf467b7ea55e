"""Folders of checkpoints become sample stores, and what cannot be read is said."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tu_symmetry.posterior import published
from tu_symmetry.posterior.published import collect_checkpoints, list_checkpoints
from tu_symmetry.states import SampleFileError


def network(seed: int, width: int = 3, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"fc.weight": torch.randn(width, 2, generator=generator).to(dtype), "steps": torch.tensor(seed)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two architectures, four kinds of files, numbers without leading zeros, float16."""
    (tmp_path / "data" / "small").mkdir(parents=True)
    (tmp_path / "data" / "wide" / "run").mkdir(parents=True)
    for k in range(12):
        state = network(k, dtype=torch.float16)
        path = tmp_path / "data" / "small" / f"net_{k}"
        if k % 4 == 0:
            torch.save(state, path.with_suffix(".pt"))
        elif k % 4 == 1:
            torch.save({"state_dict": state, "epoch": 3}, path.with_suffix(".ckpt"))
        elif k % 4 == 2:
            save_file(state, path.with_suffix(".safetensors"))
        else:
            torch.save(state, path.with_suffix(".pth"))
    torch.save({"state_dict": {f"model.{n}": t for n, t in network(0, 5).items()}}, tmp_path / "data/wide/run/a.ckpt")
    (tmp_path / "data" / "README.md").write_text("about")
    return tmp_path / "data"


def test_what_is_there_is_listed(folder: Path) -> None:
    found = list_checkpoints(folder)
    assert list(found) == ["small", "wide/run"]
    assert [Path(f).stem for f in found["small"]] == [f"net_{k}" for k in range(12)]


def test_a_folder_becomes_a_store(folder: Path, tmp_path: Path) -> None:
    seen = []
    store = collect_checkpoints(tmp_path / "out", folder, folder="small", per_shard=5,
                                progress=lambda p: seen.append(p["done"]))  # fmt: skip
    assert len(store) == 12 and seen == list(range(1, 13)) and len(list((tmp_path / "out").glob("*.safetensors"))) == 3
    for k, state in enumerate(store):
        assert state["fc.weight"].dtype == torch.float16
        assert torch.equal(state["fc.weight"], network(k, dtype=torch.float16)["fc.weight"])
    wide = collect_checkpoints(tmp_path / "wide", folder, folder="wide/run", prefix="model.")
    assert wide[0]["fc.weight"].shape == (5, 2) and wide[0]["steps"].dtype == torch.int64


def test_an_interrupted_call_goes_on(folder: Path, tmp_path: Path) -> None:
    collect_checkpoints(tmp_path / "out", folder, folder="small", count=5, per_shard=2)
    store = collect_checkpoints(tmp_path / "out", folder, folder="small")
    assert store.chains == list(range(12))
    assert torch.equal(store[11]["fc.weight"], network(11, dtype=torch.float16)["fc.weight"])
    with pytest.raises(SampleFileError, match="not of wide/run"):
        collect_checkpoints(tmp_path / "out", folder, folder="wide/run")


def test_what_cannot_be_read_is_said(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SampleFileError, match=r"no folder 'middle' .*'small': 12"):
        collect_checkpoints(tmp_path / "out", folder, folder="middle")
    rest = collect_checkpoints(tmp_path / "rest", folder, folder="small", start=9)
    assert len(rest) == 3 and int(rest[0]["steps"]) == 9
    with pytest.raises(ValueError, match="13 from number 0 on are wanted"):
        collect_checkpoints(tmp_path / "out", folder, folder="small", count=13)
    torch.save(network(0, 4, torch.float16), folder / "small" / "net_7.pth")
    with pytest.raises(SampleFileError, match=r"net_7.pth is of another architecture"):
        collect_checkpoints(tmp_path / "mixed", folder, folder="small")
    (folder / "small" / "net_0.pt").write_bytes((folder / "small" / "net_0.pt").read_bytes()[:100])
    with pytest.raises(SampleFileError, match=r"net_0\.pt"):
        collect_checkpoints(tmp_path / "cut", folder, folder="small")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(SampleFileError, match=r"holds no \.pt"):
        list_checkpoints(empty)

    class Offline:
        @staticmethod
        def list_repo_files(*_: object, **__: object) -> list[str]:
            raise ConnectionError("no route to host")

    monkeypatch.setattr(published, "_hub", Offline)
    with pytest.raises(SampleFileError, match=r"no route to host.*hf download torch-uncertainty/Checkpoints"):
        list_checkpoints()


def test_a_data_set_is_fetched_file_by_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []

    class Hub:
        @staticmethod
        def list_repo_files(name: str, repo_type: str) -> list[str]:
            assert (name, repo_type) == ("someone/Networks", "dataset")
            return [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]

        @staticmethod
        def hf_hub_download(name: str, file: str, repo_type: str) -> str:
            fetched.append(file)
            return str(folder / file)

    monkeypatch.setattr(published, "_hub", Hub)
    store = collect_checkpoints(tmp_path / "out", "someone/Networks", folder="small", count=3)
    assert len(store) == 3 and fetched == ["small/net_0.pt", "small/net_1.ckpt", "small/net_2.safetensors"]


FOLDER = "models/cifar100-resnet18"  # as the published data set has it


def archive(path: Path, numbers: range, dtype: torch.dtype = torch.float16) -> None:
    """Networks in an archive, beside files that are none, in an order that is not that of their names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as into:
        for name, content in [("set/README.md", b"about"), ("set/._net_0.pt", b"resource fork")]:
            into.addfile(information(name, len(content)), io.BytesIO(content))
        for k in numbers:
            stream = io.BytesIO()
            torch.save({"state_dict": network(k, dtype=dtype)}, stream)
            into.addfile(information(f"set/net_{k}.ckpt", stream.tell()), io.BytesIO(stream.getvalue()))


def information(name: str, size: int) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.size = size
    return found


@pytest.fixture
def archives(tmp_path: Path) -> Path:
    archive(tmp_path / "data" / FOLDER / "cifar100-resnet18-0-7.tgz", range(8))
    archive(tmp_path / "data" / FOLDER / "cifar100-resnet18-8-11.tgz", range(8, 12))
    return tmp_path / "data"


def numbers(store: published.SampleStore) -> list[int]:
    return [int(state["steps"]) for state in store]


def test_archives_are_read_member_by_member(archives: Path, tmp_path: Path) -> None:
    names = ("cifar100-resnet18-0-7.tgz", "cifar100-resnet18-8-11.tgz")
    assert list_checkpoints(archives) == {FOLDER: [f"{FOLDER}/{name}" for name in names]}
    store = collect_checkpoints(tmp_path / "out", archives, folder=FOLDER, per_shard=5)
    assert numbers(store) == list(range(12)) and store.chains == list(range(12))
    assert torch.equal(store[9]["fc.weight"], network(9, dtype=torch.float16)["fc.weight"])
    assert store[9]["fc.weight"].dtype == torch.float16
    assert numbers(collect_checkpoints(tmp_path / "some", archives, folder=FOLDER, start=6, count=4)) == [6, 7, 8, 9]


def test_an_archive_is_read_on_in_its_middle(archives: Path, tmp_path: Path) -> None:
    collect_checkpoints(tmp_path / "out", archives, folder=FOLDER, count=3, per_shard=2)
    seen: list[str] = []
    store = collect_checkpoints(tmp_path / "out", archives, folder=FOLDER, count=10,
                                progress=lambda p: seen.append(p["file"]))  # fmt: skip
    assert numbers(store) == list(range(10)) and len(seen) == 7 and seen[0].endswith("0-7.tgz: set/net_3.ckpt")


def test_an_archive_whose_name_says_that_nothing_in_it_is_wanted_is_not_opened(archives: Path, tmp_path: Path) -> None:
    (archives / FOLDER / "cifar100-resnet18-0-7.tgz").write_bytes(b"never read")
    assert numbers(collect_checkpoints(tmp_path / "out", archives, folder=FOLDER, start=8)) == [8, 9, 10, 11]
    with pytest.raises(ValueError, match=r"no more than 12 .* 9 from number 8"):
        collect_checkpoints(tmp_path / "more", archives, folder=FOLDER, start=8, count=9)


def test_a_truncated_archive_keeps_what_was_read(archives: Path, tmp_path: Path) -> None:
    path = archives / FOLDER / "cifar100-resnet18-0-7.tgz"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 3 // 4])
    with pytest.raises(SampleFileError, match=r"0-7.tgz of .* cannot be read beyond \d networks"):
        collect_checkpoints(tmp_path / "out", archives, folder=FOLDER)
    there = len(published.SampleStore.open(tmp_path / "out"))
    assert 0 < there < 8
    path.write_bytes(whole)
    assert numbers(collect_checkpoints(tmp_path / "out", archives, folder=FOLDER)) == list(range(12))
    archive(path, range(3))
    with pytest.raises(SampleFileError, match="holds 3 networks, and its name says 8"):
        collect_checkpoints(tmp_path / "short", archives, folder=FOLDER)


def test_archives_of_a_data_set_are_streams(archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    class Hub:
        @staticmethod
        def list_repo_files(name: str, repo_type: str) -> list[str]:
            return [p.relative_to(archives).as_posix() for p in archives.rglob("*.tgz")]

        class HfFileSystem:
            def open(self, name: str, mode: str) -> io.BufferedReader:
                opened.append(name)
                return (archives / name.removeprefix("datasets/someone/Networks/")).open("rb")

    monkeypatch.setattr(published, "_hub", Hub)
    store = collect_checkpoints(tmp_path / "out", "someone/Networks", folder=FOLDER, count=3)
    assert numbers(store) == [0, 1, 2] and opened == [f"datasets/someone/Networks/{FOLDER}/cifar100-resnet18-0-7.tgz"]


@pytest.mark.slow
def test_an_archive_of_several_gigabytes_takes_the_memory_of_two_networks(tmp_path: Path) -> None:
    size, count = 11_000_000, 160  # ResNet-18 in half precision, 22 MB: 3.5 GB in all
    torch.save({"weight": torch.ones(size, dtype=torch.float16)}, tmp_path / "one.pt")
    with tarfile.open(tmp_path / "many.tgz", "w:gz", compresslevel=1) as into:
        for k in range(count):
            into.add(tmp_path / "one.pt", f"net_{k}.pt")
    program = (
        "import resource, sys\n"
        "from tu_symmetry.posterior.published import collect_checkpoints\n"
        "before = []\n"
        "peak = lambda p: before.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
        "store = collect_checkpoints(sys.argv[1], sys.argv[2], start=30, count=120, per_shard=1, progress=peak)\n"
        "print(len(store), (before[-1] - before[0]) * 1024, before[0] * 1024)\n"
    )
    (tmp_path / "only").mkdir()
    (tmp_path / "many.tgz").rename(tmp_path / "only" / "many.tgz")
    command = [sys.executable, "-c", program, str(tmp_path / "out"), str(tmp_path / "only")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert int(said[0]) == 120 and int(said[1]) < 2 * 2 * size
