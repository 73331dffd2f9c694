"""Wrong answers to the exercises of appendix I: each must be refused by its check."""

import numpy as np

from nanoeuler.emulator import fragments

CHAPTER = "i-machine-code"
NAMES = dict(np=np, tables=fragments)

TURNED = "16 * ((chunk + row) % 8)"
# (exercise, what is wrong, text of the solution, what it becomes)
# fmt: off
ANSWERS = [
    ("holder", "rows one after another", "row % 8 * 4", "row * 4"),
    ("holder", "eight lanes a row", "row % 8 * 4", "row % 8 * 8"),
    ("holder", "lanes down the columns", "row % 8 * 4 + column % 8 // 2",
     "column % 8 * 4 + row % 8 // 2"),
    ("holder", "columns dealt out in turn", "column % 8 // 2", "column % 4"),
    ("holder", "columns of A beyond eight have lanes of their own", "column % 8 // 2",
     "column // 2"),
    ("holder", "C by squares of a register", "row // 8 * 2 + column % 2",
     "row // 8 + column % 2 * 2"),
    ("holder", "C in one register a square", "row // 8 * 2 + column % 2", "row // 8 * 2"),
    ("holder", "C's lower half as the upper one", "row // 8 * 2 + column % 2", "column % 2"),
    ("holder", "A's squares by rows", "row // 8 + column // 8 * 2", "row // 8 * 2 + column // 8"),
    ("holder", "A's right squares as the left ones", "row // 8 + column // 8 * 2", "row // 8"),
    ("holder", "A's halves exchanged", "* 2, column % 2", "* 2, 1 - column % 2"),
    ("holder", "A's half is forgotten", "* 2, column % 2", "* 2"),
    ("holder", "A as C", 'if kind == "C":', "if kind:"),
    ("holder", "A and C exchanged", 'kind == "C"', 'kind == "A"'),
    ("place", "not turned", TURNED, "16 * chunk"),
    ("place", "the exclusive or", TURNED, "16 * (chunk ^ row % 8)"),
    ("place", "turned by two a row", "chunk + row", "chunk + 2 * row"),
    ("place", "turned by four a row", "chunk + row", "chunk + 4 * row"),
    ("place", "turned every other row", "chunk + row", "chunk + row // 2"),
    ("place", "turned once for eight rows", "chunk + row", "chunk + row // 8"),
    ("place", "by the sum of all", "chunk + row", "8 + row"),
    ("place", "cut to two bits", "% 8", "% 4"),
    ("place", "not cut", TURNED, "16 * (chunk + row)"),
    ("place", "rows of a chunk more", "128 * row", "144 * row"),
    ("place", "rows half as long", "128 * row", "64 * row"),
    ("place", "chunks of 8 bytes", "16 * (", "8 * ("),
    ("place", "or for exclusive or", TURNED, "16 * (chunk | row % 8)"),
    ("place", "every other row stays", "chunk + row", "chunk + row * (row % 2)"),
    ("place", "chunks by columns", "128 * row + 16 * ((chunk + row) % 8)",
     "256 * chunk + 16 * ((chunk + row) % 16)"),
]
