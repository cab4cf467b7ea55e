"""Loss barriers between independently trained networks, before and after each method of matching and of correction.

Every network is matched to the first one (or all of them to a universe); then all pairs are measured, so that pairs
that were never matched to each other count too, and the mean of all networks. Each merged network is measured as it is,
with re-estimated BatchNorm statistics, and after REPAIR (Jordan et al. 2023, arXiv 2211.08403); each with the softmax
temperature 1 and with a tuned one. The same without any permutation is the control that a matching has to beat.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tu_symmetry.configs import ConfigError
from tu_symmetry.evaluation import Batches, logits
from tu_symmetry.files import read_json, read_tensors, write_json, write_safetensors
from tu_symmetry.states import unstack
from tu_symmetry.tables.models import build_model
from tu_symmetry.tables.recipe import ModelConfig
from tu_symmetry.tables.stage import Results, StageContext, stage

if TYPE_CHECKING:
    from tu_symmetry.symmetry.elements import Permutation
    from tu_symmetry.symmetry.graph import SymmetryGraph

State = dict[str, Tensor]
MEMBERS = "members.safetensors"
MATCHINGS = ("weights", "activations", "straight_through", "universe")
CORRECTIONS = ("none", "batchnorm", "repair")


@dataclass(frozen=True)
class MembersOptions:
    """Which networks are trained, and how.

    Attributes:
        network: dotted path of the module class (see :class:`~tu_symmetry.tables.recipe.ModelConfig`).
        arguments: its keyword arguments.
        title: what the report calls it.
        members: independent networks; each has its own initialization and its own order of batches.
        epochs: over the training set.
        batch_size: images that are left over at the end of an epoch are not used in it.
        learning_rate: of SGD on the mean cross-entropy, at its peak; it rises linearly over the first fifth of the
            steps and falls linearly to zero.
        momentum: of SGD.
        weight_decay: of SGD.
        augment: random horizontal flips and shifts by up to 4 pixels.
    """

    network: str
    arguments: dict[str, Any] = field(default_factory=dict)
    title: str = "network"
    members: int = 3
    epochs: int = 6
    batch_size: int = 125
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    augment: bool = False


@dataclass(frozen=True)
class MatchingOptions:
    """How the networks are matched.

    Attributes:
        methods: some of ``weights``, ``activations``, ``straight_through`` and ``universe``.
        images: training images, the first ones, for activation and straight-through matching.
        similarity: of activations: ``product``, ``covariance`` or ``correlation``.
        batch_size: of straight-through matching.
        epochs: of straight-through matching.
        learning_rate: of straight-through matching.
    """

    methods: list[str] = field(default_factory=lambda: list(MATCHINGS))
    images: int = 2000
    similarity: str = "correlation"
    batch_size: int = 125
    epochs: int = 3
    learning_rate: float = 1e-3


@dataclass(frozen=True)
class BarriersOptions:
    """How merged networks are measured.

    Attributes:
        points: points on each path, both ends and the middle included (an odd number).
        statistics: training images, the first ones, for re-estimated statistics and REPAIR.
        held_out: test images, the last ones, on which temperatures are tuned; the others measure losses.
    """

    points: int = 5
    statistics: int = 1000
    held_out: int = 500


@stage()
def train_members(context: StageContext, options: MembersOptions) -> Results:
    """Train independent networks of one architecture: states ``[members, ...]``."""
    if options.members < 2:
        raise ConfigError(f"{context.name}: barriers are between networks, so members must be 2 at least")
    states = []
    with context.track(f"training {options.title}", options.members * options.epochs) as tracker:
        for k in range(options.members):

            def shown(epoch: int, loss: float, before: int = k * options.epochs) -> None:
                tracker.update(before + epoch, loss=loss)

            states.append(_train(context, options, k, shown))
    stacked = {name: torch.stack([s[name] for s in states]).cpu() for name in states[0]}
    write_safetensors(context.folder / MEMBERS, stacked)
    for k in range(options.members):
        (context.folder / f"member-{k}.safetensors").unlink()
    return {
        "title": options.title,
        "model": asdict(_model_config(options)),
        "members": options.members,
        "headline": f"{options.members} networks of {sum(t[0].numel() for t in stacked.values()):,} numbers",
    }


def _model_config(options: MembersOptions) -> ModelConfig:
    return ModelConfig(options.network, options.arguments)


def _train(context: StageContext, options: MembersOptions, k: int, shown: Callable[[int, float], None]) -> State:
    """Train one network; resumes from its last saved epoch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(context.seed(f"initialization {k}"))
        model = build_model(_model_config(options), context.data).to(context.device)
    x, y = context.data.train_x, context.data.train_y
    steps = len(x) // options.batch_size
    if steps == 0:
        raise ConfigError(f"{context.name}: batch_size {options.batch_size} exceeds the {len(x)} training images")
    total = steps * options.epochs
    optimizer = torch.optim.SGD(
        model.parameters(), options.learning_rate, options.momentum, weight_decay=options.weight_decay
    )
    checkpoint, epoch = context.folder / f"member-{k}.safetensors", 0
    if checkpoint.exists():
        epoch = _restore(checkpoint, model, optimizer)
    model.train()
    while epoch < options.epochs:
        generator = context.generator(f"member {k} epoch {epoch}")
        order = torch.randperm(len(x), generator=generator)[: steps * options.batch_size].to(x.device)
        summed = torch.zeros((), device=x.device)
        for step, batch in enumerate(order.split(options.batch_size), epoch * steps):
            rate = min((step + 1) / (0.2 * total), (total - step) / (0.8 * total), 1.0)
            optimizer.param_groups[0]["lr"] = options.learning_rate * rate
            inputs = _augmented(x[batch], generator) if options.augment else x[batch]
            loss = F.cross_entropy(model(inputs), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            summed += loss.detach()
        epoch += 1
        _save(checkpoint, model, optimizer, epoch)
        shown(epoch, float(summed) / steps)
    return model.state_dict()


def _save(path: Path, model: nn.Module, optimizer: torch.optim.SGD, epoch: int) -> None:
    """The network, the momentum of its parameters (in their order; none where momentum is 0) and the epochs done."""
    momenta = {f"momentum/{i}": optimizer.state[p].get("momentum_buffer") for i, p in enumerate(model.parameters())}
    tensors = {f"model/{name}": t for name, t in model.state_dict().items()}
    tensors |= {name: t for name, t in momenta.items() if t is not None}
    write_safetensors(path, tensors | {"epoch": torch.tensor(epoch)})


def _restore(path: Path, model: nn.Module, optimizer: torch.optim.SGD) -> int:
    """What :func:`_save` kept; the epochs done."""
    saved = read_tensors(path, device=next(model.parameters()).device)
    model.load_state_dict({n.removeprefix("model/"): t for n, t in saved.items() if n.startswith("model/")})
    for i, p in enumerate(model.parameters()):
        if f"momentum/{i}" in saved:
            optimizer.state[p]["momentum_buffer"] = saved[f"momentum/{i}"]
    return int(saved["epoch"])


def _augmented(x: Tensor, generator: torch.Generator, shift: int = 4) -> Tensor:
    """Images ``[n, channels, height, width]``, flipped left to right at random and shifted over a black border."""
    count, channels, height, width = x.shape
    flip = (torch.rand(count, generator=generator) < 0.5).to(x.device)
    padded = F.pad(torch.where(flip[:, None, None, None], x.flip(-1), x), [shift] * 4)
    top, left = torch.randint(2 * shift + 1, (2, count, 1), generator=generator).to(x.device)
    rows = (top + torch.arange(height, device=x.device))[:, None, :, None]
    columns = (left + torch.arange(width, device=x.device))[:, None, None, :]
    image = torch.arange(count, device=x.device)[:, None, None, None]
    return padded[image, torch.arange(channels, device=x.device)[:, None, None], rows, columns]


def _network(context: StageContext) -> tuple[nn.Module, SymmetryGraph, list[State]]:
    """The members' module in evaluation mode, its verified graph, and their states on the device."""
    from tu_symmetry.symmetry.discovery import discover_symmetries

    members = context.inputs["members"]
    config = ModelConfig(**members.results["model"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(context.seed("initialization"))
        model = build_model(config, context.data).to(context.device).eval()
    graph = discover_symmetries(model, context.data.train_x[:2])
    graph.require_verified()
    return model, graph, list(unstack(read_tensors(members.folder / MEMBERS, device=context.device)))


def _first_images(context: StageContext, count: int, batch_size: int = 1000) -> Batches:
    data = context.data
    return Batches(data.train_x[:count], data.train_y[:count], batch_size)


def pairs_of(count: int) -> list[tuple[int, int]]:
    """All pairs of networks, those with the first one in front."""
    return list(itertools.combinations(range(count), 2))


@stage(inputs=("members",), version=2)
def match_members(context: StageContext, options: MatchingOptions) -> Results:
    """Match the networks by each method: transpositions (NoT) relative to the first, distances between all pairs."""
    from tu_symmetry.alignment.matching import weight_distance
    from tu_symmetry.symmetry.action import apply_permutation
    from tu_symmetry.symmetry.elements import compose, invert, transposition_count

    unknown = set(options.methods) - set(MATCHINGS)
    if unknown:
        raise ConfigError(f"{context.name}: unknown methods {sorted(unknown)}; there are {', '.join(MATCHINGS)}")
    model, graph, states = _network(context)
    pairs = pairs_of(len(states))

    def distances(aligned: Sequence[State]) -> list[float]:
        return [weight_distance(graph, aligned[i], aligned[j]) for i, j in pairs]

    methods: dict[str, Any] = {"none": {"transpositions": [0] * len(states), "distances": distances(states)}}
    with context.track("matching", len(options.methods)) as tracker:
        for done, method in enumerate(options.methods, 1):
            path = context.folder / f"{method}.safetensors"
            if not path.exists():
                _write_permutations(path, _permutations(context, options, method, model, graph, states))
            permutations = read_permutations(path)
            aligned = [apply_permutation(graph, p, s) for p, s in zip(permutations, states, strict=True)]
            methods[method] = {
                "transpositions": [transposition_count(compose(invert(permutations[0]), p)) for p in permutations],
                "distances": distances(aligned),
            }
            tracker.update(done, method=method)
    largest = sum(group.size - 1 for group in graph.permutations)
    shown = ", ".join(f"{name} {sum(m['distances']) / len(pairs):.2f}" for name, m in methods.items())
    return {"methods": methods, "largest_transpositions": largest, "headline": f"mean distance: {shown}"}


def _permutations(
    context: StageContext,
    options: MatchingOptions,
    method: str,
    model: nn.Module,
    graph: SymmetryGraph,
    states: Sequence[State],
) -> list[Permutation]:
    """One permutation for each network, the identity for the one that stays as it is."""
    from tu_symmetry.alignment.align import align
    from tu_symmetry.alignment.straight_through import straight_through_matching
    from tu_symmetry.symmetry.elements import identity_permutation

    if method == "weights":
        return align(graph, states, reference="first").permutations
    if method == "universe":
        return align(graph, states, reference="universe").permutations
    batches = _first_images(context, options.images, options.batch_size)
    if method == "activations":
        found = align(
            graph,
            states,
            reference="first",
            match_on="activations",
            model=model,
            dataloader=batches,
            similarity=options.similarity,  # type: ignore[arg-type]
        )
        return found.permutations
    matchings = [
        straight_through_matching(
            graph,
            model,
            states[0],
            state,
            batches,
            F.cross_entropy,
            epochs=options.epochs,
            learning_rate=options.learning_rate,
        )
        for state in states[1:]
    ]
    return [identity_permutation(graph), *(m.permutation for m in matchings)]


def _write_permutations(path: Path, permutations: Sequence[Permutation]) -> None:
    tensors = {f"{k}/{name}": p for k, one in enumerate(permutations) for name, p in one.items()}
    write_safetensors(path, tensors)


def read_permutations(path: Path) -> list[Permutation]:
    """The permutations that a matching stage wrote, one for each network."""
    found: dict[int, Permutation] = {}
    for key, tensor in read_tensors(path).items():
        k, _, name = key.partition("/")
        found.setdefault(int(k), {})[name] = tensor
    return [found[k] for k in sorted(found)]


@stage(inputs=("members", "matching"), version=2)
def measure_barriers(context: StageContext, options: BarriersOptions) -> Results:
    """Barriers of all pairs, and the mean network, for each matching and each correction."""
    from tu_symmetry.symmetry.action import apply_permutation

    if options.points < 3 or options.points % 2 == 0:
        raise ConfigError(f"{context.name}: points must be odd and 3 at least (ends and middle), not {options.points}")
    if not 0 < options.held_out < len(context.data.test_x):
        raise ConfigError(
            f"{context.name}: held_out is {options.held_out}, which leaves none of the {len(context.data.test_x)} test "
            "images to measure, or none to tune on"
        )
    model, graph, states = _network(context)
    judge = _Judge(model, context, options)
    matching = context.inputs["matching"]
    pairs = pairs_of(len(states))
    cache = context.folder / "measured.json"
    measured: dict[str, Any] = read_json(cache)[0] if cache.exists() else {}

    def once(key: str, measure: Callable[..., Any], *arguments: Any) -> Any:
        if key not in measured:
            measured[key] = measure(*arguments)
            write_json(cache, measured, seal=True)
        tracker.update(len(measured), at=key)
        return measured[key]

    methods: dict[str, Any] = {}
    with context.track("measuring", len(states) + len(matching.results["methods"]) * (len(pairs) + 1)) as tracker:
        ends = [once(f"member {k}", judge.scores, state) for k, state in enumerate(states)]
        for method in matching.results["methods"]:
            aligned = states
            if method != "none":
                permutations = read_permutations(matching.folder / f"{method}.safetensors")
                aligned = [apply_permutation(graph, p, s) for p, s in zip(permutations, states, strict=True)]
            inner = [once(f"{method} {i}-{j}", judge.between, aligned[i], aligned[j]) for i, j in pairs]
            methods[method] = {
                "paths": {
                    correction: [
                        _path(ends[i], [point[correction] for point in points], ends[j])
                        for (i, j), points in zip(pairs, inner, strict=True)
                    ]
                    for correction in CORRECTIONS
                },
                "mean": once(f"{method} mean", judge.mean, aligned),
            }

    def barrier(method: str, correction: str) -> float:
        found = methods[method]["paths"][correction]
        return sum(p["barrier"] for p in found) / len(found)

    shown = ", ".join(f"{name} {barrier(name, 'none'):.2f} → {barrier(name, 'batchnorm'):.2f}" for name in methods)
    members = context.inputs["members"].results
    return {
        "title": members["title"],
        "members": ends,
        "pairs": pairs,
        "ratios": judge.ratios,
        "methods": methods,
        "matching": matching.results,
        "headline": f"barrier, no correction → statistics re-estimated: {shown}",
    }


class _Judge:
    """Scores networks on the test images, merged ones corrected in each way on training images."""

    def __init__(self, model: nn.Module, context: StageContext, options: BarriersOptions) -> None:
        self.model, self.test = model, context.data.test
        self.measured = len(self.test.x) - options.held_out
        self.statistics = _first_images(context, options.statistics)
        self.ratios: list[float] = torch.linspace(0, 1, options.points, dtype=torch.float64).tolist()

    def scores(self, state: Mapping[str, Tensor]) -> dict[str, float]:
        """Loss (nats), accuracy, tuned temperature, and the loss at that temperature."""
        from tu_symmetry.alignment.barrier import fit_temperature

        outputs, labels = logits(self.model, state, self.test).double(), self.test.y
        temperature = fit_temperature(outputs[self.measured :], labels[self.measured :])
        outputs, labels = outputs[: self.measured], labels[: self.measured]
        return {
            "loss": float(F.cross_entropy(outputs, labels)),
            "accuracy": float((outputs.argmax(-1) == labels).double().mean()),
            "temperature": temperature,
            "tuned_loss": float(F.cross_entropy(outputs / temperature, labels)),
        }

    def between(self, a: State, b: State) -> list[dict[str, dict[str, float]]]:
        """Scores at the inner points of the path between two networks."""
        from tu_symmetry.alignment.barrier import interpolate

        return [self._merged([a, b], [1 - ratio, ratio], interpolate(a, b, ratio)) for ratio in self.ratios[1:-1]]

    def mean(self, states: Sequence[State]) -> dict[str, dict[str, float]]:
        """Scores of the mean of all networks."""
        from tu_symmetry.states import mean_state

        return self._merged(states, [1 / len(states)] * len(states), mean_state(states))

    def _merged(self, ends: Sequence[State], ratios: Sequence[float], state: State) -> dict[str, dict[str, float]]:
        """Scores of a merged network after each correction.

        Where every hidden layer feeds a BatchNorm layer, REPAIR has nothing to do but to re-estimate statistics, and
        the network is scored once for both.
        """
        from tu_symmetry.alignment.repair import reestimate_batchnorm, repair

        corrected: dict[str, Mapping[str, Tensor]] = {
            "none": state,
            "batchnorm": reestimate_batchnorm(self.model, state, self.statistics),
            "repair": repair(self.model, ends, ratios, state, self.statistics),
        }
        found = {correction: self.scores(corrected[correction]) for correction in ("none", "batchnorm")}
        same = all(torch.equal(corrected["repair"][name], t) for name, t in corrected["batchnorm"].items())
        return found | {"repair": found["batchnorm"] if same else self.scores(corrected["repair"])}


def _path(first: dict[str, float], inner: Sequence[dict[str, float]], last: dict[str, float]) -> dict[str, Any]:
    """Scores along one path, barriers (largest excess of the loss over the chord, nats) and the middle's accuracy."""
    points = [first, *inner, last]
    column = {name: [point[name] for point in points] for name in first}

    def barrier(losses: Sequence[float]) -> float:
        ends = torch.tensor([losses[0], losses[-1]], dtype=torch.float64)
        weights = torch.linspace(0, 1, len(losses), dtype=torch.float64)
        chord = torch.lerp(ends[0], ends[1], weights)
        return max(0.0, float((torch.tensor(losses, dtype=torch.float64) - chord).max()))

    return column | {
        "barrier": barrier(column["loss"]),
        "tuned_barrier": barrier(column["tuned_loss"]),
        "middle_accuracy": column["accuracy"][len(points) // 2],
    }
