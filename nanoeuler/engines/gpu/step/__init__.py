# Made from book/13a-a-step-as-a-list.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-step-arrays
"""A training step on a GPU: program (a list of launches, and its memory), matmul (which product),
precision (kinds of numbers), engine (the model's operations, recorded), recording (a whole step),
stepper (runs it), backends (our products or NVIDIA's).

May import: errors, model, engines, engines.gpu.lang, engines.gpu.host, engines.gpu.gemm,
engines.gpu.rows, engines.gpu.attention, engines.gpu.tile.
"""
