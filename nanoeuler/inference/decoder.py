# Made from book/10-generation.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-generation-distribution
"""Generating text: a decoder that reads each token once, and the rules to draw the next one.

NumPy, one text at a time, every architecture that `ModelConfig` describes. Leaves out batches of
texts, and the prediction heads k >= 1, which training uses and generation does not need.

Letters: n positions being read, T positions in all, H query heads, G key/value heads, D head width,
V vocabulary, L layers.
"""

import numpy as np

from nanoeuler.engines import reference
from nanoeuler.errors import UserError
from nanoeuler.model.euler import INTEGRATORS
from nanoeuler.model.layers import linear, rope_tables
from nanoeuler.model.transformer import output_matrix, stream


def distribution(logits, temperature=1.0, top_k=0, top_p=1.0):
    """The probabilities (V,) float64 to draw a token from, given its logits (V,).

    temperature 0 leaves the most probable token alone; top_k 0 and top_p 1 leave out nothing. With
    both, a token must pass both. Equation eq-generation-temperature. UserError for other values.
    """
    if not 0 <= temperature < np.inf or top_k < 0 or not 0 < top_p <= 1:
        raise UserError(
            "expected temperature >= 0, top-k >= 0 and 0 < top-p <= 1, got temperature "
            f"{temperature}, top-k {top_k}, top-p {top_p}"
        )
    z = np.asarray(logits, dtype=np.float64)
    if temperature == 0:
        return np.eye(1, z.size, np.argmax(z))[0]
    p = np.exp((z - z.max()) / temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")  # of two that are equal, the smaller id comes first
    before = np.cumsum(p[order]) - p[order]  # the probability of all that are more probable
    dropped = before >= top_p
    if top_k:
        dropped[top_k:] = True
    p[order[dropped]] = 0
    return p / p.sum()


def draw(probabilities, u):
    """The token in whose stretch of the interval the number 0 <= u < 1 falls; (V,) -> int."""
    possible = np.flatnonzero(probabilities)
    ends = np.cumsum(probabilities[possible])
    return int(possible[np.searchsorted(ends[:-1], u, side="right")])


# %% sec-generation-cache
def hidden_keys(n, t):
    """Which of t keys come after each of the newest n positions: (n, t) bool."""
    return np.arange(t) > np.arange(t - n, t)[:, None]


def attend(queries, keys, values):
    """Causal grouped-query attention of the newest n of t positions over all of them.

    queries (n, H, D); keys, values (G, t, D). Query head h reads key/value head h // (H/G).
    Returns (n, H*D). The rows that `attention.attention` has last; equation eq-attention.
    """
    (n, H, D), (G, t, _) = queries.shape, keys.shape
    assert keys.shape == values.shape == (G, t, D) and n <= t and H % G == 0
    grouped = queries.reshape(n, G, H // G, D).transpose(1, 2, 0, 3)
    scores = grouped @ keys[:, None].swapaxes(2, 3) / np.sqrt(D).astype(queries.dtype)
    scores = np.where(hidden_keys(n, t), -np.inf, scores)  # (G, H/G, n, t)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights @ values[:, None]).transpose(2, 0, 1, 3).reshape(n, H * D)


class _Remembering:
    """The reference engine with an attention that keeps keys and values: the KV cache.

    `keys` and `values` (calls of attention in a pass, G, context, D). Before a pass, set `start` to
    the number of positions held and `call` to 0.
    """

    def __init__(self, config, dtype):
        calls = config.n_layers * len(INTEGRATORS[config.integrator].b)
        shape = (calls, config.n_kv_heads, config.context, config.head_dim)
        self.keys, self.values = np.zeros(shape, dtype), np.zeros(shape, dtype)
        self.start, self.call, self._tables = 0, 0, None

    def __getattr__(self, operation):
        return getattr(reference, operation)

    def rope_tables(self, T, D):
        """As `layers.rope_tables`; made once, for the whole context."""
        if self._tables is None:
            self._tables = rope_tables(self.keys.shape[2], D)
        return tuple(table[:T] for table in self._tables)

    def attention(self, heads, n_kv):
        """As `attention.attention`, for (1, n, H + 2G, D) after the `start` positions held."""
        _, n, N, _ = heads.shape
        keys, values = self.keys[self.call], self.values[self.call]
        H, new = N - 2 * n_kv, slice(self.start, self.start + n)
        keys[:, new] = heads[0, :, H : H + n_kv].swapaxes(0, 1)
        values[:, new] = heads[0, :, H + n_kv :].swapaxes(0, 1)
        self.call += 1
        return attend(heads[0, :, :H], keys[:, : new.stop], values[:, : new.stop])[None], None


class Decoder:
    """A model that reads a text token by token and keeps what it needs of it.

    config ModelConfig, weights `model.Weights` in float32 or float64. `tokens` lists what it holds.
    """

    def __init__(self, config, weights):
        self.config, self.weights, self.tokens = config, weights, []
        self._engine = _Remembering(config, weights.flat.dtype)
        self._output = output_matrix(config, weights)[:, : config.vocab_size]  # head 0

    def read(self, tokens):
        """Read token ids (a sequence of at least one); return the logits (V,) after the last.

        Where they do not fit the context, only the newest half context of all tokens is kept.
        """
        context, tokens = self.config.context, [int(token) for token in tokens]
        assert tokens, "nothing to read"
        if len(self.tokens) + len(tokens) > context:
            tokens = (self.tokens + tokens)[-max(1, context // 2) :]
            self.tokens = []
        start, ids = len(self.tokens), np.array([tokens])
        self._engine.start, self._engine.call = start, 0
        n, _ = stream(self._engine, self.config, self.weights, ids, start)
        self.tokens += tokens
        return linear(n[0, -1], self._output)


# %% sec-generation-generate
def generate(decoder, tokens, n, temperature=0.8, top_k=0, top_p=0.95, seed=0, stop=()):
    """Read `tokens`, then yield up to `n` new token ids, ending before the first one in `stop`.

    The knobs are those of `distribution`. The same arguments and weights yield the same ids.
    """
    if len(tokens) == 0:
        raise UserError("expected a prompt of at least one token, got an empty one")
    rng = np.random.default_rng(seed)
    for _ in range(n):
        p = distribution(decoder.read(tokens), temperature, top_k, top_p)
        token = draw(p, rng.random())
        if token in stop:
            return
        yield token
        tokens = [token]


def text_pieces(tokenizer, ids):
    """Yield the text of token ids as soon as it is whole: a character may take several tokens."""
    stream = tokenizer.stream()
    for token in ids:
        yield stream.feed(token)
    yield stream.flush()
