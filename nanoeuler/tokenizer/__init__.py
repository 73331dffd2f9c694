# Made from book/02-tokens.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-tokenizer-hand
"""Text to ids and back: plain, words, encode, learn, tokenizer, its file, imports.

May import: jit, errors, files, measurements.
"""
