"""Settings of the model's switches for tests that go through many architectures."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import tiers

from nanoeuler.checks import gradcheck
from nanoeuler.engines.reference import SUPPORTS
from nanoeuler.model.config import CHOICES

KNOWN = {name: SUPPORTS.get(name, values[:1]) for name, values in CHOICES.items()}


def whole(setting: dict[str, Any]) -> dict[str, Any]:
    """A setting with the numbers that belong to its way of scaling RoPE."""
    return setting | gradcheck.ROPE[setting["rope_scaling"]]


def crossings(*more: str, apart: Sequence[str] = ()) -> list[dict[str, Any]]:
    """All settings of gradcheck.CROSSED and the switches `more`, then what lets all pairs meet.

    Each has all switches but those `apart`, and the numbers that belong to them.
    """
    crossed = {
        name: values if name in (*gradcheck.CROSSED, *more) else values[:1]
        for name, values in KNOWN.items() if name not in apart
    }  # fmt: skip
    found = [dict(zip(crossed, values, strict=True)) for values in product(*crossed.values())]
    found += [each for each in tiers.pairwise(choices(*apart)) if each not in found]
    return [whole(each) for each in found]


def choices(*apart: str) -> dict[str, Sequence[Any]]:
    """The switches but those `apart`, for `tiers.paired`."""
    return {name: values for name, values in KNOWN.items() if name not in apart}
