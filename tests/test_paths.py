"""One answer to "where am I?": in a checkout, and for a package that was installed without one."""

import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from nanoeuler import paths
from nanoeuler.errors import UserError

ROOT = Path(__file__).parents[1]


def test_in_a_checkout_everything_is_in_its_data_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # wherever one is
    assert paths.checkout() == ROOT
    assert paths.data_folder("fetched") == ROOT / "data" / "fetched"
    assert paths.shipped("sources.toml") == ROOT / "data" / "sources.toml"


INSTALLED = """
from nanoeuler import paths
from nanoeuler.data.catalogue import catalogue
assert paths.checkout() is None
print(*catalogue())
print(paths.data_folder("fetched"))
"""


def test_installed_it_finds_what_was_shipped_and_keeps_data_in_the_cache(tmp_path):
    """As pip lays out a wheel: modules in one folder, the list in another, a RECORD of both."""
    site, empty = tmp_path / "lib" / "site-packages", tmp_path / "empty"
    shutil.copytree(ROOT / "nanoeuler", site / "nanoeuler",
                    ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
    shutil.copytree(ROOT / "data", tmp_path / "share" / "nanoeuler",
                    ignore=lambda folder, names: {*names} - {"sources.toml"})  # fmt: skip
    info = site / "nanoeuler-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nanoeuler\nVersion: 0.1.0\n")
    (info / "RECORD").write_text(
        "nanoeuler/__init__.py,,\n../../share/nanoeuler/sources.toml,,\n"
    )
    empty.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", INSTALLED], cwd=empty, capture_output=True, text=True,
        env={"PYTHONPATH": str(site), "XDG_CACHE_HOME": str(tmp_path / "cache"),
             "HOME": str(tmp_path), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names, fetched = done.stdout.splitlines()
    assert names.startswith("tinyshakespeare gutenberg")
    assert tmp_path in Path(fetched).parents and fetched.endswith("/nanoeuler/fetched")
    assert list(empty.iterdir()) == []


def test_the_wheel_brings_what_is_shipped():
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    files = ["data/sources.toml", "data/page.html", "data/page.css", "data/page.js"]
    assert setup["data-files"] == {"share/nanoeuler": files}
    assert all((ROOT / file).is_file() for file in files)


@pytest.mark.parametrize("files", [[], None, metadata.PackageNotFoundError("nanoeuler")])
def test_an_installation_without_the_list_is_one_line(files, monkeypatch):
    def installed(name):
        if isinstance(files, Exception):
            raise files
        return files

    monkeypatch.setattr(paths, "checkout", lambda: None)
    monkeypatch.setattr(metadata, "files", installed)
    with pytest.raises(UserError, match="expected sources.toml to be installed with nanoeuler"):
        paths.shipped("sources.toml")
