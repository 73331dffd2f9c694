"""Other people's models by one door: what a source is, what is read, what is written."""

import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import nanoeuler as ne
from nanoeuler.errors import UserError
from nanoeuler.interop import llama2c, source
from nanoeuler.interop.source import fetch, kind_of, read_source, write_source
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.weights import initialise
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training.checkpoint import load, load_model, write_model

TINY = ModelConfig(
    vocab_size=280, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden=48, context=32, n_predict=1,
    tied=True, norm_eps=1e-6, rope_base=500.0,
)  # fmt: skip
STORY = "The river begins under a stone, and goes down to the sea. " * 9


@pytest.fixture(scope="module")
def parts():
    return TINY, Tokenizer.train(STORY, 280), initialise(TINY, seed=3)


@pytest.mark.parametrize("form, name", [("hf", "folder"), ("gguf", "model.bin")])
def test_what_goes_out_comes_in_again(parts, form, name, tmp_path):
    """A GGUF file is one by its content, whatever it is called."""
    config, tokenizer, weights = parts
    assert write_source(form, tmp_path / name, config, tokenizer, weights, "f32") == []
    again = read_source(tmp_path / name)
    assert again.config == config
    assert all((again.weights[key] == weights[key]).all() for key in weights)
    assert again.tokenizer.encode(STORY).tolist() == tokenizer.encode(STORY).tolist()


def test_an_imported_model_is_a_run_that_training_does_not_resume(parts, tmp_path):
    config, tokenizer, weights = parts
    write_model(tmp_path / "run", config, tokenizer, weights, "somewhere")
    there, _, numbers = load_model(tmp_path / "run")
    assert there == config and (numbers.flat == weights.flat).all()
    with pytest.raises(UserError, match="imported model, which can't be resumed"):
        load(tmp_path / "run")
    text = ne.load(tmp_path / "run").generate("The river", tokens=3, temperature=0)
    write_source("hf", tmp_path / "hf", config, tokenizer, weights)
    assert ne.load(tmp_path / "hf").generate("The river", tokens=3, temperature=0) == text
    with pytest.raises(UserError, match="expected .* to be new or empty"):
        write_model(tmp_path / "hf", config, tokenizer, weights, "somewhere")


def test_a_smaller_context_may_be_asked_for(parts, tmp_path):
    config, tokenizer, weights = parts
    write_source("hf", tmp_path / "hf", config, tokenizer, weights)
    assert ne.load(tmp_path / "hf", context=8).config.context == 8
    with pytest.raises(UserError, match="expected a context from 1 to 32"):
        read_source(tmp_path / "hf", context=33)


def test_what_is_no_model_is_refused_in_a_line(parts, tmp_path):
    (tmp_path / "model.pt").write_bytes(b"PK\x03\x04 an archive")
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.bin").write_bytes(bytes(40))
    for name, says in (
        ("model.pt", "a pickle, a program that reading would run"), ("none.gguf", "there is noth"),
        ("empty", "a folder of ours, or an empty one"), ("short.bin", "checkpoint of llama2.c"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=says):
            read_source(tmp_path / name)
    with pytest.raises(UserError, match="expected numbers of kind F32 or F16 or BF16"):
        write_source("hf", tmp_path / "x", *parts, "Q8_0")
    with pytest.raises(UserError, match="expected hf or gguf or llama2c"):
        write_source("onnx", tmp_path / "x", *parts)
    assert not (tmp_path / "x").exists()
    assert kind_of(tmp_path / "model.pt") == source.PICKLE


@pytest.mark.parametrize("form", ["gguf", "llama2c"])
@pytest.mark.parametrize("to", ["link", "nothing"])
def test_a_link_that_leads_nowhere_is_not_replaced(form, to, parts, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / to)
    with pytest.raises(UserError, match=r"expected .*link to be new, but it is there: choose"):
        write_source(form, link, *parts)
    assert link.is_symlink() and [*tmp_path.iterdir()] == [link]


@pytest.mark.parametrize("dim", [128, 640, 768])
def test_a_version_0_of_llama2_c_is_known_at_any_width(tmp_path, dim):
    """640 channels, as a whole number of four bytes, begin as a pickle does."""
    config = ModelConfig(vocab_size=260, dim=dim, n_layers=1, n_heads=2, n_kv_heads=2, hidden=8,
                         context=4, n_predict=1, tied=True)  # fmt: skip
    llama2c.write_model(tmp_path / "m.bin", config, initialise(config, seed=3))
    assert kind_of(tmp_path / "m.bin") == source.LLAMA2C
    (tmp_path / "p.bin").write_bytes(pickle.dumps({"dim": dim}, 2))
    assert kind_of(tmp_path / "p.bin") == source.PICKLE


class Hub(SimpleNamespace):
    """The library of the Hub, with one repository, a folder."""

    def __init__(self, folder, digest):
        files = [SimpleNamespace(rfilename=path.name, lfs=None) for path in folder.iterdir()]
        for each in files:
            if each.rfilename.endswith(".safetensors"):
                each.lfs = SimpleNamespace(sha256=digest)
        self.info = SimpleNamespace(sha="abc", siblings=files)
        self.folder, self.asked = folder, []

    def HfApi(self):
        return SimpleNamespace(model_info=lambda name, revision, files_metadata: self.info)

    def hf_hub_download(self, filename, repo_id, revision):
        self.asked.append(filename)
        return str(self.folder / filename)

    def snapshot_download(self, repo_id, revision, allow_patterns):
        self.asked.append("all")
        return str(self.folder)


def test_a_repository_is_fetched_after_its_configuration_was_read(parts, tmp_path, monkeypatch):
    config, tokenizer, weights = parts
    write_source("hf", tmp_path / "hf", config, tokenizer, weights)
    right = source.sha256_of(tmp_path / "hf" / "model.safetensors")
    hub = Hub(tmp_path / "hf", right)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert np.array_equal(read_source("hf:somebody/tiny").weights.flat, weights.flat)
    assert hub.asked == ["config.json", "all"]
    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub(tmp_path / "hf", "0" * 64))
    with pytest.raises(UserError, match="its SHA-256 is another"):
        fetch("somebody/tiny")
    path = tmp_path / "hf" / "config.json"
    path.write_text(path.read_text().replace('"llama"', '"mixtral"'))
    hub = Hub(tmp_path / "hf", right)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with pytest.raises(UserError, match="mixture of experts"):
        fetch("somebody/tiny")
    assert hub.asked == ["config.json"]  # and no weights


def test_without_the_library_or_the_network_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"pip install 'nanoeuler\[hub\]'"):
        fetch("somebody/tiny")

    class Lost(Exception):
        """As an HTTP library has them, of no class that we know."""

    def lose(*_, **__):
        raise Lost("Name or service not known")

    broken = SimpleNamespace(HfApi=lambda: SimpleNamespace(model_info=lose))
    monkeypatch.setitem(sys.modules, "huggingface_hub", broken)
    with pytest.raises(UserError, match="could not be fetched .*Name or service not known"):
        fetch("somebody/tiny")
