"""Wrong answers to the exercise of chapter 9c, each of which its check must refuse."""

import numpy as np

CHAPTER = "09c-a-modern-block"
NAMES = dict(np=np)

# (exercise, what is wrong, text of the solution, what it becomes)
ANSWERS = [
    ("mixed", "the other weight", "dv = weights[0]", "dv = weights[1]"),
    ("mixed", "no weight", "dv = weights[0] * dm", "dv = dm"),
    ("mixed", "the first layer's gets the other weight", "dfirst = weights[1]",
     "dfirst = weights[0]"),
    ("mixed", "nothing for the first layer", "dfirst = weights[1] * dm", "dfirst = 0 * dm"),
    ("mixed", "the weights' gradients exchanged", "np.sum(dm * v), np.sum(dm * first)",
     "np.sum(dm * first), np.sum(dm * v)"),
    ("mixed", "a mean for a sum", "np.sum(dm * v)", "np.mean(dm * v)"),
    ("mixed", "the gradient alone", "np.sum(dm * v)", "np.sum(dm)"),
    ("mixed", "the value alone", "np.sum(dm * first)", "np.sum(first)"),
    ("mixed", "a gradient for each channel", "np.sum(dm * first)]", "np.sum(dm * v)]"),
    ("mixed", "the sign", "dfirst = weights[1] * dm", "dfirst = -weights[1] * dm"),
    ("mixed", "multiplied by the values", "dv = weights[0] * dm", "dv = weights[0] * dm * v"),
    ("mixed", "two of three", "return dv, dfirst, dweights", "return dv, dfirst"),
]  # fmt: skip
