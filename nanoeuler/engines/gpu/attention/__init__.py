# Made from book/12-flash-attention.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-tiles
"""FlashAttention, forward and backward, and which of its families a card takes: choice.

tiles and reference are float32 without tensor cores, to read and to compare with; documents are
packed sequences and windows. wgmma_* is Hopper's, mma_* for every card from 8.0 on; of each family
parts, forward, backward and launch. layout and softmax are theirs together. operands says what
mma_* multiplies: bf16, or, in float32_*, float32 as a sum of two or three bf16.

May import: errors, engines.gpu.lang, engines.gpu.gemm, engines.gpu.tile.
"""
