"""Decoding: products of few rows, attention over a cache, and whole passes (appendix Q).

Small models of all architectures are read on the card, cut into pieces, against float64; the peer's
error is that of the reference's operations in float32, which round to bf16 where the kernels do.
tests/bench/decode.py checks and times the models that count.
"""

from dataclasses import replace
from functools import cache, partial

import numpy as np

from nanoeuler.engines.gpu.decode.attention import heads_norm_kernel, newest_kernel
from nanoeuler.engines.gpu.decode.decoder import CudaReader, Decoding, form_of
from nanoeuler.engines.gpu.decode.gemv import few_rows_kernel
from nanoeuler.engines.gpu.decode.sampling import PICK_THREADS, enter_kernel, pick_kernel
from nanoeuler.engines.gpu.lang.bf16 import from_bf16, to_bf16
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.model import layers
from nanoeuler.model.config import PRESETS, ModelConfig
from nanoeuler.model.transformer import forward
from nanoeuler.model.weights import Weights, initialise

KINDS = "bf16", "float32"
WINDOW = 256  # of the kernels that have one
# kind, rows, whether kernels start early
MADE = [("bf16", 1, True), ("bf16", 1, False), ("bf16", 8, False), ("bf16", 64, False),
        ("float32", 1, False), ("float32", 8, False)]  # fmt: skip

LLAMA = ModelConfig(vocab_size=19, dim=16, n_layers=2, n_heads=2, n_kv_heads=1, hidden=24,
                    context=40, n_predict=2)  # fmt: skip
GPT = replace(LLAMA, n_kv_heads=2, n_predict=1, norm="layer", position="learned", mlp="gelu",
              bias=True, tied=True)  # fmt: skip
ODD = replace(LLAMA, norm="layer", mlp="gelu", tied=True, n_predict=1, repeat=2, step_size=0.5)
OTHER = replace(LLAMA, position="learned", bias=True, n_kv_heads=2, n_predict=1)
SWITCHED = replace(LLAMA, mlp="gelu_exact", sliding_window=3, window_pattern="SL",
                   qk_norm=True)  # fmt: skip
CONFIGS = {"like Llama": LLAMA, "like GPT-2": GPT, "odd": ODD, "other": OTHER,
           "switched": SWITCHED}  # fmt: skip


class Rounding(ReferenceEngine):
    """The reference's operations, with operands of products, keys and values rounded to bf16."""

    def linear(self, x, w, bias=None):
        return layers.linear(as_bf16(x), w, bias)

    def attention(self, heads, n_kv, first=None):
        n = heads.shape[2] - 2 * n_kv
        rounded = np.concatenate([heads[:, :, :n], as_bf16(heads[:, :, n:])], axis=2)
        return ReferenceEngine.attention(rounded, n_kv, first)


def as_bf16(x):
    return from_bf16(to_bf16(x.astype(np.float32))).astype(x.dtype)


@cache
def model(name, kind):
    """A model's weights in float32; and the logits of a text in float64, and as roundings have it.
    """
    config = CONFIGS[name]
    w = initialise(config, 0)
    w.flat[:] += 0.2 * np.random.default_rng(6).standard_normal(w.flat.shape).astype(np.float32)
    exact = Weights(config, np.float64)
    exact.flat[:] = w.flat
    if kind == "bf16":
        for each, tensor in exact.items():
            if tensor.ndim == 2 and each != "positions":
                tensor[...] = as_bf16(tensor)
    text = np.random.default_rng(3).integers(config.vocab_size, size=8)
    logits = forward(ReferenceEngine(), config, exact, text[None])[0][0, :, 0]
    engine = Rounding() if kind == "bf16" else ReferenceEngine()
    single = Weights(config)
    single.flat[:] = exact.flat
    peer = forward(engine, config, single, text[None])[0][0, :, 0]
    return w, text.tolist(), logits, np.linalg.norm(peer - logits)


def label(form):
    """A product's name."""
    shape, early = form.shape, ", early" if form.early else ""
    return (f"{form.front} to {form.end}, {shape.inputs}x{shape.outputs} {shape.kind}, "
            f"{form.rows} rows, {form.groups} groups{early}")  # fmt: skip


def kernels():
    """Name -> maker of each kernel of both presets."""
    made = of_switches()
    for preset in ("gpt2-124m", "euler-116m"):
        for kind, rows, early in MADE:
            this = Decoding(PRESETS[preset], kind, early=early)
            for name in this.shapes:
                form = form_of(this, name, rows)
                made[label(form)] = partial(few_rows_kernel, form)
            end, heads = (", early" if early else ""), this.heads
            name = f"newest, {heads.H}/{heads.G} heads, {heads.chunk} positions, {kind}{end}"
            made[name] = partial(newest_kernel, kind, heads, this.warps, early)
            config, output = this.config, this.shapes["output"]
            learned = config.position == "learned"
            name = f"enter, {output.inputs} channels, {config.position}, {kind}{end}"
            made[name] = partial(enter_kernel, output, learned, early)
            V, context = config.vocab_size, config.context
            made[f"pick, {V}{end}"] = partial(pick_kernel, V, context, PICK_THREADS, early)
    return made


def of_switches():
    """The same of switches that no preset has: each kernel that is another by them."""
    made = {}
    for kind, rows, early in MADE:
        this = Decoding(replace(PRESETS["gpt2-124m"], mlp="gelu_exact"), kind, early=early)
        form = form_of(this, "w_up", rows)
        made[label(form)] = partial(few_rows_kernel, form)
        this = Decoding(replace(PRESETS["euler-116m"], sliding_window=WINDOW), kind, early=early)
        form, heads = form_of(this, "wo", rows), this.heads
        made[f"{label(form)}, window"] = partial(few_rows_kernel, form)
        name = f"newest, {heads.H}/{heads.G} heads, window, {kind}{', early' if early else ''}"
        made[name] = partial(newest_kernel, kind, heads, this.warps, early)
        this = Decoding(replace(PRESETS["euler-116m"], qk_norm=True), kind, early=early)
        form, eps = form_of(this, "wqkv", rows), this.config.norm_eps
        made[f"{label(form)}, normed later"] = partial(few_rows_kernel, form)
        name = f"norm of heads, {kind}{', early' if early else ''}"
        made[name] = partial(heads_norm_kernel, kind, this.heads, eps, early)
    return made


def check(bench, name, kind):
    """The relative errors of the logits of a text in pieces, ours and the roundings'."""
    w, text, exact, peer = model(name, kind)
    this, at, made = CudaReader(w.config, w, bench.device, kind, chunk=32, warps=1), 0, []
    for n in (1, 2, len(text) - 3):
        made.append(this.read([text[at : at + n]], [at], rows=n)[0, :, 0])
        at += n
    whole = this.read([text], [0], rows=len(text))[0, :, 0]
    got = np.concatenate(made)
    if (whole != got).any():
        raise ValueError("a text at once has other bits than in pieces")
    size = np.linalg.norm(exact)
    return {"error": float(np.linalg.norm(got - exact) / size), "peer": float(peer / size)}


def checks(bench):
    """Name -> check."""
    return {f"{name}, {kind}": partial(check, bench, name, kind)
            for name in CONFIGS for kind in KINDS}  # fmt: skip


def contests(bench):
    """None: tests/bench/decode.py times whole tokens."""
    return []
