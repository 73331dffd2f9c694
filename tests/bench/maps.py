"""What the heads of a trained small model look at: `python tests/bench/maps.py [RUN [TEXT]]`.

RUN is a run directory (default runs/base), TEXT the text that it was trained on (default: the
embedded corpus, as for `make train`); its held-out tenth is read. Writes
data/measurements/attention_maps.json, rows of
    sentence    the tokens of SENTENCE
    map         a head's probabilities on it, rounded: row t lists the keys 0 to t
and means over held-out windows, some of them lists [layer][head]: see `looks`, `means_share`,
`without_maps` and `copying`. It takes a few minutes.
"""

import sys
from pathlib import Path

import numpy as np

from nanoeuler import measurements
from nanoeuler.data import docstrings
from nanoeuler.data.text import digest, read_text, split
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.model.depth import walk
from nanoeuler.model.transformer import forward
from nanoeuler.model.weights import initialise
from nanoeuler.training.checkpoint import load

SENTENCE = "Return the name of the module, or None if the module has no name."
WINDOWS = 64  # held-out


class Engine(ReferenceEngine):
    """The reference engine; it keeps every layer's `maps`, and makes some heads' maps even.

    even: the (layer, head) whose probabilities become 1 / (t + 1), the mean of all it may read.
    """

    def __init__(self, even=()):
        self.maps, self.even = [], even

    def attention(self, heads, n_kv, first=None):
        y, p = super().attention(heads, n_kv, first)
        (_, T, _, D), H = heads.shape, p.shape[1]
        for layer, head in self.even:
            if layer == len(self.maps):
                values = heads[:, :, H + n_kv + head // (H // n_kv)]
                means = np.cumsum(values, axis=1) / np.arange(1, T + 1)[:, None]
                y[:, :, head * D : (head + 1) * D] = means
        self.maps.append(p)
        return y, p


def losses(engine, config, w, windows):
    """-log p (B, T) in nats of each token of `windows` (B, T + 1) but the first."""
    logits = forward(engine, config, w, windows[:, :-1])[0][:, :, 0].astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    chosen = np.take_along_axis(logits, windows[:, 1:, None], axis=-1)[..., 0]
    return np.log(np.exp(logits).sum(axis=-1)) - chosen


def looks(config, w, windows, copies, inside):
    """Yield (what, [layer][head], unit): means over the queries of each window's second half.

    inside (B, T) bool: which tokens go on with a word. The last row is of `copies`.
    """
    half = config.context // 2
    engine, again = Engine(), Engine()
    forward(engine, config, w, windows[:, :-1])
    forward(again, config, w, copies[:, :-1])
    p = np.stack(engine.maps).swapaxes(1, 2)[..., half:, :].astype(np.float64)  # (L, H, B, t, keys)
    q, t = np.arange(half), np.arange(half, config.context)
    inside = inside[:, t]
    previous, entropy = p[..., q, t - 1], -np.sum(p * np.log(np.maximum(p, 1e-30)), axis=-1)
    earlier = np.stack(again.maps).swapaxes(1, 2)[..., half:, :]
    for what, of_queries, unit in (
        ("on itself", p[..., q, t], "weight"),
        ("on the previous token", previous, "weight"),
        ("on the previous token, inside a word", previous[..., inside], "weight"),
        ("on the previous token, elsewhere", previous[..., ~inside], "weight"),
        ("on the first token", p[..., 0], "weight"),
        ("mean distance", p @ -np.arange(config.context) + t, "tokens"),
        ("keys read", np.exp(entropy), "tokens"),
        ("on the token after the original", earlier[..., q, q + 1], "weight"),
    ):
        yield what, of_queries.reshape(*p.shape[:2], -1).mean(axis=-1), unit


def without_maps(config, w, windows):
    """Yield (what, value, unit): the mean loss, and by how much even maps in place of the model's
    raise it: one at a time [layer][head], a layer's, all. Errors are standard, over windows."""
    as_it_is = losses(Engine(), config, w, windows).mean(axis=1)

    def rise(*even):
        """Of the loss: its mean over windows, and the standard error of this."""
        each = losses(Engine(even), config, w, windows).mean(axis=1) - as_it_is
        return each.mean(), each.std(ddof=1) / np.sqrt(len(each))

    layers, heads = range(config.n_layers), range(config.n_heads)
    one = np.array([[rise((i, h)) for h in heads] for i in layers])
    yield "loss", as_it_is.mean(), "nats"
    yield "rise, one map even", one[..., 0], "nats"
    yield "rise, one map even, error", one[..., 1], "nats"
    yield "rise, a layer even", [rise(*((i, h) for h in heads))[0] for i in layers], "nats"
    yield "rise, all maps even", rise(*((i, h) for i in layers for h in heads))[0], "nats"


def copying(config, w, **windows):
    """Yield (what, loss, unit) on the second halves of `windows`, without what is not in them."""
    for what, each in windows.items():
        value = losses(Engine(), config, w, each)[:, config.context // 2 : -1].mean()
        yield f"loss on a text after {what}", value, "nats"


def means_share(config, w, windows):
    """Yield (what, [place], unit): the share of the channels' mean in the square of the stream,
    where each sublayer reads it and at the end."""
    states = walk(ReferenceEngine(), config, w, windows[:, :-1])
    shares = [np.mean(x.mean(axis=-1) ** 2) / np.mean(x * x) for x in states]
    yield "mean's share", shares, "of the square"


def held_out_windows(config, tokenizer, text):
    """(WINDOWS, T + 1) each: windows of held-out tokens, spread evenly; their first halves twice;
    their first halves after the first half of another."""
    tokens, half = np.array(tokenizer.encode(split(text)[1])), config.context // 2
    starts = np.linspace(0, len(tokens) - config.context - 1, WINDOWS).astype(int)
    windows = tokens[starts[:, None] + np.arange(config.context + 1)]
    first, end = windows[:, :half], windows[:, :1]  # a last token makes T + 1, and is not counted
    return windows, np.hstack([first, first, end]), np.hstack([np.roll(first, 1, 0), first, end])


def main(out, path):
    run, text = load(out), read_text(path)
    config, tokenizer, w = run.config, run.tokenizer, run.weights
    assert run.step == run.settings.steps, f"{out} is not trained to the end"
    assert run.data == digest(text), f"{out} was not trained on {path}"
    assert SENTENCE.encode() not in text, "the sentence was in the training text"
    tokens, engine = tokenizer.encode(SENTENCE), Engine()
    forward(engine, config, w, np.array([tokens]))
    rows = [("sentence", "trained", [tokenizer.decode_text([i]) for i in tokens], "tokens")]
    for layer, p in enumerate(engine.maps):
        for head in range(config.n_heads):
            rounded = [[round(float(x), 3) for x in row[: t + 1]]
                       for t, row in enumerate(p[0, head])]
            rows.append(("map", f"layer {layer}, head {head}", rounded, "weight"))
    windows, copies, others = held_out_windows(config, tokenizer, text)
    goes_on = [tokenizer.decode_text([i])[:1].isalpha() for i in range(config.vocab_size)]
    inside = np.array(goes_on)[windows]
    fresh = initialise(config, run.settings.seed)
    measured = [("trained", row) for row in looks(config, w, windows, copies, inside)]
    measured += [("initial", row) for row in looks(config, fresh, windows, copies, inside)]
    measured += [("trained", row) for row in means_share(config, w, windows)]
    measured += [("trained", row) for row in without_maps(config, w, windows)]
    measured += [("trained", row) for row in copying(config, w, itself=copies, another=others)]
    rows += [(what, case, np.round(np.array(value, np.float64), 4).tolist(), unit)
             for case, (what, value, unit) in measured]
    measurements.save("attention_maps", [
        measurements.row(what, case, "reference", value, unit) for what, case, value, unit in rows
    ])


if __name__ == "__main__":
    given = sys.argv[1:]
    main(Path(given[0]) if given else Path("runs/base"),
         Path(given[1]) if given[1:] else docstrings.text_path())
