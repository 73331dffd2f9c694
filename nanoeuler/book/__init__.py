# Made from book/a-how-this-book-works.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-book-cells
"""The book's tools, which nothing else in the package needs: build (from chapters to the package
and notebooks), method (a class over several cells), markdown, syntax, and exercises (judged).

May import: errors, files.
"""
