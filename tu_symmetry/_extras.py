"""Packages that only an extra of the installation brings: imported where they are used, missed in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class MissingExtraError(ImportError):
    """A package is not installed that one of the extras brings; the message names the extra."""


@contextmanager
def from_extra(extra: str, *, purpose: str) -> Iterator[None]:
    """Stands around the import of a package that the extra brings.

    ::

        with from_extra("sampling", purpose="HMC chains"):
            from pyro.infer.mcmc import HMC

    Args:
        extra: name of the extra in ``pyproject.toml``.
        purpose: what the package is needed for, the subject of the sentence.

    Raises:
        MissingExtraError: the package, or one that it imports, is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise MissingExtraError(
            f"{purpose} cannot be had without the package {package!r}, which comes with the extra {extra!r}: "
            f"pip install 'tu-symmetry[{extra}]'",
            name=package,
        ) from error
