# Made from book/06b-sources.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-sources-digest
"""From texts to batches: catalogue, fetch, documents, docstrings, prepare, shards, batches.

May import: errors, files, model, tokenizer.
"""
