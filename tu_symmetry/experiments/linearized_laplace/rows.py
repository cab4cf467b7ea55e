"""What the tables of this paper share: small images, choices of precisions, scores of a predictive, cells."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torchmetrics.functional.classification import binary_auroc, multiclass_calibration_error

from tu_symmetry.datamodules import IDXDataModule
from tu_symmetry.datamodules.readers import LabeledImages
from tu_symmetry.evaluation import accuracy
from tu_symmetry.experiments.study import Images
from tu_symmetry.laplace.calibration import SHARPNESSES
from tu_symmetry.laplace.curvature import Curvature
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import measured

Where: TypeAlias = Literal["map", "tangent_mode", "full"]
Groups: TypeAlias = Literal["single", "per_group"]
Runs = Sequence[Mapping[str, Any]]

NETWORK = "network"  # the row of the network itself
SCALED = "scaled"  # that of the network whose logits are scaled by what is best on held-out images
CALIBRATED = "/calibrated"  # behind a choice: with what `calibrate` chose on the same held-out images
SAME = {NETWORK: "network itself", SCALED: "network, temperature scaled"}
TITLES: dict[Where, str] = {"map": "M(θ~)", "tangent_mode": "M(θ*)", "full": "M(θ*), full"}
CURVATURES: dict[str, str] = {"diag": ", diagonal", "last_layer": ", last layer"}  # beside KFAC
PRIORS: dict[str, str] = {"single": "single λ", "per_group": "several λ"}
COLORS = {"map": plots.ORANGE, "tangent_mode": plots.BLUE, "full": plots.GREEN}  # of where the evidence is evaluated
OPEN = "†"  # stands beside every number from an optimum that had not converged
MOVING = "‡"
OPEN_CAPTION = f"{OPEN}: the evidence of at least one network had not converged, so that the number is no result"


class SmallIDXDataModule(IDXDataModule):
    """An MNIST-like data set whose images are averaged over squares of ``pool`` pixels, and rounded to bytes again."""

    def __init__(self, pool: int = 2, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        if pool < 1 or 28 % pool:
            raise ValueError(f"pool must divide 28, got {pool}")
        self.pool = pool
        self.input_shape = (1, 28 // pool, 28 // pool)

    def read(self, part: str) -> LabeledImages:
        """Read a whole part."""
        found = super().read(part)  # type: ignore[arg-type]
        small = interpolate(found.x.float(), scale_factor=1 / self.pool, mode="area")
        return LabeledImages(small.round().to(torch.uint8), found.y)


class Choice(NamedTuple):
    """A row of a table, written ``WHERE/PRIOR``, and ``/flat`` (no hyperprior), ``/diag`` or ``/last_layer`` behind it.

    Attributes:
        where: ``map``: at the trained weights, M(θ~); ``tangent_mode``: at the joint stationary point, M(θ*), with the
            curvature at the network's own outputs; ``full``: the same with the curvature at the outputs of the tangent
            model at θ*.
        prior: one precision (``single``) or one for each normalized group and the rest (``per_group``).
        flat: without hyperprior.
        curvature: of :class:`~tu_symmetry.LinearizedLaplace`; ``last_layer`` leaves all other layers certain.
    """

    where: Where
    prior: Groups
    flat: bool = False
    curvature: Curvature = "kfac"

    @classmethod
    def parse(cls, text: str, known: Collection[str] = get_args(Where)) -> Choice:
        """Read a choice, WHERE being one of the known ones."""
        where, _, rest = text.partition("/")
        prior, _, last = rest.partition("/")
        if where not in known or prior not in PRIORS or last not in ("", "flat", *CURVATURES):
            raise ValueError(
                f"choice {text!r}: write {' or '.join(known)}, /, single or per_group, and /flat or one of "
                f"{', '.join(CURVATURES)} behind a slash if wanted"
            )
        found = cls(cast(Where, where), cast(Groups, prior), last == "flat")
        return found._replace(curvature=cast(Curvature, last)) if last in CURVATURES else found

    @property
    def key(self) -> str:
        """As it is written in a recipe."""
        last = self.curvature if self.curvature in CURVATURES else "flat" if self.flat else ""
        return "/".join(part for part in (self.where, self.prior, last) if part)

    @property
    def title(self) -> str:
        """As reports call it."""
        plain = f"{TITLES[self.where]}, {PRIORS[self.prior]}{', no hyperprior' if self.flat else ''}"
        return plain + CURVATURES.get(self.curvature, "")


def parse_all(texts: Sequence[str], known: Collection[str] = ("map", "tangent_mode")) -> list[Choice]:
    """Read the rows of a table, each of them once."""
    choices = [Choice.parse(text, known) for text in texts]
    if len(set(choices)) != len(choices) or not choices:
        raise ValueError(f"choices: name at least one, and each once, got {list(texts)}")
    return choices


def title_of(key: str) -> str:
    """What a report calls a row."""
    plain = key.removesuffix(CALIBRATED)
    title = Choice.parse(plain).title if "/" in plain else plain  # what is no choice is called by its own name
    return SAME.get(key) or title + (", calibrated" if plain != key else "")


def in_latex(text: str) -> str:
    """A title for the legend of a figure."""
    return text.replace("θ~", r"$\tilde\theta$").replace("θ*", r"$\theta_*$")


def cell(values: Sequence[float], digits: int = 3, sign: str = "") -> str:
    """Mean and standard error as a table shows them."""
    return measured(values, f"{sign}.{digits}f")


def marks(runs: Runs) -> str:
    """What stands beside a number: whether its optimizations had all converged."""
    open_end = OPEN if any(not run.get("converged", True) for run in runs) else ""
    return open_end + (MOVING if any(not run.get("settled", True) for run in runs) else "")


def images_line(networks: str, found: Mapping[str, Any]) -> str:
    """The line of a report that says what was measured on what."""
    return f"{networks}; images: " + ", ".join(f"{count:,} {name}" for name, count in found["sizes"].items()) + "."


def beside(value: float | None, error: float | None) -> str:
    """The paper's number below ours, where it is known."""
    return "" if value is None or error is None else f"\n{value:.3f} ± {error:.3f}"


def style_of(key: str) -> dict[str, Any]:
    """Color and line of a row in a figure."""
    where, _, rest = key.partition("/")
    return {"color": COLORS.get(where, plots.GRAY), "linestyle": ":" if rest.endswith("/flat") else "-"}


def scores(p: Tensor, y: Tensor, other: Tensor | None = None) -> dict[str, float]:
    """Quality of predictive probabilities ``[n, classes]``: ``nll`` (nats), ``accuracy``, ``ece`` (15 bins, L1).

    With ``other`` ones of out-of-distribution images ``auroc``, by the predictive entropy.
    """
    found = {
        "nll": float(-p.gather(-1, y.unsqueeze(-1)).clamp(min=1e-30).log().mean()),
        "accuracy": accuracy(p, y),
        "ece": float(multiclass_calibration_error(p, y, num_classes=p.shape[-1], n_bins=15, norm="l1")),
    }
    if other is not None:
        entropy = torch.special.entr(torch.cat([p, other])).sum(-1)
        target = torch.arange(len(entropy), device=p.device) >= len(p)
        found["auroc"] = float(binary_auroc(entropy / entropy.max(), target.long()))
    return found


@torch.no_grad()
def network_scores(model: nn.Module, images: Images, batch_size: int) -> dict[str, Any]:
    """Quality of a network itself, ``train_nll``, its loss on the training images (nats), and ``scaled``.

    That is the quality with logits times ``sharpness``, which is best on the validation images (temperature scaling).
    """

    def logits(x: Tensor) -> Tensor:
        return torch.cat([model(part) for part in x.split(batch_size)]).double()

    held_out, classes = images.held_out("the network is scaled on")
    sharpness = best_sharpness(logits(held_out), classes)
    train, test = logits(images.train.x), logits(images.test.x)
    other = None if images.other is None else logits(images.other)
    itself, scaled = (
        scores((s * test).softmax(-1), images.test.y, None if other is None else (s * other).softmax(-1))
        for s in (1.0, sharpness)
    )
    nll = float(cross_entropy(train, images.train.y))
    return {"train_nll": nll, "scaled": scaled | {"sharpness": sharpness}} | itself


def best_sharpness(logits: Tensor, classes: Tensor) -> float:
    """The factor of logits, of those that ``calibrate`` tries, with the lowest NLL."""
    return min(SHARPNESSES, key=lambda s: float(cross_entropy(s * logits, classes)))


def with_rivals(networks: Any, rows: Mapping[str, Any]) -> dict[str, Any]:
    """All rows of a table: networks, the same temperature scaled, and the choices, each calibrated too.

    What stands in a row is a sequence of runs, or such sequences by the name of the network.
    """

    def part(runs: Any, name: str) -> Any:
        if isinstance(runs, Mapping):
            return {own: part(found, name) for own, found in runs.items()}
        return [run[name] | {k: run[k] for k in ("converged", "settled") if k in run} for run in runs]

    found = {NETWORK: networks, SCALED: part(networks, "scaled")} | dict(rows)
    return found | {key + CALIBRATED: part(runs, "calibrated") for key, runs in rows.items()}
