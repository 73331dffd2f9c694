# Made from book/f-command-line.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cli
"""The command line: main, train, prefer, serve, speedrun, data, tokenizer, and pipeline, which runs
the stages in a row; flags and stdio are shared. It parses, calls the package, and prints.

May import: everything.
"""
