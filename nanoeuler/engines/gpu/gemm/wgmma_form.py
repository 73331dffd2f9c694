# Made from book/11b-tensor-cores.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gemm-form
"""The form of a product's kernel, what is settled when it is compiled, and the ring of its blocks.

C (m, n) = op(A) op(B), where the layout names how A and B are stored:

    NN   forward  Y = X W      A (m, k)   B (k, n)
    NT   dX = dY W^T           A (m, k)   B (n, k)
    TN   dW = X^T dY           A (k, m)   B (k, n)

for weights W (inputs, outputs); a product with weights the other way round is NT, and dX NN.
"""

from dataclasses import dataclass
from typing import Any

from nanoeuler.engines.gpu.gemm.epilogue import EPILOGUES, Way
from nanoeuler.engines.gpu.gemm.wgmma_schedule import TILE_K
from nanoeuler.engines.gpu.lang import hopper
from nanoeuler.engines.gpu.tile.ring import ALIGN
from nanoeuler.errors import UserError

TILE_M = 128      # rows of C in a block's tile: two warpgroups of 64, the m of wgmma
BOX = 8192        # bytes: 64 rows of 128, a box of the copy engine
RING = 196608     # bytes of the ring: 192 of the 227 KiB that a block can have
SLOTS = 4         # boxes on their way out, two of each consumer
SHARED = ALIGN + RING + SLOTS * BOX + 256  # the last for the mbarriers
THREADS = 384     # a producer's warpgroup and two consumers'
REGISTERS = 128   # accumulators of a consumer's thread: 64 x 256 or 128 x 128 over 128 threads
PIECE = TILE_M * 256 * 4  # bytes: a block's tile in float32
LINES = 8         # sums of columns that a block's tile leaves, each of a warp's 16 rows
STRIPS = 4        # of a consumer's sums in bf16: 64 x 64 each, a box
# A thread's registers while it produces and while it consumes: 168 on average, as many as fit.
FEW, MANY = 40, 232


def verify(form: "Form") -> None:
    """UserError where there is no such form."""
    if form.layout not in ("NT", "NN", "TN") or form.cluster not in (1, 2):
        raise UserError(f"layouts are NT, NN, TN and clusters 1 or 2, not {form}")
    if form.epilogue not in EPILOGUES:
        raise UserError(f"epilogues are {', '.join(EPILOGUES)}, not {form.epilogue!r}")
    way, which = EPILOGUES[form.epilogue], f"{form.epilogue!r}"
    if form.out not in way.outs:
        raise UserError(f"{which} goes to {' or '.join(way.outs)}, not to {form.out}")
    if form.second and not way.second:
        raise UserError(f"{which} has no second array to store")
    if form.sums not in ("no", "store", "add") or form.pieces not in ("no", "together", "after"):
        raise UserError(f"sums are no, store or add, pieces no, together or after, not {form}")
    if form.sums != "no" and (not way.sums or form.out == "float32"):
        raise UserError(f"columns of {which} to {form.out} are not summed")
    if form.pieces != "no" and (not way.cut or form.pingpong or form.sums != "no"):
        raise UserError(f"pieces come with store and add alone, and not with ping-pong: {form}")
    if form.pingpong and form.out == "float32" or way.pingpong not in (None, form.pingpong):
        raise UserError(f"float32 is not ping-pong, swiglu backward is: {form}")
    if way.aux == "tiles" and not form.second:
        raise UserError(f"{which} stores two arrays: {form}")
    if form.narrow and (form.pingpong or form.pieces != "no" or not way.narrow):
        raise UserError(f"{which} in tiles of 192 columns: cooperative, whole, no heads or tiles")


@dataclass(frozen=True)
class Form:
    """What is settled when a kernel is compiled.

    layout: NT, NN or TN. pingpong: two tiles of 128 x 128 in turn, not one of 128 x 256 (or,
    narrow, 128 x 192). cluster: 1 or 2 blocks that share B.
    epilogue, of the sums S: store S; add S to C; bias: S + bias (n,); bias and gelu: GELU(S +
    bias), tanh; gelu backward: S GELU'(U), U (m, n); with gelu_exact the same of the exact form,
    with relu2 of ReLU squared;
    residual: S + R, R (m, n); swiglu: silu(gate) up, S = (gate, up); swiglu backward:
    silu(gate) up again, of U = (gate, up), and as second S times its slopes by gate and by up;
    rope 64 or 128: S, its first heads of that width turned.
    out: bf16 or float32 of C. second: store U = S + bias beside its GELU, GELU(U) beside
    S GELU'(U), or (gate, up). sums: store C's column sums, or add them. pieces: items may be parts
    of a tile along k, summed in order, by the same kernel ("together") or another ("after"); "no":
    whole.
    What goes with what: EPILOGUES.
    """

    layout: str = "NT"
    pingpong: bool = False
    cluster: int = 1
    epilogue: str = "store"
    out: str = "bf16"
    pieces: str = "no"
    second: bool = False
    sums: str = "no"
    narrow: bool = False

    def __post_init__(self) -> None:
        verify(self)

    @property
    def way(self) -> Way:
        """What the epilogue allows and reads."""
        return EPILOGUES[self.epilogue]

    @property
    def columns(self) -> int:
        """Columns of a block's tile of sums."""
        return 128 if self.pingpong else 192 if self.narrow else 256

    @property
    def registers(self) -> int:
        """Accumulators of a consumer's thread: 64 rows of those columns, or 128 in ping-pong."""
        return 96 if self.narrow else REGISTERS

    @property
    def halved(self) -> bool:
        """Whether the blocks of a cluster share B by halves of a k-block, and not by columns: 96
        columns each would not be whole boxes of 64."""
        return self.narrow and self.cluster == 2 and self.layout[1] == "N"

    @property
    def of_c(self) -> int:
        """Columns of C that a block's tile becomes: gate and up become one."""
        return self.columns // 2 if self.epilogue == "swiglu" else self.columns

    @property
    def stage(self) -> int:
        """Bytes of a stage of the ring: a k-block of A and one of B."""
        return (TILE_M + self.columns) * TILE_K * 2

    @property
    def beside(self) -> int:
        """Boxes of a bay: a ping-pong strip's buffer for the same strip of other arrays."""
        return {"tile": 1, "tiles": 2}.get(self.way.aux, 0) if self.pingpong else 0

    @property
    def ringed(self) -> bool:
        """Whether a tile of another array comes through the ring."""
        return self.way.aux == "tile" and not self.pingpong

    @property
    def bays(self) -> int:
        """Bytes from the ring's beginning to the bays, of which each of four strips has one."""
        return RING - STRIPS * self.beside * BOX

    @property
    def stages(self) -> int:
        """Stages of the ring, which end where the bays begin."""
        return self.bays // self.stage

    @property
    def boxes(self) -> tuple[int, int]:
        """Where the boxes on their way out begin, from the ring's beginning, and a consumer's
        number of them: three where a tile has 3 or 6 strips, so each begins with the first box.
        """
        return (self.stages * self.stage, 3) if self.narrow else (RING, SLOTS // 2)

    @property
    def strip(self) -> int:
        """Registers of a consumer's thread that go out at a time: 64 rows of 128 bytes of C."""
        return 16 if self.out == "float32" else 32


# %% sec-gemm-form
def prepare(bars, stages, arrivals):
    """One thread makes the mbarriers: full ones, empty ones, two for the turns of ping-pong, then
    those of bays: full ones of consumer 0, of consumer 1, empty ones."""
    for s in range(stages):
        hopper.mbarrier_init(bars + 8 * s, 1)
        hopper.mbarrier_init(bars + 8 * (stages + s), arrivals)
    for i in range(2 + 3 * STRIPS):
        hopper.mbarrier_init(bars + 16 * stages + 8 * i, 1)
    hopper.mbarrier_init_fence()


def bays_bars(form: Form) -> int:
    """Bytes from the first mbarrier to those of bays."""
    return 16 * form.stages + 16


def make_release(form: Form) -> Any:
    """release(empty, t): a consumer gives a stage back, to every block that writes into it."""
    cluster = form.cluster

    def release(empty, t):
        if cluster > 1:
            if t < cluster:
                hopper.mbarrier_arrive_at(empty, t)
        elif t == 0:
            hopper.mbarrier_arrive(empty)

    return release
