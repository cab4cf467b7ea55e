"""Text that ships with Python, as windows of characters: what a small language model is trained on."""

from __future__ import annotations

from typing import Any

import torch

from tu_symmetry.datamodules import ImageDataModule
from tu_symmetry.datamodules.images import Part
from tu_symmetry.datamodules.readers import DataFileError, LabeledImages


def read_topics() -> str:
    """The topics of ``help()`` in alphabetic order, every paragraph once, in printable ASCII."""
    from pydoc_data.topics import topics

    paragraphs = dict.fromkeys(part.strip("\n") for name in sorted(topics) for part in topics[name].split("\n\n"))
    text = "\n\n".join(part for part in paragraphs if part)
    return "".join(c if c == "\n" or " " <= c <= "~" else "?" for c in text)


class TopicsDataModule(ImageDataModule):
    """Characters of the documentation that ``help()`` shows; a pair is a window, and the window one character later.

    The last tenth is the test set, so that no paragraph is in both. The text is that of the running version of Python.

    Args:
        context: characters of a window; windows of a half follow each other without overlap.
        **common: the arguments of :class:`~tu_symmetry.datamodules.ImageDataModule`, whose images are windows here.
    """

    num_classes = 96
    scale = None

    def __init__(self, context: int = 64, **common: Any) -> None:
        super().__init__(**common)
        self.context, self.input_shape = context, (context,)

    def read(self, part: Part) -> LabeledImages:
        """Read a whole half; token 0 is the end of a line, the others are printable ASCII in its order."""
        if part == "ood":
            raise DataFileError("TopicsDataModule has no out-of-distribution set: leave out eval_ood")
        codes = torch.tensor(list(read_topics().encode()), device="cpu")
        tokens = torch.where(codes == ord("\n"), 0, codes - ord(" ") + 1)
        cut = len(tokens) * 9 // 10
        half = tokens[:cut] if part == "train" else tokens[cut:]
        return LabeledImages(*(t.unfold(0, self.context, self.context) for t in (half[:-1], half[1:])))
