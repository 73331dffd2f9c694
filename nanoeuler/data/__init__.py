# Made from book/c-sources.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-sources-paths
"""From texts to batches: catalogue, fetch, documents, text, prepare, prepared, shards, batches.

May import: errors, files, model, paths, progress, tokenizer.
"""
