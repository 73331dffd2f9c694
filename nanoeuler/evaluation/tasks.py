# Made from book/20-is-it-any-good.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-eval-tasks
"""The tasks that we know, and how their files are read.

Leaves out where files come from. CORE's shots and baselines: mlfoundations/dclm, eval_meta_data.csv
and mmlu_and_lowvar.yaml.
"""

import json
import random
import re
from pathlib import Path
from typing import NamedTuple

from nanoeuler.errors import UserError
from nanoeuler.evaluation.items import Item, item
from nanoeuler.files import check_regular

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


SEED = 1234  # from which the examples of an item are drawn, with its number: nanochat's


def with_shots(items: list[Item], shots: int) -> list[Item]:
    """The same items with `shots` others before each, answered, an empty line after each example.

    A text for a schema has the right context. UserError if there are too few items to draw from.
    """
    if shots and len(items) <= shots:
        raise UserError(f"expected more than {shots} items, to draw {shots} examples for each of "
                        f"them, got {len(items)}: choose fewer shots")  # fmt: skip
    made = []
    for i, one in enumerate(items):
        others = [*range(i), *range(i + 1, len(items))]
        drawn = [items[k] for k in random.Random(SEED + i).sample(others, shots)]
        before = "".join(x.contexts[x.gold] + x.continuations[x.gold] + "\n\n" for x in drawn)
        made.append(one._replace(contexts=tuple(before + text for text in one.contexts)))
    return made


def text_of(path: Path, what: str) -> str:
    """A file's text; UserError for one that is none, which says to give `what`."""
    check_regular(path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as text ({error}): give {what}") from None


def read_items(name: str, path: Path) -> list[Item]:
    """The items of a task's file of JSON lines; UserError for another file."""
    task, items = TASKS[name], []
    for number, line in enumerate(text_of(path, "a file of JSON lines").split("\n"), 1):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                raise UserError(f"{path}, line {number}: expected a JSON object, got "
                                f"{line!r:.60}: is it the task's file?") from None  # fmt: skip
            items.append(item(task.kind, record, task.delimiter, f"{path}, line {number}"))
    if not items:
        raise UserError(f"{path} has no items: give the file of {task.title}")
    return items


def file_of(name: str, folder: Path) -> Path:
    """The file of a task in a folder, or the file itself; UserError for none, or several."""
    if folder.is_file():
        return folder
    ending = "raw" if TASKS[name].kind == "text" else "jsonl"
    short = name.removesuffix("_openai")
    named = [folder / f"{each}.{ending}" for each in dict.fromkeys((name, short))]
    found = [each for each in named if each.exists()] \
        or sorted(folder.glob(f"{short}_*.{ending}"))  # fmt: skip
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise UserError(f"expected one file {name}.{ending} in {folder}, got {names}: give the "
                        "folder of the tasks, or the file") from None  # fmt: skip
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
