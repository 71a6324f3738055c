"""The documentation site. `make docs` builds it offline; a warning is an error."""

import os
import sys
import warnings
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS / "_ext"), str(DOCS.parent / "src")]

os.environ.setdefault("EQUIPOISE_ONNX", "0")  # examples do not export models
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(DOCS.parent / "src"), os.environ.get("PYTHONPATH", "")]))

import source_state  # of docs/_ext

from equipoise.core.version import VERSION

project, author, copyright = "Equipoise", "The Equipoise authors", "The Equipoise authors"
version = release = VERSION

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "generated_pages",
    "docstrings",
    "whole_site",
]
exclude_patterns = ["_build", "_ext", "_static", "_templates", "_cache", "README.md", "gallery/*.ipynb", "gallery/*.py",
                    "gallery/sg_execution_times.rst", "sg_execution_times.rst"]  # fmt: skip
templates_path = ["_templates"]
nitpicky = False
default_role = "code"

# Markdown and notebooks. Executed cells are kept by their content, and by the content of the library.
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
source_state.refresh(DOCS)
nb_execution_mode = os.environ.get("EQUIPOISE_DOCS_EXECUTE", "cache")
nb_execution_cache_path = str(DOCS / "_cache" / "notebooks")
nb_execution_timeout = 300
nb_execution_in_temp = True  # notebooks may write files
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True
nb_mime_priority_overrides = [("html", "text/html", 5)]

# The gallery: every script of examples/gallery is executed, and kept while it and the library are unchanged.
sphinx_gallery_conf = {
    "examples_dirs": [str(DOCS.parent / "examples" / "gallery")],
    "gallery_dirs": ["gallery"],
    "filename_pattern": r"/plot_",
    "plot_gallery": os.environ.get("EQUIPOISE_DOCS_EXECUTE", "cache") != "off",
    "abort_on_example_error": True,
    "min_reported_time": 10_000,
    "show_memory": False,
    "show_signature": False,
    "download_all_examples": False,
    "remove_config_comments": True,
    "reset_modules": ("matplotlib", "gallery_style.reset"),
    "reset_modules_order": "both",
    "image_scrapers": ("matplotlib",),
    "thumbnail_size": (400, 280),
    "image_srcset": ["2x"],
    "write_computation_times": False,
    "within_subsection_order": "FileNameSortKey",
    "nested_sections": True,
    "copyfile_regex": r".*\.csv",
}

# The reference.
autosummary_generate = False
autodoc_typehints = "description"
autodoc_typehints_format = "short"
autodoc_typehints_description_target = "all"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
add_module_names = False

# The pages.
html_theme = "furo"
html_title = f"Equipoise {VERSION}"
html_static_path = ["_static"]
html_css_files = ["equipoise.css"]
html_js_files = ["tables.js"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_favicon = "_static/favicon.svg"
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {"color-brand-primary": "#0b5c73", "color-brand-content": "#0b5c73",
                            "color-foreground-muted": "#55595f", "color-foreground-secondary": "#50565e"},
    "dark_css_variables": {"color-brand-primary": "#6cc5dd", "color-brand-content": "#6cc5dd",
                           "color-foreground-muted": "#a3a8b0", "color-foreground-secondary": "#a9b0b8"},
}  # fmt: skip
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
mathjax_path = "mathjax/tex-svg.js"
mathjax3_config = {"options": {"enableMenu": False}, "svg": {"fontCache": "global"}}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"

# What a warning is not about: a notebook's text outputs have no lexer, and headings of included changelogs start at level 2.
suppress_warnings = ["config.cache", "mystnb.unknown_mime_type", "myst.header", "misc.highlighting_failure"]
warnings.filterwarnings("ignore", category=DeprecationWarning)
