"""Reading tokens with a cache, on every engine: whatever is asked, the logits are the model's."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from crossings import choices
from hypothesis import given, settings
from hypothesis import strategies as st
from reader_products import products
from test_generate import ARCHITECTURES, SHAPES, model
from tiers import kept, paired

from nanoeuler.engines.cpu import decode, packing
from nanoeuler.engines.cpu.decode import CpuReader
from nanoeuler.engines.cpu.packing import (
    PANEL,
    Float32,
    Held,
    Int8,
    Panels,
    interleaved,
    padded,
)
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.engines.registry import CPU_ENGINES, engine_factory
from nanoeuler.inference.decoder import Decoder, EngineReader
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.transformer import forward
from nanoeuler.model.weights import Weights, initialise

reference = ReferenceEngine()
RAGGED = ModelConfig(vocab_size=300, dim=40, n_layers=2, n_heads=4, n_kv_heads=2, hidden=70,
                     context=16, n_predict=2)  # fmt: skip


def both(**switches):
    """A model in float32, and the logits (T, K, V) in float64 of a text, and its own distance."""
    config, weights = model(dtype=np.float32, **switches)
    text = np.random.default_rng(0).integers(23, size=config.context)
    exact = forward(reference, config, model(**switches)[1], text[None])[0][0]
    own = forward(reference, config, weights, text[None])[0][0]
    # Two orders of a float32 sum, over some layers: a few times the distance of one of them, and
    # never less than what the largest number is rounded by.
    bound = 4 * np.abs(own - exact).max() + 8 * np.finfo(np.float32).eps * np.abs(exact).max()
    return config, weights, text.tolist(), exact, bound


def readers(config, weights, texts=1):
    """A reader on each engine, by a name."""
    made = {name: EngineReader(config, weights, engine_factory(name)(), texts)
            for name in CPU_ENGINES}  # fmt: skip
    return made | {"compiled": CpuReader(config, weights, texts, threads=1)}


@pytest.mark.parametrize("switches", paired(ARCHITECTURES, choices()))
def test_every_architecture_in_every_cut(switches):
    config, weights, text, exact, bound = both(context=9, n_layers=2, **switches)
    reader = CpuReader(config, weights, threads=1)
    for cut in ([1] * 9, [9], [4, 5], [2, 3, 1, 3]):
        decoder, ends = Decoder(config, weights, reader), np.cumsum(cut)
        for n, end in zip(cut, ends, strict=True):
            logits = decoder.look(text[end - n : end], rows=n, heads=config.n_predict)
            assert np.abs(logits - exact[end - n : end]).max() <= bound


@pytest.mark.parametrize("heads, kv", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("sizes", [{}, {"dim": 8, "hidden": 1}, {"dim": 72, "hidden": 70},
                                   {"dim": 128, "hidden": 65, "vocab_size": 100}], ids=str)
def test_every_engine_and_odd_sizes(heads, kv, sizes):
    config, weights, text, exact, bound = both(heads=heads, kv=kv, **sizes)
    for name, reader in readers(config, weights).items():
        decoder = Decoder(config, weights, reader)
        for token, wanted in zip(text, exact, strict=True):
            logits = decoder.look([token], heads=2)
            assert np.abs(logits[0] - wanted).max() <= bound, name


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_texts_of_unequal_length_grow_together(data):
    """Each text in pieces of its own lengths, some empty, some forgotten again."""
    config, weights, _, _, bound = both()
    B = data.draw(st.integers(1, 5))
    every = readers(config, weights, texts=B)
    texts = [[] for _ in range(B)]
    for _ in range(data.draw(st.integers(1, 5))):
        pieces, starts = [], []
        for text in texts:
            starts.append(data.draw(st.integers(0, len(text))))
            piece = st.lists(st.integers(0, 22), max_size=config.context - starts[-1])
            pieces.append(data.draw(piece))
            if pieces[-1]:
                text[starts[-1] :] = pieces[-1]
        for name, reader in every.items():
            logits = reader.read(pieces, starts)
            for i, (text, piece) in enumerate(zip(texts, pieces, strict=True)):
                if piece:
                    wanted = forward(reference, config, weights, np.array([text]))[0][0, -1, 0]
                    assert np.abs(logits[i, 0, 0] - wanted).max() <= bound, name


# Of the other forms short tests have the products: below, and in test_four_bits.
@pytest.mark.parametrize("quantize", kept(decode.QUANTIZE, "none"))
@pytest.mark.parametrize("switches", [{}, ARCHITECTURES[-1], {"dim": 128, "hidden": 300}], ids=str)
def test_no_bit_depends_on_threads_nor_on_who_is_read_beside(switches, quantize):
    config, weights = model(dtype=np.float32, **switches)
    texts = np.random.default_rng(1).integers(23, size=(5, config.context)).tolist()
    lengths = [12, 1, 7, 3, 12]
    pieces = [text[:n] for text, n in zip(texts, lengths, strict=True)]
    alone = CpuReader(config, weights, threads=1, quantize=quantize)
    bits = []
    for piece in pieces:
        for i, token in enumerate(piece):
            one = alone.read([[token]], [i])[0, 0, 0].copy()
        bits.append(one)
    for threads in (1, 2, 3, 5):
        reader = CpuReader(config, weights, 5, threads, quantize)
        together = reader.read(pieces, [0] * 5)[:, 0, 0]
        for i, (one, other) in enumerate(zip(bits, together, strict=True)):
            off = np.abs(one - other).max()
            assert one.tobytes() == other.tobytes(), f"{threads} threads, text {i}: {off} apart"


def test_a_prompt_longer_than_a_pass_is_read_in_several():
    # and longer than a panel of keys
    config, weights, text, exact, bound = both(context=max(3 * decode.ROWS, 2 * PANEL) + 5)
    reader = CpuReader(config, weights, threads=2)
    logits = reader.read([text], [0], rows=len(text), heads=2)[0]
    assert np.abs(logits - exact).max() <= bound
    for i, token in enumerate(text):
        one = reader.read([[token]], [i], heads=2)[0, 0]
        assert one.tobytes() == logits[i].tobytes()


def test_rows_that_were_not_read_leave_the_others_in_their_places():
    config, weights, text, exact, bound = both()
    reader = CpuReader(config, weights, texts=4, threads=1)
    logits = reader.read([text[:1], [], text[:2], text[:7]], [0] * 4, rows=3)[:, :, 0]
    for i, n in enumerate((1, 0, 2, 7)):
        for row in range(max(0, 3 - n), 3):
            assert np.abs(logits[i, row] - exact[n - 3 + row, 0]).max() <= bound


LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not LARGE_PAGES.exists(), reason="a system without large pages")
def test_many_weights_lie_where_the_system_may_give_large_pages():
    """Private memory, marked "hg": in shared memory that mark does nothing."""
    packed = Panels([Held(np.ones((1 << 12, 1 << 9), np.float32))])
    middle, found = packed.buffer.ctypes.data + packed.buffer.size // 2, None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            first, last = (int(end, 16) for end in fields[0].split("-"))
            found = fields[1] if first <= middle < last else None
        elif fields[0] == "VmFlags:" and found:
            assert found[3] == "p" and "hg" in fields
            return
    raise AssertionError("the panels are in no part of this program's memory")


def test_what_does_not_fit_is_refused_before_memory_is_touched():
    config, weights = model(dtype=np.float32)
    reader = CpuReader(config, weights, threads=1)
    for pieces, starts in (([[1]], [12]), ([[1, 2]], [11]), ([[1]], [-1]), ([[1], [2]], [0, 0])):
        with pytest.raises(AssertionError, match="no room"):
            reader.read(pieces, starts)
    for token in (-1, 23):
        with pytest.raises(AssertionError, match="no id"):
            reader.read([[token]], [0])
    with pytest.raises(AssertionError, match="float64"):
        CpuReader(config, model()[1])


@given(st.integers(1, 40), st.integers(1, 3 * PANEL + 1))
@settings(max_examples=25, deadline=None)
def test_int8_is_within_half_a_step(depth, columns):
    matrix = np.random.default_rng(columns).standard_normal((depth, columns)).astype(np.float32)
    matrix[:, 0] = 0
    panels = Panels([Held(matrix)], Int8)
    q = panels.buffer.view(np.int8)[: depth * padded(columns)].reshape(-1, depth, PANEL)
    q = q.swapaxes(0, 1).reshape(depth, -1)[:, :columns].astype(int)
    assert np.abs(q).max() <= 127
    steps = panels.scales[:columns]
    assert (np.abs(matrix - q * steps) <= steps / 2 * (1 + 1e-5)).all()


@pytest.mark.parametrize("F", [1, PANEL // 2, PANEL // 2 + 1, 3 * PANEL])
def test_gate_and_up_lie_side_by_side(F):
    both = np.arange(6 * F).reshape(3, 2 * F)
    wide, half = interleaved(both), PANEL // 2
    assert wide.shape[1] % PANEL == 0
    for j in range(F):
        at = j // half * PANEL + j % half
        assert (wide[:, at] == both[:, j]).all() and (wide[:, at + half] == both[:, F + j]).all()


def test_int8_takes_a_quarter():
    weights = initialise(RAGGED, seed=0)
    matrices = [Held(weights["output"]), Held(weights.blocks[0].w_down)]
    sizes = [Panels(matrices, form).buffer.size for form in (Float32, Int8)]
    assert sizes[0] == 4 * sizes[1]


@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
def test_the_matrices_of_a_model_in_int8_are_multiplied_as_what_they_stand_for(mlp):
    """In the room of their reader, with its scales; those of the blocks, then the outputs."""
    config = replace(RAGGED, mlp=mlp)
    weights = initialise(config, seed=0)
    blocks, outputs = decode._matrices(config, weights)
    reader = CpuReader(config, weights, threads=1, quantize="int8")
    for matrix, (x, _, out) in zip([*blocks, *outputs], products(reader), strict=True):
        (depth, columns), w = matrix.shape, matrix.columns(0, matrix.shape[1])
        assert x.shape[1] == depth and not out[:, columns:].any()
        steps = np.abs(w).max(axis=0) / 127
        steps[steps == 0] = 1  # padding
        rounded = np.rint(w / steps) * steps.astype(float)
        # A sum of depth terms, rounded at each, and the product with the scale.
        bound = (depth + 2) * np.finfo(np.float32).eps * (np.abs(x) @ np.abs(rounded))
        assert (np.abs(out[:, :columns] - x @ rounded) <= bound).all()


@pytest.mark.long  # the test above has its products; the pass takes half a minute to compile
def test_int8_stays_near():
    weights = initialise(RAGGED, seed=0)
    readers = [CpuReader(RAGGED, weights, threads=1, quantize=each) for each in ("none", "int8")]
    logits = [reader.read([[1, 2, 3]], [0])[0, 0, 0] for reader in readers]
    # A weight is off by at most max / 254, a hundredth of its column's deviation or so.
    assert 0 < np.abs(logits[0] - logits[1]).max() < 0.05 * np.abs(logits[0]).max()


def room(rows, depth):
    """Where a product may write rows in whole numbers, and their scales."""
    blocks = -(-depth // packing.BLOCK)
    scales, wide = np.zeros((rows, blocks, 2), "f4"), np.zeros(blocks * 32 * packing.PANEL, "f4")
    return np.zeros((rows, blocks, packing.BLOCK), np.int8), scales, wide


def test_panels_of_a_matrix_multiply_like_it():
    rng = np.random.default_rng(0)
    for rows, depth, columns in product((1, 2, 3, 4, 5, 16), (1, 7, 130), (1, PANEL, PANEL + 3)):
        x = rng.standard_normal((rows, depth)).astype(np.float32)
        w = rng.standard_normal((depth, columns)).astype(np.float32)
        packed, out = Panels([Held(w)]), np.zeros((rows, packing.padded(columns)), np.float32)
        bias = rng.standard_normal(columns).astype(np.float32)
        for thread in range(2):
            worker = decode.Worker(rows, thread, 2)
            decode._product(packed.matrices, 0, worker, x, bias, out, room(rows, depth))
        exact = x.astype(float) @ w + bias
        terms = np.abs(x).astype(float) @ np.abs(w) + np.abs(bias)
        # A sum of depth + 1 terms, rounded at each: equation eq-gemm's bound on its absolute terms.
        bound = (depth + 2) * np.finfo(np.float32).eps * terms
        assert (np.abs(out[:, :columns] - exact) <= bound).all()
        assert not out[:, columns:].any()


def test_weights_are_read_where_they_are_not_copied():
    """The reader holds copies of the matrices: a change of the weights is not its own."""
    config, weights = model(dtype=np.float32)
    assert isinstance(weights, Weights)
    reader = CpuReader(config, weights, threads=1)
    before = reader.read([[1]], [0]).copy()
    weights["output"][...] = 0
    assert (reader.read([[1]], [0]) == before).all()
