"""Every exercise has a stub, a check and a solution, and no check takes a wrong answer.

The folder exercises/ beside this file holds the wrong answers, one file for a chapter. To see how
many of them each exercise has: python tests/test_exercises.py
"""

import importlib.util
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.exercises import pair, verdict
from helpers.tiers import thinned

from nanoeuler.book import build, exercises

ROOT = Path(__file__).parents[1]
LEAST = 10  # wrong answers to each exercise
RIGHT, WRONG = range(5), range(3)  # seeds for which a solution is taken, a wrong answer refused


# Of the wrong answers one in three is tried before the long tests, which try each for two seeds. Of
# those that take tenths of a second, most of them kernels that the emulator plays, one in five.
SLOW = {"backwards", "without", "squared_relu", "swizzled", "sums", "step", "bytes", "clocks",
        "after_power_cut"}  # fmt: skip


def some(seeds, few):
    """A test over the first few seeds, and a long one over the others."""
    return pytest.mark.parametrize("seeds", [
        pytest.param(seeds[:few], id="few seeds"),
        pytest.param(seeds[few:], id="more seeds", marks=pytest.mark.long),
    ])  # fmt: skip


def load(path):
    """A file of wrong answers, as a module."""
    spec = importlib.util.spec_from_file_location(f"answers_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FILES = [load(path) for path in sorted((ROOT / "tests" / "exercises").glob("c*.py"))]
EXERCISES = [
    pytest.param(file, name, id=f"{file.CHAPTER}-{name}")
    for file in FILES
    for name in dict.fromkeys(row[0] for row in file.ANSWERS)
]


def quietly(file, name, seed, old="", new=""):
    """The verdict, whatever a wrong answer divides by."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return verdict(file.CHAPTER, name, seed, old, new, **file.NAMES)


def exercises_of(chapter):
    """The exercises of a chapter, as the book's tool finds them."""
    text = chapter.read_text(encoding="utf-8")
    return exercises.exercises(chapter.stem, text, build.code_cells(text))


@pytest.mark.parametrize("chapter", build.chapters(ROOT), ids=lambda path: path.stem)
def test_each_exercise_has_a_stub_a_check_and_a_solution(chapter):
    bare = []
    for one in exercises_of(chapter):
        checks = {word for cell in one.cells for word in re.findall(r"def check_(\w+)\(", cell)}
        made = {word for cell in one.cells for word in re.findall(r"def solution_(\w+)\(", cell)}
        if not (checks and checks <= made) or re.search(r"def (check|solution)_", one.cells[0]):
            bare.append(one.title)
    assert not bare, f"{chapter.name}: no stub, check and solution in this order: {bare}"


@pytest.mark.parametrize("chapter", thinned(build.chapters(ROOT), 6), ids=lambda path: path.stem)
def test_the_tool_writes_each_stub_and_finds_what_its_judge_needs(chapter, monkeypatch):
    monkeypatch.chdir(ROOT / "book")  # where chapters run
    for one in exercises_of(chapter):
        made = exercises.parts(one)
        compile(exercises.stub_file(one), one.number, "exec")
        if chapter.stem not in {file.CHAPTER for file in FILES}:
            continue  # whose solutions need more than a function: their own tests judge them
        answer = "\n".join(exercises.context([made.solution], {f"solution_{made.check}"}))
        plan = {
            "context": exercises.provided(one), "chapter": one.chapter, "path": one.number,
            "check": f"check_{made.check}", "answer": made.answer, "call": made.call,
            "text": f"{answer}\n{made.answer} = solution_{made.check}\n", "seeds": [7, 8],
        }  # fmt: skip
        assert exercises.judge(plan)["verdict"] == "right", one.title


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.CHAPTER)
def test_wrong_answers_are_there_for_each_exercise_of_the_chapter(file):
    found = exercises_of(ROOT / "book" / f"{file.CHAPTER}.md")
    names = {exercises.parts(one).check for one in found}
    counts = {name: sum(row[0] == name for row in file.ANSWERS) for name in names}
    assert {row[0] for row in file.ANSWERS} == names and min(counts.values()) >= LEAST, counts
    assert len({row[:2] for row in file.ANSWERS}) == len(file.ANSWERS), "two have the same name"


@some(RIGHT, 1)  # its chapter takes it, too
@pytest.mark.parametrize("file, name", EXERCISES)
def test_the_solution_is_taken(file, name, seeds):
    for seed in seeds:
        taken, said = quietly(file, name, seed)
        assert taken, f"seed {seed}: {said}"


def accepted(file, name, seeds, every=1):
    """Of one in `every` wrong answers that a check takes: what is wrong, and the seed."""
    rows = [row for row in file.ANSWERS if row[0] == name]
    for i, (_, what, old, new) in enumerate(rows):
        assert old in pair(file.CHAPTER, name)[1], f"{what}: {old!r} is not in the solution"
        tried = seeds if i % every == 0 else ()
        yield from ((what, seed) for seed in tried if quietly(file, name, seed, old, new)[0])


@some(WRONG, 1)
@pytest.mark.parametrize("file, name", EXERCISES)
def test_wrong_answers_are_refused(file, name, seeds):
    few = 5 if name in SLOW else 3
    wrong = list(accepted(file, name, seeds, few if len(seeds) == 1 else 1))
    assert not wrong, f"the check of {name} takes (what is wrong, seed): {wrong}"


def test_a_wrong_answer_that_is_taken_is_named():
    """As one is that is none: the check has to take it."""
    file, name = EXERCISES[0].values
    right = (name, "nothing", "return", "return")
    one = SimpleNamespace(CHAPTER=file.CHAPTER, NAMES=file.NAMES, ANSWERS=[*file.ANSWERS, right])
    assert list(accepted(one, name, WRONG)) == [("nothing", seed) for seed in WRONG]


def test_the_table_of_wrong_answers_can_be_printed():
    """Started as a program, this file finds what it imports."""
    subprocess.run([sys.executable, "-c", "import test_exercises"], cwd=ROOT / "tests", check=True)


def main():
    """Print how many wrong answers each exercise has, and how many of them are refused."""
    print(f"{'chapter':30}{'exercise':24}{'wrong answers':>14}{'refused':>9}")
    for file in FILES:
        for name in dict.fromkeys(row[0] for row in file.ANSWERS):
            rows = [row for row in file.ANSWERS if row[0] == name]
            killed = [not any(quietly(file, name, seed, *row[2:])[0] for seed in WRONG)
                      for row in rows]  # fmt: skip
            print(f"{file.CHAPTER:30}{name:24}{len(rows):14}{sum(killed):9}")


if __name__ == "__main__":
    main()
