# Made from book/10-cpu-engine.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cpu-fused
"""A CPU at full speed: elementwise and norms (loops), gemm (products), engine, stepper.

Kernels are compiled with `options`, products are written in `llvm`, arrays live in `memory`, and
`ladder` holds plain products to compare with. Appendix P adds `packing`, `laying` and `decode`.

May import: jit, measurements, model, engines.
"""
