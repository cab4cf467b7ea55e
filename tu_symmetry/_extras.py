"""Packages of others: those that only an extra brings, and those that warn when they load."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache


class MissingExtraError(ImportError):
    """A package is not installed that one of the extras brings; the message names the extra."""


@contextmanager
def from_extra(extra: str, *, purpose: str) -> Iterator[None]:
    """Stands around the import of a package that an extra brings; ``purpose`` is the subject of the error."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise MissingExtraError(
            f"{purpose} cannot be had without the package {package!r}, which comes with the extra {extra!r}: "
            f"pip install 'tu-symmetry[{extra}]'",
            name=package,
        ) from error


@contextmanager
def scripting_unsaid() -> Iterator[None]:
    """Leave out the warning of torch that ``torch.jit.script``, which another package calls, is deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated")
        yield


@cache
def load_forward_mode() -> None:
    """Load torch's decompositions for forward-mode derivatives now: torch does it on first use, and then it warns."""
    with scripting_unsaid(), suppress(ImportError):
        importlib.import_module("torch._decomp.decompositions_for_jvp")
