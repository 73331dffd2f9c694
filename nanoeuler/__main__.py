# Made from book/11-fine-tuning-and-chat.md by nanoeuler.book: edit the chapter, not this file.


# %% book/11-fine-tuning-and-chat.md:1967
"""`python -m nanoeuler` and the program `nanoeuler`: the command line."""

import sys

from nanoeuler.cli import main

if __name__ == "__main__" and "ipykernel" not in sys.modules:  # a module run by hand, not a cell
    sys.exit(main())
