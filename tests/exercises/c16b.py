"""Wrong answers to the exercises of chapter 16b, each of which its check must refuse."""

import numpy as np

CHAPTER = "16b-a-server"
NAMES = dict(np=np)

ANSWERS = [
    ("lines", "each piece by itself", "(held + piece)", "piece"),
    ("lines", "in the wrong order", "(held + piece)", "(piece + held)"),
    ("lines", "a line ends at one line break", 'b"\\n\\n")', 'b"\\n")'),
    ("lines", "three line breaks", 'b"\\n\\n")', 'b"\\n\\n\\n")'),
    ("lines", "cut once only", 'b"\\n\\n")', 'b"\\n\\n", 1)'),
    ("lines", "what is held is a line, too", "for line in whole:", "for line in [*whole, held]:"),
    ("lines", "the first line alone", "for line in whole:", "for line in whole[:1]:"),
    ("lines", "the last line alone", "for line in whole:", "for line in whole[-1:]:"),
    ("lines", "from the last to the first", "for line in whole:", "for line in whole[::-1]:"),
    ("lines", "another alphabet", "line.decode()", 'line.decode("latin-1")'),
    ("lines", "bytes", "line.decode()", "line"),
    ("lines", "its line breaks taken off", "line.decode()", 'line.decode().replace("\\n", "")'),
    ("lines", "nothing held between pieces", "*whole, held =", "*whole, _ ="),
    ("lines", "begins with something", 'held = b""', 'held = b" "'),
]
