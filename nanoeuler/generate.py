# Made from book/10-generation.md by nanoeuler.book: edit the chapter, not this file.


# %% book/10-generation.md:58
"""Generating text: a decoder that reads each token once, and the rules to draw the next one.

NumPy, one text at a time. Leaves out batches of texts, and the prediction heads k >= 1, which
training uses and generation does not need.

Letters: n positions being read, T positions in all, H query heads, G key/value heads, D head width,
V vocabulary, L layers.
"""

import numpy as np

from nanoeuler.errors import UserError
from nanoeuler.layers import add, embed, linear, rmsnorm, rope, rope_tables, swiglu
from nanoeuler.model import block_weights


def distribution(logits, temperature=1.0, top_k=0, top_p=1.0):
    """The probabilities (V,) float64 to draw a token from, given its logits (V,).

    temperature 0 leaves the most probable token alone; top_k 0 and top_p 1 leave out nothing. With
    both, a token must pass both. Equation eq-generation-temperature. UserError for other values.
    """
    if temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
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


# %% book/10-generation.md:148
def draw(probabilities, u):
    """The token in whose stretch of the interval the number 0 <= u < 1 falls; (V,) -> int."""
    possible = np.flatnonzero(probabilities)
    ends = np.cumsum(probabilities[possible])
    return int(possible[np.searchsorted(ends[:-1], u, side="right")])


# %% book/10-generation.md:254
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


# %% book/10-generation.md:300
class Decoder:
    """A model that reads a text token by token and keeps what it needs of it: the KV cache.

    config ModelConfig, weights `model.Weights` in float32 or float64. `tokens` lists what it holds;
    `keys` and `values` (L, G, context, D) are valid for the first len(tokens) positions.
    """

    def __init__(self, config, weights):
        self.config, self.tokens = config, []
        self._blocks = [block_weights(weights, i) for i in range(config.n_layers)]
        self._embedding, self._norm = weights["embedding"], weights["norm"]
        self._output = weights["output"][:, : config.vocab_size]  # head 0: the next token
        self._cos, self._sin = rope_tables(config.context, config.head_dim)
        shape = (config.n_layers, config.n_kv_heads, config.context, config.head_dim)
        self.keys, self.values = (np.zeros(shape, self._norm.dtype) for _ in range(2))

    def read(self, tokens):
        """Read token ids (a sequence of at least one); return the logits (V,) after the last.

        Where they do not fit the context, only the newest half context of all tokens is kept.
        """
        c, tokens = self.config, [int(token) for token in tokens]
        assert tokens, "nothing to read"
        if len(self.tokens) + len(tokens) > c.context:
            tokens = (self.tokens + tokens)[-max(1, c.context // 2) :]
            self.tokens = []
        n, start, end = len(tokens), len(self.tokens), len(self.tokens) + len(tokens)
        H, G = c.n_heads, c.n_kv_heads
        x = embed(np.array([tokens]), self._embedding)  # (1, n, C)
        for b, keys, values in zip(self._blocks, self.keys, self.values, strict=True):
            a, _ = rmsnorm(x, b.norm1)
            heads = linear(a, b.wqkv).reshape(1, n, H + 2 * G, c.head_dim)
            heads = rope(heads, H + G, self._cos[start:end], self._sin[start:end])[0]
            keys[:, start:end] = heads[:, H : H + G].swapaxes(0, 1)
            values[:, start:end] = heads[:, H + G :].swapaxes(0, 1)
            y = attend(heads[:, :H], keys[:, :end], values[:, :end])
            x = add(x, linear(y[None], b.wo))
            m, _ = rmsnorm(x, b.norm2)
            x = add(x, linear(swiglu(linear(m, b.w_gate_up)), b.w_down))
        self.tokens += tokens
        last, _ = rmsnorm(x[0, -1], self._norm)
        return linear(last, self._output)


# %% book/10-generation.md:394
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


__all__ = [
    "distribution",
    "draw",
    "hidden_keys",
    "attend",
    "Decoder",
    "generate",
    "text_pieces",
]
