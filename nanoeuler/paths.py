# Made from book/c-sources.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-sources-paths
"""Where nanoeuler's own files are: those it ships, and those it fetches, prepares and harvests.

One answer, in whatever folder a command is called. Leaves out the files that a user names.
"""

from importlib import metadata
from pathlib import Path

import nanoeuler
from nanoeuler.errors import UserError


def checkout() -> Path | None:
    """The folder of the checkout whose package this is; None for a package that was installed."""
    root = Path(nanoeuler.__file__).resolve().parents[1]
    return root if (root / "_toc.yml").exists() else None


def data_folder(name: str) -> Path:
    """Where data of the kind `name` (fetched, prepared, embedded) are kept; it need not exist yet.

    data/`name` of the checkout, else of the folder that the system has for what can be had again.
    """
    if root := checkout():
        return root / "data" / name
    from platformdirs import user_cache_path  # here: a checkout has no need of it

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
    raise UserError(f"expected {name} to be installed with nanoeuler, but it is not: "
                    "install nanoeuler again")  # fmt: skip
