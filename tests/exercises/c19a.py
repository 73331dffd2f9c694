"""Wrong answers to the exercises of chapter 19a, each of which its check must refuse."""

import numpy as np

CHAPTER = "19a-quantized-files"
NAMES = dict(np=np)

FIFTH = 'int.from_bytes(block[4:8], "little") >> i & 1'
LOW = "byte >> 4 if i >= 16 else byte & 15"
ANSWERS = [
    ("number", "neighbours share a byte", "block[8 + i % 16]", "block[8 + i // 2]"),
    ("number", "the high half first", "i >= 16", "i < 16"),
    ("number", "odd numbers in the high half", "i >= 16", "i % 2"),
    ("number", "the low halves alone", LOW, "byte & 15"),
    ("number", "the whole byte", LOW, "byte"),
    ("number", "no fifth bit", "low + 16 * fifth", "low"),
    ("number", "a fifth bit worth 32", "16 * fifth", "32 * fifth"),
    ("number", "the fifth bit in front", "low + 16 * fifth", "2 * low + fifth"),
    ("number", "the fifth bits from the other end", FIFTH,
     'int.from_bytes(block[4:8], "big") >> i & 1'),
    ("number", "the bits of each byte from its top", ">> i & 1", ">> (i ^ 7) & 1"),
    ("number", "one fifth bit for two numbers", ">> i & 1", ">> i % 16 & 1"),
    ("number", "a sign, not an offset", "+ m)", "- m)"),
    ("number", "no offset", " + m)", ")"),
    ("number", "Q5_0", "low + 16 * fifth) + m", "low + 16 * fifth - 16)"),
    ("number", "offset and scale change places", "d, m =", "m, d ="),
    ("number", "the offset is scaled", "d * (low + 16 * fifth) + m", "d * (low + 16 * fifth + m)"),
    ("number", "the fifth bits are skipped", "block[8 + i % 16]", "block[4 + i % 16]"),
    ("pack", "four bits of the last four", "out[j] = scales[j] | scales[j + 4] >> 4 << 6",
     "out[j] = scales[j]"),
    ("pack", "four bits of the last minima", "minima[j] | minima[j + 4] >> 4 << 6", "minima[j]"),
    ("pack", "the upper bits change places", "scales[j] | scales[j + 4]",
     "scales[j] | minima[j + 4]"),
    ("pack", "the halves change places", "(scales[j + 4] & 15) | (minima[j + 4] & 15) << 4",
     "(minima[j + 4] & 15) | (scales[j + 4] & 15) << 4"),
    ("pack", "scales and minima change places", "out[j] = scales[j]", "out[j] = minima[j]"),
    ("pack", "upper bits one too low", "scales[j + 4] >> 4 << 6", "scales[j + 4] >> 4 << 5"),
    ("pack", "the lower bits on top", "scales[j] | scales[j + 4] >> 4 << 6",
     "scales[j] | (scales[j + 4] & 3) << 6"),
    ("pack", "neighbours", "minima[j] | minima[j + 4] >> 4 << 6",
     "minima[j] | minima[(j + 5) % 8] >> 4 << 6"),
    ("pack", "all bits of the last ones", "(scales[j + 4] & 15)", "scales[j + 4]"),
    ("pack", "the order of the bytes", "bytes(out)", "bytes(out[::-1])"),
    ("pack", "three of four", "range(4)", "range(3)"),
    ("pack", "the last four first", "out[j] = scales[j] | scales[j + 4] >> 4 << 6",
     "out[j] = scales[j + 4] | scales[j] >> 4 << 6"),
    ("pack", "sixteen bytes", "bytearray(12)", "bytearray(16)"),
    ("pack", "a sum of the halves", "| (minima[j + 4] & 15) << 4", "+ (minima[j + 4] & 15)"),
]
