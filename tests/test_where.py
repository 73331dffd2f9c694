"""Where is it, and how this compares: every place named exists, every figure is a measured one."""

import ast
import functools
import re

import pytest

from nanoeuler import measurements
from nanoeuler.files import project_root

ROOT = project_root()
WHERE = (ROOT / "book" / "where-is-it.md").read_text(encoding="utf-8")
COMPARE = (ROOT / "book" / "how-this-compares.md").read_text(encoding="utf-8")
ITEMS = [line for line in WHERE.split("\n") if line.startswith("- ")]
PLACE = re.compile(r"`(nanoeuler/[\w/]+\.py): ([\w.]+)`")


@functools.cache
def headings():
    """The labels of all sections of the book, and the heading that each stands above."""
    pages = [page.read_text(encoding="utf-8") for page in ROOT.glob("book/*.md")]
    labelled = re.compile(r"^\(([\w-]+)\)=\n+#+ (.+)$", re.M)
    return {label: heading for page in pages for label, heading in labelled.findall(page)}


@functools.cache
def defined(path):
    """What the module defines: functions and classes, and methods as Class.method."""
    names = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (inner for inner in node.body if isinstance(inner, ast.FunctionDef))
            names.update(f"{node.name}.{inner.name}" for inner in methods)
    return names


@pytest.mark.parametrize("item", ITEMS, ids=range(len(ITEMS)))
def test_an_answer_has_all_its_parts(item):
    question = re.match(r"- \*\*([^*]+\?)\*\* ", item)
    assert question, f"no question in bold begins {item!r}"
    assert re.search(r"\]\(#[\w-]+\)", item), f"no section in {item!r}"
    assert PLACE.search(item), f"no module and name in {item!r}"
    assert re.search(r" Tests: (`tests/\w+\.py`(, )?)+\.$", item), f"no tests end {item!r}"


@pytest.mark.parametrize("page", [WHERE, COMPARE], ids=["where", "compare"])
def test_sections_that_are_linked_exist(page):
    linked = set(re.findall(r"\]\(#([\w-]+)\)", page))
    assert linked and linked <= headings().keys(), linked - headings().keys()


def test_links_have_the_words_of_their_headings():
    for words, label in re.findall(r"\[([^\]]+)\]\(#([\w-]+)\)", "\n".join(ITEMS)):
        assert words == headings()[label]


def test_modules_define_what_is_named():
    places = PLACE.findall(WHERE)
    assert len(places) >= len(ITEMS)
    assert len(places) == WHERE.count("`nanoeuler/"), "a module is spelled in another way"
    for path, name in places:
        assert (ROOT / path).is_file(), path
        assert name in defined(path), f"{path} does not define {name}"


def test_a_name_is_in_the_section_that_is_linked():
    """The first name of an answer was exported by a cell of one of the sections it links."""
    for item in ITEMS:
        path, name = PLACE.search(item).groups()
        section, heads = None, []
        for line in (ROOT / path).read_text(encoding="utf-8").split("\n"):
            if line.startswith("# %% "):
                section = line.removeprefix("# %% ")
            if re.match(rf"(def|class) {name.split('.')[0]}\b", line):
                heads.append(section)
        assert set(heads) & set(re.findall(r"\(#([\w-]+)\)", item)), item


def test_files_of_tests_exist():
    files = set(re.findall(r"`(tests/[\w./]+)`", WHERE))
    assert files
    for file in files:
        assert (ROOT / file).is_file(), file


def test_no_question_is_asked_twice_and_there_are_enough():
    questions = [item.split("**")[1] for item in ITEMS]
    assert len(set(questions)) == len(questions) >= 40


@pytest.mark.parametrize("word", [
    "GQA", "MTP", "RoPE", "RMSNorm", "LayerNorm", "SwiGLU", "GELU", "byte-pair", "KV cache",
    "FlashAttention", "dQ", "dK and dV", "ZeRO-1", "all-reduce", "acceptance rule", "DPO", "LoRA",
    "log-sum-exp", "AdamW", "clipped", "learning rate", "document", "saved", "CUDA graph",
    "emulator", "registers", "memory", "doctor", "stream", "chat template", "bits per byte",
])  # fmt: skip
def test_what_readers_ask_for_is_answered(word):
    assert any(word in item for item in ITEMS), word


# A line of the page's table of figures: its words, where its row is (file, what, case, engine,
# peer), and how its two values are written. The last columns are the device and the date.
FIGURES = [
    ("training step, `gpt2-124m`, 16 × 1024 tokens, bf16", "torch.compile",
     ("gpu", "training step", "gpt2-124m 16x1024 bf16", "cuda", "torch compile"), "{:.1f} ms"),
    ("the same, PyTorch with as many columns as ours", "torch.compile",
     ("gpu", "training step", "gpt2-124m 16x1024 bf16", "cuda", "torch compile, padded"),
     "{:.1f} ms"),
    ("memory at its peak, the first of these", "torch.compile",
     ("gpu", "peak memory", "gpt2-124m 16x1024 bf16", "cuda", "torch compile"), "{:.2f} GiB"),
    ("loss after 500 such steps", "torch.compile",
     ("gpu", "loss after 500 steps", "gpt2-124m 16x1024 bf16", "cuda", "torch compile"),
     "{:.3f} nats"),
    ("training step, `euler-116m`, 64 × 512 tokens, bf16", "torch.compile",
     ("gpu", "training step", "euler-116m 64x512 bf16", "cuda", "torch compile"), "{:.1f} ms"),
    ("tokens per second and GPU, `gpt2-124m`, two GPUs", "ours on one GPU",
     ("ranks", "tokens per second a GPU", "gpt2-124m 64x1024 bf16, 2 GPUs", "cuda", "1 GPU"),
     "{:,.0f} tokens/s"),
    ("attention forward, 4 × 16 heads of 128, 4096 positions", "cuDNN",
     ("kernels", "attention forward", "B4 H16 T4096 D128 causal bf16", "cuda", "cuDNN"),
     "{:.3f} ms"),
    ("attention backward, the same", "cuDNN",
     ("kernels", "attention backward", "B4 H16 T4096 D128 causal bf16", "cuda", "cuDNN"),
     "{:.3f} ms"),
    ("product of two matrices, 8192 × 8192 × 8192", "cuBLAS",
     ("kernels", "matmul", "NT 8192x8192x8192 bf16", "cuda", "cuBLAS"), "{:.3f} ms"),
    ("gradient of the output matrix, 50304 × 768 × 16384", "cuBLAS",
     ("kernels", "matmul", "TN 50304x768x16384 bf16 to float32", "cuda", "cuBLAS"), "{:.3f} ms"),
    ("held-out bits per byte of the base model, after equal time", "torch.compile",
     ("quality", "bits per byte, held-out books", "base model, equal wall time", "cuda",
      "torch compile"), "{:.4f} bits"),
    ("one token, `gpt2-124m`, one text", "torch.compile",
     ("talking", "one token", "gpt2-124m, batch 1, bf16", "cuda", "torch compile"), "{:.3f} ms"),
    ("tokens per second, a Llama of 15M, one thread", "llama2.c",
     ("generation", "tokens per second", "llama 15M, batch 1, 1 thread", "cpu", "llama2.c"),
     "{:.1f} tokens/s"),
    ("training step, `small`, batch 16", "torch.compile",
     ("cpu", "training step", "small, batch 16", "cpu", "torch compile"), "{:.1f} ms"),
    ("learning 4,096 tokens from 10 MB", "rustbpe",
     ("tokenizer", "train", "V=4096, 10 MB", "nanoeuler", "rustbpe"), "{:.2f} s"),
    ("encoding 10 MB by them", "tiktoken",
     ("tokenizer", "encode", "V=4096, 10 MB", "nanoeuler", "tiktoken"), "{:.3f} s"),
    ("a product of 64 × 64 matrices in the emulator", "numba's simulator",
     ("kernels", "emulator", "matmul 64x64, tiles of 16", "paper", "numba simulator"), "{:.2f} s"),
]  # fmt: skip


def measured(file, *key):
    """The one value and peer's value that the rows of `key` have; device and date."""
    fields = ("what", "case", "engine", "peer")
    rows = [row for row in measurements.load(file) if tuple(row[f] for f in fields) == key]
    assert rows, f"{file} has no row {key}"
    found = {(row["value"], row["peer_value"], row["device"], row["date"]) for row in rows}
    assert len(found) == 1, f"rows of {key} disagree: {found}"
    return found.pop()


def line_of(words, peer, key, form):
    ours, theirs, device, date = measured(*key)
    ratio = f"{ours / theirs:.3f}" if ours / theirs < 0.05 else f"{ours / theirs:.2f}"
    values = f"{form.format(ours)}, {peer} {form.format(theirs)}; ratio {ratio}"
    return f"- **{words}:** {values} ({device}, {date})"


@pytest.mark.parametrize("figure", FIGURES, ids=[words for words, *_ in FIGURES])
def test_a_figure_is_that_of_its_row(figure):
    assert line_of(*figure) in COMPARE.split("\n"), f"expected {line_of(*figure)}"


def test_there_is_no_other_figure():
    """The lines are those above, and outside them is one decimal, of a row as well."""
    before, label, after = COMPARE.partition("\n(sec-compare-figures)=\n")
    assert label
    lines = [line for line in after.split("\n") if line.startswith("- ")]
    assert len(lines) == len(FIGURES), "a line has no row"
    prose = before + "\n".join(line for line in after.split("\n") if not line.startswith("- "))
    key = "bits per byte after five minutes", "small, docs, 2 cores", "cpu", None
    bits, *_ = measured("faster", *key)
    assert re.findall(r"\d+\.\d+|\d+ %", prose) == [f"{bits:.3f}"]


PROJECTS = (
    "nanoeuler", "NanoEuler", "llm.c", "nanoGPT", "nanochat", "llama2.c", "minbpe",
    "LLMs-from-scratch", "d2l",
)  # fmt: skip


def test_the_lines_of_what_each_has_name_projects_once_and_in_one_order():
    lists = COMPARE.partition("(sec-compare-table)=")[2].partition("(sec-compare-others)=")[0]
    lines = [line for line in lists.split("\n") if line.startswith("- ")]
    assert len(lines) == 32
    for line in lines:
        what, who = re.fullmatch(r"- \*\*(.+):\*\* (.+)\.", line).groups()
        marks = dict.fromkeys(("", "partly", "not verified:"))
        for part in who.split("; "):
            mark, names = re.fullmatch(r"(partly|not verified:)? ?(.+)", part).groups(default="")
            assert marks[mark] is None, f"{what}: {mark or 'yes'} twice"
            marks[mark] = names.split(", ")
        for names in filter(None, marks.values()):
            assert names == [each for each in PROJECTS if each in names], what
        everyone = [name for names in marks.values() for name in names or ()]
        assert len(set(everyone)) == len(everyone), f"{what}: a project stands in two lists"
    assert "\n|" not in lists, "a wide table scrolls on a phone"
