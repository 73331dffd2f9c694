# Made from book/07-the-first-run.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-train-adamw
"""Training: optim, run (what a run is), folder and saves (on disk), blame, display, pace, best,
loop, train.

May import: jit, errors, files, measurements, progress, tokenizer, data, model, engines.
"""
