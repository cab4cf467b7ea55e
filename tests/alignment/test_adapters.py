"""Adapters are merged as what they add: laws in double precision, against dense matrices."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tu_symmetry.alignment.adapters import factor_names, is_adapter, merge_adapters
from tu_symmetry.states import SymmetryError

SIZES = {"q": (7, 5, 3), "v": (6, 9, 2)}  # out, in, rank
NAMES = {
    "peft": ("base_model.model.{}.lora_A.weight", "base_model.model.{}.lora_B.weight"),
    "peft_named": ("base_model.model.{}.lora_A.default.weight", "base_model.model.{}.lora_B.default.weight"),
    "kohya": ("lora_unet_{}.lora_down.weight", "lora_unet_{}.lora_up.weight"),
    "diffusers": ("unet.{}.lora.down.weight", "unet.{}.lora.up.weight"),
    "processor": ("unet.{}_lora.down.weight", "unet.{}_lora.up.weight"),
}


def adapter(seed: int, kind: str = "peft", *, more: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for layer, (out, into, rank) in SIZES.items():
        down, up = NAMES[kind]
        state[down.format(layer)] = torch.randn(rank + more, into, generator=generator, dtype=torch.float64)
        state[up.format(layer)] = torch.randn(out, rank + more, generator=generator, dtype=torch.float64)
    return state


def added(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The oracle: dense products, by layer."""
    return {
        layer: state[up].flatten(1) @ state[down].flatten(1)
        * (float(state[f"{layer}.alpha"]) / state[down].shape[0] if f"{layer}.alpha" in state else 1)
        for layer, (down, up) in factor_names(list(state)).items()
    }  # fmt: skip


def turned(state: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """The same adapter with other factors: an element of GL(r) for each layer."""
    generator = torch.Generator().manual_seed(seed)
    made = dict(state)
    for down, up in factor_names(list(state)).values():
        rank = state[down].shape[0]
        m = torch.randn(rank, rank, generator=generator, dtype=torch.float64) + 3 * torch.eye(rank)
        made[down], made[up] = m @ state[down], state[up] @ m.inverse()
    return made


@pytest.mark.parametrize("kind", NAMES)
def test_the_merged_product_is_the_mean_of_the_products(kind: str) -> None:
    given = [adapter(0, kind), adapter(1, kind, more=1), adapter(2, kind)]
    weights = [0.5, 0.3, -0.2]
    found = merge_adapters(given, weights=weights)
    assert found.state.keys() == given[0].keys() and is_adapter(list(found.state))
    for layer, product in added(found.state).items():
        expected = sum(w * added(a)[layer] for w, a in zip(weights, given, strict=True))
        torch.testing.assert_close(product, expected)
        assert found.errors[layer] == 0 and math.isnan(found.factor_errors[layer])
    assert set(found.ranks.values()) == {min(7, 5), min(6, 9, 2 + 3 + 2)}  # no more than a matrix of this shape has


def test_the_factors_do_not_matter_but_averaging_them_does() -> None:
    one, two = adapter(0), adapter(1)
    plain = merge_adapters([one, two], rank=3)
    other = merge_adapters([turned(one, 5), turned(two, 6)], rank=3)
    for layer, product in added(plain.state).items():
        torch.testing.assert_close(added(other.state)[layer], product)
        assert other.errors[layer] == pytest.approx(plain.errors[layer])
        assert abs(other.factor_errors[layer] - plain.factor_errors[layer]) > 1e-3, "vacuous"
    # An adapter and itself, with other factors: the mean is the adapter, and not what averaged factors say.
    same = merge_adapters([one, turned(one, 7)], rank=3)
    for layer, product in added(same.state).items():
        torch.testing.assert_close(product, added(one)[layer])
        assert same.errors[layer] == 0 and same.factor_errors[layer] > 0.05
    minus = {name: -t for name, t in one.items()}  # M = -1
    gone = merge_adapters([one, minus]).factor_errors
    assert gone and gone == pytest.approx(dict.fromkeys(gone, 1.0))


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_lower_rank_is_the_best_one(rank: int) -> None:
    given = [adapter(k) for k in range(3)]
    found = merge_adapters(given, rank=rank)
    for layer, product in added(found.state).items():
        mean = torch.stack([added(a)[layer] for a in given]).mean(0)
        s = torch.linalg.svdvals(mean)
        assert found.ranks[layer] == min(rank, len(s)) and torch.linalg.matrix_rank(product) <= rank
        left = float(s[rank:].square().sum().sqrt() / s.norm())
        assert float((product - mean).norm() / mean.norm()) == pytest.approx(left, abs=1e-12)
        assert found.errors[layer] == pytest.approx(left, abs=1e-12)


def test_scales_convolutions_embeddings_and_other_tensors() -> None:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def make(alpha: float, rank: int) -> dict[str, Tensor]:
        return {
            "c.lora_down.weight": draw(rank, 4, 3, 3),
            "c.lora_up.weight": draw(6, rank, 1, 1),
            "c.alpha": torch.tensor(alpha, dtype=torch.float64),
            "head.bias": draw(2),
        }

    given = [make(8.0, 2), make(1.0, 3)]
    found = merge_adapters(given, weights=[0.7, 0.3])
    assert found.state["c.lora_down.weight"].shape == (5, 4, 3, 3) and found.state["c.alpha"] == 5
    torch.testing.assert_close(added(found.state)["c"], 0.7 * added(given[0])["c"] + 0.3 * added(given[1])["c"])
    torch.testing.assert_close(found.state["head.bias"], 0.7 * given[0]["head.bias"] + 0.3 * given[1]["head.bias"])
    words = [{"m.lora_embedding_A.x": draw(2, 11), "m.lora_embedding_B.x": draw(4, 2)} for _ in range(2)]
    scaled = merge_adapters(words, scales=[{"m": 2.0}, {}])
    expected = (2 * added(words[0])["m"] + added(words[1])["m"]) / 2
    torch.testing.assert_close(added(scaled.state)["m"], expected)
    # A layer of one adapter alone counts as zero in the other.
    some = {n: t for n, t in adapter(1).items() if ".q." in n}
    half = merge_adapters([adapter(0), some])
    torch.testing.assert_close(added(half.state)["base_model.model.v"], added(adapter(0))["base_model.model.v"] / 2)


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        ([], {}, ValueError, "list is empty"),
        ([adapter(0), {"0.weight": torch.ones(2, 2)}], {}, SymmetryError, r"adapters\[1\] holds no factors"),
        ([{"a.lora_A.weight": torch.ones(2, 2)}], {}, SymmetryError, "not 'a.lora_B.weight'"),
        ([adapter(0) | {"q.lora_magnitude_vector": torch.ones(2)}], {}, SymmetryError, "DoRA"),
        ([adapter(0), adapter(1)], {"weights": [1.0]}, ValueError, "2 finite numbers"),
        ([adapter(0), adapter(1)], {"rank": 0}, ValueError, "rank must be at least 1"),
        ([adapter(0), adapter(1)], {"scales": [{}]}, ValueError, "one for each adapter"),
        (
            [{"a.lora_A.weight": torch.ones(1, 3), "a.lora_B.weight": torch.ones(s, 1)} for s in (2, 4)],
            {},
            SymmetryError,
            "different shapes",
        ),
    ],
)
def test_what_cannot_be_merged(given: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        merge_adapters(given, **options)
