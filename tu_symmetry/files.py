"""Tensors in files that are whole or not there at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file whole or not at all; tied tensors are written under each of their names.

    The safetensors library has temporary files of its own, under random names, which a killed run leaves behind: they
    lie in a folder whose name tells what it is for. It also makes files that only their owner can read; here they get
    the rights that any new file has.
    """
    seen: set[int] = set()
    separate: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        pointer = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    scratch.mkdir()
    try:
        written = scratch / path.name
        save_file(separate, written, metadata=metadata)
        written.chmod(scratch.stat().st_mode & 0o666)
        os.replace(written, path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
