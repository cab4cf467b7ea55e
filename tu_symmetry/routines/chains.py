"""What routines that run Markov chains share: their place in checkpoints, stored samples, and tests of these."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.func import functional_call

from tu_symmetry.posterior.network import States, require_positive
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.routines.predictive import Likelihood, PredictiveRoutine
from tu_symmetry.routines.runs import StoredRun, fingerprint_of
from tu_symmetry.states import evenly

_TESTED = 100  # stored samples that a test takes


class ChainsRoutine(PredictiveRoutine):
    """A training run whose step moves Markov chains over a network's parameters, by transitions of ``chain``.

    Attributes:
        chain: what has ``state_dict`` and ``load_state_dict``; made at the first step.
    """

    method: ClassVar[str]  # in the store, and before what is logged
    checkpoint_key: ClassVar[str]

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
        self._series: list[Tensor] = []  # for each transition that counts: projections, and the potential
        self._stored: StoredRun | None = None
        self._restored: dict[str, Any] | None = None
        self._resumed = False
        self._tested: list[States] | None = None

    @abstractmethod
    def diagnostics(self) -> dict[str, float]:
        """How good the chains are, of all transitions so far that count."""

    @abstractmethod
    def _options(self) -> dict[str, Any]:
        """What a run depends on, besides the network."""

    @property
    @abstractmethod
    def _numbers(self) -> list[int]:
        """The chains' numbers in the store."""

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
        rank_zero_info("chain %s: %s", ", ".join(map(str, self._numbers)), shown)

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
            self._series = [] if series is None else list(series.cpu())

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
        if self._tested is None:
            return self._position_outputs(x)
        return torch.stack([functional_call(self.model, state, (x,), tie_weights=False) for state in self._tested])

    def _position_outputs(self, x: Tensor) -> Tensor:
        return self.model(x).unsqueeze(0)

    def _sets(self, batch: Any) -> tuple[int, int]:
        """How many training batches there are, and points."""
        dataset: Any = getattr(self.trainer.train_dataloader, "dataset", None)
        size = len(dataset) if hasattr(dataset, "__len__") else len(batch[0])
        return int(self.trainer.num_training_batches), size

    def _continue(self, chain: Any) -> Any:
        """A chain that was just made, at the place where the checkpoint has it."""
        if self._restored is not None:
            chain.load_state_dict(self._restored["chain"])
            self._restored = None
        return chain

    def _begin_storing(self, folder: Path) -> StoredRun:
        """The chains' part of the store, brought to the state of the checkpoint."""
        what = self._options() | {"nll": type(self.nll).__name__, "prior_precision": self.prior_precision}
        state = self.model.state_dict()
        architecture = type(self.model).__name__
        stored = StoredRun(
            folder,
            self._numbers,
            fingerprint_of([state], architecture=architecture, **what),
            state,
            architecture=architecture,
            method=self.method,
            seed=self.seed,
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
