# Made from book/q-token-on-a-gpu.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gputoken-window
"""Attention of new tokens over a cache of keys and values, in parts of the cache.

Row r of R is a token of text `lines[r]` at a position; it sees that text's positions up to its own.
q (R, H, D) float32, times log2(e) / sqrt(D); keys, values (texts, G, context, D). Block (c, g, r)
has the chunk of positions that is the c-th which the row sees and the H / G query heads of group g,
and writes a sum of values, not divided, the largest score and the sum of the weights; `gemv`'s
front puts the parts together.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from nanoeuler.engines.gpu.decode import gemv
from nanoeuler.engines.gpu.lang import ptx
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel, cover
from nanoeuler.engines.gpu.lang.vectors import LANES, SIZES, warp_sum
from nanoeuler.engines.gpu.rows.block_reduce import warp_max
from nanoeuler.engines.gpu.rows.rope import Gains, Tables
from nanoeuler.errors import UserError


def make_unpack(kind: str) -> Callable:
    """unpack(values, words, i): the numbers in four words, words[4 * i : 4 * i + 4]."""

    def unpack_bf16(values, words, i):
        for k in range(4):
            values[2 * k] = ptx.low_bf16(words[4 * i + k])
            values[2 * k + 1] = ptx.high_bf16(words[4 * i + k])

    def unpack_floats(values, words, i):
        for k in range(4):
            values[k] = words[4 * i + k]

    return unpack_bf16 if kind == "bf16" else unpack_floats


def make_sees(heads: gemv.Heads) -> Callable:
    """sees(key, low, count): whether a row sees a key of its chunk, from key `low` to `count`."""

    def sees_window(key, low, count):
        return key >= low and key < count

    def sees_text(key, low, count):
        return key < count

    return sees_window if 0 < heads.window < heads.context else sees_text


def make_scores(kind: str, heads: gemv.Heads, warps: int) -> Callable:
    """score(q, held, scores, low, count, warp, lane): of a block's keys, to shared memory."""
    D, chunk, share, width = heads.D, heads.chunk, heads.H // heads.G, 16 // SIZES[kind]
    lanes, unpack = D // width, make_unpack(kind)
    abreast, sees = LANES // lanes, make_sees(heads)
    rounds = chunk // (abreast * warps)

    def score(q, held, scores, low, count, warp, lane):
        numbers = cuda.local.array(width, float32)
        for i in range(rounds):
            key = (i * warps + warp) * abreast + ptx.divide(lane, lanes)
            unpack(numbers, held, i)
            for h in range(share):
                value = float32(0)
                for d in range(width):
                    value += q[h * width + d] * numbers[d]
                for step in range(5):
                    if (1 << step) < lanes:
                        value += ptx.shuffle_xor(value, 1 << step)
                if lane & (lanes - 1) == 0:
                    seen = sees(key, low, count)
                    scores[h * chunk + key] = value if seen else float32(gemv.LOWEST)

    return score


def make_weigh(kind: str, heads: gemv.Heads, warps: int) -> Callable:
    """weigh(held, scores, sums, warp, lane): each warp's sum of values, to shared memory."""
    D, chunk, share, width = heads.D, heads.chunk, heads.H // heads.G, 16 // SIZES[kind]
    lanes, unpack = D // width, make_unpack(kind)
    abreast, many = LANES // lanes, share * width
    rounds = chunk // (abreast * warps)

    def weigh(held, scores, sums, warp, lane):
        numbers, acc = cuda.local.array(width, float32), cuda.local.array(many, float32)
        for k in range(many):
            acc[k] = float32(0)
        for i in range(rounds):
            key = (i * warps + warp) * abreast + ptx.divide(lane, lanes)
            unpack(numbers, held, i)
            for h in range(share):
                weight = scores[h * chunk + key]
                for d in range(width):
                    acc[h * width + d] += weight * numbers[d]
        for h in range(share):
            for d in range(width):
                value = acc[h * width + d]
                for step in range(5):
                    if (1 << step) >= lanes:
                        value += ptx.shuffle_xor(value, 1 << step)
                if lane < lanes:
                    sums[(warp * share + h) * D + lane * width + d] = value

    return weigh


def make_collect(kind: str, heads: gemv.Heads, warps: int) -> Callable:
    """collect(held, array, at, low, count, warp, lane): the block's keys or values that the row
    sees, zeros for the others.
    """
    size, width = SIZES[kind], 16 // SIZES[kind]
    lanes, row = heads.D // width, heads.D * size
    abreast, sees = LANES // lanes, make_sees(heads)
    rounds, bf16 = heads.chunk // (abreast * warps), kind == "bf16"
    load, zero = (ptx.load_own_int4, int32) if bf16 else (ptx.load_own_float4, float32)

    def collect(held, array, at, low, count, warp, lane):
        for i in range(rounds):
            key = (i * warps + warp) * abreast + ptx.divide(lane, lanes)
            a, b, c, d = zero(0), zero(0), zero(0), zero(0)
            if sees(key, low, count):
                a, b, c, d = load(array + at + key * row + (lane & (lanes - 1)) * 16)
            held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3] = a, b, c, d

    return collect


def make_soften(heads: gemv.Heads, warps: int) -> Callable:
    """soften(scores, tops, weights, at, warp, lane): scores to weights, a head to a warp.

    Leaves largest score and sum of weights at `at`, the heads' `parts` apart.
    """
    chunk, share, parts = heads.chunk, heads.H // heads.G, gemv.part_count(heads)

    def soften(scores, tops, weights, at, warp, lane):
        for h in range(warp, share, warps):
            best, total = float32(gemv.LOWEST), float32(0)
            for j in range(lane, chunk, LANES):
                best = ptx.larger(best, scores[h * chunk + j])
            best = warp_max(best)
            for j in range(lane, chunk, LANES):
                weight = ptx.exp2(scores[h * chunk + j] - best)
                scores[h * chunk + j] = weight
                total += weight
            total = warp_sum(total)
            if lane == 0:
                ptx.store_float(tops + (at + h * parts) * 4, best)
                ptx.store_float(weights + (at + h * parts) * 4, total)

    return soften


def lanes_of(kind: str, heads: gemv.Heads, warps: int) -> int:
    """How many lanes have a key together; UserError where that is no share of a warp's."""
    width, D = 16 // SIZES[kind], heads.D
    lanes = max(1, D // width)
    if D % width or LANES % lanes or heads.chunk % (LANES // lanes * warps):
        raise UserError(
            f"decoding on a GPU has heads of {width} channels times 1, 2, 4, 8, 16 or 32, not {D}: "
            "choose the engine cpu")
    return lanes


def make_part(heads: gemv.Heads) -> Callable:
    """part(position, c) -> where a row's c-th chunk begins; the first key that the row sees and the
    end of those it sees, both from there on."""
    begin, chunk, log = gemv.make_begin(heads), heads.chunk, heads.chunk.bit_length() - 1

    def part(position, c):
        start = int32((c + (begin(position) >> log)) << log)
        return start, int32(begin(position) - start), min(position + 1 - start, chunk)

    return part


def make_fetch_queries(kind: str, heads: gemv.Heads) -> Callable:
    """fetch(qs, q, head, lane): a lane's channels of the query heads from `head` on."""
    D, width = heads.D, 16 // SIZES[kind]
    lanes, many = max(1, D // width), heads.H // heads.G * width

    def fetch(qs, q, head, lane):
        for i in range(0, many, 4):
            d = int32(ptx.divide(i, width) * D + (lane & (lanes - 1)) * width + i % width)
            qs[i], qs[i + 1], qs[i + 2], qs[i + 3] = ptx.load_own_float4(
                q + (int64(head) * D + d) * 4)

    return fetch


def make_leave_sums(heads: gemv.Heads, warps: int) -> Callable:
    """leave(sums, out, head, c, t): the warps' sums, added in order, to part c of the heads."""
    D, share, parts, threads = heads.D, heads.H // heads.G, gemv.part_count(heads), LANES * warps

    def leave(sums, out, head, c, t):
        for i in range(t, share * D, threads):
            h, total = ptx.divide(i, D), float32(0)
            for w in range(warps):
                total += sums[w * share * D + i]
            to = ((int64(head + h) * parts + c) * D + (i - h * D)) * 4
            ptx.store_float(out + to, total)

    return leave


@cache
def newest_kernel(kind: str, heads: gemv.Heads, warps: int = 4, early: bool = False) -> Kernel:
    """newest(q, keys, values, lines, out, tops, weights); D / width lanes have a key together."""
    H, G, D, context, chunk = heads.H, heads.G, heads.D, heads.context, heads.chunk
    size, width, share, parts = SIZES[kind], 16 // SIZES[kind], H // G, gemv.part_count(heads)
    abreast = LANES // lanes_of(kind, heads, warps)
    rounds, many, threads = chunk // (abreast * warps), share * width, LANES * warps
    number, words = int32 if kind == "bf16" else float32, 4 * rounds
    scored, summed = share * chunk, warps * share * D
    collect, score = make_collect(kind, heads, warps), make_scores(kind, heads, warps)
    soften, weigh = make_soften(heads, warps), make_weigh(kind, heads, warps)
    fetch, leave = make_fetch_queries(kind, heads), make_leave_sums(heads, warps)
    part = make_part(heads)
    first, ready, target = gemv.starts(early)

    def newest(q, keys, values, lines, out, tops, weights):
        first()
        t, c, g = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x), int32(cuda.blockIdx.y)
        r, warp, lane = int32(cuda.blockIdx.z), t >> 5, t & 31
        scores, sums = cuda.shared.array(scored, float32), cuda.shared.array(summed, float32)
        k, v = cuda.local.array(words, number), cuda.local.array(words, number)
        qs = cuda.local.array(many, float32)
        ready()
        _, position, text, _ = ptx.load_own_int4(lines + int64(r) * gemv.LINE)
        start, low, count = part(position, c)
        head = r * H + g * share
        if count > 0:
            at = ((int64(text) * G + g) * context + start) * (D * size)
            fetch(qs, q, head, lane)
            collect(k, keys, at, low, count, warp, lane)
            collect(v, values, at, low, count, warp, lane)
            score(qs, k, scores, low, count, warp, lane)
            cuda.syncthreads()  # all scores are there
            soften(scores, tops, weights, int64(head) * parts + c, warp, lane)
            cuda.syncthreads()  # and are weights
            weigh(v, scores, sums, warp, lane)
            cuda.syncthreads()  # the warps' sums are there
            leave(sums, out, head, c, t)

    return Kernel(newest, "l l l l l l l", threads, 0, 1, 2, target, early=early)


# %% sec-gputoken-head-norm
NORM_WARPS = 4  # of a block: a head each


class Row(NamedTuple):
    """A new row: its number, its position and its text."""

    r: int
    position: int
    text: int


class Normed(NamedTuple):
    """Where normed heads go: queries, times scale, and the cache of keys."""

    q: int
    keys: int
    scale: float


def make_read_head(heads: gemv.Heads) -> Callable:
    """read(a, b, raw, head, lane) -> sum of squares: a lane's channels i and i + D / 2 of a head,
    zeros behind the last."""
    D, half, rounds = heads.D, heads.D // 2, cover(heads.D // 2, LANES)

    def read(a, b, raw, head, lane):
        total = float32(0)
        for j in range(rounds):
            a[j], b[j] = float32(0), float32(0)
            if j * LANES + lane < half:
                at = raw + (head * D + j * LANES + lane) * 4
                a[j], b[j] = ptx.load_own_float(at), ptx.load_own_float(at + half * 4)
            total += a[j] * a[j] + b[j] * b[j]
        return total

    return read


def make_leave_head(kind: str, heads: gemv.Heads) -> Callable:
    """leave(left, right, i, head, row, to): channels i and i + D / 2 of a normed head of a `Row`,
    to their place in `Normed`."""
    H, G, D, context, half = heads.H, heads.G, heads.D, heads.context, heads.D // 2
    put = gemv.make_put(kind)

    def leave(left, right, i, head, row, to):
        if head < H:
            at = to.q + ((int64(row.r) * H + head) * D + i) * 4
            ptx.store_float(at, left * to.scale)
            ptx.store_float(at + half * 4, right * to.scale)
        elif row.position >= 0:
            at = ((int64(row.text) * G + head - H) * context + row.position) * D + i
            put(to.keys, at, left)
            put(to.keys, at + half, right)

    return leave


@cache
def heads_norm_kernel(kind: str, heads: gemv.Heads, eps: float, early: bool = False) -> Kernel:
    """norm(raw, gains, tables, lines, to): QK-norm, then RoPE, of new rows.

    raw (R, H + G, D) float32; queries go to q (R, H, D), times scale, keys to their cache.
    """
    H, G, D, turned, half = heads.H, heads.G, heads.D, heads.turned, heads.D // 2
    rounds, share = cover(half, LANES), 1 / D
    read, leave = make_read_head(heads), make_leave_head(kind, heads)
    first, ready, target = gemv.starts(early)

    def norm(raw, gains: Gains, tables: Tables, lines, to: Normed):
        first()
        t, r = int32(cuda.threadIdx.x), int32(cuda.blockIdx.y)
        head, lane = int32(cuda.blockIdx.x * NORM_WARPS + (t >> 5)), t & 31
        a, b = cuda.local.array(rounds, float32), cuda.local.array(rounds, float32)
        ready()
        _, position, text, _ = ptx.load_own_int4(lines + int64(r) * gemv.LINE)
        if head < H + G:
            total = read(a, b, raw, int64(r) * (H + G) + head, lane)
            root = ptx.inverse_root(warp_sum(total) * float32(share) + float32(eps))
            for j in range(rounds):
                i = int32(j * LANES + lane)
                if i < half:
                    gain = (gains.q if head < H else gains.k) + int64(i) * 4
                    left = a[j] * root * ptx.load_float(gain)
                    right = b[j] * root * ptx.load_float(gain + half * 4)
                    if turned:
                        angle = (int64(max(position, 0)) * half + i) * 4
                        c = ptx.load_float(tables.cos + angle)
                        s = ptx.load_float(tables.sin + angle)
                        left, right = left * c - right * s, left * s + right * c
                    leave(left, right, i, head, Row(r, position, text), to)

    args = "l l l l l l l l f"
    return Kernel(norm, args, LANES * NORM_WARPS, 0, 1, 2, target, early=early)
