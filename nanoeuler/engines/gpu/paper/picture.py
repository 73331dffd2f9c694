# Made from book/07p-ptx-on-paper.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-ptx-ring
"""Drawings of a run: what happens to each place in shared memory, and when."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from nanoeuler.engines.gpu.paper.runner import Report
from nanoeuler.errors import UserError

COLOURS = {"copy in": "C0", "wgmma": "C1", "copy out": "C2"}  # of what takes time
STATES = {  # of a word, as `Shared.note` numbers them
    "never written": "white",
    "a copy is on its way": "C0",
    "written": "0.8",
    "written, no proxy fence": "C3",
    "being read by a copy or a wgmma": "C1",
}

# Below the drawing, so that it hides nothing.
LEGEND = {"fontsize": 8, "loc": "upper center", "bbox_to_anchor": (0.5, -0.2)}


def stages(report: Report, axes: Axes, block: int = 0) -> None:
    """A line for each place that copies fill or empty, a bar for each copy and each product."""
    spans = [s for s in report.spans if s.block == block and s.what.split()[0] != "wait"]
    places = sorted({s.start for s in spans if s.what.startswith("copy")})
    for span in spans:
        row = np.searchsorted(places, span.start, side="right") - 1
        kind = "wgmma" if span.what.startswith("wgmma") else span.what
        axes.barh(
            row, max(1, span.end - span.begin), left=span.begin, height=0.7, color=COLOURS[kind]
        )
    axes.set_yticks(range(len(places)), [f"byte {place}" for place in places])
    axes.invert_yaxis()
    axes.set_xlabel("turn")
    kinds = {"wgmma" if s.what.startswith("wgmma") else s.what for s in spans}
    handles = [Patch(color=COLOURS[k], label=k) for k in COLOURS if k in kinds]
    axes.legend(handles=handles, **LEGEND, ncols=3)


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
