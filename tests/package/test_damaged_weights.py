"""Files of weights from elsewhere: damage, bombs, and indices that name what they may not, each refused in words."""

from __future__ import annotations

import json
import pickle
import random
import struct
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tu_symmetry as tus
from tu_symmetry.files import write_safetensors
from tu_symmetry.states import SampleFileError


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"a.weight": torch.full((40, 5), 2000.0), "a.bias": torch.randn(40, generator=generator)}


def same(found: dict[str, Tensor]) -> bool:
    expected = weights()
    return found.keys() == expected.keys() and all(torch.equal(t, expected[n]) for n, t in found.items())


@pytest.mark.parametrize("wrapped", [False, True])
def test_no_flipped_bit_of_an_archive_becomes_a_number(wrapped: bool, tmp_path: Path) -> None:
    """Every byte of the weights, and a sample of the rest, with a random bit; in the directory some are of no use."""
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": weights(), "epoch": 3} if wrapped else weights(), path)
    content, draw = path.read_bytes(), random.Random(0)
    with zipfile.ZipFile(path) as archive:
        held = next(m for m in archive.infolist() if m.file_size == 800)
        data = struct.unpack("<HH", content[held.header_offset + 26 : held.header_offset + 30])
    first = held.header_offset + 30 + sum(data)
    places = {*range(first, first + 800, 13), *draw.sample(range(len(content)), 200)}
    refused = 0
    for place in sorted(places):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :])
        try:
            assert same(tus.load_state(path)), place
        except SampleFileError as error:
            refused += 1
            assert "last.ckpt" in str(error)
            if first <= place < first + 800:
                assert "/data/" in str(error) and "has another checksum" in str(error)
    assert refused > len(range(0, 800, 13))


def test_archives_without_checksums_are_read(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(False)
        torch.save(weights(), tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    torch.save(weights(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert same(tus.load_state(tmp_path / "a.pt")) and same(tus.load_state(tmp_path / "old.pt"))


def packed(path: Path) -> None:
    """Zeros that take a thousandth of their size."""
    torch.save({"a": torch.zeros(1 << 22)}, path.with_name("whole.zip"))
    with zipfile.ZipFile(path.with_name("whole.zip")) as whole, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for name in whole.namelist():
            out.writestr(name, whole.read(name))


def repeated(path: Path, **options: Any) -> None:
    torch.save({"a": torch.zeros(()).expand(1 << 28)}, path, **options)


def test_a_small_file_takes_no_large_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    for bomb in (packed, repeated, partial(repeated, _use_new_zipfile_serialization=False)):
        bomb(path)
        with pytest.raises(SampleFileError, match=r"a\.pt .*(compressed|repeat)"):
            tus.load_state(path)


def test_tied_and_expanded_tensors_of_ordinary_networks_are_read(tmp_path: Path) -> None:
    table = torch.randn(50, 8)
    state = {"in": table, "out": table, "view": table[:10], "positions": torch.arange(64).expand(2, 64)}
    torch.save(state, tmp_path / "a.pt")
    found = tus.load_state(tmp_path / "a.pt")
    assert all(torch.equal(t, state[n]) for n, t in found.items())


HEADERS: dict[str, Any] = {
    "an infinite size": {"a": {"dtype": "F32", "shape": [1e400], "data_offsets": [0, 4]}},
    "a fraction": {"a": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]}},
    "a text": {"a": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}},
    "a text as place": {"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}},
    "a truth value": {"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}},
    "negative sizes": {"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}},
    "a huge size": {"a": {"dtype": "F32", "shape": [0, 10**30], "data_offsets": [0, 0]}},
    "sizes that no tensor has": {"a": {"dtype": "F32", "shape": [0, 2**62, 4], "data_offsets": [0, 0]}},
    "no list": {"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}},
    "tensors that overlap": {n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"},
    "another size than its shape": {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
    "a gap": {"a": {"dtype": "F32", "shape": [0], "data_offsets": [4, 4]}},
    "nothing": {"a": None},
    "a list": [],
    "modules that are a list": {"__metadata__": {"tu_symmetry.modules": "[1]"}},
    "modules without entries": {"__metadata__": {"tu_symmetry.modules": '{"a": 1}'}},
}


@pytest.mark.parametrize("name", HEADERS)
def test_what_no_header_holds_is_damage(name: str, tmp_path: Path) -> None:
    text = json.dumps(HEADERS[name]).replace("Infinity", "1e400").encode()
    path = tmp_path / "a.safetensors"
    size = 4 if b"4]" in text or b'"4"]' in text else 0
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * size)
    with pytest.raises(SampleFileError, match=r"a\.safetensors"):
        tus.load_state(path)


def index(folder: Path, content: Any) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


NAMES = [
    *("../outside.safetensors", "sub/../../outside.safetensors", "..\\outside.safetensors", "/outside.safetensors"),
    *("C:\\outside.safetensors", "C:outside.safetensors", "\\\\server\\share\\outside.safetensors", "ABSOLUTE"),
    *("", ".", "sub", "model.safetensors.index.json", "text.txt", "a\0b.safetensors", "\ud800.pt"),
]


@pytest.mark.parametrize("name", NAMES)
def test_an_index_names_files_of_its_folder_alone(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "network"
    (folder / "sub").mkdir(parents=True)
    write_safetensors(tmp_path / "outside.safetensors", weights())
    (folder / "text.txt").write_text("x")
    name = str(tmp_path / "outside.safetensors") if name == "ABSOLUTE" else name
    path = index(folder, {"weight_map": {"a.weight": name, "a.bias": name}})
    with pytest.raises(SampleFileError, match="which is no file of weights"):
        tus.load_state(path)


MAPS: list[Any] = [[], {}, None, "a.safetensors", {"a": 1}, {"a": ["a.safetensors"]}, {"a": "x" * 5000 + ".pt"}]
MALFORMED = [b"", b"\xff", b"[]", b"{}", b"null", b"[" * 100_000, *({"weight_map": one} for one in MAPS)]


@pytest.mark.parametrize("content", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_index_is_named(content: Any, tmp_path: Path) -> None:
    path = index(tmp_path, content)
    with pytest.raises(SampleFileError, match=r"model\.safetensors\.index\.json (is no index|names files)"):
        tus.load_state(path)


def test_an_index_of_files_below_and_of_links_is_read(tmp_path: Path) -> None:
    """As the cache of huggingface_hub: names in the folder are links to files elsewhere."""
    (tmp_path / "blobs").mkdir()
    folder = tmp_path / "snapshots"
    (folder / "sub").mkdir(parents=True)
    state = weights()
    write_safetensors(tmp_path / "blobs" / "1234", {"a.weight": state["a.weight"]})
    (folder / "1.safetensors").symlink_to(tmp_path / "blobs" / "1234")
    write_safetensors(folder / "sub" / "2.safetensors", {"a.bias": state["a.bias"]})
    path = index(folder, {"weight_map": {"a.weight": "1.safetensors", "a.bias": "sub/2.safetensors"}})
    assert same(tus.load_state(path))


def test_pickles_of_code_are_not_run(tmp_path: Path) -> None:
    class Code:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    (tmp_path / "a.pt").write_bytes(pickle.dumps({"a": Code()}, protocol=2))
    torch.save({"a": Code()}, tmp_path / "b.pt")
    for name in ("a.pt", "b.pt"):
        with pytest.raises(SampleFileError, match=name.replace(".", r"\.")):
            tus.load_state(tmp_path / name)
    assert not (tmp_path / "ran").exists()
