# Made from book/06-backprop.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-backprop-complex-step
"""Checks of gradients: the complex step (derivatives), a GPT on one page (plain), gradcheck.

May import: model, engines.
"""
