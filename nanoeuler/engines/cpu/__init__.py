# Made from book/06a-cpu-engine.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cpu-fused
"""A CPU at full speed: loops, products, engine, stepper (a batch over the cores).

May import: compiler, measurements, model, engines.
"""
