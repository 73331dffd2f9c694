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
    ("desk", "room for those who wait alone", "len(ends) + len(queue) < seats + waiting",
     "len(queue) < waiting"),
    ("desk", "seats alone", "< seats + waiting", "< seats"),
    ("desk", "one too many", "< seats + waiting", "<= seats + waiting"),
    ("desk", "nobody is refused", "if len(ends) + len(queue) < seats + waiting:", "if True:"),
    ("desk", "those who sit are not counted", "if len(ends) + len(queue)", "if len(queue)"),
    ("desk", "the last to come sits first", "queue.pop(0)", "queue.pop()"),
    ("desk", "the shortest sits first", "queue.pop(0)",
     "queue.pop(min(range(len(queue)), key=lambda i: orders[queue[i]][1]))"),
    ("desk", "a text has one round more", "if end > now", "if end >= now"),
    ("desk", "a text has one round less", "orders[order][1])", "orders[order][1] - 1)"),
    ("desk", "one sits down in a round", "while queue and len", "if queue and len"),
    ("desk", "a seat too many", "len(ends) < seats:", "len(ends) <= seats:"),
    ("desk", "a seat for all", "and len(ends) < seats:", ":"),
    ("desk", "one comes in a round", "while come < len(orders) and orders[come][0] == now",
     "if come < len(orders) and orders[come][0] <= now"),
    ("desk", "since it came", "now + orders[order][1]", "sum(orders[order])"),
    ("desk", "how long it waits", "sits[order] = now", "sits[order] = now - orders[order][0]"),
    ("desk", "the round in which it ends", "sits[order] = now",
     "sits[order] = now + orders[order][1]"),
    ("desk", "those refused are left out", "return sits",
     "return [each for each in sits if each is not None]"),
]
