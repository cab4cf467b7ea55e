"""What a compact posterior is worth on held-out data, beside its networks and what takes one line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from tu_symmetry.reporting.brief import Brief

TEMPERATURES = (0.0, *(10 ** (i / 2) for i in range(-8, 3)))  # 0, and 1e-4 to 10 in halves of a decade
_TOLD_APART = 2.0  # standard errors


@dataclass(frozen=True, repr=False)
class Assessment(Brief):
    """How good predictives are on held-out data: the mean class probabilities of networks or of draws.

    Attributes:
        scores: of ``ensemble`` (all networks), ``one member`` (the first), ``one member with noise`` (isotropic, of the
            posterior's rms), ``mean``, ``posterior`` and ``calibrated``: ``accuracy``, ``nll`` (nats), ``agreement``
            with the ensemble and total variation ``tv`` to it, and ``storage`` (in networks).
        temperature: the factor of the variances of least NLL on these data, that of ``calibrated``.
        gain: NLL of the member less that of ``calibrated`` (nats).
        standard_error: of the gain, over the samples.
    """

    scores: dict[str, dict[str, float]]
    temperature: float
    gain: float
    standard_error: float

    @property
    def verdict(self) -> str:
        """Whether the posterior pays, in a sentence."""
        values = {name: f"{one['nll']:.3f}" for name, one in self.scores.items()}
        measured = (
            f"NLL {values['calibrated']} at temperature {self.temperature:.2g} ({values['posterior']} at 1), "
            f"one member {values['one member']}, ensemble {values['ensemble']}: "
        )
        if abs(self.gain) <= _TOLD_APART * self.standard_error or not math.isfinite(self.standard_error):
            return f"{measured}these data do not tell the posterior from one member, which takes half of its storage"
        if self.gain < 0:
            return f"{measured}one member is better and takes half of the storage; take it, or the ensemble"
        return f"{measured}the posterior is better than one member"


def assess_predictives(
    predictives: Mapping[str, Tensor], heated: Mapping[float, Tensor], targets: Tensor, members: int
) -> Assessment:
    """Judge class probabilities ``[samples, classes]``, those of the posterior at each temperature in ``heated``.

    Raises:
        ValueError: an NLL that is NaN at every temperature.
    """
    losses = {t: nll(p, targets) for t, p in heated.items()}
    finite = {t: float(loss.mean()) for t, loss in losses.items() if not loss.isnan().any()}
    if not finite:
        raise ValueError("the NLL of the posterior is NaN at every temperature: look at the networks and at the data")
    best = min(finite, key=lambda t: finite[t])
    storage = {"ensemble": members, "one member": 1, "one member with noise": 1, "mean": 1}
    shown = {**predictives, "mean": heated[0.0], "posterior": heated[1.0], "calibrated": heated[best]}
    gains = nll(predictives["one member"], targets) - losses[best]
    return Assessment(
        {
            name: predictive_scores(p, predictives["ensemble"], targets) | {"storage": float(storage.get(name, 2))}
            for name, p in shown.items()
        },
        best,
        float(gains.mean()),
        float(gains.std() / len(gains) ** 0.5) if len(gains) > 1 else math.inf,
    )


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
