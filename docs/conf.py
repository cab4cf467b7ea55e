"""Configuration of the documentation site: `make docs` builds it, with warnings as errors."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pages  # noqa: E402
from sphinx.ext.napoleon import GoogleDocstring  # noqa: E402

import tu_symmetry  # noqa: E402

project = "tu_symmetry"
author = "The tu_symmetry contributors"
project_copyright = author
release = version = tu_symmetry.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "formulas",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "_ext", "papers", "tutorials", "**/GALLERY_HEADER.rst", "sg_execution_times.rst"]
suppress_warnings = ["config.cache", "myst.header", "myst.xref_missing"]

# -- pages that are made from the code and the recipes -----------------------------------------------------------------
pages.write(HERE)

# -- Markdown ----------------------------------------------------------------------------------------------------------
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
myst_url_schemes = ["http", "https"]

# -- reference ---------------------------------------------------------------------------------------------------------
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_inherit_docstrings = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_custom_sections = ["Laws", "Warns"]
add_module_names = False


# Napoleon takes what stands before a colon in a property's first line for its type; our types are annotations.
GoogleDocstring._parse_attribute_docstring = GoogleDocstring._consume_to_end  # type: ignore[method-assign]

# -- tutorials ---------------------------------------------------------------------------------------------------------
sphinx_gallery_conf = {
    "examples_dirs": ["tutorials"],
    "gallery_dirs": ["generated/tutorials"],
    "filename_pattern": r"\.py$",
    "ignore_pattern": r"__init__\.py",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "min_reported_time": 1e9,
    "show_memory": False,
    "show_signature": False,
    "download_all_examples": False,
    "remove_config_comments": True,
    "doc_module": (),
    "reset_modules": ("matplotlib",),
}
warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
for words in (".*LeafSpec.* is deprecated", "Metric `.*` will save all targets"):  # what others say to each other
    warnings.filterwarnings("ignore", message=words)

# -- HTML --------------------------------------------------------------------------------------------------------------
html_theme = "pydata_sphinx_theme"
html_title = f"tu_symmetry {release}"
html_static_path: list[str] = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sourcelink = False
html_sidebars = {
    "mathematics": [],
    "architecture": [],
    "laplace": [],
    "glossary": [],
    "laplace_comparison": [],
    "generated/contributing": [],
    "generated/changelog": [],
}
html_theme_options = {
    "navbar_align": "left",
    "header_links_before_dropdown": 4,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "show_prev_next": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
