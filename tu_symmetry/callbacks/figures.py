"""Figures of callbacks, for those loggers of a trainer that take images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

Draw = Callable[[], tuple[Any, Any]]


def log_figure(trainer: Trainer, name: str, draw: Draw) -> int:
    """Draw a figure, if a logger of the trainer takes any, and give it to each that does.

    These are TensorBoard (``add_figure``), Weights & Biases (``log_image``), MLflow and Comet (``log_figure``). Nothing
    is drawn for others, such as CSV files.

    Args:
        trainer: whose loggers.
        name: what loggers call the figure, as ``scale/layers``.
        draw: makes the figure, as the functions of :mod:`tu_symmetry.plot` do.

    Returns:
        The number of loggers that took it.
    """
    takers = [taker for logger in trainer.loggers if (taker := _taker(logger, name, trainer.global_step)) is not None]
    if not takers or not trainer.is_global_zero:
        return 0
    from matplotlib import pyplot as plt

    figure, _ = draw()
    try:
        for take in takers:
            take(figure)
    finally:
        plt.close(figure)
    return len(takers)


def _taker(logger: Any, name: str, step: int) -> Callable[[Any], Any] | None:
    """What a logger does with a figure; None if it takes none."""
    kind = type(logger).__name__
    if hasattr(logger, "log_image"):
        return lambda figure: logger.log_image(key=name, images=[figure], step=step)
    experiment: Any = getattr(logger, "experiment", None)
    if hasattr(experiment, "add_figure"):
        return lambda figure: experiment.add_figure(name, figure, global_step=step, close=False)
    if kind == "MLFlowLogger":
        return lambda figure: experiment.log_figure(logger.run_id, figure, f"{name}_{step:08d}.png")
    if kind == "CometLogger":
        return lambda figure: experiment.log_figure(figure_name=name, figure=figure, step=step)
    return None
