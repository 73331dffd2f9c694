# Made from book/20-is-it-any-good.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-eval-boundary
"""The log-likelihood of continuations: equation eq-eval-loglik, in batches, on a CPU or a GPU.

Leaves out what is made of it (scores.py).
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import numpy as np

from nanoeuler.engines.interface import Engine
from nanoeuler.engines.registry import GPU_ENGINES, engine_factory, engine_name
from nanoeuler.measurements import cores
from nanoeuler.model.backward import IGNORE
from nanoeuler.model.modern import soft_cap
from nanoeuler.model.transformer import output_matrix, stream
from nanoeuler.model.weights import Weights
from nanoeuler.tokenizer.tokenizer import Tokenizer

END = "<|endoftext|>"  # with which GPT-2 and many after it end a text, and begin the next


class Span(NamedTuple):
    """Ids (n,) int, of which those from `begin` on are scored; 0 < begin < n."""

    ids: np.ndarray
    begin: int


def prefix(tokenizer: Tokenizer) -> list[int]:
    """What comes before a text that has no context: one id, or those that begin every text."""
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


class Likelihood(NamedTuple):
    """Of a continuation."""

    log_p: float  # nats
    tokens: int
    greedy: bool  # whether each of its tokens was the likeliest


Row = tuple[np.ndarray, int]  # ids (n,), n - 1 <= context, and the first of them that is scored


class Scorer(Protocol):
    """What scores rows, a batch at a time.

    batch_tokens: of a batch, at most, with padding. group_tokens: of several batches, between two
    lines of progress. numbers: in what it computes, "float32" or a GPU's engine.
    """

    batch_tokens: int
    group_tokens: int
    numbers: str

    def width(self, longest: int) -> int:
        """The positions to which a batch is padded, whose longest row has so many."""

    def score(self, rows: Sequence[Row]) -> list[tuple[float, bool]]:
        """log p in nats of the scored ids of each row, and whether all were the likeliest."""


def batches(scorer: Scorer, lengths: Sequence[int]) -> Iterator[list[int]]:
    """The numbers of rows of these lengths in batches for a scorer, the longest first."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while order:
        many = max(1, scorer.batch_tokens // scorer.width(lengths[order[0]]))
        yield order[:many]
        order = order[many:]


ROWS = 256  # whose logits are in memory at once: 50 MB for a vocabulary of 50,000


def _scored(logits, ids):
    """log p (m,) of ids (m,) by logits (m, V), and whether each is the likeliest."""
    high = logits.max(axis=1, keepdims=True)
    total = np.exp(logits - high).sum(axis=1, dtype=np.float64)
    own = logits[np.arange(len(ids)), ids]
    return own - high[:, 0] - np.log(total), logits.argmax(axis=1) == ids


class CpuScorer:
    """Scores rows by an engine of a CPU: see `Scorer`."""

    batch_tokens = 1 << 12  # rows that fill a CPU's matrix product
    group_tokens = 1 << 14
    numbers = "float32"

    def __init__(self, engine: Engine, weights: Weights) -> None:
        self.engine, self.weights = engine, weights

    def width(self, longest: int) -> int:
        """The positions to which a batch is padded: those of its longest row, and no more."""
        return longest

    def score(self, rows: Sequence[Row]) -> list[tuple[float, bool]]:
        """log p in nats of each row's scored ids, by a forward pass; whether all were likeliest."""
        config = self.weights.config
        T = max(len(ids) for ids, _ in rows) - 1
        tokens = np.zeros((len(rows), T), np.int64)
        for b, (ids, _) in enumerate(rows):
            tokens[b, : len(ids) - 1] = ids[:-1]
        self.engine.begin()
        n, _ = stream(self.engine, config, self.weights, tokens)
        W, found = output_matrix(config, self.weights)[:, : config.vocab_size], []
        for b, (ids, begin) in enumerate(rows):
            log_p, best = 0.0, True
            for at in range(begin, len(ids), ROWS):
                stop = min(len(ids), at + ROWS)
                z = self.engine.linear(n[b, at - 1 : stop - 1], W)
                z = soft_cap(z, config.logit_cap) if config.logit_cap else z
                got = _scored(z, ids[at:stop])
                log_p, best = log_p + float(got[0].sum()), best and bool(got[1].all())
            found.append((log_p, best))
        return found


def likelihoods(
    scorers: Sequence[Scorer], context: int, spans: Sequence[Span]
) -> list[Likelihood]:
    """The `Likelihood` of each span, each token from at most `context` ids: eq-eval-loglik.

    Every scorer has a thread. Make them once: a GPU's keeps the memory that it works in.
    """
    rows = [(i, *each) for i, one in enumerate(spans)
            for each in windows(len(one.ids), one.begin, context)]  # fmt: skip
    log_p, greedy, free = np.zeros(len(spans)), np.ones(len(spans), bool), SimpleQueue()
    for scorer in scorers:
        free.put(scorer)

    def run(batch):
        cut = [(spans[i].ids[start:stop], at - start)
               for i, start, at, stop in (rows[k] for k in batch)]  # fmt: skip
        scorer = free.get()
        try:
            return scorer.score(cut)
        finally:
            free.put(scorer)

    many = list(batches(scorers[0], [stop - start - 1 for _, start, _, stop in rows]))
    with ThreadPoolExecutor(len(scorers)) as pool:
        each = map if len(scorers) == 1 else pool.map  # a GPU belongs to the thread that is here
        for batch, got in zip(many, each(run, many), strict=True):
            for k, (nats, best) in zip(batch, got, strict=True):
                log_p[rows[k][0]] += nats
                greedy[rows[k][0]] &= best
    return [Likelihood(float(p), len(s.ids) - s.begin, bool(g))
            for p, s, g in zip(log_p, spans, greedy, strict=True)]  # fmt: skip


# %% sec-eval-gpu
GPU_SCORER = "nanoeuler.engines.gpu.step.scoring"  # imported only where there is a GPU


class GpuScorer:
    """Scores rows by a `CudaScorer`: see `Scorer`."""

    batch_tokens = 1 << 13  # a product of 8,192 rows fills a GPU
    group_tokens = 1 << 18

    def __init__(self, cuda: Any, context: int, numbers: str = GPU_ENGINES[0]) -> None:
        self.cuda, self.context, self.numbers = cuda, context, numbers

    def width(self, longest: int) -> int:
        """The positions to which a batch is padded: 32, 48, 64, 96, ..., the context at most."""
        power = 1 << (longest - 1).bit_length()
        between = power * 3 // 4
        return min(self.context, max(32, between if longest <= between else power))

    def score(self, rows: Sequence[Row]) -> list[tuple[float, bool]]:
        """log p in nats of the scored ids of each row; whether all were likeliest.

        All batches of one width have one shape, so that few programs are recorded.
        """
        T = self.width(max(len(ids) for ids, _ in rows) - 1)
        shape = max(1, self.batch_tokens // T), T
        tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORE)
        for b, (ids, begin) in enumerate(rows):
            tokens[b, : len(ids) - 1] = ids[:-1]
            targets[b, begin - 1 : len(ids) - 1] = ids[begin:]
        log_p, best = self.cuda.scores(tokens, targets)
        right = (best | (targets == IGNORE)).all(axis=1)
        return [(float(log_p[b].sum()), bool(right[b])) for b in range(len(rows))]


def scorers(engine: str, weights: Weights, threads: int | None = None) -> list[Scorer]:
    """Those of an engine: of a CPU one for each thread, None: one a core; of a GPU one.

    UserError for a name that no engine has, and for a GPU that is not there.
    """
    name = engine_name(engine)
    if name in GPU_ENGINES:
        cuda = import_module(GPU_SCORER).cuda_scorer(name, weights)
        return [GpuScorer(cuda, weights.config.context, name)]
    engines = [engine_factory(name)() for _ in range(threads or cores())]
    for each in engines:
        each.forward_only = True
    return [CpuScorer(each, weights) for each in engines]
