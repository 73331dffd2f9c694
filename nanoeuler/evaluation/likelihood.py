# Made from book/20-is-it-any-good.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-eval-boundary
"""The log-likelihood of continuations: equation eq-eval-loglik, in batches, on a CPU.

Leaves out what is made of it (scores.py).
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from nanoeuler.engines.interface import Engine
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.transformer import output_matrix, stream
from nanoeuler.model.weights import Weights
from nanoeuler.tokenizer.tokenizer import Tokenizer

END = "<|endoftext|>"  # with which GPT-2 and many after it end a text, and begin the next


class Span(NamedTuple):
    """Ids (n,) int, of which those from `begin` on are scored; 0 < begin < n."""

    ids: np.ndarray
    begin: int


def prefix(tokenizer: Tokenizer) -> list[int]:
    """What stands before a text that has no context: one id, or those that begin every text."""
    if tokenizer.begin:
        return list(tokenizer.begin)
    if END in tokenizer.special:
        return [tokenizer.special[END]]
    return list(tokenizer.end[:1]) or tokenizer.encode("\n").tolist()[:1]


def span(tokenizer: Tokenizer, context: str, continuation: str) -> Span:
    """The ids of both together, and where the continuation begins.

    If all texts of the model begin with certain ids, so does a context; an empty one is `prefix`.
    """
    before = tokenizer.begin if context else prefix(tokenizer)
    whole = tokenizer.encode(context + continuation)
    begin = min(len(tokenizer.encode(context)) if context else 0, len(whole) - 1)
    return Span(np.concatenate([np.array(before, np.int64), whole]), len(before) + begin)


# %% sec-eval-windows
def windows(n: int, begin: int, most: int) -> Iterator[tuple[int, int, int]]:
    """(start, at, stop) of the windows in which ids begin..n-1 of n are scored, each of them once.

    A window reads the ids start..stop-2, `most` at most, and scores the ids at..stop-1. The last
    one reads as many ids before its own as it can.
    """
    at = begin
    while at < n:
        stop = min(n, at + most)
        yield max(0, stop - 1 - most), at, stop
        at = stop


BATCH_TOKENS = 1 << 12  # of a batch; 4,096 rows fill a CPU's matrix product
ROWS = 256              # whose logits are in memory at once: 50 MB for a vocabulary of 50,000


class Likelihood(NamedTuple):
    """Of a continuation."""

    log_p: float  # nats
    tokens: int
    greedy: bool  # whether each of its tokens was the likeliest


def batches(rows: Sequence[tuple[int, int, int, int]]) -> Iterator[list[int]]:
    """The numbers of rows (span, start, at, stop) in batches, the longest first."""
    order = sorted(range(len(rows)), key=lambda i: rows[i][1] - rows[i][3])
    while order:
        longest = rows[order[0]][3] - rows[order[0]][1] - 1
        many = max(1, BATCH_TOKENS // longest)
        yield order[:many]
        order = order[many:]


def _scored(logits, ids):
    """log p (m,) of ids (m,) by logits (m, V), and whether each is the likeliest."""
    high = logits.max(axis=1, keepdims=True)
    total = np.exp(logits - high).sum(axis=1, dtype=np.float64)
    own = logits[np.arange(len(ids)), ids]
    return own - high[:, 0] - np.log(total), logits.argmax(axis=1) == ids


def score_rows(
    engine: Engine, config: ModelConfig, w: Weights, rows: Sequence[tuple[np.ndarray, int]]
) -> list[tuple[float, bool]]:
    """log p in nats of the scored ids of each row, and whether all were the likeliest.

    A row: ids (n,), n - 1 <= context, and the first of them that is scored. A forward pass.
    """
    T = max(len(ids) for ids, _ in rows) - 1
    tokens = np.zeros((len(rows), T), np.int64)
    for b, (ids, _) in enumerate(rows):
        tokens[b, : len(ids) - 1] = ids[:-1]
    engine.begin()
    n, _ = stream(engine, config, w, tokens)
    W, found = output_matrix(config, w)[:, : config.vocab_size], []
    for b, (ids, begin) in enumerate(rows):
        log_p, best = 0.0, True
        for at in range(begin, len(ids), ROWS):
            stop = min(len(ids), at + ROWS)
            got = _scored(engine.linear(n[b, at - 1 : stop - 1], W), ids[at:stop])
            log_p, best = log_p + float(got[0].sum()), best and bool(got[1].all())
        found.append((log_p, best))
    return found


def likelihoods(
    engines: Sequence[Engine], config: ModelConfig, w: Weights, spans: Sequence[Span]
) -> list[Likelihood]:
    """The `Likelihood` of each span, each token from at most `context` ids: eq-eval-loglik.

    Every engine has a thread. Make them once: an engine keeps the memory that it works in.
    """
    rows = [(i, *each) for i, one in enumerate(spans)
            for each in windows(len(one.ids), one.begin, config.context)]  # fmt: skip
    log_p, greedy, free = np.zeros(len(spans)), np.ones(len(spans), bool), SimpleQueue()
    for engine in engines:
        free.put(engine)

    def run(batch):
        cut = [(spans[i].ids[start:stop], at - start)
               for i, start, at, stop in (rows[k] for k in batch)]  # fmt: skip
        engine = free.get()
        try:
            return score_rows(engine, config, w, cut)
        finally:
            free.put(engine)

    many = list(batches(rows))
    with ThreadPoolExecutor(len(engines)) as pool:
        for batch, got in zip(many, pool.map(run, many), strict=True):
            for k, (nats, best) in zip(batch, got, strict=True):
                log_p[rows[k][0]] += nats
                greedy[rows[k][0]] &= best
    return [Likelihood(float(p), len(s.ids) - s.begin, bool(g))
            for p, s, g in zip(log_p, spans, greedy, strict=True)]  # fmt: skip
