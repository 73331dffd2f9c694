"""Wrong answers to the exercises of appendix G: each must be refused by its check."""

import numpy as np

from nanoeuler.book.build import code_cells
from nanoeuler.emulator.counters import sectors, wavefronts
from nanoeuler.files import project_root

CHAPTER = "g-gpu-emulator"
NAMES = dict(np=np, sectors=sectors, wavefronts=wavefronts)
# What the chapter defines in a cell of its own, before the check.
_TEXT = (project_root() / "book" / f"{CHAPTER}.md").read_text(encoding="utf-8")
(_CELL,) = (cell for _, cell in code_cells(_TEXT) if cell[0].startswith("def orders("))
exec("\n".join(_CELL), NAMES)

WORDS = "words = {at // 4 + i for at in lanes for i in range(size // 4)}"
SECOND = '("write", "read") if kind == "write" else ("write",)'
# (exercise, what is wrong, text of the solution, what it becomes)
# fmt: off
ANSWERS = [
    ("cost", "lanes that read nothing have a sector", "for at in addresses if at >= 0}",
     "for at in addresses}"),
    ("cost", "a sector for each lane", "len(sectors)",
     "sum(at >= 0 for at in addresses)"),
    ("cost", "sectors of 128 bytes", "{at // 32", "{at // 128"),
    ("cost", "lines of words", "{at // 32", "{at // 8"),
    ("cost", "a word for each lane, shared by nobody",
     WORDS,
     "words = [at // 4 + i for at in lanes for i in range(size // 4)]"),
    ("cost", "the first word alone, shared by all",
     WORDS.removeprefix("words = "),
     "{at // 16 for at in lanes}"),
    ("cost", "four words always", "range(size // 4)}", "range(4)}"),
    ("cost", "all the warp at once", "32 * 4 // size, 0", "32, 0"),
    ("cost", "half a warp at a time", "32 * 4 // size, 0", "min(32, 256 // size), 0"),
    ("cost", "the worst quarter", "rounds += max(", "rounds = 1 * max("),
    ("cost", "16 banks", "word % 32", "word % 16"),
    ("cost", "banks of 8 bytes", "word % 32", "word // 2 % 32"),
    ("cost", "a round for nobody", "default=0", "default=1"),
    ("cost", "lanes that read nothing want a word",
     "addresses[first : first + together] if at >= 0]", "addresses[first : first + together]]"),
    ("cost", "as many rounds as words", "banks.count(bank) for bank in banks",
     "len(banks) for bank in banks"),
    ("clocks", "no new epoch", "known[w, w] += 1", "pass"),
    ("clocks", "a new epoch before telling",
     "np.maximum(place, known[w], out=place)\n            known[w, w] += 1",
     "known[w, w] += 1\n            np.maximum(place, known[w], out=place)"),
    ("clocks", "the place forgets what others told", "np.maximum(place, known[w], out=place)",
     "place[:] = known[w]"),
    ("clocks", "only its own epoch is told", "np.maximum(place, known[w], out=place)",
     "place[w] = known[w, w]"),
    ("clocks", "what was known is forgotten", "np.maximum(known[w], places.get(what, 0))",
     "np.maximum(np.eye(warps, dtype=int)[w] * known[w, w], places.get(what, 0))"),
    ("clocks", "all places are one", "places.setdefault(what,", "places.setdefault(0,"),
    ("clocks", "reads race with reads", SECOND, '("write", "read")'),
    ("clocks", "writes after reads are no race", SECOND, '("write",)'),
    ("clocks", "writes after writes are no race", SECOND,
     '("read",) if kind == "write" else ("write",)'),
    ("clocks", "reads after writes are no race", SECOND,
     '("write", "read") if kind == "write" else ()'),
    ("clocks", "an epoch late", "epochs[v] > known[w, v]", "epochs[v] > known[w, v] + 1"),
    ("clocks", "an epoch early", "epochs[v] > known[w, v]", "epochs[v] >= max(1, known[w, v])"),
    ("clocks", "words are not told apart", "(what, other)", "(0, other)"),
    ("clocks", "the last warp alone is remembered",
     "last.setdefault((what, kind), np.zeros(warps, int))[w] = known[w, w]",
     "last[what, kind] = np.eye(warps, dtype=int)[w] * known[w, w]"),
    ("clocks", "an access counts twice", "found.append(i)\n                    break",
     "found.append(i)"),
    ("clocks", "learning is telling", 'elif kind == "learn"', 'elif kind == "listen"'),
]
