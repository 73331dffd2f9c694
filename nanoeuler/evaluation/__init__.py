# Made from book/20-is-it-any-good.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-eval-items
"""Scores on tasks that the field shares: items (what a task asks), likelihood (of continuations),
tasks (which there are, and how their files are read), scores (accuracies, perplexities and their
standard errors), judge (whole tasks, resumable).

May import: errors, files, measurements, engines, model, tokenizer.
"""
