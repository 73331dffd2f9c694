# Made from book/10-generation.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-generation-distribution
"""A trained model at work: decoder, chat.

May import: errors, data, model, engines, training.
"""
