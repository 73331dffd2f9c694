"""The glossary: its links lead somewhere, and its terms are many, sorted, and each there once."""

import re
from pathlib import Path

import pytest

BOOK = Path(__file__).parents[1] / "book"
PAGE = (BOOK / "glossary.md").read_text(encoding="utf-8")
BLOCK = PAGE.split("```{glossary}\n")[1].split("\n```")[0]
ENTRIES = [entry.split("\n") for entry in BLOCK.split("\n\n")]
TERMS = [entry[0] for entry in ENTRIES]


def test_every_link_has_a_label():
    texts = [path.read_text(encoding="utf-8") for path in BOOK.glob("*.md")]
    labels = {label for text in texts for label in re.findall(r"(?m)^\(([\w-]+)\)=$", text)}
    assert set(re.findall(r"\]\(#([^)]*)\)", PAGE)) <= labels


def test_terms_are_many_sorted_and_each_there_once():
    folded = [term.casefold() for term in TERMS]
    assert len(folded) >= 70
    assert len(set(folded)) == len(folded)
    assert folded == sorted(folded)


def test_every_term_is_explained_and_ends_with_a_link():
    for term, *lines in ENTRIES:
        assert term == term.strip() != ""
        assert lines and all(line.startswith("  ") for line in lines), term
        assert re.search(r"See \[[^]]+\]\(#[\w-]+\)\.$", lines[-1]), term


@pytest.mark.parametrize("page", sorted(BOOK.glob("*.md")), ids=lambda page: page.stem)
def test_every_term_that_a_page_links_is_in_the_glossary(page):
    roles = re.findall(r"\{term\}`([^`]+)`", page.read_text(encoding="utf-8"))
    wanted = {re.sub(r".*<(.+)>", r"\1", role, flags=re.S) for role in roles}
    assert wanted <= set(TERMS), wanted - set(TERMS)
