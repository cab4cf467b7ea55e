"""``tu-symmetry run``: functions that are no training runs, with the conventions of LightningCLI.

A configuration names a function that returns an :class:`~tu_symmetry.tables.outcome.Outcome` and its arguments::

    seed_everything: 0
    command:
      class_path: tu_symmetry.experiments.compact_posterior.interpolate
      init_args: {ensemble: $root/ensemble, hmc: $root/hmc, out: $root/$name, ...}

Several ``--config`` files, dotted flags (``--command.pairs 2``), ``--print_config`` and ``--command.help NAME`` work as
they do for ``fit``. A class or function that does not return an Outcome is refused before it is called.
"""

from __future__ import annotations

from collections.abc import Sequence

from jsonargparse import ArgumentParser

from tu_symmetry.configs import resolve
from tu_symmetry.tables.folders import add_folders, with_folders
from tu_symmetry.tables.mistakes import OneLineParser
from tu_symmetry.tables.outcome import Outcome


def build_parser() -> ArgumentParser:
    """The parser of ``tu-symmetry run``."""
    parser = OneLineParser(
        prog="tu-symmetry run",
        description="Calls a function that a YAML file names, prints what it found and writes it to results.json.",
    )
    parser.add_argument("-c", "--config", action="config", help="YAML file; may be repeated, the later overrides")
    parser.add_argument("--seed_everything", type=int, default=0, help="seed of all random numbers (default: 0)")
    add_folders(parser)
    parser.add_subclass_arguments(Outcome, "command", required=True)
    return parser


def run_function(arguments: Sequence[str]) -> Outcome:
    """Parse, seed, call, and write the results to the function's ``out`` folder if it has one.

    Raises:
        SystemExit: for ``--help``, ``--print_config`` and arguments that do not fit.
    """
    from lightning.pytorch import seed_everything

    config = with_folders(build_parser().parse_args(list(arguments)))
    seed_everything(config.seed_everything, verbose=False)
    # the classes among the arguments are instantiated apart from the call, whose errors are then its own
    function = resolve(config.command.class_path)
    caller = ArgumentParser()
    caller.add_function_arguments(function, "arguments")
    given = caller.instantiate(caller.parse_object({"arguments": config.command.init_args})).arguments
    outcome: Outcome = function(**given)
    folder = config.command.init_args.get("out")
    if folder is not None:
        outcome.save(str(folder))
    return outcome
