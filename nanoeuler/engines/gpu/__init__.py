# Made from book/07-a-gpu-on-paper.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gpu-kernel
"""Kernels for a GPU: door (the only module that imports CUDA), ladder, flash_tiles, flash.

May import: model.
"""
