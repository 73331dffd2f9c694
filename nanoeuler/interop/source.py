# Made from book/19c-in-and-out.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-in-out-kinds
"""One way in and one way out for other people's models, whatever format they are in.

Leaves out the formats themselves (huggingface.py, gguf_model.py, llama2c.py), and what a run is
(the room training).
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nanoeuler.errors import UserError
from nanoeuler.files import check_regular, sha256_of
from nanoeuler.interop import gguf_model, huggingface, llama2c
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.weights import Weights
from nanoeuler.tokenizer.others import (
    gguf_metadata,
    read_llama2c_tokenizer,
    read_sentencepiece,
    read_tokenizer_json,
    tokenizer_of_gguf,
    write_tokenizer_json,
)
from nanoeuler.tokenizer.tokenizer import Tokenizer

HUB = "hf:"  # before the name of a repository of the Hub, OWNER/NAME
RUN, FOLDER, GGUF, LLAMA2C, PICKLE, NOTHING = (
    "run", "Hugging Face folder", "GGUF", "llama2.c", "pickle", "nothing",
)  # fmt: skip
# How a file begins; the first that fits counts. The last two are what torch.save writes, and a bare
# pickle. The third is version 0 of llama2.c with 640 channels: no pickle continues with zeros.
MAGIC = {b"GGUF": GGUF, b"24ka": LLAMA2C, (640).to_bytes(4, "little"): LLAMA2C,
         b"PK\x03\x04": PICKLE, b"\x80\x02": PICKLE}  # fmt: skip


class Imported(NamedTuple):
    """A model of others: its parts, and where it came from, in a line."""

    config: ModelConfig
    tokenizer: Tokenizer
    weights: Weights
    origin: str


def kind_of(source: str | Path) -> str:
    """The kind of `source`, by its content: RUN, FOLDER, GGUF, LLAMA2C, PICKLE or NOTHING.

    A folder without a config.json is RUN (one that has not begun, or none), or PICKLE.
    """
    path = Path(source)
    if path.is_dir():
        if not (path / "config.json").exists():
            pickles = [each for name in huggingface.PICKLES for each in path.glob(name)]
            return PICKLE if pickles else RUN
        if any(path.glob("step-*")):
            return RUN  # whatever its config.json is by now
        record = huggingface.read_json(path / "config.json")
        return FOLDER if "model_type" in record or "architectures" in record else RUN
    if not path.exists():
        return NOTHING
    check_regular(path)
    try:
        with open(path, "rb") as file:
            head = file.read(4)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}): check the path and "
                        "the permissions") from None  # fmt: skip
    return next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), LLAMA2C)

def is_source(path: str | Path) -> bool:
    """Whether `path` is a model of others, for `read_source`, and neither a run nor missing."""
    return kind_of(path) not in (RUN, NOTHING)


# %% sec-in-out-read
def _tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer of a folder of the Hub."""
    if (folder / "tokenizer.json").exists():
        return read_tokenizer_json(folder)
    if (folder / "tokenizer.model").exists():
        return read_sentencepiece(folder / "tokenizer.model")
    raise UserError(f"expected tokenizer.json or tokenizer.model in {folder}, but there is none: "
                    "fetch the whole model, or name a tokenizer (--tokenizer)")  # fmt: skip

def _given(path: Path, vocab_size: int) -> Tokenizer:
    """A tokenizer from a file that somebody names."""
    if path.suffix == ".bin":
        return read_llama2c_tokenizer(path, vocab_size)
    return read_sentencepiece(path) if path.suffix == ".model" else read_tokenizer_json(path)

def _beside(path: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer.bin next to llama2.c's checkpoint."""
    file = path.with_name("tokenizer.bin")
    if not file.exists():
        raise UserError(f"expected {file}, the tokenizer of {path.name}, but it is not there: copy "
                        "it there, or name it (--tokenizer)")  # fmt: skip
    return read_llama2c_tokenizer(file, vocab_size)


def read_source(
    source: str | Path, context: int | None = None, tokenizer: str | Path | None = None
) -> Imported:
    """The model at `source`: a folder of the Hub, a .gguf file, llama2.c's .bin, or hf:OWNER/NAME.

    context: positions, at most the model's; None: all. tokenizer: a file, in place of the source's
    own. UserError in one line for a model that ours can't be, and for a damaged one.
    """
    origin, path = str(source), Path(source)
    if origin.startswith(HUB):
        path = fetch(origin.removeprefix(HUB))
    kind = kind_of(path)
    own = None if tokenizer is None else Path(tokenizer)
    if kind == FOLDER:
        config, weights = huggingface.read_folder(path, context)
        words = _given(own, config.vocab_size) if own else _tokenizer_of(path)
    elif kind == GGUF:
        config, weights, metadata = gguf_model.read_model(path, context)
        words = _given(own, config.vocab_size) if own else tokenizer_of_gguf(metadata)
    elif kind == LLAMA2C:
        config, weights = llama2c.read_model(path, context)
        words = _given(own, config.vocab_size) if own else _beside(path, config.vocab_size)
    else:
        raise UserError(f"expected a model at {source}, {EXPECTED[kind]}")
    return Imported(config, words, weights, origin)

# Why a source is no model of others, and what to do; the sentence goes on from "at {source},".
EXPECTED = {
    NOTHING: "but there is nothing: check the path, or write hf:OWNER/NAME for one of the Hub",
    RUN: "but that is a folder of ours, or an empty one: use it as it is (--from)",
    PICKLE: "but that is a pickle, a program that reading would run: choose a version of the model "
            "in safetensors",
}  # fmt: skip


# %% sec-in-out-hub
# The files of a repository that we fetch; whatever else it holds stays there.
WANTED = (
    "config.json", "*.safetensors", huggingface.INDEX, "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip

@contextlib.contextmanager
def _told(name: str) -> Iterator[None]:
    """Turn an exception of the Hub's library into a UserError of one line."""
    try:
        yield
    except Exception as error:  # of HTTP, of names, of a cache: many kinds
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"hf:{name} could not be fetched ({type(error).__name__}: {reason}): check "
                        "the name and the connection, and try again") from None  # fmt: skip


def fetch(name: str) -> Path:
    """The folder of a repository of the Hub, OWNER/NAME or OWNER/NAME@REVISION, fetched if need be.

    Its configuration is read before its weights are asked for; those are checked by the digests
    that the Hub states. UserError for what our model can't be, and where it can't be fetched.
    """
    try:
        import huggingface_hub as hub
    except ImportError:
        raise UserError("expected the package huggingface_hub, which fetches models, but it is not "
                        "installed: pip install 'nanoeuler[hub]'") from None  # fmt: skip
    owner, _, revision = name.partition("@")
    with _told(name):
        info = hub.HfApi().model_info(owner, revision=revision or None, files_metadata=True)
        kept = {"revision": info.sha, "repo_id": owner}
        config = Path(hub.hf_hub_download(filename="config.json", **kept))
    huggingface.read_config(config.parent)  # refuses what our model can't be
    names = [each.rfilename for each in info.siblings]
    if not any(each.endswith(".safetensors") for each in names):
        raise UserError(f"hf:{name} has no safetensors, and other forms of weights are not read: "
                        "choose another repository of the model")  # fmt: skip
    with _told(name):
        folder = Path(hub.snapshot_download(allow_patterns=[*WANTED], **kept))
    check_digests(folder, {each.rfilename: each.lfs.sha256 for each in info.siblings if each.lfs})
    return folder


def check_digests(folder: Path, digests: dict[str, str]) -> None:
    """UserError unless each file that is there has the SHA-256 that is stated for its name."""
    for name, digest in digests.items():
        path = folder / name
        if path.exists() and sha256_of(path) != digest:
            raise UserError(f"{path} is not the file that the Hub states (its SHA-256 is another): "
                            "delete it, and fetch the model again")  # fmt: skip


# %% sec-in-out-run
HUGGING_FACE, LLAMA_CPP, KARPATHY = "hf", "gguf", "llama2c"  # the names of formats to write
FORMATS = {  # and the kinds of numbers that each can hold, the default first
    HUGGING_FACE: ("F32", "F16", "BF16"), LLAMA_CPP: ("F16", "F32", "BF16", "Q8_0"),
    KARPATHY: ("F32",),
}  # fmt: skip

def write_source(
    form: str, path: str | Path, config: ModelConfig, tokenizer: Tokenizer, weights: Weights,
    kind: str | None = None,
) -> list[str]:  # fmt: skip
    """Write a model in a format of FORMATS, with its tokenizer; return lines on what is left out.

    kind: of the numbers; None is the format's first. UserError, before anything is written, for
    what the format can't hold, and where something is in the way.
    """
    path, kinds = Path(path), FORMATS.get(form, ())
    kind = (kind or kinds[0]).upper() if kinds else ""
    if kind not in kinds:
        wanted = f"numbers of kind {' or '.join(kinds)}" if kinds else f"{' or '.join(FORMATS)}"
        raise UserError(f"expected {wanted} for an export, got {kind or form!r}: choose one")
    if form == HUGGING_FACE:
        eos = tokenizer.vocabulary.eos
        said = huggingface.write_folder(path, config, weights, kind, {"eos_token_id": eos})
        write_tokenizer_json(tokenizer, path)
        return said
    if os.path.lexists(path):
        raise UserError(f"expected {path} to be new, but it is there: choose another file (--out)")
    if form == LLAMA_CPP:
        words = gguf_metadata(tokenizer, config.vocab_size)
        return gguf_model.write_model(path, config, weights, kind, words, path.stem)
    said = llama2c.write_model(path, config, weights)
    return [*said, "llama2.c's program also wants a tokenizer.bin, which is not written: use the "
                   "one that the model came with"]  # fmt: skip
