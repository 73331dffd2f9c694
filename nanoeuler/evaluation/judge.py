# Made from book/20-is-it-any-good.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-eval-judge
"""Whole tasks: likelihoods of all items, kept in a file as they come, and the scores of them."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nanoeuler.errors import UserError
from nanoeuler.evaluation.items import Item
from nanoeuler.evaluation.likelihood import (
    CpuScorer,
    Likelihood,
    Scorer,
    Span,
    likelihoods,
    prefix,
    scorers,
    span,
)
from nanoeuler.evaluation.scores import (
    Perplexities,
    Score,
    grouped,
    mean,
    perplexities,
    power,
    right,
)
from nanoeuler.evaluation.tasks import (
    OTHER_NAMES,
    TASKS,
    detokenized,
    pages,
    read_items,
    text_of,
    with_shots,
)
from nanoeuler.files import replacing, sha256_of
from nanoeuler.model.weights import Weights
from nanoeuler.tokenizer.tokenizer import Tokenizer


class Judged(NamedTuple):
    """A task's scores by measure, and what they are of."""

    task: str
    shots: int
    scores: dict[str, Score]
    cut: int  # items of which something did not fit into the context


def task_name(name: str) -> str:
    """The name of a task; UserError for one that we do not know."""
    name = OTHER_NAMES.get(name.lower(), name.lower())
    if name not in TASKS:
        raise UserError(f"expected a task, got {name!r:.60}: choose of {', '.join(TASKS)}")
    return name


def _identity(weights: Weights, path: Path, shots: int, by: Sequence[Scorer] | None) -> dict:
    """What the likelihoods of a file belong to."""
    digest = hashlib.sha256(weights.flat).hexdigest()
    found = {"weights": digest, "file": sha256_of(path), "shots": shots}
    numbers = by[0].numbers if by else CpuScorer.numbers
    return found if numbers == CpuScorer.numbers else found | {"numbers": numbers}


def _kept(path: Path, identity: dict) -> dict[int, list[Likelihood]]:
    """What a file of likelihoods has; a line that was cut off in writing is left out."""
    found: dict[int, list[Likelihood]] = {}
    if not path.exists() or not path.stat().st_size:
        return found
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines):
        try:
            record = json.loads(line) if line.endswith("\n") else None
            if number:
                found[record["item"]] = [Likelihood(*each) for each in record["found"]]
            elif record != identity:
                raise UserError(f"{path} holds likelihoods of other weights, another task, other "
                                "shots or another engine: remove it, or name another file"
                                )  # fmt: skip
        except (TypeError, ValueError, KeyError):
            if number < len(lines) - 1:
                raise UserError(f"{path}, line {number + 1}, is no line of likelihoods: remove the "
                                "file, or name another one") from None  # fmt: skip
    return found


def spans_of(tokenizer: Tokenizer, item: Item) -> list[Span]:
    """The spans of an item's pairs."""
    pairs = zip(item.contexts, item.continuations, strict=True)
    return [span(tokenizer, *each) for each in pairs]


def groups(
    numbers: Sequence[int], spans: Sequence[Sequence[Span]], most: int
) -> Iterator[list[int]]:
    """The numbers of items, the longest first, in groups of `most` ids, or a single item."""
    size = {i: sum(len(each.ids) for each in spans[i]) for i in numbers}
    longest = {i: max(len(each.ids) for each in spans[i]) for i in numbers}
    group, total = [], 0
    for i in sorted(numbers, key=lambda i: (-longest[i], i)):
        if group and total + size[i] > most:
            yield group
            group, total = [], 0
        group.append(i)
        total += size[i]
    if group:
        yield group


def find_likelihoods(
    weights: Weights, spans: Sequence[Sequence[Span]], *, by: Sequence[Scorer] | None = None,
    report: Callable[[int, int], None] | None = None, keep: tuple[Path, dict] | None = None,
) -> list[list[Likelihood]]:  # fmt: skip
    """The likelihoods of each item's spans, the longest items first.

    by: as `scorers` makes them of the weights; None: a CPU's. keep: a file, and the identity that
    its first line must have. What it has is taken, what is new is added. `report` hears of items
    done, and of how many there are.
    """
    known = _kept(*keep) if keep else {}
    if keep:  # written anew, since the last line may have been cut off
        keep[0].parent.mkdir(parents=True, exist_ok=True)
        with replacing(keep[0]) as temporary:
            temporary.write_text("".join(map(_line, [keep[1], *_rows(known)])), encoding="utf-8")
    waiting = [i for i in range(len(spans)) if i not in known]
    by = by or scorers("cpu", weights)
    for now in groups(waiting, spans, by[0].group_tokens):
        every = [each for i in now for each in spans[i]]
        found = iter(likelihoods(by, weights.config.context, every))
        new = {i: [next(found) for _ in spans[i]] for i in now}
        if keep:
            with keep[0].open("a", encoding="utf-8") as file:
                file.writelines(map(_line, _rows(new)))
        known |= new
        if report:
            report(len(known), len(spans))
    return [known[i] for i in range(len(spans))]


def _rows(known):
    return [{"item": i, "found": found} for i, found in known.items()]


def _line(row):
    return json.dumps(row) + "\n"


def scores_of(
    name: str, items: Sequence[Item], found: Sequence[Sequence[Likelihood]]
) -> dict[str, Score]:
    """The scores of a task by measure."""
    task, made = TASKS[name], {}
    for measure in task.measures:
        values = [float(right(x, y, measure)) for x, y in zip(items, found, strict=True)]
        made[measure] = grouped(values, [x.group for x in items]) if task.kind == "pair" \
            else mean(values)  # fmt: skip
    if name == "lambada_openai":
        last = [each[0] for each in found]
        made["perplexity"] = _power(mean([-each.log_p for each in last]))
        nats, tokens = sum(-x.log_p for x in last), sum(x.tokens for x in last)
        made["perplexity_token"] = _power(Score(nats / tokens, float("nan"), len(last)))
    return made


def _power(score: Score) -> Score:
    """e to a mean, with the error that this has to first order."""
    value = power(score.value)
    return Score(value, value * score.error, score.items)


def judge_text(
    weights: Weights, tokenizer: Tokenizer, path: Path, *, by: Sequence[Scorer] | None = None,
    report: Callable[[int, int], None] | None = None, as_published: bool = False,
    keep: Path | None = None,
) -> Perplexities:  # fmt: skip
    """The perplexities of a text in WikiText's form, page by page, detokenized unless as_published.

    Words and bytes are always those of the text as published. `report` hears of pages; by and keep:
    as `judge` has them.
    """
    texts, before, spans = pages(text_of(path, "WikiText's raw file")), prefix(tokenizer), []
    for page in texts:
        ids = tokenizer.encode(page if as_published else detokenized(page))
        spans.append([Span(np.concatenate([np.array(before, np.int64), ids]), len(before))])
    kept = (keep, _identity(weights, path, int(as_published), by)) if keep else None
    found = find_likelihoods(weights, spans, by=by, report=report, keep=kept)
    return perplexities([each for (each,) in found], texts)


class TaskFile(NamedTuple):
    """A task, the file of its items, and how they are asked."""

    name: str
    path: Path
    shots: int = 0  # examples before each item
    limit: int | None = None  # only so many items, the first


def judge(
    weights: Weights, tokenizer: Tokenizer, asked: TaskFile, *,
    by: Sequence[Scorer] | None = None, report: Callable[[int, int], None] | None = None,
    keep: Path | None = None,
) -> Judged:  # fmt: skip
    """The scores of a task.

    by: as `scorers` makes them; keep: a file of JSON lines in which likelihoods are kept, and from
    which an interrupted run goes on. UserError for a file that is not the task's.
    """
    name, path, shots, limit = task_name(asked.name), *asked[1:]
    items = with_shots(read_items(name, path), shots, limit)
    kept = (keep, _identity(weights, path, shots, by)) if keep else None
    spans = [spans_of(tokenizer, x) for x in items]
    found = find_likelihoods(weights, spans, by=by, report=report, keep=kept)
    cut = sum(any(len(each.ids) - 1 > weights.config.context for each in some) for some in spans)
    return Judged(name, shots, scores_of(name, items, found), cut)


def is_core(judged: Sequence[Judged]) -> bool:
    """Whether all that CORE-20 is the mean of is among these."""
    there = {(each.task, each.shots) for each in judged}
    return all((name, shots) in there for name, task in TASKS.items() for shots in task.core)


def core(judged: Sequence[Judged]) -> Score:
    """The mean of centred accuracies over CORE's tasks among these; CORE-20 if `is_core`.

    A choice counts by acc_token, the smallest mean loss, as nanochat has it.
    """
    values, errors = [], []
    for each in judged:
        task = TASKS[each.task]
        if each.shots in task.core:
            score = each.scores.get("acc_token", each.scores["acc"])
            values.append((score.value - task.chance) / (1 - task.chance))
            errors.append(score.error / (1 - task.chance))
    if not values:
        raise UserError("expected scores of CORE's tasks with CORE's shots, got none")
    error = sum(x * x for x in errors) ** 0.5 / len(values)
    return Score(sum(values) / len(values), error, len(values))
