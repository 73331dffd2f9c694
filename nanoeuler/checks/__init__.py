# Made from book/06-backprop.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-backprop-complex-step
"""Checks of gradients: the complex step (derivatives) and a GPT on one page (plain).

Chapter 6a adds the check of the package's model (gradcheck).

May import: model, engines.
"""
