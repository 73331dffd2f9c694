"""Steps over ranks: who has what, lists of exchanges, and ranks on paper beside one device.

On paper each rank is a thread with a device of its own; exchanges happen as early as they may, or
as late. The bound of gradients: both sides add the same numbers in different orders, of each rank
no more than R + 2 additions above those that one piece of the batch has too, each off by U = 2^-24
of its result, and a result is no larger than the sum of what the ranks have in absolute value.
With several pieces a rank's addends cancel before they are seen, so lengths are compared.
"""

import threading
from dataclasses import replace
from functools import cache, partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import recorded as helpers
from lazy_driver import Driver
from test_cuda_engine import EULER, GPT, HOPPER
from test_cuda_engine import bound as bf16_bound
from tiers import kept

from nanoeuler.emulator.collectives import EmulatedLink, RankDevice
from nanoeuler.emulator.machine import Fault
from nanoeuler.engines.gpu.host import libraries
from nanoeuler.engines.gpu.host.device import Device
from nanoeuler.engines.gpu.lang.kernel import Launch
from nanoeuler.engines.gpu.ranks import exchange, nccl, stepper
from nanoeuler.engines.gpu.ranks.buckets import LEAST, Sharing
from nanoeuler.engines.gpu.ranks.exchange import (
    AFTER,
    ATTENTION,
    MASTERS,
    ONCE,
    Exchange,
    Join,
    RankStepBuilder,
)
from nanoeuler.engines.gpu.ranks.stepper import CudaRankStepper
from nanoeuler.engines.gpu.step.engine import PARTIALS
from nanoeuler.engines.gpu.step.precision import BF16, LOWER, PRECISIONS, WEIGHTS
from nanoeuler.engines.gpu.step.program import ARENA, CONSTANTS, NOWHERE, Array, Excerpt, Recording
from nanoeuler.engines.gpu.step.recording import GRADIENTS, MOMENTS, record_step
from nanoeuler.engines.gpu.step.stepper import CudaStepper
from nanoeuler.engines.ranks import controller
from nanoeuler.engines.ranks.group import Alone
from nanoeuler.engines.ranks.threads import Threads, together
from nanoeuler.errors import UserError
from nanoeuler.model.backward import IGNORE
from nanoeuler.model.config import PRESETS
from nanoeuler.model.weights import Weights, initialise
from nanoeuler.planning.exchange import Rank, predict_rank_step, rank_program, travels
from nanoeuler.planning.ranks import NVLINK
from nanoeuler.planning.step import H200, RULES
from nanoeuler.training.optim import AdamW

U = 2.0**-24
SMALL = 4096  # bytes of a bucket: a toy has several
ONE = replace(EULER, hidden=64)
TWO = replace(ONE, n_layers=2)
LR = 1e-3


# ---- Who has what


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("config", [GPT, TWO, replace(TWO, n_layers=5, tied=True, n_predict=1)],
                         ids=["GPT", "two", "tied"])  # fmt: skip
def test_buckets_and_parts_cover_everything_once(config, size):
    weights = initialise(config, 0)
    n = weights.flat.size
    for least in SMALL, LEAST:
        sharing = Sharing(weights, size, least)
        assert 0 <= sharing.length - n < 16 * size
        spans = [(b.start, b.stop) for b in reversed(sharing.buckets)]
        assert spans[0][0] == 0 and spans[-1][1] == sharing.length
        assert all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))
        starts = [*weights.block_starts]
        for bucket in sharing.buckets:  # complete when the model says so, and not before
            assert bucket.start >= (starts[bucket.block] if bucket.block >= 0 else 0)
            if bucket.block > 0:
                assert 4 * (bucket.stop - bucket.start) >= least
        numbers = np.arange(1, n + 1, dtype=np.float32)
        shards = [sharing.shard(numbers, rank) for rank in range(size)]
        assert {len(shard) for shard in shards} == {sharing.length // size}
        whole = np.zeros(sharing.length, np.float32)
        for bucket in sharing.buckets:
            for rank in range(size):
                part = sharing.part(bucket, rank)
                assert part.start % 16 == part.stop % 16 == 0
                whole[part] += shards[rank][sharing.held(bucket)]
        np.testing.assert_array_equal(whole, sharing.pad(numbers))
        pieces = sorted(sharing.pieces(5, n - 3))
        for first, last, rank, held in pieces:
            mine = shards[rank][held : held + last - first]
            assert (mine == sharing.pad(numbers)[first:last]).all()
        assert pieces[0][0] == 5 and pieces[-1][1] == n - 3
        assert all(a[1] == b[0] for a, b in zip(pieces, pieces[1:], strict=False))


# ---- Lists


def arrays_of(work):
    """What a work of a list touches."""
    found = [getattr(arg, "array", arg) for arg in work.args]
    return [array for array in found if isinstance(array, Array)]


def meets(a, b):
    """Whether two arrays may have bytes in common; each is taken from its first to its last."""
    def reach(x):
        size = sum((n - 1) * s for n, s in zip(x.shape, x.strides, strict=True))
        return x.address, x.address + size + x.dtype.itemsize

    (first, last), (start, stop) = reach(a), reach(b)
    return a.memory == b.memory and first < stop and start < last


def wrong(program):
    """What of a list races: launches between a fork and its join that touch what is exchanged, and
    exchanges that nobody waits for."""
    found, open_ = [], []
    for step in program.steps:
        if isinstance(step.launch, Join):
            open_ = []
        elif isinstance(step.launch, Exchange):
            open_.append(step)
        else:
            touched = arrays_of(step.launch)
            found += [f"{step.name} during {other.name}" for other in open_
                      if any(meets(a, b) for a in touched for b in arrays_of(other.launch))]
    return found + [f"nobody waits for {step.name}" for step in open_]


def listed(
    config=TWO, size=2, rank=0, pieces=1, precision=BF16, builder=RankStepBuilder, least=SMALL,
    copies=False,
):  # fmt: skip
    made = builder(config, HOPPER, precision, Rank(rank, size, copies), least=least)
    return made.build_step(2, 4, helpers.RULES, pieces)


MODELS = {
    "GPT-2's": (GPT, 1, BF16), "Euler's, in pieces": (TWO, 2, BF16),
    "shared blocks": (replace(TWO, n_layers=4, repeat=2, n_predict=1, tied=True), 1, BF16),
    "float32": (TWO, 1, PRECISIONS["cuda-float32"]),
}  # fmt: skip


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("when", [ATTENTION, ONCE, AFTER])
@pytest.mark.parametrize("name", MODELS)
def test_no_list_races(name, when, copies):
    config, pieces, precision = MODELS[name]
    builder = partial(RankStepBuilder, when=when)
    for rank in 0, 1:
        program = listed(config, 2, rank, pieces, precision, builder, copies=copies).program
        assert not wrong(program)
        reduced = [s.launch.args[0] for s in program.steps if s.name == "reduce"]
        spans = sorted((a.address, a.address + a.nbytes) for a in reduced)
        assert spans[0][0] == 0 and spans[-1][1] == program.sizes[GRADIENTS]
        assert all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False)), "once each"


def test_lists_of_ranks_differ_in_places_alone():
    """All ranks must do the same exchanges in the same order, or they wait for each other."""
    def shape(rank):
        return [
            (step.name, getattr(step.launch, "kind", ""), [a.shape for a in step.launch.args])
            for step in listed(rank=rank).program.steps
            if isinstance(step.launch, (Exchange, Join))
        ]

    assert shape(0) == shape(1)


@pytest.mark.parametrize("size", [2, 4])
def test_what_is_handed_over_is_added_once_and_in_the_order_of_ranks(size):
    """Each of the R - 1 pieces of every bucket, to this rank's part, behind the join."""
    for rank in range(size):
        steps = listed(size=size, rank=rank, copies=True).program.steps
        handed = [s.launch.args for s in steps if getattr(s.launch, "kind", "") == "hand over"]
        added = [arrays_of(s.launch) for s in steps if s.name == "add parts"]
        assert len(added) == (size - 1) * len(handed)
        for i, (whole, space) in enumerate(handed):
            each = whole.nbytes // size
            for j, arrays in enumerate(added[i * (size - 1) : (i + 1) * (size - 1)]):
                mine = [a for a in arrays if a.memory == GRADIENTS]
                (piece,) = (a for a in arrays if a.memory == space.memory)
                assert {(a.address, a.nbytes) for a in mine} == {
                    (whole.address + rank * each, each)}  # fmt: skip
                assert (piece.address, piece.nbytes) == (space.address + j * each, each)


def test_each_rank_gives_its_own_parts_and_every_bucket_is_gathered():
    names = helpers.Weights(TWO)
    sharing = Sharing(names, 2, SMALL)
    for rank in 0, 1:
        steps = [s for s in listed(rank=rank).program.steps if s.name == "gather copies"]
        pairs = [pair for step in steps for pair in step.launch.pairs()]
        got = [(a.address // 2, a.shape[0], b.address // 2, b.shape[0]) for a, b in pairs]
        right = []
        for bucket in reversed(sharing.buckets):
            part = sharing.part(bucket, rank)
            right.append((part.start, part.stop - part.start, bucket.start,
                          bucket.stop - bucket.start))  # fmt: skip
        assert got == right


def test_what_is_read_in_float32_is_gathered_in_float32():
    """A rank has a place for nothing else, and its launches read what exchanges have brought."""
    for config in GPT, TWO:
        program = listed(config).program
        sharing = Sharing(helpers.Weights(config), 2, SMALL)
        assert program.sizes[WEIGHTS] == 4 * sum(stop - start for start, stop in sharing.read)
        assert program.sizes[MASTERS] * 2 == 4 * sharing.length
        came, found = np.zeros(program.sizes[WEIGHTS], bool), 0
        for step in program.steps:
            for to in step.launch.args[1::2] if isinstance(step.launch, Exchange) else ():
                if to.memory == WEIGHTS:
                    came[to.address : to.address + to.nbytes] = True
        assert came.all()
        for step in program.steps:
            memories = {array.memory for array in arrays_of(step.launch)}
            assert NOWHERE not in memories, step.name
            if isinstance(step.launch, Launch):
                assert (MASTERS in memories) == (step.name == "AdamW"), step.name
                found += WEIGHTS in memories
        assert found > 2 * config.n_layers


def test_a_span_is_where_its_part_of_the_whole_is():
    whole, spans = np.arange(96), [(0, 32), (16, 48), (80, 96)]
    memory = Recording().whole("some", (80,), np.float32)
    there = np.concatenate([whole[start:stop] for start, stop in spans])
    this = Excerpt(96, memory, spans)
    for start in range(96):
        for stop in range(start + 1, 97):
            part = this[start:stop]
            inside = any(a <= start and stop <= b for a, b in spans)
            assert part.shape == (stop - start,) and (part.memory == "some") == inside
            at = part.address // 4
            assert part.address == 4 * start or inside
            if inside:
                assert (there[at : at + stop - start] == whole[start:stop]).all()
    assert this[20:30].address == 4 * (32 + 4), "the last span that holds it"


class Hasty(exchange.RankEngine):
    """Believes `ready`."""

    def ready(self, i):
        super().ready(i)
        if self.due >= 0:
            self.on_complete(self.due)


class AtOnce(RankStepBuilder):
    """Waits for no attention."""

    def __init__(self, *args, **how):
        super().__init__(*args, **how | {"when": ONCE})


class HastyBuilder(AtOnce):
    engine_type = Hasty


class Unsummed(AtOnce):
    """Lets buckets go while sums of norms wait."""

    def reduce_complete(self):
        self.engine.flush, true = lambda: None, self.engine.flush
        super().reduce_complete()
        self.engine.flush = true


class Forgetful(RankStepBuilder):
    def reduce_rest(self, losses):
        super().reduce_rest(losses)
        steps = self.recording.program.steps
        del steps[max(i for i, step in enumerate(steps) if isinstance(step.launch, Join))]


class Twice(RankStepBuilder):
    def reduce(self, bucket):
        super().reduce(bucket)
        super().reduce(bucket)


class Early(RankStepBuilder):
    """Gathers a bucket before it is updated."""

    def adamw(self, bucket, decision, rules):
        super().gather_updated([bucket])
        super().adamw(bucket, decision, rules)

    def gather_updated(self, buckets):
        pass


# Fault -> its builder, whether it is seen late, and whether the list itself shows it.
FAULTS = {
    "a bucket before its last writer": (HastyBuilder, False, True),
    "a bucket before sums of norms": (Unsummed, False, True),
    "a join is forgotten": (Forgetful, True, True),
    "a bucket twice": (Twice, False, False),
    "gathered before the update": (Early, False, True),
}


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("name", FAULTS)
def test_races_are_seen_in_the_list(name, copies):
    builder, _, shows = FAULTS[name]
    assert bool(wrong(listed(builder=builder, copies=copies).program)) == shows


# ---- Ranks on paper


class Seen(EmulatedLink):
    """Remembers what each rank gave to be summed."""

    def carry(self, work):
        if work.kind in ("reduce-scatter", "hand over"):
            self.given = [*getattr(self, "given", []), self.device.host(work.args[0])]
        super().carry(work)


def devices():
    return RankDevice(capability=(9, 0), multiprocessors=4)


def batch(config, sequences=4):
    return helpers.problem(config, sequences, 4)


def fresh(config):
    w = batch(config)[0]
    return w, AdamW(w)


def told(taken):
    return [(each.number, *each.sums, each.norm) for each in taken]


@cache
def train_one(config, steps, pieces):
    """One device with the whole batch; nobody changes what it left."""
    (w, optimizer), (_, tokens, targets, _) = fresh(config), batch(config)
    this, taken = CudaStepper(w, optimizer, devices(), pieces=pieces), []
    for number in range(1, steps + 1):
        taken += this.step(tokens, targets, LR, number)
    taken += this.finish()
    this.pull()
    (program,) = this.programs.values()
    there = this.device.host(program.shared[GRADIENTS]).reshape(-1).view(np.float32)
    return SimpleNamespace(taken=taken, w=w, optimizer=optimizer, gradients=there[: w.flat.size])


def make(
    config, group, late=False, builder=RankStepBuilder, pieces=1, when=ATTENTION, copies=False,
    precision=BF16,
):  # fmt: skip
    """A rank's stepper."""
    w, optimizer = fresh(config)
    device = devices()
    this = CudaRankStepper(
        w, optimizer, device, Seen(device, group, late, copies), group, least=SMALL, pieces=pieces,
        when=when, precision=precision,
    )  # fmt: skip
    this.step_builder = partial(builder, **this.step_builder.keywords)
    return this


def train_ranks(
    config, size, steps, late=False, builder=RankStepBuilder, pieces=1, when=ATTENTION, copies=False
):  # fmt: skip
    """What each rank has after some steps."""
    _, tokens, targets, _ = batch(config)

    def act(group):
        this, taken = make(config, group, late, builder, pieces, when, copies), []
        for number in range(1, steps + 1):
            taken += this.step(tokens, targets, LR, number)
        taken += this.finish()
        local = np.concatenate(list(reversed(this.link.given[-len(this.sharing.buckets) :])))
        this.gathering(GRADIENTS).launch()
        summed = this.device.host(this.memories[GRADIENTS])
        shapes = {name: this.memories[name].shape for name in (MASTERS, *MOMENTS)}
        this.pull()
        return SimpleNamespace(
            taken=taken, w=this.weights, optimizer=this.optimizer, local=local, summed=summed,
            copies=this.device.host(this.memories["copies"]), shapes=shapes, sharing=this.sharing,
        )  # fmt: skip

    return together(size, act)


def bits(rank):
    states = rank.w.flat, rank.optimizer.m.flat, rank.optimizer.v.flat, rank.copies
    return [state.tobytes() for state in states], told(rank.taken)


@pytest.fixture(scope="module", autouse=True)
def products_by_numpy():
    with pytest.MonkeyPatch.context() as monkeypatch:
        helpers.by_numpy(monkeypatch)
        yield


@cache
def right(steps=1):
    """Two ranks, as early as exchanges may be."""
    return train_ranks(GPT, 2, steps)


def compare(config, one, ranks):
    size = len(ranks)
    for rank in ranks:
        assert bits(rank) == bits(ranks[0]), "ranks differ"
        length = rank.sharing.length // size
        assert rank.shapes == {name: (length,) for name in (MASTERS, *MOMENTS)}
    for a, b in zip(one.taken, ranks[0].taken, strict=True):
        # The loss of a step that weights of other rounding take differs by that rounding alone,
        # and in bf16 now and then by a number that is rounded to its other neighbour.
        np.testing.assert_allclose(b.sums, a.sums, rtol=8 * size * U if a.number == 1 else
                                   bf16_bound(config) / 8)  # fmt: skip
        np.testing.assert_allclose(b.norm, a.norm, rtol=bf16_bound(config) / 8)
    moved = np.abs(ranks[0].w.flat - one.w.flat)
    assert moved.max() <= 2.1 * LR * len(one.taken)  # no element moves more than LR a step
    assert np.quantile(moved, 0.99) <= 2 * U * np.abs(one.w.flat).max()


def test_two_ranks_are_one_device():
    compare(GPT, train_one(GPT, 2, 2), right(2))


@pytest.mark.parametrize(("size", "pieces", "copies"), kept(
    [(4, 1, False), (2, 2, False), (4, 1, True)], (2, 2, False), (4, 1, True)))  # fmt: skip
def test_ranks_and_pieces_of_another_model_are_one_device(size, pieces, copies):
    one = train_one(ONE, 1, 4)
    ranks = train_ranks(ONE, size, 1, pieces=pieces, copies=copies)
    compare(ONE, one, ranks)
    n = one.w.flat.size
    off = ranks[0].summed[:n] - one.gradients
    assert np.linalg.norm(off) <= 12 * U * sum(np.linalg.norm(rank.local) for rank in ranks)
    if pieces == 1:  # what a rank has is one addend, not a small difference of two
        most = sum(np.abs(rank.local[:n]) for rank in ranks)
        assert (np.abs(off) <= 2 * (size + 2) * U * most).all()
    assert (ranks[0].summed[n:] == 0).all()


WAYS = {"late": (False, True), "when": (ATTENTION, ONCE, AFTER), "copies": (False, True)}


# Each value but those of `right`, which are early, beside attention and not copied; all are long.
FEW = (True, ONCE, True), (False, AFTER, True)


@pytest.mark.parametrize("way", kept(
    [dict(zip(WAYS, values, strict=True)) for values in product(*WAYS.values())][1:],
    *(dict(zip(WAYS, values, strict=True)) for values in FEW),
))  # fmt: skip - the first is `right`
def test_exchanges_may_be_late_and_need_not_overlap(way):
    for rank in train_ranks(GPT, 2, 1, **way):  # two addends have the same sum in either order
        assert bits(rank) == bits(right()[0])


# The one that shows itself here alone: the others are seen in the list, above.
@pytest.mark.parametrize("name, copies", kept(
    product(FAULTS, (False, True)), ("a bucket twice", False)
))  # fmt: skip
def test_faults_are_seen(name, copies):
    builder, late, _ = FAULTS[name]
    try:
        ranks = train_ranks(GPT, 2, 1, late, builder, copies=copies)
    except Fault as fault:  # what was not handed over yet is memory that nobody wrote
        assert copies and late and fault.kind == "unwritten"
    else:
        assert bits(ranks[0])[0] != bits(right()[0])[0]


def test_a_nan_on_one_rank_skips_the_step_on_all():
    _, tokens, targets, _ = batch(GPT)

    def act(group):
        this = make(GPT, group)
        kept = WEIGHTS, MASTERS, *MOMENTS
        before = {name: this.device.host(this.memories[name]) for name in kept}
        copies = this.memories["copies"]
        broken = this.device.host(copies)
        good = broken.copy()
        if group.rank:
            broken[200] = 0x7FC0  # nan in bf16: of the embedding
        this.device.fill(copies, broken)
        this.step(tokens, targets, LR, 1)
        (taken,) = this.finish()
        same = all((this.device.host(this.memories[name]) == values).all()
                   for name, values in before.items())  # fmt: skip
        this.device.fill(copies, good)
        this.step(tokens, targets, LR, 1)
        return taken.finite, same, this.finish()[0].finite

    assert together(2, act) == [(False, True, True)] * 2


@pytest.mark.parametrize("engine", ["cuda", "cuda-float32"])
def test_what_is_pushed_comes_back_on_every_rank(engine):
    def act(group):
        this = make(TWO, group, precision=PRECISIONS[engine])
        rng = np.random.default_rng(0)
        states = this.weights, this.optimizer.m, this.optimizer.v
        for state in states:
            state.flat[...] = rng.standard_normal(state.flat.size)
        kept = [state.flat.copy() for state in states]
        this.push()
        for state in states:
            state.flat[...] = 0
        this.pull()
        return [(state.flat == old).all() for state, old in zip(states, kept, strict=True)]

    assert together(4, act) == [[True] * 3] * 4


def test_ranks_judge_together_and_refuse_what_they_cannot_share():
    _, tokens, targets, _ = batch(GPT)

    def act(group):
        this = make(GPT, group)
        with pytest.raises(UserError, match="a batch of 3 sequences cannot be shared by 2 ranks"):
            this.step(tokens[:3], targets[:3], LR, 1)
        return this.sums(tokens[:3], targets[:3]), this.sums(tokens[:1], targets[:1])

    w, optimizer = fresh(GPT)
    one = CudaStepper(w, optimizer, devices())
    want = one.sums(tokens[:3], targets[:3]), one.sums(tokens[:1], targets[:1])
    first, second = together(2, act)
    for a, b, c in zip(first, second, want, strict=True):
        assert (a == b).all()
        np.testing.assert_allclose(a, c, rtol=8 * U * 3)


def test_ranks_judge_several_texts_as_one_device():
    """Where the texts of a row begin goes with the row."""
    _, tokens, targets, _ = batch(GPT)
    T = tokens.shape[1]
    first = np.minimum(np.arange(4)[:, None], np.arange(T)[None]).astype(np.int32)
    w, optimizer = fresh(GPT)
    one = CudaStepper(w, optimizer, devices())
    want, other = one.sums(tokens, targets, first), one.sums(tokens, targets, first[::-1].copy())
    (step,) = one.step(tokens, targets, LR, 1, first) + one.finish()

    def act(group):
        this = make(GPT, group)
        judged = this.sums(tokens, targets, first)
        return judged, *(this.step(tokens, targets, LR, 1, first) + this.finish())

    assert np.abs(want - other).max() > 64 * U * np.abs(want).max(), "texts make no difference"
    for found, taken in together(2, act):
        np.testing.assert_allclose(found, want, rtol=8 * U * 4)
        np.testing.assert_allclose(taken.sums, step.sums, rtol=8 * U * 4)


@pytest.mark.parametrize("size", kept([2, 4], 2))
def test_a_gpu_is_dealt_its_own_sequences_alone(size, monkeypatch):
    """What it gets with an order is its part and the scale of the whole, and makes the same step.
    """
    w, tokens, targets, _ = batch(GPT)
    targets = targets.copy()
    targets[0, 1:] = targets[-1, 3:] = IGNORE  # each part counts another number of targets
    first, dealt, deal = np.zeros_like(tokens), [], Threads.scatter_objects

    def counted(self, values=None):
        if values and values[0][0] in ("step_part", "sums_part"):
            dealt.extend((rank, value[1]) for rank, value in enumerate(values))
        return deal(self, values)

    monkeypatch.setattr(Threads, "scatter_objects", counted)
    monkeypatch.setattr(stepper, "link_of", lambda group: EmulatedLink(devices(), group))

    def whole(group):
        this = make(GPT, group)
        (taken,) = this.step(tokens, targets, LR, 1, first) + this.finish()
        return taken.sums.tobytes(), taken.norm, this.sums(tokens, targets, first).tobytes()

    def led(group):
        if group.rank:
            return controller.follow(group)
        weights = Weights(GPT, flat=w.flat.copy())
        with controller.leading(group):
            this = controller.Controller(group, "cuda", weights, AdamW(weights), None, 1)
            (taken,) = this.step(tokens, targets, LR, 1, first) + this.finish()
            return taken.sums.tobytes(), taken.norm, this.sums(tokens, targets, first).tobytes()

    monkeypatch.setattr(stepper, "CudaRankStepper", partial(CudaRankStepper, least=SMALL))
    assert together(size, led)[0] == together(size, whole)[0]
    each = len(tokens) // size
    assert len(dealt) == 2 * size
    for rank, part in dealt:
        rows = slice(rank * each, (rank + 1) * each)
        for mine, all_of_them in zip(part[2:], (tokens, targets, first), strict=True):
            assert (mine == all_of_them[rows]).all() and len(mine) == each


def test_rank_0_leads_ranks_with_gpus(monkeypatch):
    """The way of a training run: steppers are made by name, and rank 0 alone has the weights."""
    w, tokens, targets, _ = batch(GPT)
    monkeypatch.setattr(stepper, "link_of", lambda group: EmulatedLink(devices(), group))

    def act(group):
        if group.rank:
            return controller.follow(group)
        weights = Weights(GPT, flat=w.flat.copy())
        with controller.leading(group):
            this = controller.Controller(group, "cuda", weights, AdamW(weights), None, 1)
            with pytest.raises(UserError, match="3 sequences cannot be shared by 2 ranks"):
                this.step(tokens[:3], targets[:3], LR, 1)  # and the others know nothing of it
            taken = this.step(tokens, targets, LR, 1) + this.finish()
            judged = this.sums(tokens[:1], targets[:1])  # the other rank has an empty part
            this.pull()
        return taken, weights.flat, this.stepper.optimizer.m.flat, judged

    taken, flat, m, judged = together(2, act)[0]
    w, optimizer = Weights(GPT, flat=flat.copy()), fresh(GPT)[1]
    one = CudaStepper(w, optimizer, devices()).sums(tokens[:1], targets[:1])
    np.testing.assert_allclose(judged, one, rtol=8 * U)
    rank = right()[0]
    assert (taken[0].sums == rank.taken[0].sums).all()
    # Buckets are others, so the norm's sum has another order; and with it clipping.
    np.testing.assert_allclose(m, rank.optimizer.m.flat, rtol=64 * U)
    assert np.abs(flat - rank.w.flat).max() <= 2 * U * np.abs(flat).max()


# ---- What is predicted


@pytest.mark.parametrize("preset", ["gpt2-124m", "euler-116m"])
def test_memory_falls_by_the_shards(preset):
    config, size = PRESETS[preset], 4
    given = config, 16, config.context, H200.machine, BF16, RULES
    alone, shared = record_step(*given).program.sizes, rank_program(config, 16, size).sizes
    n = alone[MOMENTS[0]]
    for name in (MASTERS, *MOMENTS):
        assert shared[name] * size == n
    tables = [name for name in ("embedding", "positions") if name in helpers.Weights(config)]
    read = sum(view.nbytes for name, view in helpers.Weights(config).items()
               if name in tables or "norm" in name)  # fmt: skip
    assert shared[WEIGHTS] == read
    same = {*alone} - {WEIGHTS, LOWER, *MOMENTS, ARENA, PARTIALS, CONSTANTS, "sums"}
    assert {"gradients", "copies", "tokens 0"} <= same
    assert all(shared[name] == alone[name] for name in same)
    others = {name: shared[name] - alone[name] for name in (ARENA, PARTIALS, CONSTANTS, "sums")}
    assert sum(others.values()) < 1e6, "sums wait for a shorter time, and tables are no longer"
    after, beside = (predict_rank_step(config, 16, 2, when=when) for when in (AFTER, ATTENTION))
    assert 0 < beside.exposed < after.exposed
    assert beside.memory <= after.memory  # sums of norms wait for a shorter time


def test_an_exchange_takes_what_comes_over_the_wire():
    program = rank_program(PRESETS["gpt2-124m"], 2, 2)
    times = [travels(step.launch, NVLINK, 2) for step in program.steps
             if isinstance(step.launch, Exchange)]  # fmt: skip
    least = sum(times) - len(times) * NVLINK.latency_s
    # Gradients in float32, copies in bf16, tables in float32; half of each; and small things.
    moved = (124.44e6 * 4 + 124.44e6 * 2 + 39.38e6 * 4) / 2
    assert moved / NVLINK.bytes_per_s < least < 1.01 * moved / NVLINK.bytes_per_s


# ---- NCCL, as far as the host goes


class Streams(Driver):
    """The lazy driver, with streams that wait for each other: it notes who waits for whom."""

    def __init__(self):
        super().__init__(room=1 << 24)
        self.notes = []

    def cuCtxGetStreamPriorityRange(self):
        return 0, 0, -5

    def cuStreamCreateWithPriority(self, flags, priority):
        self.notes.append(("priority", priority))
        return 0, next(self.handles)

    def cuEventRecord(self, hEvent, hStream):
        self.notes.append(("record", hStream))
        return super().cuEventRecord(hEvent, hStream)

    def cuStreamWaitEvent(self, hStream, hEvent, Flags):
        self.notes.append(("wait", hStream))
        return (0,)


def fake_nccl(notes):
    """cupy.cuda.nccl as far as we use it; calls are noted."""
    class Communicator:
        def __init__(self, ndev, commId, rank):
            assert commId == bytes(128 * [7])  # as it came: CuPy 13 has a tuple here, 14 has bytes
            notes.append(("communicator", ndev, rank))

        def reduceScatter(self, sendbuf, recvbuf, recvcount, datatype, op, stream):
            notes.append(("reduceScatter", sendbuf, recvbuf, recvcount, datatype, op, stream))

        def allGather(self, sendbuff, recvbuff, count, datatype, stream):
            notes.append(("allGather", sendbuff, recvbuff, count, datatype, stream))

        def broadcast(self, sendbuff, recvbuff, count, datatype, root, stream):
            notes.append(("broadcast", sendbuff, recvbuff, count, datatype, root, stream))

    return SimpleNamespace(
        NcclCommunicator=Communicator, get_unique_id=lambda: bytes(128 * [7]),
        groupStart=lambda: notes.append("start"), groupEnd=lambda: notes.append("end"),
        NCCL_UINT8=1, NCCL_FLOAT32=7, NCCL_SUM=0,
    )  # fmt: skip


def test_nccl_is_asked_for_what_the_list_says(monkeypatch):
    driver = Streams()
    notes = driver.notes
    monkeypatch.setattr(libraries, "driver", lambda: driver)
    monkeypatch.setattr(libraries, "exchanges", lambda: fake_nccl(notes))
    device = Device()
    group = Alone()
    group.size = 2
    link = nccl.Nccl(device, group)
    assert notes[:2] == [("communicator", 2, 0), ("priority", -5)]
    assert [n if isinstance(n, str) else n[0] for n in notes[2:]] == [
        "start", "reduceScatter", "end", "start", "allGather", "end", "start", "broadcast", "end",
    ]  # fmt: skip
    notes.clear()
    flat = device.array(np.zeros(64, np.float32))
    mine = device.part(flat, 128, (32,), np.float32)
    work = Exchange("reduce-scatter", (flat, mine), link).prepare(device)
    graph = device.capture([work, Join(link).prepare(device)])
    stream, side = device.stream, link.side
    assert stream != side and notes == [
        ("record", stream), ("wait", side), "start",
        ("reduceScatter", flat.address, mine.address, 32, 7, 0, side), "end",
        ("record", side), ("wait", stream),
    ]  # fmt: skip
    notes.clear()
    Exchange("all-gather", (mine, flat), link).prepare(device)(5)
    assert notes == [("record", 5), ("wait", side), "start",
                     ("allGather", mine.address, flat.address, 128, 1, side), "end"]  # fmt: skip
    notes.clear()
    Exchange("all-gather", (mine, flat, mine, flat), link).prepare(device)(5)
    one = "allGather", mine.address, flat.address, 128, 1, side
    assert notes[2:] == ["start", one, one, "end"]  # both pairs, at once
    notes.clear()
    other = device.array(np.zeros(32, np.float32))
    Exchange("broadcast", (mine, mine, other, mine), link, (1, 0)).prepare(device)(5)
    assert notes[2:] == [
        "start", ("broadcast", mine.address, mine.address, 128, 1, 1, side),
        ("broadcast", other.address, mine.address, 128, 1, 0, side), "end",
    ]  # fmt: skip
    del graph


def test_a_machine_without_nccl_says_so(monkeypatch):
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="no NCCL here.*gpu-ranks"):
        libraries.exchanges()


def test_ranks_of_a_machine_take_its_gpus_in_order(monkeypatch):
    asked, number = [], stepper.NUMBER
    monkeypatch.setattr(stepper, "gpu", lambda: asked.append(stepper.os.environ[number]))
    one = {"nccl": lambda device, group: SimpleNamespace(device=device)}
    monkeypatch.setattr(stepper, "LINKS", one)
    monkeypatch.setattr(stepper, "CudaRankStepper", lambda *args, **how: how)
    for rank, gpu in (5, "1"), (2, "2"):
        monkeypatch.delenv(number, raising=False)
        group = type("Some", (), {"rank": rank, "local": 4, "size": 8})()
        for _ in range(2):
            assert stepper.ranked_stepper(group, "cuda", None, None, 3)["pieces"] == 3
        assert asked == [gpu], "one link, however many steppers"
        asked.clear()
    monkeypatch.delenv(number)


def test_only_one_rank_of_a_process_computes_at_a_time():
    running, most = [], []
    device, other = devices(), devices()

    def act(this):
        start = this.prepare(SimpleNamespace(args=(), kernel=None))
        for _ in range(20):
            start(0)

    for each in device, other:
        each.load = lambda kernel: None
    with pytest.MonkeyPatch.context() as monkeypatch:
        def play(launch, seed):
            running.append(1)
            most.append(len(running))
            threading.Event().wait(0.001)
            running.pop()

        monkeypatch.setattr(helpers.device, "play", play)
        threads = [threading.Thread(target=act, args=(each,)) for each in (device, other)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert max(most) == 1 and len(most) == 40
