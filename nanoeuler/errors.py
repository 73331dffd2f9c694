# Made from book/a-how-this-book-works.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-book-errors
"""The error that is meant for a user rather than for a programmer, and how it quotes input."""


class UserError(Exception):
    """Bad input, in one sentence: what was expected, what came instead, and what to do."""


def quoted(said: object, most: int = 100) -> str:
    """`said` as text on one line: at most `most` characters of it, unprintable ones as blanks."""
    text = "".join(c if c.isprintable() else " " for c in str(said)[: 4 * most])
    text = " ".join(text.split()) or type(said).__name__
    return text if len(text) <= most else text[: most - 3] + "..."
