"""Networks that are cut into several files: indices of safetensors files, folders of ``torch.distributed.checkpoint``.

The metadata of such a folder is a pickle, read into inert objects: nothing that it names is imported or called.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any, ClassVar

import torch
from torch import Tensor

from tu_symmetry.files import SUFFIXES, FileError, Views, read_archive, stamp

INDEX = ".index.json"
_METADATA, _PART = ".metadata", ".distcp"
_KNOWN = (
    "torch.distributed.checkpoint.",
    "torch.serialization",
    "pathlib",
)  # the modules of what stands in the metadata


def names_in(index: Path) -> dict[str, str]:
    """The name of each tensor's file, from the index (``.safetensors.index.json``) of a network in several.

    An index may name files of weights in its own folder and below alone; a link that stands there is followed.
    """
    try:
        names = json.loads(index.read_bytes())["weight_map"]
        texts = [*names.keys(), *names.values()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FileError(f"{index} is no index of weights ({type(error).__name__}: {error})") from error
    if not texts or not all(isinstance(text, str) for text in texts):
        raise FileError(f"{index} is no index of weights: its weight_map is to name a file for each tensor")
    if outside := [file for file in sorted(set(names.values())) if _leads_out(file)]:
        raise FileError(
            f"{index} names {outside[0]!r}, which is no file of weights ({', '.join(SUFFIXES)}) in its folder; put the "
            "files beside it, and write their names into it"
        )
    return dict(names)


def shards_of(index: Path) -> dict[str, Path]:
    """The file of each tensor, see :func:`names_in`."""
    names = names_in(index)
    if missing := [file for file in sorted(set(names.values())) if not os.path.isfile(index.parent / file)]:
        raise FileError(f"{index} names files that are not there: {', '.join(missing[:4])}; copy or download them too")
    return {tensor: index.parent / file for tensor, file in names.items()}


def _leads_out(file: str, suffixes: Collection[str] = SUFFIXES) -> bool:
    """Whether a name of an index is of anything but a file of weights below it, on any system."""
    ways = (PurePosixPath(file), PureWindowsPath(file))
    away = any(way.is_absolute() or way.drive or way.root or ".." in way.parts for way in ways)
    return away or not file.isprintable() or ways[0].suffix not in suffixes


def is_part(path: PurePath) -> bool:
    """Whether a name is that of a file in a folder of ``torch.distributed.checkpoint``."""
    return path.name == _METADATA or path.suffix == _PART


def files_of(path: Path) -> list[Path]:
    """All files that a network is read from: itself, and those that an index names; a folder's parts, in order."""
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
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        # Python 3.11.0 to 3.11.3 write a member of an enumeration as ``getattr(its class, its name)``
        if module.startswith(_KNOWN) or (module, name) in (("torch", "Size"), ("builtins", "getattr")):
            return tuple if name == "Size" else _Inert
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no such checkpoint holds")


class TensorFolder(Views):
    """The tensors of a folder of ``torch.distributed.checkpoint``, each put together when it is asked for.

    Names are the keys of the nested dict that was saved, joined by dots. What is no tensor, and what stands under a
    key ``optim...``, is left out. No process group is needed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            found = _Reader(io.BytesIO((path / _METADATA).read_bytes())).load()
            stored = {(key.fqn, getattr(key, "offset", None)): place for key, place in found.storage_data.items()}
            self._stamps = _check_files(path, list(stored.values()))
            nested = found.planner_data or {}
            self._held = {
                str(name): _checked(name, entry, stored)
                for name, entry in found.state_dict_metadata.items()
                if hasattr(entry, "chunks") and not any(str(k).startswith("optim") for k in nested.get(name, "")[:-1])
            }
            self.layouts = {name: (shape, dtype) for name, (shape, dtype, _) in self._held.items()}
            if not self._held:
                raise ValueError("it holds no tensors beside an optimizer's; the model's state_dict() was not saved")
        except Exception as error:  # what a foreign file makes of an unpickler can be anything
            known = isinstance(error, (ValueError, OSError))
            what = error if known else f"{_METADATA} is damaged: {type(error).__name__}: {error}"
            raise FileError(
                f"{path} cannot be read as a folder of torch.distributed.checkpoint ({what}); if it is one, saving or "
                "copying was cut off: copy all of it, from all machines that wrote it, or take another checkpoint"
            ) from error

    def __getitem__(self, name: str) -> Tensor:
        shape, dtype, parts = self._held[name]
        if len(parts) == 1:
            return self._read(name, dtype, *next(iter(parts.values())))
        whole = torch.empty(shape, dtype=dtype, device="cpu")
        covered = torch.zeros(shape, dtype=torch.bool, device="cpu")
        for at, (sizes, stored) in parts.items():
            block = tuple(slice(start, start + n) for start, n in zip(at, sizes, strict=True))
            whole[block], covered[block] = self._read(name, dtype, sizes, stored), True
        if not covered.all():
            raise FileError(f"{self.path / _METADATA} is damaged: the parts of {name!r} overlap; copy the folder again")
        return whole

    def _read(self, name: str, dtype: torch.dtype, sizes: tuple[int, ...], stored: Any) -> Tensor:
        path = self.path / stored.relative_path
        with path.open("rb") as file:
            file.seek(stored.offset)
            content = file.read(stored.length)
        if stamp(path) != self._stamps[stored.relative_path]:
            raise FileError(f"{path} was changed while it was read; make sure that nothing writes to it")
        tensor = read_archive(io.BytesIO(content), f"{path} ({name!r}, at byte {stored.offset})")
        dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"
        dense = dense and not tensor.is_quantized and not tensor.is_nested
        if not dense or (tensor.shape, tensor.dtype) != (sizes, dtype):
            raise FileError(
                f"{path} does not hold {name!r} at byte {stored.offset} as {_METADATA} says: it is of another "
                "checkpoint, or not dense; copy the folder again, or save dense weights"
            )
        return tensor.detach().contiguous()


def _checked(name: str, entry: Any, stored: Mapping[Any, Any]) -> tuple[tuple[int, ...], torch.dtype, dict[Any, Any]]:
    """Shape, dtype, and at each place sizes and bytes of a part, as far as these can hold it."""
    dtype, parts = entry.properties.given[0], {}
    shape = tuple(torch.empty(entry.size, dtype=dtype, device="meta").shape)  # fails for what no tensor has
    for chunk in entry.chunks:
        at, sizes = torch.Size(chunk.offsets), torch.Size(chunk.sizes)
        if count := math.prod(sizes):
            parts[at] = sizes, stored[name, at]
            inside = all(0 <= a <= a + n <= end for a, n, end in zip(at, sizes, shape, strict=True))
            if not inside or count * dtype.itemsize > stored[name, at].length:
                raise ValueError(f"a part of {name!r} lies outside its shape {shape}, or repeats a few numbers")
    if sum(math.prod(sizes) for sizes, _ in parts.values()) != math.prod(shape):
        raise ValueError(f"the parts of {name!r} do not make up its shape {shape}")
    return shape, dtype, parts


def _check_files(folder: Path, places: Sequence[Any]) -> dict[str, tuple[int, int, int]]:
    """The stamps of files that are in the folder and as long as the metadata has it, without shared bytes."""
    stamps: dict[str, tuple[int, int, int]] = {}
    for place in places:
        name, (start, length) = place.relative_path, torch.Size((place.offset, place.length))
        if name not in stamps:
            if PurePosixPath(name).name != name or _leads_out(name, (_PART,)):
                raise ValueError(f"it names {name!r}, which is no file of the folder ({_PART})")
            stamps[name] = stamp(folder / name)
        if min(start, length) < 0 or start + length > stamps[name][1]:
            raise ValueError(f"{name} is truncated: it has {stamps[name][1]} bytes, and {start + length} are named")
        if getattr(place, "transform_descriptors", None):
            raise ValueError(f"it is written with extensions, {place.transform_descriptors}, which are not known here")
    if sum(place.length for place in places) > sum(size for _, size, _ in stamps.values()):
        raise ValueError("its parts share bytes")
    return stamps
