"""Sphinx: the web pages, built from the executed notebooks, loading nothing from another host."""

import html
import re
from pathlib import Path

from docutils import nodes

project = author = html_title = "nanoeuler"
extensions = [
    "myst_nb",
    "sphinx_external_toc",
    "sphinx_copybutton",
    "sphinx-mathjax-offline",  # MathJax and its fonts, copied beside the pages
]
external_toc_path = "_toc.yml"
include_patterns = ["book/**"]
exclude_patterns = ["**/.ipynb_checkpoints"]
source_suffix = {".ipynb": "myst-nb"}  # the texts with the outputs put in: `book.pages`
nb_execution_mode = "off"  # outputs come from `book run` alone
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 3
nb_code_prompt_show = nb_code_prompt_hide = "The code"  # of a folded cell that has no other title
html_theme = "sphinx_book_theme"
html_theme_options = {"navbar_persistent": []}  # one search field, in the sidebar, is enough
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_js_files = ["formulas.js", "tables.js"]
html_favicon = "_static/icon.svg"  # Euler's steps

WIDE = 650  # pixels of a figure whose text a phone, which shows 340 of them, makes too small


def tidy(app, page):
    """Mark wide figures, take a drawing's title as its alternative text, leave docstrings out.

    A room's `__init__.py` is a cell with a docstring alone, and IPython would show that again.
    """
    for code in page.findall(nodes.literal_block):
        if re.fullmatch(r'#\| export \S+\n"""[^"]*"""\s*', code.astext()):
            cell = code.parent.parent  # its children: the input, and the output if there is one
            cell.children = cell.children[:1]
    for image in page.findall(nodes.image):
        data = Path(app.srcdir, image["uri"]).read_bytes()
        title = re.search(rb"<title>(.*?)</title>", data, re.DOTALL)
        if data.startswith(b"\x89PNG") and int.from_bytes(data[16:20], "big") > WIDE:
            image["classes"].append("wide")
        elif title and "alt" not in image:
            image["alt"] = html.unescape(title[1].decode())


def setup(app):
    """Sphinx calls this: tidy a page once it's read."""
    app.connect("doctree-read", tidy)
