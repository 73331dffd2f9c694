# Made from book/a-how-this-book-works.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-book-progress
"""Progress bars on stderr while something goes on, and lines above them that stay.

Leaves out the messages themselves, which are the callers', and stdout, where results go.
"""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `bars` imports it when called: many programs show no bar
    from rich.progress import Progress, ProgressColumn


def bars(shown: bool | None = None, *columns: "ProgressColumn", stay: bool = False) -> "Progress":
    """Bars on stderr, a line for each task, if `shown` (None: if stderr is a terminal).

    A line has the given `columns`, by default a description, a bar and the remaining time. The
    lines disappear at the end, unless they should `stay`. Use it as `with bars() as progress:`,
    then call rich's `progress.add_task`, `progress.update`, `progress.track`.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    class Patient(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True  # rich would end the program here, but the work should go on

    shown = sys.stderr.isatty() if shown is None else shown
    usual = TextColumn("{task.description}"), BarColumn(bar_width=20), TimeRemainingColumn()
    # In a notebook, rich would draw into the page instead.
    console = Patient(stderr=True, highlight=False, force_jupyter=False, force_terminal=shown)
    return Progress(*(columns or usual), console=console, disable=not shown, transient=not stay,
                    redirect_stdout=False, redirect_stderr=False)  # fmt: skip


def say(progress: "Progress", text: str) -> None:
    """Print `text` on stderr, above any bars: no markup, no emoji, no wrapping."""
    progress.console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)
