"""Files that are whole or not there at all, and that tell when they have been changed.

A file is written under a temporary name beside it, ``.NAME.1a2b3c4d.tmp``, and renamed. A *seal* is a BLAKE2b digest of
the whole file inside it, beside the versions that wrote it: in the metadata of safetensors, under a key of JSON.
Reading checks it, in files of other programs as far as they have one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import pickle
import re
import secrets
import shutil
import struct
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

AnyPath = str | os.PathLike[str]
SCRATCH = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}\.tmp")
LOCK = ".lock"
SUFFIXES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin")  # of files of weights
_DIGEST, _VERSIONS, _MODULES = "tu_symmetry.blake2b", "tu_symmetry.written_by", "tu_symmetry.modules"
_SEAL = "sealed"
_BLOCK = 1 << 20
_ZEROS = b"0" * 64
# The names that the safetensors format has for torch's dtypes, as far as this torch has them.
_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "BOOL": "bool", "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, t) for name, t in _NAMES.items() if hasattr(torch, t)}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class FileError(ValueError):
    """A file that is truncated, damaged or foreign; the message names it and says what to do."""


class FolderInUseError(RuntimeError):
    """Another process writes the folder."""


@dataclass(frozen=True)
class Header:
    """What the head of a safetensors file says: the writer's entries, shape and dtype of each tensor, the seal.

    ``places`` has the byte at which each tensor begins, in the file's order, and ``modules`` what a state dict notes of
    each module (its ``_metadata``).
    """

    metadata: dict[str, str]
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]]
    digest: str | None
    versions: dict[str, str]
    places: dict[str, int]
    modules: dict[str, Any] | None = None


def _scratch(path: AnyPath) -> Path:
    path = Path(path)
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


@contextmanager
def replacing(path: AnyPath) -> Iterator[Path]:
    """Give a temporary name in the file's folder; what was written there takes the file's place when the block ends."""
    temporary = _scratch(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(path: AnyPath) -> Iterator[Path]:
    """Give a new, empty folder that takes its name when the block ends; that name must be free, or an empty folder."""
    temporary = _scratch(path)
    temporary.mkdir()
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_folder(path: AnyPath) -> None:
    """Delete a folder whole or not at all: it loses its name first, and an interruption leaves scratch only."""
    moved = _scratch(path)
    try:
        os.replace(path, moved)
    except FileNotFoundError:
        return
    shutil.rmtree(moved, ignore_errors=True)


def clear_scratch(folder: AnyPath, *, recursive: bool = False, of: Collection[str] | None = None) -> None:
    """Take away what a killed process has left under temporary names, of some files or all; only where no other writes.

    ``recursive`` looks into the folder's folders too.
    """
    for left in sorted(Path(folder).iterdir() if Path(folder).is_dir() else ()):
        scratch, is_folder = SCRATCH.fullmatch(left.name), left.is_dir() and not left.is_symlink()
        if scratch and (of is None or scratch["name"] in of):
            shutil.rmtree(left, ignore_errors=True) if is_folder else left.unlink(missing_ok=True)
        elif recursive and is_folder:
            clear_scratch(left, recursive=True, of=of)


@contextmanager
def lock_folder(folder: AnyPath) -> Iterator[None]:
    """Keep others from writing a folder, which must exist; the operating system lets go however the process ends.

    The folder takes a file ``.lock``, which stays.
    """
    from filelock import FileLock, Timeout

    try:
        with FileLock(Path(folder) / LOCK, timeout=0):
            yield
    except Timeout:
        raise FolderInUseError(f"{folder} is in use by another run; wait for it, or choose another folder") from None


def write_text(path: AnyPath, text: str) -> None:
    """Write a text file (UTF-8) whole or not at all; names of files that are no UTF-8 are written with escapes."""
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode(errors="backslashreplace"))


def write_json(path: AnyPath, value: Any, *, seal: bool = False) -> None:
    """Write a JSON file whole or not at all, with ``seal`` an object with a digest that :func:`read_json` checks."""
    if seal:
        content = {**json.loads(json.dumps(value)), _SEAL: {"by": versions()}}  # names as JSON has them
        content[_SEAL]["blake2b"] = digest_of(content)
        value = content
    write_text(path, json.dumps(value, indent=1) + "\n")


def read_json(path: AnyPath) -> tuple[dict[str, Any], dict[str, str] | None]:
    """A JSON object without its seal, which is checked, and the versions that wrote it; None for those without one."""
    try:
        content = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is truncated, damaged or no JSON ({error})") from error
    if not isinstance(content, dict):
        raise FileError(f"{path} holds {type(content).__name__}, not a JSON object")
    seal = content.pop(_SEAL, None)
    if seal is None:
        return content, None
    if not isinstance(seal, dict) or seal.get("blake2b") != digest_of({**content, _SEAL: {"by": seal.get("by")}}):
        raise FileError(f"{path} was changed or damaged after it was written: its content does not have its digest")
    return content, dict(seal["by"])


def without_nan(value: Any) -> Any:
    """A value for a report that others read: JSON knows neither NaN nor infinity, which become None."""
    if isinstance(value, dict):
        return {key: without_nan(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(held) for held in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_safetensors(path: AnyPath, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a sealed safetensors file whole or not at all; the same content gives the same bytes.

    The safetensors library's own writer keeps metadata in a random order and reports a full disk without a number. The
    digest is of the whole file, with zeros where it stands. Tied tensors are written under each of their names, and the
    ``_metadata`` of a state dict with them. Of a view that reads tensors from files one is in memory at a time.
    """
    layouts, views = layouts_of(tensors), hasattr(tensors, "layouts")
    for name, (_, dtype) in layouts.items():
        tensor = torch.empty((), dtype=dtype, device="cpu") if views else tensors[name]
        if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in _DTYPE_NAMES:
            kind = "without data (meta)" if tensor.is_meta else f"{tensor.layout} {tensor.dtype}"
            raise ValueError(f"{name!r} is a tensor {kind}, which a safetensors file cannot hold")
    names = sorted(layouts, key=lambda n: (-layouts[n][1].itemsize, n))  # aligned, as the format wants it
    own = {_DIGEST: _ZEROS.decode(), _VERSIONS: json.dumps(versions())}
    if (modules := getattr(getattr(tensors, "as_given", tensors), "_metadata", None)) is not None:
        own[_MODULES] = json.dumps(modules, default=str)
    header: dict[str, Any] = {"__metadata__": {**dict(sorted((metadata or {}).items())), **own}}
    end = 0
    for name in names:
        shape, dtype = layouts[name]
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    digest = _hash(head)
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(head)
        for name in names:
            content = _content(tensors[name])
            for begin in range(0, len(content), _BLOCK):
                block = content[begin : begin + _BLOCK]
                digest.update(block)
                file.write(block)
        file.seek(head.index(f'"{_DIGEST}":"'.encode()) + len(_DIGEST) + 4)
        file.write(digest.hexdigest().encode())


def layouts_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor; a view that reads tensors when they are asked for knows them without reading."""
    known: dict[str, tuple[tuple[int, ...], torch.dtype]] | None = getattr(tensors, "layouts", None)
    return {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} if known is None else known


def read_header(path: AnyPath) -> Header:
    """The head of a safetensors file; no tensor is read and no seal is checked."""
    return _read_head(path)[0]


def check_file(path: AnyPath, *, finite: bool = False) -> Header:
    """Read a safetensors file once, a megabyte at a time, and compare it with its seal; returns its header.

    With ``finite``, NaN and infinite values are errors, in a file without a seal too.
    """
    header, head = _read_head(path)
    if header.digest is None and not finite:
        return header
    digest = _hash(head.replace((header.digest or _ZEROS.decode()).encode(), _ZEROS, 1))
    diverged = None
    with Path(path).open("rb") as file:
        file.seek(len(head))
        for name in header.places:  # a tensor at a time, so that no number lies across two blocks
            shape, dtype = header.layout[name]
            size = math.prod(shape) * dtype.itemsize
            for start in range(0, size, _BLOCK):
                block = bytearray(file.read(min(_BLOCK, size - start)))
                digest.update(block)
                if finite and (dtype.is_floating_point or dtype.is_complex):
                    diverged = diverged or (None if torch.frombuffer(block, dtype=dtype).isfinite().all() else name)
    if header.digest not in (None, digest.hexdigest()):
        raise FileError(
            f"{path} was changed or damaged after it was written: its content does not have its digest; restore it, or "
            "make it again"
        )
    if diverged is not None:
        raise FileError(f"{path} holds NaN or infinite values in {diverged!r}; it is damaged, restore it")
    return header


def read_safetensors(path: AnyPath) -> tuple[dict[str, Tensor], Header]:
    """The tensors of a file that this library wrote, see :class:`TensorFile`, and its header."""
    file = TensorFile(path)
    if file.header.digest is None:
        raise FileError(f"{path} carries no digest: this library, as it is now, has not written it; make it again")
    return dict(file), file.header


def read_tensors(path: AnyPath) -> dict[str, Tensor]:
    """The tensors of :func:`read_safetensors`."""
    return read_safetensors(path)[0]


def stamp(path: Path) -> tuple[int, int, int]:
    """By what a file differs from another one that takes its name: number, size and time."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


class Views(Mapping[str, Tensor]):
    """Tensors by name, each read or made when it is asked for, and not when it is asked if there is such a name."""

    _held: Mapping[str, Any]  # has the names

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


class TensorFile(Views):
    """The tensors of a safetensors file, each read when it is asked for, into aligned memory of its own.

    The safetensors library maps the file: one tensor keeps the memory of all, and products of factors that lie
    unaligned round differently. The seal is compared once, when this is made; a file that is replaced is noticed.
    """

    def __init__(self, path: AnyPath) -> None:
        self.path = Path(path)
        self._stamp = stamp(self.path)
        self.header = check_file(path)
        self.layouts = self._held = self.header.layout
        self._metadata = self.header.modules

    def __getitem__(self, name: str) -> Tensor:
        shape, dtype = self.header.layout[name]
        try:
            content = torch.empty(shape, dtype=dtype, device="cpu")
        except RuntimeError as error:  # of no entries, and of sizes that no tensor has
            raise FileError(f"{self.path} is damaged: {name!r} of shape {shape} is no tensor ({error})") from error
        if content.numel():
            with self.path.open("rb") as file:
                file.seek(self.header.places[name])
                whole = file.readinto(_content(content)) == content.numel() * content.element_size()
            if not whole or stamp(self.path) != self._stamp:
                raise FileError(f"{self.path} was changed while it was read; make sure that nothing writes to it")
        return content


def open_safetensors(path: AnyPath) -> Any:
    """``safetensors.safe_open`` with this module's errors."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise FileError(f"{path} is truncated, damaged or no safetensors file ({error})") from error


def _read_head(path: AnyPath) -> tuple[Header, bytes]:
    """The parsed head of a file, which has to describe it to the byte, and the head's bytes."""
    with Path(path).open("rb") as file:
        length, size = file.read(8), os.fstat(file.fileno()).st_size
        count = struct.unpack("<Q", length)[0] if len(length) == 8 else 0
        if not 2 <= count <= size - 8:
            raise FileError(f"{path} is truncated or no safetensors file")
        text = file.read(count)
    places: dict[str, int] = {}
    end = 8 + count
    try:
        entries = json.loads(text)
        metadata = dict(entries.pop("__metadata__", None) or {})
        layout = {name: (tuple(entry["shape"]), DTYPES[entry["dtype"]]) for name, entry in entries.items()}
        for name, entry in sorted(entries.items(), key=lambda found: found[1]["data_offsets"]):
            (shape, dtype), (start, stop) = layout[name], entry["data_offsets"]
            if not all(type(n) is int and 0 <= n < 2**63 for n in (*shape, start, stop)):
                raise ValueError(f"{name!r} has sizes or places that are none")
            if (8 + count + start, stop - start) != (end, math.prod(shape) * dtype.itemsize):
                raise ValueError(f"{name!r} of shape {shape} and {dtype} does not lie in its place")
            places[name] = end
            end += stop - start
        digest = metadata.pop(_DIGEST, None)
        written_by = json.loads(metadata.pop(_VERSIONS, "{}"))
        modules = json.loads(metadata.pop(_MODULES, "null"))
        if (digest is None and written_by) or (digest is not None and len(digest) != 64):
            raise ValueError("its digest is no digest")
        if not all(isinstance(one, str) for one in metadata.values()) or not isinstance(written_by, dict):
            raise ValueError("its metadata are no texts")
        if modules is not None and not all(isinstance(module, dict) for module in modules.values()):
            raise ValueError("what it says of the network's modules is no mapping")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FileError(f"{path} is damaged or no safetensors file (its header: {error})") from error
    if end != size:
        raise FileError(f"{path} is truncated or damaged: it has {size} bytes, and should have {end}")
    return Header(metadata, layout, digest, written_by, places, modules), length + text


def _content(tensor: Tensor) -> memoryview:
    """The bytes of a tensor."""
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    content: Any = dense.reshape(-1).view(torch.uint8).numpy()
    return memoryview(content)


def read_archive(file: IO[bytes], name: object) -> Any:
    """What ``torch.save`` wrote into a file of this name, read as weights only after its checksums were compared."""
    check_archive(file, name)
    file.seek(0)
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise FileError(
            f"{name} cannot be read as weights only. If it is a checkpoint that you trust and the message below names "
            "a class, allow it with torch.serialization.add_safe_globals([that class]); else the file is foreign or "
            "damaged. torch said: " + _reason(error)
        ) from error
    except OSError:
        raise  # the system's own
    except Exception as error:  # what a foreign file makes of the unpickler can be anything
        raise FileError(
            f"{name} is no torch checkpoint, or it is truncated ({type(error).__name__}: {error})"
        ) from error


def _reason(error: Exception) -> str:
    """What torch's reader stumbled on, without its paragraphs of advice."""
    said = [line.strip() for line in str(error).splitlines() if line.strip()]
    found = next((line for line in said if "WeightsUnpickler error" in line or line.startswith("Unsupported")), None)
    return (found or next(iter(said), "nothing")).partition(" Please use")[0]


def check_archive(file: IO[bytes], name: object) -> None:
    """Read a file of ``torch.save`` once and compare each of its members with its checksum, which torch does not do.

    Members are stored as they are, so that reading takes no more memory than the file has bytes. What is no archive
    (the format of torch before 1.6) has no checksums and is not looked at.
    """
    if file.read(4) != b"PK\3\4":
        return
    size, why = file.seek(0, os.SEEK_END), ""
    bad: str | Exception | None = None
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            total = sum(one.file_size for one in members)
            packed = [one.filename for one in members if one.compress_type != zipfile.ZIP_STORED]
            if packed or total > size:
                why = f"{packed[0]!r} is compressed" if packed else "its members overlap"
            elif any(one.CRC for one in members):  # torch.serialization.set_crc32_options(False) leaves them out
                bad = archive.testzip()
    except (zipfile.BadZipFile, RuntimeError, EOFError, struct.error, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise  # a place before the beginning of the file is an error of the system too
        bad = error
    if why:
        raise FileError(
            f"{name} would take {total} bytes of memory and has {size}: {why}, as torch.save writes no files; if you "
            "trust it, load it with torch and save it again"
        )
    if bad is not None:
        what = f"{bad!r} has another checksum" if isinstance(bad, str) else f"its directory cannot be read ({bad})"
        raise FileError(f"{name} is truncated, or was changed or damaged after it was written: {what}; restore it")


def _hash(content: bytes = b"") -> Any:
    return hashlib.blake2b(content, digest_size=32)


def digest_of(value: Any) -> str:
    """Digest of anything that JSON can hold."""
    return str(_hash(json.dumps(value, sort_keys=True).encode()).hexdigest())


def digest_file(path: AnyPath, digest: Any = None) -> str:
    """Digest of a file's bytes, by ``digest`` of :mod:`hashlib` if it is given."""
    digest = digest or _hash()
    with Path(path).open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return str(digest.hexdigest())


def digest_folder(folder: AnyPath) -> dict[str, str]:
    """Digests of all files below a folder, by their names in it."""
    found = sorted(p for p in Path(folder).rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix(): digest_file(p) for p in found}


def versions() -> dict[str, str]:
    """What writes files here: this library's and torch's versions."""
    from tu_symmetry import __version__

    return {"tu_symmetry": __version__, "torch": str(torch.__version__).partition("+")[0]}
