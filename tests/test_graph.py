"""The device and its driver: views, graphs and post, the same on a lazy driver and on paper."""

import gc
import importlib.util
import inspect
import re
import weakref

import numpy as np
import pytest
from lazy_driver import Driver, Error

from nanoeuler import emulator
from nanoeuler.engines.gpu.host import compile as compiler
from nanoeuler.engines.gpu.host import device, libraries, staging
from nanoeuler.engines.gpu.lang.instruction import cuda
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch, Map
from nanoeuler.errors import UserError


def learn(batch, rate, weights, total):
    i = cuda.threadIdx.x
    weights[i] += batch[i] * rate[0]
    total[i] = weights[i]


def scale(x, y, by):
    i = cuda.threadIdx.x
    y[i] = x[i] * by


def add(x, y):
    i = cuda.threadIdx.x
    y[i] += x[i]


KERNELS = {
    "learn": Kernel(learn, "f[1] f[1] f[1] f[1]", 4, target=(8, 0)),
    "scale": Kernel(scale, "f[1] f[1] f", 8, target=(8, 0)),
    "add": Kernel(add, "f[1] f[1]", 8, target=(8, 0)),
}


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    made.kernels = KERNELS
    monkeypatch.setattr(device.libraries, "driver", lambda: made)
    return made


@pytest.fixture(params=["driver", "paper"])
def either(request):
    """A device on the lazy driver, with all kernels loaded, and the device on paper."""
    if request.param == "paper":
        return emulator.Device()
    request.getfixturevalue("driver")
    made = device.Device()
    for name, kernel in KERNELS.items():
        made.load(kernel, compiler.Code(f".entry {name}("))
    return made


def launch(name, *args):
    return Launch(KERNELS[name], (1,), args)


# ---- The same on both devices


def test_both_devices_have_the_same_methods():
    def methods(kind):
        return {
            name: list(inspect.signature(getattr(kind, name)).parameters)[1:]
            for name in dir(kind)
            if not name.startswith("_") and callable(getattr(kind, name))
        }

    real, on_paper = methods(device.Device), methods(emulator.Device)
    own = real.pop("keep"), on_paper.pop("refuse")
    assert own == (["thing", "free", "handle"], ["what"])
    assert real.pop("load")[:1] == on_paper.pop("load")
    assert real == on_paper
    names = "array capture empty fetch fill host load_all mark memory_used others page part prepare"
    assert sorted(real) == [*names.split(), "run", "send", "synchronize", "zeros"]


def test_a_graph_runs_on_what_its_arrays_hold_when_it_is_started(either):
    x, y = either.array(np.arange(8, dtype=np.float32)), either.empty((8,), np.float32)
    starts = [either.prepare(launch("scale", x, y, 3.0)), either.prepare(launch("add", y, x))]
    graph = either.capture(starts)
    assert (either.host(x) == np.arange(8)).all()
    graph.launch(), graph.launch()
    assert (either.host(x) == 16 * np.arange(8)).all()
    either.fill(x, 1)
    graph.launch()
    starts[1]()
    assert (either.host(x) == 7).all() and (either.host(y) == 3).all()


def test_a_graph_keeps_its_arrays_and_gives_them_back(either):
    x, y = either.array(np.ones(8, np.float32)), either.empty((8,), np.float32)
    before = either.memory_used()
    graph = either.capture([either.prepare(launch("scale", x, y, 2.0))])
    kept = weakref.ref(y)
    del y
    gc.collect()
    graph.launch()
    assert kept() is not None and either.memory_used() == before
    either.synchronize()
    del graph
    gc.collect()
    assert kept() is None and either.memory_used() == before - 32


def test_a_part_is_the_same_memory(either):
    rows = either.array(np.arange(24, dtype=np.float32).reshape(2, 12))
    keys = either.part(rows, 16, (2, 4), np.float32, (48, 4))
    inner = either.part(keys, 48, (2,), np.float32)
    assert (either.host(keys) == np.arange(24).reshape(2, 12)[:, 4:8]).all()
    either.fill(inner, [-1, -2])
    assert (either.host(rows)[1, 4:7] == [-1, -2, 18]).all()
    del rows, keys
    gc.collect()
    assert either.memory_used() == 96 and (either.host(inner) == [-1, -2]).all()
    assert either.host(either.part(inner, 4, (), np.float32)) == -2
    with pytest.raises(UserError, match="reaches outside of an array of 8 bytes"):
        either.part(inner, 4, (2,), np.float32)
    with pytest.raises(UserError, match="C order"):
        either.fill(either.part(either.array(np.eye(3)), 0, (3,), float, (24,)), 1)


def test_a_launch_works_on_a_part(either):
    whole, x = either.array(np.zeros(24, np.float32)), either.array(np.arange(8, dtype=np.float32))
    either.run(launch("scale", x, either.part(whole, 32, (8,), np.float32), 2.0))
    expected = np.zeros(24)
    expected[8:16] = 2 * np.arange(8)
    assert (either.host(whole) == expected).all()


def test_memory_is_asked_for_in_any_shape(either):
    for shape in (), (0, 3), (2, 0):
        array = either.array(np.zeros(shape, np.int64))
        assert array.shape == shape and either.host(array).shape == shape
        made = either.zeros(shape, np.int64)
        assert made.shape == shape and not either.host(made).any()
    assert not either.host(either.zeros((3, 5), np.uint8)).any()
    either.fill(array, 5)
    turned = np.arange(6).reshape(2, 3).T
    assert (either.host(either.array(turned)) == turned).all()


# ---- Post


def training(either):
    """A step that adds rate * batch to the weights, as a graph; its inbox and outbox."""
    weights = either.array(np.zeros(4, np.float32))
    fields = {"batch": ((4,), np.float32), "flag": ((3,), np.uint8), "rate": ((1,), np.float32)}
    inbox = staging.Inbox(either, fields)
    outbox = staging.Outbox(either, {"total": ((4,), np.float32)})
    arrays = inbox.parts["batch"], inbox.parts["rate"], weights, outbox.parts["total"]
    return either.capture([either.prepare(launch("learn", *arrays))]), inbox, outbox


def fill(inbox, n):
    page = inbox.page()
    page["batch"][:], page["flag"][:], page["rate"][:] = n, 1, 2.0**-n


def test_results_come_one_step_late_and_none_is_lost(either):
    graph, inbox, outbox = training(either)
    seen = []
    for n in range(7):
        fill(inbox, n)
        inbox.send()
        graph.launch()
        outbox.fetch()
        if len(outbox) > 1:
            seen.append(outbox.read()["total"])
    seen.append(outbox.read()["total"])
    expected = np.cumsum([n * 2.0**-n for n in range(7)])
    assert len(outbox) == 0 and (np.array(seen) == expected[:, None]).all()


def test_the_host_waits_for_no_step_that_runs(driver):
    either = device.Device()
    either.load(KERNELS["learn"], compiler.Code(".entry learn("))
    graph, inbox, outbox = training(either)
    for n in range(6):
        fill(inbox, n)
        inbox.send()
        graph.launch()
        outbox.fetch()
        if n:
            outbox.read()
        assert len(driver.work) == 3  # of this step alone: copy, launch, copy


@pytest.mark.parametrize("wait", [True, False])
def test_an_inbox_that_does_not_wait_would_be_found_out(either, wait):
    """The test of the test: without the wait, the third batch falls on the first."""
    graph, inbox, outbox = training(either)
    seen, fault = [], None
    try:
        for n in range(1, 4):
            if not wait:
                inbox.sent = [lambda: None] * staging.PAGES
            fill(inbox, n)
            inbox.send()
            graph.launch()
        outbox.fetch()
        seen = outbox.read()["total"]
    except emulator.Fault as error:
        fault = error.kind
    right = fault is None and (seen == 0.5 + 2 / 4 + 3 / 8).all()
    assert right == wait and fault in (None, "race")


def test_what_is_out_of_order_is_refused(either):
    graph, inbox, outbox = training(either)
    with pytest.raises(UserError, match="no result is under way"):
        outbox.read()
    with pytest.raises(UserError, match="take its next page"):
        inbox.send()
    fill(inbox, 1)
    inbox.send()
    with pytest.raises(UserError, match="take its next page"):
        inbox.send()
    graph.launch()
    outbox.fetch(), outbox.fetch()
    with pytest.raises(UserError, match="2 results wait"):
        outbox.fetch()


def test_a_result_that_no_step_wrote_is_refused_on_paper():
    _, _, outbox = training(emulator.Device())
    with pytest.raises(emulator.Fault, match="nobody wrote"):
        outbox.fetch()


def test_fields_lie_apart_and_begin_where_wide_loads_may():
    fields = {"a": ((3,), np.uint8), "b": ((2, 2), np.int64), "c": ((), np.float32)}
    assert staging.places(fields) == ({"a": (0, 3), "b": (16, 48), "c": (48, 52)}, 64)


# ---- The driver alone


def maker(by):
    """A kernel that no other process could make by its name."""

    def many(x):
        x[cuda.threadIdx.x] *= by

    return Kernel(many, "f[1]", 32, target=(8, 0))


@pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason=f"no compiler here: {libraries.MISSING}"
)
def test_kernels_at_hand_are_compiled_in_copies_of_the_process():
    kernels = [maker(by) for by in (2, 3, 5)]
    codes = compiler.build_copies(kernels, workers=2)
    alone = [compiler.build(lambda kernel=kernel: kernel) for kernel in kernels]

    def text(code):
        return re.sub(r"B\d+v\d+", "", code.text)  # numba counts what a process compiles

    assert [*map(text, codes)] == [*map(text, alone)] and len({*map(text, codes)}) == 3
    broken = Kernel(lambda x: x.nothing_of_the_kind(), "f[1]", 32, target=(8, 0))
    with pytest.raises(Exception, match="nothing_of_the_kind"):
        compiler.build_copies([kernels[0], broken], workers=2)


def test_only_what_is_missing_is_compiled_and_all_is_loaded(driver, monkeypatch):
    gpu, asked = device.Device(), []

    def compiled(kernels, capability):
        asked.append([kernel.function.__name__ for kernel in kernels])
        return [compiler.Code(f".entry {name}(") for name in asked[-1]]

    monkeypatch.setattr(device, "compiled", compiled)
    gpu.load_all([KERNELS["add"], KERNELS["scale"], KERNELS["add"]])
    gpu.load_all(KERNELS.values())
    assert asked == [["add", "scale"], ["learn"]] and {*gpu.functions} == {*KERNELS.values()}


def test_pages_and_events_go_back_to_the_driver(driver):
    gpu = device.Device()
    page = gpu.page(64)
    field, wait = page[16:32].view(np.float32), gpu.mark()
    del page
    gc.collect()
    assert len(driver.pinned) == 1  # a part of it lives
    field[:] = 1
    wait()
    del field, wait
    gc.collect()
    assert not driver.pinned and not driver.events


def test_what_is_forgotten_in_a_capture_goes_back_after_it(driver):
    gpu = device.Device()
    things = [gpu.empty((8,), np.float32), gpu.page(8)]
    gpu.capture([lambda stream: things.clear()])
    assert not driver.taken and not driver.pinned and not driver.refused


@pytest.mark.parametrize(
    "act",
    [
        lambda gpu, x: gpu.host(x),
        lambda gpu, x: gpu.fill(x, 1),
        lambda gpu, x: gpu.synchronize(),
        lambda gpu, x: gpu.wait(),
    ],
    ids="host fill synchronize wait".split(),
)
def test_a_capture_that_cannot_be_ends_with_the_reason(driver, act):
    gpu = device.Device()
    x = gpu.array(np.ones(8, np.float32))
    gpu.wait = gpu.mark()
    with pytest.raises(RuntimeError, match="a graph can.t record"):
        gpu.capture([lambda stream: act(gpu, x)])
    assert (gpu.host(x) == 1).all() and driver.captured is None
    with pytest.raises(RuntimeError, match="INVALIDATED: an operation that a graph can.t record"):
        gpu.capture([lambda stream: driver.cuCtxSynchronize()])  # nobody looked at its error
    gpu.capture([])


def test_an_error_in_a_capture_ends_it_and_is_not_hidden(driver):
    gpu = device.Device()
    with pytest.raises(ZeroDivisionError):
        gpu.capture([lambda stream: 1 / 0])
    assert driver.captured is None
    with pytest.raises(RuntimeError, match="ILLEGAL_STATE"):
        gpu.capture([lambda stream: gpu.capture([])])


def test_the_driver_keeps_no_graph_that_is_forgotten(driver):
    gpu = device.Device()
    graph = gpu.capture([])
    assert len(driver.graphs) == 1
    del graph
    gc.collect()
    assert not driver.graphs


def test_memory_that_is_not_there_is_named_with_sizes(driver):
    driver.room = 3 * 10**9
    gpu = device.Device()
    kept = gpu.empty((25, 10**4), np.float32)
    with pytest.raises(MemoryError) as caught:
        gpu.empty((10**6, 1000), np.float32)
    assert len(driver.taken) == 1 and kept is not None and str(caught.value) == (
        "an array (1000000, 1000) of float32 takes 4.00 GB, and a lazy card has 3.00 of its 3.00 "
        "GB free"
    )


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("OUT_OF_MEMORY", MemoryError, "the GPU's driver: CUDA_ERROR_OUT_OF_MEMORY"),
        ("ILLEGAL_ADDRESS", RuntimeError, "accessed memory outside its arrays"),
        ("MISALIGNED_ADDRESS", RuntimeError, "read or wrote at a misaligned address"),
        ("NO_BINARY_FOR_GPU", RuntimeError, "NO_BINARY_FOR_GPU$"),
    ],
)
def test_errors_of_the_driver_are_said_in_words(driver, name, kind, words):
    driver.fails = {"cuCtxSynchronize": Error(700, name)}
    with pytest.raises(kind, match=words):
        device.Device().synchronize()


def test_a_map_of_a_part_begins_where_the_copy_engine_can(driver):
    gpu = device.Device()
    rows = gpu.empty((16, 64), np.uint16)
    with pytest.raises(UserError, match="begin at multiples of 16"):
        device.encode(gpu, Map(gpu.part(rows, 8, (8, 32), np.uint16, (128, 2)), (8, 32)))


@pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="cuda.bindings is not installed (extra: gpu)"
)
def test_the_lazy_driver_takes_the_arguments_that_nvidias_takes():
    from cuda.bindings import driver as nvidias

    calls = [name for name in dir(Driver) if name.startswith("cu")]
    assert len(calls) > 25
    for name in calls:
        said = getattr(nvidias, name).__doc__.split("\n")[0]
        words = said[said.index("(") + 1 : said.rindex(")")].split(",")
        theirs = [word.partition(":")[0].split()[-1].strip("*") for word in words if word.strip()]
        assert theirs == list(inspect.signature(getattr(Driver, name)).parameters)[1:], said
    for kind in "CUstream_flags", "CUstreamCaptureMode", "CUevent_flags", "CUfunction_attribute":
        for name, value in vars(getattr(Driver, kind)).items():
            assert int(getattr(getattr(nvidias, kind), name)) == value
