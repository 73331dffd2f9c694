# Made from book/q-token-on-a-gpu.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gputoken-products
"""One token at a time: gemv (a matrix times few vectors), attention (one query over the cache),
sampling (embed a token, take the likeliest), decoder (the pass, and the reader of a text).

May import: errors, model, engines.gpu.lang, engines.gpu.rows, engines.gpu.step, engines.gpu.tile.
"""
