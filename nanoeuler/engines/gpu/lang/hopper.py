# Made from book/11a-a-ladder-on-tensor-cores.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gemm-ptx
"""Hopper's instructions as functions of a kernel. Mnemonics are titles in NVIDIA's PTX ISA 9.0.

Addresses in shared memory are int32 offsets in the shared window (`shared_address`); addresses in
global memory and of tensor maps are int64. What these need: compute capability 9.0a. Left out:
every form of an instruction that no kernel or test of ours uses.
"""

from nanoeuler.engines.gpu.lang.instruction import Instruction
from nanoeuler.engines.gpu.lang.instruction import ptx as instruction

# address of a row, one a lane; a pair of each of the four matrices from each lane
stmatrix4 = instruction(
    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};", "r r r r r"
)
# the same, but each matrix is stored transposed
stmatrix4_turned = instruction(
    "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1, $2, $3, $4};", "r r r r r"
)


# address, arrivals that complete a phase
mbarrier_init = instruction("mbarrier.init.shared::cta.b64 [$0], $1;", "r r")
# what was initialised is there for the copy engine and for the other blocks of the cluster
mbarrier_init_fence = instruction("fence.mbarrier_init.release.cluster;")
# address: one arrival; all accesses before it come before what waits for the phase
mbarrier_arrive = instruction("mbarrier.arrive.shared::cta.b64 _, [$0];", "r")
# address, bytes: one arrival, and the phase waits for so many bytes from the copy engine as well
mbarrier_expect = instruction("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "r r")
# address, rank: an arrival at the barrier that stands at this offset in that block of the cluster.
# Without .release.cluster, which would flush earlier writes; a stage that was read needs none.
mbarrier_arrive_at = instruction(
    "{ .reg .b32 a; mapa.shared::cluster.u32 a, $0, $1;"
    " mbarrier.arrive.shared::cluster.b64 _, [a]; }",
    "r r",
)
# address, parity: returns when the phase of this parity is complete
mbarrier_wait = instruction(
    "{ .reg .pred p;\n WAIT:\n mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;\n"
    " @p bra DONE;\n bra WAIT;\n DONE:\n }",
    "r r",
)


# map: what the host wrote into the map is there; once in each thread, before its first use
map_acquire = instruction("fence.proxy.tensormap::generic.acquire.sys [$0], 128;", "l")
# shared, map, column, row, mbarrier: fetch the box that begins there; its bytes count on mbarrier
tma_load = instruction(
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    " [$0], [$1, {$2, $3}], [$4];",
    "r l r r r",
)
# ..., mask: the same into every block of the mask, to the same offset, each on its own mbarrier
tma_load_multicast = instruction(
    "{ .reg .b16 m; cvt.u16.u32 m, $5; cp.async.bulk.tensor.2d.shared::cluster.global.tile"
    ".mbarrier::complete_tx::bytes.multicast::cluster [$0], [$1, {$2, $3}], [$4], m; }",
    "r l r r r r",
)
# map, column, row, shared: write a box; belongs to the bulk group of this thread
tma_store = instruction(
    "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [$0, {$1, $2}], [$3];", "l r r r"
)
# the same, but add to what is there, element by element
tma_add = instruction(
    "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [$0, {$1, $2}], [$3];",
    "l r r r",
)
# the copies that this thread asked for since the last commit are a group
bulk_commit = instruction("cp.async.bulk.commit_group;")
# at most one group of this thread has still to read its shared memory
bulk_wait_read = instruction("cp.async.bulk.wait_group.read 1;")
# all groups of this thread are complete: what they wrote is in global memory
bulk_wait = instruction("cp.async.bulk.wait_group 0;")
# what this thread stored in shared memory is there for the copy engine and for wgmma
proxy_fence = instruction("fence.proxy.async.shared::cta;")


# all threads of the cluster: what was written before it is there after cluster_wait
cluster_arrive = instruction("barrier.cluster.arrive.release.aligned;")
# all threads of the cluster: return when all have arrived
cluster_wait = instruction("barrier.cluster.wait.acquire.aligned;")


def set_registers(count: int, more: bool) -> Instruction:
    """This warpgroup's registers become `count` a thread (a multiple of 8): more, or fewer."""
    return instruction(f"setmaxnreg.{'inc' if more else 'dec'}.sync.aligned.u32 {count};")


def descriptor(leading: int, stride: int) -> int:
    """The constant part of a matrix descriptor: 128-byte swizzle, these byte offsets.

    The address in shared memory, bits 4 to 17 of it, is added at bit 0. ibid., "Matrix descriptor".
    """
    return 1 << 62 | (stride >> 4) << 32 | (leading >> 4) << 16


def wgmma(n: int, steps: int, a_step: int, b_step: int, layout: str, rows: int = 1) -> Instruction:
    """acc, a, b, keep: acc (m, n) (+)= A (m, k) B (k, n), m = 64 * rows, k = 16 * steps: one group.

    acc: rows * n / 2 float32 registers of each of the 128 threads; it is theirs again after
    `wgmma_wait`. a, b: int64 descriptors; a_step, b_step are what a step of 16 along k adds to them
    (in units of 16 bytes). keep: 0 begins from zeros. layout: NT, NN or TN, where A is stored
    (m, k) for N and (k, m) for T, B (k, n) for N and (n, k) for T; the next 64 rows of A stand
    8192 bytes on.
    """
    size = n // 2
    lines = [
        "{ .reg .pred p, t; .reg .b64 a, b;",
        "setp.ne.b32 p, $3, 0; setp.eq.b32 t, 0, 0;",
        "wgmma.fence.sync.aligned;",
    ]
    transposed = f"{int(layout[0] == 'T')}, {int(layout[1] == 'N')}"
    for k in range(steps):
        lines.append(f"add.s64 b, $2, {k * b_step};")
        for row in range(rows):
            lines.append(f"add.s64 a, $1, {k * a_step + row * (8192 >> 4)};")
            lines.append(
                f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16"
                f" {{$0[{row * size}:{(row + 1) * size}]}}, a, b, {'t' if k else 'p'}, 1, 1,"
                f" {transposed};"
            )
    lines.append("wgmma.commit_group.sync.aligned; }")
    return instruction("\n".join(lines), f"+f*{rows * size} l l r")


def wgmma_wait(registers: int) -> Instruction:
    """acc: returns when all groups are complete; acc passes through, so that none is read early."""
    return instruction("wgmma.wait_group.sync.aligned 0;", f"+f*{registers}")


# at most one group is not complete: all before the last have read their operands
wgmma_wait_previous = instruction("wgmma.wait_group.sync.aligned 1;")


# %% sec-gemm-ptx-attention
# ---- The copy engine, for maps of [batch, heads, rows, columns].

# shared, map, column, row, head, batch, mbarrier: fetch the box there; its bytes count on mbarrier
load_tile = instruction(
    "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    " [$0], [$1, {$2, $3, $4, $5}], [$6];",
    "r l r r r r r",
)
# map, column, row, head, batch, shared: write a box; belongs to the bulk group of this thread
store_tile = instruction(
    "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [$0, {$1, $2, $3, $4}], [$5];",
    "l r r r r r",
)
# shared, global, bytes, mbarrier: fetch bytes that lie together; all three are multiples of 16
load_bytes = instruction(
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
    "r l r r",
)
# map: on its way into the copy engine's cache
prefetch_map = instruction("prefetch.tensormap [$0];", "l")
# all groups of this thread have read their shared memory
bulk_wait_read_all = instruction("cp.async.bulk.wait_group.read 0;")


# ---- The tensor cores, for attention. A tile is panels of 64 columns side by side, swizzled.


def _group(lines: list[str], operands: str, commit: bool) -> Instruction:
    """One text of fence, products and, if asked, the end of the group."""
    head = [
        "{ .reg .pred first, more; .reg .b64 a, b;",
        "setp.ne.b32 first, 0, 0; setp.eq.b32 more, 0, 0;",
        "wgmma.fence.sync.aligned;",
    ]
    tail = ["wgmma.commit_group.sync.aligned; }" if commit else "}"]
    return instruction("\n".join(head + lines + tail), operands)


def product_of_rows(n: int, depth: int) -> Instruction:
    """acc, a, b: acc (64 x n) = A B^T, one group, from descriptors of A 64 x depth, B n x depth."""
    lines = []
    for step in range(depth // 16):
        panel, column = step // 4, step % 4
        lines.append(f"add.s64 a, $1, {panel * 64 * 8 + column * 2};")
        lines.append(f"add.s64 b, $2, {panel * n * 8 + column * 2};")
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{$0}}, a, b,"
            f" {'more' if step else 'first'}, 1, 1, 0, 0;"
        )
    return _group(lines, f"=f*{n // 2} l l", commit=True)


def add_product(n: int, depth: int, commit: bool = True) -> Instruction:
    """acc, p, b: acc (64 x n) += P B from P 64 x depth in registers, a descriptor of B depth x n.

    p: depth / 4 registers, an accumulator of 64 x depth packed in pairs. Without commit the group
    goes on with the next product.
    """
    lines = []
    for step in range(depth // 16):
        lines.append(f"add.s64 b, $2, {step * 128};")
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{$0}},"
            f" {{$1[{4 * step}:{4 * step + 4}]}}, b, more, 1, 1, 1;"
        )
    return _group(lines, f"+f*{n // 2} r*{depth // 4} l", commit)


def product_done(n: int, later: int = 0) -> Instruction:
    """acc (64 x n): returns when all groups but the `later` last are complete; acc is there."""
    return instruction(f"wgmma.wait_group.sync.aligned {later};", f"+f*{n // 2}")
