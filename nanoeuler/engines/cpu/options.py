# Made from book/10-cpu-engine.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cpu-fused
"""What numba is told when it compiles a kernel of the CPU engine, or a part of one.

And `LOSS_ROWS` for chapter 13's planning, which then needs no compiler.
"""

import numpy as np

F32 = np.float32  # a bare 1.0 in a kernel would be a float64, and drag its whole line along
# What LLVM may do: reorder a sum (into vector lanes), make one instruction of a product and a sum,
# multiply by a reciprocal, ignore the sign of zero. Not nnan, not ninf, by which it could assume
# that there is no NaN and no infinity: a loss that diverges must be seen to.
_FAST = {"reassoc", "contract", "arcp", "nsz"}
# Of what Python calls.
KERNEL = {"nogil": True, "cache": True, "error_model": "numpy", "fastmath": _FAST}
# Of what kernels call: each kernel has its own copy inside. A function that stays outside would be
# another one in the process that compiles it than in those that find the kernel in the cache.
PART = {"error_model": "numpy", "fastmath": _FAST, "forceinline": True}
# Positions whose logits are held at a time: as many as the tokens of a shard, SHARD_TOKENS.
LOSS_ROWS = 256
