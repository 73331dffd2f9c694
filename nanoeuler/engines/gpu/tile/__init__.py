# Made from book/i-machine-code.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-tile
"""What tiles of all tensor-core kernels have in common: functions that a kernel calls.

layout: where an element stands in shared memory, and which lane holds it. curves: activation
functions and their slopes. accumulator: what is done with sums before they leave the registers.
rope: heads turned there. ring: stages in turn. store: sums to a box that the copy engine takes.

May import: errors, model, engines.gpu.lang.
"""
