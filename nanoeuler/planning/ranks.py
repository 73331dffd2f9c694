# Made from book/14-many-ranks.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-ranks-overlap
"""What many GPUs would take: bytes between them, memory of each, and time that nothing hides.

Leaves out everything but data parallelism with a sharded optimizer, and jitter: all ranks are
taken to be equally fast. N elements of a flat buffer, R ranks.
"""

from math import log2, prod
from typing import NamedTuple

from nanoeuler.model.config import ModelConfig, parameter_shapes
from nanoeuler.model.weights import flat_size
from nanoeuler.planning.counts import flops_per_token, memory
from nanoeuler.planning.plan import DEVICES, UTILISATION

# Bytes of a parameter: on every rank its copy in bf16, which is multiplied, and its gradient; on
# the rank that updates it, its float32 master and two moments. Embedding tables are on every rank
# in float32 as well, since look-ups read that.
COPY, GRADIENT, OWNED, TABLE = 2, 4, 12, 4
GPUS = 8  # of one machine, as NVIDIA's larger HGX boards have them
BACKWARD = 2 / 3  # of a step's products: two for each of the forward pass


class Link(NamedTuple):
    """What a GPU sends, and receives at the same time."""

    name: str
    bytes_per_s: float
    latency_s: float  # of one message


# Within a machine: NVLink 4 has 450 GB/s each way (H200 datasheet: 900 for both). NCCL's all-reduce
# between two H200s took 14 us for 1 MiB and 0.895 ms for 256: 12 us a call and 300 GB/s say both,
# to 15 %. Each message is taken to wait as long as such a call: R - 1 times in a half, too long
# rather than too short.
NVLINK = Link("NVLink", 300e9, 12e-6)
# One adapter of 400 Gbit/s a GPU, taken to carry the same share of its rate.
NETWORK = Link("400 Gbit/s", 2 / 3 * 50e9, 20e-6)


def link(ranks: int) -> Link:
    """The slowest link that a ring of so many ranks passes over."""
    return NVLINK if ranks <= GPUS else NETWORK


def half_seconds(size: float, ranks: int) -> float:
    """Of a reduce-scatter, or an all-gather, of `size` bytes. Equation eq-ranks-ring.

    Between machines, as many messages are taken to wait for each other as the logarithm (base 2) of
    the number of machines, as in the trees that libraries use there.
    """
    waits = (min(ranks, GPUS) - 1) * NVLINK.latency_s
    waits += log2(max(1, ranks / GPUS)) * NETWORK.latency_s
    return (ranks - 1) / ranks * size / link(ranks).bytes_per_s + waits


def buckets(config: ModelConfig) -> list[tuple[str, int, int]]:
    """What the backward pass completes, in its order: (name, elements, matrix elements used)."""
    found: dict[str, list[int]] = {}
    for name, shape in parameter_shapes(config).items():
        first = name.split(".")[0]
        bucket = {"block": ".".join(name.split(".")[:2]), "embedding": "embedding",
                  "positions": "embedding"}.get(first, "head")  # fmt: skip
        size = prod(shape)
        both = found.setdefault(bucket, [0, 0])
        both[0] += size
        both[1] += size if len(shape) == 2 and bucket != "embedding" else 0
    if config.tied:  # the head's product is there, its gradient waits for the embedding
        found["head"][1] += config.dim * config.vocab_size
    return [(name, *both) for name, both in reversed(found.items())]


class Sent(NamedTuple):
    """A bucket's gradients on the way: seconds since the step began."""

    name: str
    ready: float
    begins: float
    ends: float


def timeline(
    config: ModelConfig, sequences: int, ranks: int, step: float | None = None
) -> tuple[list[Sent], float]:
    """When each bucket is reduced, and the seconds of a step alone; of `sequences` a GPU.

    step: these seconds, if they are known.
    """
    flops = sequences * config.context * flops_per_token(config)
    step = step or flops / DEVICES["h200"].flops_per_s / UTILISATION
    parts = buckets(config)
    whole, now, free, sent = sum(used for *_, used in parts), step * (1 - BACKWARD), 0.0, []
    for name, elements, used in parts:
        now += step * BACKWARD * used / whole
        begins = max(now, free)
        free = begins + half_seconds(GRADIENT * elements, ranks)
        sent.append(Sent(name, now, begins, free))
    return sent, step


class Estimate(NamedTuple):
    """A step of so many ranks, predicted; seconds and bytes of each."""

    products_s: float
    exposed_s: float     # in which the card idles: after the pass, and while weights are gathered
    sent_bytes: float
    state_bytes: float   # copies, gradients, tables whole; masters, moments in part

    @property
    def efficiency(self) -> float:
        """A GPU's tokens a second, as a share of those that it makes alone."""
        return self.products_s / (self.products_s + self.exposed_s)


def estimate(
    config: ModelConfig, sequences: int, ranks: int, step: float | None = None
) -> Estimate:
    """Predict a step of `ranks` H200 with so many sequences each: see Estimate and `timeline`."""
    (*_, last), products = timeline(config, sequences, ranks, step)
    n, tables = flat_size(config), TABLE * buckets(config)[-1][1] if ranks > 1 else 0
    gathered = COPY * n + tables
    exposed = last.ends - products + half_seconds(gathered, ranks) if ranks > 1 else 0.0
    sent = (ranks - 1) / ranks * (GRADIENT * n + gathered)
    state = (COPY + GRADIENT) * n + OWNED * n / ranks + tables
    return Estimate(products, exposed, sent, state)


def report(config: ModelConfig, batch_size: int, ranks: int) -> str:
    """The plan of a batch shared out among so many H200, as text."""
    each = -(-batch_size // ranks)
    found, alone = estimate(config, each, ranks), estimate(config, each, 1)
    kept = memory(config, each, 2)["activations"]
    return "\n".join([
        f"{ranks} ranks, an H200 each, with {each} of the {batch_size} sequences, over "
        f"{link(ranks).name}",
        f"memory  {(found.state_bytes + kept) / 1e9:.2f} GB each: {found.state_bytes / 1e9:.2f} "
        f"weights, gradients and moments (alone {alone.state_bytes / 1e9:.2f}), "
        f"{kept / 1e9:.2f} activations",
        f"sent    {found.sent_bytes / 1e9:.2f} GB by each in a step",
        f"time    {1e3 * found.products_s:.1f} ms of products, {1e3 * found.exposed_s:.2f} ms that "
        f"nothing hides: {found.efficiency:.0%} of a GPU alone",
    ])  # fmt: skip
