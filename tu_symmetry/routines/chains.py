"""What routines that run Markov chains share: their place in checkpoints, stored samples, and tests of these."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.func import functional_call

from tu_symmetry.posterior.hamiltonian import SignedSums, chain_diagnostics
from tu_symmetry.posterior.network import BayesianNetwork, States, require_positive
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.routines.predictive import Likelihood, PredictiveRoutine, training_points
from tu_symmetry.routines.runs import StoredRun, fingerprint_of
from tu_symmetry.states import evenly

_TESTED = 100  # stored samples that a test takes
_PROJECTIONS = 16


class ChainsRoutine(PredictiveRoutine):
    """A training run whose step moves Markov chains over a network's parameters, by transitions of ``chain``.

    Attributes:
        chain: what :meth:`_made` makes at the first step: it has ``network``, ``transitions``, ``state_dict`` and
            ``load_state_dict``.
        numbers: the chains' numbers in the store.
        options: what a run depends on, besides the network.
        needs_all: why a batch has to be all data; empty where it may be a part of them.
    """

    method: ClassVar[str]  # in the store, and before what is logged
    checkpoint_key: ClassVar[str]
    numbers: Sequence[int]
    options: dict[str, Any]
    needs_all: str

    def __init__(
        self, model: nn.Module, nll: Likelihood, prior_precision: float, seed: int, samples: str | Path | None
    ) -> None:
        super().__init__(nll)
        require_positive(prior_precision=prior_precision)
        self.automatic_optimization = False
        self.model, self.prior_precision, self.seed = model, prior_precision, seed
        self.samples = None if samples is None else Path(samples)
        self._forget()

    def _forget(self) -> None:
        self.chain: Any = None
        self._project: SignedSums | None = None
        self._series: list[Tensor] = []  # for each draw: projections and the potential of each chain
        self._stored: StoredRun | None = None
        self._restored: dict[str, Any] | None = None
        self._resumed = False
        self._tested: list[States] | None = None

    @abstractmethod
    def _made(self, network: BayesianNetwork) -> Any:
        """The chains at their start."""

    @abstractmethod
    def _move(self, batch: Any | None) -> dict[str, Any]:
        """Make transitions by a batch, or by all data, keep what counts, and return what is logged."""

    @abstractmethod
    def _positions(self) -> list[States]:
        """The parameters that each chain is at."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Make the transitions of one batch."""
        x, y = batch
        batches, points = self.trainer.num_training_batches, training_points(self.trainer)
        whole = batches == 1 and len(x) == points
        if self.needs_all and not whole:
            raise ValueError(
                f"{self.needs_all}, but the training set comes in {batches} batches, and this one has {len(x)} of "
                f"{points} points: give the data module batch_size: full, and no limit_train_batches"
            )
        if self.chain is None:
            network = BayesianNetwork(self.model, x, y, self.prior_precision, self.nll, self.device, points=points)
            self._project = SignedSums(network.parameters, _PROJECTIONS, self.seed)
            self.chain = self._made(network)
            if self._restored is not None:
                self.chain.load_state_dict(self._restored["chain"])
                self._restored = None
        optimizer: Any = self.optimizers()
        found = optimizer.step(closure=lambda: self._move(None if whole else batch))
        first = self._positions()[0]
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(first[name])
        self.log_dict({f"{self.method}/{name}": value for name, value in found.items()})

    def _keep(self, potential: Tensor, *, store: bool = True) -> None:
        """Take the positions, whose potentials are ``[chains]``, as draws."""
        assert self._project is not None
        states = self._positions()
        projected = torch.stack([self._project(state) for state in states])
        self._series.append(torch.cat([projected.double(), potential[:, None].to(projected.device)], 1).cpu())
        if store and self._stored is not None:
            whole = [self.chain.network.complete(state) for state in states]
            self._stored.append(whole, chain=self.numbers, step=[self.chain.transitions] * len(whole))

    def diagnostics(self) -> dict[str, float]:
        """Effective sample sizes within chains, and split R-hat over all of them, of the draws so far."""
        series = torch.stack(self._series)
        return chain_diagnostics({"projections": series[..., :-1], "potential": series[..., -1]})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One whose step is its closure, a transition, so that Lightning counts transitions as steps."""
        return torch.optim.SGD(self.parameters(), lr=0.0)

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
            what = self.options | {"nll": type(self.nll).__name__, "prior_precision": self.prior_precision}
            state, architecture = self.model.state_dict(), type(self.model).__name__
            metadata = {"method": self.method, "seed": self.seed, "prior_precision": self.prior_precision}
            run = fingerprint_of([state], architecture=architecture, **what)
            self._stored = StoredRun(self.samples, self.numbers, run, state, architecture=architecture, **metadata)
            restored = self._restored or {}
            step = restored["chain"]["transitions"] if restored else 0
            self._stored.begin(self.trainer, restored.get("stored", {}) if self._resumed else None, step=step)

    def on_fit_end(self) -> None:
        """Say how good the chains are, of a fit that was resumed at its end, too."""
        if self._stored is not None:
            self._stored.finish()
        if not self._series:
            return
        found = self.diagnostics()
        if self.logger is not None:
            named = {f"{self.method}/{n}": v for n, v in found.items()}
            self.logger.log_metrics(named, step=self.trainer.global_step)
        shown = ", ".join(f"{n} {v:.4g}" for n, v in found.items())
        rank_zero_info("chain %s: %s", ", ".join(map(str, self.numbers)), shown)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put the chains into the checkpoint."""
        if self.chain is not None:
            checkpoint[self.checkpoint_key] = {
                "chain": self.chain.state_dict(),
                "series": torch.stack(self._series) if self._series else None,
                "stored": {} if self._stored is None else self._stored.state_dict(),
            }
        elif self._restored is not None:
            checkpoint[self.checkpoint_key] = self._restored

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the chains from the checkpoint; they continue at the first step."""
        self._restored, self._resumed = checkpoint.get(self.checkpoint_key), True
        if self._restored is not None:
            series = self._restored["series"]
            self._series = [] if series is None else list(series.cpu().view(len(series), len(self.numbers), -1))

    def network_states(self) -> NoReturn:
        """Refuse to stand for one network where states are read: the draws are on disk."""
        reads = f"tu_symmetry.SampleStore.open('{self.samples}') reads"
        where = "samples=FOLDER writes" if self.samples is None else reads
        raise ValueError(f"a chain's networks are its draws, and not the place where it has come to: {where} them")

    def on_test_start(self) -> None:
        """Choose the stored samples that are measured; without a store the chains' positions are."""
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
        """Outputs ``(samples, B, ...)`` of the stored samples in a test, else of the chains' positions."""
        self.model.eval()
        tested = self._tested
        states = tested or ([{}] if self.chain is None else self._positions())
        return torch.stack([functional_call(self.model, one, (x,), tie_weights=tested is None) for one in states])
