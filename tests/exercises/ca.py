"""Wrong answers to the exercises of appendix A, each of which its check must refuse."""

from helpers.exercises import cells_of

CHAPTER = "a-how-this-book-works"
NAMES: dict = {}
exec(next(cell for cell in cells_of(CHAPTER) if "def one_disk(" in cell), NAMES)

START = "length[path] + 2 if path in length else head"
# (exercise, what is wrong, text of the solution, what it becomes)
ANSWERS = [
    ("rehearse", "no head", "else head", "else 0"),
    ("rehearse", "a head of two lines", "else head", "else 2"),
    ("rehearse", "a head before each cell", "length[path] + 2", "length[path] + head"),
    ("rehearse", "nothing between cells", "length[path] + 2", "length[path]"),
    ("rehearse", "one line between cells", "length[path] + 2", "length[path] + 1"),
    ("rehearse", "two lines before the first, too", START, "length.get(path, head) + 2"),
    ("rehearse", "from 0", "line - first + 1", "line - first"),
    ("rehearse", "one too far", "line - first + 1", "line - first + 2"),
    ("rehearse", "the line behind the cell", "line < first + len(lines)",
     "line <= first + len(lines)"),
    ("rehearse", "the last line is left out", "line < first + len(lines)",
     "line < first + len(lines) - 1"),
    ("rehearse", "the first line is left out", "first <= line <", "first < line <"),
    ("rehearse", "the fence is a line", "first <= line <", "first - 1 <= line <"),
    ("rehearse", "cells that stay are exported", "if path is None:\n            continue",
     "pass"),
    ("rehearse", "cells that stay are in the way", "if path is None:\n            continue",
     "if path is None:\n            length = {key: n + len(lines) for key, n in length.items()}\n"
     "            continue"),
    ("rehearse", "one module for all", "length[path] = start + len(lines)",
     "length = dict.fromkeys([*length, path], start + len(lines))"),
    ("rehearse", "the last cell alone counts", "start + len(lines)\n    return",
     "head + len(lines)\n    return"),
    ("rehearse", "prose belongs to the cell before", "return None", "return path, start"),
    ("rehearse", "a number alone", "return path, start", "return start"),
]

# What a power cut can leave.
ANSWERS += [
    ("after_power_cut", "no file is torn", '|= {more[0], "torn"}', "|= {more[0]}"),
    ("after_power_cut", "every write is on the disk", '|= {more[0], "torn"}', "= {more[0]}"),
    ("after_power_cut", "the old bytes are gone", '|= {more[0], "torn"}',
     '= {more[0], "torn"}'),
    ("after_power_cut", "confirming bytes takes no mixture away",
     "may[called[what]] = {held[called[what]]}", "may[called[what]] |= {held[called[what]]}"),
    ("after_power_cut", "confirming bytes does nothing",
     "may[called[what]] = {held[called[what]]}", "pass"),
    ("after_power_cut", "confirming bytes confirms the name",
     "may[called[what]] = {held[called[what]]}",
     "may[called[what]], folders = {held[called[what]]}, []"),
    ("after_power_cut", "confirming the folder does nothing", "folders = []", "pass"),
    ("after_power_cut", "confirming the folder confirms the bytes", "folders = []",
     "folders, may = [], [{text} for text in held]"),
    ("after_power_cut", "confirming the folder empties it", "folders = []", "folders = [{}]"),
    ("after_power_cut", "a rename reaches the disk at once",
     "called[more[0]] = called.pop(what)",
     "called[more[0]] = called.pop(what)\n            folders = []"),
    ("after_power_cut", "a rename takes the bytes along", "called[more[0]] = called.pop(what)",
     "called[more[0]] = called.pop(what)\n"
     "            may[called[more[0]]] = {held[called[more[0]]]}"),
    ("after_power_cut", "the old name stays", "called.pop(what)", "called[what]"),
    ("after_power_cut", "the names now alone", "folders.append(dict(called))",
     "folders = [dict(called)]"),
    ("after_power_cut", "one dict for all times", "dict(called)", "called"),
    ("after_power_cut", "first or last, nothing between", "folders.append(dict(called))",
     "folders = [*folders[:1], dict(called)]"),
    ("after_power_cut", "there is always a file", "if name in names else {None}",
     "if name in names else set()"),
    ("after_power_cut", "a folder that was there before", "may, folders = {}, [], [], [{}]",
     "may, folders = {}, [], [], []"),
    ("after_power_cut", "what another program reads now", "return set().union(*found)",
     "return {held[called[name]] if name in called else None}"),
    ("after_power_cut", "a second write is a second file", "if what not in called:",
     "if True:"),
]
