"""Wrong answers to the exercises of chapter 19c, each of which its check must refuse."""

import numpy as np

CHAPTER = "19c-in-and-out"
NAMES = dict(np=np)

SAFE = 'head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 2**32'
LAST = '"llama2.c" if suffix == ".bin" else "unknown"'
ANSWERS = [
    ("kind", "the name decides", 'head[:4] == b"GGUF"', 'suffix == ".gguf"'),
    ("kind", "both have to agree", 'head[:4] == b"GGUF"',
     'head[:4] == b"GGUF" and suffix == ".gguf"'),
    ("kind", "small letters as well", 'head[:4] == b"GGUF"', 'head[:4].upper() == b"GGUF"'),
    ("kind", "the number the other way", 'head[:4] == b"24ka"', 'head[:4] == b"ak42"'),
    ("kind", "a new llama2.c needs its name", 'head[:4] == b"24ka"',
     'head[:4] == b"24ka" and suffix'),
    ("kind", "the brace at the front", 'head[8:9] == b"{"', 'head[:1] == b"{"'),
    ("kind", "any bracket", 'head[8:9] == b"{"', 'head[8:9] in b"{["'),
    ("kind", "the other end first", SAFE, SAFE.replace("little", "big")),
    ("kind", "safetensors by its name", SAFE, 'suffix == ".safetensors"'),
    ("kind", "every archive is a pickle", 'b"PK\\x03\\x04"',
     'b"PK\\x03\\x04" or head[:2] == b"PK"'),
    ("kind", "no archive is a pickle", 'head[:4] == b"PK\\x03\\x04" or ', ""),
    ("kind", "a bare pickle is none", ' or head[:1] == b"\\x80"', ""),
    ("kind", "of the second kind alone", 'head[:1] == b"\\x80"', 'head[:2] == b"\\x80\\x02"'),
    ("kind", "the rest is llama2.c", LAST, '"llama2.c"'),
    ("kind", "the rest is unknown", LAST, '"unknown"'),
    ("score", "the copy itself", "rows - half + 1", "rows - half"),
    ("score", "two after the copy", "rows - half + 1", "rows - half + 2"),
    ("score", "the token before it", "rows - half + 1", "rows - half - 1"),
    ("score", "the first half", "np.arange(half, 2 * half)", "np.arange(half - 1, half)"),
    ("score", "the last position is left out", "np.arange(half, 2 * half)",
     "np.arange(half, 2 * half - 1)"),
    ("score", "the first position is left out", "np.arange(half, 2 * half)",
     "np.arange(half + 1, 2 * half)"),
    ("score", "the sum", ".mean(-1)", ".sum(-1)"),
    ("score", "the largest", ".mean(-1)", ".max(-1)"),
    ("score", "the median", "p[:, rows, rows - half + 1].mean(-1)",
     "np.median(p[:, rows, rows - half + 1], -1)"),
    ("score", "one number for all heads", ".mean(-1)", ".mean()"),
    ("score", "a mean over heads", ".mean(-1)", ".mean(0)"),
    ("score", "keys for queries", "p[:, rows, rows - half + 1]", "p[:, rows - half + 1, rows]"),
    ("score", "a mean over everything", ".mean(-1)", ".sum(-1) / (2 * half)"),
]  # fmt: skip
