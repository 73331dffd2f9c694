# Made from book/03-euler.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-euler-step
"""What the model is: config, sizes, weights, the operations (layers, attention, backward,
integrators), transformer (all of them together), and depth (a trained model with finer or coarser
steps, or another integrator).

Everything here is NumPy and mathematics. The engines decide how fast these operations run, and on
which device. The model knows no engine, only what all of them have in common, `engines.interface`.

May import: errors, engines.interface.
"""
