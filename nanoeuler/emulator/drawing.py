# Made from book/h-ptx-emulator.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-ptx-ring
"""Drawings of a run: the copies and reads of each place in shared memory, over time."""

from collections.abc import Iterable, Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from nanoeuler.emulator.machine import Span
from nanoeuler.emulator.runner import Report
from nanoeuler.errors import UserError

COLOURS = {"copy in": "C0", "wgmma": "C1", "copy out": "C2", "wait": "0.7"}  # of what takes time
STATES = {  # of a word, as `Shared.note` numbers them
    "never written": "white",
    "a copy is on its way": "C0",
    "written": "0.8",
    "written, no proxy fence": "C3",
    "being read by a copy or a wgmma": "C1",
}

# Below the drawing, so that it hides nothing.
LEGEND = {"fontsize": 8, "loc": "upper center", "bbox_to_anchor": (0.5, -0.2)}


def bar(axes: Axes, height: float, thickness: float, span: Span, colour: str) -> None:
    """One bar, from the turn in which something began to the one in which it ended."""
    long = max(1, span.end - span.begin)
    axes.barh(height, long, left=span.begin, height=thickness, color=colour)


def kind(who: str) -> str:
    """An actor's kind: "wgmma warpgroup 0" is wgmma."""
    return who.split(" warp")[0]


def colours_of(active: Iterable[str]) -> dict[str, str]:
    """A colour for each actor; warpgroups after the first take the next free ones."""
    more = iter(f"C{n}" for n in range(3, 10))
    taken: dict[str, str] = {}
    for who in active:
        own = COLOURS[kind(who)]
        taken[who] = next(more) if own in taken.values() else own
    return taken


def doers(report: Report, block: int) -> dict[str, list[Span]]:
    """The spans of each actor of a block: "copy in", "wgmma warpgroup 0", "wait warp 4"...

    Where warpgroups multiply, their warps wait as warpgroups.
    """
    together = any(span.what.startswith("wgmma") for span in report.spans)
    spans: dict[str, list[Span]] = {}
    for span in report.spans:
        who = span.what
        if together and who.startswith("wait"):
            who = f"wait warpgroup {int(who.split()[-1]) // 4}"
        if span.block == block:
            spans.setdefault(who, []).append(span)
    kinds = [*COLOURS]
    return dict(sorted(spans.items(), key=lambda item: (kinds.index(kind(item[0])), item[0])))


def stages(
    report: Report, axes: Axes, block: int = 0, places: Mapping[str, int] | None = None
) -> None:
    """A line for each place in shared memory: when it is filled and read, and which warps wait.

    places: name -> the byte at which a place begins; by default, where copies begin. In a place's
    line each actor has its own height. Below, a line for each warp, or warpgroup where those
    multiply, that waits at mbarriers.
    """
    spans = doers(report, block)
    active = {who: them for who, them in spans.items() if not who.startswith("wait")}
    if places is None:
        copied = {s.start for who, them in active.items() if "copy" in who for s in them}
        places = {f"byte {start}": start for start in sorted(copied)}
    waiting = [who for who in spans if who.startswith("wait")]
    height, colours = 0.8 / max(1, len(active)), colours_of(active)
    for n, (who, them) in enumerate(active.items()):
        for span in them:
            row = np.searchsorted([*places.values()], span.start, side="right") - 1
            if row >= 0:
                bar(axes, row - 0.4 + height * (n + 0.5), height, span, colours[who])
    for n, who in enumerate(waiting):
        for span in spans[who]:
            bar(axes, len(places) + n, 0.5, span, COLOURS["wait"])
    lines = [*places, *(who.removeprefix("wait ") + " waits" for who in waiting)]
    axes.set_yticks(range(len(lines)), lines)
    axes.invert_yaxis()
    axes.set_xlabel("turn")
    handles = [Patch(color=colour, label=who) for who, colour in colours.items()]
    axes.legend(handles=handles, **LEGEND, ncols=4)


def states(report: Report, axes: Axes, row: int = 128) -> None:
    """The watched words: a line for each `row` bytes, the highest state of its words; a column for
    each change."""
    if not report.history:
        raise UserError("nothing was watched: run with watch=(first byte, last byte)")
    table = np.array([state.reshape(-1, row // 4).max(axis=1) for _, state in report.history]).T
    axes.imshow(
        table, aspect="auto", interpolation="nearest", vmin=0, vmax=len(STATES) - 1,
        cmap=ListedColormap(list(STATES.values())),
    )  # fmt: skip
    axes.set_xlabel("change of state, in the order of turns")
    axes.set_ylabel(f"row of {row} bytes")
    handles = [
        Patch(facecolor=colour, edgecolor="0.5", label=state)
        for n, (state, colour) in enumerate(STATES.items())
        if (table == n).any()
    ]
    axes.legend(handles=handles, **LEGEND, ncols=2)
