"""``tu-symmetry inspect``, ``align`` and ``merge``: an architecture by its dotted name, checkpoint files of it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tu_symmetry.cli.ends import Handler, fail, named, whole_number

if TYPE_CHECKING:
    from tu_symmetry.alignment.merging import Weights
    from tu_symmetry.checkpoints.architecture import Architecture

_SOURCES = (
    "Lightning checkpoints, torch state dicts or safetensors files, globs of them, folders of checkpoints or of "
    "save_pretrained, hf://OWNER/NAME/FILE, or hf://datasets/OWNER/NAME/FILE"
)


def _add_words(parser: argparse._ActionsContainer, name: str, **options: Any) -> None:
    """An option that takes one word or several, and may be repeated."""
    parser.add_argument(name, nargs="+", action="extend", default=[], **options)


def _add_number(parser: argparse._ActionsContainer, name: str, least: int, default: int, text: str) -> None:
    parser.add_argument(name, type=whole_number(least), default=default, help=f"{text} (default: {default})")


def _add_architecture(parser: argparse.ArgumentParser, *, from_files: bool = False) -> None:
    itself = "; left out, it is built from the config.json beside the first file" if from_files else ""
    parser.add_argument(
        "--model",
        required=not from_files,
        metavar="NAME",
        help=f"dotted name that builds it: torchvision.models.resnet50{itself}",
    )
    parser.add_argument(
        "--input",
        dest="inputs",
        metavar="SHAPE",
        action="append",
        required=not from_files,
        help="shape of an input, 1,3,224,224, or 1,16:long for integers; once for each positional argument of forward",
    )
    _add_words(parser, "--init", metavar="KEY=VALUE", help="arguments of what builds the model")
    _add_words(
        parser, "--kwargs", metavar="KEY=VALUE", help="keyword arguments of forward; a value like 1,16:bool is a tensor"
    )
    parser.add_argument("--dtype", default="float32", help="of the model and its inputs (default: float32)")


def _add_files(parser: argparse.ArgumentParser, *, out: str, metavar: str, merging: bool) -> argparse._ArgumentGroup:
    """What `align` and `merge` both take; the group of options about data."""
    words = ["first", "medoid", "mean", "universe"] + ["none"] * merging
    none = "; none leaves them as they are" if merging else ""
    parser.add_argument("checkpoints", nargs="+", help=_SOURCES)
    _add_architecture(parser, from_files=merging)
    place = named("a file" if merging else "a folder")
    parser.add_argument("--out", type=place, required=True, metavar=metavar, help=out)
    parser.add_argument(
        "--reference",
        type=named(f"a file, or {', '.join(words[:-1])} or {words[-1]}"),
        default="first",
        metavar="|".join(["FILE", *words]),
        help="what all are aligned to: a file; the first; the one closest to the others after matching; the mean of "
        f"those before each; or, from there, all others, in sweeps until nothing moves{none} (default: first)",
    )
    parser.add_argument("--prefix", default="", help="of the names in the files, for example model.")
    parser.add_argument(
        "--solver", choices=["frank_wolfe", "descent"], default="frank_wolfe", help="of matching (default: frank_wolfe)"
    )
    measured = "the scores of each step" if merging else "loss barriers and the mean network, before and after"
    group = parser.add_argument_group("data", f"for re-estimated statistics, and for {measured}")
    group.add_argument(
        "--data",
        type=named("a LightningDataModule or a function that returns a loader"),
        metavar="NAME",
        help="dotted name of a LightningDataModule (losses on its test data, statistics on its training data), or of a "
        "function that returns a loader of batches (inputs, targets), or two loaders",
    )
    _add_words(group, "--data-init", metavar="KEY=VALUE", help="arguments of what --data names")
    _add_number(group, "--num-samples", 1, 2000, "of each loader, the first")
    group.add_argument(
        "--loss",
        default="torch.nn.functional.cross_entropy",
        metavar="NAME",
        help="dotted name of a function of outputs and targets, a mean over the batch (default: cross_entropy)",
    )
    return group


def _architecture(arguments: argparse.Namespace) -> Architecture:
    from tu_symmetry.checkpoints.architecture import Architecture, parse_precision

    if "" not in sys.path:  # modules of the folder one works in are found, as `python -m` does
        sys.path.insert(0, "")
    dtype = parse_precision(arguments.dtype)
    return Architecture(arguments.model, arguments.inputs or (), arguments.init, arguments.kwargs, dtype)


def inspect(parser: argparse.ArgumentParser) -> Handler:
    """``tu-symmetry inspect --model NAME --input SHAPE``."""
    parser.description = (
        "Builds a network (with random weights), finds its permutation, scale and normalization symmetries, verifies "
        "them numerically and prints them."
    )
    parser.epilog = "example: tu-symmetry inspect --model torchvision.models.resnet50 --input 1,3,224,224"
    _add_architecture(parser)
    parser.add_argument(
        "--html", type=named("a file"), metavar="FILE", help="also draw the network with its groups colored"
    )
    parser.add_argument("--no-verify", dest="verify", action="store_false", help="leave out the numerical check")

    def run(arguments: argparse.Namespace) -> int | None:
        from rich.console import Console

        from tu_symmetry.symmetry.drawing import is_drawing

        html = Path(arguments.html) if arguments.html else None
        if html and html.is_dir():
            return fail(f"--html takes the name of a file to write, and {html} is a folder")
        if html and html.is_file() and not is_drawing(html.read_bytes()):
            return fail(f"{html} was not written by this command; move it away, or choose another --html")
        graph = _architecture(arguments).discover(Console(stderr=True), verify=arguments.verify)
        print(graph)
        if html:
            graph.to_html(html)
        return 0

    return run


def align(parser: argparse.ArgumentParser) -> Handler:
    """``tu-symmetry align CHECKPOINTS... --model NAME --input SHAPE --out DIR``."""
    parser.description = (
        "Permutes the hidden units of networks so that they lie close to a reference, without changing their "
        "functions. Any number of files: a few networks are in memory. After an interruption the same command resumes."
    )
    parser.epilog = (
        "example: tu-symmetry align 'runs/*/last.ckpt' --prefix model. --model torchvision.models.resnet18 "
        "--input 1,3,32,32 --init num_classes=10 --reference universe --out aligned"
    )
    group = _add_files(parser, out="folder of the aligned files and the report", metavar="DIR", merging=False)
    at_once = "networks that are matched at the same time; mean and universe go one by one"
    _add_number(parser, "--threads", 1, 1, at_once)
    group.add_argument(
        "--barriers",
        type=_all_or_number,
        default=10,
        metavar="all|N",
        help="all pairs, or N pairs at random (default: 10)",
    )
    _add_number(group, "--points", 3, 11, "on the path between two networks")
    group.add_argument(
        "--correction",
        nargs="+",
        default=[],
        choices=["none", "batchnorm", "repair"],
        help="interpolated networks as they are, with BatchNorm statistics re-estimated, and after REPAIR (default: "
        "none, and batchnorm for a network that has BatchNorm)",
    )

    def run(arguments: argparse.Namespace) -> int | None:
        from rich.console import Console

        from tu_symmetry.checkpoints.align import align_files
        from tu_symmetry.checkpoints.barriers import barrier_grid, check_loss, load_data, measure_barriers
        from tu_symmetry.checkpoints.files import find_checkpoints
        from tu_symmetry.reporting.progress import Display

        display, out = Display(), Path(arguments.out)
        architecture = _architecture(arguments)
        checkpoints = find_checkpoints(arguments.checkpoints)
        reference = _reference(arguments.reference)
        graph = architecture.discover(Console(stderr=True))
        if arguments.data:
            module = architecture.build()
            data = load_data(arguments.data, arguments.data_init, arguments.num_samples, architecture.dtype)
            check_loss(module, data, arguments.loss, arguments.correction)
        alignment = align_files(
            graph,
            checkpoints,
            out,
            reference=reference,
            prefix=arguments.prefix,
            solver=arguments.solver,
            threads=arguments.threads,
            track=display.track,
        )
        alignment.grid(limit=50).print(display.console)
        if arguments.data:
            report = measure_barriers(
                module,
                alignment,
                out,
                data,
                loss=arguments.loss,
                pairs=None if arguments.barriers == "all" else arguments.barriers,
                points=arguments.points,
                corrections=arguments.correction,
                track=display.track,
            )
            barrier_grid(report, len(alignment.files)).print(display.console)
        before = f" ({alignment.skipped} done before)" if alignment.skipped else ""
        mean = " and their mean" if reference in ("mean", "universe") else ""
        print(f"{len(alignment.files)} aligned files{before}{mean} in {out}")
        return 0

    return run


def merge(parser: argparse.ArgumentParser) -> Handler:
    """``tu-symmetry merge CHECKPOINTS... --model NAME --input SHAPE --out FILE``."""
    parser.description = (
        "Merges networks into one: permutes their hidden units so that they lie in one basin, averages the weights, "
        "and corrects the statistics. With data it says what each step is worth. Two networks are in memory at a time. "
        "After an interruption the same command goes further. Folders of diffusers say themselves what network they "
        "hold, and take no --model."
    )
    parser.epilog = (
        "example: tu-symmetry merge a.ckpt b.ckpt --prefix model. --model torchvision.models.resnet18 "
        "--input 1,3,32,32 --data my_data.Images --correction batchnorm --alpha 0.3 --out merged.safetensors"
    )
    group = _add_files(parser, out="the merged network", metavar="FILE.safetensors", merging=True)
    shares = parser.add_mutually_exclusive_group()
    shares.add_argument(
        "--weights",
        nargs="+",
        default=["equal"],
        metavar="equal|W",
        help="share of each network: equal, or a number for each file (default: equal)",
    )
    shares.add_argument("--alpha", metavar="A", help="of two networks, the share of the second, from 0 to 1")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="align partially: permute only the units all of whose tensors match one of these patterns",
    )
    group.add_argument(
        "--correction",
        choices=["none", "batchnorm", "repair"],
        default="none",
        help="statistics of the merged network: as averaged, BatchNorm re-estimated, or REPAIR (default: none)",
    )
    lines = "also measure the loss at this many points of the lines from the first network to the others"
    _add_number(group, "--points", 0, 0, lines)

    def run(arguments: argparse.Namespace) -> int | None:
        from rich.console import Console

        from tu_symmetry.checkpoints.architecture import weightless
        from tu_symmetry.checkpoints.barriers import load_data
        from tu_symmetry.checkpoints.files import find_checkpoints
        from tu_symmetry.checkpoints.merge import merge_files, merge_grid
        from tu_symmetry.checkpoints.pretrained import Pretrained
        from tu_symmetry.reporting.progress import Display

        display = Display()
        architecture: Architecture | Pretrained = _architecture(arguments)
        dtype = architecture.dtype
        if arguments.model and not arguments.inputs:
            return fail("--model needs --input, a shape for each positional argument of forward")
        checkpoints = find_checkpoints(arguments.checkpoints)
        weights = _shares(arguments.weights, arguments.alpha, len(checkpoints))
        reference = None if arguments.reference == "none" else _reference(arguments.reference)
        data = None
        if arguments.data:
            data = load_data(arguments.data, arguments.data_init, arguments.num_samples, dtype)
        if arguments.model is None:
            architecture = Pretrained.beside(checkpoints[0], dtype=dtype)
        graph = architecture.discover(Console(stderr=True), verify=False)
        merged = merge_files(
            graph,
            checkpoints,
            Path(arguments.out),
            weightless(architecture.build()),
            data=data,
            loss=arguments.loss,
            weights=weights,
            correction=arguments.correction,
            reference=reference,
            solver=arguments.solver,
            only=arguments.only,
            points=arguments.points,
            prefix=arguments.prefix,
            track=display.track,
        )
        merge_grid(merged, checkpoints).print(display.console)
        print(f"{len(checkpoints)} networks merged into {arguments.out}")
        return 0

    return run


def _all_or_number(value: str) -> int | str:
    return value if value == "all" else whole_number(1)(value)


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


def _shares(weights: list[str], alpha: str | None, count: int) -> Weights:
    """What ``--weights`` and ``--alpha`` say."""
    from tu_symmetry.files import FileError

    def number(text: str, option: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise FileError(f"{option} {text!r} is no number") from None

    if alpha is None:
        return "equal" if weights == ["equal"] else [number(text, "--weights") for text in weights]
    if count != 2:
        raise FileError(f"--alpha is the share of the second of two networks, and there are {count}: use --weights")
    share = number(alpha, "--alpha")
    if not 0 <= share <= 1:
        raise FileError(f"--alpha {alpha}: a share is between 0 and 1")
    return [1 - share, share]
