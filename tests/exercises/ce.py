"""Wrong answers to the exercises of appendix E, each of which its check must refuse."""

import json

import numpy as np
from helpers.exercises import cells_of, definitions

CHAPTER = "e-a-run-that-survives"
NAMES = dict(np=np, json=json, __name__=CHAPTER)
(disk,) = (cell for cell in cells_of(CHAPTER) if "class Disk:" in cell)
exec(definitions(disk, CHAPTER), NAMES)  # the disk that check_put judges with
NAMES.pop("__builtins__")

RENAME, SYNCED = "disk.rename(aside, name)", "disk.sync_folder()"
# (exercise, what is wrong, text of the solution, what it becomes)
ANSWERS = [
    ("put", "into the file itself", 'aside = f".{name}.part"', "aside = name"),
    ("put", "the content is not synced", "disk.sync(aside)", "pass"),
    ("put", "the names are not synced", SYNCED, "pass"),
    ("put", "names before the rename", RENAME + "\n    " + SYNCED, SYNCED + "\n    " + RENAME),
    ("put", "content after the rename", "disk.sync(aside)\n    except",
     "disk.rename(aside, name); disk.sync(name); disk.rename(name, aside)\n    except"),
    ("put", "the old file first", RENAME, "disk.remove(name); disk.sync_folder(); " + RENAME),
    ("put", "the names of another file", "disk.sync(aside)", "disk.sync(name)"),
    ("put", "names alone", "disk.sync(aside)", "disk.sync_folder()"),
    ("put", "the rename is left out", RENAME, "pass"),
    ("put", "written twice, no rename", RENAME, "disk.write(name, data); disk.sync(name); "
     "disk.remove(aside)"),
    ("put", "the full disk keeps its half", "disk.remove(aside)\n        raise", "raise"),
    ("put", "the full disk is nobody's business", "disk.remove(aside)\n        raise",
     "disk.remove(aside)\n        return"),
    ("put", "the full disk takes the old file", "disk.remove(aside)\n        raise",
     "disk.remove(name)\n        raise"),
    ("put", "another error", "disk.remove(aside)\n        raise",
     'disk.remove(aside)\n        raise ValueError("full")'),
    ("put", "not over what is there", 'aside = f".{name}.part"',
     'aside = f".{name}.part"\n    if aside in disk.names:\n        raise OSError(aside)'),
    ("put", "a name of its own each time", 'f".{name}.part"',
     'f".{name}.{len(disk.names)}{sum(data)}.part"'),
    ("put", "half of it", "disk.write(aside, data)", "disk.write(aside, data[:-1])"),
    ("put", "a name that is taken", 'f".{name}.part"', '"another"'),
    ("resume", "whole or not", "if whole", "if True"),
    ("resume", "the oldest", "max((step", "min((step"),
    ("resume", "the last in the list", "max((step for step, whole in saves if whole), default=0)",
     "([0] + [step for step, whole in saves if whole])[-1]"),
    ("resume", "only if the newest is whole",
     "max((step for step, whole in saves if whole), default=0)",
     "max(saves)[0] if saves and max(saves)[1] else 0"),
    ("resume", "a save is taken for granted", ", default=0)", ")"),
    ("resume", "the step itself goes", '<= step', '< step'),
    ("resume", "one step more", '<= step', '<= step + 1'),
    ("resume", "all lines", 'each["step"] <= step', "True"),
    ("resume", "as many lines as steps", 'each["step"] <= step', "len(kept) <= step"),
    ("resume", "goes on behind the cut", "break", "continue"),
    ("resume", "nothing is kept if a line is cut", "break", "kept = []; break"),
    ("resume", "a cut line is an error", "break", "raise"),
    ("resume", "lines as they are", "kept.append(each)", "kept.append(line)"),
    ("resume", "the batch of the step again", "divmod(step * batch_size",
     "divmod((step - 1) * batch_size"),
    ("resume", "one batch is left out", "divmod(step * batch_size",
     "divmod((step + 1) * batch_size"),
    ("resume", "steps for windows", "divmod(step * batch_size, windows)", "divmod(step, windows)"),
    ("resume", "batches of a pass rounded", "divmod(step * batch_size, windows)",
     "(step // max(1, windows // batch_size), step % max(1, windows // batch_size) * batch_size)"),
    ("resume", "window and pass exchanged", "*divmod(step * batch_size, windows)",
     "*divmod(step * batch_size, windows)[::-1]"),
]
