"""Wrong answers to the exercises of appendix H: each must be refused by its check."""

import numpy as np

from nanoeuler.book.build import code_cells
from nanoeuler.emulator import dtypes
from nanoeuler.emulator.ptx_parser import statements, translate
from nanoeuler.engines.gpu.lang.instruction import ptx
from nanoeuler.errors import UserError
from nanoeuler.files import project_root

CHAPTER = "h-ptx-emulator"
NAMES = dict(
    np=np, ptx=ptx, dtypes=dtypes, statements=statements, translate=translate,
    UserError=UserError,
)  # fmt: skip
# Texts to run, as the chapter defines them before its first exercise.
_TEXT = (project_root() / "book" / f"{CHAPTER}.md").read_text(encoding="utf-8")
for _, _cell in code_cells(_TEXT):
    if any(line.startswith(("LOOPS =", "def drawn_text(")) for line in _cell):
        exec("\n".join(line for line in _cell if not line.startswith(":")), NAMES)

END = "if missing == 0 and size == 0:"
# (exercise, what is wrong, text of the solution, what it becomes)
# fmt: off
ANSWERS = [
    ("answers", "the parity that is under way", "phase % 2 != number", "phase % 2 == number"),
    ("answers", "the phase, not its parity", "phase % 2 != number", "phase != number"),
    ("answers", "any phase that is over", "phase % 2 != number", "phase > number"),
    ("answers", "arrivals alone", END, "if missing == 0:"),
    ("answers", "bytes alone", END, "if size == 0 and kind == 'land':"),
    ("answers", "either", END, "if missing == 0 or size == 0:"),
    ("answers", "arrivals are not set again", "phase, missing = phase + 1, count",
     "phase = phase + 1"),
    ("answers", "one arrival a phase", "phase + 1, count", "phase + 1, 1"),
    ("answers", "expecting is no arrival", "            missing -= 1\n            size += number",
     "            missing -= kind == 'arrive'\n            size += number"),
    ("answers", "expected bytes replace what is missing", "size += number", "size = number"),
    ("answers", "a copy lands whole", "size -= number", "size = 0"),
    ("answers", "copies are counted, not bytes", "size -= number", "size -= 16"),
    ("answers", "a phase too early", "phase, missing, size, said = 0,",
     "phase, missing, size, said = 1,"),
    ("answers", "no bytes below none", "size -= number", "size = max(0, size - number)"),
    ("answers", "phases are two", "phase + 1, count", "1, count"),
    ("step", "every predicate is true", "if part.predicate and", "if False and"),
    ("step", "the ! is not read", "registers[part.predicate] == part.negated",
     "not registers[part.predicate]"),
    ("step", "the ! is read the other way", "registers[part.predicate] == part.negated",
     "registers[part.predicate] != part.negated"),
    ("step", "a jump does not ask its predicate", "    if part.predicate and",
     "    if part.mnemonic != 'bra' and part.predicate and"),
    ("step", "jumps are passed over", "return body.index(part.operands[0]), registers",
     "return at + 1, registers"),
    ("step", "every label is the first", "return body.index(part.operands[0]), registers",
     "return next(n for n, p in enumerate(body) if isinstance(p, str)), registers"),
    ("step", "behind what follows the label", "return body.index(part.operands[0]), registers",
     "return body.index(part.operands[0]) + 2, registers"),
    ("step", "sums do not wrap, nor products", "dtypes.int32(a * b)", "a * b"),
    ("step", "products without a sign", "dtypes.int32(a * b)", "dtypes.uint32(a * b)"),
    ("step", "a shift that keeps the sign", "dtypes.int32(dtypes.uint32(a) >> b)", "a >> b"),
    ("step", "a shift to the left", "dtypes.uint32(a) >> b", "dtypes.uint32(a) << b"),
    ("step", "the u32 is not read", "dtypes.uint32(a) < dtypes.uint32(b)", "a < b"),
    ("step", "s32 without a sign", "lambda a, b: a < b",
     "lambda a, b: dtypes.uint32(a) < dtypes.uint32(b)"),
    ("step", "the select is exchanged", "a if p else b", "b if p else a"),
    ("step", "the difference is exchanged", "a - b", "b - a"),
    ("step", "the result stands last", "into, *given = part.operands",
     "*given, into = part.operands"),
    ("step", "what came in is changed", "part, registers = body[at], dict(registers)",
     "part = body[at]"),
    ("step", "nothing is refused", "raise UserError(f\"no instruction {part.mnemonic!r}\")",
     "return at + 1, registers"),
    ("step", "the last suffix is passed over", "    if part.mnemonic not in acts:",
     "    acts['add.f32'] = acts['add.s32']\n    if part.mnemonic not in acts:"),
]
