"""Formulas as MathML, which browsers draw by themselves: pages need no script and no network."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx


def _write(self: Any, node: nodes.Element, display: str) -> None:
    formula = convert(node.astext().strip(), display=display)
    self.body.append(formula if display == "inline" else f'<div class="math">{formula}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer that ``html_math_renderer = "mathml"`` names."""
    app.add_html_math_renderer(
        "mathml",
        inline_renderers=(lambda self, node: _write(self, node, "inline"), None),
        block_renderers=(lambda self, node: _write(self, node, "block"), None),
    )
    return {"parallel_read_safe": True, "parallel_write_safe": True}
