# Made from book/14a-gradients-between-gpus.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-exchange-buckets
"""Several GPUs, one rank each: buckets (gradients in equal parts), exchange (reduce-scatter and
all-gather beside the step), muon (whole matrices between shards), nccl and peer_copies (who carries
them), stepper.

May import: errors, model, engines, engines.ranks, engines.gpu.lang, engines.gpu.host,
engines.gpu.rows, engines.gpu.step.
"""
