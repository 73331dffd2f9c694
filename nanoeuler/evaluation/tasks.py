# Made from book/20-is-it-any-good.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-eval-tasks
"""The tasks that we know, and how their files are read.

Leaves out where files come from. CORE's shots and baselines: mlfoundations/dclm, eval_meta_data.csv
and mmlu_and_lowvar.yaml.
"""

import bz2
import random
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile, ZipFile

from nanoeuler.errors import UserError
from nanoeuler.evaluation.items import Item, item
from nanoeuler.files import check_regular, json_lines

ANSWER = "\nAnswer: "  # as DCLM's settings and the harness write it


class Task(NamedTuple):
    """What is asked, how, and what chance gives."""

    kind: str                   # of items.KINDS, or text
    title: str
    chance: float = 0.0         # the accuracy of one who guesses
    delimiter: str = " "
    measures: tuple[str, ...] = ("acc",)
    core: tuple[int, ...] = ()  # the shots with which CORE asks, once or twice


MEASURES = ("acc", "acc_norm", "acc_token")  # the table of chapter 20
TASKS = {
    "hellaswag": Task("choice", "HellaSwag", 0.25, " ", MEASURES, (0, 10)),
    "arc_easy": Task("choice", "ARC, easy", 0.25, ANSWER, MEASURES, (10,)),
    "arc_challenge": Task("choice", "ARC, challenge", 0.25, ANSWER, MEASURES, (10,)),
    "piqa": Task("choice", "PIQA", 0.5, ANSWER, MEASURES, (10,)),
    "copa": Task("choice", "COPA", 0.5, " ", MEASURES, (0,)),
    "openbook_qa": Task("choice", "OpenBookQA", 0.25, " ", MEASURES, (0,)),
    "commonsense_qa": Task("choice", "CommonsenseQA", 0.403, " ", MEASURES, (10,)),
    "boolq": Task("choice", "BoolQ", 0.62, ANSWER, MEASURES, (10,)),
    "agi_eval_lsat_ar": Task("choice", "LSAT, analytical reasoning", 0.25, " ", MEASURES, (3,)),
    "bigbench_language_identification": Task("choice", "Languages", 0.25, " ", MEASURES, (10,)),
    "winograd": Task("schema", "Winograd schemas", 0.5, core=(0,)),
    "winogrande": Task("schema", "WinoGrande", 0.5, core=(0,)),
    "lambada_openai": Task("word", "LAMBADA, OpenAI's text", core=(0,)),
    "jeopardy": Task("word", "Jeopardy", delimiter=ANSWER, core=(10,)),
    "bigbench_qa_wikidata": Task("word", "Facts of Wikidata", core=(10,)),
    "bigbench_dyck_languages": Task("word", "Brackets to close", core=(10,)),
    "bigbench_cs_algorithms": Task("word", "Algorithms", core=(10,)),
    "bigbench_operators": Task("word", "Operators", core=(10,)),
    "bigbench_repeat_copy_logic": Task("word", "Repeat and copy", core=(10,)),
    "blimp": Task("pair", "BLiMP", 0.5),
    "wikitext": Task("text", "WikiText"),
}  # fmt: skip
OTHER_NAMES = {"lambada": "lambada_openai", "openbookqa": "openbook_qa", "commonsenseqa":
               "commonsense_qa", "arc": "arc_easy"}  # fmt: skip
OTHER_ENDINGS = {"hellaswag": ("txt", "txt.bz2"), "blimp": ("zip",)}  # of files, besides jsonl


SEED = 1234  # from which the examples of an item are drawn, with its number: nanochat's


def with_shots(items: list[Item], shots: int, limit: int | None = None) -> list[Item]:
    """The first `limit` items with `shots` others before each, answered, and an empty line.

    Others are drawn from them all. A text for a schema has the right context. UserError if there
    are too few items to draw from.
    """
    if shots and len(items) <= shots:
        raise UserError(f"expected more than {shots} items, to draw {shots} examples for each of "
                        f"them, got {len(items)}: choose fewer shots")  # fmt: skip
    made = []
    for i, one in enumerate(items[:limit]):
        others = range(len(items) - 1)  # of all but i
        drawn = [items[k + (k >= i)] for k in random.Random(SEED + i).sample(others, shots)]
        before = "".join(x.contexts[x.gold] + x.continuations[x.gold] + "\n\n" for x in drawn)
        made.append(one._replace(contexts=tuple(before + text for text in one.contexts)))
    return made


def text_of(path: Path, what: str) -> str:
    """A file's text, unpacked if its name ends in .bz2; of a .zip, that of its JSON lines.

    UserError for one that has none, which says to give `what`.
    """
    check_regular(path)
    try:
        if path.suffix == ".zip":
            with ZipFile(path) as whole:
                names = [name for name in whole.namelist() if re.fullmatch(r"data/[^.].*l", name)]
                data = b"\n".join(map(whole.read, sorted(names)))
        else:
            data = path.read_bytes()
            data = bz2.decompress(data) if path.suffix == ".bz2" else data
        return data.decode().replace("\r\n", "\n")
    except (OSError, ValueError, EOFError, BadZipFile, zlib.error, RuntimeError) as error:
        raise UserError(f"{path} cannot be read as text ({error}): give {what}") from None


def _six_lines(text: str, path: Path) -> Iterator[tuple[int, str, Any]]:
    """(line, its text, item) of each item of HellaSwag as text, six lines each; else UserError."""
    lines = text.rstrip("\n").split("\n")
    for at in range(0, len(lines), 6):
        query, gold, *choices = [*lines[at : at + 6], "", ""][:6]
        if len(lines) < at + 6 or gold not in list("0123"):
            raise UserError(f"{path}, line {at + 1}: expected a beginning, the right number and "
                            "four endings, a line each: is it HellaSwag's file?")  # fmt: skip
        yield at + 1, query, {"query": query, "choices": choices, "gold": int(gold)}


def read_items(name: str, path: Path) -> list[Item]:
    """The items of a task's file, mostly of JSON lines; UserError for another file."""
    task, text, items = TASKS[name], text_of(path, "a file of JSON lines"), []
    plain = name == "hellaswag" and path.suffix in (".txt", ".bz2")
    for number, line, record in _six_lines(text, path) if plain else json_lines(text):
        if record is None:
            raise UserError(f"{path}, line {number}: expected a JSON object, got {line!r:.60}: is "
                            "it the task's file?")  # fmt: skip
        items.append(item(task.kind, record, task.delimiter, f"{path}, line {number}"))
    if not items:
        raise UserError(f"{path} has no items: give the file of {task.title}")
    return items


def file_of(name: str, *folders: Path) -> Path:
    """The file of a task in the first folder that has it, or a file itself; UserError for none.

    A folder with several that might be meant is refused, too.
    """
    ending = "raw" if TASKS[name].kind == "text" else "jsonl"
    short, found = name.removesuffix("_openai"), []
    for folder in folders:
        if folder.is_file():
            return folder
        named = [folder / f"{each}.{end}" for each in dict.fromkeys((name, short))
                 for end in (ending, *OTHER_ENDINGS.get(name, ()))]  # fmt: skip
        found = [each for each in named if each.exists()] \
            or sorted(folder.glob(f"{short}_*.{ending}"))  # fmt: skip
        if found:
            break
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        where = ", ".join(map(str, folders))
        raise UserError(f"expected one file {name}.{ending} in {where}, got {names}: give the "
                        "folder of the tasks or the file with --tasks-from, or fetch it (nanoeuler "
                        "data fetch core)")  # fmt: skip
    return found[0]


_TITLE = re.compile(r"^ = [^=].*[^=] = *$", re.M)  # "= = Section = =" is no page's title
# What is replaced, in this order: plain texts, patterns of pairs with spaces inside, plain texts.
_FIRST = [("s '", "s'"), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", ".")]
_FIRST += [(f" {mark} ", f"{mark} ") for mark in ":;.!?,"]
_PAIRS = [("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'")]
_LAST = [("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" \u00b0 ", "\u00b0"),
         (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")]  # fmt: skip


def pages(text: str) -> list[str]:
    """The pages of WikiText as published, one after another; all of it if there is no title."""
    begins = [found.start() for found in _TITLE.finditer(text)]
    edges = [0, *begins[1:], len(text)] if begins else [0, len(text)]
    return [text[a:b] for a, b in zip(edges[:-1], edges[1:], strict=True) if text[a:b].strip()]


def detokenized(page: str) -> str:
    """A page of WikiText as ordinary text."""
    for old, new in _FIRST:
        page = page.replace(old, new)
    for begin, end in _PAIRS:
        inner = rf"{re.escape(begin)}\s*([^{re.escape(end)}]*?)\s*{re.escape(end)}"
        page = re.sub(inner, lambda found, a=begin, b=end: a + found[1] + b, page)
    for old, new in _LAST:
        page = page.replace(old, new)
    return page
