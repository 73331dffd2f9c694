# Made from book/f-command-line.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-face
"""A configuration with other sizes, and which one is the usual."""

import dataclasses
from typing import Any

from nanoeuler.model.config import ModelConfig


def resized(config: ModelConfig, **sizes: int) -> ModelConfig:
    """`config` with other sizes: `dim=64, n_layers=2`.

    `hidden`, if it is not given, follows `dim` by the rule of the presets: four times as much for
    gelu; 8/3 times as much for swiglu, rounded up to a multiple of 8.

    >>> import nanoeuler as ne
    >>> from nanoeuler.model.sizes import resized
    >>> resized(ne.PRESETS["small"], dim=64, n_layers=2).hidden
    176
    """
    dim, changes = sizes.get("dim", config.dim), dict[str, Any](sizes)
    if dim != config.dim:
        changes.setdefault("hidden", 4 * dim if config.mlp == "gelu" else -(-dim // 3) * 8)
    return dataclasses.replace(config, **changes)
