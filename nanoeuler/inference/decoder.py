# Made from book/15-generation.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-generation-cache
"""Generating text: readers, which keep keys and values of tokens read, and the loop around them.

They run every architecture that the engine has code for, on a CPU. Not here: speed, and
guessing ahead with the prediction heads k >= 1. `generate` uses head 0 alone, which predicts the
next token.

n positions being read, t positions in all, H query heads, G key/value heads, D head width,
V vocabulary, K predicted tokens.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from numbers import Integral
from typing import NamedTuple, Protocol, Unpack

import numpy as np

from nanoeuler.engines.interface import Engine
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.errors import UserError
from nanoeuler.inference.sampling import Sampler, SamplingOptions, log_probabilities
from nanoeuler.model.config import ModelConfig, first_keys
from nanoeuler.model.integrators import INTEGRATORS
from nanoeuler.model.layers import linear
from nanoeuler.model.modern import soft_cap
from nanoeuler.model.transformer import stream
from nanoeuler.model.weights import Weights, output_matrix
from nanoeuler.tokenizer.tokenizer import Tokenizer


def hidden_keys(n: int, t: int, first: np.ndarray | None = None) -> np.ndarray:
    """Which of t keys each of the newest n positions must not see: (n, t) bool.

    Those after the position and, if first (n,) is given, those before its first key.
    """
    key, own = np.arange(t), np.arange(t - n, t)[:, None]
    return key > own if first is None else (key > own) | (key < first[:, None])


def newest_attention(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, first: np.ndarray | None = None
) -> np.ndarray:
    """Causal grouped-query attention of the newest n of t positions over all of them.

    queries (n, H, D); keys, values (G, t, D). Query head h reads key/value head h // (H/G). first
    (n,) int, if given: the first key that each query sees. Returns outputs (n, H*D),
    equal to the last n rows of `attention.attention`; equation eq-attention.
    """
    (n, H, D), (G, t, _) = queries.shape, keys.shape
    assert keys.shape == values.shape == (G, t, D) and n <= t and H % G == 0
    grouped = queries.reshape(n, G, H // G, D).transpose(1, 2, 0, 3)  # (G, H/G, n, D)
    root = np.sqrt(D).astype(queries.dtype)  # float32 stays float32
    scores = grouped @ keys[:, None].swapaxes(2, 3) / root  # (G, H/G, n, t)
    scores = np.where(hidden_keys(n, t, first), -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights @ values[:, None]).transpose(2, 0, 1, 3).reshape(n, H * D)


class KeyValues:
    """The KV cache of one call of attention, for one text: an `engines.interface.Cache`.

    `keys` and `values` (G, context, D); entries after the newest position read are meaningless.
    """

    def __init__(self, config: ModelConfig, dtype: np.typing.DTypeLike):
        shape = config.n_kv_heads, config.context, config.head_dim
        self.keys, self.values = np.zeros(shape, dtype), np.zeros(shape, dtype)
        begins = np.zeros(config.context, np.int32)  # one text, which begins at position 0
        self.first = first_keys(config, config.context, begins)  # the first key of each position

    def attention(self, heads: np.ndarray, n_kv: int, start: int) -> np.ndarray:
        """Store the keys and values of heads (1, n, H + 2G, D); return outputs (1, n, H*D).

        G = n_kv. Positions begin at `start`, and start + n is at most the context. Each query sees
        what is held up to its own position, within the window.
        """
        B, n, N, _ = heads.shape
        H, new = N - 2 * n_kv, slice(start, start + n)
        assert B == 1 and new.stop <= self.keys.shape[1], f"no room for {B} x {n} at {start}"
        self.keys[:, new] = heads[0, :, H : H + n_kv].swapaxes(0, 1)
        self.values[:, new] = heads[0, :, H + n_kv :].swapaxes(0, 1)
        first = self.first[new]
        held = slice(first[0], new.stop)  # `first` never decreases: no query sees earlier ones
        seen = self.keys[:, held], self.values[:, held], first - first[0]
        return newest_attention(heads[0, :, :H], *seen)[None]


# %% sec-generation-reader
class Reader(Protocol):
    """Makes a decoder's passes over the newest tokens of one text or several.

    It holds keys and values for `texts` texts, each of up to `config.context` positions.
    """

    config: ModelConfig
    texts: int

    def read(
        self, pieces: Sequence[Sequence[int]], starts: Sequence[int], rows: int = 1, heads: int = 1
    ) -> np.ndarray:
        """Logits (B, rows, heads, V) after the last `rows` tokens of each of B pieces.

        Piece i, ids of text i, is read at positions starts[i], starts[i] + 1, ... Whatever was read
        of that text at these positions and after them is forgotten. Pieces may differ in length. An
        empty one is not read, and its logits mean nothing. The array is valid until the next call.
        """


class EngineReader:
    """A `Reader` that runs an engine's forward pass text by text; by default the reference's.

    Weights are float32 or float64, whichever the engine takes. `caches[text][layer][stage]` are the
    `KeyValues` of each call of attention.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, engine: Engine | None = None, texts: int = 1
    ):
        self.config, self.weights, self.texts = config, weights, texts
        self.engine, dtype = engine or ReferenceEngine(), weights.flat.dtype
        stages, layers = range(len(INTEGRATORS[config.integrator].b)), range(config.n_layers)
        each = [config.in_layer(i) for i in layers]  # a layer may have its own window
        self.caches = [
            [[KeyValues(own, dtype) for _ in stages] for own in each] for _ in range(texts)
        ]

    def read(
        self, pieces: Sequence[Sequence[int]], starts: Sequence[int], rows: int = 1, heads: int = 1
    ) -> np.ndarray:
        """Logits (B, rows, heads, V) after the last `rows` of the new ids of each of B texts.

        pieces: each text's new ids; where it has none, logits are zero. starts: the position
        of the first id of each piece. heads: how many prediction heads to use.
        """
        V = self.config.vocab_size
        output = output_matrix(self.config, self.weights)[:, : heads * V]
        logits = np.zeros((len(pieces), rows, heads, V), output.dtype)
        for i, (ids, start) in enumerate(zip(pieces, starts, strict=True)):
            if len(ids):
                tokens = np.array([ids])
                self.engine.begin()
                normed, _ = stream(  # (1, T, C): the residual stream after its last norm
                    self.engine, self.config, self.weights, tokens, start, self.caches[i]
                )
                logits[i] = linear(normed[0, -rows:], output).reshape(rows, heads, V)
        cap = self.config.logit_cap
        return soft_cap(logits, cap) if cap else logits


def fitted(config: ModelConfig, held: list[int], new: Sequence[int]) -> tuple[list[int], int]:
    """What to read, and at which position, so that `new` follows the tokens held.

    Where they do not fit the context, the newest context // 2 of held + new are read as a new
    text. UserError for no tokens, and for an id that the model does not have.
    """
    new, size = [int(token) for token in new], config.vocab_size
    if not new:
        raise UserError("expected a prompt of at least one token, got an empty one")
    if not 0 <= min(new) <= max(new) < size:
        wrong = next(token for token in new if not 0 <= token < size)
        raise UserError(
            f"expected ids from 0 to {size - 1}, as the model has, got {wrong}: encode the "
            "text with the model's own tokenizer"
        )
    if len(held) + len(new) > config.context:
        return (held + new)[-max(1, config.context // 2) :], 0
    return new, len(held)


class Decoder:
    """One text that grows. Reading returns the logits after it. `tokens` lists what is held.

    `reader` computes, by default with the reference engine.
    """

    def __init__(self, config: ModelConfig, weights: Weights, reader: Reader | None = None):
        self.config, self.tokens = config, []
        self.reader = reader or EngineReader(config, weights)

    def read(self, tokens: Sequence[int]) -> np.ndarray:
        """Read token ids (a sequence of at least one); return the logits (V,) after the last.

        `fitted` says what happens if they do not fit, and which errors come.
        """
        return self.look(tokens)[0, 0]

    def look(self, tokens: Sequence[int], rows: int = 1, heads: int = 1) -> np.ndarray:
        """Read token ids; return logits (rows, heads, V).

        Logits of `heads` predictions after each of the last `rows` tokens. `fitted` says what
        happens if the tokens do not fit, and which errors come.
        """
        new, start = fitted(self.config, self.tokens, tokens)
        logits = self.reader.read([new], [start], rows, heads)[0]
        self.tokens = self.tokens[:start] + new
        return logits

    def forget(self, n: int) -> None:
        """Take back the newest n tokens held: the next ones are read in their place."""
        self.tokens = self.tokens[: len(self.tokens) - n]


# %% sec-generation-generate
class Drawn(NamedTuple):
    """A drawn token and the logits (V,) before it; they stay valid until the next token."""

    token: int
    logits: np.ndarray

    @property
    def log_probability(self) -> float:
        """log p of the token in nats, as the model has it, before any option changes it."""
        return float(log_probabilities(self.logits)[self.token])


def draws(
    decoder: Decoder, tokens: Sequence[int], n: int, stop: Collection[int] = (),
    **sampling: Unpack[SamplingOptions],
) -> Iterator[Drawn]:  # fmt: skip
    """Read `tokens`, then yield up to `n` `Drawn`, ending before a token of `stop`.

    The last token drawn is not read. The options are those of `Sampler`. Equal arguments and
    decoders yield equal tokens. A wrong option or `n` and an empty prompt raise UserError at the
    call, a wrong id (as from `fitted`) at the first token.
    """
    sampler = Sampler(**sampling)
    check_length(n, tokens)
    return _draws(decoder, tokens, n, stop, sampler)


def check_count(what: str, n: int) -> None:
    """UserError about `what`, unless n is a whole number of at least 0."""
    if not (isinstance(n, Integral) and n >= 0):
        raise UserError(
            f"expected {what} to be a whole number of at least 0, got {n!r:.60}: choose another"
        )


def check_length(n: int, tokens: Sequence[int]) -> None:
    """UserError unless n is a whole number of at least 0 and the prompt has a token."""
    check_count("the number of new tokens", n)
    if len(tokens) == 0:
        raise UserError("expected a prompt of at least one token, got an empty one")


def _draws(decoder, tokens, n, stop, sampler):
    """The generator behind `draws`, which has checked the arguments."""
    text, new = list(tokens), tokens
    for _ in range(n):
        logits = decoder.read(new)
        token = sampler.draw(sampler.distribution(logits, text))
        if token in stop:
            return
        yield Drawn(token, logits)
        text.append(token)
        new = [token]


def generate(
    decoder: Decoder, tokens: Sequence[int], n: int, stop: Collection[int] = (),
    **sampling: Unpack[SamplingOptions],
) -> Iterator[int]:  # fmt: skip
    """The ids of up to `n` new tokens after `tokens`, ending before a token of `stop`.

    Options and errors are those of `draws`, which gives the logits, too.
    """
    return (drawn.token for drawn in draws(decoder, tokens, n, stop, **sampling))


def check_stop(stop: Collection[str]) -> None:
    """UserError unless `stop` is a collection of strings of at least a character each."""
    if isinstance(stop, str) or not all(isinstance(each, str) and each for each in stop):
        raise UserError(
            f"expected stop to be a list of texts, none of them empty, got {stop!r:.60}: "
            "leave it out, or name what the text should end before"
        )


class StopString:
    """How much of a stop string a text ends with so far (Knuth, Morris and Pratt, 1977)."""

    def __init__(self, text: str):
        self.text, self.matched = text, 0
        # shorter[n]: length of the longest prefix, of fewer than n characters, that the first n
        # characters end with
        self.shorter = [0, 0]
        for character in text[1:]:
            self.feed(character)
            self.shorter.append(self.matched)
        self.matched = 0

    def feed(self, character: str) -> bool:
        """Read the next character of the text; return whether it completes the string."""
        while self.matched and self.text[self.matched] != character:
            self.matched = self.shorter[self.matched]
        self.matched += self.text[self.matched] == character
        return self.matched == len(self.text)


def text_pieces(
    tokenizer: Tokenizer, ids: Iterable[int], stop: Collection[str] = ()
) -> Iterator[str]:
    """Yield the text of token ids as soon as it is whole: a character may take several tokens.

    It ends before the string of `stop` that is complete first. A possible beginning is held back.
    """
    held, strings = "", [StopString(each) for each in stop]
    for piece in _characters(tokenizer, ids):
        for character in piece:
            held += character
            # feed the character to every string; the lengths of those that it completes
            complete = [string.matched for string in strings if string.feed(character)]
            if complete:
                yield held[: len(held) - max(complete)]  # the longest began first
                return
        sure = len(held) - max((string.matched for string in strings), default=0)
        yield held[:sure]
        held = held[sure:]
    yield held


def _characters(tokenizer, ids):
    """The text of ids, piece by piece, never half a character."""
    # Some tokenizers drop a space that begins a text. These ids continue a text: begins=False.
    stream = tokenizer.stream(begins=False)
    for token in ids:
        yield stream.feed(token)
    yield stream.flush()


def generate_together(
    reader: Reader, prompts: Sequence[Sequence[int]], n: int, stop: Collection[int] = (),
    **sampling: Unpack[SamplingOptions],
) -> list[list[int]]:  # fmt: skip
    """Up to `n` new ids after each of several prompts; one pass reads a piece of every text.

    Text i is drawn by a `Sampler` with `seed=(seed, i)`. UserError as from `generate`, and for more
    prompts than `reader.texts`.
    """
    if len(prompts) > reader.texts:
        raise UserError(
            f"expected at most {reader.texts} prompts, as many as the reader holds, got "
            f"{len(prompts)}: make a reader for more texts"
        )
    seed = sampling.pop("seed", 0)
    seeds = tuple(seed) if isinstance(seed, list | tuple) else (seed,)
    samplers = [Sampler(**sampling, seed=(*seeds, i)) for i in range(len(prompts))]
    for prompt in prompts:
        check_length(n, prompt)
    # texts: all ids; held: those in the reader's caches; new: those still to be read
    texts, held, new = [list(p) for p in prompts], [[] for _ in prompts], [list(p) for p in prompts]
    for _ in range(n):
        if not any(new):
            break
        pairs = zip(held, new, strict=True)
        # nothing is read of a text that has ended
        asked = [fitted(reader.config, *each) if each[1] else ([], 0) for each in pairs]
        pieces, starts = map(list, zip(*asked, strict=True))
        logits = reader.read(pieces, starts)[:, 0, 0]
        for i, (piece, start) in enumerate(asked):
            if piece:
                held[i] = held[i][:start] + piece
                token = samplers[i].draw(samplers[i].distribution(logits[i], texts[i]))
                new[i] = [] if token in stop else [token]
                texts[i] += new[i]
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
