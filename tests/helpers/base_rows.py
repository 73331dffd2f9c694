"""Rows of the base model, kept in a folder as they come, and copied to $OUT."""

import datetime
import json
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from nanoeuler import measurements
from nanoeuler.files import replacing

ENGINE = "cuda"  # that trained what a row is of
KEPT = "rows", "times", "prediction", "samples", "curve"  # files of --work
PACKAGES = "numpy", "numba", "numba-cuda", "torch"


def card(dry: bool) -> str:
    """The GPU in words; this machine, if dry."""
    if dry:
        return measurements.device()
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True).stdout.split("\n")[0] or "GPU"


def circumstances(options) -> dict:
    """What all rows of a command say of where they were measured."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    commit = options.commit or (measurements.commit() if shutil.which("git") else "")
    return {"commit": commit, "date": datetime.date.today().isoformat(), "versions": versions}


class Journal:
    """The rows so far; each new one is saved at once, in place of an older one of the same kind."""

    def __init__(self, options) -> None:
        self.options, self.where = options, circumstances(options)
        self.path = options.work / "rows.json"

    def add(self, what: str, case: str, value: float, unit: str, peer: str | None = None,
            peer_value: float | None = None) -> None:  # fmt: skip
        """A row."""
        if "device" not in self.where:  # asked of a GPU only when there is something to say
            self.where["device"] = card(self.options.dry or self.options.stage == "unpack")
        new = self.where | {"what": what, "case": case, "engine": ENGINE, "value": value,
                            "unit": unit, "peer": peer, "peer_value": peer_value}  # fmt: skip
        same = "what", "case", "engine", "peer"
        rows = json.loads(self.path.read_text()) if self.path.exists() else []  # others write, too
        rows = [row for row in rows if any(row[key] != new[key] for key in same)] + [new]
        with replacing(self.path) as temporary:
            temporary.write_text(json.dumps(rows, indent=1))
        self.copy()

    def copy(self) -> None:
        """What is small and worth keeping, to $OUT/base.json: a call brings back few files."""
        out = os.environ.get("OUT", "")
        if not out or not Path(out).is_dir():  # as for a process that outlives its call
            return
        paths = {name: self.options.work / f"{name}.json" for name in KEPT}
        told = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
        with replacing(Path(out) / "base.json") as temporary:
            temporary.write_text(json.dumps(told))

    def value(self, what: str, case: str) -> float | None:
        """Of a row that is there, without a peer; else None."""
        rows = json.loads(self.path.read_text()) if self.path.exists() else []
        found = [row["value"] for row in rows
                 if (row["what"], row["case"], row["peer"]) == (what, case, None)]  # fmt: skip
        return found[-1] if found else None
