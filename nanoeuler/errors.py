# Made from book/a-how-this-book-works.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-book-errors
"""The error that a reader, rather than a programmer, is meant to see. Nothing else lives here."""


class UserError(Exception):
    """Bad input, in one line: what was expected, what came instead, and what to do about it."""
