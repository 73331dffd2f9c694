# Made from book/03-euler.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-euler-step
"""What the model is: config, sizes, weights, the operations (layers, attention, backward,
integrators), and transformer, which joins them. depth gives a trained model finer or coarser steps,
or another integrator.

Everything here is NumPy and mathematics. The engines decide how fast these operations run, and on
which device: the model calls them by `engines.interface` and knows nothing else of engines.

May import: errors, engines.interface.
"""
