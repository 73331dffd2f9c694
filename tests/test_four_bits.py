"""Products in four bits: whole numbers are exact, and a file's blocks are used as they are."""

import mmap
import tempfile

import numpy as np
import pytest
from reader_products import products

from nanoeuler.engines.cpu import decode, laying, packing
from nanoeuler.engines.cpu.decode import CpuReader
from nanoeuler.engines.cpu.packing import BLOCK, GateUp, Held, Int4, Panels, in_blocks
from nanoeuler.errors import UserError
from nanoeuler.inference.backends import make_reader
from nanoeuler.interop.quants import KINDS, dequantize
from nanoeuler.jit import njit
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.stored import Part, Piece, Stored
from nanoeuler.model.weights import initialise

EPS = np.finfo(np.float32).eps


def product(panels, x, columns):
    """What the engine makes of x (n, depth), and x as it was rounded, in float64."""
    (n, depth), out = x.shape, np.zeros((len(x), packing.padded(columns)), np.float32)
    blocks = -(-depth // BLOCK)
    p, scales = np.full((n, blocks, BLOCK), 7, np.int8), np.zeros((n, blocks, 2), np.float32)
    none = np.zeros(0, np.float32)
    for thread in range(2):
        worker = decode.Worker(n, thread, 2)
        decode._product(panels.matrices, 0, worker, x, none, out, (p, scales, none))
    rounded = (p * scales[..., :1].astype(float)).reshape(n, -1)[:, :depth]
    assert not out[:, columns:].any()
    return out[:, :columns], rounded


def of_blocks(d, m, q, depth):
    """The matrix (depth, columns) of blocks, float64, and the magnitudes of its terms."""
    parts = d.astype(float)[..., None] * q, np.broadcast_to(m.astype(float)[..., None], q.shape)
    flat = [part.reshape(len(d), -1)[:, :depth].T for part in parts]
    return sum(flat), sum(map(np.abs, flat))


def check(out, x, rounded, blocks, depth):
    """Rounding: of x half a step; of the float32 sums their order, three roundings a block."""
    largest = np.abs(np.pad(x, ((0, 0), (0, -depth % BLOCK)))).reshape(len(x), -1, BLOCK).max(2)
    step = np.repeat(largest / 127, BLOCK, axis=1)[:, :depth]
    assert (np.abs(rounded - x) <= step / 2 * (1 + 1e-5)).all()
    matrix, magnitudes = of_blocks(*blocks, depth)
    bound = (3 * -(-depth // BLOCK) + 4) * EPS * (np.abs(rounded) @ magnitudes + 1e-30)
    # The sum of p over a block may cancel, s times it being rounded before that: by its own size.
    assert (np.abs(out - rounded @ matrix) <= bound).all()


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16])
@pytest.mark.parametrize("depth", [1, 31, 32, 33, 576])
@pytest.mark.parametrize("columns", [1, packing.PANEL + 3])
def test_a_product_is_that_of_the_blocks(n, depth, columns):
    rng = np.random.default_rng(n + depth)
    x, w = (rng.standard_normal(shape).astype("f4") for shape in ((n, depth), (depth, columns)))
    x[:, : min(depth, BLOCK)] *= 0 if n == 3 else 1  # a block of zeros
    panels = Panels([Held(w)], Int4)
    assert panels.buffer.size == -(-depth // BLOCK) * 20 * packing.padded(columns)
    out, rounded = product(panels, x, columns)
    check(out, x, rounded, in_blocks(w), depth)


def test_a_weight_is_within_half_a_step():
    w = np.random.default_rng(0).standard_normal((100, 9)).astype(np.float32)
    w[:, 0], w[:, 1] = 0, 3
    d, m, q = in_blocks(w)
    back, _ = of_blocks(d, m, q, 100)
    padded = np.concatenate([w, np.zeros((28, 9), "f4")]).T.reshape(9, 4, BLOCK)
    reach = padded.max(2) - padded.min(2)
    # Half a step, and what float16 rounds of m, and of 15 d.
    bound = reach / 30 + 2.0**-11 * (np.abs(padded.min(2)) + reach) * 1.01
    assert (np.abs(back - w) <= np.repeat(bound, BLOCK, axis=1)[:, :100].T).all()
    with pytest.raises(OverflowError, match="more than a block of four bits"):
        in_blocks(np.float32([[1e5], [-1e5]]))


def test_the_largest_sums_fit():
    """q 15 and p 127 or -127 everywhere: 30,480 in each of the 16-bit sums."""
    for sign in (1, -1):
        w = np.full((BLOCK, 3), 1, np.float32)
        w[0] = 0  # so that m is 0, and d 1/15
        x = np.full((4, BLOCK), sign, np.float32)
        out, _ = product(Panels([Held(w)], Int4), x, 3)
        d = float(np.float16(1 / 15))
        assert np.allclose(out, sign * 31 * 15 * d, rtol=4 * EPS, atol=0)


def test_bits_do_not_depend_on_the_instruction(monkeypatch):
    """The same sums by x86's instruction, where there is one, and by plain multiplications."""
    rng, found = np.random.default_rng(0), []
    w, x = (rng.standard_normal(shape).astype("f4") for shape in ((96, packing.PANEL), (2, 96)))
    panels = Panels([Held(w)], Int4)
    _, rounded = product(panels, x, packing.PANEL)
    largest = np.abs(x.reshape(2, 3, BLOCK)).max(2)
    scales = np.zeros((2, 3, 2), np.float32)
    scales[..., 0] = largest / np.float32(127)
    p = np.rint(rounded.reshape(2, 3, BLOCK) / scales[..., :1]).astype(np.int8)
    for features in (decode._FEATURES, []):
        monkeypatch.setattr(decode, "_FEATURES", features)
        out = np.zeros((2, packing.PANEL), np.float32)
        kernel = _kernel(decode._make_block_tile(2))
        kernel(p, int(panels.matrices.places[0, 0]), scales, out)
        found.append(out)
    assert found[0].any() and found[0].tobytes() == found[1].tobytes()


def _kernel(tile):
    @njit
    def run(p, w, scales, out):
        place = out.ctypes.data, out.strides[0]
        tile((p.ctypes.data, p.strides[0]), w, p.shape[1], scales.ctypes.data, place)

    return run


def stored(raw, columns, depth, order=None, kind="Q4_1"):
    """Blocks of a kind as a matrix (depth, columns) of ours, in a mapped file."""
    with tempfile.TemporaryFile() as file:
        file.write(raw.tobytes())
        file.flush()
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    size = depth // BLOCK * KINDS[kind].size
    piece = Piece(mapping, 0, (columns, depth), kind, size, dequantize)
    return Stored((depth, columns), [Part(piece, turned=True, order=order)])


def q4_1(columns, depth, rng):
    """Random blocks of a file, (columns, bytes) uint8, and what they stand for."""
    blocks = rng.integers(0, 256, (columns * depth // BLOCK, 20)).astype(np.uint8)
    halves = rng.uniform(-1, 1, (len(blocks), 2)).astype("<f2")
    blocks[:, :4] = halves.view(np.uint8)
    return blocks, dequantize(blocks.reshape(-1), "Q4_1").reshape(columns, depth).T


@pytest.mark.parametrize("gated", [False, True])
def test_blocks_of_a_file_are_used_as_they_are(gated):
    rng, (columns, depth) = np.random.default_rng(0), (2 * packing.PANEL + 6, 96)
    blocks, w = q4_1(columns, depth, rng)
    order = np.arange(columns).reshape(-1, 2)[:, ::-1].reshape(-1)
    matrix, w = stored(blocks, columns, depth, order), w[:, order]
    matrix, w = (GateUp(matrix), packing.interleaved(w)) if gated else (matrix, w)
    panels = Panels([matrix], Int4)
    x = rng.standard_normal((3, depth)).astype(np.float32)
    out, rounded = product(panels, x, w.shape[1])
    d, m = (blocks.reshape(columns, -1, 20)[..., i : i + 2].copy().view("<f2")[..., 0]
            for i in (0, 2))  # fmt: skip
    terms = np.repeat(15 * np.abs(d.astype(float)) + np.abs(m), BLOCK, axis=1).T[:, order]
    terms = packing.interleaved(terms) if gated else terms
    bound = (3 * depth // BLOCK + 4) * EPS * (np.abs(rounded) @ terms + 1e-30)
    assert (np.abs(out - rounded @ w.astype(float)) <= bound).all()
    # Every half byte of the file is in the panels, once.
    nibbles = np.bincount(np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=None))
    inside = panels.buffer.reshape(-1, 20 * packing.PANEL)[:, 4 * packing.PANEL :]
    held = np.bincount(np.concatenate([inside & 15, inside >> 4], axis=None), minlength=16)
    assert (held[1:] == nibbles[1:]).all()


@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
def test_the_matrices_of_a_model_are_multiplied_as_their_blocks(mlp):
    """In the room of their reader, whose sizes are ragged."""
    config = ModelConfig(vocab_size=300, dim=40, n_layers=2, n_heads=4, n_kv_heads=2, hidden=70,
                         context=16, n_predict=1, mlp=mlp)  # fmt: skip
    weights = initialise(config, seed=0)
    matrices = decode._matrices(config, weights)[0]
    reader = CpuReader(config, weights, threads=1, quantize="int4")
    for matrix, (x, rounded, out) in zip(matrices, products(reader), strict=False):
        (depth, columns), w = matrix.shape, matrix.columns(0, matrix.shape[1])
        assert x.shape[1] == depth and not out[:, columns:].any()
        check(out[:, :columns], x, rounded, in_blocks(w), depth)


@pytest.mark.long  # the test above has its products; the pass takes half a minute to compile
def test_a_model_in_four_bits_is_near():
    config = ModelConfig(vocab_size=300, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden=128,
                         context=16, n_predict=1)  # fmt: skip
    weights = initialise(config, seed=0)
    readers = [CpuReader(config, weights, threads=1, quantize=each) for each in decode.QUANTIZE]
    whole, eight, four = (each.read([[1, 2, 3]], [0]).copy() for each in readers)
    far = [np.sqrt(np.mean((each - whole) ** 2) / np.mean(whole**2)) for each in (eight, four)]
    # A step of four bits is 17 times one of eight, of a block's reach instead of a column's.
    assert 0 < far[0] < far[1] < 20 * far[0] and far[1] < 0.2


def test_what_there_is_not_is_refused():
    config = ModelConfig(vocab_size=300, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden=128,
                         context=16, n_predict=1)  # fmt: skip
    weights = initialise(config, seed=0)
    with pytest.raises(UserError, match="expected quantize to be none, int8, int4, got 'int3'"):
        make_reader(weights.config, weights, quantize="int3")
    with pytest.raises(UserError, match="with quantize int4, got 'fused'"):
        make_reader(weights.config, weights, "fused", quantize="int4")
    with pytest.raises(UserError, match="float32 weights with quantize int4, got float64"):
        make_reader(weights.config, initialise(config, seed=0, dtype=np.float64), quantize="int4")
    weights.blocks[0].wo[0, 0] = 1e6
    with pytest.raises(UserError, match="a weight of 1e.06 is more than a block of four bits"):
        make_reader(weights.config, weights, quantize="int4")


def raw_blocks(kind, columns, depth, rng):
    """Random blocks of a kind, (columns, bytes) uint8, with scales that are numbers."""
    blocks = rng.integers(0, 256, (columns * depth // BLOCK, KINDS[kind].size)).astype(np.uint8)
    for at in KINDS[kind].halves:
        blocks[:, at : at + 2] = rng.uniform(-1, 1, len(blocks)).astype("<f2")[:, None].view("u1")
    return blocks.reshape(columns, -1)


@pytest.mark.parametrize("kind", laying.SPREAD)
@pytest.mark.parametrize("columns", [1, packing.PANEL, 2 * packing.PANEL + 6])
def test_a_files_blocks_are_spread_bit_by_bit(kind, columns):
    """Each product is exact in float32, so the one sum has one result."""
    depth, rng = 96, np.random.default_rng(columns)
    raw = raw_blocks(kind, columns, depth, rng)
    room = np.full((-(-columns // packing.PANEL), depth, packing.PANEL), np.nan, np.float32)
    laying.spread(raw.reshape(columns, -1, laying.SPREAD[kind]), laying.halves(), room)
    whole = room.swapaxes(0, 1).reshape(depth, -1)
    want = dequantize(raw.reshape(-1), kind).reshape(columns, depth).T
    assert whole[:, :columns].tobytes() == np.ascontiguousarray(want).tobytes()
    assert not whole[:, columns:].any()


def test_panels_of_int8_are_those_of_the_definition():
    w = np.random.default_rng(0).standard_normal((70, 3 * packing.PANEL)).astype(np.float32)
    w[:, 5] = 0
    steps = np.abs(w).max(axis=0) / 127
    steps[steps == 0] = 1  # a column of zeros has any scale
    q = np.rint(w / steps).astype(np.int8)
    panels = Panels([Held(w)], packing.Int8)
    inside = panels.buffer.view(np.int8).reshape(3, 70, packing.PANEL)
    assert (inside.swapaxes(0, 1).reshape(70, -1) == q).all()
    assert panels.scales.tobytes() == steps.tobytes()


@pytest.mark.parametrize("kind, form", [("Q4_1", packing.Kept4), ("Q8_0", packing.Kept8)])
@pytest.mark.parametrize("rows", [1, 5])
def test_kept_blocks_multiply_as_their_float32(kind, form, rows):
    """The same numbers in the same order: not a bit is another, and memory is the blocks'."""
    columns, depth, rng = packing.PANEL + 6, 96, np.random.default_rng(1)
    raw = raw_blocks(kind, columns, depth, rng)
    order = np.arange(columns).reshape(-1, 2)[:, ::-1].reshape(-1)
    matrix = stored(raw, columns, depth, order, kind)
    assert packing.form_of([matrix]) is form
    kept, plain = Panels([matrix], form), Panels([Held(matrix.whole())])
    assert kept.buffer.size == KINDS[kind].size * depth // BLOCK * 2 * packing.PANEL
    x, out = rng.standard_normal((rows, depth)).astype("f4"), []
    for panels in (kept, plain):
        y = np.zeros((rows, 2 * packing.PANEL), np.float32)
        room = np.zeros((rows, 3, BLOCK), np.int8), np.zeros((rows, 3, 2), "f4")
        wide = np.full(depth * packing.PANEL, np.nan, np.float32)
        worker = decode.Worker(rows, 0, 1)
        decode._product(panels.matrices, 0, worker, x, wide[:0], y, (*room, wide))
        out.append(y.tobytes())
    assert out[0] == out[1] and matrix.blocks(0, 1) is not None


def test_blocks_along_the_other_axis_become_float32():
    piece = stored(raw_blocks("Q4_1", 64, 96, np.random.default_rng(0)), 64, 96).parts[0].piece
    lying = Stored((64, 96), [Part(piece, turned=False, order=None)])
    assert packing.form_of([lying]) is packing.Float32
    assert packing.form_of([packing.Turned(lying)]) is packing.Kept4
