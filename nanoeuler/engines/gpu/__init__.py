# Made from book/07-a-gpu-on-paper.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gpu-kernel
"""Kernels for a GPU: door (the only module that imports CUDA), ladder, flash_tiles, flash.

`instruction` and `kernel` are what kernels are written in and launched as, on a GPU or on paper;
`ptx`, `compile` and `device` bring them to a GPU. Tensor cores: gemm and gemm_*.

May import: errors, model.
"""
