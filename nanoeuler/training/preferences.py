# Made from book/17-preferences.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-prefer-couples
"""Preferences: two answers to a question, and the loss that moves a model to the better one.

Direct preference optimization (DPO). Leaves out the run (dpo.py), and rewards of other kinds.

B texts, n comparisons (B = 2 n: rows 2 i and 2 i + 1 hold the chosen and the rejected answer of
comparison i), T positions, C channels, K predicted tokens.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nanoeuler.engines.interface import Array, Engine
from nanoeuler.errors import UserError
from nanoeuler.model.backward import IGNORE
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.transformer import backward, capping, stream
from nanoeuler.model.weights import Weights, output_matrix
from nanoeuler.tokenizer.chat_template import conversation, end_of
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training.sft import Conversations

Pair = tuple[str, str]  # a question and its answer


class Preference(NamedTuple):
    """A question, and two answers of which the first is the better one."""

    question: str
    chosen: str
    rejected: str


def couples(pairs: Iterable[Pair]) -> list[Preference]:
    """Comparisons of the answers of question-answer pairs: each is once chosen, once rejected.

    In couples of nearly the same length; of an odd number the longest is left out, and so is a
    couple with two equal answers. A judge that does not read the questions is right in one half.
    """
    order = sorted(pairs, key=lambda pair: len(pair[1].encode()))
    found = []
    for (question, answer), (other, its) in zip(order[0::2], order[1::2], strict=False):
        if answer != its:
            found += [Preference(question, answer, its), Preference(other, its, answer)]
    return found


def _preference(line):
    """The `Preference` of a line of JSON, bytes; None if it is none."""
    try:
        record = json.loads(line)
        found = Preference(record["question"], record["chosen"], record["rejected"])
        "".join(found).encode()  # fails where one is no text, or half of a surrogate pair
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return found if found.chosen != found.rejected else None


def read_preferences(path: Path) -> list[Preference]:
    """Comparisons from a file: {"question": TEXT, "chosen": TEXT, "rejected": TEXT} a line.

    UserError for a file without any, and for lines that hold none or two equal answers.
    """
    lines = path.read_bytes().splitlines()
    found = [_preference(line) for line in lines]
    bad = [number for number, each in enumerate(found, start=1) if each is None]
    if bad or not found:
        where = f"line {bad[0]} of {path}" if bad else f"{path}, which is empty"
        more = f" ({len(bad):,} of {len(lines):,} lines are wrong)" if bad else ""
        raise UserError(
            f'{where}: expected {{"question": TEXT, "chosen": TEXT, "rejected": TEXT}} with two '
            f"different answers{more}"
        )
    return found


# %% sec-prefer-likelihood
def as_rows(
    texts: Sequence[tuple[list[int], list[bool]]], n_predict: int, filling: int
) -> tuple[np.ndarray, np.ndarray]:
    """tokens (B, T) and targets (B, T, K), int32, of texts: (ids, counted) of each.

    T is one less than the number of ids of the longest text. Targets are those of head 0 that
    count, else IGNORE.
    """
    longest = max(len(ids) for ids, _ in texts) - 1
    tokens = np.full((len(texts), longest), filling, np.int32)
    targets = np.full((len(texts), longest, n_predict), IGNORE, np.int32)
    for row, (ids, counted) in enumerate(texts):
        tokens[row, : len(ids) - 1] = ids[:-1]
        targets[row, : len(ids) - 1, 0] = np.where(counted[1:], ids[1:], IGNORE)
    return tokens, targets


class Comparisons(Conversations):
    """Comparisons as batches, in the order of `Conversations`, which seed and step decide.

    `kept` are those of which both texts fit the context + 1, of a couple both or neither;
    `left_out` counts the others. UserError if none is kept.
    """

    def __init__(self, tokenizer: Tokenizer, preferences: Sequence[Preference], batch_size: int,
                 context: int, n_predict: int, seed: int = 0):  # fmt: skip
        self.batch_size, self.seed = batch_size, seed
        self.n_predict, self.filling = n_predict, end_of(tokenizer)
        texts = [[conversation(tokenizer, each.question, answer)
                  for answer in (each.chosen, each.rejected)] for each in preferences]
        fits = [max(len(ids) for ids, _ in both) <= context + 1 for both in texts]
        for i in range(0, len(fits) - 1, 2):  # of a couple both, or neither
            one, other = preferences[i : i + 2]
            if (one.chosen, one.rejected) == (other.rejected, other.chosen):
                fits[i : i + 2] = [fits[i] and fits[i + 1]] * 2
        self.kept = [each for each, fit in zip(preferences, fits, strict=True) if fit]
        self.texts = [both for both, fit in zip(texts, fits, strict=True) if fit]
        self.left_out = len(preferences) - len(self.kept)
        if not self.kept:
            raise UserError(
                f"expected comparisons of texts of at most {context + 1} tokens, got none: give "
                "shorter ones, or more"
            )

    @property
    def windows(self) -> int:
        """How many comparisons a pass over the data has."""
        return len(self.kept)

    def rows(self, chosen: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """tokens (2 n, T) and targets (2 n, T, K) of the comparisons `chosen` (n,)."""
        texts = [text for i in chosen for text in self.texts[i]]
        return as_rows(texts, self.n_predict, self.filling)


def _answer(targets: np.ndarray) -> slice:
    """The positions of a row from the first to the last whose target (T, K) counts."""
    at = np.flatnonzero(targets[:, 0] != IGNORE)
    return slice(at[0], at[-1] + 1)


def _log_p(
    engine: Engine, config: ModelConfig, W: Array, n: Array, targets: np.ndarray
) -> np.ndarray:
    """`likelihoods`, given the stream's end n (B, T, C) and the output matrix W (C, K V)."""
    rows, one = range(len(n)), np.ones(targets.shape[2])
    parts = [(slice(b, b + 1), _answer(targets[b])) for b in rows]
    more = capping(config)
    return np.array([-engine.loss(n[at], W, targets[at], one, **more)[0][0] for at in parts])


def likelihoods(
    engine: Engine, config: ModelConfig, w: Weights, tokens: np.ndarray, targets: np.ndarray
) -> np.ndarray:
    """log p (B,) in nats of the counted targets of each row: eq-prefer-logp. A forward pass.

    tokens (B, T) and targets (B, T, K) int, as `as_rows` makes them: a row counts one at least.
    """
    engine.begin()
    n, _ = stream(engine, config, w, tokens)
    return _log_p(engine, config, output_matrix(config, w), n, targets)


# %% sec-prefer-pull
def weighted_gradients(
    engine: Engine, config: ModelConfig, w: Weights, tokens: np.ndarray, targets: np.ndarray,
    weigh: Callable[[np.ndarray], np.ndarray], dw: Weights,
) -> np.ndarray:  # fmt: skip
    """Add the gradient of -sum_b c_b log p_b to dw; return log p (B,), as `likelihoods`.

    weigh(log p) gives c (B,), which counts as a constant: equation eq-prefer-weighted.
    """
    engine.begin()
    n, saved = stream(engine, config, w, tokens)
    W, dW, dn = output_matrix(config, w), output_matrix(config, dw), np.zeros_like(n)
    log_p = _log_p(engine, config, W, n, targets)
    for b, c in enumerate(weigh(log_p)):
        at = slice(b, b + 1), _answer(targets[b])
        scale = c * np.eye(1, targets.shape[2])[0]  # of head 0; the others have no targets
        dn[at] = engine.loss(n[at], W, targets[at], scale, dW, **capping(config))[1]
    backward(engine, config, w, saved, dn, dw)
    return log_p


# %% sec-prefer-dpo
# The value that Rafailov and others (2023, appendix B) used by default; chapter 17 tries others.
BETA = 0.1
# Measured: chapter 17. With none, as Rafailov and others have it, answers cost 0.45 bits a byte
# more than before.
ANCHOR = 0.03


def dpo(margins: np.ndarray, beta: float = BETA) -> tuple[np.ndarray, np.ndarray]:
    """The losses (n,) of margins (n,) in nats, eq-prefer-dpo; the pulls c_w (n,), c_l is -c_w.

    >>> [float(each.round(4)) for each in dpo(np.float64(10.0))]
    [0.3133, 0.0269]
    """
    z = beta * margins
    e = np.exp(np.where(z.real > 0, -z, z))  # at most 1: neither branch overflows
    loss = np.where(z.real > 0, 0, -z) + np.log1p(e)
    return loss, beta * np.where(z.real > 0, e, 1) / (1 + e)


def margins(log_p: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """The margin (n,) of each comparison, of log p (2 n,) and that of the reference (2 n,)."""
    gained = log_p - reference
    return gained[0::2] - gained[1::2]


def pulls(
    log_p: np.ndarray, reference: np.ndarray, beta: float, anchor: float, total: int
) -> np.ndarray:
    """The pulls (2 n,) of the answers of n comparisons out of a batch of `total`.

    The loss is the batch's mean. Equations eq-prefer-weights and eq-prefer-anchor.
    """
    c = dpo(margins(log_p, reference), beta)[1]
    return np.stack([c + anchor, -c], axis=1).ravel() / total
