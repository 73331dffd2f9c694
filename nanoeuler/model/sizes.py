# Made from book/f-command-line.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-face
"""A configuration with other sizes."""

import dataclasses
from typing import Any

from nanoeuler.model.config import ModelConfig


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
