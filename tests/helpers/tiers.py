"""Which cases of a test `make test` runs, where all are for `make test-all`.

Of settings of many switches, those in which each two values of two switches meet. A mistake in how
two switches go together shows itself in one of them; what it takes three for is left to the full
product. See Kuhn, Wallace and Gallo, "Software fault interactions and implications for software
testing" (2004): two suffice for most, not for all.

Of planted mistakes that take tenths of a second each, one in several: they test the test, which
changes less often than the code. That all of them can still be planted is for `make test`, too
(`mutants.source`).
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Setting = dict[str, Any]


def pairwise(choices: Mapping[str, Sequence[Any]]) -> list[Setting]:
    """Settings of all switches, always the same ones: every pair of values meets in one of them.

    Greedy: a setting begins with a pair that has not met, and each other switch takes the value
    that makes most of them meet.
    """
    left = {
        frozenset(pair): pair
        for one, other in combinations(choices, 2)
        for pair in product([(one, a) for a in choices[one]], [(other, b) for b in choices[other]])
    }
    found = []
    while left:
        chosen = dict(next(iter(left.values())))
        for name, values in choices.items():
            if name not in chosen:
                gains = [sum(frozenset({(name, value), item}) in left for item in chosen.items())
                         for value in values]  # fmt: skip
                chosen[name] = values[gains.index(max(gains))]
        found.append({name: chosen[name] for name in choices})
        for pair in combinations(found[-1].items(), 2):
            left.pop(frozenset(pair), None)
    return found


def paired(settings: Iterable[Setting], choices: Mapping[str, Sequence[Any]]) -> list:
    """Parameters of a test: all settings, but those that `pairwise` does without are `long`."""
    few = pairwise(choices)
    return [
        pytest.param(
            setting,
            id=" ".join(str(setting[name]) for name in choices),
            marks=() if {name: setting[name] for name in choices} in few else pytest.mark.long,
        )
        for setting in settings
    ]


def thinned(cases: Iterable[Any], every: int = 3) -> list:
    """Parameters of a test: all cases, but those between one in `every` are `long`."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)),
                     marks=() if i % every == 0 else pytest.mark.long)
        for i, case in enumerate(cases)
    ]  # fmt: skip


def kept(cases: Iterable[Any], *short: Any) -> list:
    """Parameters of a test: all cases, but those that `short` doesn't name are `long`."""
    cases = list(cases)
    assert all(each in cases for each in short), "a case that is to stay has gone"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)),
                     marks=() if case in short else pytest.mark.long)
        for case in cases
    ]  # fmt: skip
