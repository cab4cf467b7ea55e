"""How a run ends that does not end well: one line on standard error, and an exit status that says what it was.

2: something that was typed, a file or a folder cannot be used; 3: ``table --max-time`` is over; 130, 143: interrupted,
terminated; 1: an error that nobody foresaw (``TU_SYMMETRY_TRACEBACK=1`` shows where).
"""

from __future__ import annotations

import argparse
import errno
import linecache
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn

Handler = Callable[[argparse.Namespace], int | None]
"""Runs a subcommand with its parsed arguments; returns the exit status, None for 0."""

TRACEBACK = "TU_SYMMETRY_TRACEBACK"
RESUMES = ("table", "align", "merge")  # whose command resumes what was cut off
SHARED = ("table", "inspect", "align", "merge")  # whose work the processes share that ``torchrun`` starts
TRAINS = ("fit", "validate", "test", "predict")  # run a user's own code, whose errors are shown whole


class Terminated(KeyboardInterrupt):
    """SIGTERM; what tidies up after Ctrl-C tidies up after it too."""


class Parser(argparse.ArgumentParser):
    """Says in one line what cannot be used, without the usage of all options."""

    def error(self, message: str) -> NoReturn:
        """End with status 2."""
        if os.environ.get("RANK", "0") != "0":  # the first of several processes says it
            self.exit(2)
        self.exit(2, f"{self.prog}: {message} (`{self.prog} --help` lists what there is)\n")


def named(what: str) -> Callable[[str], str]:
    """A type of argument that may not be empty."""

    def text(value: str) -> str:
        if not value.strip():
            raise argparse.ArgumentTypeError(f"it is empty; name {what}")
        return value

    return text


def here(what: str) -> Callable[[str], str]:
    """A type of argument that is a place on this machine."""

    def text(value: str) -> str:
        if "://" in value:
            raise argparse.ArgumentTypeError(f"results are written to this machine alone; name {what} on it")
        return named(what)(value)

    return text


def duration(text: str) -> timedelta:
    """A type of argument: days, hours, minutes and seconds, ``00:00:10:00``, as Lightning's ``max_time``."""
    try:
        days, hours, minutes, seconds = (int(part) for part in text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not DD:HH:MM:SS, for example 00:00:10:00") from None
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)


def whole_number(least: int) -> Callable[[str], int]:
    """A type of argument: an integer that is not below ``least``."""

    def number(value: str) -> int:
        try:
            found = int(value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{value!r} is no integer") from None
        if found < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {found}")
        return found

    return number


class Signals:
    """Turns SIGINT and SIGTERM into exceptions, and remembers them, since an import can make another error of them.

    Where nothing can be raised (a destructor) Python would print the exception and go on: then the signal is sent once
    more. So it is half a second after one that came during imports, whose fallbacks may swallow it.
    """

    def __init__(self) -> None:
        self.caught: int | None = None
        self._again: threading.Timer | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._raise)
        self._hook = sys.unraisablehook
        sys.unraisablehook = self._unraisable
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        sys.unraisablehook = self._hook
        if self._again is not None:
            self._again.cancel()

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self.caught = number
        if any(one.f_code.co_filename.startswith("<frozen importlib") for one, _ in traceback.walk_stack(frame)):
            self._send_again(0.5)
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    def _unraisable(self, arguments: Any) -> None:
        if self.caught is not None and isinstance(arguments.exc_value, KeyboardInterrupt):
            self._send_again(0.05)
        else:
            self._hook(arguments)

    def _send_again(self, seconds: float) -> None:
        self._again = threading.Timer(seconds, os.kill, (os.getpid(), self.caught))
        self._again.daemon = True
        self._again.start()


def fail(message: str, code: int = 2) -> int:
    """Print one line; the exit status."""
    print(f"tu-symmetry: {message}", file=sys.stderr)
    return code


def ended(error: BaseException, signals: Signals, arguments: Sequence[str]) -> int:
    """Say in one line why a run ended; the exit status. What has to be seen whole is raised again."""
    command = next(iter(arguments), "")
    again = "; the same command resumes" if command in RESUMES else ""
    notes, other = getattr(error, "__notes__", ()), command in SHARED and os.environ.get("RANK", "0") != "0"
    if type(error).__name__ == "ElsewhereError":  # the process where it went wrong says it
        return 2
    if signals.caught is not None or isinstance(error, KeyboardInterrupt):
        word, code = ("terminated", 143) if signals.caught == signal.SIGTERM else ("interrupted", 130)
        return code if other else fail(word + again, code)
    if isinstance(error, SystemExit) or not isinstance(error, Exception) or os.environ.get(TRACEBACK):
        raise error
    if other and not notes:  # all have it, and the first says it
        return 2
    if type(error).__module__.startswith("tu_symmetry.") or _raised_here(error):
        return fail(" ".join([*str(error).split(), *(f"({note})" for note in notes)]))
    if isinstance(error, UnicodeDecodeError):
        return fail(f"a file that was read is no text in UTF-8 (byte {error.start}); save it as UTF-8")
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename2 or error.filename})" if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            room = f"there is no more room to write in: {error.strerror}{where}"
            return fail(f"{room}. Make some, or write elsewhere{again}")
        return fail(f"{error.strerror}{where}")
    kind = type(error).__name__
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), kind)
    if isinstance(error, MemoryError) or kind == "OutOfMemoryError" or "t allocate memory" in str(error):
        return fail(f"not enough memory ({said}); use a smaller network, batch or number of samples")
    if kind == "MisconfigurationException":  # Lightning's word for arguments that do not fit together
        return fail(said)
    if command in TRAINS:
        raise error
    said = " ".join([said, *(f"({note})" for note in notes)])
    return fail(f"{kind}: {said} (not foreseen; {TRACEBACK}=1 shows where)", 1)


def _raised_here(error: BaseException) -> bool:
    """Whether a ``raise`` of this package has made it: then it says what was wrong, and where is no matter."""
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames or not frames[-1][0].f_globals.get("__name__", "").startswith("tu_symmetry."):
        return False
    frame, line = frames[-1]
    return linecache.getline(frame.f_code.co_filename, line).lstrip().startswith("raise ")
