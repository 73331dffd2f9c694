# Made from book/f-command-line.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cli
"""The command line: main, train, prefer, serve, speedrun, data, tokenizer, pipeline (all of them in
a row); flags and stdio are what they share. A thin skin.

May import: everything.
"""
