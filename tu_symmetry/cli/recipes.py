"""``tu-symmetry table`` and ``recipes``: run a recipe's commands, list the recipes."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from tu_symmetry.cli.ends import Handler, duration, fail, named


def table(parser: argparse.ArgumentParser) -> Handler:
    """``tu-symmetry table FOLDER``."""
    parser.description = (
        "Runs the commands of a recipe in order, skips what is done, resumes what was interrupted, and "
        "prints the table with the paper's values beside ours. The run folder takes report, plots and results.json."
    )
    parser.epilog = (
        "example: tu-symmetry table compact_posterior/digits --set hmc.routine.leapfrog_steps=50 --out runs/quick"
    )
    parser.add_argument(
        "folder",
        type=named("a recipe folder"),
        help="recipe folder, or the name of a recipe that comes with the package (`tu-symmetry recipes`)",
    )
    parser.add_argument(
        "--data-root", type=named("a folder"), metavar="DIR", help="folder of data sets (default: data)"
    )
    parser.add_argument("--out", type=named("a folder"), metavar="DIR", help="run folder (default: runs/<recipe>)")
    parser.add_argument(
        "--max-time", type=duration, metavar="DD:HH:MM:SS", help="stop after this long; the same command resumes"
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="change a value, may be repeated: <command>.<flag>=..., for example ensemble.trainer.max_epochs=5",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="run each command at full size for a few steps, on noise where data are missing; says what all will take",
    )
    parser.add_argument("--print-commands", action="store_true", help="print what one would type, and run nothing")

    def run(arguments: argparse.Namespace) -> int | None:
        from tu_symmetry.reporting.progress import Display
        from tu_symmetry.tables.commands import TableInterrupted, load_table, parse_overrides, run_commands, typed
        from tu_symmetry.tables.library import find_recipe

        display = Display()
        folder = find_recipe(arguments.folder)
        if arguments.print_commands:
            recipe = load_table(folder)
            flags = parse_overrides(recipe, arguments.overrides)
            for command in recipe.commands:
                words = typed(folder, command, Path(arguments.out or recipe.root), arguments.data_root)
                print(shlex.join(["tu-symmetry", *words, *flags[command.name]]))
            return 0
        if arguments.rehearse:
            if "RANK" in os.environ:
                return fail("a rehearsal times one process: start it without torchrun")
            from tu_symmetry.tables.rehearsal import rehearse

            options = {"out": arguments.out, "data_root": arguments.data_root, "overrides": arguments.overrides}
            found = rehearse(folder, **options, display=display)
            return int(any(forecast.error for forecast in found))
        try:
            results = run_commands(
                folder,
                out=arguments.out,
                data_root=arguments.data_root,
                overrides=arguments.overrides,
                max_time=arguments.max_time,
                display=display,
            )
        except TableInterrupted as error:
            return 3 if os.environ.get("RANK", "0") != "0" else fail(str(error), 3)
        display.tables(results)
        return 0

    return run


def recipes(parser: argparse.ArgumentParser) -> Handler:
    """``tu-symmetry recipes``."""
    parser.description = (
        "Lists the recipes that `tu-symmetry table NAME` runs, the configurations that `tu-symmetry fit --config NAME` "
        "runs by themselves, and where their files are."
    )

    def run(arguments: argparse.Namespace) -> int | None:
        from tu_symmetry.tables.commands import load_table
        from tu_symmetry.tables.library import configurations, library

        for name, folder in library().items():
            print(f"{name:46} {load_table(folder).title}\n{'':46} {folder}")
        for name, file in configurations().items():
            print(f"{name:46} for `tu-symmetry fit --config {name}`\n{'':46} {file}")
        return 0

    return run
