"""Networks that are cut into several files: indices of safetensors files, folders of ``torch.distributed.checkpoint``.

The metadata of such a folder is a pickle. It is read into inert objects: nothing that it names is imported or called,
and what it says is compared with the files before memory is taken for a tensor.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, ClassVar

import torch
from torch import Tensor

from tu_symmetry.files import SUFFIXES, FileError, read_archive, stamp

INDEX = ".index.json"
_METADATA, _PART = ".metadata", ".distcp"
# The modules whose objects stand in the metadata; a path is the folder's name when it was written.
_KNOWN = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem", "pathlib")


def shards_of(index: Path) -> dict[str, Path]:
    """The file of each tensor, from the index (``.safetensors.index.json``) of a network that is cut into several.

    An index may name files of weights in its own folder and below alone; a link that stands there is followed.
    """
    try:
        names = json.loads(index.read_bytes())["weight_map"]
        texts = [*names.keys(), *names.values()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FileError(f"{index} is no index of weights ({type(error).__name__}: {error})") from error
    if not texts or not all(isinstance(text, str) for text in texts):
        raise FileError(f"{index} is no index of weights: its weight_map is to name a file for each tensor")
    files = sorted(set(names.values()))
    if outside := [file for file in files if _leads_out(file)]:
        raise FileError(
            f"{index} names {outside[0]!r}, which is no file of weights ({', '.join(SUFFIXES)}) in its folder; put the "
            "files beside it, and write their names into it"
        )
    if missing := [file for file in files if not os.path.isfile(index.parent / file)]:
        raise FileError(f"{index} names files that are not there: {', '.join(missing[:4])}; copy or download them too")
    return {tensor: index.parent / file for tensor, file in names.items()}


def _leads_out(file: str, suffixes: Collection[str] = SUFFIXES) -> bool:
    """Whether a name of an index is of anything but a file of weights below it, on any system."""
    ways = (PurePosixPath(file), PureWindowsPath(file))
    away = any(way.is_absolute() or way.drive or way.root or ".." in way.parts for way in ways)
    return away or not file.isprintable() or ways[0].suffix not in suffixes


def is_sharded(path: Path) -> bool:
    """Whether ``torch.distributed.checkpoint`` has written a folder, to its end or not."""
    return path.is_dir() and any(map(is_part, path.iterdir()))


def is_part(path: Path) -> bool:
    """Whether a name is that of a file in such a folder."""
    return path.name == _METADATA or path.suffix == _PART


def files_of(path: Path) -> list[Path]:
    """All files that a network is read from: itself, those that it names if it is an index, a folder's in order."""
    if path.is_dir():
        return sorted(filter(is_part, path.iterdir()))
    return [path, *dict.fromkeys(shards_of(path).values())] if path.name.endswith(INDEX) else [path]


class _Inert:
    """An object of the metadata without its class: what it was made of."""

    def __init__(self, *given: Any) -> None:
        self.given: Any = given

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {"given": state})


class _Reader(pickle._Unpickler):
    """Unpickles the metadata into :class:`_Inert`; in Python, where no number in a file reserves memory."""

    dispatch: ClassVar = {k: v for k, v in pickle._Unpickler.dispatch.items() if k != pickle.BYTEARRAY8[0]}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) == ("torch", "Size"):
            return tuple
        if module in (*_KNOWN, "pathlib._local") or (module, name) == ("torch.serialization", "_get_layout"):
            return _Inert
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no such checkpoint holds")


@dataclass(frozen=True)
class _Part:
    """A block of a tensor, and where it lies."""

    file: Path
    start: int
    length: int
    at: tuple[int, ...]
    shape: tuple[int, ...]


_Held = tuple[tuple[int, ...], torch.dtype, list[_Part]]


class TensorFolder(Mapping[str, Tensor]):
    """The tensors of a folder of ``torch.distributed.checkpoint``, each put together when it is asked for.

    Names are those of the nested dict that was saved, joined by dots. What is no tensor and what stands under a key
    ``optim...`` is left out. No process group is needed, whatever number of processes has written the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / _METADATA).is_file():
            raise FileError(
                f"{path} is a folder without {_METADATA}, which torch.distributed.checkpoint writes last: the save was "
                "cut off, each process saved for itself, or the checkpoint lies below; take another one, or name files"
            )
        try:
            self._held = _read_metadata(path)
        except FileError:
            raise
        except Exception as error:  # what a foreign file makes of an unpickler can be anything
            raise FileError(
                f"{path / _METADATA} is truncated, damaged or not of torch.distributed.checkpoint "
                f"({type(error).__name__}: {error}); copy the folder again, or take another checkpoint"
            ) from error
        self._stamps = {part.file: stamp(part.file) for _, _, parts in self._held.values() for part in parts}

    def __getitem__(self, name: str) -> Tensor:
        shape, dtype, parts = self._held[name]
        if len(parts) == 1:
            return self._read(name, dtype, parts[0])
        whole = torch.empty(shape, dtype=dtype, device="cpu")
        covered = torch.zeros(shape, dtype=torch.bool, device="cpu")
        for part in parts:
            place = tuple(slice(start, start + n) for start, n in zip(part.at, part.shape, strict=True))
            whole[place], covered[place] = self._read(name, dtype, part), True
        if not covered.all():
            raise FileError(f"{self.path / _METADATA} is damaged: the parts of {name!r} overlap; copy the folder again")
        return whole

    def _read(self, name: str, dtype: torch.dtype, part: _Part) -> Tensor:
        with part.file.open("rb") as file:
            file.seek(part.start)
            content = file.read(part.length)
        if stamp(part.file) != self._stamps[part.file]:
            raise FileError(f"{part.file} was changed while it was read; make sure that nothing writes to it")
        tensor = read_archive(io.BytesIO(content), f"{part.file} ({name!r}, at byte {part.start})")
        plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not plain or tensor.is_quantized or (tuple(tensor.shape), tensor.dtype) != (part.shape, dtype):
            raise FileError(
                f"{part.file} does not hold {name!r} at byte {part.start} as {_METADATA} says: the files are of two "
                "checkpoints, or its weights are not dense; copy the folder again, or save dense weights"
            )
        return tensor.detach().contiguous()

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def _read_metadata(folder: Path) -> dict[str, _Held]:
    """Shape, dtype and parts of each tensor, as the files can hold them."""
    found = _Reader(io.BytesIO((folder / _METADATA).read_bytes())).load()
    stored = {(key.fqn, tuple(getattr(key, "offset", None) or ())): place for key, place in found.storage_data.items()}
    _check_files(folder, list(stored.values()))
    nested, held = found.planner_data or {}, {}
    for name, entry in found.state_dict_metadata.items():
        keys = nested.get(name, (name,))
        if hasattr(entry, "chunks") and not any(str(key).startswith("optim") for key in keys[:-1]):
            held[str(name)] = _held(folder, name, entry, stored)
    if not held:
        raise FileError(f"{folder} holds no tensors beside an optimizer's; save the model's state_dict() too")
    return held


def _held(folder: Path, name: str, entry: Any, stored: Mapping[tuple[str, tuple[int, ...]], Any]) -> _Held:
    shape, dtype, parts = _whole_numbers(entry.size), entry.properties.given[0], {}
    torch.empty(shape, dtype=dtype, device="meta")  # fails for shapes that no tensor has
    for chunk in entry.chunks:
        at, sizes = _whole_numbers(chunk.offsets), _whole_numbers(chunk.sizes)
        if not all(a + n <= end for a, n, end in zip(at, sizes, shape, strict=True)):
            raise ValueError(f"a part of {name!r} lies outside its shape {shape}")
        if math.prod(sizes):
            place = stored[name, at]
            parts[at] = _Part(folder / place.relative_path, place.offset, place.length, at, sizes)
            if math.prod(sizes) * dtype.itemsize > place.length:
                raise ValueError(f"{name!r} repeats a few numbers")
    if sum(math.prod(part.shape) for part in parts.values()) != math.prod(shape):
        raise ValueError(f"the parts of {name!r} do not make up its shape {shape}")
    return shape, dtype, list(parts.values())


def _whole_numbers(sizes: Any) -> tuple[int, ...]:
    if not all(type(n) is int and 0 <= n < 2**63 for n in sizes):
        raise ValueError(f"{sizes} are no sizes")
    return tuple(sizes)


def _check_files(folder: Path, places: list[Any]) -> None:
    """Refuse files that are outside, missing or shorter than the metadata has it, and parts that share bytes."""
    ends: Counter[str] = Counter()
    for place in places:
        name, (start, length) = place.relative_path, _whole_numbers((place.offset, place.length))
        if PurePosixPath(name).name != name or _leads_out(name, (_PART,)):
            raise ValueError(f"it names {name!r}, which is no file of the folder ({_PART})")
        if getattr(place, "transform_descriptors", None):
            raise FileError(f"{folder} is compressed ({place.transform_descriptors}); save it without extensions")
        ends[name] = max(ends[name], start + length)
    if missing := sorted(name for name in ends if not (folder / name).is_file()):
        raise FileError(
            f"{folder} lacks {len(missing)} of its {len(ends)} files: {', '.join(missing[:4])}; copy them from all "
            "machines that have written the checkpoint"
        )
    for name, end in ends.items():
        if (size := (folder / name).stat().st_size) < end:
            raise FileError(
                f"{folder / name} is truncated: it has {size} bytes, and {_METADATA} names {end}; copy it again"
            )
    if sum(place.length for place in places) > sum((folder / name).stat().st_size for name in ends):
        raise ValueError("its parts share bytes")
