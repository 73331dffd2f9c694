# Made from book/a-how-this-book-works.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-book-progress
"""Progress, written once: bars on stderr while something goes on, and lines above them that stay.

Leaves out what there is to say, which is for the callers, and stdout, where results go.
"""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `bars` imports it: a program that writes one token shows none
    from rich.progress import Progress, ProgressColumn


def bars(shown: bool | None = None, *columns: "ProgressColumn", stay: bool = False) -> "Progress":
    """Bars on stderr, a line for each task; none unless `shown` (None: where it is a terminal).

    A line has `columns`, or those given here: a description, a bar, the time that is left. When all
    is done the lines are gone, unless they are to `stay`. To use: `with bars() as progress:`, then
    `progress.add_task`, `progress.update`, `progress.track` of rich.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    class Patient(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True  # rich would end the program here; nobody reads, and the work goes on

    shown = sys.stderr.isatty() if shown is None else shown
    usual = TextColumn("{task.description}"), BarColumn(bar_width=20), TimeRemainingColumn()
    # In a notebook rich would answer for itself whether this is a terminal, and say yes.
    console = Patient(stderr=True, highlight=False, force_jupyter=False, force_terminal=shown)
    return Progress(*(columns or usual), console=console, disable=not shown, transient=not stay,
                    redirect_stdout=False, redirect_stderr=False)  # fmt: skip


def say(progress: "Progress", text: str) -> None:
    """Print `text` on stderr, above the bars if there are any, as it is: no markup, no folding."""
    progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
