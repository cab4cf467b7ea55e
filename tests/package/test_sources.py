"""From where weights are: folders, cut files and Hugging Face, with huggingface_hub replaced by a folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import tu_symmetry as tus
from tu_symmetry.checkpoints.files import find_checkpoints
from tu_symmetry.files import FileError
from tu_symmetry.sources import SourceError, locate
from tu_symmetry.states import SampleFileError


def weights(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {n: t.detach() for n, t in nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).state_dict().items()}


def cut(folder: Path, name: str = "model.safetensors") -> None:
    """A network in two files and an index, as ``save_pretrained`` writes large ones."""
    folder.mkdir(parents=True, exist_ok=True)
    state, stem = weights(), name.removesuffix(".safetensors")
    places = {n: f"{stem}-{1 + int(n.startswith('2'))}-of-2.safetensors" for n in state}
    for file in set(places.values()):
        save_file({n: t for n, t in state.items() if places[n] == file}, folder / file)
    (folder / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys() and all(torch.equal(t, expected[n]) for n, t in found.items())


def test_folders(tmp_path: Path) -> None:
    for k in (2, 10, 1):
        torch.save(weights(k), tmp_path / f"epoch={k}.ckpt")
    (tmp_path / "notes.txt").write_text("x")
    assert [p.name for p in locate(tmp_path)] == ["epoch=1.ckpt", "epoch=2.ckpt", "epoch=10.ckpt"]
    assert find_checkpoints([tmp_path]) == locate(tmp_path)
    with pytest.raises(SampleFileError, match="3 files of weights"):
        tus.load_state(tmp_path)
    cut(tmp_path / "unet", "diffusion_pytorch_model.safetensors")
    assert [p.name for p in locate(tmp_path / "unet")] == ["diffusion_pytorch_model.safetensors.index.json"]
    same(tus.load_state(tmp_path / "unet"), weights())
    (tmp_path / "model_index.json").write_text("{}")
    (tmp_path / "unet" / "config.json").write_text("{}")
    with pytest.raises(SourceError, match=r"pipeline of several networks; name one of them: .*unet"):
        locate(tmp_path)
    next((tmp_path / "unet").glob("*-2-of-2*")).unlink()
    with pytest.raises(SampleFileError, match=r"files that are not there: .*-2-of-2"):
        tus.load_state(tmp_path / "unet")
    (tmp_path / "empty").mkdir()
    for source, message in ((tmp_path / "empty", "without weights"), (tmp_path / "none.pt", "no file and no folder")):
        with pytest.raises(SourceError, match=message):
            locate(source)
    with pytest.raises(FileError, match="no file"):
        find_checkpoints([tmp_path / "*.none"])


class Hub:
    """``snapshot_download`` of a folder that stands for the hub; without a network where it is not cached."""

    def __init__(self, root: Path, cache: Path) -> None:
        self.root, self.cache, self.calls = root, cache, list[dict[str, Any]]()

    def __call__(self, repo: str, **given: Any) -> str:
        from huggingface_hub.utils import filter_repo_objects

        self.calls.append({"repo": repo, **given})
        there = self.root / (given["repo_type"] or "model") / repo
        if not there.is_dir():
            raise ConnectionError("[Errno -2] Name or service not known\nand much more")
        names = [p.relative_to(there).as_posix() for p in there.rglob("*") if p.is_file()]
        for name in filter_repo_objects(names, allow_patterns=given["allow_patterns"]):
            (self.cache / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(there / name, self.cache / name)
        return str(self.cache)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    import huggingface_hub

    made = Hub(tmp_path / "hub", tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made)
    return made


def test_repositories_and_data_sets(hub: Hub) -> None:
    whole = hub.root / "model" / "owner" / "net"
    cut(whole / "unet", "diffusion_pytorch_model.safetensors")
    (whole / "unet" / "config.json").write_text("{}")
    (whole / "big.onnx").write_bytes(b"\0" * 100)
    same(tus.load_state("hf://owner/net@main/unet"), weights())
    assert hub.calls[-1]["revision"] == "main" and hub.calls[-1]["repo_type"] is None
    assert (hub.cache / "unet" / "config.json").is_file() and not (hub.cache / "big.onnx").exists()
    same(tus.load_state("hf://owner/net/unet/diffusion_pytorch_model.safetensors.index.json"), weights())

    data = hub.root / "dataset" / "owner" / "runs" / "resnet"
    data.mkdir(parents=True)
    for k in range(3):
        torch.save(weights(k), data / f"{k}.ckpt")
    found = find_checkpoints(["hf://datasets/owner/runs/resnet/*.ckpt"])
    assert [p.name for p in found] == ["0.ckpt", "1.ckpt", "2.ckpt"]
    assert hub.calls[-1]["repo_type"] == "dataset"
    same(tus.load_state("hf://datasets/owner/runs/resnet/1.ckpt"), weights(1))
    with pytest.raises(SampleFileError, match="no such weights in the repository"):
        tus.load_state("hf://datasets/owner/runs/resnet/7.ckpt")
    with pytest.raises(SampleFileError, match="names no repository"):
        tus.load_state("hf://owner")


def test_what_is_out_of_reach_says_what_to_download(hub: Hub) -> None:
    with pytest.raises(SampleFileError) as caught:
        tus.load_state("hf://datasets/owner/other@v2/a/last.ckpt")
    said = str(caught.value)
    assert "ConnectionError: [Errno -2] Name or service not known)" in said and "much more" not in said
    assert "`hf download owner/other --repo-type dataset --revision v2 --include 'a/last.ckpt' --local-dir" in said
