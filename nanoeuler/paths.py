# Made from book/c-sources.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-sources-paths
"""Where nanoeuler's own files are: those it ships, and those it fetches, prepares and collects.

The answer doesn't depend on the current folder. Leaves out the files that a user names.
"""

from importlib import metadata
from pathlib import Path

import nanoeuler
from nanoeuler.errors import UserError


def checkout() -> Path | None:
    """The folder of the checkout that contains this package; None if the package was installed."""
    root = Path(nanoeuler.__file__).resolve().parents[1]
    return root if (root / "_toc.yml").exists() else None


def data_folder(name: str) -> Path:
    """The folder for data of the kind `name` (fetched, prepared, embedded); it needn't exist yet.

    data/`name` in the checkout, or else in the system's folder for files that can be made again.
    """
    if root := checkout():
        return root / "data" / name
    from platformdirs import user_cache_path  # here, because a checkout doesn't need it

    return user_cache_path("nanoeuler") / name


def shipped(name: str) -> Path:
    """The file `name` of the checkout's data/, or the copy that was installed with the package."""
    if root := checkout():
        return root / "data" / name
    try:
        files = metadata.files("nanoeuler") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.parts[-3:] == ("share", "nanoeuler", name):
            return Path(file.locate()).resolve()
    raise UserError(f"expected {name} to be installed with nanoeuler, but it isn't: "
                    "install nanoeuler again")  # fmt: skip
