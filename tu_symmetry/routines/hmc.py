"""Hamiltonian Monte Carlo as a training run: a step is a transition of one chain over the full batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.func import functional_call
from torchmetrics import Metric

from tu_symmetry.posterior.compact import CompactPosterior
from tu_symmetry.posterior.hamiltonian import HamiltonianChain, RunningMoments, SignedSums, chain_diagnostics
from tu_symmetry.posterior.network import BayesianNetwork, States, categorical_nll, require_numbers, require_positive
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.routines.predictive import Likelihood, PredictiveRoutine
from tu_symmetry.routines.runs import StoredRun, fingerprint_of
from tu_symmetry.states import evenly

_STATE = "hamiltonian_monte_carlo"


class HMCRoutine(PredictiveRoutine):
    """Full-batch Hamiltonian Monte Carlo over the parameters of a network, with Pyro's kernels.

    A training step is one transition; ``trainer.max_steps`` (or ``max_epochs``, an epoch being one full batch) is the
    length of the chain, burn-in included. The potential is ``nll(model(x), y) + prior_precision / 2 * ||w||^2`` in
    nats, over the whole training set: the data module must give it as one batch without augmentation (for ours
    ``batch_size: full``). It is read once.

    The state of the chain is in every checkpoint: a run resumed with ``--ckpt_path last`` gives the chain that an
    uninterrupted run gives, bit for bit where the device's kernels are deterministic.

    Of the chain are kept: every ``thinning``-th sample in a :class:`~tu_symmetry.posterior.samples.SampleStore`, and
    of *all* transitions after the burn-in running moments of the weights, and a bounded set of quantities for the
    effective sample size and split R-hat (the potential and fixed random projections of the weights). Memory does not
    grow with the weights times the samples.

    Logged: ``hmc/acceptance`` (probability), ``hmc/accepted``, ``hmc/potential`` (nats), ``hmc/log_likelihood`` (nats
    for each training point), ``hmc/step_size``, and now and then ``hmc/ess/...`` and ``hmc/rhat/...``. Validation
    measures the chain's position, a test the stored samples as an ensemble.

    Several chains are several runs with their own ``seed`` and ``chain``; they may share one folder of samples.

    Args:
        model: the network; its own parameters are the start. It runs in ``eval`` mode.
        step_size: leapfrog step.
        leapfrog_steps: leapfrog steps of a trajectory.
        burn_in: transitions before the first sample.
        thinning: every ``thinning``-th transition after the burn-in is stored.
        stored: ``(first, last, count)``: store the transitions ``linspace(first, last, count)`` instead, counted from 0
            after the burn-in, both ends included.
        prior_precision: inverse variance of the prior of every parameter.
        nll: summed negative log-likelihood of ``(outputs, targets)`` in nats.
        kernel: ``hmc``, or ``nuts`` with ``leapfrog_steps`` chosen by itself.
        adapt_step_size: adapt the step during the burn-in (the trajectory's length stays the same).
        adapt_mass_matrix: adapt a diagonal mass matrix during the burn-in.
        target_acceptance: acceptance probability that the step is adapted to.
        max_tree_depth: bound on the depth of NUTS's trees.
        seed: seed of the chain.
        chain: number of the chain in the store.
        samples: folder of the sample store; None to store no samples.
        samples_per_file: samples in memory between two writes (checkpoints and the end write too).
        moments: file for the running moments, a compact posterior as :class:`CompactPosterior` reads it, written at
            the end; None to write none.
        projections: number of random projections.
        diagnostics_every: transitions between two logs of effective sample size and R-hat.
        num_test_samples: stored samples that a test takes, evenly spaced; None for all.
        matmul_precision: ``high`` allows TF32 on a GPU; the acceptance corrects the trajectory, not the potential.
        metrics: further metrics, see :class:`~tu_symmetry.routines.predictive.PredictiveRoutine`.

    Raises:
        ValueError: arguments out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        step_size: float = 1e-3,
        *,
        leapfrog_steps: int = 500,
        burn_in: int = 100,
        thinning: int = 1,
        stored: tuple[int, int, int] | None = None,
        prior_precision: float = 1.0,
        nll: Likelihood = categorical_nll,
        kernel: Literal["hmc", "nuts"] = "hmc",
        adapt_step_size: bool = False,
        adapt_mass_matrix: bool = False,
        target_acceptance: float = 0.8,
        max_tree_depth: int = 10,
        seed: int = 0,
        chain: int = 0,
        samples: str | Path | None = None,
        samples_per_file: int = 10,
        moments: str | Path | None = None,
        projections: int = 16,
        diagnostics_every: int = 100,
        num_test_samples: int | None = 100,
        matmul_precision: Literal["highest", "high"] = "highest",
        metrics: dict[str, Metric] | None = None,
    ) -> None:
        super().__init__(nll, metrics)
        require_positive(thinning=thinning, prior_precision=prior_precision, samples_per_file=samples_per_file)
        require_positive(projections=projections, diagnostics_every=diagnostics_every)
        require_numbers(burn_in=burn_in, step_size=step_size, leapfrog_steps=leapfrog_steps, seed=seed, chain=chain)
        if burn_in < 0:
            raise ValueError(f"burn_in must not be negative, got {burn_in}")
        if stored is not None and not (0 <= stored[0] < stored[1] and 2 <= stored[2] <= stored[1] - stored[0] + 1):
            raise ValueError(
                f"stored is (first, last, count), at least two different transitions of first..last, got {stored}"
            )
        if stored is not None and thinning != 1:
            raise ValueError("stored says which samples are stored, and so does thinning: give one of them")
        self.automatic_optimization = False
        self.model = model
        self.burn_in = burn_in
        self.thinning = thinning
        self.stored: frozenset[int] | None = None
        if stored is not None:
            first, last, count = stored
            self.stored = frozenset(first + k for k in evenly(last - first + 1, count))
        self.prior_precision = prior_precision
        adapting = adapt_step_size or adapt_mass_matrix
        self.kernel_options: dict[str, Any] = {
            "step_size": step_size,
            "leapfrog_steps": leapfrog_steps,
            "kernel": kernel,
            "warmup": burn_in if adapting else 0,
            "adapt_step_size": adapt_step_size,
            "adapt_mass_matrix": adapt_mass_matrix,
            "target_acceptance": target_acceptance,
            "max_tree_depth": max_tree_depth,
            "seed": seed,
        }
        self.chain_number = chain
        self.samples = None if samples is None else Path(samples)
        self.samples_per_file = samples_per_file
        self.moments_file = None if moments is None else Path(moments)
        self.num_projections = projections
        self.diagnostics_every = diagnostics_every
        self.num_test_samples = num_test_samples
        self.matmul_precision = matmul_precision
        self._forget()

    def _forget(self) -> None:
        self.chain: HamiltonianChain | None = None
        self.moments = RunningMoments()
        self._project: SignedSums | None = None
        self._series: list[Tensor] = []  # for each transition after the burn-in: projections, and the potential
        self._pending: list[tuple[int, States]] = []
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
        """Check the run before the first transition.

        Raises:
            ValueError: several processes, or half precision.
            FileExistsError: the folder of samples holds this chain of another run (see
                :class:`~tu_symmetry.routines.runs.StoredRun`), or the file of moments is there.
        """
        if self.trainer.world_size > 1:
            raise ValueError(
                "a chain runs on one device; give every process its own run with another seed: and chain:, into one "
                "folder of samples"
            )
        if self.trainer.precision not in ("32-true", "64-true"):
            raise ValueError(
                f"precision={self.trainer.precision!r} rounds the potential, a sum over all training points, by more "
                "than a transition may change it, so that acceptances mean nothing: take 32-true or 64-true"
            )
        if self.samples is not None:
            self._stored = self._begin_storing(self.samples)
        if self.moments_file is not None and self.moments_file.exists() and not self._resumed:
            raise FileExistsError(f"{self.moments_file} is there already; give another moments:, or move it away")

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
            },
            prog_bar=False,
        )
        self.log("acceptance", made.acceptance, prog_bar=True, logger=False)
        taken = chain.transitions - self.burn_in
        if taken > 0:
            self._keep(taken, position, made.potential)

    def on_train_end(self) -> None:
        """Write the samples that are left."""
        self._flush()

    def on_fit_end(self) -> None:
        """Write the moments, and say how good the chain is; of a fit that was resumed at its end, too."""
        if self._stored is not None:
            self._stored.finish(self.trainer.global_step)
        if not self._series:
            return
        found = self.diagnostics()
        if self.logger is not None:
            self.logger.log_metrics({f"hmc/{n}": v for n, v in found.items()}, step=self.trainer.global_step)
        rank_zero_info("chain %d: %s", self.chain_number, ", ".join(f"{n} {v:.4g}" for n, v in found.items()))
        if self.moments_file is not None and self.moments.count > 1:
            self.moments_file.parent.mkdir(parents=True, exist_ok=True)
            self.posterior().save(self.moments_file)

    def teardown(self, stage: str) -> None:
        """Write the samples that are in memory, after an exception too."""
        self._flush()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put the chain into the checkpoint, and its samples into the store."""
        self._flush()
        if self.chain is not None:
            checkpoint[_STATE] = {
                "chain": self.chain.state_dict(),
                "moments": self.moments.state_dict(),
                "series": torch.stack(self._series) if self._series else None,
                "stored": {} if self._stored is None else self._stored.state_dict(),
            }
        elif self._restored is not None:
            checkpoint[_STATE] = self._restored

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the chain from the checkpoint; it continues at the first step."""
        super().on_load_checkpoint(checkpoint)
        self._restored, self._resumed = checkpoint.get(_STATE), True
        if self._restored is not None:
            self.moments.load_state_dict(self._restored["moments"])
            series = self._restored["series"]
            self._series = [] if series is None else list(series.cpu())

    def network_states(self) -> NoReturn:
        """Refuse to stand for one network where states are read: the draws are on disk.

        Raises:
            ValueError: always, with where they are.
        """
        where = (
            "samples=FOLDER writes" if self.samples is None else f"tu_symmetry.SampleStore.open('{self.samples}') reads"
        )
        raise ValueError(
            f"a chain's networks are its draws, and not the place where it has come to: {where} them; their mean is "
            "routine.posterior().mean"
        )

    def posterior(self) -> CompactPosterior:
        """The diagonal Gaussian with the moments of all transitions after the burn-in.

        Raises:
            ValueError: fewer than two of them.
        """
        metadata = {"method": "hmc", "networks": self.moments.count, "aligned": False}
        return CompactPosterior.from_moments(self.model, self.moments.mean, self.moments.std(), metadata=metadata)

    def diagnostics(self) -> dict[str, float]:
        """Effective sample sizes and split R-hat of all transitions after the burn-in so far."""
        if not self._series:
            return {}
        series = torch.stack(self._series)
        return chain_diagnostics({"projections": series[:, :-1], "potential": series[:, -1]})

    def on_test_start(self) -> None:
        """Choose the stored samples that are measured; without a store the chain's position is."""
        self._tested = None
        if self.samples is not None:
            store = SampleStore.open(self.samples, like=self.model.state_dict())
            chosen = [store[i] for i in evenly(len(store), self.num_test_samples)]
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
        batches = self.trainer.num_training_batches
        if batches != 1:
            raise ValueError(
                f"a transition needs the whole training set, but it comes in {batches} batches: give the data module "
                "batch_size: full (or, for another data module, the number of training points)"
            )
        x, y = batch
        dataset: Any = getattr(self.trainer.train_dataloader, "dataset", None)
        size = len(dataset) if hasattr(dataset, "__len__") else len(x)
        if len(x) != size and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            raise ValueError(
                f"a transition needs the whole training set, but the batch has {len(x)} of {size} points: give the "
                "data module batch_size: full, and no limit_train_batches"
            )
        network = BayesianNetwork(self.model, x, y, self.prior_precision, self.nll, self.device)
        chain = HamiltonianChain(network, **self.kernel_options)
        self._project = SignedSums(network.parameters, self.num_projections, self.kernel_options["seed"])
        if self._restored is not None:
            chain.load_state_dict(self._restored["chain"])
            self.moments.load_state_dict(self._restored["moments"], self.device)
            self._restored = None
        return chain

    def _keep(self, taken: int, position: States, potential: float) -> None:
        assert self.chain is not None and self._project is not None
        self.moments.update(position)
        projected = self._project(position).double().cpu()
        self._series.append(torch.cat([projected, torch.tensor([potential], dtype=torch.float64, device="cpu")]))
        if taken % self.diagnostics_every == 0:
            self.log_dict({f"hmc/{name}": value for name, value in self.diagnostics().items()})
        wanted = taken % self.thinning == 0 if self.stored is None else taken - 1 in self.stored
        if self.samples is not None and wanted:
            state = {n: t[0].cpu() for n, t in self.chain.network.complete(_stacked(position)).items()}
            self._pending.append((self.chain.transitions, state))
            if len(self._pending) >= self.samples_per_file:
                self._flush()

    def _begin_storing(self, folder: Path) -> StoredRun:
        """The chain's part of the store, brought to the state of the checkpoint."""
        kept = {"burn_in": self.burn_in, "thinning": self.thinning, "stored": sorted(self.stored or ())}
        what = self.kernel_options | kept | {"nll": type(self.nll).__name__, "prior_precision": self.prior_precision}
        state = self.model.state_dict()
        stored = StoredRun(
            folder,
            [self.chain_number],
            fingerprint_of([state], architecture=type(self.model).__name__, **what),
            state,
            architecture=type(self.model).__name__,
            method="hmc",
            seed=self.kernel_options["seed"],
            prior_precision=self.prior_precision,
        )
        restored = self._restored or {}
        step = restored["chain"]["transitions"] if restored else 0
        stored.begin(self.trainer, restored.get("stored", {}) if self._resumed else None, step=step)
        return stored

    def _flush(self) -> None:
        """Append the samples in memory to the store."""
        if self._pending and self._stored is not None:
            steps, states = zip(*self._pending, strict=True)
            self._stored.append(states, chain=[self.chain_number] * len(steps), step=steps)
        self._pending = []


class TransitionOptimizer(torch.optim.Optimizer):
    """An optimizer whose step is its closure; it changes no parameter by itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        """Call the closure and return what it gives."""
        return closure()


def _stacked(state: Mapping[str, Tensor]) -> States:
    return {name: t.unsqueeze(0) for name, t in state.items()}


@contextmanager
def _matmul(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
