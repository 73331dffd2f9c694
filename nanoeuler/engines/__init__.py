# Made from book/06a-engines.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-backprop-engine
"""Who does the work: interface (what an engine is), reference (in NumPy), registry, sharding.

`cpu` is for processors, `gpu` for graphics cards, `ranks` for many processes. Engines know nothing
of training or of text.

May import: errors, model, engines.cpu.
"""
