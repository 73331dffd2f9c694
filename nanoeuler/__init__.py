# Made from book/00-how-this-book-works.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-book-errors
"""nanoeuler: a GPT-2-scale language model, explained line by line in the book it is made from.

Importing the package imports nothing else: `from nanoeuler.model.layers import rmsnorm` as needed.
"""

__version__ = "0.1.0"
