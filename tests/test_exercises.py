"""Every exercise has a stub, a check and a solution, and no check takes a wrong answer.

The folder exercises/ beside this file holds the wrong answers, one file for a chapter. To see how
many of them each exercise has: python tests/test_exercises.py
"""

import importlib.util
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from helpers.exercises import pair, verdict

from nanoeuler import book

ROOT = Path(__file__).parents[1]
LEAST = 10  # wrong answers to each exercise
RIGHT, WRONG = range(5), range(3)  # seeds for which a solution is taken, a wrong answer refused
HEADING = re.compile(r"(?m)^### Exercise: (.*)$")


def load(path):
    """A file of wrong answers, as a module."""
    spec = importlib.util.spec_from_file_location(f"answers_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FILES = [load(path) for path in sorted((ROOT / "tests" / "exercises").glob("c*.py"))]
MUTANTS = [
    pytest.param(file, *row, id=f"{file.CHAPTER}-{row[0]}-{row[1]}".replace(" ", "_"))
    for file in FILES
    for row in file.ANSWERS
]
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


def sections(chapter):
    """(title, cells) of each section of a chapter that is headed as an exercise."""
    parts = re.split(r"(?m)^(?=#{1,3} )", chapter.read_text(encoding="utf-8"))
    for part in parts:
        if title := HEADING.match(part):
            yield title[1], ["\n".join(lines) for _, lines in book.code_cells(part)]


@pytest.mark.parametrize("chapter", book.chapters(ROOT), ids=lambda path: path.stem)
def test_each_exercise_has_a_stub_a_check_and_a_solution(chapter):
    bare = []
    for title, cells in sections(chapter):
        checks = {word for cell in cells for word in re.findall(r"def check_(\w+)\(", cell)}
        answers = {word for cell in cells for word in re.findall(r"def solution_(\w+)\(", cell)}
        if not (checks and checks <= answers) or re.search(r"def (check|solution)_", cells[0]):
            bare.append(title)
    assert not bare, f"{chapter.name}: no stub, check and solution in this order: {bare}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.CHAPTER)
def test_wrong_answers_are_there_for_each_exercise_of_the_chapter(file):
    cells = [cell for _, part in sections(ROOT / "book" / f"{file.CHAPTER}.md") for cell in part]
    names = {word for cell in cells for word in re.findall(r"def check_(\w+)\(", cell)}
    counts = {name: sum(row[0] == name for row in file.ANSWERS) for name in names}
    assert {row[0] for row in file.ANSWERS} == names and min(counts.values()) >= LEAST, counts
    assert len({row[:2] for row in file.ANSWERS}) == len(file.ANSWERS), "two have the same name"


@pytest.mark.parametrize("file, name", EXERCISES)
def test_the_solution_is_taken(file, name):
    for seed in RIGHT:
        taken, said = quietly(file, name, seed)
        assert taken, f"seed {seed}: {said}"


@pytest.mark.parametrize("file, name, what, old, new", MUTANTS)
def test_a_wrong_answer_is_refused(file, name, what, old, new):
    assert pair(file.CHAPTER, name)[1].count(old) == 1, f"{old!r} is not there exactly once"
    for seed in WRONG:
        taken, said = quietly(file, name, seed, old, new)
        assert not taken, f"{what}, seed {seed}: {said}"


def main():
    """Print how many wrong answers each exercise has, and how many of them are refused."""
    print(f"{'chapter':24}{'exercise':24}{'wrong answers':>14}{'refused':>9}")
    for file in FILES:
        for name in dict.fromkeys(row[0] for row in file.ANSWERS):
            rows = [row for row in file.ANSWERS if row[0] == name]
            killed = [not any(quietly(file, name, seed, *row[2:])[0] for seed in WRONG)
                      for row in rows]  # fmt: skip
            print(f"{file.CHAPTER:24}{name:24}{len(rows):14}{sum(killed):9}")


if __name__ == "__main__":
    main()
