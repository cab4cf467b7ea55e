"""What a compact posterior is worth on held-out data, beside its networks and what takes one line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from tu_symmetry.reporting.brief import Brief

TEMPERATURES = (0.0, *(10 ** (i / 2) for i in range(-8, 3)))  # 0, and 1e-4 to 10 in halves of a decade


@dataclass(frozen=True, repr=False)
class Assessment(Brief):
    """How good mean class probabilities of networks or of draws are on held-out data.

    Attributes:
        scores: of ``ensemble`` (all networks), ``one member`` (the first), ``one member with noise`` (isotropic, of the
            posterior's rms), ``mean``, ``posterior`` and ``calibrated``: ``accuracy``, ``nll`` (nats), ``agreement``
            with the ensemble and total variation ``tv`` to it, and ``storage`` (in networks).
        temperature: the factor of the variances of least NLL on these data, that of ``calibrated``.
        gain: NLL of the member less that of ``calibrated`` (nats).
        standard_error: of the gain, over the samples; NaN for a single one.
    """

    scores: dict[str, dict[str, float]]
    temperature: float
    gain: float
    standard_error: float

    @property
    def verdict(self) -> str:
        """Whether the posterior pays, by two standard errors, in a sentence."""
        shown = ", ".join(f"{name} {self.scores[name]['nll']:.3f}" for name in ("posterior", "one member", "ensemble"))
        text = f"NLL {self.scores['calibrated']['nll']:.3f} at temperature {self.temperature:.2g} ({shown}): "
        if self.gain > 2 * self.standard_error:
            return f"{text}the posterior is better than one member"
        if self.gain < -2 * self.standard_error:
            return f"{text}one member is better and takes half of the storage; take it, or the ensemble"
        return f"{text}these data do not tell the posterior from one member, which takes half of its storage"


def assessed(rivals: Mapping[str, Tensor], heated: Mapping[float, Tensor], y: Tensor, count: int) -> Assessment:
    """Judge class probabilities ``[samples, classes]`` of ``count`` networks' rivals, and of each temperature.

    Raises:
        ValueError: an NLL that is NaN at every temperature.
    """
    losses = {t: nll(p, y) for t, p in heated.items()}
    finite = {t: float(loss.mean()) for t, loss in losses.items() if not loss.isnan().any()}
    if not finite:
        raise ValueError("the NLL of the posterior is NaN at every temperature: look at the networks and at the data")
    best = min(finite, key=lambda t: finite[t])
    shown = {**rivals, "mean": heated[0.0], "posterior": heated[1.0], "calibrated": heated[best]}
    scores = {name: predictive_scores(p, rivals["ensemble"], y) for name, p in shown.items()}
    for name, one in scores.items():
        one["storage"] = {"ensemble": count, "posterior": 2, "calibrated": 2}.get(name, 1)
    gains = nll(rivals["one member"], y) - losses[best]
    return Assessment(scores, best, float(gains.mean()), float((gains.var() / len(gains)).sqrt()))


def nll(probabilities: Tensor, targets: Tensor) -> Tensor:
    """The negative log-likelihood in nats of each sample ``[samples]``."""
    return -probabilities.gather(-1, targets[:, None]).squeeze(-1).log()


def predictive_scores(probabilities: Tensor, reference: Tensor, targets: Tensor) -> dict[str, float]:
    """Accuracy, mean NLL (nats), and agreement with and total variation to another predictive."""
    classes = probabilities.argmax(-1)
    return {
        "accuracy": float((classes == targets).double().mean()),
        "nll": float(nll(probabilities, targets).mean()),
        "agreement": float((classes == reference.argmax(-1)).double().mean()),
        "tv": float((probabilities - reference).abs().sum(-1).mean() / 2),
    }
