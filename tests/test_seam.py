"""The seam between the model and its engines: what an engine may override, and what it may rely on.

An engine that keeps nothing, recomputes everything, takes its logits in pieces and listens to
`ready` must give the gradients of the reference.
"""

from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from nanoeuler.checks.derivatives import relative_error
from nanoeuler.checks.gradcheck import TINY, TINY_GPT2, architectures, tiny_problem
from nanoeuler.engines.interface import OPERATIONS, Engine
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.errors import UserError
from nanoeuler.model.config import CHOICES
from nanoeuler.model.integrators import INTEGRATORS
from nanoeuler.model.transformer import backward, forward, loss_and_gradients, loss_sums, stream
from nanoeuler.model.weights import Weights

reference = ReferenceEngine()


class Frugal(ReferenceEngine):
    """Keeps neither activations nor logits: every composite has another body than the default."""

    ROWS = 7  # of logits at a time
    inside = False  # whether a layer's forward runs in the backward pass

    def enter(self, config, w, tokens, start=0, first=None):
        x = np.take(w["embedding"], tokens, axis=0)
        for t in range(tokens.shape[1] if config.position == "learned" else 0):
            x[:, t] += w["positions"][start + t if first is None else t - first[:, t]]
        return x

    def enter_backward(self, config, dw, tokens, dx, first=None):
        for (b, t), token in np.ndenumerate(tokens):
            dw["embedding"][token] += dx[b, t]
            if config.position == "learned":
                dw["positions"][t if first is None else t - first[b, t]] += dx[b, t]

    def move_norm(self, config, x, terms, gain, bias):
        x = x + sum(weight * k for weight, k in terms)
        return *super().move_norm(config, x, [], gain, bias)[:2], None  # keeps no stats

    def move_norm_backward(self, config, dn, x, gain, stats, dnorm, dx=None):
        assert stats is None
        stats = super().move_norm(config, x, [], gain, None)[2]
        du = super().move_norm_backward(config, dn, x, gain, stats, dnorm)
        if dx is None:
            return du
        dx[...] += du
        return dx

    def first_keys(self, config, B, T, first=None):
        if not config.sliding_window:
            return first
        begins = np.zeros((B, T), int) if first is None else first
        oldest = [[t - config.sliding_window + 1 for t in range(T)]]
        return np.maximum(begins, oldest)

    def attend(self, config, b, n, start=0, cache=None, first=None):
        return super().attend(config, b, n, start, cache, first)[0], first  # nothing of attention

    def attend_backward(self, config, b, db, saved, dout, again):
        saved = super().attend(config, b, again(), first=saved)[1]
        return super().attend_backward(config, b, db, saved, dout, None)

    def mlp(self, config, b, n):
        return super().mlp(config, b, n)[0], "nothing of the MLP"

    def mlp_backward(self, config, b, db, saved, dout, again):
        assert saved == "nothing of the MLP"
        return super().mlp_backward(config, b, db, super().mlp(config, b, again())[1], dout, None)

    def mlp_again(self, config, b, n):
        assert self.inside
        return self.mlp(config, b, n)[1]

    @contextmanager
    def running_again(self):
        assert not self.inside
        self.inside = True
        yield
        self.inside = False

    def loss(self, n, W, targets, scale, dW=None, cap=0.0):
        rows, t = n.reshape(1, -1, n.shape[-1]), targets.reshape(1, -1, targets.shape[-1])
        sums, dn = np.zeros(len(scale)), None if dW is None else np.empty_like(rows)
        for i in range(0, rows.shape[1], self.ROWS):
            at = np.s_[:, i : i + self.ROWS]
            some, d = super().loss(np.ascontiguousarray(rows[at]), W, t[at], scale, dW, cap)
            sums = sums + some
            if d is not None:
                dn[at] = d
        return sums, dn if dn is None else dn.reshape(n.shape)


class Listening(Frugal):
    """Copies the flat gradient at each `ready`."""

    def __init__(self, dw):
        self.dw, self.heard, self.front_begun = dw, [], False

    def ready(self, i):
        assert not self.front_begun
        self.heard.append((i, self.dw.flat.copy()))

    def enter_backward(self, *arguments):
        self.front_begun = True
        super().enter_backward(*arguments)


ARCHITECTURES = {
    **architectures(),
    "ours": TINY,
    "GPT-2's": TINY_GPT2,
    **{
        f"GPT-2's by {integrator}, shared": replace(
            TINY_GPT2, n_layers=4, repeat=2, integrator=integrator, step_size=0.7
        )
        for integrator in CHOICES["integrator"]
    },
}
# Float64 rounds by 1.1e-16. The two engines do the same operations; what differs is the order of
# the sums over the rows of logits, over tokens and over the terms of a step, some dozen terms each,
# and the passes below carry such roundings on through some hundred sums: with room, 4096 roundings.
# The least visible mistake on purpose in these models (tests/helpers/mutants.py) is 8e-7.
TOLERANCE = 4096 * 2.0**-53


def gradient(engine, problem, dw):
    """The sums (K,) and dw, by a pass over the whole batch of `problem`."""
    config, w, tokens, targets, scale = problem
    return loss_and_gradients(engine, config, w, tokens, targets, scale, dw), dw


@pytest.mark.parametrize("config", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_an_engine_may_have_its_own_composites(config):
    problem = tiny_problem(config)
    sums, dw = gradient(reference, problem, problem.w.zeros_like())
    other_sums, other = gradient(Frugal(), problem, problem.w.zeros_like())
    np.testing.assert_allclose(other_sums, sums, rtol=TOLERANCE)
    for name in dw:
        assert relative_error(other[name], dw[name]) <= TOLERANCE, name
    again = Frugal()
    again.recompute = True  # layers as well
    _, same = gradient(again, problem, problem.w.zeros_like())
    assert same.flat.tobytes() == other.flat.tobytes()
    just_sums = loss_sums(Frugal(), config, problem.w, problem.tokens, problem.targets)
    np.testing.assert_allclose(just_sums, sums, rtol=TOLERANCE)


def test_the_engine_of_these_tests_overrides_every_composite():
    composites = {name for name in vars(Engine) if name[0] != "_"} - set(OPERATIONS)
    composites -= {"norm_heads", "norm_heads_backward"}  # CpuEngine overrides these: test_cpu
    composites -= {"recompute", "forward_only"}  # which an engine may set
    assert composites == {name for name in vars(Listening) | vars(Frugal) if name[0] != "_"} - {
        "ROWS", "inside"
    }  # fmt: skip


@pytest.mark.parametrize("config", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_ready_comes_in_order_and_only_when_a_suffix_is_final(config):
    problem = tiny_problem(config)
    dw = problem.w.zeros_like()
    dw.flat[...] = 1  # gradients are added to what is there
    engine = Listening(dw)
    gradient(engine, problem, dw)
    assert [i for i, _ in engine.heard] == [*range(config.n_blocks, -1, -1)]
    starts, summed, end = dw.block_starts, [], dw.flat.size
    for i, flat in engine.heard:
        np.testing.assert_array_equal(flat[starts[i] :], dw.flat[starts[i] :])  # final
        assert np.all(flat[starts[0] : starts[i]] == 1)  # nor late: block i - 1 is untouched
        summed.insert(0, flat[starts[i] : end])  # what an all-reduce would take now
        end = starts[i]
    np.testing.assert_array_equal(np.concatenate([dw.flat[:end], *summed]), dw.flat)
    assert end == starts[0] and np.any(dw.flat[:end] != 1)


def test_an_engine_must_have_every_primitive():
    names = OPERATIONS
    assert len(names) == len(set(names)) and set(names) == Engine.__abstractmethods__
    for name in names:
        lacking = {other: getattr(ReferenceEngine, other) for other in names if other != name}
        with pytest.raises(TypeError, match=f"abstract method '?{name}'?"):
            type("Lacking", (Engine,), lacking)()
    type("Complete", (Engine,), {name: getattr(ReferenceEngine, name) for name in names})()


class Whole:
    """A cache that keeps all heads, and answers by the whole attention over them."""

    def __init__(self):
        self.heads, self.calls = None, []

    def attention(self, heads, n_kv, start):
        held = heads if start == 0 else np.concatenate([self.heads[:, :start], heads], axis=1)
        self.heads = held
        self.calls.append((start, heads.shape[1]))
        return reference.attention(held, n_kv)[0][:, start:]


CUTS = {"one by one": [1] * 5, "at once": [5], "in pieces": [2, 1, 2], "late": [1, 4]}
WALKS = [
    {"integrator": integrator, "step_size": 0.7, "n_layers": 2 * repeat, "repeat": repeat}
    for integrator, repeat in product(INTEGRATORS, (1, 2))
]


def caches_of(config):
    """A `Whole` for every call of attention."""
    stages = len(INTEGRATORS[config.integrator].b)
    return [[Whole() for _ in range(stages)] for _ in range(config.n_layers)]


@pytest.mark.parametrize("engine", [reference, Frugal()], ids=["reference", "frugal"])
@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: f"{walk['integrator']} {walk['repeat']}")
@pytest.mark.parametrize("tiny", [TINY, TINY_GPT2], ids=["ours", "gpt2"])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_pass_with_caches_gives_the_same_logits(cut, tiny, walk, engine):
    config, w, tokens, *_ = tiny_problem(replace(tiny, **walk))
    exact = forward(reference, config, w, tokens)[0]
    caches, start = caches_of(config), 0
    for n in cut:
        piece = tokens[:, start : start + n]
        logits = forward(engine, config, w, piece, start, caches)[0]
        wanted = exact[:, start : start + n]
        assert relative_error(logits, wanted) <= TOLERANCE
        start += n
    starts = [sum(cut[:i]) for i in range(len(cut))]
    for cache in sum(caches, []):  # each was asked once a pass, at the place of the pass
        assert cache.calls == list(zip(starts, cut, strict=True))


def test_two_readers_in_turns_keep_apart():
    config, w, tokens, *_ = tiny_problem(replace(TINY, integrator="heun", n_layers=4, repeat=2))
    exact = forward(reference, config, w, tokens)[0]
    readers = [(text, caches_of(config)) for text in tokens]
    for t in range(config.context):
        for (text, caches), rows in zip(readers, exact, strict=True):
            logits = forward(reference, config, w, text[None, t : t + 1], t, caches)[0]
            assert relative_error(logits[0, 0], rows[t]) <= TOLERANCE


def test_what_did_not_begin_at_the_start_has_no_backward():
    config, w, tokens, *_ = tiny_problem()
    n, saved = stream(reference, config, w, tokens[:, 1:], start=1)
    with pytest.raises(AssertionError, match="position 0, got one from 1"):
        backward(reference, config, w, saved, n, Weights(config, np.float64))


@pytest.mark.parametrize("tiny", [TINY, TINY_GPT2], ids=["ours", "gpt2"])
def test_a_text_beyond_the_context_is_refused(tiny):
    config, w, tokens, *_ = tiny_problem(tiny)
    for start, longer in ((0, np.tile(tokens, 2)), (1, tokens)):
        n = start + longer.shape[1]
        with pytest.raises(UserError, match=f"at most 5 tokens, the context, got {n}:"):
            forward(reference, config, w, longer, start)


def test_a_move_changes_nothing_that_it_was_given():
    rng = np.random.default_rng(0)
    x, k, gain = rng.standard_normal((2, 3, 4)), rng.standard_normal((2, 3, 4)), np.ones(4)
    before = x.copy(), k.copy()
    y, n, _ = reference.move_norm(TINY, x, [(0.5, k), (2.0, k)], gain, None)
    np.testing.assert_array_equal((x, k), before)
    np.testing.assert_allclose(y, x + 2.5 * k, rtol=1e-14)
    np.testing.assert_array_equal(n, reference.rmsnorm(y, gain)[0])
    assert reference.move_norm(TINY, x, [], gain, None)[0] is x
