"""The ``tu-symmetry`` program: which subcommands there are, and how a run begins and ends.

A subcommand is a small function that adds its arguments to a parser and returns what runs it. Nothing heavy is imported
before a subcommand runs, so every ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, redirect_stderr, redirect_stdout

from tu_symmetry.cli.checkpoints import align, inspect, merge
from tu_symmetry.cli.ends import SHARED, Handler, Parser, Signals, ended
from tu_symmetry.cli.recipes import recipes, table

COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], Handler]]] = {
    "table": ("run a recipe folder: its commands in order, the table, the plots and the report", table),
    "recipes": ("list the recipes that come with the package", recipes),
    "inspect": ("print the symmetries of an architecture", inspect),
    "align": ("align checkpoint files of one architecture", align),
    "merge": ("merge checkpoint files of one architecture into one network", merge),
}
"""The subcommands whose arguments are parsed here: a line for ``tu-symmetry --help``, and what declares them."""

LIGHTNING = {
    "fit": "train or sample, as a YAML file says",
    "validate": "evaluate on the validation data, from the same YAML",
    "test": "evaluate on the test data, from the same YAML",
    "predict": "predict, from the same YAML",
    "run": "call a function that a YAML file names",
}
"""The subcommands whose arguments jsonargparse parses: those of LightningCLI, and ``run`` with the same conventions."""


def build_parser() -> tuple[argparse.ArgumentParser, dict[str, Handler]]:
    """The whole parser, and what runs each subcommand."""
    from tu_symmetry import __version__

    parser = Parser(
        prog="tu-symmetry",
        allow_abbrev=False,
        description="Find, verify and remove the weight-space symmetries of neural networks, and rerun the tables of "
        "the papers about them.",
        epilog="`tu-symmetry COMMAND --help` explains a command.",
    )
    parser.add_argument("--version", action="version", version=f"tu-symmetry {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    handlers = {}
    for name, (summary, build) in COMMANDS.items():
        handlers[name] = build(subparsers.add_parser(name, help=summary, allow_abbrev=False))
    for name, summary in LIGHTNING.items():  # for the list of commands; `main` hands their arguments on unread
        subparsers.add_parser(name, help=summary, add_help=False)
    return parser, handlers


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    for stream in (sys.stdout, sys.stderr):  # names of files need not be text in any encoding
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with Signals() as signals:
        try:
            code = _run(arguments)
            sys.stdout.flush()
            return code
        except BrokenPipeError:  # whoever reads has seen enough (`| head`); Python would complain when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except BaseException as error:
            return ended(error, signals, arguments)


def _run(arguments: list[str]) -> int:
    command = next(iter(arguments), "")
    if command in LIGHTNING:
        from tu_symmetry.tables.library import with_configurations

        arguments = with_configurations(arguments)
    if command == "run":
        from rich.console import Console

        from tu_symmetry.tables.functions import run_function

        outcome = run_function(arguments[1:])
        for grid in outcome.tables:
            grid.print(Console())
        print(outcome.headline)
        return 0
    if command in LIGHTNING:
        from tu_symmetry.tables.lightning import run_lightning

        run_lightning(arguments)
        return 0
    parser, handlers = build_parser()
    parsed = parser.parse_args(arguments)
    if parsed.command not in SHARED or "WORLD_SIZE" not in os.environ:
        return handlers[parsed.command](parsed) or 0
    from tu_symmetry.processes import together

    alone = parsed.command == "table"  # whose processes share commands, not the work of each
    with nullcontext() if alone else together(), ExitStack() as quiet:
        if os.environ.get("RANK", "0") != "0":  # the first process speaks
            nowhere = quiet.enter_context(open(os.devnull, "w"))
            quiet.enter_context(redirect_stdout(nowhere))
            if not alone:
                quiet.enter_context(redirect_stderr(nowhere))
        return handlers[parsed.command](parsed) or 0
