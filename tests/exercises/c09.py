"""Wrong answers to the exercises of chapter 9: each must be refused by its check."""

from dataclasses import replace

import numpy as np

from nanoeuler.model.weights import Weights

CHAPTER = "09-depth-as-time"

# What the cells of the chapter have imported before; the rest each check imports itself.
NAMES = dict(np=np, replace=replace, Weights=Weights)

# (exercise, what is wrong, text of the solution, what it becomes)
# fmt: off
ANSWERS = [
    ("split_at", "attention takes whole steps", '"wo", ', ""),
    ("split_at", "the MLP takes whole steps", '"w_down", ', ""),
    ("split_at", "attention's bias takes whole steps", '"wo_bias", ', ""),
    ("split_at", "the MLP's bias takes whole steps", ', "w_down_bias"', ""),
    ("split_at", "what reads is halved, too", '"w_down",', '"w_down", "w_up",'),
    ("split_at", "what attention reads is halved in place of what it writes",
     '"wo", "wo_bias"', '"wqkv", "wqkv_bias"'),
    ("split_at", "the norm is halved, too", '("wo"', '("norm2", "wo"'),
    ("split_at", "only the first of the two takes half a step", "(i, i + 1)", "(i,)"),
    ("split_at", "only the second of the two takes half a step", "(i, i + 1)", "(i + 1,)"),
    ("split_at", "all layers before take half steps", "(i, i + 1)", "range(i + 2)"),
    ("split_at", "all layers take half steps", "(i, i + 1)", "range(config.n_layers)"),
    ("split_at", "quarter steps", "/= 2", "/= 4"),
    ("split_at", "double steps", "/= 2", "*= 2"),
    ("split_at", "whole steps", "tensor /= 2", "tensor /= 1"),
    ("split_at", "the second time at the end",
     "[*range(i + 1), *range(i, config.n_layers)]", "[*range(config.n_layers), i]"),
    ("split_at", "the layer before is done twice",
     "[*range(i + 1), *range(i, config.n_layers)]",
     "sorted([*range(config.n_layers), max(i - 1, 0)])"),
    ("split_at", "the mean with the next layer in place of the second time",
     "*range(i + 1), *range(i, ", "*range(i + 1), i + 0.5, *range(i + 1, "),
    ("split_at", "the step is halved for all", "config.step_size)", "config.step_size / 2)"),
    ("split_at", "every layer is done twice",
     "[*range(i + 1), *range(i, config.n_layers)]",
     "np.repeat(range(config.n_layers), 2).tolist()"),
    ("unit_step", "longer for shorter", "/= h", "*= h"),
    ("unit_step", "the square", "/= h", "/= h**2"),
    ("unit_step", "the root", "/= h", "/= h**0.5"),
    ("unit_step", "subtracted", "/= h", "-= h"),
    ("unit_step", "nothing is changed", "/= h", "/= 1"),
    ("unit_step", "positions forgotten", '("embedding", "positions")', '("embedding",)'),
    ("unit_step", "the embedding forgotten", '("embedding", "positions")', '("positions",)'),
    ("unit_step", "the output, too", '"positions")', '"positions", "output")'),
    ("unit_step", "the last norm, too", '"positions")', '"positions", "norm")'),
    ("unit_step", "the given weights are changed", "w.flat.copy()", "w.flat"),
    ("unit_step", "the step stays", "step_size=1.0", "step_size=config.step_size"),
    ("unit_step", "half the step", "step_size=1.0", "step_size=0.5"),
    ("unit_step", "all by Euler's method", "step_size=1.0", 'step_size=1.0, integrator="euler"'),
    ("unit_step", "everything is made longer", "w[name][...] /= h", "w.flat[...] /= h"),
    ("unit_step", "the first token's row alone", "w[name][...]", "w[name][:1]"),
]
