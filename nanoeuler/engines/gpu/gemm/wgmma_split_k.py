# Made from book/11b-tensor-cores.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gemm-put-pieces
"""Pieces of a tile that was cut along k: put away in float32, and summed in the order of k."""

from typing import Any

from nanoeuler.engines.gpu.gemm.wgmma_epilogue import Corner, make_strip_of_c
from nanoeuler.engines.gpu.gemm.wgmma_form import BOX, PIECE, REGISTERS, TILE_M, Form
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.ptx import load_float4_if_below, load_int4, store_float4


def put_piece(acc, address, t):
    """A consumer's 128 registers: four of them are 16 bytes of each thread, side by side."""
    for j in range(REGISTERS // 4):
        i = 4 * j
        store_float4(address + int64(j * 2048 + t * 16), acc[i], acc[i + 1], acc[i + 2], acc[i + 3])


def make_gather(form: Form) -> Any:
    """gather(total, address, step, count): total = the sum of pieces of a strip, in their order.

    `count` pieces, `step` bytes apart; 64 registers' worth is on its way at a time.
    """
    registers = form.strip
    together = 64 // registers

    def gather(total, address, step, count):
        batch = cuda.local.array(64, float32)
        for i in range(registers):
            total[i] = float32(0)
        for first in range(0, count, together):
            for u in range(together):
                for j in range(registers // 4):
                    at = address + int64(first + u) * step + j * 2048
                    i = u * registers + j * 4
                    a, b, c, d = load_float4_if_below(at, first + u, count)
                    batch[i], batch[i + 1], batch[i + 2], batch[i + 3] = a, b, c, d
            for i in range(64):
                total[i % registers] += batch[i]

    return gather


def make_sums(form: Form) -> Any:
    """sums(of, head, me): a warpgroup walks its list of strips, sums the pieces of each, puts it in
    C. head: the row of the work list that says where its list is."""
    cluster, columns, registers = form.cluster, form.columns, form.strip
    gather, strip = make_gather(form), make_strip_of_c(form)

    def sums(of, head, me):
        total = cuda.local.array(registers, float32)
        item, end, _, _ = load_int4(of.work + int64(head) * 16)
        side = int32(0)
        while item < end:
            x, y, where, slots = load_int4(of.work + int64(item) * 16)
            rank, half, q = int32(where >> 8), int32((where >> 4) & 1), int32(where & 15)
            block = int32((slots & 0xFFFF) * cluster + rank)
            inside = int32(half * (PIECE // 2) + q * (registers * 512) + me.t * 16)
            at = of.space + int64(block) * PIECE + int64(inside)
            gather(total, at, int64(cluster * PIECE), int32(slots >> 16))
            row = int32((x * cluster + rank) * TILE_M + half * 64)
            column = int32(y * columns + q * registers * 2)
            strip(total, 0, int32(me.boxes + side * BOX), Corner(of.c, column, row), me)
            side = int32(side ^ 1)
            item = int32(item + 1)

    return sums
