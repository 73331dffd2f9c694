# Made from book/11-a-gpu.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gpu-coalescing
"""The GPU engine, a room for each part. The ladder is chapter 11's module, from a copy to a
matrix product.

    lang        what a kernel is written in, and launched as
    host        CUDA's libraries, the compiler, the device, pinned memory
    tile        what tiles of tensor-core kernels have in common: layout, curves, accumulator
    gemm        matrix products: wgmma (Hopper), mma.sync (since Ampere), float32, cuBLAS
    rows        kernels between two products: norms, activations, RoPE, loss, AdamW
    attention   FlashAttention: wgmma, mma.sync, float32, and a plain reference
    step        a training step as a recorded list of launches
    ranks       several GPUs: gradients in buckets, NCCL, copies between GPUs
    decode      one token at a time

May import: errors, engines.gpu.lang, engines.gpu.tile.
"""
