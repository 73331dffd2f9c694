# Made from book/13-training-on-a-gpu.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-plan-flops
"""Before a run: counts (FLOPs and bytes), plan (hours), doctor (this machine).

May import: errors, measurements, model, engines.
"""
