"""States that are no tensors, or no numbers of the network's kind, are named by every public function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import public
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from toy_networks import Normed

import tu_symmetry as tus
from tu_symmetry.alignment import barrier, repair
from tu_symmetry.alignment.straight_through import straight_through_matching
from tu_symmetry.metrics import functional
from tu_symmetry.posterior.compact import prune
from tu_symmetry.states import stack_states

State = dict[str, Tensor]
NAMED = "0.weight"


MODEL = Normed().eval()


@functools.cache
def graph() -> tus.SymmetryGraph:
    found = tus.discover_symmetries(MODEL, torch.zeros(2, 4))
    found.require_verified()
    return found


def state(seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        n: torch.randn(t.shape, generator=generator).abs() if t.ndim else t.clone()
        for n, t in MODEL.state_dict().items()
    }


def stacked(*members: State) -> State:
    return {n: torch.stack([m[n] for m in members]) for n in members[0]}


def loader() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(4, 4, generator=generator), torch.randint(3, (4,), generator=generator)) for _ in range(2)]


BAD: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "numpy": (lambda t: t.numpy(), r"is a numpy.ndarray of float32, not a tensor; .*torch.as_tensor"),
    "list": (lambda t: t.tolist(), r"is a list, not a tensor; .*torch.as_tensor"),
    "int8": (lambda t: (t * 10).to(torch.int8), r"torch.int8.* dequantize"),
    "bool": (lambda t: t > 1, r"torch.bool.* pass the weights themselves"),
    "complex": (lambda t: t.to(torch.complex64), r"torch.complex64.*\(\.real\)"),
    "sparse": (lambda t: t.to_sparse(), r"torch.sparse_coo.*\.to_dense\(\)"),
    "quantized": (lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), r"torch.qint8.*\.dequantize\(\)"),
}
KINDLESS = {"numpy", "list", "sparse", "quantized"}  # wrong for every network, also where none is at hand


def spoiled(kind: str, good: Mapping[str, Tensor]) -> State:
    return {**good, NAMED: BAD[kind][0](good[NAMED])}


# name -> call with one (possibly bad) state; the other arguments are right
ONE: dict[str, Callable[[State], Any]] = {
    "apply_permutation": lambda s: tus.apply_permutation(graph(), tus.random_permutation(graph()), s),
    "apply_scale": lambda s: tus.apply_scale(graph(), tus.random_scale(graph()), s),
    "apply_signs": lambda s: tus.apply_signs(graph(), tus.random_signs(graph()), s),
    "canonical_signs": lambda s: tus.scaling.canonical_signs(graph(), s),
    "apply_signed": lambda s: tus.symmetry.apply_signed(graph(), tus.symmetry.SignedPermutation({}, {}), s),
    "apply_linear": lambda s: tus.symmetry.apply_linear(graph(), {}, s),
    "rotation_matching reference": lambda s: tus.alignment.rotation_matching(graph(), s, state(1)),
    "rotation_matching": lambda s: tus.alignment.rotation_matching(graph(), state(1), s),
    "signed_matching reference": lambda s: tus.alignment.signed_matching(graph(), s, state(1)),
    "signed_matching": lambda s: tus.alignment.signed_matching(graph(), state(1), s),
    "weight_matching reference": lambda s: tus.weight_matching(graph(), s, state(1)),
    "weight_matching": lambda s: tus.weight_matching(graph(), state(1), s),
    "activation_matching reference": lambda s: tus.activation_matching(graph(), MODEL, s, state(1), loader()),
    "activation_matching": lambda s: tus.activation_matching(graph(), MODEL, state(1), s, loader()),
    "straight_through_matching": lambda s: straight_through_matching(
        graph(), MODEL, state(1), s, loader(), F.cross_entropy, epochs=1
    ),
    "balanced": lambda s: tus.alignment.balanced(graph(), s),
    "canonical_linear": lambda s: tus.alignment.canonical_linear(graph(), s),
    "fingerprint": lambda s: tus.fingerprint(graph(), s),
    "align over scales": lambda s: tus.align(graph(), [state(1), s], over=("permutations", "scales", "rotations")),
    "merge over scales": lambda s: tus.merge(graph(), [s, state(1)], MODEL, over=("permutations", "scales")),
    "align": lambda s: tus.align(graph(), [state(1), s]),
    "merge": lambda s: tus.merge(graph(), [state(1), s], MODEL),
    "merge reference": lambda s: tus.merge(graph(), [state(1), state(2)], MODEL, reference=s),
    "transport base": lambda s: tus.transport(graph(), s, state(1), state(2)),
    "transport": lambda s: tus.transport(graph(), state(1), s, state(2)),
    "transport new base": lambda s: tus.transport(graph(), state(1), state(2), s),
    "likeness reference": lambda s: tus.alignment.likeness(graph(), MODEL, s, state(1), loader()),
    "likeness": lambda s: tus.alignment.likeness(graph(), MODEL, state(1), s, loader()),
    "preflight": lambda s: tus.alignment.preflight(graph(), [state(1), s], MODEL, loader()),
    "align universe": lambda s: tus.align(graph(), [state(1), s], reference="universe"),
    "align reference": lambda s: tus.align(graph(), [state(1)], reference=s),
    "align activation": lambda s: tus.align(
        graph(), [state(1), s], match_on="activations", model=MODEL, dataloader=loader()
    ),
    "canonicalize": lambda s: tus.canonicalize(graph(), s),
    "fold_norms": lambda s: tus.fold_norms(graph(), s),
    "representation_cost": lambda s: tus.representation_cost(graph(), s),
    "representation_costs": lambda s: functional.representation_costs(graph(), s),
    "RepresentationCost": lambda s: tus.RepresentationCost(graph()).update(s),
    "mass_profile": lambda s: tus.scaling.mass_profile(graph(), s, [0.0, 1.0]),
    "remove_symmetries": lambda s: tus.remove_symmetries(graph(), s),
    "remove_symmetries reference": lambda s: tus.remove_symmetries(graph(), state(1), reference=s),
    "CompactPosterior.from_states": lambda s: tus.CompactPosterior.from_states([state(1), s], graph()),
    "CompactPosterior.from_states q_d": lambda s: tus.CompactPosterior.from_states([state(1), s], graph(), align=False),
    "interpolate": lambda s: barrier.interpolate(state(1), s, 0.5),
    "interpolate from": lambda s: barrier.interpolate(s, state(1), 0.5),
    "mean_loss": lambda s: barrier.mean_loss(MODEL, s, loader(), F.cross_entropy),
    "loss_barrier": lambda s: tus.loss_barrier(MODEL, state(1), s, loader(), F.cross_entropy, points=3),
    "loss_barrier from": lambda s: tus.loss_barrier(MODEL, s, state(1), loader(), F.cross_entropy, points=3),
    "loss_barriers": lambda s: tus.alignment.loss_barriers(MODEL, [state(1), s], loader(), F.cross_entropy, points=3),
    "mean_state": lambda s: tus.mean_state([state(1), s]),
    "average": lambda s: tus.alignment.average([state(1), s]),
    "correct": lambda s: tus.alignment.correct(MODEL, [state(1), s], [0.5, 0.5], state(2), loader(), "repair"),
    "measure": lambda s: tus.alignment.measure(MODEL, s, loader(), {"loss": F.cross_entropy}),
    "reestimate_batchnorm": lambda s: repair.reestimate_batchnorm(MODEL, s, loader()),
    "repair": lambda s: repair.repair(MODEL, [state(1), s], [0.5, 0.5], state(2), loader()),
    "repair merged": lambda s: repair.repair(MODEL, [state(1), state(2)], [0.5, 0.5], s, loader()),
}

FILES = ("align reference", "merge", "average", "transport", "preflight")  # of what may be given by a name

# name -> call with a (possibly bad) stack
STACK: dict[str, Callable[[State], Any]] = {
    "align": lambda s: tus.align(graph(), s),
    "from_states": lambda s: tus.CompactPosterior.from_states(s, graph()),
    "remove_symmetries": lambda s: tus.remove_symmetries(graph(), s),
    "apply_permutation": lambda s: tus.apply_permutation(graph(), tus.random_permutation(graph()), s),
    "representation_costs": lambda s: functional.representation_costs(graph(), s),
    "network_discrepancy": lambda s: functional.network_discrepancy(s, stacked(*map(state, (4, 5, 6))), graph=graph()),
    "MaximumMeanDiscrepancy": lambda s: tus.MaximumMeanDiscrepancy(graph=graph()).update(s, reference=True),
    "unit_samples": lambda s: functional.unit_samples(graph(), s),
    "MarginalHomogeneity": lambda s: tus.MarginalHomogeneity(graph()).update(s),
}


# what looks at the values of the weights; an action alone needs none
VALUED = ("canonicalize", "representation_cost", "representation_costs", "RepresentationCost", "mass_profile",
          "remove_symmetries", "weight_matching", "align", "CompactPosterior.from_states")  # fmt: skip


@pytest.mark.parametrize("name", VALUED)
def test_a_state_without_values_is_named(name: str) -> None:
    with pytest.raises(tus.SymmetryError, match=r"meta device, where tensors have no values"):
        ONE[name]({n: t.to("meta") for n, t in state().items()})


@pytest.mark.parametrize("kind", BAD)
def test_a_state_or_a_stack_of_another_kind_is_named(kind: str) -> None:
    for calls, good in ((ONE, state()), (STACK, stacked(state(0), state(1), state(2)))):
        for name, call in calls.items():
            either = kind == "complex" and name.startswith("interpolate")  # which of the two is meant, nobody knows
            with pytest.raises(tus.SymmetryError, match=NAMED if either else BAD[kind][1]) as caught:
                call(spoiled(kind, good))
            assert NAMED in str(caught.value), name


@pytest.mark.parametrize("kind", sorted(KINDLESS))
def test_without_a_network_what_is_no_dense_tensor_is_named(kind: str) -> None:
    good, bad = state(), spoiled(kind, state())
    calls: list[Callable[[], Any]] = [
        lambda: tus.mean_state([bad, bad]),
        lambda: stack_states([bad, bad]),
        lambda: barrier.interpolate(bad, bad, 0.5),
        lambda: prune(bad, {}),
        lambda: prune(good, spoiled(kind, {NAMED: good[NAMED]})),
        lambda: functional.network_discrepancy({NAMED: bad[NAMED]}, {NAMED: good[NAMED]}),
        lambda: tus.MaximumMeanDiscrepancy().update({NAMED: bad[NAMED]}, reference=True),
    ]
    for call in calls:
        with pytest.raises(tus.SymmetryError, match=NAMED):
            call()


@pytest.mark.parametrize("kind", BAD)
def test_samples_and_probabilities_that_are_no_real_tensors_are_named(kind: str) -> None:
    bad = BAD[kind][0]
    samples, rows = torch.rand(5, 4, 3), torch.rand(4, 3)
    probs = torch.full((4, 3), 1 / 3)
    calls: list[Callable[[], Any]] = [
        lambda: functional.marginal_homogeneity(bad(samples)),
        lambda: functional.maximum_mean_discrepancy(bad(rows), rows),
        lambda: functional.maximum_mean_discrepancy(rows, bad(rows)),
        lambda: functional.predictive_agreement(bad(probs), probs),
        lambda: functional.predictive_total_variation(probs, bad(probs)),
        lambda: functional.pairwise_mutual_information(bad(probs.expand(2, 4, 3).contiguous())),
        lambda: tus.PredictiveAgreement().update(bad(probs), probs),
        lambda: tus.PairwiseMutualInformation(2).update(bad(probs.expand(2, 4, 3).contiguous())),
    ]
    for call in calls:
        with pytest.raises((tus.SymmetryError, ValueError), match=r"samples|^x |^y |probs"):
            call()


@pytest.mark.parametrize("given", [3, "state.pt", None, [1.0], MODEL])
def test_what_is_no_state_dict_is_named(given: Any) -> None:
    for name, call in ONE.items():
        files = ("align reference", "merge", "average", "transport", "preflight")
        if isinstance(given, str) and name.startswith(files):
            continue  # the name of a reference; a file
        if given is None and (name.endswith("s reference") or name == "merge reference"):
            continue  # no reference
        with pytest.raises(TypeError, match=r"not a state dict|not a list of state dicts"):
            call(given)


@pytest.mark.parametrize("bad", [np.arange(8), list(range(8)), torch.zeros(8, dtype=torch.bool), torch.zeros(8) * 1j])
def test_elements_that_are_no_tensors_are_named(bad: Any) -> None:
    p, s = tus.random_permutation(graph()), tus.random_scale(graph())
    wrong_p, wrong_s = {**p, next(iter(p)): bad}, {**s, next(iter(s)): bad}
    calls: list[Callable[[], Any]] = [
        lambda: tus.apply_permutation(graph(), wrong_p, state()),
        lambda: tus.apply_scale(graph(), wrong_s, state()),
        lambda: tus.compose(p, wrong_p),
        lambda: tus.invert(wrong_p),
        lambda: tus.TranspositionCount().update(wrong_p),
        lambda: tus.weight_matching(graph(), state(), state(1), solver="descent", init=wrong_p),
    ]
    for call in calls:
        with pytest.raises(tus.SymmetryError, match=r"(permutation|log_scale)\[.* pass a tensor"):
            call()


def test_a_state_is_compared_with_the_kind_that_discovery_saw() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).to(torch.complex64)
    found = tus.discover_symmetries(model, torch.randn(2, 4, dtype=torch.complex64))
    good = model.state_dict()
    assert set(found.kinds.values()) == {"complex"} and found.check_state(good) == 0
    with pytest.raises(tus.SymmetryError, match=r"0.weight.* torch.float32, but .* complex numbers; .*complex64"):
        found.check_state({**good, "0.weight": good["0.weight"].real.contiguous()})
    with pytest.raises(tus.SymmetryError, match=r"0.weight.* NaN or infinite"):
        found.check_state({**good, "0.weight": good["0.weight"] * torch.nan})
    assert graph().kinds["1.num_batches_tracked"] == "integer"
    assert graph().check_state({**state(), "1.num_batches_tracked": torch.tensor(3.0)}) == 0  # a counter, averaged


def test_right_states_are_taken() -> None:
    good, many = state(), stacked(state(0), state(1), state(2))
    for calls, given in ((ONE, good), (STACK, many)):
        for call in calls.values():
            call(given)


def test_every_public_function_that_takes_states_is_in_the_table() -> None:
    covered = {name.split()[0] for name in (*ONE, *STACK)}
    words = {"state", "states", "reference_state", "state_a"}
    found = set()
    for path, value in public.names():
        if inspect.isfunction(value) and words & inspect.signature(value).parameters.keys():
            found.add(path.rpartition(".")[2])
    assert found <= covered, found - covered
    assert len(found) > 8
