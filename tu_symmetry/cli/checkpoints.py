"""``tu-symmetry inspect``, ``align`` and ``merge``: an architecture by its dotted name, checkpoint files of it."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tu_symmetry.cli.ends import Handler, here, named, whole_number

if TYPE_CHECKING:
    from tu_symmetry.alignment.merging import Weights
    from tu_symmetry.checkpoints.architecture import Architecture
    from tu_symmetry.symmetry.graph import SymmetryGraph
    from tu_symmetry.symmetry.quantizers import Format


def _add_words(parser: argparse._ActionsContainer, name: str, **options: Any) -> None:
    """An option that takes one word or several, and may be repeated."""
    parser.add_argument(name, nargs="+", action="extend", default=[], **options)


def _add_architecture(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, metavar="NAME", help="dotted name that builds it: torchvision.models.resnet50"
    )
    parser.add_argument(
        "--input",
        dest="inputs",
        metavar="SHAPE",
        action="append",
        required=True,
        help="shape of an input, 1,3,224,224, or 1,16:long for integers; once for each positional argument of forward",
    )
    _add_words(parser, "--init", metavar="KEY=VALUE", help="arguments of what builds the model")
    _add_words(
        parser,
        "--narrow",
        metavar="KEY=VALUE",
        help="for networks that do not fit into memory: arguments beside --init of one of the same tensors that is "
        "narrow. Symmetries are verified on it, and the network itself is built without weights",
    )
    parser.add_argument("--dtype", default="float32", help="of the model and its inputs (default: float32)")


def _add_files(parser: argparse.ArgumentParser, **out: Any) -> None:
    """What `align` and `merge` both take."""
    parser.add_argument(
        "checkpoints",
        nargs="+",
        help="Lightning checkpoints, torch state dicts, safetensors files or indices of several, folders of "
        "torch.distributed.checkpoint, URLs of them (s3://, hf://) and globs",
    )
    _add_architecture(parser)
    parser.add_argument("--out", required=True, **out)
    parser.add_argument(
        "--reference",
        type=named("a file, or first, medoid, mean or universe"),
        default="first",
        metavar="FILE|first|medoid|mean|universe",
        help="what all are aligned to: a file; the first; the one closest to the others after matching; the mean of "
        "those before each; or, from there, all others, in sweeps until nothing moves (default: first)",
    )
    parser.add_argument(
        "--over",
        nargs="+",
        choices=("permutations", "signs", "scales", "rotations"),
        default=["permutations"],
        help="what moves networks: permutations, and of the others what is named too: signs of units; scales, by which "
        "each goes to its least squared norm first; rotations of units that matrices may mix (default: permutations)",
    )
    parser.add_argument("--prefix", default="", help="of the names in the files, for example model.")


def _architecture(arguments: argparse.Namespace) -> Architecture:
    from tu_symmetry.checkpoints.architecture import Architecture, parse_precision

    if "" not in sys.path:  # modules of the folder one works in are found, as `python -m` does
        sys.path.insert(0, "")
    return Architecture(
        arguments.model, arguments.inputs, arguments.init, parse_precision(arguments.dtype), arguments.narrow
    )


def inspect(parser: argparse.ArgumentParser) -> Handler:
    """``tu-symmetry inspect [A B] --model NAME --input SHAPE``."""
    parser.description = (
        "Builds a network (with random weights), finds its symmetries (permutations, scales, normalizations, "
        "signs, linear maps), verifies them numerically and prints them. Of two files it says whether they hold the "
        "same function by a symmetry, and by which; else how far they are from each other."
    )
    parser.epilog = "example: tu-symmetry inspect --model torchvision.models.resnet50 --input 1,3,224,224"
    parser.add_argument("checkpoints", nargs="*", metavar="FILE", help="two files of weights to compare, or none")
    _add_architecture(parser)
    parser.add_argument("--prefix", default="", help="of the names in the files, for example model.")
    parser.add_argument(
        "--format",
        choices=("text", "awq", "smoothquant", "spinquant"),
        default="text",
        help="text, or YAML: the mappings that modifiers of llm-compressor take, and what is left out (default: text)",
    )

    def run(arguments: argparse.Namespace) -> int | None:
        from rich.console import Console

        from tu_symmetry.checkpoints.architecture import step
        from tu_symmetry.checkpoints.compare import compare
        from tu_symmetry.checkpoints.files import find_checkpoints, open_checkpoint
        from tu_symmetry.files import FileError

        console = Console(stderr=True)
        files = find_checkpoints(arguments.checkpoints) if arguments.checkpoints else []
        if len(files) not in (0, 2):
            raise FileError(f"two files are compared, {len(files)} are named: {', '.join(f.name for f in files[:6])}")
        graph = _architecture(arguments).discover(console)
        with step(console, "verifying them in float64"):
            graph.require_verified()
        if files:
            pair = [dict(open_checkpoint(graph, file, arguments.prefix)) for file in files]
            with step(console, "comparing the two files"):
                found = compare(graph, *pair)
            print(f"{files[0]} and {files[1]}: {found}")
        else:
            print(graph if arguments.format == "text" else _mappings(graph, arguments.format))
        return 0

    return run


def _mappings(graph: SymmetryGraph, format: Format) -> str:
    """The mappings of a graph as YAML, and as comments what they leave out."""
    import yaml

    from tu_symmetry.symmetry.quantizers import left_out

    lines = [f"# left out: {layers}: {why}" for layers, why in left_out(graph, format).items()]
    return "\n".join([yaml.safe_dump(graph.export(format), sort_keys=False, width=120).rstrip(), *lines])


def align(parser: argparse.ArgumentParser) -> Handler:
    """``tu-symmetry align CHECKPOINTS... --model NAME --input SHAPE --out DIR``."""
    parser.description = (
        "Permutes the hidden units of networks so that they lie close to a reference, and moves them by the other "
        "symmetries that --over names, without changing their functions. Any number of files, of networks of any size: "
        "safetensors are read tensor by tensor. After an interruption the same command resumes."
    )
    parser.epilog = (
        "example: tu-symmetry align 'runs/*/last.ckpt' --prefix model. --model torchvision.models.resnet18 "
        "--input 1,3,32,32 --init num_classes=10 --reference universe --out aligned"
    )
    _add_files(parser, type=here("a folder"), metavar="DIR", help="folder of the aligned files and the report")

    def run(arguments: argparse.Namespace) -> int | None:
        from rich.console import Console

        from tu_symmetry.checkpoints.align import align_files
        from tu_symmetry.checkpoints.files import find_checkpoints
        from tu_symmetry.reporting.progress import Display

        display, architecture = Display(), _architecture(arguments)
        checkpoints = find_checkpoints(arguments.checkpoints)
        reference = _reference(arguments.reference)
        alignment = align_files(
            architecture.discover(Console(stderr=True)),
            checkpoints,
            Path(arguments.out),
            reference=reference,
            over=arguments.over,
            prefix=arguments.prefix,
            track=display.track,
        )
        alignment.grid(limit=50).print(display.console)
        before = f" ({alignment.skipped} done before)" if alignment.skipped else ""
        mean = " and their mean" if reference in ("mean", "universe") else ""
        print(f"{len(alignment.files)} aligned files{before}{mean} in {arguments.out}")
        return 0

    return run


def merge(parser: argparse.ArgumentParser) -> Handler:
    """``tu-symmetry merge CHECKPOINTS... --model NAME --input SHAPE --out FILE``."""
    parser.description = (
        "Merges networks into one: permutes their hidden units so that they lie in one basin, averages the weights, "
        "and corrects the statistics. With data it says what each step is worth. Safetensors are read tensor by "
        "tensor. After an interruption the same command goes further."
    )
    parser.epilog = (
        "example: tu-symmetry merge a.ckpt b.ckpt --prefix model. --model torchvision.models.resnet18 "
        "--input 1,3,32,32 --data my_data.Images --correction batchnorm --out merged.safetensors"
    )
    _add_files(parser, type=here("a file"), metavar="FILE.safetensors", help="the merged network")
    parser.add_argument(
        "--weights",
        nargs="+",
        default=["equal"],
        metavar="equal|W",
        help="share of each network: equal, or a number for each file (default: equal)",
    )
    group = parser.add_argument_group("data", "for re-estimated statistics, and for the scores of each step")
    group.add_argument(
        "--data",
        type=named("a LightningDataModule or a function that returns a loader"),
        metavar="NAME",
        help="dotted name of a LightningDataModule (losses on its test data, statistics on its training data), or of a "
        "function that returns a loader of batches (inputs, targets), or two loaders",
    )
    _add_words(group, "--data-init", metavar="KEY=VALUE", help="arguments of what --data names")
    group.add_argument(
        "--num-samples", type=whole_number(1), default=2000, help="of each loader, the first (default: 2000)"
    )
    group.add_argument(
        "--loss",
        default="torch.nn.functional.cross_entropy",
        metavar="NAME",
        help="dotted name of a function of outputs and targets, a mean over the batch (default: cross_entropy)",
    )
    group.add_argument(
        "--correction",
        choices=["none", "batchnorm", "repair"],
        default="none",
        help="statistics of the merged network: as averaged, BatchNorm re-estimated, or REPAIR (default: none)",
    )

    def run(arguments: argparse.Namespace) -> int | None:
        from rich.console import Console

        from tu_symmetry.checkpoints.data import load_data
        from tu_symmetry.checkpoints.files import find_checkpoints
        from tu_symmetry.checkpoints.merge import merge_files, merge_grid
        from tu_symmetry.reporting.progress import Display

        display, architecture = Display(), _architecture(arguments)
        checkpoints = find_checkpoints(arguments.checkpoints)
        weights, reference, data = _shares(arguments.weights), _reference(arguments.reference), None
        if arguments.data:
            data = load_data(arguments.data, arguments.data_init, arguments.num_samples, architecture.dtype)
        with warnings.catch_warnings(record=True) as said:
            merged = merge_files(
                architecture.discover(Console(stderr=True)),
                checkpoints,
                Path(arguments.out),
                architecture.build(),
                data=data,
                loss=arguments.loss,
                weights=weights,
                correction=arguments.correction,
                reference=reference,
                over=arguments.over,
                prefix=arguments.prefix,
                track=display.track,
            )
        merge_grid(merged, checkpoints, arguments.model).print(display.console)
        for warning in said:
            print(f"warning: {warning.message}", file=sys.stderr)
        used, count = sum(share > 0 for share in merged.weights), len(checkpoints)
        print(f"{count if used == count else f'{used} of {count}'} networks merged into {arguments.out}")
        return 0

    return run


def _reference(source: str) -> Any:
    """What ``--reference`` names: a word as it is, or a file."""
    from tu_symmetry.checkpoints.files import find_checkpoints
    from tu_symmetry.files import FileError

    if source in ("first", "medoid", "mean", "universe"):
        return source
    found = find_checkpoints([source])
    if len(found) > 1:
        raise FileError(f"--reference {source} stands for {len(found)} files, as {found[0].name}; name one of them")
    return found[0]


def _shares(weights: list[str]) -> Weights:
    """What ``--weights`` says."""
    from tu_symmetry.files import FileError

    if weights == ["equal"]:
        return "equal"
    try:
        return [float(text) for text in weights]
    except ValueError as error:
        raise FileError(f"--weights: {error}; give a number for each file, or equal") from None
