"""Attempts at a faster forward pass of attention of head width 64, beside the kernel that is.

None of them is part of the package. What each should gain was written down before anything was
measured. The kernel of chapter 8b takes at B16 H12 T1024, in ticks of a multiprocessor and to good
approximation, 0.122 a pair, 1,900 a block and 13,800 once: that fits T = 512, 1024 and 4096. Here
they are 99,000, 22,000 and 14,000. At its limit of power the card also lowers its clock, so that
the time alone falls by about two thirds of what the ticks fall by; in turn, by all of it.

    early          the first copies come before any division, and before the barrier; the others
                   after the first product: 200 ticks of a block, 1,500 of the start: 3 %
    few heads      8 MiB of keys and values at a time instead of 32, so that L2 keeps them: 1 %
    pairs          a block takes the n-th tile of queries from the end, and from the start. All
                   blocks are equal; half of the beginnings and ends are beside products, but the
                   last wave is full only to 97 %: 4 %. A step has 433 instructions instead of
                   484, with one ticket for keys and values and indices of 32 bits: 2 % more
    chains         a block takes pair after pair, and there are no more blocks than run at once:
                   five of six beginnings and ends are beside products: 9 % with the same loop
    chains, lazy   o is corrected only where a maximum grew by 2^8, on which a warp votes: 392
                   instructions, and no exchange between lanes in the way: 12 %

Exponentials by polynomials on the units for multiplications, as in FlashAttention-4, were counted
and left: 8 instructions for one, in a loop that has as many instructions to issue (433 / 64 / 128
= 0.053 ticks a pair) as exponentials to take (0.0625), and no power to spare.
"""

from functools import partial

from bench.card import Contest, ghost
from bench.card import flash as known
from flash_attempts import chain_kernel, early_kernel, reciprocal_of

from nanoeuler.engines.gpu import flash_plan
from nanoeuler.engines.gpu.flash_forward import NARROW
from nanoeuler.engines.gpu.flash_layout import at_a_time
from nanoeuler.engines.gpu.gemm_plan import MULTIPROCESSORS, cover
from nanoeuler.engines.gpu.kernel import Launch

FEW = 8 << 20  # bytes of keys and values at a time
RESIDENT = 2  # blocks of a multiprocessor
TIMED = [known.TIMED[0], known.TIMED[1], known.TIMED[2]]
ODD = [case for case in known.ODD if case.D == 64]


def kernels():
    """Name -> maker of each kernel."""
    return {
        "as it is": known.narrow,
        "early": early_kernel, "chains": partial(chain_kernel, False),
        "chains, lazy": partial(chain_kernel, True),
    }  # fmt: skip


def parts(arrays):
    """The planned launch's grid; its maps and lse; T, heads, sharing, scale."""
    plan = flash_plan.forward_launch(*arrays)
    return plan.grid, plan.args[:5], plan.args[5:]


def early(*arrays):
    """q, k, v, o, lse -> a launch, here and below."""
    grid, maps, (T, heads, sharing, scale) = parts(arrays)
    by = reciprocal_of(heads), reciprocal_of(sharing)
    return Launch(early_kernel(), grid, (*maps, T, heads, scale, *by))


def few_heads(*arrays):
    """The kernel that is, in another order of blocks."""
    (x, y, z), maps, rest = parts(arrays)
    together = at_a_time(x * z, 4 * rest[0] * 64, FEW)
    return Launch(NARROW, (together, y, x * z // together), (*maps, *rest))


def chains(*arrays, lazy=False, most=RESIDENT * MULTIPROCESSORS):
    """Chains of pairs, at most so many of them, and equally long ones if that is possible."""
    (x, tiles, z), maps, (T, heads, sharing, scale) = parts(arrays)
    of_head = cover(tiles, 2)
    pairs = x * z * of_head
    blocks = cover(pairs, cover(pairs, most))
    by = reciprocal_of(of_head), reciprocal_of(heads), reciprocal_of(sharing)
    return Launch(chain_kernel(lazy), (blocks,), (*maps, T, heads, tiles, pairs, scale, *by))


WAYS = {
    "early": early, "few heads": few_heads, "pairs": partial(chains, most=1 << 30),
    "chains": chains, "chains, lazy": partial(chains, lazy=True),
}  # fmt: skip
NAMES = "q", "k", "v", "o", "lse"


def plans():
    """Name -> launches of every check, without arrays."""
    made = {}
    for case in ODD + TIMED:
        arrays = [ghost(known.shapes(case)[name], known.kind(name)) for name in NAMES]
        made |= {f"{way} {case}": [launch(*arrays)] for way, launch in WAYS.items()}
    return made


def call_of(bench, problem, launch):
    """A function that puts a forward pass on torch's stream."""
    return bench.call(launch(*(bench.view(problem.tensors[name]) for name in NAMES)))


def check(bench, case, way, packed=False):
    """Errors of o, ours and FlashAttention-2's."""
    problem = known.Problem(bench, case, packed=packed)
    outputs = {name: problem.tensors[name] for name in ("o", "lse")}
    o, lse = bench.repeat(call_of(bench, problem, WAYS[way]), outputs).values()
    o_want, lse_want, _ = known.exact(problem)
    off = (lse[-1:, :, : case.T].double() - lse_want).abs().max().item()
    if not off < known.LSE:
        raise ValueError(f"lse is off by {off:.1e}")
    peer = problem.peer(known.PEERS[0])[0]()[0]
    ours, theirs = (bench.error(x[-1:], o_want) for x in (o, peer))
    return {"error": ours, "peer": theirs, "least": known.LEAST}


def checks(bench):
    """Name -> check of each way on each shape, on one in the model's layout."""
    made = {
        f"{way}: {case}": partial(check, bench, case, way) for case in ODD + TIMED for way in WAYS
    }
    case = TIMED[1]
    return made | {f"{way}: {case}, packed": partial(check, bench, case, way, True) for way in WAYS}


def entrants(bench, case):
    """Name -> calls, one for each set of operands: the kernel that is, every way, the peers."""
    size = 2 * 8 * case.B * case.H * case.T * case.D
    count = max(1, min(3, known.SETS // size))
    problems = [known.Problem(bench, case, seed) for seed in range(count)]
    made = {
        who: [call_of(bench, problem, launch) for problem in problems]
        for who, launch in ({"ours": flash_plan.forward_launch} | WAYS).items()
    }
    return made | known.peers(problems, False)


def contests(bench):
    """What is timed."""
    return [
        Contest(
            "attention forward, attempts", str(case), partial(entrants, bench, case),
            peer=known.PEERS,
        )
        for case in TIMED
    ]  # fmt: skip
