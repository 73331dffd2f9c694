# Made from book/j-row-kernels.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-rows-vectors
"""Memory-bound kernels between two products: a warp or a block takes a row at a time.

block_reduce; residual_norm and its backward; activations (GELU,
SwiGLU); rope; embedding; column_sums (gradients of biases); cross_entropy; gradient_norm; adamw;
muon; fill (a constant, a bias); soft_cap; likeliest; lora_merge.

May import: errors, model, engines.gpu.lang, engines.gpu.tile.
"""
