"""Sphinx: the web pages, built from the executed notebooks, loading nothing from another host."""

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
html_theme = "sphinx_book_theme"
html_theme_options = {"navbar_persistent": []}  # one search field, in the sidebar, is enough
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_favicon = "_static/icon.svg"  # Euler's steps
