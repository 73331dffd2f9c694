# Made from book/06-backprop.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-backprop-complex-step
"""What proves a gradient: derivatives (complex steps), plain (a GPT on one page), gradcheck.

May import: model, engines.
"""
