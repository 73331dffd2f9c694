# Made from book/06-backprop.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-backprop-complex-step
"""What proves a gradient: derivatives (complex steps), gradcheck (of the whole model).

May import: model, engines.
"""
