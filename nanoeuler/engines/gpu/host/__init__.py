# Made from book/11-a-gpu.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gpu-door
"""The side of the processor: libraries (the only module that imports CUDA), compile (Python to
machine code), cache (machine code kept on disk), device (memory, launches, graphs), staging
(pinned memory between host and GPU).

May import: errors, files, paths, engines.gpu.lang.
"""
