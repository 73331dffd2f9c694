# Made from book/03-euler.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-euler-step
"""What the model is: config, sizes, weights, stored (weights in a mapped file), the operations
(layers, modern, attention, backward, integrators), transformer (all of them together), lora
(low-rank adapters), and depth (a model with finer or coarser steps, or another integrator).

No library but NumPy is used here. The engines decide how fast these operations run, and on
which device. The model imports no engine, only what all have in common, `engines.interface`.

May import: errors, engines.interface.
"""
