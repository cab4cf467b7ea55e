"""EvidenceWeightDecay: precisions of the largest evidence as the optimizer's decay, while a network trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tu_symmetry as tus
from tu_symmetry.callbacks.weight_decay import EvidenceWeightDecay, split_groups

pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLES = 60


def samples(kind: str = "classification") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 4, generator=generator)
    clean = x @ torch.randn(4, 2, generator=generator)
    noisy = clean + 1.5 * torch.randn(SAMPLES, 2, generator=generator)
    return x, noisy if kind == "regression" else noisy.argmax(-1)


class Routine(LightningModule):
    def __init__(self, kind: str = "classification", schedule: bool = False, width: int = 12, lr: float = 0.05) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.schedule, self.lr = kind, schedule, lr
        norm = [nn.BatchNorm1d(width)] if kind == "classification" else []
        self.model = nn.Sequential(nn.Linear(4, width), *norm, nn.Tanh(), nn.Linear(width, 2))
        self.loss = nn.MSELoss() if kind == "regression" else nn.CrossEntropyLoss()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.model.parameters(), lr=self.lr, weight_decay=1e-6)
        if not self.schedule:
            return optimizer
        first = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
        second = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2])
        return [optimizer], [torch.optim.lr_scheduler.SequentialLR(optimizer, [first, second], [2])]


def fit(
    routine: Routine, callback: EvidenceWeightDecay, epochs: int, *others: Any, precision: Any = None, **options: Any
) -> Trainer:
    trainer = Trainer(
        callbacks=[callback, *others], max_epochs=epochs, accelerator="cpu", devices=1, logger=False,
        enable_checkpointing=bool(others), enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
        precision=precision,
    )  # fmt: skip
    trainer.fit(routine, DataLoader(TensorDataset(*samples(routine.kind)), batch_size=20, shuffle=True), **options)
    return trainer


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_precisions_reach_the_decay_of_every_group(kind: str) -> None:
    """As a fit by hand at the same weights finds them; a mean loss is the sum over the number of observations."""
    routine, callback = Routine(kind), EvidenceWeightDecay(every_n_epochs=2, prior="per_layer")
    trainer = fit(routine, callback, 2)
    la = tus.LinearizedLaplace(routine.model, kind, prior="per_layer", evaluate_at="map")  # type: ignore[arg-type]
    la.fit([samples(kind)])
    la.optimize_evidence()
    expected = dict(zip(la.prior_groups.names, la.log_precision.exp().tolist(), strict=True))
    assert callback.history[-1]["precisions"] == pytest.approx(expected, rel=1e-3)
    assert callback.history[-1]["log_evidence"] == pytest.approx(la.log_marginal_likelihood(), rel=1e-4)
    scale = 1 / SAMPLES if kind == "classification" else 2 * la.noise_variance / (2 * SAMPLES)
    names = {id(p): name for name, p in routine.model.named_parameters()}
    seen = []
    for group in trainer.optimizers[0].param_groups:
        own = {names[id(p)].rpartition(".")[0] for p in group["params"]}
        assert len(own) == 1
        seen += [names[id(p)] for p in group["params"]]
        assert group["weight_decay"] == pytest.approx(scale * expected[own.pop()], rel=1e-3)
    assert sorted(seen) == sorted(names.values())


def test_the_decayed_loss_is_the_negative_log_posterior() -> None:
    """Up to its scale: the gradient of one is that of the other."""
    routine, callback = Routine("regression"), EvidenceWeightDecay(every_n_epochs=1, prior="per_layer")
    trainer = fit(routine, callback, 1)
    x, y = samples("regression")
    record = callback.history[-1]
    own = {name: p for name, p in routine.model.named_parameters()}
    nll = 0.5 * (routine.model(x) - y).square().sum() / record["noise_variance"]
    ridge = sum(0.5 * record["precisions"][name.rpartition(".")[0]] * p.square().sum() for name, p in own.items())
    posterior = torch.autograd.grad(nll + ridge, list(own.values()))
    loss = torch.autograd.grad(routine.loss(routine.model(x), y), list(own.values()))
    decay = {id(p): g["weight_decay"] for g in trainer.optimizers[0].param_groups for p in g["params"]}
    factor = 2 * record["noise_variance"] / y.numel()
    for found, expected, p in zip(loss, posterior, own.values(), strict=True):
        torch.testing.assert_close(found + decay[id(p)] * p, factor * expected, rtol=1e-3, atol=1e-6)


class Positions(nn.Module):
    """Logits or real outputs at every position, classes on the axis that the loss wants."""

    def __init__(self, outputs: int, axis: int) -> None:
        super().__init__()
        self.inner, self.outer, self.axis = nn.Linear(4, 6), nn.Linear(6, outputs), axis

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).tanh()).movedim(-1, self.axis)


def some_ignored(labels: Tensor, value: int) -> Tensor:
    return torch.where(torch.rand(labels.shape, generator=torch.Generator().manual_seed(2)) < 0.6, value, labels)


def flat_cross_entropy(f: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(f.flatten(0, -2), y.flatten())


def present_answers(f: Tensor, y: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(f[y >= 0], y[y >= 0])


IGNORING: dict[str, tuple[tuple[int, ...], int, int, int | None, Any, Any]] = {
    # shape of the inputs without features, outputs, their axis, ignored label, likelihood, mean loss
    "labels": ((20,), 3, -1, -100, None, nn.CrossEntropyLoss()),
    "labels, smoothed": ((20,), 3, -1, 1, None, nn.CrossEntropyLoss(ignore_index=1, label_smoothing=0.2)),
    "tokens": ((6, 5), 3, -1, -100, "classification", flat_cross_entropy),
    "pixels": ((4, 3, 2), 3, 1, 255, None, nn.CrossEntropyLoss(ignore_index=255)),
    "answers": ((7,), 3, -1, -1, tus.likelihoods.Bernoulli(ignore_index=-1), present_answers),
    "all answers": ((7,), 3, -1, None, None, nn.BCEWithLogitsLoss()),
    "regression": ((20,), 2, -1, None, None, nn.MSELoss()),
}


@pytest.mark.parametrize("name", IGNORING)
def test_the_mean_over_labels_that_count_has_the_decays_of_the_posterior(name: str) -> None:
    """One batch of all data: the decayed loss is the negative log posterior up to its scale, whatever is ignored."""
    shape, outputs, axis, ignored, likelihood, loss = IGNORING[name]
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(*shape, 4, generator=generator)
    torch.manual_seed(0)
    routine = Routine(lr=0.0)
    routine.model = Positions(outputs, axis)
    del routine.loss
    object.__setattr__(routine, "loss", loss)  # some are plain functions
    clean = routine.model(x).detach()
    if name in ("regression", "answers", "all answers"):
        y = clean + torch.randn(clean.shape, generator=generator)
        y = y if name == "regression" else (y > 0).float()
    else:
        y = (3 * clean + torch.randn(clean.shape, generator=generator)).argmax(axis)
    y = y if ignored is None else some_ignored(y, ignored)
    callback = EvidenceWeightDecay(every_n_epochs=1, prior="per_layer", likelihood=likelihood)
    trainer = Trainer(
        callbacks=[callback], max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(routine, DataLoader(TensorDataset(x, y), batch_size=len(x)))
    parameters = dict(routine.model.named_parameters())
    record = callback.history[-1]
    f = routine.model(x)
    mean = loss(f, y)
    # the sum of the losses by hand, each written out
    if name == "regression":
        nll = 0.5 * (f - y).square().sum() / record["noise_variance"]
    elif "answers" in name:
        each = nn.functional.softplus(f) - y * f
        nll = each[y >= 0].sum()
    else:
        log_p = f.movedim(axis, -1).log_softmax(-1)
        counted = y != ignored
        nll = -log_p[counted].gather(-1, y[counted].unsqueeze(-1)).sum() * (0.8 if "smoothed" in name else 1.0)
        nll = nll - (0.2 * log_p[counted].mean(-1).sum() if "smoothed" in name else 0.0)
    ridge = sum(0.5 * record["precisions"][own.rpartition(".")[0]] * p.square().sum() for own, p in parameters.items())
    posterior = torch.autograd.grad(nll + ridge, list(parameters.values()), retain_graph=True)
    gradients = torch.autograd.grad(mean, list(parameters.values()))
    decay = {id(p): g["weight_decay"] for g in trainer.optimizers[0].param_groups for p in g["params"]}
    decayed = torch.cat([(g + decay[id(p)] * p).flatten() for g, p in zip(gradients, parameters.values(), strict=True)])
    wanted = torch.cat([g.flatten() for g in posterior])
    torch.testing.assert_close(decayed / decayed.norm(), wanted / wanted.norm(), rtol=1e-4, atol=1e-6)
    if ignored is not None:
        rows = y.numel() / int((y != ignored).sum())  # by which the decay would be wrong were rows counted
        assert rows > 1.5, "vacuous: nothing is ignored"


def test_where_all_labels_are_ignored_there_is_no_decay() -> None:
    routine = Routine(lr=0.0)
    x, y = samples()
    trainer = Trainer(
        callbacks=[EvidenceWeightDecay(every_n_epochs=1)], max_epochs=1, accelerator="cpu", devices=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match="every label of the training data is ignored"):
        trainer.fit(routine, DataLoader(TensorDataset(x, torch.full_like(y, -100)), batch_size=20))


def test_normalized_weights_have_a_precision_of_their_own() -> None:
    routine, callback = Routine(), EvidenceWeightDecay(every_n_epochs=3)
    trainer = fit(routine, callback, 3)
    groups = trainer.optimizers[0].param_groups
    normalized = next(g for g in groups if any(p is routine.model[0].weight for p in g["params"]))
    assert all(p is not routine.model[3].weight for p in normalized["params"])
    assert len({g["weight_decay"] for g in groups}) == len(groups) == len(callback.history[0]["precisions"]) > 1


def test_the_log_evidence_grows() -> None:
    routine = Routine("regression", width=30, lr=0.02)
    callback = EvidenceWeightDecay(every_n_epochs=40, prior="per_layer", hyperprior=None)
    fit(routine, callback, 240)
    evidence = [record["log_evidence"] for record in callback.history]
    assert evidence[-1] > evidence[0] + 5
    plain = Routine("regression", width=30, lr=0.02)
    only = EvidenceWeightDecay(every_n_epochs=240, prior="per_layer", hyperprior=None)
    fit(plain, only, 240)
    assert evidence[-1] > only.history[0]["log_evidence"] + 5


def test_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    whole, callback = Routine(schedule=True), EvidenceWeightDecay(every_n_epochs=2)
    keep = ModelCheckpoint(tmp_path, every_n_epochs=3, save_top_k=-1, filename="{epoch}")
    trainer = fit(whole, callback, 5, keep)
    resumed, again = Routine(schedule=True), EvidenceWeightDecay(every_n_epochs=2)
    torch.manual_seed(123)
    start = tmp_path / "epoch=2.ckpt"
    other = fit(resumed, again, 3, ModelCheckpoint(tmp_path / "other"), ckpt_path=start)
    assert [record["epoch"] for record in again.history] == [2]
    assert again.history[0]["precisions"] == callback.history[0]["precisions"]
    scale = 1 / SAMPLES
    for group in other.optimizers[0].param_groups:
        assert group["weight_decay"] == pytest.approx(scale * again.history[0]["precisions"][group["evidence_group"]])
    more = fit(
        Routine(schedule=True), again, 5, ModelCheckpoint(tmp_path / "more"), ckpt_path=tmp_path / "epoch=2.ckpt"
    )
    assert [record["epoch"] for record in again.history] == [2, 4]
    assert len(more.optimizers[0].param_groups) == len(trainer.optimizers[0].param_groups)


def test_schedules_go_on_as_they_were() -> None:
    for epochs in (1, 2, 4):
        plain, tuned = Routine(schedule=True), Routine(schedule=True)
        expected = fit(plain, EvidenceWeightDecay(every_n_epochs=100), epochs)
        found = fit(tuned, EvidenceWeightDecay(every_n_epochs=1), epochs)
        optimizer = plain.configure_optimizers()[0][0]
        assert len(found.optimizers[0].param_groups) > len(optimizer.param_groups)
        rates = {g["lr"] for g in found.optimizers[0].param_groups}
        assert (
            rates == {g["lr"] for g in expected.optimizers[0].param_groups} == {0.05 * {1: 0.5, 2: 1.0, 4: 0.1}[epochs]}
        )


def test_groups_are_split_by_label_with_all_their_options() -> None:
    a, b, c, d = (nn.Parameter(torch.zeros(2)) for _ in range(4))
    optimizer = torch.optim.SGD(
        [{"params": [("a", a), ("b", b)], "lr": 0.1, "momentum": 0.5}, {"params": [("c", c), ("d", d)], "lr": 0.2}],
        lr=1.0,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda e: 1.0, lambda e: 2.0])
    split_groups(optimizer, {id(a): "x", id(b): "y", id(c): "x"}, [scheduler])
    found = [(g["param_names"], g["lr"], g["momentum"], g["evidence_group"]) for g in optimizer.param_groups]
    assert found == [(["a"], 0.1, 0.5, "x"), (["b"], 0.1, 0.5, "y"), (["c"], 0.4, 0, "x"), (["d"], 0.4, 0, None)]
    assert scheduler.base_lrs == [0.1, 0.1, 0.2, 0.2]
    optimizer.step()
    scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.1, 0.4, 0.4]


def test_what_has_no_such_decay_is_refused() -> None:
    class Decoupled(Routine):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.model.parameters())

    class Without(Routine):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.model.parameters())

    with pytest.raises(ValueError, match="apart from the loss"):
        fit(Decoupled(), EvidenceWeightDecay(), 1)
    with pytest.raises(ValueError, match="has no weight_decay"):
        fit(Without(), EvidenceWeightDecay(), 1)
    weighted = Routine()
    weighted.loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))
    with pytest.raises(ValueError, match="say scale="):
        fit(weighted, EvidenceWeightDecay(), 1)
    for options in (
        {"evaluate_at": "map"}, {"prior": "diagonal"}, {"every_n_epochs": 0},
        {"start_epoch": -1}, {"scale": 0.0},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r".{20}"):
            EvidenceWeightDecay(**options)


def test_in_yaml() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Callback, "callback")
    options = {"every_n_epochs": 3, "prior": "single", "curvature": "diag", "hyperprior": {"std": 3.0}}
    own = {"class_path": "tu_symmetry.callbacks.EvidenceWeightDecay", "init_args": options}
    found = parser.instantiate(parser.parse_object({"callback": own})).callback
    assert (found.every_n_epochs, found.options["curvature"], found.hyperprior.std) == (3, "diag", 3.0)


def test_precisions_of_training() -> None:
    """Double precision takes the data so, too; half precision is refused before training."""
    routine, callback = Routine(), EvidenceWeightDecay(every_n_epochs=1, prior="per_layer")
    fit(routine, callback, 1, precision="64-true")
    la = tus.LinearizedLaplace(routine.model, prior="per_layer", evaluate_at="map")
    x, y = samples()
    la.fit([(x.double(), y)]).optimize_evidence()
    found = torch.tensor(list(callback.history[0]["precisions"].values()), dtype=torch.float64)
    torch.testing.assert_close(found, la.log_precision.exp())
    with pytest.raises(TypeError, match="bfloat16"):
        fit(Routine(), EvidenceWeightDecay(), 1, precision="bf16-true")
