"""Notebooks say in plain Markdown what the chapters say in MyST; Sphinx gets the chapters' own."""

import re

import pytest

from nanoeuler.book import build
from nanoeuler.book.markdown import Place, places, plain
from nanoeuler.errors import UserError
from nanoeuler.files import project_root

ROOT = project_root()
KNOWN = {
    "sec-a": Place("1.ipynb", "About a"), "eq-a": Place("1.ipynb", "(3)"),
    "eq-b": Place("2.ipynb", "(1)"),
}  # fmt: skip


@pytest.mark.parametrize("text, said", [
    ("(sec-a)=\n## About a", '<a id="sec-a"></a>\n\n## About a'),
    ("$$\nx = 1\n$$ (eq-a)", '<a id="eq-a"></a>\n\n$$\nx = 1\n\\tag{3}\n$$'),
    ("$$\ny\n$$\n\nso\n\n$$\nx\n$$ (eq-a)",
     '$$\ny\n$$\n\nso\n\n<a id="eq-a"></a>\n\n$$\nx\n\\tag{3}\n$$'),
    ("by {eq}`eq-a` and {eq}`eq-b`", "by [(3)](#eq-a) and [(1)](2.ipynb#eq-b)"),
    ("[so](#sec-a), [](#sec-a), [](#eq-b)",
     "[so](#sec-a), [About a](#sec-a), [(1)](2.ipynb#eq-b)"),
    ("a {term}`token` of {term}`the text <corpus>`",
     "a [token](glossary.ipynb#term-token) of "
     "[the text](glossary.ipynb#term-corpus)"),
    (":::{note}\none\n\ntwo\n:::\nthree", "> **Note.** one\n>\n> two\nthree"),
    ("```{glossary}\nKV cache\n  Keys.\n\nB\n  How many.\n```\nend",
     '<a id="term-kv-cache"></a>**KV cache.** Keys.\n\n'
     '<a id="term-b"></a>**B.** How many.\n\nend'),
    (":::{admonition} Why?\nso\n:::", "> **Why?** so"),
    ("`(sec-a)=`, `{eq}`, [x](#elsewhere), {eq}`unknown`, $$x$$ (eq-a)",) * 2,
    ("    (sec-a)=\n(sec-z) =",) * 2,
])  # fmt: skip
def test_each_mark_is_said_plainly_and_nothing_else_changes(text, said):
    assert plain(text, "1.ipynb", KNOWN) == said


def test_a_label_names_its_heading_and_an_equation_its_number():
    text = "(a)=\n# One\n\n$$\nx\n$$\n\n$$\ny\n$$ (b)\n\n(c)=\n\n## Two `x`\n\n"
    text += "$$\nz\n$$ (d)\n(e)=\nno"
    assert places("f", text) == {
        "a": Place("f", "One"), "b": Place("f", "(1)"), "c": Place("f", "Two `x`"),
        "d": Place("f", "(2)"), "e": Place("f", ""),
    }  # fmt: skip


MARKS = re.compile(
    r"^\([a-z0-9-]+\)=$|^:::|(?<!`)\{(?:eq|term|ref)\}`|^\$\$ \([a-z]|\[\]\(|^```\{", re.M
)


@pytest.mark.parametrize("chapter", build.texts(ROOT), ids=lambda path: path.stem)
def test_no_notebook_has_a_mark_and_its_links_lead_somewhere(chapter):
    notebook = build.stored(chapter)
    prose = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert not MARKS.findall(prose)
    for file, label in re.findall(r"\]\(([a-z0-9-]*\.ipynb)?#([a-z0-9-]+)\)", prose):
        path = ROOT / "book" / file if file else chapter.with_suffix(".ipynb")
        assert f'<a id=\\"{label}\\"></a>' in path.read_text(encoding="utf-8"), (file, label)


@pytest.mark.parametrize("chapter", build.texts(ROOT), ids=lambda path: path.stem)
def test_each_picture_says_in_words_what_it_shows(chapter):
    """A drawing by its <title>, any other by the alternative text of its cell."""
    for cell in build.stored(chapter).cells:
        shown = [output.get("data", {}) for output in cell.get("outputs", [])]
        if any("image/png" in data for data in shown):
            said = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
            assert len(said.split()) > 5, f"no alternative text: {cell.source[:80]}"
        for data in shown:
            assert "<title>" in data.get("image/svg+xml", "<title>"), cell.source[:80]


PLACE = r"(?:chapters?|appendix|appendices) "
NAMED = re.compile(rf"\[(?:{PLACE})?(\d\d?[a-z]?|[A-Z])(?:'s)?\]\(#([\w-]+)\)", re.I)


@pytest.fixture(scope="module")
def known():
    return build.labels(ROOT)


@pytest.mark.parametrize("text", build.texts(ROOT), ids=lambda path: path.stem)
def test_a_link_that_names_a_chapter_leads_to_it(text, known):
    """Chapters are renumbered now and then: "chapter 11b" has to be the one with the label."""
    for number, label in NAMED.findall(text.read_text(encoding="utf-8")):
        file = known[label].file.split("-")[0].lstrip("0")
        assert file.lower() == number.lower(), f"[{number}](#{label}) leads to {known[label].file}"


@pytest.mark.parametrize("text", build.texts(ROOT), ids=lambda path: path.stem)
def test_chapters_that_are_named_exist(text):
    there = {path.stem.split("-")[0].lstrip("0").lower() for path in build.chapters(ROOT)}
    prose = re.sub(r"`[^`\n]*`", "", text.read_text(encoding="utf-8"))
    named = re.findall(rf"\b{PLACE}(\d\d?[a-z]?|[A-Z])\b", prose)
    assert {name.lower() for name in named} <= there


@pytest.fixture
def two(tmp_path):
    """A book of two chapters, run: the second one speaks of the first."""
    (tmp_path / "book").mkdir()
    (tmp_path / "nanoeuler").mkdir()
    (tmp_path / "_toc.yml").write_text("chapters:\n- file: book/01-a\n- file: book/02-b\n")
    head = "---\njupytext:\n  text_representation:\n    format_name: myst\n---\n"
    code = "```{code-cell} ipython3\nprint(6 * 7)\n```\n"
    (tmp_path / "book" / "01-a.md").write_text(f"{head}(sec-a)=\n# One\n\n{code}")
    (tmp_path / "book" / "02-b.md").write_text(f"{head}# Two\n\nAs [](#sec-a) has it.\n\n{code}")
    for chapter in build.chapters(tmp_path):
        build.run(tmp_path, chapter)
    return tmp_path


def change(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_prose_is_renewed_without_a_run_and_outputs_stay(two):
    assert list(build.problems(two)) == [] == build.renew(two)
    before = (two / "book" / "02-b.ipynb").read_text()
    change(two / "book" / "01-a.md", "# One", "# The first")
    assert len(list(build.problems(two))) == 2  # the heading, and the chapter that names it
    assert build.renew(two) == ["book/01-a.ipynb", "book/02-b.ipynb"]
    assert list(build.problems(two)) == []
    after = (two / "book" / "02-b.ipynb").read_text()
    assert after == before.replace("[One]", "[The first]") and '"42\\n"' in after


def test_a_notebook_whose_code_has_changed_must_be_run(two):
    change(two / "book" / "01-a.md", "6 * 7", "6 * 8")
    before = (two / "book" / "01-a.ipynb").read_bytes()
    assert build.renew(two) == [] and (two / "book" / "01-a.ipynb").read_bytes() == before
    assert len(list(build.problems(two))) == 1
    with pytest.raises(UserError, match="run 01-a"):
        build.pages(two)
    (two / "book" / "01-a.ipynb").unlink()
    assert build.renew(two) == []
    with pytest.raises(UserError, match="run 01-a"):
        build.pages(two)


def test_sphinx_reads_the_text_as_it_is_written_with_all_outputs(two):
    made = build.pages(two) / "book" / "02-b.ipynb"
    text = made.read_text()
    assert "As [](#sec-a) has it." in text and '"42\\n"' in text
    assert made.stat().st_mtime_ns == (two / "book" / "02-b.ipynb").stat().st_mtime_ns
    (two / "build" / "pages" / "book" / "stray.md").write_text("")
    (two / "book" / "about.md").write_text("# About\n\nSee [](#sec-a).\n")
    assert build.renew(two) == ["book/about.ipynb"]  # a page without code needs no run
    assert "See [One](01-a.ipynb#sec-a)." in (two / "book" / "about.ipynb").read_text()
    names = {path.name for path in (build.pages(two) / "book").iterdir()}
    assert names == {"01-a.ipynb", "02-b.ipynb", "about.ipynb"}
    assert "See [](#sec-a)." in (two / "build" / "pages" / "book" / "about.ipynb").read_text()
