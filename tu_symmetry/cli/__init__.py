"""Room: the command line. ``tu-symmetry`` and ``python -m tu_symmetry.cli`` run :func:`main`."""

from tu_symmetry.cli.main import COMMANDS, LIGHTNING, main

__all__ = ["COMMANDS", "LIGHTNING", "main"]
