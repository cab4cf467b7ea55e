"""From where weights are to files on this machine: folders, and repositories and data sets of Hugging Face.

| source | what it stands for |
|---|---|
| ``weights.safetensors``, ``last.ckpt``, ... | that file |
| ``folder`` | a network as ``save_pretrained`` writes it (one file, or an index of several), else all its checkpoints |
| ``hf://owner/name``, ``hf://owner/name@revision/path`` | files of a repository of Hugging Face |
| ``hf://datasets/owner/name/path/*.ckpt`` | files of a data set |

A path may be a file, a folder, or a pattern. What was fetched before comes from the cache of ``huggingface_hub``.
"""

from __future__ import annotations

import json
import os
import re
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from tu_symmetry.files import FileError

SUFFIXES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin")
INDEX = ".index.json"
WHOLE = ("diffusion_pytorch_model.safetensors", "model.safetensors", "diffusion_pytorch_model.bin", "pytorch_model.bin")
_HF = "hf://"
_REPO = re.compile(
    r"(?:(?P<kind>datasets|spaces|models)/)?(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?(?:/(?P<path>.*))?"
)


class SourceError(FileError):
    """Weights that are not there, or cannot be fetched; the message says what to do."""


def is_remote(source: str | os.PathLike[str]) -> bool:
    """Whether weights have to be fetched first."""
    return str(source).startswith(_HF)


def locate(source: str | os.PathLike[str]) -> list[Path]:
    """The files that a source stands for, in the natural order of their names; fetched where they are not here.

    A network that is cut into several files stands for itself by its index (``.safetensors.index.json``), which
    :func:`~tu_symmetry.load_state` reads as one.
    """
    if is_remote(source):
        return _from_hub(str(source))
    path = Path(source)
    if path.is_dir():
        return weights_in(path)
    if not path.is_file():
        raise SourceError(f"{path} is no file and no folder")
    return [path]


def weights_in(folder: Path) -> list[Path]:
    """One file for a network as ``save_pretrained`` writes it; else all files of checkpoints in the folder."""
    for name in WHOLE:
        for there in (folder / name, folder / f"{name}{INDEX}"):
            if there.is_file():
                return [there]
    if (folder / "model_index.json").is_file():
        parts = ", ".join(sorted(str(p.parent) for p in folder.glob("*/config.json")))
        raise SourceError(f"{folder} is a pipeline of several networks; name one of them: {parts}")
    found = sorted((p for p in folder.iterdir() if p.is_file() and p.suffix in SUFFIXES), key=natural)
    if not found:
        raise SourceError(f"{folder} is a folder without weights: no {', '.join(SUFFIXES)} file is in it")
    return found


def natural(path: Path) -> list[Any]:
    """A key by which ``epoch=10`` stands after ``epoch=9``."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]


def shards_of(index: Path) -> dict[str, Path]:
    """The file of each tensor, from the index of a network that is cut into several.

    An index may name files of weights in its own folder and below alone. A link that stands there is followed, as the
    cache of ``huggingface_hub`` is made of them.
    """
    try:
        names = json.loads(index.read_bytes())["weight_map"]
        texts = [*names.keys(), *names.values()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SourceError(f"{index} is no index of weights ({type(error).__name__}: {error})") from error
    if not texts or not all(isinstance(text, str) for text in texts):
        raise SourceError(f"{index} is no index of weights: its weight_map is to name a file for each tensor")
    files = sorted(set(names.values()))
    if outside := [file for file in files if _leads_out(file)]:
        raise SourceError(
            f"{index} names {outside[0]!r}, which is no file of weights ({', '.join(SUFFIXES)}) in its folder; put the "
            "files beside it, and write their names into it"
        )
    if missing := [file for file in files if not os.path.isfile(index.parent / file)]:
        raise SourceError(
            f"{index} names files that are not there: {', '.join(missing[:4])}; copy or download them too"
        )
    return {tensor: index.parent / file for tensor, file in names.items()}


def _leads_out(file: str) -> bool:
    """Whether a name of an index is of anything but a file of weights below it, on any system."""
    ways = (PurePosixPath(file), PureWindowsPath(file))
    away = any(way.is_absolute() or way.drive or way.root or ".." in way.parts for way in ways)
    return away or not file.isprintable() or ways[0].suffix not in SUFFIXES


def files_of(path: Path) -> list[Path]:
    """All files that a network is read from: itself, and those that it names if it is an index."""
    return [path, *dict.fromkeys(shards_of(path).values())] if path.name.endswith(INDEX) else [path]


def _from_hub(text: str) -> list[Path]:
    found = _REPO.fullmatch(text[len(_HF) :].strip("/"))
    if found is None:
        raise SourceError(f"{text} names no repository: write hf://owner/name, hf://datasets/owner/name/FILE")
    kind, inner = found["kind"], (found["path"] or "").strip("/")
    one_file = PurePosixPath(inner).suffix in (*SUFFIXES, ".json") or any(c in inner for c in "*?[")
    if one_file:
        patterns = [inner, *([f"{PurePosixPath(inner).parent}/*.safetensors"] if inner.endswith(INDEX) else [])]
    else:
        folder = f"{inner}/" if inner else ""
        patterns = [f"{folder}*{suffix}" for suffix in (*SUFFIXES, INDEX, "config.json")]
    root = _snapshot(text, found["repo"], None if kind in (None, "models") else kind[:-1], found["revision"], patterns)
    if one_file:
        inside = sorted((p for p in root.rglob("*") if p.is_file()), key=natural)
        files = [p for p in inside if fnmatchcase(p.relative_to(root).as_posix(), inner)]
    else:
        files = weights_in(root / inner) if (root / inner).is_dir() else []
    if not files:
        raise SourceError(f"{text}: no such weights in the repository (or in the part of it that is in the cache)")
    return files


def _snapshot(text: str, repo: str, repo_type: str | None, revision: str | None, patterns: list[str]) -> Path:
    """The folder of the cache that holds what was fetched."""
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(repo, repo_type=repo_type, revision=revision, allow_patterns=patterns)
        )
    except Exception as error:  # no network, no such repository, no right to read it: the hub has a class for each
        words = ["hf", "download", repo, *(["--repo-type", repo_type] if repo_type else [])]
        words += ["--revision", revision] if revision else []
        words += [f"--include '{pattern}'" for pattern in patterns]
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
        raise SourceError(
            f"{text} could not be fetched, and is not in the cache ({type(error).__name__}: {said}). If the name is "
            f"right, run `{' '.join(words)} --local-dir FOLDER` where there is a network, copy FOLDER here, and name "
            "it instead"
        ) from error
