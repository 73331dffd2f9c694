# Made from book/03-euler.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-euler-step
"""What the model is: config, sizes, weights, the operations (layers, attention, backward,
integrators), and transformer, which joins them. depth changes a trained model's step or layers.

Everything here is NumPy and mathematics. How fast a step is, and on what, is the engines' affair:
the model is written over the operations of `engines.interface`, and knows nothing else of them.

May import: errors, engines.interface.
"""
