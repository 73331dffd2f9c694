# Made from book/12-flash-attention.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-tiles
"""FlashAttention, forward and backward, for every card from capability 8.0 on.

`tiles` (NumPy) and `reference` (float32 kernels) are to read and to compare with. `wgmma_*` is for
Hopper, `mma_*` for every card; `choice` picks one. Both have modules `parts`, `forward`, `backward`
and `launch`, and use `layout` and `softmax`. `operands` says what `mma_*` multiplies: bf16, or, in
`float32_*`, each float32 cut into two or three bf16. `documents` has packed sequences and windows.

May import: errors, engines.gpu.lang, engines.gpu.gemm, engines.gpu.tile.
"""
