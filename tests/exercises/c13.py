"""Wrong answers to the exercises of chapter 13: each must be refused by its check."""

from dataclasses import replace

import numpy as np

from nanoeuler.model.config import PRESETS
from nanoeuler.planning.counts import flops_per_token, linear_shapes, stages

CHAPTER = "13-training-on-a-gpu"
NAMES = dict(
    np=np,
    replace=replace,
    PRESETS=PRESETS,
    small=PRESETS["small"],
    large=PRESETS["euler-116m"],
    flops_per_token=flops_per_token,
    linear_shapes=linear_shapes,
    stages=stages,
)

ATTENTION = "stages(config) * config.n_layers * config.n_heads * config.head_dim"
# (exercise, what is wrong, text of the solution, what it becomes)
# fmt: off
ANSWERS = [
    ("even", "one position too many", "// attention) - 1", "// attention)"),
    ("even", "rounded down", "-(-linear // attention) - 1", "linear // attention - 1"),
    ("even", "all pairs, not half of them", "-(-linear // attention) - 1",
     "-(-linear // (2 * attention)) - 1"),
    ("even", "the products with values are forgotten", "-(-linear // attention) - 1",
     "2 * -(-linear // attention) - 1"),
    ("even", "each matrix is multiplied once", "n * inputs", "inputs"),
    ("even", "one stage", ATTENTION, ATTENTION.replace("stages(config) * ", "")),
    ("even", "one layer", ATTENTION, ATTENTION.replace("config.n_layers * ", "")),
    ("even", "one head", ATTENTION, ATTENTION.replace("config.n_heads * ", "")),
    ("even", "heads of keys", "config.n_heads", "config.n_kv_heads"),
    ("even", "parameters for multiplications",
     "sum(n * inputs * outputs for _, inputs, outputs, n in linear_shapes(config))",
     "__import__('nanoeuler.model.config', fromlist=['x']).count_parameters(config)"),
    ("even", "without the output matrix", "linear_shapes(config))",
     "[*linear_shapes(config)][:-1])"),
    ("even", "six operations and twelve", "n * inputs", "2 * n * inputs"),
    ("even", "forward against all", "n * inputs * outputs", "n * inputs * outputs // 3"),
    ("tokens", "rounded down", "-(-wanted * inputs * outputs // left)",
     "wanted * inputs * outputs // left"),
    ("tokens", "one more than rounded down", "-(-wanted * inputs * outputs // left)",
     "wanted * inputs * outputs // left + 1"),
    ("tokens", "rounded", "-(-wanted * inputs * outputs // left)",
     "round(wanted * inputs * outputs / left)"),
    ("tokens", "a value for a byte", "ridge * value_bytes", "ridge"),
    ("tokens", "two bytes always", "ridge * value_bytes", "ridge * 2"),
    ("tokens", "bytes the wrong way round", "ridge * value_bytes", "ridge // value_bytes"),
    ("tokens", "a multiply-add is one", "2 * inputs * outputs", "inputs * outputs"),
    ("tokens", "outputs alone travel", "(inputs + outputs)", "outputs"),
    ("tokens", "inputs alone travel", "(inputs + outputs)", "inputs"),
    ("tokens", "the weights do not travel", "-(-wanted * inputs * outputs // left)", "1"),
    ("tokens", "no batch is ever too small", " if left > 0 else None", ""),
    ("tokens", "a batch without end", "if left > 0 else None", "if left > 0 else 1 << 40"),
    ("tokens", "none where it could be had", "left > 0", "left > wanted"),
    ("tokens", "exactly at the ridge", "left > 0", "left >= 0"),
    ("tokens", "three products, one pass", "-(-wanted", "3 * -(-wanted"),
]
