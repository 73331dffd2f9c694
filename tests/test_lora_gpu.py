"""LoRA on a GPU's engine, on paper: the merge, gradients beside the reference in float64, steps.

The bound of a gradient is that of tests/test_cuda_engine.py, for R roundings to bf16 on its way.
Adapters add four: A, B, x A and dy B.
"""

import importlib
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import recorded as helpers
from mutants import Mutant, source
from mutants import load as mutated
from published import PUBLISHED
from recorded import RATES, RULES
from safetensors.numpy import load_file
from test_cuda_engine import AMPERE, EULER, GPT, HOPPER, TEXTS, TURNED
from test_cuda_engine import bound as bound_without
from test_lora import SMALL, drawn
from tiers import kept, thinned

from nanoeuler.cli.main import main
from nanoeuler.emulator import Device, run
from nanoeuler.emulator.dtypes import from_bf16, to_bf16
from nanoeuler.engines import registry
from nanoeuler.engines.gpu.gemm import low_rank
from nanoeuler.engines.gpu.rows import lora_merge
from nanoeuler.engines.gpu.rows.lora_merge import Place, merge_launch, merge_tiles
from nanoeuler.engines.gpu.step import lora as module
from nanoeuler.engines.gpu.step.engine import CudaEngine
from nanoeuler.engines.gpu.step.lora import (
    ADAPTER_COPIES,
    ADAPTERS,
    LoraBuilder,
    LoraEngine,
    LoraStepper,
    Packing,
    spread,
)
from nanoeuler.engines.gpu.step.precision import BF16, COPIES, WEIGHTS
from nanoeuler.engines.gpu.step.program import ARENA
from nanoeuler.engines.gpu.step.recording import GRADIENTS, fill_batch, fill_step, record_step
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.engines.registry import make_stepper
from nanoeuler.errors import UserError
from nanoeuler.model.config import PRESETS, count_parameters
from nanoeuler.model.lora import (
    AdaptedWeights,
    Adapters,
    Lora,
    adapted,
    adapter_shapes,
    for_adapters,
)
from nanoeuler.model.transformer import loss_and_gradients
from nanoeuler.model.weights import Weights, initialise
from nanoeuler.planning import plan, step
from nanoeuler.planning.cards import CARDS
from nanoeuler.planning.lora import lora_host_bytes
from nanoeuler.training.checkpoint import load
from nanoeuler.training.folder import checkpoints, read_metrics
from nanoeuler.training.lora import LoraAdamW
from nanoeuler.training.run import Settings
from nanoeuler.training.sft import finetune
from nanoeuler.training.train import train


def bound(config):
    """See above: R is 32 at least."""
    return bound_without(config) * (36 / 32) ** 0.5


# ---- Merging


class Merging:
    """Two adapters of rank 5, padded to 8, in flat buffers that hold more; everything around them
    poisoned, or what reading it would show."""

    def __init__(self, seed=0, scale=1.5, rows=132, pitch=300, wide=(268, 24)):
        rng, self.scale, self.rank = np.random.default_rng(seed), scale, 8
        self.weights = rng.standard_normal(16 + rows * pitch).astype(np.float32)
        self.adapters = np.full(4 + rows * 16 + 8 * sum(wide) + 4, np.nan, np.float32)
        self.copies = np.full(self.weights.size, 0x7FC0, np.uint16)
        A = self.adapters[4 : 4 + rows * 16].reshape(16, rows).T
        A[...] = rng.standard_normal(A.shape)
        self.exact, self.sizes = np.full(self.weights.size, np.nan), np.zeros(self.weights.size)
        self.places, start, column = [], 4 + rows * 16, 0
        for i, columns in enumerate(wide):
            B = self.adapters[start : start + 8 * columns].reshape(8, columns)
            B[...] = rng.standard_normal(B.shape)
            A[:, 8 * i + 5 : 8 * i + 8], B[5:] = 0, 0
            mine, w = A[:, 8 * i : 8 * i + 8].astype(float), slice(column, column + columns)
            first = 16 + column
            of_a = 4 + 8 * i * rows
            self.places.append(Place(first, pitch, rows, columns, of_a, rows, start, columns))
            at = 16 + np.arange(rows)[:, None] * pitch + np.arange(pitch)[None, w]
            self.exact[at] = self.weights[at] + scale * mine @ B.astype(float)
            self.sizes[at] = np.abs(self.weights[at]) + abs(scale) * np.abs(mine) @ np.abs(B)
            start, column = start + 8 * columns, column + columns

    def launch(self, kernels=lora_merge):
        sizes = self.rank, self.weights.size, self.adapters.size
        table = kernels.merge_tiles(self.places, *sizes)
        given = table, self.weights, self.adapters, self.copies, self.scale, self.rank
        return kernels.merge_launch(*given)

    def check(self):
        """What is merged is rounded once to bf16, by 2^-8 of it at most, after nine roundings to
        float32, each of at most the terms' size; the rest is as it was."""
        made, there = from_bf16(self.copies).astype(float), ~np.isnan(self.exact)
        off = np.abs(made - self.exact)[there]
        most = 2.0**-8 * np.abs(self.exact[there]) + 10 * 2.0**-24 * self.sizes[there]
        assert (off <= most).all()
        assert (self.copies[~there] == 0x7FC0).all()


def play_merge(kernels=lora_merge):
    """Merge by the kernels of a module, and check it."""
    for rows, wide in ((132, (268, 24)), (12, (8, 4))):
        case = Merging(rows=rows, wide=wide)
        run(case.launch(kernels), 1)
        case.check()


@pytest.mark.parametrize("sizes", [{}, {"rows": 4, "pitch": 8, "wide": (4, 4)},
                                   {"rows": 12, "pitch": 600, "wide": (512, 88)}])  # fmt: skip
def test_the_merge_is_w_and_the_product(sizes):
    bits = set()
    for order in (None, 1, 2):
        case = Merging(**sizes)
        run(case.launch(), order)
        case.check()
        bits.add(case.copies.tobytes())
    assert len(bits) == 1


def test_bytes_of_a_merge():
    case = Merging(rows=128, pitch=256, wide=(256,))
    report, number = run(case.launch()), 128 * 256
    assert report["global stores bytes"] == 2 * number
    assert report["global stores sectors"] == 2 * number // 32
    # W once; of A and B what threads ask the caches for: A for 4 columns, B for 8 rows; the table.
    asked = number // 4 * 8 * 4 + number // 8 * 8 * 4 + 32 * 256
    assert report["global loads bytes"] == 4 * number + asked


def test_a_merge_with_b_of_zero_is_the_copy():
    case = Merging()
    for place in case.places:
        case.adapters[place.b : place.b + 8 * place.columns] = 0
    run(case.launch())
    there = ~np.isnan(case.exact)
    assert np.array_equal(case.copies[there], to_bf16(case.weights)[there])


MERGES = {
    "no scale": ("store_merged", "ptx.fma(scale, sums[j], base[j])", "float32(sums[j] + base[j])"),
    "the sums of the rows before": ("merge", "sums[i] = float32(0)", "sums[i] = sums[i]"),
    "rows of A in the wrong order": ("add_products", "a + 4 * i", "a + 4 * (4 - i)"),
    "the rank begins at 1": ("merge", "range(rank)", "range(1, rank)"),
    "A of the adapter before": ("merge", "int64(a + k * a_pitch", "int64(a - 4 + k * a_pitch"),
    "columns beyond the tile": ("merge", "column < columns", "column < columns + LANE"),
    "rows beyond the tile": ("store_merged", "i < rows", "i <= rows"),
    "tiles begin at the first row of A": ("merge_tiles", "a + row,", "a,"),
    "tiles begin at the first column of B": ("merge_tiles", "b + column", "b"),
}  # fmt: skip


@pytest.mark.parametrize("what", thinned(MERGES, 9))
def test_a_mistake_in_the_merge_is_seen(what):
    function, old, new = MERGES[what]
    wrong = mutated(Mutant(MERGE, function, what, old, new))
    with pytest.raises(Exception):  # noqa: B017, PT011 a fault of the emulator, or of the numbers
        play_merge(wrong)


@pytest.mark.parametrize("change, words", [
    ({"w": 2}, "multiples of 4 elements"), ({"columns": 30}, "multiples of 4"),
    ({"rows": 140}, "lies outside of 39616 weights"), ({"b": 1 << 20}, "lies outside"),
    ({"a": -4}, "lies outside"),
])  # fmt: skip
def test_adapters_that_lie_elsewhere_are_refused(change, words):
    case = Merging()
    places = [case.places[0]._replace(**change)]
    with pytest.raises(UserError, match=words):
        merge_tiles(places, 8, case.weights.size, case.adapters.size)


def test_merges_that_do_not_fit_are_refused():
    case, table = Merging(), np.zeros((1, 8), np.int32)
    given = [case.weights, case.adapters, case.copies, 1.0]
    with pytest.raises(UserError, match="1 or more, not 0"):
        merge_launch(table, *given, 0)
    with pytest.raises(UserError, match="copies is uint16"):
        merge_launch(table, case.weights, case.adapters, case.copies[:-8], 1.0, 8)
    with pytest.raises(UserError, match="less than 2\\^31 elements"):
        merge_tiles([], 8, 1 << 31, 8)


# ---- Weights that are bf16 already


def test_a_small_change_of_weights_that_are_bf16_is_not_lost():
    """A fifth of the distance to the next bf16: every fifth weight moves there. Without the low
    bits none would."""
    rng = np.random.default_rng(1)
    base = from_bf16(to_bf16((1 + 0.9 * rng.random(20000)).astype(np.float32)))  # 2^-7 apart
    low = spread(base, rng)
    assert np.array_equal(to_bf16(low), to_bf16(base)) and not np.array_equal(low, base)
    step = np.float32(0.2 * 2.0**-7)
    assert np.array_equal(to_bf16(base + step), to_bf16(base))
    moved = from_bf16(to_bf16(low + step)) - base
    assert {*np.unique(moved)} == {0, 2.0**-7}
    # A share of 20,000 draws is within four deviations, sqrt(0.16 / 20000), of what it should be.
    assert abs(np.mean(moved > 0) - 0.2) < 4 * (0.16 / 20000) ** 0.5


def test_other_weights_are_left_as_they_are():
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, 0.1, 1 / 3], np.float32)
    assert np.array_equal(spread(special, np.random.default_rng(0)), special, equal_nan=True)
    powers = np.float32([2.0**-126, 1, -2, 3.3895314e38] * 1000)
    assert np.array_equal(to_bf16(spread(powers, np.random.default_rng(0))), to_bf16(powers))


# ---- A step beside the reference

SHARED = replace(EULER, n_predict=1, tied=True, n_layers=2, repeat=2, integrator="heun",
                 step_size=0.7, mlp="gelu", hidden=64)  # fmt: skip
NORMED = replace(EULER, n_predict=1, tied=True, qk_norm=True, head_width=64)
CASES = {
    "GPT-2's, q and v": (GPT, Lora(3, 5.0, ("q", "v")), 1),
    "Euler's, in pieces": (EULER, Lora(2), 2),
    "tied, shared, by Heun": (SHARED, Lora(12, 6.0), 1),
    "RoPE and gates by products": (replace(TURNED, n_layers=2), Lora(4, 2.0), 2),
    "the MLP alone": (TURNED, Lora(8, None, ("up", "down")), 1),
    "biases of q, k, v, LayerNorm": (
        replace(EULER, norm="layer", position="learned", qkv_bias=True, n_kv_heads=2),
        Lora(5, 7.0), 1),
    "Qwen3's, norms of heads": (NORMED, Lora(3, 5.0), 2),
    "norms of heads, learned, shared": (
        replace(GPT, qk_norm=True, n_layers=2, repeat=2), Lora(2, None, ("q", "k")), 1),
}  # fmt: skip


def setting(config, lora, B, T):
    """Weights, not merged, with adapters of which none is 0; tokens, targets, scale."""
    w, *batch = helpers.problem(config, B, T)
    both = AdaptedWeights(w, lora.settled(config))
    drawn(both.adapters, size=0.1)  # as large as what the problem adds to weights
    return both, *batch


def exactly(both, tokens, targets, scale, first=None):
    """The gradients and the sums of losses by the reference in float64."""
    config = both.config
    exact = AdaptedWeights(Weights(config, np.float64, both.flat.astype(float)), both.lora)
    exact.adapters.flat[...] = both.adapters.flat
    exact.merge()
    found = exact.zeros_like()
    engine = for_adapters(ReferenceEngine())
    return found, loss_and_gradients(engine, config, exact, tokens, targets, scale, found, first)


def played(case, B, T, made, first=None):
    """The recorded step of a builder's, and the memories that it leaves on paper."""
    config, lora, pieces = case
    both, tokens, targets, scale = setting(config, lora, B, T)
    lora, packing = both.lora, Packing(config, both.lora)
    recorded = made.build_step(B, T, RULES, pieces, first is not None)
    memories = {name: np.zeros(a.shape, a.dtype) for name, a in recorded.inputs.items()}
    fill_batch(memories, config, tokens, targets, first)
    fill_step(memories, scale * lora.scale, np.float32([RATES]), config.vocab_size)
    memories |= {WEIGHTS: both.flat.copy(), COPIES: to_bf16(both.flat)}
    views = Weights(config, np.uint16, memories[COPIES])
    for _, tensor, columns in adapted(config, lora):
        views[tensor][:, columns] = 0x7FC0  # for the merge to write
    flat = packing.pack(both.adapters)
    memories |= {ADAPTERS: flat, ADAPTER_COPIES: to_bf16(flat), GRADIENTS: np.zeros_like(flat)}
    for group in packing.groups(memories[GRADIENTS]).values():
        for part in (group.A, *group.B):
            part[...] = np.nan
    helpers.play(recorded.program, memories)
    return recorded, memories


def step_on_paper(case, B=2, T=4, machine=HOPPER, first=None, builder=LoraBuilder):
    """name -> relative error of a step's gradients, A and B of each matrix, and of its sums."""
    config, lora, _ = case
    both, tokens, targets, scale = setting(config, lora, B, T)
    lora, packing = both.lora, Packing(config, both.lora)
    built = builder(lora, config, machine, BF16)
    recorded, memories = played(case, B, T, built, first)
    made = Adapters(config, lora)
    packing.unpack(memories[GRADIENTS], made)
    exact, sums = exactly(both, tokens, targets, scale, first)
    shape = recorded.results["sums"].shape
    told = memories["sums"].view(np.float32).reshape(shape)[:, : config.n_predict].sum(0)
    return relative_errors(packing, (told, made), (sums, exact))


@pytest.mark.parametrize("name", kept(
    ["RoPE and gates by products", "norms of heads, learned, shared", "tied, shared, by Heun"],
    "RoPE and gates by products",
))  # fmt: skip
def test_no_bit_differs_if_blocks_are_run_again(name, monkeypatch):
    """Where weights are frozen and adapters learn."""
    helpers.by_numpy(monkeypatch)
    config, lora, _ = case = CASES[name]
    left, lists = [], []
    for again in False, True:
        precision = BF16._replace(recompute=again)
        built = LoraBuilder(lora.settled(config), config, HOPPER, precision)
        recorded, memories = played(case, 2, 4, built)
        names = GRADIENTS, ADAPTERS, ADAPTER_COPIES, "m", "v", "sums", "decision"
        left.append([memories[each].tobytes() for each in names])
        lists.append(recorded.program)
    assert left[0] == left[1] and np.frombuffer(left[0][0], np.float32).any()
    assert len(lists[0].steps) < len(lists[1].steps)


def relative_errors(packing, made, exact):
    """name -> relative error of A and B of each matrix as a whole, and of the sums of losses.

    made, exact: the sums, and the gradients of all adapters.
    """
    pairs = {"sums": (made[0], exact[0])}
    for tensor, names in packing.names.items():  # as the bound has it, of a matrix as a whole
        for side in "AB":
            mine = [[of[f"{name}.{side}"] for of in (made[1], exact[1])] for name, _ in names]
            pairs[f"{tensor}.{side}"] = tuple(np.concatenate([x.ravel() for x in part])
                                              for part in zip(*mine, strict=True))  # fmt: skip
    return {name: np.linalg.norm(a - b) / np.linalg.norm(b) for name, (a, b) in pairs.items()}


def check(case, **how):
    errors = step_on_paper(case, **how)
    wrong = {name: error for name, error in errors.items() if not error < bound(case[0])}
    assert not wrong, wrong


@pytest.mark.parametrize("name", thinned(CASES, 2))
def test_gradients_are_the_references(name, monkeypatch):
    helpers.by_numpy(monkeypatch)
    check(CASES[name])


def test_gradients_of_a_rank_for_tiles_are_the_references(monkeypatch):
    """More rows than the kernels for few take."""
    helpers.by_numpy(monkeypatch)
    check((GPT, Lora(low_rank.MOST + 3, 25.0, ("q", "v")), 2))


@pytest.mark.parametrize("name", kept(
    ["GPT-2's, q and v", "RoPE and gates by products", "Qwen3's, norms of heads"],
    "GPT-2's, q and v"))
def test_gradients_of_rows_of_several_texts(name, monkeypatch):
    helpers.by_numpy(monkeypatch)
    check(CASES[name], T=9, first=TEXTS)


# An older card's products come with any depth in tests/test_gemm_mma.py.
@pytest.mark.parametrize("machine", [
    HOPPER, pytest.param(AMPERE, marks=pytest.mark.long)], ids=["Hopper", "Ampere"])
def test_gradients_by_our_own_products(machine):
    """Ranks that are no multiple of 8, by wgmma and by mma.sync."""
    config = replace(TURNED, vocab_size=64)
    check((config, Lora(5, 7.0), 1), machine=machine)


FAULTS = {
    "dA of x A": ("parts", "rows, i * P, (n + i) * P", "rows, i * P, i * P"),
    "dB of dy B": ("parts", "P, (n + i) * P, i * P)", "P, (n + i) * P, (n + i) * P)"),
    "dB of the neighbor's columns": (
        "parts", "Part(1, columns.start, wide", "Part(1, adapters[0][1].start, wide"),
    "dB of another's x A": ("parts", "P, (n + i) * P, i * P)", "P, (n + i) * P, 0)"),
    "dB is stored, not added": ("by_few_rows", 'self.ending(dw.gradients) == "add"', "False"),
    "the first gradient is added": ("by_few_rows", 'self.ending(dw.gradients) == "add"', "True"),
    "A of the masters' neighbor": (
        "places", "self.starts[tensor] + i * P * rows", "self.starts[tensor]"),
    "merged a column late": (
        "places", "weights.starts[tensor] + columns.start", "weights.starts[tensor]"),
    "nothing is merged": ("merge", 'self.recording.add("merge", merge_launch(*given))', "pass"),
}  # fmt: skip
OWNERS = {"by_few_rows": "LoraEngine", "parts": "Packing", "places": "Packing",
          "merge": "LoraBuilder"}  # fmt: skip
STEP, MERGE = "engines.gpu.step.lora", "engines.gpu.rows.lora_merge"
ENGINE = "engines.gpu.step.engine"


def test_all_faults_have_their_place():
    for where, faults in ((STEP, FAULTS), (MERGE, MERGES)):
        for what, (function, old, new) in faults.items():
            source(Mutant(where, function, what, old, new))
    for what, (where, function, old, new) in WITH_NORMS.items():
        source(Mutant(where, function, what, old, new))


@pytest.mark.parametrize("what", thinned(FAULTS, 9))
def test_faults_of_a_step_are_seen(what, monkeypatch):
    helpers.by_numpy(monkeypatch)
    function, old, new = FAULTS[what]
    wrong = mutated(Mutant(STEP, function, what, old, new))
    owner = OWNERS[function]
    monkeypatch.setattr(getattr(module, owner), function, vars(getattr(wrong, owner))[function])
    errors = step_on_paper(CASES["Euler's, in pieces"])
    assert any(not error < 2 * bound(EULER) for error in errors.values())


THROUGH = "CudaEngine.head_norm_backward(self, config, b, b, dheads, raw)"
WITH_NORMS = {  # of heads: where, function of the engine there, old, new
    "adapters learn behind the norm": (STEP, "head_norm_backward", THROUGH, "pass"),
    "RoPE alone on the way back": (ENGINE, "attend_backward", "if config.qk_norm:", "if False:"),
    "queries' gain for keys": (ENGINE, "head_norm", "b.q_norm, b.k_norm", "b.q_norm, b.q_norm"),
}  # fmt: skip


@pytest.mark.parametrize("what", thinned(WITH_NORMS))
def test_mistakes_with_norms_of_heads_are_seen(what, monkeypatch):
    helpers.by_numpy(monkeypatch)
    where, function, old, new = WITH_NORMS[what]
    name = "LoraEngine" if where == STEP else "CudaEngine"
    wrong = getattr(mutated(Mutant(where, function, what, old, new)), name)
    monkeypatch.setattr(getattr(module, name), function, vars(wrong)[function])
    errors = step_on_paper(CASES["Qwen3's, norms of heads"])
    # Of q and k alone, which share a matrix with v: what is wrong is all there.
    assert max(errors["block.0.wqkv.A"], errors["block.0.wqkv.B"]) > 2 * bound(NORMED)


def test_nothing_is_seen_where_nothing_is_wrong(monkeypatch):
    helpers.by_numpy(monkeypatch)
    errors = step_on_paper(CASES["Euler's, in pieces"])
    assert all(error < bound(EULER) for error in errors.values())


# ---- What is on the list


def recorded_step(config, lora, B=2, T=64, machine=HOPPER):
    return LoraBuilder(lora.settled(config), config, machine, BF16).build_step(B, T, RULES).program


def test_no_frozen_matrix_has_a_gradient_and_no_buffer_is_as_large_as_the_model():
    config = replace(PRESETS["euler-116m"], n_layers=2, context=64)
    lora = Lora(16).settled(config)
    mine, all_of_it = (each for each in (recorded_step(config, lora),
                       record_step(config, 2, 64, HOPPER, BF16, RULES).program))  # fmt: skip
    names = {step.name.split(".")[-1] for step in mine.steps}
    assert not {name for name in names if name.endswith(", dW")}
    assert {step.name for step in all_of_it.steps if step.name.endswith(", dW")}
    assert not names & {"embed backward", "sums of norms", "clear"}
    packing, whole = Packing(config, lora), mine.sizes[WEIGHTS] // 4
    assert packing.size < whole / 10
    for name, size in mine.sizes.items():
        if name not in (WEIGHTS, COPIES, ARENA):
            assert size <= max(4 * packing.size, 20 << 20), name
    lent = [  # to a step of all weights, by its gradients, at each launch
        sum(size for _, size, first, last in all_of_it.borrowed[GRADIENTS] if first <= i < last)
        for i in range(len(all_of_it.steps))
    ]
    assert mine.sizes[ARENA] <= 1.05 * (all_of_it.sizes[ARENA] + max(lent))
    # Besides the narrow products and the merge, the same launches as before, without gradients.
    narrow = {"x A and dy B", "dA and dB"}
    assert {name.split(", ")[-1] for name in names} >= narrow
    rest = [step.flops for step in mine.steps if not step.name.endswith(tuple(narrow))]
    dense = [step.flops for step in all_of_it.steps if not step.name.endswith(", dW")]
    assert sum(rest) == sum(dense)


def test_a_matrix_without_an_adapter_costs_nothing():
    program = recorded_step(EULER, Lora(2, None, ("q",)), T=4)
    names = [step.name for step in program.steps if step.name.endswith(("dy B", "dB"))]
    assert len(names) == 2 and all("wqkv" in name for name in names)


# ---- Steps


def steppers(config=GPT, lora=Lora(3, 6.0), device=None):  # noqa: B008 it's immutable
    """A stepper on paper and the CPU's, of equal weights; a batch."""
    both = []
    for _ in range(2):
        w, tokens, targets, _ = helpers.problem(config, 2, 4)
        weights = AdaptedWeights(w, lora.settled(config))
        weights.begin(1)
        weights.merge()
        both.append(weights)
    device = device or Device(capability=(9, 0), multiprocessors=4)
    return (LoraStepper(both[0], LoraAdamW(both[0]), device),
            make_stepper("reference", both[1], LoraAdamW(both[1])), tokens, targets)  # fmt: skip


def test_norms_of_steps_by_the_same_adapters(monkeypatch):
    """Before each step the reference gets our adapters: B begins at zero, and Adam moves each of
    its numbers by the rate at first, so signs of gradients near zero, which are bf16's to choose,
    would make two runs of it. What is left of a step are the roundings of `bound`."""
    helpers.by_numpy(monkeypatch)
    ours, reference, tokens, targets = steppers()
    for number in range(1, 4):
        ours.pull()
        reference.weights.adapters.flat[...] = ours.weights.adapters.flat
        reference.weights.merge()
        ours.step(tokens, targets, 1e-2, number)
        (mine,), (theirs,) = ours.finish(), reference.step(tokens, targets, 1e-2, number)
        np.testing.assert_allclose(mine.norm, theirs.norm, rtol=bound(GPT))
        np.testing.assert_allclose(mine.sums, theirs.sums, rtol=bound(GPT))


def test_steps_are_those_of_the_cpu(monkeypatch):
    helpers.by_numpy(monkeypatch)
    ours, reference, tokens, targets = steppers()
    frozen, taken, exact = ours.base(), [], []
    for number in range(1, 4):
        first = np.array([[0, 0, 2, 2], [0, 1, 1, 1]], np.int32) if number == 2 else None
        taken += ours.step(tokens, targets, 1e-2, number, first)
        exact += reference.step(tokens, targets, 1e-2, number, first)
    taken += ours.finish()
    for mine, theirs in zip(taken, exact, strict=True):
        np.testing.assert_allclose(mine.sums, theirs.sums, rtol=bound(GPT))
    first_mine, first_exact = taken[0].norm, exact[0].norm
    np.testing.assert_allclose(first_mine, first_exact, rtol=bound(GPT))
    ours.pull()
    moved = np.abs(ours.weights.adapters.flat - reference.weights.adapters.flat)
    assert moved.max() <= 6.1e-2 and np.median(moved) < 1e-3
    for name, tensor in ours.weights.adapters.items():
        assert np.abs(tensor).max() > 5e-3, name
    assert np.array_equal(frozen, ours.device.host(ours.memories[WEIGHTS]))
    # Judged by the merged copy, as the CPU judges by merged weights.
    np.testing.assert_allclose(ours.sums(tokens, targets), reference.sums(tokens, targets),
                               rtol=bound(GPT))  # fmt: skip
    again = AdaptedWeights(Weights(GPT, flat=frozen.copy()), ours.weights.lora)
    again.adapters.flat[...] = ours.weights.adapters.flat
    again.merge()
    # What the run has of the merged model: frozen weights have other low bits, at most half a bf16.
    assert np.all(np.abs(again.flat - ours.weights.flat) <= 2.0**-8 * np.abs(again.flat) + 1e-6)


def test_padding_stays_zero_and_a_step_asks_for_no_memory(monkeypatch):
    helpers.by_numpy(monkeypatch)
    ours, _, tokens, targets = steppers()
    ours.step(tokens, targets, 1e-2, 1)
    asked = []
    for name in ("array", "empty"):
        monkeypatch.setattr(ours.device, name, lambda *rest: asked.append(rest))
    ours.step(tokens, targets, 1e-2, 2)
    ours.finish()
    assert not asked
    for group in ours.packing.groups(ours.device.host(ours.memories[ADAPTERS])).values():
        A = group.A.reshape(len(group.columns), 8, -1)
        assert A[:, :3].all() and not A[:, 3:].any()
        for B in group.B:
            assert B[:3].any(axis=1).all() and not B[3:].any()


def test_a_step_goes_on_from_what_was_pulled_to_the_same_bit(monkeypatch):
    helpers.by_numpy(monkeypatch)
    ours, _, tokens, targets = steppers()
    other, _, _, _ = steppers()
    ours.step(tokens, targets, 1e-2, 1)
    ours.pull()
    for name in ("m", "v"):
        getattr(other.optimizer, name).flat[...] = getattr(ours.optimizer, name).flat
    other.weights.adapters.flat[...] = ours.weights.adapters.flat
    other.weights.merge()
    other.push()
    for stepper in (ours, other):
        stepper.step(tokens, targets, 1e-2, 2)
        stepper.pull()
    assert np.array_equal(ours.weights.adapters.flat, other.weights.adapters.flat)
    assert np.array_equal(ours.optimizer.v.flat, other.optimizer.v.flat)
    assert np.array_equal(ours.weights.flat, other.weights.flat)


def test_a_step_that_is_not_finite_changes_nothing(monkeypatch):
    helpers.by_numpy(monkeypatch)
    ours, _, tokens, targets = steppers()
    ours.step(tokens, targets, 1e-2, 1)
    ours.finish()
    before = [ours.device.host(ours.memories[name]).copy() for name in (ADAPTERS, "m", "v")]
    broken = ours.device.host(ours.memories[WEIGHTS]).copy()
    broken[GPT.dim] = np.nan  # of the embedding of token 1
    ours.device.fill(ours.memories[WEIGHTS], broken)
    ours.step(np.ones_like(tokens), targets, 1e-2, 2)
    (taken,) = ours.finish()
    assert taken.number == 2 and not taken.finite
    for name, old in zip((ADAPTERS, "m", "v"), before, strict=True):
        assert np.array_equal(ours.device.host(ours.memories[name]), old)


# ---- Who trains them


def test_adapters_are_packed_and_unpacked():
    lora = Lora(3, 1.0, ("q", "v", "down")).settled(EULER)
    adapters, packing = Adapters(EULER, lora), Packing(EULER, lora)
    drawn(adapters)
    flat, again = packing.pack(adapters), Adapters(EULER, lora)
    packing.unpack(flat, again)
    assert np.array_equal(again.flat, adapters.flat) and packing.rank == 8
    group = packing.groups(flat)["block.0.wqkv"]
    assert np.array_equal(group.A[8:11].T, adapters["block.0.v.A"])
    assert [*group.columns] == [slice(0, 64), slice(96, 128)]


def on_paper(monkeypatch):
    """Have the engine cuda find an emulated GPU, and NumPy multiply."""
    stepper = importlib.import_module("nanoeuler.engines.gpu.step.stepper")
    matmul = importlib.import_module("nanoeuler.engines.gpu.step.matmul")
    helpers.by_numpy(monkeypatch)
    monkeypatch.setattr(registry, "_no_gpu", lambda: "")
    device = Device(capability=(9, 0), multiprocessors=4)
    for each in (module, stepper):
        monkeypatch.setattr(each, "gpu", lambda: device)
    backends = importlib.import_module(stepper.CHOICE)
    monkeypatch.setattr(backends, "multiplier", lambda: matmul.Multiplier)


def test_the_engine_cuda_trains_adapters_and_others_of_a_gpu_refuse(monkeypatch):
    on_paper(monkeypatch)
    weights = AdaptedWeights(initialise(TURNED, 0), Lora(2).settled(TURNED))
    made = make_stepper("cuda", weights, LoraAdamW(weights), pieces=2)
    assert type(made) is LoraStepper and made.pieces == 2
    for name in ("cuda-tf32", "cuda-float32"):
        with pytest.raises(UserError, match=f"not trained by the engine {name} yet: choose"):
            make_stepper(name, weights, LoraAdamW(weights))
    token = registry.LEAD.set(lambda *rest: None)
    try:
        with pytest.raises(UserError, match="trained by several ranks yet"):
            make_stepper("cuda", weights, LoraAdamW(weights))
    finally:
        registry.LEAD.reset(token)


def test_a_run_on_a_gpu_is_saved_and_goes_on_as_on_the_cpu(monkeypatch, tmp_path):
    """`sft --lora` by the engine cuda: the files, a resumed run, and the CPU's losses."""
    config = replace(SMALL, dim=64, n_layers=1, hidden=64, context=24, vocab_size=264)
    text = tmp_path / "text.txt"
    text.write_text("the number of the beast is a number. " * 30)
    train(text, tmp_path / "base", config=config, engine="reference",
          settings=Settings(steps=1, batch_size=2))  # fmt: skip
    on_paper(monkeypatch)
    pairs, lora = [("a?", f"{i}.") for i in range(8)], Lora(2, None, ("q", "down"))
    how = {"settings": Settings(steps=2, batch_size=1, warmup=0), "save_every": 1, "lora": lora}
    for name, engine in (("mine", "cuda"), ("theirs", "reference")):
        finetune(tmp_path / "base", pairs, tmp_path / name, engine=engine, **how)
    mine, theirs = (read_metrics(tmp_path / name) for name in ("mine", "theirs"))
    losses = [[line["loss"] for line in lines] for lines in (mine, theirs)]
    np.testing.assert_allclose(*losses, rtol=bound(config))
    saved = load_file(checkpoints(tmp_path / "mine")[-1][1] / "model.safetensors")
    assert {*saved} == {*adapter_shapes(config, lora)} and saved["block.0.q.B"].any()
    assert saved["block.0.q.A"].shape == (64, 2)
    # From the save after one step on, the second is the same to the bit.
    last = checkpoints(tmp_path / "mine")[-1][1]
    shutil.copytree(tmp_path / "mine", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / last.name)
    assert load(tmp_path / "again").step == 1
    finetune(None, pairs, tmp_path / "again", resume=True, engine="cuda")
    resumed = load_file(checkpoints(tmp_path / "again")[-1][1] / "model.safetensors")
    assert all(np.array_equal(saved[name], resumed[name]) for name in saved)


# ---- The plan


def test_the_plan_names_what_adapters_take_of_a_card(monkeypatch, capsys):
    main(["plan", "--preset", "euler-10m", "--lora", "16", "--engine", "cuda"])
    said = capsys.readouterr().out
    assert "numbers learn" in said and "rank 16 on q,k,v,o,gate,up,down" in said
    (line,) = (line for line in said.splitlines() if line.startswith("h200"))
    config, batch = PRESETS["euler-10m"], plan.BATCH_SIZE
    lora = Lora(16).settled(config)
    machine = step.H200.machine
    program = LoraBuilder(lora, config, machine, BF16).build_step(batch, 256, step.RULES).program
    size = sum(program.sizes.values())
    assert f"{len(program.steps):,}" in line and f"{size / 1e9:.3f}" in line
    assert line.endswith("estimated")
    assert main(["plan", "--preset", "euler-10m", "--lora", "16", "--engine", "cuda-tf32"])
    assert "not trained by the engine cuda-tf32 yet" in capsys.readouterr().err


@pytest.mark.parametrize("name, card", thinned(
    [("llama-1b", "rtx-3090"), ("smollm2-135m", "rtx-4060-ti")], 2
))  # fmt: skip
def test_published_models_fit_where_they_are_said_to(name, card):
    """With four sequences: a billion weights on 24 GB, 135 million on 8 GB."""
    config, speeds = PUBLISHED[name], step.speeds_of(CARDS[card])
    record = partial(module.record_lora_step, Lora(16).settled(config))
    made = step.predict_step(config, 4, "cuda", speeds, record)
    assert made.bytes < 0.9 * CARDS[card].memory_bytes
    whole = step.predict_step(config, 4, "cuda", speeds)
    # Two moments are gone; so are gradients, whose memory layers borrow in a whole step. The
    # frozen weights are float32 beside their copy, where a whole step has masters in halves.
    assert 0.9 * (8 - 2) * count_parameters(config) < whole.bytes - made.bytes
    assert made.seconds < whole.seconds


def test_the_room_of_this_machines_card(monkeypatch):
    on_paper(monkeypatch)
    gpu_memory = importlib.import_module("nanoeuler.planning.gpu_memory")
    config, lora = PRESETS["euler-10m"], Lora(16).settled(PRESETS["euler-10m"])
    sizes = [gpu_memory.step_bytes(config, 4, 1, "cuda", each) for each in (None, lora)]
    # No gradients and moments, 12 bytes of a parameter; but masters are whole, and nothing lends.
    assert sizes[1] < sizes[0] - (12 - 2 - 4) * count_parameters(config)
    assert gpu_memory.host_bytes(config, lora) < gpu_memory.host_bytes(config)
    assert gpu_memory.host_bytes(config, lora) == lora_host_bytes(config, lora)


def test_the_engine_has_code_for_all_that_trains_without_adapters(capsys):
    """Norms of heads among it, which were refused before their gains could be frozen."""
    assert LoraEngine.supports == CudaEngine.supports and True in LoraEngine.supports["qk_norm"]
    assert main(["plan", "--preset", "euler-10m", "--qk-norm", "--lora", "8", "--engine",
                 "cuda"]) == 0  # fmt: skip
    said = capsys.readouterr().out
    assert "rank 8 on q,k,v,o,gate,up,down" in said and "h200" in said


def test_gains_of_heads_are_frozen(monkeypatch):
    """A step sums no gradient of a gain, and leaves all weights as they were."""
    names = {step.name for step in recorded_step(NORMED, Lora(2), T=4).steps}
    assert "norm of heads, backward" in names and "sums of norms" not in names
    helpers.by_numpy(monkeypatch)
    ours, reference, tokens, targets = steppers(NORMED)
    frozen = ours.base()
    ours.step(tokens, targets, 1e-2, 1)
    (mine,), (theirs,) = ours.finish(), reference.step(tokens, targets, 1e-2, 1)
    np.testing.assert_allclose(mine.norm, theirs.norm, rtol=bound(NORMED))
    np.testing.assert_allclose(mine.sums, theirs.sums, rtol=bound(NORMED))
    assert np.array_equal(frozen, ours.device.host(ours.memories[WEIGHTS]))
    ours.pull()
    assert ours.weights.adapters["block.0.k.B"].any()
