# Made from book/i-machine-code.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-mma
"""Matrix products, and the choice of one for a card (`choice`).

wgmma_* are Hopper's: form (tile and epilogue as data), schedule (which block does what), kernel,
epilogue, rope, split_k, launch, batch (Muon's). mma_* are for every card from 8.0 on: form, tile,
kernel, epilogue, launch. Both use epilogue (names, and what may come with each) and column_sums.
float32 splits an operand into bf16 summands, mma_floats does it in registers; cublas is NVIDIA's
library.

May import: errors, engines.gpu.lang, engines.gpu.tile, engines.gpu.host.
"""
