"""Machine code that is kept on disk: its key, its files, and what is compiled again."""

import os
from dataclasses import replace
from typing import NamedTuple

import pytest
import registers

from nanoeuler.engines.gpu.host import cache
from nanoeuler.engines.gpu.host.compile import Code
from nanoeuler.engines.gpu.lang import ptx
from nanoeuler.engines.gpu.lang.kernel import Kernel

MAKERS = registers.makers()
CODE = Code("text of PTX, .entry name", b"\x7fELF\n\x00code", 40, 0, 8, ("a warning",), (9, 0, "a"))


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOEULER_KERNELS", str(tmp_path / "gpu"))
    return tmp_path / "gpu"


@pytest.fixture
def built(monkeypatch):
    """The kernels that were compiled, in a machine that needs no compiler for it."""
    found = []

    def build(kernels, capability):
        found.extend(kernels)
        return [CODE for _ in kernels]

    monkeypatch.setattr(cache, "build_copies", build)
    return found


def test_every_kernel_has_a_key_and_another_digest_means_another_key():
    # registers.tsv has a digest of the source; a key is one of the bytecode.
    digests, keys = {}, {}
    for names, make in MAKERS.items():
        kernel = make()
        keys[names] = cache.fingerprint(kernel, kernel.target)
        assert keys[names], f"{names} would be compiled each time"
        digests[names] = registers.digest(replace(kernel, shared=0))  # the launch's own
    by_key = {}
    for names, key in keys.items():
        by_key.setdefault(key, set()).add(digests[names])
    twice = {key: found for key, found in by_key.items() if len(found) > 1}
    assert not twice


def test_a_kernel_made_again_has_the_same_key():
    for names, make in [*MAKERS.items()][::40]:
        once, again = getattr(make, "__wrapped__", make)(), make()
        assert cache.fingerprint(once, (9, 0)) == cache.fingerprint(again, (9, 0)), names


def test_a_tuple_that_a_kernel_takes_is_part_of_its_key():
    def keyed(kind):
        def kernel(given: kind):
            ptx.store_int(given.to, given.n)

        return cache.fingerprint(Kernel(kernel, "l l", 32, target=(8, 0)), (8, 0))

    orders = ("to", "n"), ("to", "n"), ("n", "to")
    kinds = [NamedTuple("Given", [(name, int) for name in names]) for names in orders]
    one, same, other = map(keyed, kinds)
    assert one == same != other


def test_code_comes_back_as_it_was(tmp_path):
    path = tmp_path / "some.kernel"
    assert cache.read(path) is None
    cache.write(path, CODE)
    assert cache.read(path) == CODE


@pytest.mark.parametrize(
    "harm",
    [lambda x: x[:-1], lambda x: x + b"!", lambda x: b"", lambda x: x[1:],
     lambda x: b"[" * 100_000, lambda x: b"3\n" + x, lambda x: x.replace(b" 40,", b" 41,"),
     lambda x: x.replace(b".entry", b".extern")],
)  # fmt: skip
def test_a_harmed_file_is_compiled_again_and_replaced(place, built, harm):
    kernel = next(iter(MAKERS.values()))()
    cache.compiled([kernel])
    (path,) = place.glob("*.kernel")
    path.write_bytes(harm(path.read_bytes()))
    assert cache.compiled([kernel]) == [CODE] and built == [kernel, kernel]
    assert cache.read(path) == CODE


def test_only_what_is_missing_is_compiled_and_the_order_is_kept(place, built):
    kernels = [make() for make in [*MAKERS.values()][:40:10]]
    cache.compiled(kernels[1:2])
    assert cache.compiled(kernels) == [CODE] * 4
    assert built == [kernels[1], kernels[0], kernels[2], kernels[3]]
    cache.compiled(kernels)
    assert len(built) == 4


def test_what_has_no_key_is_compiled_each_time_and_not_kept(place, built, monkeypatch):
    kernel = next(iter(MAKERS.values()))()
    monkeypatch.setattr(cache, "PLAIN", (str,))
    cache.compiled([kernel])
    cache.compiled([kernel])
    assert built == [kernel, kernel] and not [*place.glob("*")]


def test_a_folder_that_cannot_be_written_costs_time_alone(tmp_path, built, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NANOEULER_KERNELS", str(tmp_path / "file"))
    assert cache.compiled([next(iter(MAKERS.values()))()]) == [CODE]


def test_the_files_that_were_read_longest_ago_go_first(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "MOST", 2)
    for i, name in enumerate("abc"):
        cache.write(tmp_path / name, CODE)
        os.utime(tmp_path / name, (i + 1, i + 1))
    cache.read(tmp_path / "a")
    cache.trim(tmp_path.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"]
