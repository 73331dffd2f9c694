# Made from book/15-generation.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-generation-distribution
"""A trained model at work: sampling (which token comes next), decoder (the loop), speculative
(guessing ahead), backends (which engine computes), model, evaluate, chat, repl.

May import: errors, data, tokenizer, model, engines, training.
"""
