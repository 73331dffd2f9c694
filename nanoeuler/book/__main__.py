# Made from book/a-how-this-book-works.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-book-commands
"""`python -m nanoeuler.book`."""

from nanoeuler.book.build import main

if __name__ == "__main__" and __package__:  # run as a program, not as a cell
    main()
