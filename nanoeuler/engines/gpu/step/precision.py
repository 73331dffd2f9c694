# Made from book/13a-a-step-as-a-list.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-step-primitives
"""In which kinds of numbers a step computes, and the memories that hold weights."""

from typing import NamedTuple

import numpy as np

DTYPES = {"bf16": np.uint16, "float32": np.float32}  # as what a kind is stored: NumPy lacks bf16
# Memories. WEIGHTS: masters in float32; where masters are in halves (11c), only what kernels read
# in float32. COPIES: bf16, the upper halves if there are halves. LOWER: the lower ones.
WEIGHTS, COPIES, LOWER = "weights", "copies", "lower halves"


class Precision(NamedTuple):
    """The kinds of numbers: of activations, of the stream, of its gradient.

    pieces: of float32, how many of its pieces of bf16 are multiplied. fused_rope: whether the
    product that makes heads ends in RoPE, which rounds once, if the card can; else a kernel of its
    own.
    kept: bytes. If the inputs n of all sublayers take more, none is kept, and each is made again.
    recompute: whether only each block's input is kept, and the backward pass runs it again.
    """

    kind: str = "bf16"
    stream: str = "float32"
    gradient: str = "float32"
    pieces: int = 1
    fused_rope: bool = True
    kept: int = 2 << 30  # enough for 64 sequences of euler-116m; 1.5 % of an H200's memory
    recompute: bool = False


BF16 = Precision(stream="bf16", gradient="bf16")  # what a GPU is fastest with
# By engine. float32 is multiplied in pieces of bf16: two are as exact as TF32 and more, three as
# float32 (appendix K).
PRECISIONS = {
    "cuda": BF16,
    "cuda-tf32": Precision("float32", pieces=2),
    "cuda-float32": Precision("float32", pieces=3),
}
