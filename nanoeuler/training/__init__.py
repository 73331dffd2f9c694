# Made from book/07-the-first-run.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-train-adamw
"""Training: optim and muon, run (what a run is), folder and checkpoint (on disk), throughput, best,
anomaly (which tensor is not finite), display, loop, train; sft and lora (fine-tuning), preferences
and dpo; clock and speedrun (a race).

May import: jit, errors, files, measurements, progress, tokenizer, data, model, engines.
"""
