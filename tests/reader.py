"""Follows a page as its reader does: which warnings the code on it brings.

``python -m reader PAGE.py`` runs a tutorial and prints those warnings, one a line, on standard error.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1] / "tu_symmetry"
NOT_OF_EXAMPLES = (  # what Lightning says of the machine, and torchmetrics of every out-of-distribution score
    "does not have many workers",
    "available but not used",
    "will save all targets and predictions in buffer",
)


@contextmanager
def warned(page: Path) -> Iterator[list[str]]:
    """The warnings that a reader of the page is to be spared, each with where it comes from.

    That is all that is warned of while the page's code or this package is running, and every deprecation that they are
    told of. What other packages deprecate among themselves (while they are imported, or Lightning of torch) is theirs.
    """
    found: list[str] = []

    def notice(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
        ours, frame = str(filename) == str(page), sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
            file = frame.f_code.co_filename
            deprecation = issubclass(category, DeprecationWarning | FutureWarning | PendingDeprecationWarning)
            ours = ours or file.startswith(str(PACKAGE)) or (file == str(page) and not deprecation)
            frame = frame.f_back  # type: ignore[assignment]
        if ours and not any(words in str(message) for words in NOT_OF_EXAMPLES):
            found.append(f"{category.__name__} at {filename}:{lineno}: {message}")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = notice
        yield found


if __name__ == "__main__":
    page = Path(sys.argv[1])
    with warned(page) as unwelcome:
        exec(compile(page.read_text(encoding="utf-8"), str(page), "exec"), {"__name__": "__main__"})
    print(*unwelcome, sep="\n", file=sys.stderr)
