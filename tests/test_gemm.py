"""Products on tensor cores, without a GPU: who multiplies what, what is launched, what compiles."""

import ctypes
import importlib.util
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nanoeuler.engines.gpu import compile, device, door
from nanoeuler.engines.gpu.gemm import choose, plan, product, sizes, space_for
from nanoeuler.engines.gpu.gemm_form import PIECE, RING, SHARED, THREADS, Form
from nanoeuler.engines.gpu.gemm_plan import (
    MULTIPROCESSORS,
    TILE_K,
    cover,
    even,
    level,
    slotted,
    split,
    tiles,
    whole,
)
from nanoeuler.engines.gpu.gemm_wgmma import gemm_kernel, sum_kernel
from nanoeuler.engines.gpu.hopper import descriptor, wgmma
from nanoeuler.engines.gpu.instruction import cuda, float32, int8, int32, ptx
from nanoeuler.engines.gpu.kernel import Kernel, Map
from nanoeuler.errors import UserError

SHARED_LIMIT = 227 * 1024  # CUDA C++ Programming Guide, technical specifications: of a block, 9.0
WIDE = dict(layout="TN", epilogue="add", out="float32")
FORMS = {
    "NT": Form("NT"),
    "NN in clusters": Form("NN", cluster=2),
    "NT ping-pong, GELU": Form("NT", True, 2, "bias and gelu"),
    "NT bias": Form("NT", epilogue="bias"),
    "NT residual": Form("NT", cluster=2, epilogue="residual"),
    "NT pieces": Form("NT", cluster=2, pieces="together"),
    "TN add": Form(**WIDE),
    "TN add, pieces": Form(**WIDE, cluster=2, pieces="together"),
}

orders = st.builds(
    lambda down, across, group: tiles(down * 128, across * 256, 128, 256, group),
    st.integers(1, 12), st.integers(1, 5), st.integers(1, 9),
)  # fmt: skip


# ---- Plans


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 12))
def test_tiles_are_all_tiles_once(m, n, group):
    order = tiles(m, n, 128, 256, group)
    down, across = cover(m, 128), cover(n, 256)
    assert sorted(order) == [(x, y) for x in range(down) for y in range(across)]


def ranges(lists):
    """tile -> its items' ranges of k, in order."""
    of = {}
    for item in (item for own in lists for item in own):
        of.setdefault((item.x, item.y), []).append((item.first, item.end))
    return {tile: sorted(parts) for tile, parts in of.items()}


def assert_once(order, blocks, lists):
    """Every k-block of every tile is on exactly one list, and no list or range is empty."""
    of = ranges(lists)
    assert of.keys() == {*order} and all(lists)
    for parts in of.values():
        assert parts[0][0] == 0 and parts[-1][1] == blocks
        assert all(a < b for a, b in parts)
        assert all(left[1] == right[0] for left, right in zip(parts, parts[1:], strict=False))


@given(orders, st.integers(1, 300), st.integers(1, 140))
def test_plans_have_every_k_block_once(order, blocks, clusters):
    for cut in (whole(order, blocks, clusters).items, level(order, blocks, clusters)):
        assert_once(order, blocks, cut)
        assert len(cut) <= clusters
    if len(order) <= clusters:
        assert_once(order, blocks, even(order, blocks, clusters))


@given(orders, st.integers(1, 300), st.integers(1, 140))
def test_a_level_plan_is_level(order, blocks, clusters):
    loads = [sum(item.end - item.first for item in own) for own in level(order, blocks, clusters)]
    assert max(loads) - min(loads) <= 1 or min(loads) == max(loads) == 1
    assert max(loads) == max(1, math.ceil(len(order) * blocks / clusters))


@given(orders, st.integers(1, 300), st.integers(2, 140), st.sampled_from(["level", "even", "best"]))
def test_pieces_have_slots_in_the_order_of_k_and_are_summed_once(order, blocks, clusters, cut):
    made = split(order, blocks, clusters, 2, 8, cut)
    assert_once(order, blocks, made.items)
    items = [item for own in made.items for item in own]
    slots = sorted(item.slot for item in items if item.slot >= 0)
    assert slots == list(range(made.slots))
    for item in items:
        assert (item.slot < 0) == (item.end - item.first == blocks)
    of = {}
    for item in sorted(items, key=lambda item: item.first):
        of.setdefault((item.x, item.y), []).append(item.slot)
    cut_tiles = {tile: own for tile, own in of.items() if own[0] >= 0}
    assert all(own == list(range(own[0], own[0] + len(own))) for own in cut_tiles.values())
    assert len(made.sums) == 2 * 2 * len(made.items)
    sums = [part for own in made.sums for part in own]
    places = [(part.x, part.y, part.rank, part.half, part.strip) for part in sums]
    assert len({*places}) == len(places) == len(cut_tiles) * 2 * 2 * 8
    for part in sums:
        own = cut_tiles[part.x, part.y]
        assert (part.slot, part.pieces) == (own[0], len(own))


@example(list(tiles(768, 768, 256, 256)), 256, 66)
@given(orders, st.integers(1, 300), st.integers(1, 70))
def test_words_say_what_the_plan_says(order, blocks, clusters):
    made = split(order, blocks, clusters, 2, 4)
    words = made.words()
    assert words.dtype == np.int32 and words.shape[1] == 4
    for c, own in enumerate(made.items):
        first, end = words[c, :2]
        rows = [(i.x, i.y, i.first | i.end << 16, i.slot) for i in own]
        assert words[first:end].tolist() == [list(row) for row in rows]
    for w, own in enumerate(made.sums):
        first, end = words[len(made.items) + w, :2]
        for row, part in zip(words[first:end], own, strict=True):
            where, slots = int(row[2]), int(row[3])
            assert (where >> 8, where >> 4 & 1, where & 15) == (part.rank, part.half, part.strip)
            assert (slots & 0xFFFF, slots >> 16) == (part.slot, part.pieces)
    ends = [words[i, 1] for i in range(len(made.items))]
    assert max(ends) + 1 < len(words)  # a consumer reads up to two rows after its last


def test_slots_are_the_same_however_lists_are_ordered():
    """The order of a sum is of k, not of who multiplies: so equal bits on any number of blocks."""
    order = tiles(768, 768, 256, 256)
    lists = level(order, 256, 66)
    _, slots = slotted(lists, 256)
    shuffled, again = slotted(lists[::-1], 256)
    firsts = {}
    for item in (item for own in shuffled for item in own):
        firsts.setdefault((item.x, item.y), []).append((item.slot, item.first))
    assert {t: n for t, (_, n) in slots.items()} == {t: n for t, (_, n) in again.items()}
    assert all(sorted(own) == sorted(own, key=lambda pair: pair[1]) for own in firsts.values())


# ---- Launches


def arrays(form, m, n, k):
    """A, B, C and aux of zeros."""
    a = np.zeros((k, m) if form.layout[0] == "T" else (m, k), np.uint16)
    b = np.zeros((k, n) if form.layout[1] == "N" else (n, k), np.uint16)
    c = np.zeros((m, n), np.float32 if form.out == "float32" else np.uint16)
    aux = {"residual": (m, n), "bias": (n,), "bias and gelu": (n,)}.get(form.epilogue)
    return a, b, c, None if aux is None else np.zeros(aux, np.uint16)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_launches_fit_the_machine_and_the_maps_the_ring(form):
    kernel = gemm_kernel(form)
    assert kernel.shared == SHARED <= SHARED_LIMIT and kernel.threads == THREADS
    a, b, c, aux = arrays(form, 2000, 1000, 4096)
    first = product(form, a, b, c, aux)[0]
    assert first.grid[0] % form.cluster == 0 and first.grid[0] <= MULTIPROCESSORS
    map_a, map_b, map_c = first.args[:3]
    rows = 128 // (64 if form.layout[0] == "T" else 128)  # boxes of a k-block of A
    columns = form.columns // (64 if form.layout[1] == "N" else form.columns // form.cluster)
    fetched = math.prod(map_a.box) * rows + math.prod(map_b.box) * columns
    assert 2 * fetched == form.stage and form.stage * form.stages == RING
    assert math.prod(map_c.box) * c.dtype.itemsize == 8192
    assert all(array.box[-1] * array.array.dtype.itemsize == 128 for array in (map_a, map_b, map_c))


def test_pieces_have_room_and_a_launch_of_their_own():
    form = Form(**WIDE, cluster=2, pieces="after")
    a, b, c, _ = arrays(form, 768, 768, 16384)
    multiply, sums = product(form, a, b, c)
    assert sums.kernel is sum_kernel(form) and multiply.kernel is gemm_kernel(form)
    who = plan(form, 768, 768, 16384)
    assert multiply.args[5].nbytes == space_for(form, who) == 128 + who.slots * 2 * PIECE
    assert sums.grid == multiply.grid == (len(who.items) * 2,)
    whole_tiles = product(form, *arrays(form, 50304, 768, 64)[:3])
    assert len(whole_tiles) == 1, "nothing to sum, nothing launched"


def test_one_kernel_serves_many_products():
    assert gemm_kernel(Form("NN")) is gemm_kernel(Form("NN"))
    assert gemm_kernel(Form("NN")) is not gemm_kernel(Form("NT"))


def test_the_choice_splits_where_whole_tiles_leave_the_machine_idle():
    assert choose("TN", 768, 768, 16384, "add", "float32").pieces == "together"
    assert choose("NT", 8192, 8192, 8192).pieces == "no"  # 15.5 rounds of tiles are almost 16
    assert choose("NT", 16384, 3072, 768, "bias and gelu").cluster == 1
    assert choose("NT", 16384, 768, 768).pieces == "no"
    form = choose("TN", 768, 768, 16384, "add", "float32")
    busy = 18 * 256 / (132 * plan(form, 768, 768, 16384).load)
    assert busy > 0.94  # of the blocks' time, 18 tiles of 256 k-blocks for 132 blocks


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(layout="TT"), "layouts are NT, NN, TN"),
        (dict(cluster=3), "clusters 1 or 2"),
        (dict(epilogue="relu"), "epilogues are store, bias"),
        (dict(out="float32", epilogue="bias"), "float32 is stored or added to"),
        (dict(epilogue="add"), "only float32 is added to"),
        (dict(pingpong=True, epilogue="residual"), "ping-pong has neither"),
        (dict(pieces="later"), "pieces are no, together or after"),
        (dict(pieces="after", epilogue="bias"), "pieces come with store and add"),
    ],
)
def test_forms_that_there_are_not(change, message):
    with pytest.raises(UserError, match=message):
        Form(**change)


def replaced(form, place, array, m=256, n=256, k=128):
    """Launches of a product whose operand number `place` is another array."""
    operands = list(arrays(form, m, n, k))
    operands[place] = array
    return product(form, *operands)


@pytest.mark.parametrize(
    "form, place, array, message",
    [
        (Form(), 0, np.zeros((256, 64), np.uint16), "does not give"),
        (Form(), 2, np.zeros((256, 255), np.uint16), "does not give"),
        (Form(), 1, np.zeros((256, 128), np.float32), "expected uint16, uint16, uint16"),
        (Form("TN", out="float32"), 2, np.zeros((256, 256), np.uint16), "expected .* float32"),
        (Form(epilogue="bias"), 3, None, r"bias takes \(256,\), not None"),
        (Form(epilogue="bias"), 3, np.zeros(255, np.uint16), "bias takes"),
        (Form(), 3, np.zeros(256, np.uint16), "store takes None"),
        (Form(), 0, np.zeros((256, 256), np.uint16)[:, ::2], "pad the rows"),
        (Form(), 0, np.zeros((256, 132), np.uint16)[:, :128], "pad the rows"),
    ],
)
def test_operands_that_do_not_fit(form, place, array, message):
    with pytest.raises(UserError, match=message):
        replaced(form, place, array)


def test_sizes_that_kernels_cannot_hold():
    with pytest.raises(UserError, match="come in pairs, not 7"):
        sizes(Form(epilogue="bias"), *arrays(Form(epilogue="bias"), 8, 7, 8))
    a, b = (np.broadcast_to(np.zeros((), np.uint16), (8, (1 << 15) * TILE_K)) for _ in "ab")
    with pytest.raises(UserError, match="k is at most 2097088, not 2097152"):
        sizes(Form(), a, b, np.zeros((8, 8), np.uint16))
    with pytest.raises(UserError, match="does not give"):
        sizes(Form(), a[:, :0], b[:, :0], np.zeros((8, 8), np.uint16))


# ---- On a device that only writes down what it is told


class Driver:
    """Answers every call of the driver with success, and remembers it."""

    def __init__(self, **answers):
        self.answers, self.calls = answers, []

    def __getattr__(self, name):
        if name.startswith("CU") or name.startswith("cuuint"):
            answer = self.answers.get(name)
            return answer or (lambda value=0: SimpleNamespace() if name.startswith("CU") else value)

        def call(*args):
            self.calls.append((name, args))
            return (self.answers.get("fails", {}).get(name, 0), self.answers.get(name, 7))

        return call

    def args(self, name):
        return [args for called, args in self.calls if called == name]


class Everything:
    """Has any attribute: its own name."""

    def __getattr__(self, name):
        return name


def attribute():
    return SimpleNamespace(value=SimpleNamespace(clusterDim=SimpleNamespace()))


@pytest.fixture
def driver(monkeypatch):
    enums = "CUdevice_attribute", "CUlaunchAttributeID", "CUtensorMapDataType"
    enums += "CUtensorMapInterleave", "CUtensorMapSwizzle", "CUtensorMapL2promotion"
    enums += "CUtensorMapFloatOOBfill", "CUfunction_attribute"
    words = (ctypes.c_char * 128)()
    encoded = SimpleNamespace(getPtr=lambda: ctypes.addressof(words))
    made = Driver(
        **{name: Everything() for name in enums}, CUlaunchAttribute=attribute,
        cuDeviceGetName=b"a card\0\0", cuDeviceGetAttribute=9, cuTensorMapEncodeTiled=encoded,
    )  # fmt: skip
    monkeypatch.setattr(device.door, "driver", lambda: made)
    return made


def test_a_launch_reaches_the_driver_whole(driver):
    gpu = device.Device()
    assert gpu.name == "a card"
    gpu.capability = 9, 0
    form = Form("NT", cluster=2, pieces="together")
    arrays_there = [gpu.array(array) for array in arrays(form, 8192, 8192, 8192)[:3]]
    (launch,) = product(form, *arrays_there, place=gpu.array)
    gpu.load(launch.kernel, compile.Code(".entry some_kernel("))
    gpu.run(launch, stream=3)
    (config, function, (values, types), _), *more = driver.args("cuLaunchKernelEx")
    assert not more and function == 7 and config.hStream == 3
    assert (config.gridDimX, config.gridDimY, config.blockDimX) == (132, 1, THREADS)
    assert config.sharedMemBytes == SHARED and config.numAttrs == len(config.attrs) == 2
    size = config.attrs[0].value.clusterDim
    assert (size.x, size.y, size.z) == (2, 1, 1) and config.attrs[1].value.cooperative == 1
    assert [kind(value).value for kind, value in zip(types, values, strict=True)] == [*values]
    assert driver.args("cuModuleGetFunction")[0][1] == b"some_kernel"


def test_a_map_reaches_the_driver_innermost_first(driver):
    gpu = device.Device()
    device.encode(gpu, Map(gpu.empty((40, 24), np.float32), (16, 32)))
    kind, rank, _, extents, steps, box = driver.args("cuTensorMapEncodeTiled")[0][:6]
    assert kind.endswith("FLOAT32") and rank == 2
    assert (extents, steps, box) == ([24, 40], [96], [32, 16])


def test_a_driver_that_fails_is_quoted(driver):
    driver.answers["fails"] = {"cuMemAlloc": Failure(2)}
    with pytest.raises(RuntimeError, match="the GPU's driver: CUDA_ERROR_OUT_OF_MEMORY"):
        device.Device().empty((4,), np.float32)


def test_a_kernel_for_another_card_is_refused(driver):
    with pytest.raises(UserError, match=r"gemm_wgmma is for GPUs of capability 9.0, not \(8, 6\)"):
        gpu = device.Device()
        gpu.capability = 8, 6
        gpu.load(gemm_kernel(Form()))


class Failure(int):
    name = "CUDA_ERROR_OUT_OF_MEMORY"


# ---- Instructions


def test_wgmma_names_every_register_once_for_each_step():
    text = wgmma(256, 4, 2, 2, "NT").fill([[f"r{i}" for i in range(128)], "da", "db", "keep"])
    assert text.count("wgmma.mma_async") == 4 and text.count("m64n256k16") == 4
    assert all(text.count(f"r{i},") + text.count(f"r{i}}}") == 4 for i in range(128))
    assert [f"add.s64 a, da, {step};" in text for step in (0, 2, 4, 6)] == [True] * 4
    assert text.index("wgmma.fence") < text.index("mma_async") < text.index("commit_group")
    halves = wgmma(128, 4, 128, 128, "TN", rows=2)
    assert halves.text.count("$0[0:64]") == halves.text.count("$0[64:128]") == 4
    assert halves.text.count(", 1, 1, 1, 1;") == 8  # both operands transposed


def test_a_descriptor_has_its_offsets_in_units_of_16_bytes():
    made = descriptor(8192, 1024)
    assert (made >> 16 & 0x3FFF, made >> 32 & 0x3FFF, made >> 62) == (512, 64, 1)


# ---- Machine code


def test_compiling_is_refused_where_a_gpu_is_simulated(monkeypatch):
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    with pytest.raises(UserError, match="this process simulates"):
        door.compiler()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="no compiler for GPUs here: numba-cuda is missing"):
        door.compiler()
    with pytest.raises(UserError, match="no way to call the driver here"):
        door.driver()


needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason=f"no compiler here: {door.MISSING}"
)
needs_assembler = pytest.mark.skipif(
    compile.assembler() is None, reason="ptxas is missing: pip install nvidia-cuda-nvcc"
)


def store_sum():
    """A kernel of one instruction of each kind of operand."""
    address = ptx("{ .reg .u64 p; cvta.to.shared.u64 p, $1; cvt.u32.u64 $0, p; }", "p", "r", True)
    both = ptx("mov.b32 $0, $2; mov.b32 $1, $3;", "r f", "r f", True)
    first = ptx("add.f32 $0[0:1], $0[0:1], $1;", "+f*4 f")
    store = ptx("st.global.v4.f32 [$0], {$1};", "l f*4")

    def helper(values, x):
        first(values, float32(x))

    def kernel(out, x):
        values = cuda.local.array(4, float32)
        n, y = both(x, address(cuda.shared.array(0, int8)))
        for i in range(4):
            values[i] = y
        helper(values, int32(n + 1))
        store(out, values)

    return Kernel(kernel, "l r", 32, target=(8, 0))


@pytest.fixture(scope="module")
def codes():
    makers = {name: partial(gemm_kernel, form) for name, form in FORMS.items()}
    makers["sums"] = partial(sum_kernel, FORMS["TN add, pieces"])
    makers["operands"] = store_sum
    return compile.build_all(makers)


@needs_compiler
def test_operands_arrive_where_the_text_wants_them(codes):
    text = codes["operands"].text
    assert ".target sm_80" in text and f".version {compile.PTX_VERSION}" in text
    added = text[text.index("add.f32") :].split()[1:3]
    assert added[0] == added[1], "the array's register is read and written"
    stored = text[text.index("st.global.v4.f32") :].partition("{")[2].partition("}")[0].split(", ")
    assert stored[0] == added[0].strip(",") and len({*stored}) == 4


# Registers that ptxas gives a thread, as it did when these kernels were measured. 168 is what a
# block of 384 threads can have; setmaxnreg then deals them out, 40 and 232.
TABLE = {name: 168 for name in FORMS} | {"sums": 110}


@needs_compiler
@needs_assembler
@pytest.mark.parametrize("name", TABLE)
def test_registers_spills_and_warnings(codes, name):
    code = codes[name]
    assert (code.spills, code.stack, code.warnings) == (0, 0, ())
    assert code.registers <= TABLE[name]
    assert code.image and ".target sm_90a" in code.text


@needs_compiler
def test_nothing_wider_than_a_register_is_carried_round_the_ring(codes):
    """numba adds int32 in 64 bits; a stage that is not cast back divides and compares in 64."""
    for name in FORMS:
        assert "div.s64" not in codes[name].text and "rem.s64" not in codes[name].text, name
