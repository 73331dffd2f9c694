# Made from book/g-gpu-emulator.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-paper-instruction
"""What kernels are written in: instruction (how one is defined), ptx (those of every card), hopper
(those of Hopper), views and bf16 (arrays), vectors (16 bytes of a row at a time), kernel (a kernel
and its launch), card (limits).

May import: errors.
"""
