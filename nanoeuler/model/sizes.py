# Made from book/f-command-line.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-face
"""A configuration with other sizes, and the usual vocabulary of a text."""

import dataclasses
from typing import Any

from nanoeuler.model.config import PRESET, PRESETS, ModelConfig

# Bytes below which few of 4,096 tokens would come again. 15 kB don't even have so many; the 4.7 MB
# of chapter 9c gain by them. In between nothing is measured.
SHORT_TEXT = 1_000_000


def usual_vocabulary(size: int | None) -> int:
    """How many tokens to learn from a text of `size` bytes, if nobody chose; None: unknown, large.

    That of the default preset, or for a short text that of the preset small.
    """
    short = size is not None and size < SHORT_TEXT
    return PRESETS["small" if short else PRESET].vocab_size


def resized(config: ModelConfig, **sizes: Any) -> ModelConfig:
    """`config` with other sizes or switches: `dim=64, mlp="relu2"`.

    `hidden`, if it is not given, follows `dim` and `mlp` by the rule of the presets: 8/3 times as
    much as `dim` for swiglu, rounded up to a multiple of 8; four times as much for the others.

    >>> import nanoeuler as ne
    >>> from nanoeuler.model.sizes import resized
    >>> resized(ne.PRESETS["small"], dim=64, n_layers=2).hidden
    176
    """
    changed = dataclasses.replace(config, **sizes)
    dim, gated = changed.dim, changed.mlp == "swiglu"
    if "hidden" in sizes or (dim, gated) == (config.dim, config.mlp == "swiglu"):
        return changed
    return dataclasses.replace(changed, hidden=-(-dim // 3) * 8 if gated else 4 * dim)
