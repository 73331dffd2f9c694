"""Wrong answers to the exercises of chapter 19, each of which its check must refuse."""

import json

import numpy as np

CHAPTER = "19-other-peoples-models"
NAMES = dict(np=np, json=json)

NONE = 'if name not in header or name == "__metadata__":'
BOTH = "8 + length + first, 8 + length + last"
ANSWERS = [
    ("locate", "the big end first", '"little"', '"big"'),
    ("locate", "a length of four bytes that begins later", "data[:8]", "data[4:8]"),
    ("locate", "a length of two bytes", "data[:8]", "data[:1]"),
    ("locate", "the header begins at 0", "data[8 : 8 + length]", "data[:length]"),
    ("locate", "offsets count from the file's start", BOTH, "first, last"),
    ("locate", "the eight bytes are forgotten", BOTH, "length + first, length + last"),
    ("locate", "the header is forgotten", BOTH, "8 + first, 8 + last"),
    ("locate", "the last byte of it", "8 + length + last", "7 + length + last"),
    ("locate", "the second is a size", "8 + length + last", "last - first"),
    ("locate", "the wrong way round", BOTH, "8 + length + last, 8 + length + first"),
    ("locate", "metadata is a tensor", NONE, "if name not in header:"),
    ("locate", "every name is there", NONE, 'if name == "__metadata__":'),
    ("locate", "a beginning of a name suffices", NONE,
     'name = next((n for n in header if n.startswith(name)), name)\n    ' + NONE),
    ("locate", "a list, not a pair", BOTH, "[8 + length + first, 8 + length + last][:1]"),
    ("to_pairs", "the inverse", "moved[h * D + 2 * i] = rows[h * D + i]",
     "moved[h * D + i] = rows[h * D + 2 * i]"),
    ("to_pairs", "one head", "range(heads)", "range(1)"),
    ("to_pairs", "all heads are one", "    D = len(rows) // heads",
     "    heads, D = 1, len(rows)"),
    ("to_pairs", "it writes into what came in", "rows.copy()", "rows"),
    ("to_pairs", "half of the pairs", "range(D // 2)", "range(D // 4)"),
    ("to_pairs", "the two of a pair change places", "moved[h * D + 2 * i] = rows[h * D + i]",
     "moved[h * D + 2 * i] = rows[h * D + i + D // 2]"),
    ("to_pairs", "the second of each pair stays", "rows[h * D + i + D // 2]",
     "rows[h * D + 2 * i + 1]"),
    ("to_pairs", "the second is a neighbour", "rows[h * D + i + D // 2]", "rows[h * D + i + 1]"),
    ("to_pairs", "from the end", "rows[h * D + i + D // 2]", "rows[h * D + D - 1 - i]"),
    ("to_pairs", "the width of all heads", "rows[h * D + i + D // 2]",
     "rows[h * D + i + len(rows) // 2 - h * D]"),
    ("to_pairs", "nothing moves", "    return moved", "    return rows.copy()"),
    ("to_pairs", "turned around", "    return moved", "    return moved[::-1]"),
    ("to_pairs", "the columns as well", "    return moved", "    return moved[:, ::-1]"),
    ("to_pairs", "the heads change places", "rows[h * D + i]",
     "rows[(heads - 1 - h) * D + i]"),
]
