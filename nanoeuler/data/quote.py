# Made from book/c-sources.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-sources-paths
"""How an error repeats what a file or a server says: shortly, and in printable characters."""


def quoted(said: object, most: int = 100) -> str:
    """`said` as text on one line: at most `most` characters of it, unprintable ones as blanks."""
    text = "".join(c if c.isprintable() else " " for c in str(said)[: 4 * most])
    text = " ".join(text.split()) or type(said).__name__
    return text if len(text) <= most else text[: most - 3] + "..."
