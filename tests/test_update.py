"""The ends of a training step on paper: cross-entropy, the gradient's norm, AdamW.

Bounds are derived. U = 2^-24 is what rounding to float32 costs at most, relative; exp2, log2 and
roots cost 4 U, a reciprocal 2 U (the manual); rounding to bf16 costs 2^-8.
"""

import math
from dataclasses import replace
from functools import cache
from importlib import import_module

import numpy as np
import pytest
import recorded
import registers
from mutants import Mutant, load, source
from tiers import kept, thinned

from nanoeuler.checks.gradcheck import TINY, TINY_GPT2
from nanoeuler.emulator import Fault, run
from nanoeuler.emulator.dtypes import from_bf16, to_bf16
from nanoeuler.engines.gpu.lang.card import SHARED as ROOMS
from nanoeuler.engines.gpu.lang.card import THREADS, limit
from nanoeuler.engines.gpu.rows import adamw, gradient_norm
from nanoeuler.engines.gpu.rows import cross_entropy as cross_entropy_module
from nanoeuler.engines.gpu.step.precision import PRECISIONS
from nanoeuler.engines.gpu.step.recording import Machine, record_step
from nanoeuler.errors import UserError
from nanoeuler.model.backward import IGNORE, cross_entropy
from nanoeuler.model.config import PRESETS
from nanoeuler.model.weights import Weights, initialise
from nanoeuler.training.optim import AdamW

# float32 on paper says aloud when it overflows, which several tests want it to.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
U = 2.0**-24
HALF = 2.0**-8  # of rounding to bf16
TINIEST = 1e-37  # about what flushing subnormals can cost


# ---- Cross-entropy


class Problem:
    """Logits of `heads` x `columns`, padded with nan, and everything around them, poisoned."""

    def __init__(self, rows, heads, columns, padded, wide=False, scale=3.0, seed=0):
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((rows, heads, padded)).astype(np.float32) * scale
        self.columns, self.shape, self.wide = columns, (rows, heads, padded), wide
        self.set(x)
        self.targets = rng.integers(0, columns, (rows, heads)).astype(np.int32)
        self.scale = np.linspace(0.25, 0.75, heads).astype(np.float32)
        self.losses = np.full((rows, heads), np.nan, np.float32)
        self.sums = np.full(heads, np.nan, np.float32)

    def set(self, x):
        """Take x (rows, heads, padded) for logits; what is padding becomes nan."""
        x[..., self.columns :] = np.nan
        stored = x if self.wide else to_bf16(x)
        self.x = (x if self.wide else from_bf16(stored))[..., : self.columns].astype(float)
        self.logits = stored.reshape(self.shape[0], -1)

    def launch(self, module=cross_entropy_module, first=0, rows=None, **options):
        part = self.logits[first : first + (rows or len(self.logits))]
        arrays = part, self.targets, self.scale, self.losses
        return module.loss_launch(*arrays, self.columns, first, **options)

    def run(self, module=cross_entropy_module, seed=None, **options):
        """Run a loss and its sums; returns the report of the loss."""
        report = run(self.launch(module, **options), seed)
        run(module.sums_launch(self.losses, self.sums), seed)
        return report

    def exact(self):
        """sums, dlogits of the reference in float64."""
        sums, d = cross_entropy(self.x[None], self.targets[None], self.scale.astype(float))
        return sums, d[0]

    def bounds(self, form):
        """The largest errors of losses (rows, heads) and dlogits.

        exp(x - top) is off by 3 U (x - top), from rounding the difference, log2(e) and their
        product, and by 4 U; a sum by a U for each addition that follows; each change of the top on
        the way by 6 U and the same 3 U (top - top'), which add up to no more than from x to the
        last top.
        """
        lane, (_, _, padded) = 4 if self.wide else 8, self.shape
        top = self.x.max(-1, keepdims=True)
        far = np.where(np.isfinite(self.x), top - self.x, 0)
        p = np.exp(self.x - top)
        z = p.sum(-1, keepdims=True)
        p /= z
        each = -(-padded // (lane * form.threads))  # vectors of a thread
        turns = 2 + -(-each // form.count)
        of_p = (3 * far + 4) * U
        of_z = (p * of_p).sum(-1, keepdims=True) + (6 * turns + lane * each + 10) * U
        at = np.maximum(self.targets, 0)[..., None]
        below = np.take_along_axis(far, at, -1)
        of_loss = of_z + 8 * U * np.maximum(1, np.log(z)) + 3 * U * below
        _, d = self.exact()
        of_d = self.scale[:, None] * (p * (of_p + of_z + 5 * U))
        of_d += 3 * U * np.abs(d) + TINIEST
        return of_loss[..., 0], of_d + (0 if self.wide else HALF * (np.abs(d) + of_d))

    def check(self, form):
        """AssertionError unless losses, sums, dlogits and their padding are right."""
        of_loss, of_d = self.bounds(form)
        sums, d = self.exact()
        stored = self.logits if self.wide else from_bf16(self.logits)
        stored = stored.reshape(self.shape)
        assert (np.abs(stored[..., : self.columns] - d) <= of_d).all()
        assert not stored[..., self.columns :].any(), "padding is not 0"
        self.check_losses(sums, of_loss)

    def check_losses(self, sums, of_loss):
        counted = self.targets != IGNORE
        z = np.log(np.exp(self.x - self.x.max(-1, keepdims=True)).sum(-1)) + self.x.max(-1)
        at = np.maximum(self.targets, 0)[..., None]
        exact = np.where(counted, z - np.take_along_axis(self.x, at, -1)[..., 0], 0)
        assert (np.abs(self.losses - exact) <= of_loss * counted).all()
        adds = -(-len(self.losses) // cross_entropy_module.ADDERS) + 10
        of_sums = (of_loss * counted).sum(0) + adds * U * np.abs(exact).sum(0)
        assert (np.abs(self.sums - sums) <= of_sums).all()


HELD = cross_entropy_module.Form("registers", 64, 2)
SHARED = cross_entropy_module.Form("shared", 64, 1, 128)
TWICE = cross_entropy_module.Form("nowhere", 64, 1)
FORMS = HELD, SHARED, TWICE
SHAPES = [
    ((1, 1, 7, 8), None), ((1, 1, 1, 8), None), ((3, 2, 7, 16, True), None),
    ((4, 1, 64, 64), None), ((2, 3, 1000, 1000), None), ((2, 1, 1001, 1024, True), None),
    ((2, 2, 1000, 1024), TWICE), ((2, 2, 1001, 1024), SHARED), ((1, 1, 2500, 2504), None),
    ((2, 1, 999, 1000, True), cross_entropy_module.Form("nowhere", 32, 3, wide=True)),
    ((2, 1, 999, 1000, True), cross_entropy_module.Form("shared", 32, 3, 250, True)),
]  # fmt: skip


def form_of(problem, form):
    return form or cross_entropy_module.form_for(problem.shape[2], problem.wide)


@pytest.mark.parametrize("shape, form", SHAPES)
def test_losses_and_their_gradient(shape, form):
    problem = Problem(*shape)
    if shape[0] > 1:
        problem.targets[1, 0] = IGNORE
    problem.run(form=form)
    problem.check(form_of(problem, form))


def extremes(wide=False):
    """Rows of 64 logits: equal, huge, forbidden by -infinity or by about the least bf16."""
    problem = Problem(5, 1, 64, 64, wide)
    x = np.random.default_rng(1).standard_normal((5, 1, 64)).astype(np.float32)
    x[0], x[1] = 2.5, x[1] * 1e4
    x[2, 0, ::2], x[3, 0, 1::3] = -np.inf, -3.38e38
    x[4, 0, 5:] = -np.inf
    problem.set(x)
    problem.targets[:, 0] = 3, 1, 7, 2, 4  # none of those that are forbidden
    return problem


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wide", [False, True])
def test_logits_that_are_large_equal_or_forbidden(form, wide):
    form = form._replace(wide=wide)
    problem = extremes(wide)
    problem.run(form=form)
    problem.check(form)


def test_equal_logits_of_a_billion():
    """Up to 1.48e9: then the last bit of the largest, times log2(e), is worth 256."""
    problem = Problem(8, 1, 8, 8, wide=True)
    rows = 1.48e9 * np.linspace(0.9, 1, 8, dtype=np.float32)
    problem.set(np.repeat(rows[:, None, None], 8, axis=2))
    problem.run()
    assert np.abs(problem.losses - np.log(8)).max() < 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_the_order_of_blocks_moves_no_bit(form):
    made = []
    for seed in (1, 2):
        problem = Problem(3, 2, 500, 520)
        problem.run(form=form, seed=seed)
        made.append((problem.logits.tobytes(), problem.losses.tobytes(), problem.sums.tobytes()))
    assert made[0] == made[1]


def test_a_row_has_the_same_bits_in_whichever_chunk():
    whole, parts = (Problem(4, 2, 500, 520) for _ in range(2))
    whole.run(form=HELD)
    for first, rows in ((0, 1), (1, 2), (3, 1)):
        run(parts.launch(first=first, rows=rows, form=HELD))
    assert np.array_equal(whole.logits, parts.logits)
    assert np.array_equal(whole.losses, parts.losses)


@pytest.mark.parametrize("form", FORMS)
def test_forward_alone_leaves_the_logits(form):
    problem, other = Problem(3, 2, 200, 208), Problem(3, 2, 200, 208)
    before = problem.logits.copy()
    problem.run(form=form._replace(gradient=False))
    other.run(form=form)
    assert np.array_equal(problem.logits, before)
    assert np.array_equal(problem.losses, other.losses)


@pytest.mark.parametrize("form", FORMS)
def test_what_has_no_loss_makes_it_nan(form):
    problem = Problem(5, 1, 60, 64)
    problem.targets[0], problem.targets[1], problem.targets[2] = 60, -2, 64
    problem.logits[3, 20] = 0x7FC0
    problem.run(form=form)
    assert np.isnan(problem.losses[:4]).all() and np.isfinite(problem.losses[4])
    assert np.isnan(problem.sums).all()


@pytest.mark.parametrize("form, reads", [(HELD, 1), (TWICE, 2)])
def test_bytes_of_a_loss(form, reads):
    """Of a row: vectors below the last column, one again by whoever has the target, and words that
    every thread reads: its target, its scale. Written: all vectors, a loss."""
    rows, columns, padded, threads = 5, 1000, 1024, form.threads
    problem = Problem(rows, 1, columns, padded)
    report = problem.run(form=form)
    vectors = reads * -(-columns // 8) + 1
    assert report["global loads bytes"] == rows * (16 * vectors + 2 * 4 * threads)
    assert report["global stores bytes"] == rows * (padded * 2 + 4)
    assert report["global stores sectors"] == rows * (padded * 2 // 32 + 1)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(logits=np.zeros((2, 12), np.uint16)), "multiple of 8"),
        (dict(logits=np.zeros((2, 16), np.float16)), "bf16"),
        (dict(logits=np.zeros((2, 32), np.uint16)[:, ::2]), "in C order"),
        (dict(targets=np.zeros((2, 1), np.int64)), "int32"),
        (dict(first=1), "from 1 on"),
        (dict(columns=17), "17 columns"),
    ],
)
def test_losses_that_do_not_fit(change, message):
    arrays = dict(
        logits=np.zeros((2, 16), np.uint16), targets=np.zeros((2, 1), np.int32),
        scale=np.ones(1, np.float32), losses=np.zeros((2, 1), np.float32), columns=16,
    )  # fmt: skip
    with pytest.raises(UserError, match=message):
        cross_entropy_module.loss_launch(**(arrays | change))
    with pytest.raises(UserError, match="sums is"):
        cross_entropy_module.sums_launch(np.zeros((2, 2), np.float32), np.zeros(3, np.float32))


# ---- The norm, and what is decided


class Judgement:
    """A gradient and what it takes to decide about it."""

    def __init__(self, gradients, losses=(1.0, 2.0), limit=1.0, number=0, steps=3):
        self.gradients = np.asarray(gradients, np.float32)
        self.sums = np.full(gradient_norm.blocks_for(len(gradients)), np.nan, np.float32)
        self.losses, self.limit = np.array(losses, np.float32), limit
        self.rates = np.linspace(1e-3, 3e-3, steps)
        self.plan = gradient_norm.schedule(self.rates, 0.9, 0.98, 0.1)
        self.number = np.array([number], np.int32)
        self.decision = np.full(8, np.nan, np.float32)

    def run(self, seed=None, module=gradient_norm):
        arrays = self.gradients, self.sums, self.losses, self.plan, self.number
        launches = module.norm_launches(*arrays, self.limit, self.decision)
        return [run(launch, seed) for launch in launches]

    def check(self):
        """AssertionError unless norm and scale are those of `AdamW.clip`, and go is 1.

        Additions that follow a square: those of a thread, of its four sums, of the block, of the
        sums; the root halves what they cost, and costs 4 U itself.
        """
        exact = math.sqrt((self.gradients.astype(float) ** 2).sum())
        rounds = -(-len(self.gradients) // (4 * gradient_norm.THREADS * len(self.sums)))
        share = ((rounds + 2 + 10 + 6 + 10) / 2 + 4) * U
        lr, _, _, decay, clip, length, go, spare = self.decision
        assert abs(length - exact) <= share * exact + TINIEST
        want = self.limit / exact if exact > self.limit else 1
        assert abs(clip - want) <= (share + 4 * U) * want
        assert (go, spare) == (1, 0)
        row = min(self.number[0], len(self.plan)) - 1
        assert np.array_equal(self.decision[:4], self.plan[row])


@pytest.mark.parametrize("count, size", [(4, 1), (16, 1e-3), (1000, 10), (7 * 4096 + 20, 1)])
def test_norm_and_scale(count, size, monkeypatch):
    monkeypatch.setattr(gradient_norm, "BLOCKS", 3)  # of which each goes round more than once
    bits = set()
    for seed in (1, 2):
        case = Judgement(np.random.default_rng(0).standard_normal(count) * size)
        case.run(seed)
        case.check()
        bits.add(case.decision.tobytes())
    assert len(bits) == 1


@pytest.mark.parametrize(
    "place, bad", [(0, np.nan), (77, np.inf), (999, -np.inf), (5, 3e19)]
)  # fmt: skip
def test_a_gradient_that_is_not_finite_is_not_stepped_with(place, bad):
    g = np.ones(1000, np.float32)
    g[place] = bad
    case = Judgement(g)
    case.run()
    assert case.decision[6] == 0 and case.number == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_loss_that_is_not_finite_is_not_stepped_with(bad):
    case = Judgement(np.ones(16), losses=(1.0, bad, 2.0))
    case.run()
    assert case.decision[6] == 0


def test_the_schedule_is_read_row_by_row_and_then_its_last():
    case = Judgement(np.ones(16))
    for number in range(1, 6):
        case.run()
        case.check()
        assert case.number == number
        row = min(number, 3)
        exact = case.rates[row - 1], 1 / (1 - 0.9**row), 1 / (1 - 0.98**row), 0.1
        assert np.array_equal(case.decision[:4], np.array(exact, np.float32))


def test_bytes_of_a_norm(monkeypatch):
    monkeypatch.setattr(gradient_norm, "BLOCKS", 3)
    case = Judgement(np.ones(20000))
    adding, _ = case.run()
    assert adding["global loads bytes"] == 4 * 20000
    assert adding["global loads sectors"] == 4 * 20000 // 32
    assert adding["global stores bytes"] == 4 * 3


def test_norms_that_do_not_fit():
    with pytest.raises(UserError, match="multiple of 4"):
        Judgement(np.ones(7)).run()
    with pytest.raises(UserError, match=r"sums is float32 \(1,\)"):
        case = Judgement(np.ones(8))
        case.sums = np.zeros(3, np.float32)
        case.run()


# ---- AdamW


RULES = dict(beta1=0.9, beta2=0.98, eps=1e-8)
CLIP, LR, DECAY = 0.75, 0.01, 0.3


class Training:
    """A model's flat buffers, the same in float64 with `AdamW`, and what rounding can cost."""

    def __init__(self, config, rounds=1, seed=0, halves=False):
        self.rounds, self.rng, self.halves = rounds, np.random.default_rng(seed), halves
        self.weights = initialise(config, seed)
        self.w = self.weights.flat
        self.m, self.v, self.g = (np.zeros_like(self.w) for _ in range(3))
        self.copy = np.full(self.w.size, 0x7FC0, np.uint16)
        self.parts = adamw.segments(self.weights)
        self.read = None
        if halves:  # of norms there is a float32 as well, one behind the other
            self.copy, self.low = adamw.to_halves(self.w)
            places = np.cumsum([0] + [part.length * (part.copy < 0) for part in self.parts])
            self.parts = [part._replace(copy=int(at) if part.copy < 0 else -1)
                          for part, at in zip(self.parts, places, strict=False)]  # fmt: skip
            self.read = np.full(places[-1] + 4, np.nan, np.float32)
        self.reference = Weights(config, np.float64)
        self.reference.flat[:] = self.w
        self.rule = AdamW(self.reference, weight_decay=DECAY, clip_norm=math.inf, **RULES)
        self.decay = np.zeros(self.w.size)
        for part in self.parts:
            self.decay[part.start : part.start + part.length] = DECAY * part.decay
        self.number, self.errors = 0, [np.zeros(self.w.size) for _ in range(3)]

    def draw(self):
        """A gradient for the next step: of one tensor it is 0, and all padding's."""
        gradients = Weights(self.weights.config, flat=self.g)
        for name, tensor in gradients.items():
            tensor[...] = self.rng.standard_normal(tensor.shape) * (name != "norm") * 0.1

    def launch(self, module=adamw, go=1.0):
        plan = gradient_norm.schedule([LR] * self.number, RULES["beta1"], RULES["beta2"], DECAY)
        decision = np.array([*plan[-1], CLIP, 1.0, go, 0.0], np.float32)
        table = module.tiles(self.parts, self.rounds)
        weights = self.low if self.halves else self.w
        buffers = module.Buffers(weights, self.g, self.m, self.v, self.copy, self.read)
        return module.adamw_launch(table, decision, buffers, **RULES, rounds=self.rounds)

    def step(self, seed=None, module=adamw):
        """One step of both, and the bounds: see `check`. Returns the report."""
        self.number += 1
        self.draw()
        before = self.rule.m.flat.copy()
        report = run(self.launch(module), seed)
        if self.halves:
            self.w[...] = adamw.from_halves(self.copy, self.low)
        clipped = Weights(self.weights.config, np.float64)
        clipped.flat[:] = self.g * np.float64(CLIP)
        w_before = self.reference.flat.copy()
        self.rule.update(self.reference, clipped, LR, self.number)
        self.bound(before, clipped.flat, w_before)
        return report

    def bound(self, m_before, g, w):
        """Errors of m, v and w after the step, from those before it.

        m: each product is off by 2 U, its constant's rounding and its own, and g by a U more; the
        sum by a U. v: the same with g twice, and a square. s: half of v's share, 8 U of root,
        addition and reciprocal, 4 U of the rest. w: 4 U of the change, a U of w.
        """
        of_m, of_v, of_w = self.errors
        b1, b2, eps = RULES.values()
        m, v = self.rule.m.flat, self.rule.v.flat
        of_m = b1 * of_m + 5 * U * (np.abs(b1 * m_before) + (1 - b1) * np.abs(g)) + TINIEST
        of_v = b2 * of_v + 6 * U * v + TINIEST
        root = np.sqrt(v / (1 - b2**self.number))
        s = np.abs(m) / (1 - b1**self.number) / (root + eps)
        share = np.divide(of_v, 2 * v, out=np.zeros_like(v), where=v > TINIEST)
        of_s = of_m / (1 - b1**self.number) / (root + eps) + s * (share + 12 * U)
        change = s + self.decay * np.abs(w)
        of_w = of_w + LR * (of_s + self.decay * of_w + 4 * U * change) + U * np.abs(w)
        self.errors = of_m, of_v, of_w

    def check(self):
        """AssertionError unless all is as `AdamW` has it in float64, up to rounding."""
        pairs = zip(
            (self.m, self.v, self.w), (self.rule.m, self.rule.v, self.reference), self.errors,
            strict=True,
        )  # fmt: skip
        for ours, exact, bound in pairs:
            assert (np.abs(ours - exact.flat) <= bound).all()
        assert self.errors[2].max() < 1e-4 * LR, "a bound that says nothing"
        kind = np.copy if self.halves else lambda own: adamw.to_halves(own)[0]
        there = self.read if self.halves else self.copy
        for part in self.parts:
            own = self.w[part.start : part.start + part.length]
            to = slice(part.copy, part.copy + part.length)
            assert part.copy < 0 or np.array_equal(there[to], kind(own))
        if self.halves:
            assert np.isnan(self.read[-4:]).all() and np.isfinite(self.read[:-4]).all()
        else:
            self.check_rest()

    def check_rest(self):
        """What has no copy was not copied."""
        copied = np.zeros(self.copy.size, bool)
        for part in self.parts:
            if part.copy >= 0:
                copied[part.copy : part.copy + part.length] = True
        assert (self.copy[~copied] == 0x7FC0).all()


@pytest.mark.parametrize("config, rounds", [(TINY, 1), (TINY_GPT2, 2)])
def test_adamw_is_that_of_training_over_several_steps(config, rounds):
    case = Training(config, rounds)
    for seed in (1, 2, 3):
        case.step(seed)
        case.check()


def test_masters_in_halves_take_the_same_steps_bit_for_bit():
    whole, halves = Training(TINY_GPT2, 2), Training(TINY_GPT2, 2, halves=True)
    for seed in (1, 2, 3):
        for case in whole, halves:
            report = case.step(seed)
            case.check()
        for name in "wmv":
            assert getattr(whole, name).tobytes() == getattr(halves, name).tobytes()
    size = sum(part.length for part in halves.parts)
    threads = adamw.THREADS * len(adamw.tiles(halves.parts, 2))
    assert report["global loads bytes"] == 16 * size + 48 * threads
    assert report["global stores bytes"] == 12 * size + 4 * (len(halves.read) - 4)


@pytest.mark.parametrize("upper", [0, 1, 0x7F, 0x80, 0x3F80, 0x7F7F, 0x8000, 0xBF81, 0xFF7F])
def test_no_bit_of_a_master_is_lost_in_halves(upper):
    """Every lower half, and by a kernel's step that changes nothing."""
    word = np.uint32(upper) << np.uint32(16) | np.arange(1 << 16, dtype=np.uint32)
    masters = word.view(np.float32)
    copy, low = adamw.to_halves(masters)
    assert np.array_equal(adamw.from_halves(copy, low).view(np.uint32), word)
    away = np.abs(from_bf16(copy).astype(float) - masters.astype(float))
    with np.errstate(invalid="ignore"):
        usual = np.abs(from_bf16(to_bf16(masters)).astype(float) - masters.astype(float))
    assert (away == usual).all() or upper in (0x7F7F, 0xFF7F), "as near as the usual rounding"
    few = slice(0x8000 - 512, 0x8000 + 512)  # round the half-way case
    copy, low, zeros = copy[few].copy(), low[few].copy(), [np.zeros(1024, np.float32)] * 3
    before = copy.tobytes(), low.tobytes()
    table = adamw.tiles([adamw.Segment(0, 1024, False, 0)])
    decision, read = np.array([0, 1, 1, 0, 1, 0, 1, 0], np.float32), np.zeros(1024, np.float32)
    run(adamw.adamw_launch(table, decision, adamw.Buffers(low, *zeros, copy, read), **RULES))
    assert (copy.tobytes(), low.tobytes()) == before
    assert np.array_equal(read.view(np.uint32), word[few])


def test_a_nan_stays_one_in_halves():
    word = np.array([0x7FFFFFFF, 0x7FC00000, 0xFFFFFFFF, 0x7F800001], np.uint32)
    copy, low = adamw.to_halves(word.view(np.float32))
    assert np.isnan(from_bf16(copy)).all() and np.isnan(adamw.from_halves(copy, low)).all()


def test_what_decays_and_what_has_a_copy():
    weights = initialise(TINY_GPT2, 0)
    of = dict(zip(weights, adamw.segments(weights), strict=True))
    assert of["embedding"].decay and of["block.0.wqkv"].decay
    assert not of["block.0.wqkv_bias"].decay and of["block.0.wqkv_bias"].copy >= 0
    assert not of["norm"].decay and of["norm"].copy == of["block.0.norm1_bias"].copy == -1
    for name, part in of.items():
        assert np.shares_memory(weights[name], weights.flat[part.start : part.start + part.length])


def test_copies_may_lie_elsewhere():
    case = Training(TINY)
    case.copy = np.full(2 * case.w.size, 0x7FC0, np.uint16)
    shift = case.w.size
    case.parts = [part._replace(copy=part.copy + shift) if part.copy >= 0 else part
                  for part in case.parts]  # fmt: skip
    case.step()
    case.check()


def test_a_step_that_is_skipped_changes_no_bit():
    case = Training(TINY)
    case.step()
    before = [x.tobytes() for x in (case.w, case.m, case.v, case.copy)]
    case.g[3] = np.nan
    report = run(case.launch(go=0.0))
    assert [x.tobytes() for x in (case.w, case.m, case.v, case.copy)] == before
    assert report["global stores"] == 0


def test_a_step_of_zero_gradients_leaves_zeros_alone():
    """As padding has them: 0 / (0 + eps)."""
    zeros = [np.zeros(8, np.float32) for _ in range(4)]
    table = adamw.tiles([adamw.Segment(0, 8, True, 0)])
    decision = np.array([0.1, 10, 50, 0.3, 1, 0, 1, 0], np.float32)
    copy = np.ones(8, np.uint16)
    run(adamw.adamw_launch(table, decision, adamw.Buffers(*zeros, copy), **RULES))
    assert not any(x.any() for x in (*zeros, copy))


def test_bytes_of_a_step():
    """30 of a parameter that has a copy, 28 of one that has none; and 48 a thread, for its tile and
    its decision."""
    case = Training(TINY, 2)
    report = case.step()
    blocks = len(adamw.tiles(case.parts, 2))
    copied = sum(part.length for part in case.parts if part.copy >= 0)
    size = sum(part.length for part in case.parts)
    assert report["global loads bytes"] == 16 * size + 48 * adamw.THREADS * blocks
    assert report["global stores bytes"] == 12 * size + 2 * copied


@pytest.mark.parametrize(
    "part, message",
    [
        (adamw.Segment(2, 8, True), "multiples of 4"),
        (adamw.Segment(0, 7, True), "multiples of 4"),
        (adamw.Segment(0, 8, True, 6), "multiples of 4"),
        (adamw.Segment((1 << 31) - 8, 8, True), "less than 2"),
    ],
)
def test_segments_that_do_not_fit(part, message):
    with pytest.raises(UserError, match=message):
        adamw.tiles([part])


def test_a_table_of_no_segments_is_empty():
    table = adamw.tiles([])
    assert table.shape == (0, 4) and table.dtype == np.int32


def test_buffers_that_do_not_fit():
    f, table = np.zeros(8, np.float32), np.zeros((1, 4), np.int32)
    good = dict(weights=f, gradients=f, m=f, v=f, copy=f.view(np.uint16))
    for name, wrong in (
        ("m", np.zeros(9, np.float32)), ("gradients", f.astype(np.float64)), ("copy", f),
    ):  # fmt: skip
        with pytest.raises(UserError, match=name):
            adamw.adamw_launch(table, f, adamw.Buffers(**(good | {name: wrong})), **RULES)
    for name, given in (("table", (table[:, :3], f)), ("decision", (table, f[:4]))):
        with pytest.raises(UserError, match=name):
            adamw.adamw_launch(*given, adamw.Buffers(**good), **RULES)


# ---- Planted faults


def play_loss(wrong):
    """Cross-entropy by a module with a fault in it: of two warps, and in several rounds of one."""
    form = cross_entropy_module.Form
    forms = HELD, form("shared", 32, 1, 66), form("nowhere", 32, 1)
    for form, columns in zip(forms, (519, 517, 513), strict=True):  # of 528: they end in any word
        problem = Problem(2, 2, columns, 528)
        problem.targets[1, 0] = IGNORE
        problem.run(wrong, form=form)
        problem.check(form)
    wide = cross_entropy_module.Form("registers", 32, 2, wide=True)
    for shape, form in (((2, 1, 256, 256), HELD), ((1, 2, 135, 136, True, 1e3), wide)):
        problem = Problem(*shape)
        problem.run(wrong, form=form)
        problem.check(form)
    extreme = extremes()
    extreme.run(wrong, form=HELD)
    extreme.check(HELD)


def play_norm(wrong):
    """Norms by a module with a fault in it."""
    for size in (0.001, 10):
        case = Judgement(np.random.default_rng(0).standard_normal(13000) * size)
        case.run(1, wrong)
        case.check()
    case = Judgement(np.ones(16), losses=(1.0, np.nan))
    case.run(None, wrong)
    assert case.decision[6] == 0
    case = Judgement(np.full(16, np.inf))
    case.run(None, wrong)
    assert case.decision[6] == 0


def play_update(wrong):
    """Steps by a module with a fault in it."""
    case = Training(TINY, 2)
    case.copy = np.full(2 * case.w.size, 0x7FC0, np.uint16)
    case.parts = [part._replace(copy=part.copy + 64) if part.copy >= 0 else part
                  for part in case.parts]  # fmt: skip
    for _ in range(2):
        case.step(module=wrong)
        case.check()
    before = case.w.tobytes()
    run(case.launch(wrong, go=0.0))
    assert case.w.tobytes() == before
    case = Training(TINY, 2, halves=True)
    for i in (0, 5, 10, 15):  # half-way cases, below even and odd neighbours, of both signs
        word = case.w[i : i + 4].view(np.uint32)
        word[...] = (word & 0xFFFF0000 | 0x8000) ^ (i << 16)
    case.reference.flat[:] = case.w
    case.copy, case.low = adamw.to_halves(case.w)
    for _ in range(2):
        case.step(module=wrong)
        case.check()
    word = np.array([0x7FFFFFFF, 0x3F808000, 0x3F818000, 0x3F817FFF], np.uint32)
    copy, low = adamw.to_halves(word.view(np.float32))
    low[0], copy[0] = 0xFFFF, 0x8000  # the nan of a GPU's arithmetic
    zeros, decision = [np.zeros(4, np.float32)] * 3, np.array([0, 1, 1, 0, 1, 0, 1, 0], np.float32)
    table = wrong.tiles([adamw.Segment(0, 4, False, -1)])
    run(wrong.adamw_launch(table, decision, wrong.Buffers(low, *zeros, copy), **RULES))
    assert np.isnan(from_bf16(copy)[0]) and list(copy[1:]) == [0x3F81, 0x3F82, 0x3F81]
    assert list(low[1:]) == [0x8000, 0x8000, 0x7FFF]


FAULTS = [
    ("rows.cross_entropy", "blank", "a column too many", "left == 1", "left == 77"),
    ("rows.cross_entropy", "fetch", "a vector too many", "elif left > 0", "elif left >= 0"),
    ("rows.cross_entropy", "bring", "not waited for", "copy_wait_all()", "pass"),
    ("rows.cross_entropy", "bring", "half a row", "row.t, row.vectors", "row.t, row.vectors // 2"),
    ("rows.cross_entropy", "mass", "the same thread's sums forgotten", "total + power", "power"),
    ("rows.cross_entropy", "highest", "no maximum", "larger_pair(both, here[i])", "here[i]"),
    ("rows.cross_entropy", "judge", "the wrong log", "float32(LN2) * ", ""),
    ("rows.cross_entropy", "spread", "no target", "float32(x[j] - by.scale)", "x[j]"),
    ("rows.cross_entropy", "spread", "padding left", "n < row.vectors",
     "n * row.lane < row.columns"),
    ("rows.cross_entropy", "erase", "half a row left", "row.t, row.vectors",
     "row.t, row.vectors // 2"),
    ("rows.cross_entropy", "gather", "no rescaling", "total * exp2(float32(own - shift))", "total"),
    ("rows.cross_entropy", "gather", "no rescaling on the way",
     "total * exp2(float32(before - own))", "total"),
    ("rows.cross_entropy", "loss", "one scale for all heads", "heads * divide(start + n, heads)",
     "start - n"),
    ("rows.cross_entropy", "add_losses", "one row left", "range(t, rows", "range(t + 1, rows"),
    ("rows.block_reduce", "block_max", "no barrier", "cuda.syncthreads()", "pass"),
    ("rows.block_reduce", "block_sum", "no barrier", "cuda.syncthreads()", "pass"),
    ("rows.block_reduce", "block_sum", "warps twice", "if lane < warps else float32(0)", ""),
    ("rows.gradient_norm", "add_squares", "a column twice", "x[i + 3] * x[i + 3]",
     "x[i + 2] * x[i + 2]"),
    ("rows.gradient_norm", "add_squares", "past the end", "first + i * step < vectors",
     "first < vectors"),
    ("rows.gradient_norm", "decide", "losses not asked", "range(losses.count)", "range(0)"),
    ("rows.gradient_norm", "decide", "infinity is stepped with", "not finite(norm)",
     "norm != norm"),
    ("rows.gradient_norm", "decide", "clipped upwards", "norm > limit", "norm > 0"),
    ("rows.gradient_norm", "decide", "one step behind", "min(step, plan.count - 1)",
     "min(step + 1, plan.count - 1)"),
    ("rows.adamw", "change", "no clip", "g * rates.clip", "g"),
    ("rows.adamw", "change", "the gradient not squared", "rates.fixed.rest2 * (g * g)",
     "rates.fixed.rest2 * g"),
    ("rows.adamw", "change", "no correction", "v * rates.v_scale", "v"),
    ("rows.adamw", "change", "decay not decoupled", "s + rates.decay * w", "s"),
    ("rows.adamw", "put_copy", "halves exchanged",
     "pair_copies(bits(here[4 * i]), bits(here[4 * i + 1]))",
     "pair_copies(bits(here[4 * i + 1]), bits(here[4 * i]))"),
    ("rows.adamw", "adamw", "all decays", "decays == 0", "decays == 7"),
    ("rows.adamw", "adamw", "skipped steps are taken", "go == float32(0)", "go == float32(2)"),
    ("rows.adamw", "adamw", "copies at the masters' places", "to + at", "first + at"),
    ("rows.adamw", "join_lower", "no sign", "(int32(lows << 16) >> 16)", "(lows & 0xFFFF)"),
    ("rows.adamw", "join_upper", "no sign", "(lows >> 16)", "(lows >> 16 & 0xFFFF)"),
    ("rows.adamw", "pair_copies", "cut off", "a + HALF", "a"),
    ("rows.adamw", "pair_copies", "half-way cases down", "b + HALF", "b + HALF - 1"),
    ("rows.adamw", "pair_lows", "exchanged", "(a & 0xFFFF)", "(b & 0xFFFF)"),
    ("rows.adamw", "bits", "a nan's bits", "int32(NAN)", "int32(bits_of(w))"),
    ("rows.adamw", "keep", "what is read at the masters' places", "put(here, i, buffers.read, to)",
     "put(here, i, buffers.read, at)"),
    ("rows.adamw", "adamw", "past the segment", "if at < count:", "if at < count + 4:"),
    ("rows.adamw", "keep", "all have copies", "if to >= 0:", "if to >= -1:"),
]  # fmt: skip
PLAYS = {
    "rows.cross_entropy": play_loss, "rows.gradient_norm": play_norm, "rows.adamw": play_update,
}  # fmt: skip


def test_all_faults_have_their_place():
    for name, *fault in FAULTS:
        source(Mutant(f"engines.gpu.{name}", *fault))


@pytest.mark.parametrize("fault", thinned([(fault,) for fault in FAULTS], 8),
                         ids=lambda f: f"{f[1]}: {f[2]}")  # fmt: skip
def test_faults_are_caught(fault, monkeypatch):
    name, function, what, old, new = fault
    wrong = load(Mutant(f"engines.gpu.{name}", function, what, old, new))
    plays = [name]
    if name == "rows.block_reduce":
        monkeypatch.setattr(cross_entropy_module, function, vars(wrong)[function])
        if function == "block_sum":
            monkeypatch.setattr(gradient_norm, function, vars(wrong)[function])
        cross_entropy_module.loss_kernel.cache_clear()
        wrong, plays = cross_entropy_module, ["rows.cross_entropy"]
    with pytest.raises((AssertionError, Fault)):
        for play in plays:
            PLAYS[play](wrong)


@pytest.mark.parametrize("play", PLAYS)
def test_plays_without_a_fault_pass(play):
    PLAYS[play](import_module(f"nanoeuler.engines.gpu.{play}"))


# ---- What a card has


@cache
def fixed():
    """Name of a kernel's function -> bytes of its shared memory beside what a launch asks for."""
    made, statics = {}, {(line[0], line[1]): line for line in registers.read()}
    for key, make in registers.makers().items():
        size = int(statics[key][registers.HEAD.index("static")])
        name = make().function.__name__
        made[name] = max(made.get(name, 0), size)
    return made


# They ask for registers for 2048 threads. Where a multiprocessor has 1536, ptxas drops that, and
# what it then takes, 34 a thread, suffices for 1536.
TOO_MANY = "gated", "curved"
VOCABULARIES = 50257, 50304, 50688, 51200, 57344, 65536


# The least room and threads, what this is written for, and a card that nobody has heard of.
@pytest.mark.parametrize("capability, preset, sizes", kept(
    [(capability, preset, sizes) for capability in [*ROOMS, (12, 1)]
     for preset, sizes in (("gpt2-124m", VOCABULARIES), ("euler-116m", VOCABULARIES[1:2]))],
    ((8, 6), "gpt2-124m", VOCABULARIES), ((9, 0), "gpt2-124m", VOCABULARIES),
    ((12, 1), "euler-116m", VOCABULARIES[1:2]),
))  # fmt: skip
def test_every_kernel_of_a_step_fits_the_card(capability, preset, sizes):
    """Of a layer, in every precision; all vocabularies with logits of either type."""
    of_block = limit(ROOMS, capability)
    threads = limit(THREADS, capability)
    static, kernels = fixed(), set()
    names = [(V, name) for V in sizes for name in ("cuda", "cuda-float32")]
    for V, name in [*names, (sizes[0], "cuda-tf32")]:
        config = replace(PRESETS[preset], n_layers=1, n_predict=1, vocab_size=V)
        of = Machine(capability, 84), PRECISIONS[name], recorded.RULES
        steps = record_step(config, 2, 64, *of)
        kernels |= {step.launch.kernel for step in steps.program.steps}
    assert {"loss", "adamw"} <= {kernel.function.__name__ for kernel in kernels}
    for kernel in kernels:
        name, count = kernel.function.__name__, math.prod(kernel.block)
        assert kernel.shared + static[name] <= of_block, name
        assert name in TOO_MANY or count * kernel.resident <= threads, name


@pytest.mark.parametrize(
    "columns, capability, place, resident",
    [
        (50304, (9, 0), "shared", 2), (50304, (8, 0), "shared", 1), (50304, (8, 9), "shared", 1),
        (50688, (8, 9), "nowhere", 1), (50688, (8, 0), "shared", 1), (51200, (12, 0), "nowhere", 1),
        # As much as a block of 8.9 has beside 272 bytes, and a vector more.
        (50552, (8, 9), "shared", 1), (50560, (8, 9), "nowhere", 1), (50560, (9, 9), "nowhere", 1),
    ],
)  # fmt: skip
def test_where_a_row_waits_on_a_card(columns, capability, place, resident):
    form = cross_entropy_module.form_for(columns, False, capability=capability)
    assert (form.place, form.resident) == (place, resident)
    assert form.shared == (2 * columns + 16 if place == "shared" else 0)
