# Made from book/11-a-gpu-on-paper.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gpu-coalescing
"""Kernels for a GPU: door (the only module that imports CUDA), ladder, flash_tiles, flash.

`instruction` and `kernel` are what kernels are written in and launched as, on a GPU or on paper;
`ptx`, `compile` and `device` bring them to a GPU, `paper` runs them without one. On tensor cores:
products in gemm and gemm_*, attention in flash_parts, flash_forward, flash_backward, flash_plan.
A training step: program, multiply, primitives, engine, step (recorded), stepper (run).

May import: errors, model, engines.
"""
