"""Files that are whole or not there at all, and that tell when they have been changed.

Every write of the library goes through here. A file is written under a temporary name beside it,
``.NAME.1a2b3c4d.tmp``, and renamed: an interruption leaves the old file or the new one. What a killed process leaves
under such a name is taken away by :func:`clear_scratch`.

A *seal* is a BLAKE2b digest of a whole file inside that file, and beside it the versions that wrote it. Safetensors
files carry it in their metadata, JSON files under the key ``sealed``. Reading checks it, so a flipped bit, a missing
end, a weight that another program changed are errors and never numbers. Files that were written before there were
seals are read with an :class:`UnsealedFileWarning`, because nothing can be checked there.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import struct
import warnings
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

SCRATCH = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}\.tmp")
LOCK = ".lock"
_DIGEST = "tu_symmetry.blake2b"
_VERSIONS = "tu_symmetry.written_by"
_MODULES = "tu_symmetry.modules"
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


class UnsealedFileWarning(UserWarning):
    """A file of an older version, whose content cannot be checked."""


@dataclass(frozen=True)
class Header:
    """What the head of a safetensors file says.

    Attributes:
        metadata: the writer's own entries.
        layout: name to shape and dtype of each tensor.
        digest: the seal, 64 hexadecimal digits; None in a file without one.
        versions: package to version of what wrote a sealed file.
        places: name to the byte of the file where a tensor begins; in the file's order, without gaps.
        modules: what ``state_dict()`` notes of each module, its version above all (``_metadata``); None if the file
            says nothing of it.
    """

    metadata: dict[str, str]
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]]
    digest: str | None
    versions: dict[str, str]
    places: dict[str, int]
    modules: dict[str, Any] | None = None


# ---------------------------------------------------------------------------------------------------------------------
# Whole or not at all


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary name in the file's folder; what was written there takes the file's place when the block ends."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a new, empty folder that takes its name when the block ends; that name must be free, or an empty folder."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_folder(path: str | os.PathLike[str]) -> None:
    """Delete a folder whole or not at all: it loses its name first, and an interruption leaves scratch only."""
    path = Path(path)
    moved = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        os.replace(path, moved)
    except FileNotFoundError:
        return
    shutil.rmtree(moved, ignore_errors=True)


def clear_scratch(
    folder: str | os.PathLike[str], *, recursive: bool = False, of: Collection[str] | None = None
) -> None:
    """Take away what a killed process has left under temporary names; only where no other process writes.

    ``recursive`` looks into the folder's folders too; ``of`` names the files whose temporary ones are meant, all if
    None.
    """
    for left in sorted(Path(folder).iterdir() if Path(folder).is_dir() else ()):
        scratch = SCRATCH.fullmatch(left.name)
        if scratch and (of is None or scratch["name"] in of):
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)
        elif recursive and left.is_dir() and not left.is_symlink():
            clear_scratch(left, recursive=True, of=of)


@contextmanager
def lock_folder(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Keep others from writing a folder, which must exist; the operating system lets go however the process ends.

    The folder takes a file ``.lock``, which stays.

    Raises:
        FolderInUseError: another process, or another block of this one, holds it.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(Path(folder) / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise FolderInUseError(f"{folder} is in use by another run; wait for it, or choose another folder") from None
    try:
        yield
    finally:
        lock.release()


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file (UTF-8) whole or not at all; names of files that are no UTF-8 are written with escapes."""
    write_bytes(path, text.encode(errors="backslashreplace"))


# ---------------------------------------------------------------------------------------------------------------------
# JSON


def write_json(path: str | os.PathLike[str], value: Any, *, seal: bool = False) -> None:
    """Write a JSON file whole or not at all.

    With ``seal``, an object takes a digest of its content and the versions that wrote it, which :func:`read_json`
    checks.
    """
    if seal:
        content = {**json.loads(json.dumps(value)), _SEAL: {"by": versions()}}  # names as JSON has them
        content[_SEAL]["blake2b"] = digest_of(content)
        value = content
    write_text(path, json.dumps(value, indent=1) + "\n")


def read_json(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, str] | None]:
    """Read a JSON object and check its seal, if it has one.

    Returns:
        The object without the seal, and the versions that wrote it; None for those of a file without a seal.

    Raises:
        FileError: no JSON object, or one that was changed after it was written.
        OSError: no such file, or no right to read it.
    """
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


def digest_of(value: Any) -> str:
    """Digest of anything that JSON can hold."""
    return _hash(json.dumps(value, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# Tensors


def write_safetensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a sealed safetensors file whole or not at all; the same content gives the same bytes.

    The safetensors library's own writer keeps metadata in a random order, reports a full disk as an error without a
    number, and leaves temporary files under random names. The format is a length (8 bytes), a header (JSON) and the
    bytes of the tensors; the digest is of the whole file, with zeros where the digest stands. Tied tensors are written
    under each of their names, and the ``_metadata`` of a state dict is written with them.

    Raises:
        ValueError: a tensor that such a file cannot hold.
        OSError: a folder that is not there or cannot be written, a full disk.
    """
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in _DTYPE_NAMES:
            kind = "without data (meta)" if tensor.is_meta else f"{tensor.layout} {tensor.dtype}"
            raise ValueError(f"{name!r} is a tensor {kind}, which a safetensors file cannot hold")
    names = sorted(tensors, key=lambda n: (-tensors[n].element_size(), n))  # aligned, as the format wants it
    own = {_DIGEST: _ZEROS.decode(), _VERSIONS: json.dumps(versions())}
    if (modules := getattr(tensors, "_metadata", None)) is not None:
        own[_MODULES] = json.dumps(modules, default=str)
    header: dict[str, Any] = {"__metadata__": {**dict(sorted((metadata or {}).items())), **own}}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        shape, dtype = list(tensor.shape), _DTYPE_NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    head = struct.pack("<Q", len(text) + -len(text) % 8) + text + b" " * (-len(text) % 8)
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


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read the head of a safetensors file; no tensor is read and no seal is checked.

    Raises:
        FileError: a file that is truncated or no safetensors file.
        OSError: no such file, or no right to read it.
    """
    with Path(path).open("rb") as file:
        return _read_head(path, file.read(8), file.read)[0]


def check_file(path: str | os.PathLike[str], *, finite: bool = False, warn: bool = True) -> Header:
    """Read a safetensors file once, a megabyte at a time, and compare it with its seal; returns its header.

    With ``finite``, NaN and infinite values are errors, in a file without a seal too. ``warn`` says whether a file
    without a seal is worth a warning.

    Raises:
        FileError: a file that is truncated, foreign, or was changed after it was written.
        OSError: no such file, or no right to read it.
    """
    with Path(path).open("rb") as file:
        header, head = _read_head(path, file.read(8), file.read)
        if header.digest is None and warn:
            warn_unsealed(path)
        if header.digest is None and not finite:
            return header
        digest = _hash(head.replace((header.digest or _ZEROS.decode()).encode(), _ZEROS, 1))
        diverged = None
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


def read_safetensors(
    path: str | os.PathLike[str], *, device: str | torch.device = "cpu", warn: bool = True
) -> tuple[dict[str, Tensor], Header]:
    """Read the tensors of a safetensors file, each into aligned memory of its own, and check its seal.

    Within the file tensors lie as they come, and products of factors that lie differently round differently.

    Raises:
        FileError: a file that is truncated, foreign, or was changed after it was written.
        OSError: no such file, or no right to read it.
    """
    file = TensorFile(path, device=device, warn=warn)
    return dict(file), file.header


def read_tensors(path: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """The tensors of :func:`read_safetensors`."""
    return read_safetensors(path, device=device)[0]


class TensorFile(Mapping[str, Tensor]):
    """The tensors of a safetensors file, each read when it is asked for, into memory of its own that goes with it.

    The reader of the safetensors library maps the file: as long as one of its tensors lives, what was read of all the
    others counts as memory too. The seal is compared once, when this is made; a file that is replaced afterwards is
    noticed.

    Raises:
        FileError: a file that is truncated, foreign, or was changed after it was written.
        OSError: no such file, or no right to read it.
    """

    def __init__(self, path: str | os.PathLike[str], *, device: str | torch.device = "cpu", warn: bool = True) -> None:
        self.path, self.device = Path(path), device
        self._stamp = self._look()
        self.header = check_file(path, warn=warn)
        self._metadata = self.header.modules

    def _look(self) -> tuple[int, int, int]:
        found = self.path.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns

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
            if not whole or self._look() != self._stamp:
                raise FileError(f"{self.path} was changed while it was read; make sure that nothing writes to it")
        return content.to(self.device)

    def __iter__(self) -> Iterator[str]:
        return iter(self.header.layout)

    def __len__(self) -> int:
        return len(self.header.layout)


def open_safetensors(path: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> Any:
    """``safetensors.safe_open`` with this module's errors.

    Raises:
        FileError: a file that is truncated or no safetensors file.
    """
    try:
        return safe_open(path, framework="pt", device=str(device))
    except SafetensorError as error:
        raise FileError(f"{path} is truncated or no safetensors file ({error})") from error


def _read_head(path: str | os.PathLike[str], length: bytes, read: Any) -> tuple[Header, bytes]:
    """The parsed head of a safetensors file and its bytes; ``read`` gives the bytes after the length."""
    size = os.stat(path).st_size
    count = struct.unpack("<Q", length)[0] if len(length) == 8 else 0
    if not 2 <= count <= size - 8:
        raise FileError(f"{path} is truncated or no safetensors file")
    text = read(count)
    try:
        entries = json.loads(text)
        if not isinstance(entries, dict):
            raise ValueError(f"a {type(entries).__name__}, not an object")
        metadata = dict(entries.pop("__metadata__", None) or {})
        layout = {n: (_counts(e["shape"]), DTYPES[e["dtype"]]) for n, e in entries.items()}
        offsets = {n: _counts(e["data_offsets"]) for n, e in entries.items()}
        spans = sorted((start, stop, n) for n, (start, stop) in offsets.items())
        end = spans[-1][1] if spans else 0
        versions_ = json.loads(metadata.pop(_VERSIONS, "{}"))
        modules = json.loads(metadata.pop(_MODULES, "null"))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise FileError(f"{path} is damaged or no safetensors file (its header: {error})") from error
    digest = metadata.pop(_DIGEST, None)
    if not all(isinstance(text, str) for text in metadata.values()) or not isinstance(versions_, dict):
        raise FileError(f"{path} is damaged or no safetensors file (its metadata are no texts)")
    if modules is not None and not (isinstance(modules, dict) and all(isinstance(m, dict) for m in modules.values())):
        raise FileError(f"{path} is damaged: what it says of the network's modules is no mapping")
    if (digest is None and versions_) or not (digest is None or (isinstance(digest, str) and len(digest) == 64)):
        raise FileError(f"{path} is damaged: its digest is no digest")
    if 8 + count + end != size:
        raise FileError(f"{path} is truncated or damaged: it has {size} bytes, and should have {8 + count + end}")
    for start, stop, name in spans:
        shape, dtype = layout[name]
        if stop - start != math.prod(shape) * dtype.itemsize:
            raise FileError(f"{path} is damaged: {name!r} of shape {shape} and {dtype} has {stop - start} bytes")
    if any(stop != start for (_, stop, _), (start, _, _) in pairwise([(0, 0, ""), *spans])):
        raise FileError(f"{path} is damaged: its tensors overlap, or there are gaps between them")
    places = {name: 8 + count + start for start, _, name in spans}
    return Header(metadata, layout, digest, versions_, places, modules), length + text


def _counts(numbers: Any) -> tuple[int, ...]:
    """Sizes or places of a header.

    Raises:
        ValueError: anything else.
    """
    if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        raise ValueError(f"{numbers} are no sizes")
    return tuple(numbers)


def _content(tensor: Tensor) -> memoryview:
    """The bytes of a tensor."""
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    content: Any = dense.reshape(-1).view(torch.uint8).numpy()
    return memoryview(content)


# ---------------------------------------------------------------------------------------------------------------------
# Archives of torch.save


def check_archive(path: str | os.PathLike[str]) -> None:
    """Read a file of ``torch.save`` once and compare each of its members with its checksum.

    The reader of torch leaves the checksums (CRC-32) out. They are no seal: they tell damage, and not what was written
    on purpose. Members are stored as they are, so that reading takes no more memory than the file has bytes. What is no
    archive (the format of torch before 1.6) has no checksums and is not looked at.

    Raises:
        FileError: an archive that is truncated, a member that was changed after it was written, or is compressed.
        OSError: no such file, or no right to read it.
    """
    with Path(path).open("rb") as file:
        if file.read(4) != b"PK\3\4":
            return
        size, member = os.stat(path).st_size, None
        try:
            with zipfile.ZipFile(file) as archive:
                total = sum(one.file_size for one in archive.infolist())
                packed = next((m.filename for m in archive.infolist() if m.compress_type != zipfile.ZIP_STORED), None)
                if packed is not None or total > size:
                    raise FileError(
                        f"{path} would take {total} bytes of memory and has {size}: "
                        + (f"{packed!r} is compressed" if packed is not None else "its members overlap")
                        + ", and torch.save writes no such files; if you trust it, load it with torch and save it again"
                    )
                if not any(one.CRC for one in archive.infolist()):  # torch.serialization.set_crc32_options(False)
                    return
                for member in archive.infolist():
                    with archive.open(member) as content:
                        while content.read(_BLOCK):
                            pass
        except (zipfile.BadZipFile, RuntimeError, EOFError, struct.error, ValueError, OSError) as error:
            if isinstance(error, FileError) or (isinstance(error, OSError) and error.errno != errno.EINVAL):
                raise  # a place before the beginning of the file is an error of the system too
            what = "its directory cannot be read" if member is None else f"{member.filename!r} has another checksum"
            raise FileError(
                f"{path} is truncated, or was changed or damaged after it was written: {what} ({error}); restore it, "
                "or make it again"
            ) from error


# ---------------------------------------------------------------------------------------------------------------------
# Digests and versions


def digest_file(path: str | os.PathLike[str]) -> str:
    """Digest of a file's bytes."""
    digest = _hash()
    with Path(path).open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def digest_folder(folder: str | os.PathLike[str], *, without: Sequence[str] = ()) -> dict[str, str]:
    """Digests of all files below a folder, by their names in it; ``without`` names some that are left out."""
    folder = Path(folder)
    found = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}
    return {name: digest_file(p) for name, p in found.items() if name not in without}


def versions() -> dict[str, str]:
    """What writes files here: this library's and torch's versions."""
    from tu_symmetry import __version__

    return {"tu_symmetry": __version__, "torch": str(torch.__version__).partition("+")[0]}


def other_versions(written_by: Mapping[str, str] | None) -> str:
    """Which other versions wrote something (``tu_symmetry 0.1.0, torch 2.11.0``); empty for those at work here.

    Args:
        written_by: package to version; None or empty where it is not known.
    """
    if not written_by:
        return "an older version"
    ours = versions()
    return ", ".join(f"{k} {v}" for k, v in written_by.items() if v != ours.get(k))


def warn_unsealed(path: str | os.PathLike[str]) -> None:
    """Say that a file of an older version cannot be checked."""
    warnings.warn(
        f"{path} was written by an older version and carries no digest of its content, so damage would go unnoticed; "
        "read it and write it again to have one",
        UnsealedFileWarning,
        stacklevel=3,
    )


def _hash(content: bytes = b"") -> Any:
    return hashlib.blake2b(content, digest_size=32)


def full_disk(error: OSError) -> bool:
    """Whether a write failed because there is no more room for it."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
