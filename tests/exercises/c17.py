"""Wrong answers to the exercises of chapter 17, each of which its check must refuse."""

import numpy as np

CHAPTER = "17-preferences"
NAMES = dict(np=np)

ANSWERS = [
    ("identity", "wants to lose", "margins - 1", "margins + 1"),
    ("identity", "twice the aim", "1 / (2 * beta)", "1 / beta"),
    ("identity", "beta turned over", "1 / (2 * beta)", "2 * beta"),
    ("identity", "half the aim", "1 / (2 * beta)", "1 / (4 * beta)"),
    ("identity", "no aim", "margins - 1 / (2 * beta)", "margins"),
    ("identity", "margins times beta", "margins - 1", "beta * margins - 1"),
    ("identity", "half the loss", "off**2", "off**2 / 2"),
    ("identity", "a distance, not its square", "off**2", "abs(off)"),
    ("identity", "the sign", "-2 * off", "2 * off"),
    ("identity", "half the weight", "-2 * off", "-off"),
    ("identity", "weight without the aim", "-2 * off", "-2 * margins"),
    ("identity", "weight times beta", "-2 * off", "-2 * beta * off"),
    ("identity", "all pull alike", "-2 * off", "-2 * np.sign(off)"),
    ("identity", "what is won is left alone", "-2 * off", "-2 * np.minimum(off, 0)"),
]
