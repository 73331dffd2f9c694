"""Wrong answers to the exercises of chapter 8, each of which its check must refuse."""

import numpy as np

CHAPTER = "08-when-training-fails"
NAMES = dict(np=np)

OUTSIDE = "new < ordered[k - 1] or new > ordered[-k]"
ANSWERS = [
    ("alarm", "the runs are not sorted", "np.sort(sound)", "sound"),
    ("alarm", "sorted from the top", "np.sort(sound)", "np.sort(sound)[::-1]"),
    (
        "alarm",
        "sorts what is not its own",
        "ordered = np.sort(sound)",
        "sound.sort()\n    ordered = sound",
    ),
    ("alarm", "one too far in below", "ordered[k - 1]", "ordered[k]"),
    ("alarm", "the lowest whatever k is", "ordered[k - 1]", "ordered[0]"),
    ("alarm", "the highest whatever k is", "ordered[-k]", "ordered[-1]"),
    ("alarm", "one too far in above", "ordered[-k]", "ordered[-k - 1]"),
    ("alarm", "both at once", " or ", " and "),
    ("alarm", "only what is worse", OUTSIDE, "new > ordered[-k]"),
    ("alarm", "only what is better", OUTSIDE, "new < ordered[k - 1]"),
    ("alarm", "an edge is outside, below", "new < ", "new <= "),
    ("alarm", "an edge is outside, above", "new > ", "new >= "),
    ("alarm", "says whether it is inside", OUTSIDE, f"not ({OUTSIDE})"),
    ("alarm", "the new run is not counted", "(len(sound) + 1)", "len(sound)"),
    ("alarm", "the chance of one side", "2 * k /", "k /"),
    ("alarm", "the chance of the extremes", "2 * k /", "2 /"),
    (
        "alarm",
        "the chance of a true alarm",
        "2 * k / (len(sound) + 1)",
        "1 - 2 * k / (len(sound) + 1)",
    ),
    ("bfloat16", "cut off", "bits + 0x7FFF + last", "bits"),
    ("bfloat16", "ties away from zero", "bits + 0x7FFF + last", "bits + 0x8000"),
    ("bfloat16", "ties towards zero", "bits + 0x7FFF + last", "bits + 0x7FFF"),
    ("bfloat16", "ties to the odd", "0x7FFF + last", "0x8000 - last"),
    ("bfloat16", "away from zero", "0x7FFF + last", "0xFFFF"),
    ("bfloat16", "half of the wrong place", "0x7FFF", "0x3FFF"),
    ("bfloat16", "the last bit is looked for one too high", "bits >> 16", "bits >> 17"),
    ("bfloat16", "the last bit is looked for one too low", "bits >> 16", "bits >> 15"),
    ("bfloat16", "eight bits stay", "0xFFFF0000", "0xFFFF8000"),
    ("bfloat16", "six bits stay", "0xFFFF0000", "0xFFFE0000"),
    ("bfloat16", "nothing is cut", " & 0xFFFF0000", ""),
    ("bfloat16", "the sign is lost", "0xFFFF0000", "0x7FFF0000"),
    (
        "bfloat16",
        "nan may become zero",
        "np.where(np.isnan(x), x, near.view(np.float32))",
        "near.view(np.float32)",
    ),
    (
        "bfloat16",
        "the infinite is taken for nan",
        "np.where(np.isnan(x), x, near",
        "np.where(~np.isfinite(x), np.float32(np.nan), near",
    ),
    ("bfloat16", "x is written to", "    last =", "    bits += 0x7FFF\n    last ="),
    ("bfloat16", "float16", "near.view(np.float32)", "x.astype(np.float16).astype(np.float32)"),
    ("bfloat16", "the bits and not the number", "near.view(np.float32)", "near.astype(np.float32)"),
]
