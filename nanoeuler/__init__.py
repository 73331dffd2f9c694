# Made from book/00-how-this-book-works.md by nanoeuler.book: edit the chapter, not this file.


# %% book/00-how-this-book-works.md:72
"""nanoeuler: a GPT-2-scale language model, explained line by line in the book it is made from.

Importing the package imports nothing else: `from nanoeuler.layers import rmsnorm` as needed.
"""

from importlib import metadata

__version__ = metadata.version("nanoeuler")
