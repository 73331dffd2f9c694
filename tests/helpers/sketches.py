"""The picture of a run without drawing it: a third of a test's short run is otherwise matplotlib's.

What `display.plot` draws is proved in tests/test_train.py, and a real picture of a run, too.
"""

from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

from nanoeuler.data.validation import HeldOut
from nanoeuler.files import replacing
from nanoeuler.training import loop
from nanoeuler.training.folder import read_metrics, writing


def plot(out: str | Path, held_out: HeldOut) -> None:
    """In place of loss.png a PNG's first bytes and the numbers that the picture would show."""
    shown = [[line.get(name) for name in ("step", "loss", "bits_per_byte")]
             for line in read_metrics(out)]  # fmt: skip
    told = repr((shown, held_out.bytes_per_token, held_out.baselines)).encode()
    with writing(out, "loss.png could not be written"):
        with replacing(Path(out) / "loss.png") as temporary:
            temporary.write_bytes(b"\x89PNG" + told)


def drawn() -> AbstractContextManager[object]:
    """A context in which runs draw no more than that."""
    return mock.patch.object(loop, "plot", plot)
