"""Folders of torch.distributed.checkpoint as checkpoints: written here by torch, read without a process group."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import side_by_side
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from toy_networks import Net, tree

import tu_symmetry as tus
from tu_symmetry import cli
from tu_symmetry.checkpoints.files import find_checkpoints, sha256
from tu_symmetry.files import FileError
from tu_symmetry.shards import TensorFolder
from tu_symmetry.states import SampleFileError

MODEL = ["--model", "toy_networks.Net", "--input", "1,4"]
State = dict[str, Tensor]
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


def network(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(t.shape, generator=generator) for n, t in Net().state_dict().items()}


def write(folder: Path, content: dict[str, Any]) -> Path:
    dcp.save(content, checkpoint_id=folder, no_dist=True)
    return folder


def training(seed: int) -> dict[str, Any]:
    """What a training run saves: the network under a key, its optimizer, and numbers."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return {"model": network(seed), "optim": optimizer.state_dict(), "epoch": 3}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def same(found: State, wanted: State) -> bool:
    """Bit for bit, in any order, for the folder's is that of the writer."""
    return found.keys() == wanted.keys() and all(
        t.dtype == wanted[n].dtype and torch.equal(t, wanted[n]) for n, t in found.items()
    )


def aligned(out: str, *sources: str) -> None:
    assert cli.main(["align", *sources, *MODEL, "--prefix", "model.", "--out", out]) == 0


def aligned_like_files(here: Path, *folders: str) -> None:
    """Folders are aligned and merged to what files of the same networks are."""
    for seed in range(2):
        torch.save({f"model.{n}": t for n, t in network(seed).items()}, here / f"net{seed}.pt")
    aligned("from_files", "net0.pt", "net1.pt")
    aligned("from_folders", *folders)
    for name in ("net0", "net1", "net0.permutation", "net1.permutation"):
        found = tus.load_state(here / "from_folders" / f"{name}.safetensors")
        assert same(found, tus.load_state(here / "from_files" / f"{name}.safetensors")), name
    for out, sources in (("f", ["net0.pt", "net1.pt"]), ("d", folders)):
        assert cli.main(["merge", *sources, *MODEL, "--prefix", "model.", "--out", f"{out}.safetensors"]) == 0
    assert same(tus.load_state("d.safetensors"), tus.load_state("f.safetensors"))


def test_folders_are_aligned_and_merged_as_files_are(here: Path) -> None:
    for seed in range(2):
        write(here / "runs" / f"net{seed}", training(seed))
    aligned_like_files(here, "runs/*")


def save_shards(rank: int, folder: Path) -> None:
    """Two processes hold a half of each tensor (of three rows, two and one), and one all of some."""
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for seed in range(2):
        state = network(seed)
        state["odd"] = torch.arange(15.0, dtype=torch.bfloat16).reshape(3, 5)
        state["few"] = torch.arange(5).reshape(1, 5)  # nothing of it is left for the second process
        placed = {
            n: distribute_tensor(t, mesh, [Replicate() if "bias" in n else Shard(k % t.ndim)])
            for k, (n, t) in enumerate(state.items())
        }
        odd = {n: placed.pop(n) for n in ("odd", "few")}
        dcp.save(
            {"model": placed, "optim": {"w": placed["0.weight"]}, "more": odd}, checkpoint_id=folder / f"net{seed}"
        )
    model = Net()
    model.load_state_dict(network(2))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=folder / "fsdp2")
    dist.destroy_process_group()
    os._exit(0)  # a thread of gloo that still runs would abort the interpreter on its way out


def test_shards_of_two_processes_come_out_whole(here: Path) -> None:
    side_by_side(save_shards, here, count=2)
    assert len(list((here / "net0").glob("*.distcp"))) == 2
    assert same(tus.load_state(here / "net1", prefix="model."), network(1))
    assert same({n.removeprefix("model."): t for n, t in tus.load_state(here / "fsdp2").items()}, network(2))
    more = tus.load_state(here / "net1", prefix="more.")
    assert same(more, {"odd": torch.arange(15.0).bfloat16().reshape(3, 5), "few": torch.arange(5).reshape(1, 5)})
    parts = [len(parts) for *_, parts in TensorFolder(here / "net1")._held.values()]
    assert max(parts) == 2 and min(parts) == 1
    aligned_like_files(here, "net0", "net1")


def test_optimizers_are_left_out_and_a_prefix_is_proposed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here / "a", training(0))
    assert set(tus.load_state("a")) == {f"model.{n}" for n in network(0)}
    assert set(tus.load_state(write(here / "b", {"optim.weight": torch.ones(2)}))) == {"optim.weight"}
    assert cli.main(["align", "a", *MODEL, "--out", "out"]) == 2
    assert "(option --prefix model.)" in capsys.readouterr().err
    with pytest.raises(FileError, match="no tensors beside an optimizer's"):
        tus.load_state(write(here / "c", {"optim": training(0)["optim"], "epoch": 3}))


def test_odd_tensors_come_back(tmp_path: Path) -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    table = torch.randn(50, 8)
    state = {
        "number": torch.tensor(3), "none": torch.zeros(0, 3), "image": image, "row": table[7], "table": table,
        "expanded": torch.arange(4).expand(3, 4), "small": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "parameter": nn.Parameter(torch.ones(2)), "flags": torch.tensor([True, False]),
    }  # fmt: skip
    found = tus.load_state(write(tmp_path / "a", state))
    assert found.keys() == state.keys() and not found["parameter"].requires_grad
    for name, t in state.items():
        assert found[name].dtype == t.dtype and torch.equal(found[name].double(), t.double()), name


def test_a_folder_is_one_checkpoint(here: Path) -> None:
    folder = write(here / "runs" / "net0", training(0))
    (folder / "meta.pt").write_bytes(b"Lightning's")
    torch.save(network(1), here / "runs" / "net1.pt")
    both = [folder, here / "runs" / "net1.pt"]
    assert find_checkpoints([here / "runs" / "*"]) == both
    assert sorted(find_checkpoints([here / "runs" / "**"])) == both
    assert find_checkpoints([folder / "*.distcp", folder / ".metadata", folder]) == [folder]
    with pytest.raises(FileError, match=r"is no file, and no folder of torch\.distributed\.checkpoint"):
        find_checkpoints([here / "runs"])
    before = sha256(folder)
    copied = shutil.copytree(folder, here / "copy")
    assert sha256(copied) == before
    with next(copied.glob("*.distcp")).open("ab") as file:
        file.write(b"\0")
    assert sha256(copied) != before


def test_a_run_that_is_repeated_looks_at_all_files(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(2):
        write(here / f"net{seed}", {"model": network(seed)})
    aligned("out", "net0", "net1")
    capsys.readouterr()
    aligned("out", "net0", "net1")
    assert "(2 done before)" in capsys.readouterr().out
    metadata = (here / "net1" / ".metadata").read_bytes()
    write(here / "net1", {"model": network(2)})
    (here / "net1" / ".metadata").write_bytes(metadata)  # only the weights are others
    aligned("out", "net0", "net1")
    assert "(1 done before)" in capsys.readouterr().out


def test_a_changed_part_of_an_index_is_noticed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = {"weight_map": dict.fromkeys(network(0), "part.safetensors")}
    (here / "net.safetensors.index.json").write_text(json.dumps(index))
    for seed, message in ((0, "1 aligned files in"), (0, "(1 done before)"), (1, "1 aligned files in")):
        save_file(network(seed), here / "part.safetensors")
        aligned("out", "net.safetensors.index.json")
        assert message in capsys.readouterr().out


def shorter(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    at = content.index(torch.full((16,), 7.5).numpy().tobytes())
    content[at] ^= 1
    path.write_bytes(content)


def another(path: Path) -> None:
    """The shards of another checkpoint, whose tensors lie at the same places."""
    write(path.parent / "other", {"a": torch.zeros(8, 2), "b": torch.ones(4)})
    shutil.copy(path.parent / "other" / path.name, path)


DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "no metadata": (
        ".metadata",
        Path.unlink,
        r"No such file .*\.metadata.*; if it is one, saving or copying was cut off",
    ),
    "metadata cut": (".metadata", shorter, r"\.metadata is damaged"),
    "empty metadata": (".metadata", lambda p: p.write_bytes(b""), r"\.metadata is damaged"),
    "no shard": ("__0_0.distcp", Path.unlink, r"No such file .*__0_0\.distcp"),
    "shard cut": ("__0_0.distcp", shorter, r"__0_0\.distcp is truncated: it has \d+ bytes"),
    "shard flipped": ("__0_0.distcp", flipped, r"__0_0\.distcp \('a', at byte \d+\) is truncated, or was changed"),
    "shard of another": ("__0_0.distcp", another, r"does not hold 'a' at byte 0 as \.metadata says"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(kind: str, tmp_path: Path) -> None:
    name, damage, message = DAMAGE[kind]
    folder = write(tmp_path / "a", {"a": torch.full((16,), 7.5), "b": torch.ones(4)})
    damage(folder / name)
    with pytest.raises(SampleFileError, match=message):
        tus.load_state(folder)


def test_members_of_enumerations_are_read_as_python_3_11_2_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Enum, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    folder = write(tmp_path / "a", network(0))
    assert b"getattr" in (folder / ".metadata").read_bytes()
    assert same(tus.load_state(folder), network(0))


class Code:
    """A pickle of it calls a function."""

    def __init__(self, function: Callable[..., Any], path: Path) -> None:
        self.function, self.path = function, path

    def __reduce__(self) -> Any:
        return self.function, (self.path,)


def edited(edit: Callable[[Any], None]) -> Callable[[Path], None]:
    def write_again(folder: Path) -> None:
        path = folder / ".metadata"
        content = pickle.loads(path.read_bytes())
        edit(content)
        path.write_bytes(pickle.dumps(content))

    return write_again


def plant(function: Callable[..., Any]) -> Callable[[Path], None]:
    def plant_code(folder: Path) -> None:
        edited(lambda m: setattr(m, "planner_data", {"a": Code(function, folder.parent / "was run")}))(folder)

    return plant_code


def overlap(metadata: Any) -> None:
    """Two halves, of which the second stands where the first does but for a row."""
    a, b = metadata.state_dict_metadata["a"], metadata.state_dict_metadata["b"]
    half = type(a.chunks[0])
    a.size = torch.Size([8])
    a.chunks = [half(torch.Size([0]), torch.Size([4])), half(torch.Size([2]), torch.Size([4]))]
    places = {key.fqn: (key, place) for key, place in metadata.storage_data.items()}
    for at in (0, 2):
        metadata.storage_data[type(places["a"][0])("a", [at])] = places["ab"[at // 2]][1]
    del metadata.storage_data[places["b"][0]], b, metadata.state_dict_metadata["b"]


def place_of(metadata: Any, name: str = "a") -> Any:
    return next(place for key, place in metadata.storage_data.items() if key.fqn == name)


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "code": (plant(os.mkdir), r"it names \w+\.mkdir, which no such checkpoint holds"),
    "code of a known module": (plant(Path.touch), "TypeError"),
    "a large array": (
        lambda f: (f / ".metadata").write_bytes(b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little")),
        "KeyError",
    ),
    "another folder": (edited(lambda m: setattr(place_of(m), "relative_path", "../x.distcp")), "no file of the folder"),
    "another kind": (edited(lambda m: setattr(place_of(m), "relative_path", "x.pt")), "no file of the folder"),
    "huge shape": (
        edited(lambda m: setattr(m.state_dict_metadata["a"], "size", torch.Size([2**40]))),
        "do not make up its shape",
    ),
    "huge part": (
        edited(lambda m: setattr(m.state_dict_metadata["a"].chunks[0], "sizes", torch.Size([2**40]))),
        "lies outside",
    ),
    "shared bytes": (edited(lambda m: setattr(place_of(m), "length", 1 << 11)), "share bytes"),
    "overlapping parts": (edited(overlap), "the parts of 'a' overlap"),
    "compressed": (
        edited(lambda m: setattr(place_of(m), "transform_descriptors", ["zstd"])),
        "which are not known here",
    ),
    "a list": (lambda f: (f / ".metadata").write_bytes(pickle.dumps([1])), "AttributeError"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_metadata_is_data_alone(kind: str, tmp_path: Path) -> None:
    change, message = HOSTILE[kind]
    folder = write(tmp_path / "a", {"a": torch.ones(4), "b": torch.ones(4)})
    change(folder)
    with pytest.raises(SampleFileError, match=message):
        tus.load_state(folder)
    assert not (tmp_path / "was run").exists()


def test_a_shard_that_is_replaced_meanwhile_is_noticed(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {"a": torch.ones(4), "b": torch.ones(4)})
    opened = TensorFolder(folder)
    assert torch.equal(opened["a"], torch.ones(4))
    write(folder, {"a": torch.zeros(4), "b": torch.ones(4)})
    with pytest.raises(FileError, match="was changed while it was read"):
        opened["b"]


def test_results_do_not_take_the_place_of_a_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(here / "net.safetensors", training(0))
    before = tree(folder)
    for words in (["merge", "--out", "net.safetensors"], ["align", "--out", "net.safetensors/__0_0.distcp"]):
        assert cli.main([words[0], "net.safetensors", "net.safetensors", *MODEL, *words[1:]]) == 2
    assert tree(folder) == before
