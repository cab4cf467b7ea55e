"""Hamiltonian Monte Carlo as a training run: a step is a transition of one chain over the full batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.func import functional_call

from tu_symmetry.posterior.hamiltonian import HamiltonianChain, SignedSums, chain_diagnostics
from tu_symmetry.posterior.network import BayesianNetwork, States, categorical_nll, require_numbers, require_positive
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.routines.predictive import Likelihood, PredictiveRoutine
from tu_symmetry.routines.runs import StoredRun, fingerprint_of
from tu_symmetry.states import evenly

_STATE = "hamiltonian_monte_carlo"
_PROJECTIONS = 16
_TESTED = 100  # stored samples that a test takes


class HMCRoutine(PredictiveRoutine):
    """Full-batch Hamiltonian Monte Carlo over the parameters of a network, with Pyro's kernel.

    A training step is one transition; ``trainer.max_steps`` (or ``max_epochs``) is the length of the chain, burn-in
    included. The potential is ``nll(model(x), y) + prior_precision / 2 * ||w||^2`` in nats, over the whole training
    set, which the data module must give as one batch without augmentation (``batch_size: full``). The chain is in every
    checkpoint.

    Logged: ``hmc/acceptance`` (probability), ``hmc/accepted``, ``hmc/potential`` (nats), ``hmc/log_likelihood`` (nats
    for each training point), ``hmc/step_size``, and at the end effective sample sizes and split R-hat of the potential
    and of random projections of the weights, ``hmc/ess/...`` and ``hmc/rhat/...``. Validation measures the chain's
    position, a test 100 stored samples, evenly spaced. Several chains are several runs with own ``seed`` and ``chain``.

    Args:
        model: the network; its own parameters are the start. It runs in ``eval`` mode.
        step_size, leapfrog_steps: of a trajectory.
        burn_in: transitions before the first sample.
        stored: ``(first, last, count)``: of the transitions after the burn-in store only ``linspace`` of these.
        prior_precision: inverse variance of the prior of every parameter.
        nll: summed negative log-likelihood of ``(outputs, targets)`` in nats.
        adapt_step_size: adapt the step during the burn-in to an acceptance of 0.8 (the trajectory's length stays).
        seed, chain: seed of the chain, and its number in the store.
        samples: folder of the :class:`~tu_symmetry.posterior.samples.SampleStore`; None to store no samples.
        matmul_precision: ``high`` allows TF32 on a GPU; the acceptance corrects the trajectory, not the potential.
    """

    def __init__(
        self,
        model: nn.Module,
        step_size: float = 1e-3,
        *,
        leapfrog_steps: int = 500,
        burn_in: int = 100,
        stored: tuple[int, int, int] | None = None,
        prior_precision: float = 1.0,
        nll: Likelihood = categorical_nll,
        adapt_step_size: bool = False,
        seed: int = 0,
        chain: int = 0,
        samples: str | Path | None = None,
        matmul_precision: Literal["highest", "high"] = "highest",
    ) -> None:
        super().__init__(nll)
        require_positive(prior_precision=prior_precision)
        require_numbers(burn_in=burn_in, step_size=step_size, leapfrog_steps=leapfrog_steps, seed=seed, chain=chain)
        if burn_in < 0:
            raise ValueError(f"burn_in must not be negative, got {burn_in}")
        if stored is not None and not (0 <= stored[0] < stored[1] and 2 <= stored[2] <= stored[1] - stored[0] + 1):
            raise ValueError(f"stored is (first, last, count), at least two transitions of first..last, got {stored}")
        self.automatic_optimization = False
        self.model, self.burn_in, self.prior_precision = model, burn_in, prior_precision
        self.stored = None if stored is None else {stored[0] + k for k in evenly(stored[1] - stored[0] + 1, stored[2])}
        self.kernel_options: dict[str, Any] = {
            "step_size": step_size,
            "leapfrog_steps": leapfrog_steps,
            "warmup": burn_in,
            "adapt_step_size": adapt_step_size,
            "seed": seed,
        }
        self.chain_number, self.matmul_precision = chain, matmul_precision
        self.samples = None if samples is None else Path(samples)
        self._forget()

    def _forget(self) -> None:
        self.chain: HamiltonianChain | None = None
        self._project: SignedSums | None = None
        self._series: list[Tensor] = []  # for each transition after the burn-in: projections, and the potential
        self._stored: StoredRun | None = None
        self._restored: dict[str, Any] | None = None
        self._resumed = False
        self._tested: list[States] | None = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One whose step is a transition, so that Lightning counts transitions as steps."""
        return TransitionOptimizer(self.parameters())

    def setup(self, stage: str) -> None:
        """Start anew with a new fit (a checkpoint is loaded after this)."""
        if stage == "fit":
            self._forget()

    def on_fit_start(self) -> None:
        """Check the run before the first transition."""
        if self.trainer.world_size > 1:
            raise ValueError("a chain runs on one device: give every process its own run with another seed: and chain:")
        if self.trainer.precision not in ("32-true", "64-true"):
            raise ValueError(
                f"precision={self.trainer.precision!r} rounds the potential by more than a transition may change it: "
                "acceptances mean nothing; take 32-true or 64-true"
            )
        if self.samples is not None:
            self._stored = self._begin_storing(self.samples)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Make one transition."""
        if self.chain is None:
            self.chain = self._begin(batch)
        chain = self.chain
        optimizer: Any = self.optimizers()
        with _matmul(self.matmul_precision):
            made = optimizer.step(closure=chain.step)
        position = chain.position
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(position[name])
        penalty = float(chain.network.penalty(position))
        self.log_dict(
            {
                "hmc/acceptance": made.acceptance,
                "hmc/accepted": float(made.accepted),
                "hmc/potential": made.potential,
                "hmc/log_likelihood": (penalty - made.potential) / len(chain.network.x),
                "hmc/step_size": made.step_size,
            }
        )
        self.log("acceptance", made.acceptance, prog_bar=True, logger=False)
        taken = chain.transitions - self.burn_in
        if taken > 0:
            self._keep(taken, position, made.potential)

    def on_fit_end(self) -> None:
        """Say how good the chain is, of a fit that was resumed at its end, too."""
        if self._stored is not None:
            self._stored.finish()
        if not self._series:
            return
        found = self.diagnostics()
        if self.logger is not None:
            self.logger.log_metrics({f"hmc/{n}": v for n, v in found.items()}, step=self.trainer.global_step)
        rank_zero_info("chain %d: %s", self.chain_number, ", ".join(f"{n} {v:.4g}" for n, v in found.items()))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put the chain into the checkpoint."""
        if self.chain is not None:
            checkpoint[_STATE] = {
                "chain": self.chain.state_dict(),
                "series": torch.stack(self._series) if self._series else None,
                "stored": {} if self._stored is None else self._stored.state_dict(),
            }
        elif self._restored is not None:
            checkpoint[_STATE] = self._restored

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the chain from the checkpoint; it continues at the first step."""
        self._restored, self._resumed = checkpoint.get(_STATE), True
        if self._restored is not None:
            series = self._restored["series"]
            self._series = [] if series is None else list(series.cpu())

    def network_states(self) -> NoReturn:
        """Refuse to stand for one network where states are read: the draws are on disk."""
        reads = f"tu_symmetry.SampleStore.open('{self.samples}') reads"
        where = "samples=FOLDER writes" if self.samples is None else reads
        raise ValueError(f"a chain's networks are its draws, and not the place where it has come to: {where} them")

    def diagnostics(self) -> dict[str, float]:
        """Effective sample sizes and split R-hat of all transitions after the burn-in so far."""
        series = torch.stack(self._series)
        return chain_diagnostics({"projections": series[:, :-1], "potential": series[:, -1]})

    def on_test_start(self) -> None:
        """Choose the stored samples that are measured; without a store the chain's position is."""
        self._tested = None
        if self.samples is not None:
            store = SampleStore.open(self.samples, like=self.model.state_dict())
            chosen = [store[i] for i in evenly(len(store), _TESTED)]
            self._tested = [{n: t.to(self.device) for n, t in state.items()} for state in chosen]
            rank_zero_info("testing %d samples of %s", len(chosen), self.samples)

    def on_test_end(self) -> None:
        """Let go of the samples."""
        self._tested = None

    on_predict_start, on_predict_end = on_test_start, on_test_end

    def member_outputs(self, x: Tensor) -> Tensor:
        """Outputs ``(samples, B, ...)`` of the stored samples in a test, else of the chain's position."""
        self.model.eval()
        if self._tested is None:
            return self.model(x).unsqueeze(0)
        return torch.stack([functional_call(self.model, state, (x,), tie_weights=False) for state in self._tested])

    def _begin(self, batch: Any) -> HamiltonianChain:
        x, y = batch
        batches = self.trainer.num_training_batches
        dataset: Any = getattr(self.trainer.train_dataloader, "dataset", None)
        size = len(dataset) if hasattr(dataset, "__len__") else len(x)
        if batches != 1 or len(x) != size:
            raise ValueError(
                f"a transition needs the whole training set, but it comes in {batches} batches, and this one has "
                f"{len(x)} of {size} points: give the data module batch_size: full, and no limit_train_batches"
            )
        network = BayesianNetwork(self.model, x, y, self.prior_precision, self.nll, self.device)
        chain = HamiltonianChain(network, **self.kernel_options)
        self._project = SignedSums(network.parameters, _PROJECTIONS, self.kernel_options["seed"])
        if self._restored is not None:
            chain.load_state_dict(self._restored["chain"])
            self._restored = None
        return chain

    def _keep(self, taken: int, position: States, potential: float) -> None:
        assert self.chain is not None and self._project is not None
        projected = self._project(position).double().cpu()
        self._series.append(torch.cat([projected, torch.tensor([potential], dtype=torch.float64, device="cpu")]))
        if self._stored is not None and (self.stored is None or taken - 1 in self.stored):
            state = self.chain.network.complete(position)
            self._stored.append([state], chain=[self.chain_number], step=[self.chain.transitions])

    def _begin_storing(self, folder: Path) -> StoredRun:
        """The chain's part of the store, brought to the state of the checkpoint."""
        what = self.kernel_options | {
            "burn_in": self.burn_in,
            "stored": sorted(self.stored or ()),
            "nll": type(self.nll).__name__,
            "prior_precision": self.prior_precision,
        }
        state = self.model.state_dict()
        architecture = type(self.model).__name__
        stored = StoredRun(
            folder,
            [self.chain_number],
            fingerprint_of([state], architecture=architecture, **what),
            state,
            architecture=architecture,
            method="hmc",
            seed=self.kernel_options["seed"],
            prior_precision=self.prior_precision,
        )
        restored = self._restored or {}
        step = restored["chain"]["transitions"] if restored else 0
        stored.begin(self.trainer, restored.get("stored", {}) if self._resumed else None, step=step)
        return stored


class TransitionOptimizer(torch.optim.Optimizer):
    """An optimizer whose step is its closure; it changes no parameter by itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        """Call the closure and return what it gives."""
        return closure()


@contextmanager
def _matmul(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
