# Made from book/i-machine-code.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-ptx
"""Instructions of all cards since 8.0 as functions of a kernel. See NVIDIA's PTX ISA 9.0.

Addresses in shared memory are int32 offsets in the shared window (`shared_address`); addresses in
global memory are int64. Left out: what only Hopper has (`hopper`) and, except for three forms of
ldmatrix, every form of an instruction that no kernel of ours uses.
"""

from functools import cache

from nanoeuler.engines.gpu.lang.instruction import Instruction, ptx

# p -> its int32 offset in the shared window
shared_address = ptx(
    "{ .reg .u64 p; cvta.to.shared.u64 p, $1; cvt.u32.u64 $0, p; }", "p", "r", pure=True
)
# a, b -> a / b rounded down, both below 2^31: numba's // divides in 64 bits
divide = ptx("div.u32 $0, $1, $2;", "r r", "r", True)


# a, b -> both as bf16, rounded to nearest even, a in the low half
pack_bf16 = ptx("cvt.rn.bf16x2.f32 $0, $2, $1;", "f f", "r", True)
# the low bf16 of a pair -> float32
low_bf16 = ptx("{ .reg .b32 t; shl.b32 t, $1, 16; mov.b32 $0, t; }", "r", "f", True)
# the high bf16 of a pair -> float32
high_bf16 = ptx("{ .reg .b32 t; and.b32 t, $1, 0xffff0000; mov.b32 $0, t; }", "r", "f", True)
# x -> tanh(x), relative error below 2^-11 (the manual)
tanh_approx = ptx("tanh.approx.f32 $0, $1;", "f", "f", True)
# x -> 2^x, relative error below 2^-22 (the manual)
exp2 = ptx("ex2.approx.ftz.f32 $0, $1;", "f", "f", True)
# x -> log2(x), error below 2^-22 (the manual): absolute for x from 0.5 to 2, else relative
log2 = ptx("lg2.approx.ftz.f32 $0, $1;", "f", "f", True)
# x -> 1 / x, off by at most the last bit (the manual)
reciprocal = ptx("rcp.approx.ftz.f32 $0, $1;", "f", "f", True)
# a, b -> the larger
larger = ptx("max.f32 $0, $1, $2;", "f f", "f", True)


# address, index, limit -> the 4 bytes there, or 0 where index >= limit; nobody writes them
load_if_below = ptx(
    "{ .reg .pred p; setp.lt.s32 p, $2, $3; mov.b32 $0, 0; @p ld.global.nc.b32 $0, [$1]; }",
    "l r r", "r",
)  # fmt: skip
# address -> 4 int32, which nobody writes meanwhile
load_int4 = ptx("ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", "l", "r r r r")
# address -> the float32 there, which nobody writes meanwhile
load_float = ptx("ld.global.nc.f32 $0, [$1];", "l", "f")
# address, float32
store_float = ptx("st.global.f32 [$0], $1;", "l f")
# address, index, limit -> 4 float32 as the whole GPU sees them, or zeros where index >= limit
load_float4_if_below = ptx(
    "{ .reg .pred p; setp.lt.s32 p, $5, $6; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0;"
    " mov.b32 $3, 0;"
    " @p ld.global.cg.v4.f32 {$0, $1, $2, $3}, [$4]; }",
    "l r r", "f f f f",
)  # fmt: skip
# address, 2 float32
store_float2 = ptx("st.global.v2.f32 [$0], {$1, $2};", "l f f")
# address, 4 float32
store_float4 = ptx("st.global.v4.f32 [$0], {$1, $2, $3, $4};", "l f f f f")
# address, count -> up to 2 float32, zeros behind `count` of them; no other thread writes them
load_float2_if = ptx(
    "{ .reg .pred p, q; setp.ge.s32 p, $3, 2; setp.eq.s32 q, $3, 1; mov.f32 $0, 0f00000000;"
    " mov.f32 $1, 0f00000000; @p ld.global.v2.f32 {$0, $1}, [$2]; @q ld.global.f32 $0, [$2]; }",
    "l r", "f f",
)  # fmt: skip
# address, 2 float32, count: store so many of them
store_float2_if = ptx(
    "{ .reg .pred p, q; setp.ge.s32 p, $3, 2; setp.eq.s32 q, $3, 1;"
    " @p st.global.v2.f32 [$0], {$1, $2}; @q st.global.f32 [$0], $1; }",
    "l f f r",
)
# address, int32: store its lower half
store_short = ptx("{ .reg .b16 h; cvt.u16.u32 h, $1; st.global.b16 [$0], h; }", "l r")


# address in shared memory -> the int32 there
load_shared_int = ptx("ld.shared.b32 $0, [$1];", "r", "r")
# address in shared memory -> the 4 int32 there
load_shared_int4 = ptx("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "r", "r r r r")
# address in shared memory, int32
store_shared_int = ptx("st.shared.b32 [$0], $1;", "r r")
# address in shared memory, 4 int32
store_shared_int4 = ptx("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r r r r r")
# address in shared memory, 2 float32
store_shared_float2 = ptx("st.shared.v2.f32 [$0], {$1, $2};", "r f f")
# address in shared memory -> the 2 float32 there
load_shared_float2 = ptx("ld.shared.v2.f32 {$0, $1}, [$2];", "r", "f f")


# address -> the int32 there, which nobody writes meanwhile
load_int = ptx("ld.global.nc.b32 $0, [$1];", "l", "r")
# address -> 2 int32, which nobody writes meanwhile
load_int2 = ptx("ld.global.nc.v2.b32 {$0, $1}, [$2];", "l", "r r")
# address -> 4 float32, which nobody writes meanwhile
load_float4 = ptx("ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4];", "l", "f f f f")
# address -> 2 int32, which no other thread writes
load_own_int2 = ptx("ld.global.v2.b32 {$0, $1}, [$2];", "l", "r r")
# address -> 4 int32, which no other thread writes
load_own_int4 = ptx("ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", "l", "r r r r")
# address -> 4 float32, which no other thread writes
load_own_float4 = ptx("ld.global.v4.f32 {$0, $1, $2, $3}, [$4];", "l", "f f f f")
# address -> the float32 there, which no other thread writes
load_own_float = ptx("ld.global.f32 $0, [$1];", "l", "f")
# address -> the int32 there, which no other thread writes
load_own_int = ptx("ld.global.b32 $0, [$1];", "l", "r")
# address, int32
store_int = ptx("st.global.b32 [$0], $1;", "l r")
# address, 2 int32
store_int2 = ptx("st.global.v2.b32 [$0], {$1, $2};", "l r r")
# address, 4 int32
store_int4 = ptx("st.global.v4.b32 [$0], {$1, $2, $3, $4};", "l r r r r")
# address in shared memory, 4 float32
store_shared_float4 = ptx("st.shared.v4.f32 [$0], {$1, $2, $3, $4};", "r f f f f")
# address in shared memory -> the 4 float32 there
load_shared_float4 = ptx("ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "r", "f f f f")
# x -> 1 / sqrt(x), relative error below 2^-22 (the manual)
inverse_root = ptx("rsqrt.approx.ftz.f32 $0, $1;", "f", "f", True)
# x -> sqrt(x), relative error below 2^-22 (the manual)
square_root = ptx("sqrt.approx.ftz.f32 $0, $1;", "f", "f", True)


# int32 -> the float32 with these bits
float_of = ptx("mov.b32 $0, $1;", "r", "f", True)
# float32 -> its bits
bits_of = ptx("mov.b32 $0, $1;", "f", "r", True)
# a, b, c -> a * b + c, rounded once
fma = ptx("fma.rn.f32 $0, $1, $2, $3;", "f f f", "f", True)
# two pairs of bf16 -> the larger low one and the larger high one; a nan gives way to a number
larger_pair = ptx("max.bf16x2 $0, $1, $2;", "r r", "r", True)


# x, mask -> x of the lane whose number differs in the bits of `mask`
shuffle_xor = ptx("shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", "f r", "f")
# x -> x of lane 0: the compiler then knows that the warp agrees on it
uniform = ptx("shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;", "r", "r")
# address of a row of 8 bf16, one a lane -> a warp's four 8 x 8 matrices, a pair each a lane
ldmatrix4 = ptx(
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];", "r", "r r r r"
)
# the same, each matrix transposed on the way: neighbours in a column go to one lane
ldmatrix4_turned = ptx(
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];", "r", "r r r r"
)
# address of a row of 8 bf16, one a lane, of lanes 0 to 15 -> two 8 x 8 matrices
ldmatrix2 = ptx("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {$0, $1}, [$2];", "r", "r r")
# the same, each matrix transposed on the way
ldmatrix2_turned = ptx("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {$0, $1}, [$2];", "r", "r r")


# PTX ISA, "mma": rows of A, columns of B, float32 sums
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
# A (16 x 16 bf16, 4 registers), B (16 x 8 bf16, 2), C (16 x 8 float32, 4) -> A B + C
mma = ptx(
    MMA + " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
    "r r r r r r f f f f", "f f f f",
)  # fmt: skip


@cache
def mma_tile(rows: int, columns: int) -> Instruction:
    """acc, a, b: acc += A B, for a warp's tile of `rows` x `columns` elements and 16 of k.

    acc (rows * columns / 32 float32): four registers for each 16 x 8, those side by side first.
    a (rows / 4 int32): four for each 16 rows; b (columns / 4 int32): two for each 8 columns.
    """
    across = columns // 8
    text = " ".join(
        f"{MMA} {{$0[{q}:{q + 4}]}}, {{$1[{4 * i}:{4 * i + 4}]}}, {{$2[{2 * j}:{2 * j + 2}]}},"
        f" {{$0[{q}:{q + 4}]}};"
        for i in range(rows // 16)
        for j in range(across)
        for q in [4 * (i * across + j)]
    )
    return ptx(text, f"+f*{rows * columns // 32} r*{rows // 4} r*{columns // 4}")


@cache
def zeros(count: int) -> Instruction:
    """acc: `count` float32 registers become 0."""
    each = (f"mov.f32 $0[{i}:{i + 1}], 0f00000000;" for i in range(count))
    return ptx(" ".join(each), f"=f*{count}")


@cache
def ldmatrix_down(count: int, step: int) -> Instruction:
    """fragments (4 * count int32), address: `count` times `ldmatrix4`, each `step` bytes on."""
    text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
    each = (f"{text} {{$0[{4 * i}:{4 * i + 4}]}}, [$1+{step * i}];" for i in range(count))
    return ptx(" ".join(each), f"=r*{4 * count} r")


@cache
def ldmatrix_across(count: int) -> Instruction:
    """fragments (4 * count int32), address: `count` times `ldmatrix4_turned`, 32 bytes apart in a
    row whose chunks of 16 bytes are swizzled: the i-th is at address ^ 32 i.
    """
    text = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
    each = (
        f"xor.b32 at, $1, {32 * i}; {text} {{$0[{4 * i}:{4 * i + 4}]}}, [at];" for i in range(count)
    )
    return ptx(f"{{ .reg .b32 at; {' '.join(each)} }}", f"=r*{4 * count} r")


# address in shared memory, address: copy 16 bytes by way of L2, past L1
copy_async = ptx("cp.async.cg.shared.global [$0], [$1], 16;", "r l")
# address in shared memory, address, bytes: copy so many of 16, and fill up with zeros
copy_async_part = ptx("cp.async.cg.shared.global [$0], [$1], 16, $2;", "r l r")
# the thread's copies since the last commit are a group
copy_commit = ptx("cp.async.commit_group;")


@cache
def copy_wait(most: int) -> Instruction:
    """Wait until at most `most` of the thread's groups of copies are under way."""
    return ptx(f"cp.async.wait_group {most};")


# number, threads: wait until so many threads of the block, whole warps, are at this barrier
barrier = ptx("bar.sync $0, $1;", "r r")
# number, threads: arrive at a barrier without waiting there
barrier_arrive = ptx("bar.arrive $0, $1;", "r r")
# address in shared memory, last -> on lane 0 what a counter there held before it went one up, or
# from `last` back to 0; -1 on the other lanes
ticket = ptx(
    "{ .reg .pred p; .reg .u32 lane; mov.u32 lane, %laneid; setp.eq.s32 p, lane, 0;"
    " mov.b32 $0, 0xffffffff; @p atom.relaxed.cta.shared::cta.inc.u32 $0, [$1], $2; }",
    "r r", "r",
)  # fmt: skip
# address, step: wait until all blocks of the grid are here. One thread of each calls it, after a
# barrier in its block; address holds a uint32. Each adds its step, all steps sum to 2^31, and the
# top bit turns when the last has come: nobody need set it back.
grid_barrier = ptx(
    "{ .reg .b32 old, now; .reg .pred p;\n fence.acq_rel.gpu;\n"
    " atom.add.acq_rel.gpu.global.u32 old, [$0], $1;\n WAIT:\n"
    " ld.acquire.gpu.global.u32 now, [$0];\n xor.b32 now, now, old;\n"
    " setp.ge.s32 p, now, 0;\n @p bra WAIT;\n }",
    "l r",
)


# x -> x, which the compiler may not keep from before, nor take out of a loop
again = ptx("mov.b32 $0, $1;", "r", "r")
