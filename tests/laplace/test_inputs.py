"""Batches and outputs of other libraries' models, and which parameters are uncertain."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from laplace_oracles import dense_curvature, randomize
from torch import Tensor, nn

from tu_symmetry.laplace.linearized import LinearizedLaplace

SAMPLES, TOKENS, WORDS, CLASSES = 6, 4, 7, 3


@dataclass
class ModelOutput:
    """As Hugging Face's libraries have it."""

    loss: Tensor | None = None
    logits: Tensor | None = None


class LoraLinear(nn.Module):
    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(features, outputs)
        self.lora_A, self.lora_B = nn.Linear(features, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x))


class Tagger(nn.Module):
    """Keyword arguments, a padding mask, an output with logits for every token, as ``AutoModelForTokenClassification``.

    The head is defined first and called last.
    """

    def __init__(self, output: str = "object", pooled: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(5, CLASSES)
        self.table, self.query, self.mix = nn.Embedding(WORDS, 4), LoraLinear(4, 5), nn.Linear(5, 5)
        self.output, self.pooled = output, pooled

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> ModelOutput | dict[str, Tensor] | Tensor:
        assert labels is None
        h = torch.tanh(self.query(self.table(input_ids)))
        mask = torch.ones_like(h[..., :1]) if attention_mask is None else attention_mask.unsqueeze(-1).to(h)
        h = torch.tanh(self.mix(h + (h * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)))
        logits = self.head((h * mask).sum(1) if self.pooled else h)
        if self.output == "object":
            return ModelOutput(logits=logits)
        return {"logits": logits} if self.output == "mapping" else logits


def batch(pooled: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(SAMPLES, TOKENS, dtype=torch.long)
    mask[::2, -1] = 0
    labels = torch.randint(0, CLASSES, (SAMPLES,) if pooled else (SAMPLES, TOKENS), generator=generator)
    return {
        "input_ids": torch.randint(0, WORDS, (SAMPLES, TOKENS), generator=generator),
        "attention_mask": mask,
        "labels": labels if pooled else torch.where(mask > 0, labels, -100),
    }


def halves(whole: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{k: v[rows] for k, v in whole.items()} for rows in (slice(0, 4), slice(4, None))]


@pytest.mark.parametrize(
    ("curvature", "output", "pooled"),
    [
        ("kfac", "object", False),
        ("full", "mapping", True),
        ("last_layer", "object", True),
        ("diag", "mapping", False),
    ],
)
def test_a_mapping_is_a_call_with_keywords(curvature: Any, output: str, pooled: bool) -> None:
    """Everything is as with positional arguments and a plain tensor."""
    whole, options = batch(pooled), {"curvature": curvature, "prior": "per_layer"}
    model, plain = randomize(Tagger(output, pooled)), randomize(Tagger("plain", pooled))
    la = LinearizedLaplace(model, **options).fit(halves(whole))
    inputs = (whole["input_ids"], whole["attention_mask"])
    pairs = [((inputs[0][rows], inputs[1][rows]), whole["labels"][rows]) for rows in (slice(0, 4), slice(4, None))]
    expected = LinearizedLaplace(plain, **options).fit(pairs)
    torch.testing.assert_close(dense_curvature(la), dense_curvature(expected))
    for one in (la, expected):
        one.log_marginal_likelihood()
    torch.testing.assert_close(la.theta, expected.theta, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(la.predictive(UserDict(whole)), expected.predictive(inputs))
    rows = [la.predictive(half, link_approx="probit") for half in halves(whole)]
    torch.testing.assert_close(torch.cat(rows), expected.predictive(inputs, link_approx="probit"))


def test_evidence_calibration_and_normalization_groups_of_mappings() -> None:
    """The symmetries are found from a call with keywords, and data are joined to chunks."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(3, 4, bias=False), nn.LayerNorm(4), nn.Linear(4, CLASSES)

        def forward(self, values: Tensor) -> Tensor:
            return self.last(torch.tanh(self.norm(self.first(values))))

    model, generator = randomize(Normed()), torch.Generator().manual_seed(2)
    x = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (12,), generator=generator)
    loader = [{"values": x[i : i + 4], "targets": y[i : i + 4]} for i in range(0, 12, 4)]
    la = LinearizedLaplace(model).fit(loader)
    assert len(la.prior_groups) > 1
    found = la.optimize_evidence()
    expected = LinearizedLaplace(model).fit([(x, y)]).optimize_evidence()
    assert found.log_marginal_likelihood == pytest.approx(expected.log_marginal_likelihood, rel=1e-6)
    assert la.calibrate(loader).samples == 12


def test_adapters_are_the_uncertain_subset() -> None:
    model = randomize(Tagger())
    adapters = ("query.lora_A.weight", "query.lora_B.weight")
    la = LinearizedLaplace(model, parameters=["*lora_*"], prior="single", curvature="full").fit([batch()])
    by_name = LinearizedLaplace(model, parameters=list(adapters), prior="single", curvature="full").fit([batch()])
    assert la.tangent.names == adapters
    assert torch.equal(dense_curvature(la), dense_curvature(by_name))
    several = LinearizedLaplace(model, parameters=["query.lora_?.weight", "head"])
    assert several.tangent.names == ("head.weight", "head.bias", *adapters)
    with pytest.raises(ValueError, match=r"'\*adapter\*' matches no parameter"):
        LinearizedLaplace(model, parameters=["*adapter*"])


@pytest.mark.parametrize(
    "options",
    [
        {"parameters": "last_layer", "curvature": "full"},
        {"parameters": "last_layer", "curvature": "last_layer"},
        {"parameters": ["head"], "curvature": "last_layer"},
    ],
)
def test_the_last_layer_is_the_one_that_is_called_last(options: dict[str, Any]) -> None:
    """The tagger's head is defined first; where the closed form applies, it is found in the same way, or named."""
    model = randomize(Tagger())
    la = LinearizedLaplace(model, prior="single", evaluate_at="map", **options).fit([batch()])
    assert la.tangent.names == ("head.weight", "head.bias")
    reference = LinearizedLaplace(model, prior="single", evaluate_at="map", curvature="full", parameters=["head"])
    torch.testing.assert_close(dense_curvature(la), dense_curvature(reference.fit([batch()])))


def test_a_layer_that_something_follows_is_no_last_one() -> None:
    la = LinearizedLaplace(randomize(Tagger()), parameters=["mix"], curvature="last_layer", prior="single")
    with pytest.raises(ValueError, match="is not the network's output"):
        la.fit([batch()])
