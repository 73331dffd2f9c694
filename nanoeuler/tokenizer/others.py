# Made from book/19b-other-peoples-tokenizers.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-their-gguf
"""Other people's tokenizers by the names of their files: readers and writers.

Leaves out what is in the files (huggingface.py, sentencepiece.py, ggml.py).
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanoeuler.errors import UserError
from nanoeuler.files import replacing
from nanoeuler.tokenizer import ggml
from nanoeuler.tokenizer.file import read_file
from nanoeuler.tokenizer.huggingface import json_of
from nanoeuler.tokenizer.sentencepiece import vocabulary_of_llama2c, vocabulary_of_model
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.tokenizer.vocabulary import Vocabulary


def read_sentencepiece(path: str | Path) -> Tokenizer:
    """The tokenizer of SentencePiece's file, tokenizer.model, with what lies beside it."""
    path = Path(path)
    return _beside(vocabulary_of_model(read_file(path), str(path)), path.parent)


def read_llama2c_tokenizer(path: str | Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of llama2.c's tokenizer.bin, for a model of `vocab_size` ids."""
    return Tokenizer.of(vocabulary_of_llama2c(read_file(path), vocab_size, str(path)))


def tokenizer_of_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer in the metadata of a GGUF file."""
    return Tokenizer.of(ggml.vocabulary_of_metadata(metadata))


def gguf_metadata(tokenizer: Tokenizer, rows: int = 0) -> dict[str, Any]:
    """The keys `tokenizer.*` of a GGUF file; `rows` of the model, if it has more than ids."""
    return ggml.metadata_of(tokenizer.vocabulary, rows)


def read_tokenizer_json(path: str | Path) -> Tokenizer:
    """The tokenizer of Hugging Face's tokenizer.json, or of a folder that holds one.

    Other files of the folder count, too: tokenizer_config.json says which tokens begin and end a
    text, and it or chat_template.jinja holds the template of a conversation.
    """
    path = Path(path)
    path = path / "tokenizer.json" if path.is_dir() else path
    return _beside(Tokenizer.load(path).vocabulary, path.parent)


def _beside(vocabulary: Vocabulary, folder: Path) -> Tokenizer:
    """The tokenizer of a vocabulary, and of the files in its folder that say more of it."""
    config: dict[str, Any] = {}
    if (file := folder / "tokenizer_config.json").exists():
        try:
            config = json.loads(read_file(file))
            config = {**config}
        except (ValueError, RecursionError, TypeError):
            raise UserError(f"{file} is not a JSON object: copy it again, or remove it") from None
    found = {key: _named(vocabulary, config.get(f"{key}_token")) for key in ("bos", "eos")}
    changes: dict[str, Any] = {key: i for key, i in found.items() if i is not None}
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        rows = [row for row in template if isinstance(row, dict) and row.get("name") == "default"]
        template = rows[0].get("template") if rows else None
    if (file := folder / "chat_template.jinja").exists():
        template = read_file(file).decode("utf-8", "replace")
    if isinstance(template, str):
        changes["template"] = template
    for key, i, name in (("begin", found["bos"], "add_bos_token"),
                         ("end", found["eos"], "add_eos_token")):  # fmt: skip
        if name in config and vocabulary.characters:
            changes[key] = (i,) if config[name] and i is not None else ()
    if not changes:
        return Tokenizer.of(vocabulary)
    return Tokenizer.of(replace(vocabulary, ours=False, **changes))


def _named(vocabulary: Vocabulary, name: Any) -> int | None:
    """The id of the added token of this name, which may be wrapped in its flags; or None."""
    name = name.get("content") if isinstance(name, dict) else name
    return next((token.id for token in vocabulary.added if token.content == name), None)


def write_tokenizer_json(tokenizer: Tokenizer, path: str | Path) -> None:
    """Write a tokenizer.json that opens in Hugging Face's programs, and what goes beside it.

    `path` is the file or a folder for it. tokenizer_config.json names the tokens that begin and
    end a text, and holds the template.
    """
    path = Path(path)
    path = path / "tokenizer.json" if path.suffix != ".json" else path
    vocabulary = tokenizer.vocabulary
    text = tokenizer.json if vocabulary.ours else json_of(vocabulary, extras=False)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    names = {token.id: token.content for token in vocabulary.added}
    for key, i in (("bos_token", vocabulary.bos), ("eos_token", vocabulary.eos)):
        if i is not None and i in names:
            config[key] = names[i]
    if vocabulary.template:
        config["chat_template"] = vocabulary.template
    files = {path: text, path.with_name("tokenizer_config.json"): json.dumps(
        config, indent=1, ensure_ascii=False)}  # fmt: skip
    for file, content in files.items():
        with replacing(file) as temporary:
            temporary.write_bytes(content.encode())
