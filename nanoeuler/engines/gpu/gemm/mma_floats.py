# Made from book/k-float32-products.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-pieces-registers
"""Float32 products by mma.sync, split into two bf16 pieces in registers; capability 8.0 on.

As `float32` with two pieces, without a kernel that splits. Equal operands give equal bits. Left
out: three pieces, for which a lane has no registers, and numbers that round to infinity as bf16.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

from nanoeuler.engines.gpu.gemm.choice import HOPPER
from nanoeuler.engines.gpu.gemm.float32 import AXES, depth_of, stretch_of, stretches_for
from nanoeuler.engines.gpu.gemm.mma_form import ALIGN, FRAGMENTS, SIDE, MmaForm
from nanoeuler.engines.gpu.gemm.mma_kernel import make_find, make_kernel, make_sources
from nanoeuler.engines.gpu.gemm.mma_launch import mma_product, space_for
from nanoeuler.engines.gpu.lang import ptx
from nanoeuler.engines.gpu.lang.card import MULTIPROCESSORS, SHARED, limit
from nanoeuler.engines.gpu.lang.instruction import cuda, int32
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch
from nanoeuler.errors import UserError

STEPS = 2   # of a k-block, 16 of k each, and parts in which the next one is fetched
LONGEST = 64  # k-blocks of one sum: 2048 of k, 6144 products, as `float32.DEEP` has it


@dataclass(frozen=True)
class FloatForm(MmaForm):
    """Compile-time parameters of a kernel whose operands are float32; so is C."""

    operands: ClassVar[str] = "float32"
    longest: ClassVar[int] = LONGEST

    out: str = "float32"
    columns: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.out != "float32":
            raise UserError(f"products of float32 are stored as float32, not as {self.out}")


def swizzle(row, dense):
    """What the chunks of a row of k, or across k, are moved by: four float32 each."""
    return int32((row & 1) << 2) if dense else int32((row >> 2 & 3) << 1)


def cut(x, y):
    """The large pieces of a pair, and the small ones."""
    large = ptx.pack_bf16(x, y)
    return large, ptx.pack_bf16(x - ptx.low_bf16(large), y - ptx.high_bf16(large))


def make_load(dense: bool, extent: int, of_a: bool) -> tuple[Any, Any]:
    """find(lane, side) -> a lane's place in a stage; load(large, small, at, step): the pieces of 64
    rows x 16 k, of B columns. side: the warp's first row of A, or column of B."""
    row_bytes = ALIGN if dense else extent * 4

    def find(lane, side):
        group, t = int32(lane >> 2), int32(lane & 3)
        if dense:
            return int32((side + group) * row_bytes + ((t ^ swizzle(group, True)) << 4))
        chunk = int32((side + group) >> 2 ^ swizzle(int32(4 * t), False))
        return int32(4 * t * row_bytes + (chunk << 4) + (group & 3) * 4)

    def four(at, step, i):
        """k 4 t to 4 t + 3 of the lane's i-th row, 8 i below the first."""
        if dense:
            return ptx.load_shared_float4(int32((at ^ step << 6) + i * (8 * row_bytes)))
        here = int32((at ^ (i & 3) << 5) + (i >> 2) * 128 + step * (16 * row_bytes))
        x, y = ptx.load_shared_int(here), ptx.load_shared_int(here + row_bytes)
        z, w = ptx.load_shared_int(here + 2 * row_bytes), ptx.load_shared_int(here + 3 * row_bytes)
        return ptx.float_of(x), ptx.float_of(y), ptx.float_of(z), ptx.float_of(w)

    def load(large, small, at, step):
        for i in range(8):
            x, y, z, w = four(at, step, i)
            # A's registers are rows g and g + 8 for the first k, then for the others; B's both k.
            p, q = (i // 2 * 4 + i % 2, i // 2 * 4 + i % 2 + 2) if of_a else (2 * i, 2 * i + 1)
            large[p], small[p] = cut(x, y)
            large[q], small[q] = cut(z, w)

    return find, load


def make_step(form: FloatForm) -> tuple[Any, Any]:
    """find, as `mma_kernel.make_find` has it; step(acc, at, slot, number): the three products of a
    step's pieces, the smallest first."""
    find_a, load_a = make_load(form.layout[0] == "N", form.rows, True)
    find_b, load_b = make_load(form.layout[1] == "T", form.columns, False)
    mma = ptx.mma_tile(SIDE, SIDE)

    def step(acc, at, slot, number):
        a, rest_a = cuda.local.array(FRAGMENTS, int32), cuda.local.array(FRAGMENTS, int32)
        b, rest_b = cuda.local.array(FRAGMENTS, int32), cuda.local.array(FRAGMENTS, int32)
        load_a(a, rest_a, at[0] + slot, number)
        load_b(b, rest_b, at[1] + slot, number)
        mma(acc, a, rest_b)
        mma(acc, rest_a, b)
        mma(acc, a, b)

    return make_find(form, find_a, find_b), step


def make_multiply(form: FloatForm) -> Any:
    """multiply(acc, base, sources, count, warp, lane): acc += A B, over `count` k-blocks."""
    stages, stage = form.stages, form.stage
    _, fetch, forward = make_sources(form, swizzle, STEPS)
    find, step = make_step(form)
    wait, last = ptx.copy_wait(stages - 2), (stages - 1) * stage

    def multiply(acc, base, sources, count, warp, lane):
        for s in range(stages - 1):  # (1) the ring fills, except for one stage
            for part in range(STEPS):
                fetch(part, s * stage, sources)
            ptx.copy_commit()
            sources = forward(sources)
        at, slot, ahead = find(base, warp, lane), int32(0), int32(last)
        for _ in range(count):
            wait()  # (2) my copies of this k-block have come
            cuda.syncthreads()  # so have all others'; and the one before is read by all
            for number in range(STEPS):
                fetch(number, ahead, sources)
                step(acc, at, slot, number)
            ptx.copy_commit()
            sources = forward(sources)
            ahead = slot
            slot = int32(slot + stage) if slot < last else int32(0)

    return multiply


@cache
def floats_kernel(form: FloatForm) -> Kernel:
    """The kernel for operands in float32: arguments as `mma_kernel.make_kernel` has them."""
    return make_kernel(form, make_sources(form, swizzle, STEPS)[0], make_multiply(form))


def choose_floats(
    layout: str, epilogue: str = "store", capability: tuple[int, int] = (8, 0)
) -> FloatForm:
    """The form for a product on a card of this capability; UserError below 8.0."""
    if tuple(capability) < (8, 0):
        raise UserError(f"float32 products need compute capability 8.0 or newer, not {capability}")
    form = FloatForm(layout, epilogue, columns=256)
    return form if form.shared <= limit(SHARED, capability) else FloatForm(layout, epilogue)


def in_registers(capability: tuple[int, ...], pieces: int) -> bool:
    """Whether a product of so many pieces splits its operands itself on such a card."""
    return pieces == 2 and tuple(capability) != HOPPER


def floats_product(
    form: FloatForm, a: Any, b: Any, c: Any, *, place: Callable[[int], Any],
    blocks: int = MULTIPROCESSORS,
) -> list[Launch]:  # fmt: skip
    """The launches, in order, of C = op(A) op(B), or C += with "add", of float32 matrices.

    a, b (2-d) as the form's layout stores them, c (m, n), all with rows a multiple of 16 bytes
    apart. place(n): n bytes of workspace, which all launches share. blocks: how many run at once.
    """
    k, (m, n) = depth_of(form.layout, a, b, c, 2, form.epilogue), c.shape
    (of_a, of_b), made = AXES[form.layout], []
    length = k if form.layout == "TN" else stretch_of(k, stretches_for(m, n, k, 2, blocks))
    for at in range(0, k, length):
        end = min(at + length, k)
        now = replace(form, epilogue="add") if at else form
        need = space_for(now, m, n, end - at, blocks)
        made += mma_product(
            now, a[:, at:end] if of_a else a[at:end], b[:, at:end] if of_b else b[at:end], c,
            space=place(need) if need else None, blocks=blocks, make=floats_kernel,
        )  # fmt: skip
    return made
