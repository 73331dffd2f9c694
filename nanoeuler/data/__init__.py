# Made from book/c-sources.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-sources-paths
"""From texts to batches: catalogue, download, fetch, documents, docstrings (the embedded corpus),
conversations, text, prepare, dataset (what it made), shards, batches, validation (held-out text);
of a whole collection wrapped (its lines), words, cleaning, collection (its files), corpus.

May import: errors, files, jit, measurements, model, paths, progress, tokenizer.
"""
