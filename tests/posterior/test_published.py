"""Folders of checkpoints become sample stores, and what cannot be read is said."""

from __future__ import annotations

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
    small, wide = list_checkpoints(folder)
    assert (small.folder, wide.folder) == ("small", "wide/run")
    assert [Path(f).stem for f in small.files] == [f"net_{k}" for k in range(12)]


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
