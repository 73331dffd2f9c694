"""Wrong answers to the exercises of chapter 15a, each of which its check must refuse."""

from dataclasses import replace

import numpy as np

from nanoeuler.model.config import PRESETS
from nanoeuler.planning.counts import flops_per_token

CHAPTER = "15a-guessing-ahead"
NAMES = dict(np=np, replace=replace, PRESETS=PRESETS, flops_per_token=flops_per_token)

KEPT = "np.where(q > p, p / np.where(q > 0, q, 1), 1)"
ATTENTION = "12 * c.n_layers * c.n_heads * c.head_dim * (c.context + 1) / 2"
WIDE = "(first.var(ddof=1) + second.var(ddof=1)) / 4"
ANSWERS = [
    ("rule", "a refused guess is drawn from p again", "np.outer(1 - kept, rest)",
     "np.outer(1 - kept, p)"),
    ("rule", "every guess is kept", KEPT, "np.ones(len(p))"),
    ("rule", "no guess is kept", KEPT, "np.zeros(len(p))"),
    ("rule", "kept as often as it is right", KEPT, "p"),
    ("rule", "kept as often as it is guessed", KEPT, "q"),
    ("rule", "q over p", KEPT, "np.where(p > q, q / np.where(p > 0, p, 1), 1)"),
    ("rule", "kept where p is larger, else refused", KEPT, "np.where(q > p, 0.0, 1)"),
    ("rule", "kept half as often", KEPT, KEPT + " / 2"),
    ("rule", "the rest is what was guessed too often", "np.maximum(p - q, 0)",
     "np.maximum(q - p, 0)"),
    ("rule", "the rest keeps its sign", "np.maximum(p - q, 0)", "p - q"),
    ("rule", "the rest has two signs less", "np.maximum(p - q, 0)", "np.abs(p - q)"),
    ("rule", "the rest is not divided", "rest / rest.sum() if", "rest if"),
    ("rule", "nothing over nothing", " if rest.any() else p", ""),
    ("rule", "a column for each guess", "np.outer(1 - kept, rest)", "np.outer(rest, 1 - kept)"),
    ("rule", "the overlap for all", KEPT, "np.full(len(p), np.minimum(p, q).sum())"),
    ("steps", "no attention", ") + attention", ")"),
    ("steps", "attention to everything", " / 2", ""),
    ("steps", "attention forward alone", "12 *", "4 *"),
    ("steps", "attention of key heads", "c.n_layers * c.n_heads * c.head_dim * (",
     "c.n_layers * c.n_kv_heads * c.head_dim * ("),
    ("steps", "attention of one layer", "12 * c.n_layers", "12"),
    ("steps", "the other way round", "price(K1) / price(K2)", "price(K2) / price(K1)"),
    ("steps", "not rounded", "return round(steps * price(K1) / price(K2))",
     "return steps * price(K1) / price(K2)"),
    ("steps", "the heads alone", "price(K1) / price(K2)", "K1 / K2"),
    ("steps", "one head", "K * c.dim", "c.dim"),
    ("steps", "one layer", "(c.n_layers * layer", "(layer"),
    ("steps", "no output of the heads", " + c.n_heads * c.head_dim * c.dim", ""),
    ("steps", "keys for all heads", "2 * c.n_kv_heads", "2 * c.n_heads"),
    ("steps", "two matrices in the MLP", "3 * c.dim * c.hidden", "2 * c.dim * c.hidden"),
    ("steps", "the embedding, too", "K * c.dim", "(K + 1) * c.dim"),
    ("unpaired", "pairs", WIDE, "np.var(second - first, ddof=1) / 4"),
    ("unpaired", "the number for pairs", "2.447", "3.182"),
    ("unpaired", "the number of a known deviation", "2.447", "1.96"),
    ("unpaired", "divided by n", WIDE, "(first.var() + second.var()) / 4"),
    ("unpaired", "of one run, not of the mean", WIDE, WIDE[:-4]),
    ("unpaired", "divided by eight", WIDE, WIDE[:-1] + "8"),
    ("unpaired", "all as one kind", WIDE,
     "np.concatenate([first, second]).var(ddof=1) / 4"),
    ("unpaired", "deviations added", "np.sqrt(" + WIDE + ")",
     "(first.std(ddof=1) + second.std(ddof=1)) / 2"),
    ("unpaired", "no root", "np.sqrt(" + WIDE + ")", WIDE),
    ("unpaired", "the first alone", WIDE, "first.var(ddof=1) / 4"),
    ("unpaired", "the sign", "second.mean() - first.mean()", "first.mean() - second.mean()"),
    ("unpaired", "the whole interval", "2.447 * wide", "2 * 2.447 * wide"),
    ("unpaired", "medians", "second.mean() - first.mean()",
     "np.median(second) - np.median(first)"),
    ("unpaired", "a difference of one run", "second.mean() - first.mean()",
     "second[0] - first[0]"),
]
