# Made from book/13-training-on-a-gpu.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-plan-flops
"""Before a run: counts (FLOPs and bytes), plan (hours), cards, step, ranks and exchange (GPUs),
lora (adapters), memory and gpu_memory (does it fit?), doctor (this machine).

May import: errors, measurements, model, engines.
"""
