# Made from book/12-command-line.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cli-doctor
"""`python -m nanoeuler` and the program `nanoeuler`: the command line."""

import sys

from nanoeuler.cli.main import main

if __name__ == "__main__" and "ipykernel" not in sys.modules:  # a module run by hand, not a cell
    sys.exit(main())
