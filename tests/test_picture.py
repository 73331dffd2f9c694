"""Drawings of a run: every bar stands where it should, for what it should."""

import matplotlib.pyplot as plt
import pytest

from nanoeuler.emulator import drawing
from nanoeuler.emulator.machine import Span
from nanoeuler.emulator.runner import Report
from nanoeuler.errors import UserError


def drawn(report, **more):
    """The labels of the lines; and of each bar its line, its begin, its end."""
    figure, axes = plt.subplots()
    drawing.stages(report, axes, **more)
    labels = [label.get_text() for label in axes.get_yticklabels()]
    bars = [(bar.get_y() + bar.get_height() / 2, bar.get_x(), bar.get_x() + bar.get_width())
            for bar in axes.patches]  # fmt: skip
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    plt.close(figure)
    return labels, [(labels[round(y)], x, end) for y, x, end in bars], legend


COPY, OTHER = Span("copy in", 0, 1024, 2048, 5, 9), Span("copy in", 1, 1024, 2048, 6, 7)
READ = Span("wgmma warpgroup 1", 0, 3072, 3200, 20, 26)
SECOND = Span("copy in", 0, 3072, 4096, 10, 12)
WAIT, SPIN = Span("wait warp 6", 0, 8000, 8008, 1, 9), Span("wait warp 1", 0, 8000, 8008, 2, 3)
OUT = Span("copy out", 0, 1024, 2048, 30, 30)


def test_a_line_for_each_place_and_each_who_waits():
    labels, bars, legend = drawn(Report({}, 40, [COPY, OTHER, SECOND, READ, WAIT, OUT]))
    assert labels == ["byte 1024", "byte 3072", "warpgroup 1 waits"]
    assert sorted(bars) == [
        ("byte 1024", 5, 9), ("byte 1024", 30, 31), ("byte 3072", 10, 12), ("byte 3072", 20, 26),
        ("warpgroup 1 waits", 1, 9),
    ]  # fmt: skip
    assert legend == ["copy in", "wgmma warpgroup 1", "copy out"]


def test_without_products_each_warp_waits_for_itself():
    labels, bars, _ = drawn(Report({}, 40, [WAIT, COPY, SPIN]))
    assert labels == ["byte 1024", "warp 1 waits", "warp 6 waits"]
    assert ("warp 1 waits", 2, 3) in bars and ("warp 6 waits", 1, 9) in bars


def test_places_with_names():
    places = {"keys": 2000, "values": 3000}
    labels, bars, _ = drawn(Report({}, 40, [COPY, SECOND, READ]), places=places)
    assert labels == ["keys", "values"]
    assert {name for name, *_ in bars} == {"values"}  # what lies before all places is left out


def test_states_want_something_that_was_watched():
    with pytest.raises(UserError, match="nothing was watched"):
        drawing.states(Report({}, 1), None)
