"""The library's files: whole or not at all, and no damage goes unnoticed, whatever byte it is in."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tu_symmetry import files
from tu_symmetry.files import FileError, FolderInUseError
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.posterior.compact import CompactPosterior
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.states import SampleFileError, load_state
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.graph import SymmetryGraph

ROOT = Path(__file__).parents[2]


def tensors() -> dict[str, Tensor]:
    """One of every dtype, and the odd ones: scalars, nothing, transposed, tied, conjugated."""
    generator = torch.Generator().manual_seed(0)
    found = {
        str(dtype): torch.randint(0, 2, (3, 5), generator=generator).to(dtype)
        for dtype in files.DTYPES.values()
        if "float8" not in str(dtype)
    }
    turned = torch.randn(3, 4, generator=generator).T
    return found | {
        "scalar": torch.tensor(3.0),
        "nothing": torch.zeros(0, 3),
        "turned": turned,
        "tied": turned,
        "conjugated": torch.randn(3, dtype=torch.complex64, generator=generator).conj(),
    }


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def test_what_is_read_lies_as_what_is_computed(tmp_path: Path) -> None:
    """On 64 bytes: products of factors that lie elsewhere are rounded in another way."""
    odd = {name: torch.randn(size, dtype=torch.float64) for size, name in enumerate("abcdefgh", start=1)}
    path = tmp_path / "odd.safetensors"
    files.write_safetensors(path, odd)
    store = SampleStore.create(tmp_path / "samples", architecture="a", method="m", seed=1)
    for step in range(3):
        store.append(odd, step=step)
    read = [files.read_tensors(path), files.TensorFile(path), load_state(path), *store, store[1], store.load()]
    found = [t for tensors in read for t in tensors.values()] + [store.tensor(i, n) for i in range(3) for n in odd]
    assert all(t.data_ptr() % 64 == 0 for t in found)


def test_tensors_come_back_and_the_safetensors_library_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    files.write_safetensors(path, tensors(), {"b": "1", "a": "2"})
    back, header = files.read_safetensors(path)
    assert equal(back, tensors()) and equal(load_file(path), tensors())
    assert header.metadata == {"a": "2", "b": "1"} and header.versions == files.versions()
    assert {n: (tuple(t.shape), t.dtype) for n, t in tensors().items()} == header.layout
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["tu_symmetry.blake2b"] == header.digest
    first = path.read_bytes()
    files.write_safetensors(path, dict(reversed(tensors().items())), {"a": "2", "b": "1"})
    assert path.read_bytes() == first  # the same content, the same bytes
    assert [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]


@pytest.mark.parametrize(
    "bad",
    [torch.eye(2).to_sparse(), torch.zeros(2, device="meta"), torch.zeros(2, dtype=torch.complex128)],
    ids=["sparse", "meta", "complex128"],
)
def test_what_a_file_cannot_hold_is_named(bad: Tensor, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'bad' is a tensor"):
        files.write_safetensors(tmp_path / "w.safetensors", {"good": torch.ones(2), "bad": bad})
    assert not list(tmp_path.iterdir())


def damages(content: bytes, step: int = 1) -> list[tuple[str, bytes]]:
    """One flipped bit in every ``step``-th byte, and the file cut off, grown, or overwritten with zeros, anywhere."""
    draw = random.Random(0)
    found = []
    for at in range(0, len(content), step):
        flipped = bytearray(content)
        flipped[at] ^= 1 << draw.randrange(8)
        found.append((f"bit in byte {at}", bytes(flipped)))
    for at in range(0, len(content), 7 * step):
        found.append((f"cut at {at}", content[:at]))
        zeros = bytearray(content)
        zeros[at : at + 16] = bytes(len(zeros[at : at + 16]))
        if bytes(zeros) != content:
            found.append((f"zeros at {at}", bytes(zeros)))
    return [*found, ("grown", content + b"\0"), ("empty", b""), ("noise", draw.randbytes(len(content)))]


def undetected(path: Path, read: Callable[[], object], error: type[Exception], step: int = 1) -> list[str]:
    """Damages after which reading goes through, or ends in another error than the one that names the file."""
    whole, left = path.read_bytes(), []
    read()
    for what, content in damages(whole, step):
        path.write_bytes(content)
        try:
            read()
            left.append(f"{what}: read")
        except error as found:
            if path.name not in str(found) or "\n" in str(found):
                left.append(f"{what}: {found}")
        except Exception as found:  # what a damaged file makes of a reader can be anything
            left.append(f"{what}: {type(found).__name__}: {found}")
    path.write_bytes(whole)
    read()
    return left


def test_no_damage_of_tensors_goes_unnoticed(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    files.write_safetensors(path, {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.ones(2).half()}, {"k": "v"})
    assert undetected(path, lambda: files.read_safetensors(path), FileError) == []


def test_no_damage_of_json_goes_unnoticed(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    files.write_json(path, {"a": [1, 2.5, None], "b": {"c": "text", "d": True}}, seal=True)

    def read() -> None:
        content, written_by = files.read_json(path)
        same = content == {"a": [1, 2.5, None], "b": {"c": "text", "d": True}}  # spaces and line ends do not matter
        if written_by != files.versions() or not same:
            raise FileError(f"{path.name} has no seal")

    left = undetected(path, read, FileError)
    assert all(entry.endswith("read") for entry in left) and len(left) < 60  # white space only, seen by `read`


def networks() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    state = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).state_dict()
    return [{n: torch.randn(t.shape, generator=generator) for n, t in state.items()} for _ in range(4)]


def graph() -> SymmetryGraph:
    return discover_symmetries(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), torch.zeros(2, 2))


def stored(folder: Path, count: int = 4) -> SampleStore:
    store = SampleStore.create(folder, architecture="a", method="m", seed=1)
    for i, state in enumerate(networks()[:count]):
        store.append(state, step=i)
    return store


@pytest.fixture
def store(tmp_path: Path) -> SampleStore:
    return stored(tmp_path / "s")


def test_no_damage_of_a_sample_store_goes_unnoticed(tmp_path: Path) -> None:
    store = stored(tmp_path / "s", 2)

    def read() -> None:
        opened = SampleStore.open(store.folder)
        assert opened.metadata == {"architecture": "a", "method": "m", "seed": 1} and len(list(opened)) == 2

    left = undetected(store.records[1].shard, read, SampleFileError, step=3)
    left += undetected(store.folder / "store.json", read, SampleFileError)
    assert [entry for entry in left if "cut at" in entry or "AssertionError" in entry] == []
    white = store.folder.joinpath("store.json").read_bytes()
    assert all(white[int(entry.split()[3][:-1])] in b" \n" for entry in left if entry.startswith("bit")), left


def test_no_damage_of_a_compact_posterior_or_a_laplace_file_goes_unnoticed(tmp_path: Path) -> None:
    path = tmp_path / "q.safetensors"
    CompactPosterior.from_states(networks(), graph(), align=False).save(path)
    assert undetected(path, lambda: CompactPosterior.load(path), SampleFileError, step=3) == []
    path, model = tmp_path / "l.safetensors", nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x = torch.randn(6, 2, dtype=torch.float64)
    LinearizedLaplace(model, prior="single", evaluate_at="map").fit([(x, torch.arange(6) % 2)]).save(path)
    assert undetected(path, lambda: LinearizedLaplace.load(path, model), FileError, step=11) == []


def sealed(tensors: dict[str, Tensor], metadata: dict[str, str], folder: Path) -> bytes:
    files.write_safetensors(folder / "made", tensors, metadata)
    return (folder / "made").read_bytes()


def test_what_was_done_to_a_store_is_no_silence(store: SampleStore, tmp_path: Path) -> None:
    """Shards that were copied, replaced, taken away or made elsewhere; a head and a log that were changed."""
    folder, shards = store.folder, [record.shard for record in store.records]
    head, log, other = folder / "store.json", folder / "shards.log", stored(tmp_path / "other", 1)
    whole = {path: path.read_bytes() for path in folder.iterdir()}
    held, said = load_file(shards[2]), files.read_header(shards[2]).metadata
    made = folder / "00000009-made.safetensors"
    said_there = said | {"file": made.name, "step": "[9]"}
    save_file(held, tmp_path / "plain", metadata=said)
    unsealed = {key: value for key, value in json.loads(whole[head]).items() if key != "sealed"}
    damages: list[tuple[Path, bytes | None, str]] = [
        (shards[0], None, r"is gone \(1 of 4 shards\)"),
        (shards[3], None, r"is gone \(1 of 4 shards\)"),
        (shards[0], whole[shards[1]], f"{shards[0].name} is a copy of {shards[1].name}"),
        (made, whole[shards[1]], f"{made.name} is a copy of {shards[1].name}"),
        (made, other.records[0].shard.read_bytes(), "is a copy of|belongs to another store"),
        (head, (other.folder / "store.json").read_bytes(), "belongs to another store"),
        (head, json.dumps(unsealed).encode(), "no digest"),
        (shards[2], sealed({n: t + 1 for n, t in held.items()}, said, tmp_path), "was replaced or damaged"),
        (shards[2], (tmp_path / "plain").read_bytes(), "carries no digest"),
        (made, sealed({n: t * torch.nan for n, t in held.items()}, said_there, tmp_path), "made.safetensors holds NaN"),
        (log, None, r"shards\.log is gone"),
        (log, whole[log].replace(b".safetensors", b".safetensor-", 1), r"shards\.log is damaged"),
    ]
    for path, content, message in damages:
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        before = {p: p.read_bytes() for p in folder.iterdir()}
        with pytest.raises(SampleFileError, match=message) as raised:
            list(SampleStore.open(folder))
        assert "\n" not in str(raised.value)
        assert {p: p.read_bytes() for p in folder.iterdir()} == before
        path.unlink(missing_ok=True)
        for place, bytes_before in whole.items():
            place.write_bytes(bytes_before)
    assert len(list(SampleStore.open(folder))) == 4


def test_a_store_without_a_shard_goes_on_without_its_line(store: SampleStore) -> None:
    """As the message says."""
    log, gone = store.folder / "shards.log", store.records[1].shard
    gone.unlink()
    log.write_text("\n".join(line for line in log.read_text().splitlines() if gone.name not in line) + "\n")
    assert len(SampleStore.open(store.folder)) == 3


def test_a_log_goes_on_after_a_line_that_was_not_written_out(store: SampleStore) -> None:
    log = store.folder / "shards.log"
    log.write_bytes(log.read_bytes()[:-20])
    again = SampleStore.open(store.folder)
    again.append({n: t + 1 for n, t in networks()[0].items()}, step=9)
    assert len(SampleStore.open(store.folder)) == 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.float8_e5m2])
@pytest.mark.parametrize("place", [0, 700_000, -1])
def test_no_number_of_a_file_escapes_the_look_for_nan(tmp_path: Path, dtype: torch.dtype, place: int) -> None:
    """Wherever it lies (a megabyte is read at a time), in sealed files and in those of other programs."""
    path = tmp_path / "w.safetensors"
    content = {"odd": torch.zeros(3, dtype=torch.uint8), "w": torch.ones(700_001).to(dtype)}
    files.write_safetensors(path, content)
    assert files.check_file(path, finite=True).layout["w"] == ((700_001,), dtype)
    content["w"][place] = torch.tensor(torch.inf).to(dtype)
    for write in (lambda: files.write_safetensors(path, content), lambda: save_file(content, path)):
        write()
        files.check_file(path)
        with pytest.raises(FileError, match=r"NaN or infinite values in 'w'"):
            files.check_file(path, finite=True)


def test_opening_a_store_reads_no_weights(store: SampleStore) -> None:
    """What is wrong with a shard's weights shows when it is read, and not before."""
    shard = store.records[2].shard
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    opened = SampleStore.open(store.folder)
    opened[1], opened[3]
    with pytest.raises(SampleFileError, match=shard.name):
        opened[2]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "a"
    writes: list[Callable[[str], None]] = [
        lambda text: files.write_text(path, text),
        lambda text: files.write_json(path, {"n": text}),
        lambda text: files.write_safetensors(path, {text: torch.tensor(1)}),
    ]
    for write in writes:
        write("before")
        before = path.read_bytes()
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
            patch.setattr(os, "replace", full)
            write("after")
        assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["a"]


def forked(work: Callable[[], None]) -> int:
    """Run something in a copy of this process (torch takes seconds to import); its number."""
    number = os.fork()
    if number == 0:
        try:
            torch.set_num_threads(1)  # those of the process that was copied are not here
            work()
        finally:
            os._exit(1)
    return number


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path) -> None:
    """In a process that may not write files of more than 64 kB: what safetensors reports without a number."""

    def write() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        try:
            files.write_safetensors(tmp_path / "w.safetensors", {"w": torch.ones(1 << 20)})
        except OSError as error:
            os._exit(0 if error.errno == errno.EFBIG else 3)

    assert os.waitstatus_to_exitcode(os.waitpid(forked(write), 0)[1]) == 0
    assert not list(tmp_path.iterdir())


def test_kill_9_leaves_folders_whole_or_not_there(tmp_path: Path) -> None:
    draw = random.Random(0)

    def make() -> None:
        while True:
            with files.new_folder(tmp_path / "made") as folder:
                for i in range(20):
                    (folder / str(i)).write_text("x")
            files.remove_folder(tmp_path / "made")

    for _ in range(30):
        child = forked(make)
        time.sleep(draw.random() / 30)
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        if (tmp_path / "made").exists():
            assert len(list((tmp_path / "made").iterdir())) == 20
        files.clear_scratch(tmp_path)
        assert {p.name for p in tmp_path.iterdir()} <= {"made"}
        files.remove_folder(tmp_path / "made")
    files.remove_folder(tmp_path / "made")  # not there: nothing to do


def test_scratch_of_others_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in (".a.1a2b3c4d.tmp", "sub/.b.1a2b3c4d.tmp", "a.tmp", ".a.tmp", ".a.1a2b3c4d", ".a.xyzxyzxy.tmp"):
        (tmp_path / name).write_text("x")
    files.clear_scratch(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".a.1a2b3c4d", ".a.tmp", ".a.xyzxyzxy.tmp", "a.tmp", "sub"]
    assert len(list((tmp_path / "sub").iterdir())) == 1
    files.clear_scratch(tmp_path, recursive=True)
    assert not list((tmp_path / "sub").iterdir())


def test_a_folder_is_locked_for_others_and_free_afterwards(tmp_path: Path) -> None:
    def take() -> None:
        try:
            with files.lock_folder(tmp_path):
                os._exit(0)
        except FolderInUseError:
            os._exit(3)

    def other() -> int:
        return os.waitstatus_to_exitcode(os.waitpid(forked(take), 0)[1])

    with files.lock_folder(tmp_path):
        with pytest.raises(FolderInUseError, match="in use by another run"), files.lock_folder(tmp_path):
            pass
        assert other() == 3
    assert other() == 0  # and it ended without letting go
    with files.lock_folder(tmp_path):
        pass
