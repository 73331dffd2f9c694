# Made from book/18-the-whole-pipeline.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-road-command
"""`python -m nanoeuler` and the program `nanoeuler`: the command line, and the whole pipeline."""

import sys

from nanoeuler.cli.main import app, main
from nanoeuler.cli.pipeline import run_pipeline

app.command("all")(run_pipeline)

if __name__ == "__main__" and "ipykernel" not in sys.modules:  # a module run by hand, not a cell
    sys.exit(main())
