# Made from book/r-server.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-serve-attention
"""Attention maps of one layer for the tokens of a text, for the page.

H query heads, T tokens.
"""

import base64
from typing import Any

import numpy as np

from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.transformer import stream
from nanoeuler.model.weights import Weights
from nanoeuler.serve.request import Refusal, fields_of
from nanoeuler.tokenizer.tokenizer import Tokenizer

LOOKED = 256  # newest tokens in a map, which then fits a phone's screen


def attention_maps(
    config: ModelConfig, weights: Weights, ids: list[int], layer: int
) -> np.ndarray:
    """The attention probabilities (H, T, T) of the layer's first stage."""
    _, saved = stream(ReferenceEngine(), config, weights, np.array([ids]))
    return saved.layers[layer][0][0].saved.p[0]


def look(
    body: bytes, config: ModelConfig, weights: Weights, tokenizer: Tokenizer
) -> dict[str, Any]:
    """The answer to {"ids": [...], "layer": N}: the texts of the newest tokens, and their maps.

    maps: H x T x T bytes in base64, each 255 times the square root of a probability.
    """
    said = fields_of(body)
    ids, layer = said.get("ids"), said.get("layer", 0)
    whole = isinstance(ids, list) and bool(ids) and all(type(i) is int for i in ids)
    if not (whole and 0 <= min(ids) <= max(ids) < config.vocab_size):
        raise Refusal(f"expected ids, a list of them below {config.vocab_size}", 400, "ids")
    if type(layer) is not int or not 0 <= layer < config.n_layers:
        raise Refusal(f"expected a layer from 0 to {config.n_layers - 1}", 400, "layer")
    ids = ids[-min(LOOKED, config.context) :]
    maps = attention_maps(config, weights, ids, layer)
    shares = np.round(255 * np.sqrt(maps)).astype(np.uint8)
    return {"layer": layer, "heads": len(maps), "size": len(ids),
            "tokens": [tokenizer.decode_text([i]) for i in ids],
            "maps": base64.b64encode(shares.tobytes()).decode()}  # fmt: skip
