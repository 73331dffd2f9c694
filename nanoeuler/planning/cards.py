# Made from book/13-training-on-a-gpu.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-plan-cards
"""NVIDIA's GPUs that people train on, by its own documents, and what is known of ours on each.

Left out: other vendors, cards for laptops, and several cards in one machine.
"""

from typing import NamedTuple

from nanoeuler.engines.gpu.lang import card as limits

# The most shared memory (bytes) of a block that asks for it. That of Turing, where no kernel runs,
# is for the table of cards: CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability".
SHARED = limits.SHARED | {(7, 5): 64 << 10}
OLDEST = 8, 0  # the first with products of bf16: PTX ISA, mma.sync, "Target ISA Notes"
# FLOPs a cycle of a multiprocessor of a GeForce, bf16 summed in float32: worked out in the text.
GEFORCE = 512


class Card(NamedTuple):
    """A GPU by its documents: peaks that a program approaches and never reaches."""

    name: str                    # as its driver says it, without "NVIDIA "
    capability: tuple[int, int]  # compute capability: which instructions it has
    multiprocessors: int
    l2_bytes: float
    memory_bytes: float
    bytes_per_s: float           # between the processor and its memory
    flops_per_s: float           # dense products of bf16, summed in float32; 0.0: it has none

    @property
    def supported(self) -> bool:
        """Whether our engines for a GPU run on it."""
        return self.capability >= OLDEST


# Sources beside the figures. Where a datasheet says "with sparsity", half of its figure. Compute
# capabilities: developer.nvidia.com/cuda-gpus. Where only cores are given, 128 of them are a
# multiprocessor (8.6 and 8.9).
CARDS = {
    # NVIDIA T4 datasheet (320 cores for tensors, 16 GB, 320 GB/s); Turing whitepaper, TU104 (L2).
    "t4": Card("Tesla T4", (7, 5), 40, 4 << 20, 16e9, 320e9, 0.0),
    # NVIDIA A100 datasheet, 80GB SXM: 312 TFLOPS dense, 2039 GB/s; A100 whitepaper: 108, 40 MB.
    "a100": Card("A100-SXM4-80GB", (8, 0), 108, 40 << 20, 80e9, 2039e9, 312e12),
    # GeForce RTX 3060 specifications: 3584 cores, 1.78 GHz (1.777), 12 GB, 192 bits of 15 Gbit/s;
    # L2: six controllers of 512 KB, as in the GA102 whitepaper.
    "rtx-3060": Card("GeForce RTX 3060", (8, 6), 28, 3 << 20, 12e9, 360e9, 28 * GEFORCE * 1.777e9),
    # NVIDIA Ampere GA102 whitepaper, table of the RTX 3090: 71 TFLOPS dense, 936 GB/s, 6 MB.
    "rtx-3090": Card("GeForce RTX 3090", (8, 6), 82, 6 << 20, 24e9, 936e9, 71e12),
    # GeForce RTX 4060 Ti specifications: 4352 cores, 2.535 GHz, 128 bits of 18 Gbit/s, 32 MB; the
    # card of 8 GB. That of 16 GB has the other figures too.
    "rtx-4060-ti": Card("GeForce RTX 4060 Ti", (8, 9), 34, 32 << 20, 8e9, 288e9,
                        34 * GEFORCE * 2.535e9),
    # GeForce RTX 4070 specifications: 5888 cores, 2.475 GHz, 192 bits of 21 Gbit/s, 36 MB.
    "rtx-4070": Card("GeForce RTX 4070", (8, 9), 46, 36 << 20, 12e9, 504e9, 46 * GEFORCE * 2.475e9),
    # NVIDIA Ada GPU Architecture whitepaper, table of the RTX 4090: 165.2 dense, 1008 GB/s, 72 MB.
    "rtx-4090": Card("GeForce RTX 4090", (8, 9), 128, 72 << 20, 24e9, 1008e9, 165.2e12),
    # NVIDIA L4 datasheet: 242 TFLOPS with sparsity, 300 GB/s, 24 GB; 7424 cores; AD104's 48 MB.
    "l4": Card("L4", (8, 9), 58, 48 << 20, 24e9, 300e9, 121e12),
    # NVIDIA H100 datasheet, SXM: 1979 TFLOPS with sparsity, 3.35 TB/s; H100 whitepaper: 132, 50 MB.
    "h100": Card("H100 80GB HBM3", (9, 0), 132, 50 << 20, 80e9, 3.35e12, 989.5e12),
    # NVIDIA H200 datasheet, SXM: 1979 TFLOPS with sparsity, 4.8 TB/s, 141 GB; the H100's chip, of
    # whose L2 its driver reports 60 MiB.
    "h200": Card("H200", (9, 0), 132, 60 << 20, 141e9, 4.8e12, 989.5e12),
    # NVIDIA RTX Blackwell whitepaper, table of the RTX 5090: 209.5 dense, 1792 GB/s, 96 MB.
    "rtx-5090": Card("GeForce RTX 5090", (12, 0), 170, 96 << 20, 32e9, 1792e9, 209.5e12),
}  # fmt: skip
MEASURED = {"h100", "h200"}  # those of data/measurements/gpu.json: all others are estimates


INSTEAD = "train with --engine cpu"  # where the card is too old


def known(key: str) -> str:
    """What is known of our engines on CARDS[key], in a word or two."""
    if not CARDS[key].supported:
        return "not supported"
    return "measured" if key in MEASURED else "estimated"


def unsupported(card: Card) -> str:
    """Why no engine runs on a card, and what to do instead."""
    (major, minor), oldest = card.capability, ".".join(map(str, OLDEST))
    return f"not supported: {major}.{minor} has no bf16 products ({oldest} has); {INSTEAD}"


def table() -> str:
    """The cards as text, a line for each."""
    lines = ["card         capability  memory GB    GB/s  bf16 TFLOP/s  SMs L2 MiB shared KiB"]
    for key, card in CARDS.items():
        flops = f"{card.flops_per_s / 1e12:.1f}" if card.flops_per_s else "none"
        lines.append(
            f"{key:12} {'.'.join(map(str, card.capability)):>10} {card.memory_bytes / 1e9:10.0f} "
            f"{card.bytes_per_s / 1e9:7,.0f} {flops:>13} {card.multiprocessors:4} "
            f"{card.l2_bytes / 2**20:6.0f} {SHARED[card.capability] >> 10:10}  {known(key)}"
        )
    return "\n".join(lines)
