# Made from book/10-cpu-engine.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cpu-fused
"""A CPU at full speed: loops and norms, products, engine, stepper (a batch over the cores).

Kernels are compiled with `options`, products are written in `llvm`, arrays live in `memory`;
`primitives` are the engine's single operations, `ladder` holds plain products to compare with.

May import: jit, measurements, model, engines.
"""
