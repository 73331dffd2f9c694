# Made from book/i-machine-code.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-tile
"""Tiles of all tensor-core kernels: functions that a kernel calls.

layout: an element's place in shared memory, and the lane that holds it. curves: activation
functions and their slopes. accumulator: epilogues, operations on sums in registers. rope: rotary
position embedding of heads in registers. ring: stages in turn. store: sums to a box that the copy
engine takes.

May import: errors, model, engines.gpu.lang.
"""
