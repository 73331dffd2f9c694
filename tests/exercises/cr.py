"""Wrong answers to the exercises of appendix R, each of which its check must refuse."""

import numpy as np

CHAPTER = "r-server"
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
    ("schedule", "room for those who wait alone", "len(ends) + len(queue) < slots + waiting",
     "len(queue) < waiting"),
    ("schedule", "slots alone", "< slots + waiting", "< slots"),
    ("schedule", "one too many", "< slots + waiting", "<= slots + waiting"),
    ("schedule", "nobody is refused", "if len(ends) + len(queue) < slots + waiting:", "if True:"),
    ("schedule", "those that run are not counted", "if len(ends) + len(queue)", "if len(queue)"),
    ("schedule", "the last to come starts first", "queue.pop(0)", "queue.pop()"),
    ("schedule", "the shortest starts first", "queue.pop(0)",
     "queue.pop(min(range(len(queue)), key=lambda i: jobs[queue[i]][1]))"),
    ("schedule", "a text has one round more", "if end > now", "if end >= now"),
    ("schedule", "a text has one round less", "jobs[job][1])", "jobs[job][1] - 1)"),
    ("schedule", "one starts in a round", "while queue and len", "if queue and len"),
    ("schedule", "a slot too many", "len(ends) < slots:", "len(ends) <= slots:"),
    ("schedule", "a slot for all", "and len(ends) < slots:", ":"),
    ("schedule", "one comes in a round", "while come < len(jobs) and jobs[come][0] == now",
     "if come < len(jobs) and jobs[come][0] <= now"),
    ("schedule", "since it came", "now + jobs[job][1]", "sum(jobs[job])"),
    ("schedule", "how long it waits", "starts[job] = now", "starts[job] = now - jobs[job][0]"),
    ("schedule", "the round in which it ends", "starts[job] = now",
     "starts[job] = now + jobs[job][1]"),
    ("schedule", "those refused are left out", "return starts",
     "return [each for each in starts if each is not None]"),
]
