# Made from book/a-how-this-book-works.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-book-errors
"""nanoeuler: a language model, explained line by line in the book that it is made from.

    import nanoeuler as ne

    model = ne.train("text.txt", out="runs/mine")
    model = ne.load("runs/mine")
    print(model.generate("The river", tokens=100, seed=3))

Importing the package imports nothing else: each name is fetched when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# The public names, and the modules that they come from.
HOMES = {
    "train": "api", "finetune": "api", "load": "api", "Model": "inference.model",
    "Tokenizer": "tokenizer.tokenizer", "ModelConfig": "model.config", "PRESETS": "model.config",
    "Settings": "training.run", "UserError": "errors",
}  # fmt: skip


if TYPE_CHECKING:
    from nanoeuler.api import finetune as finetune
    from nanoeuler.api import load as load
    from nanoeuler.api import train as train
    from nanoeuler.errors import UserError as UserError
    from nanoeuler.inference.model import Model as Model
    from nanoeuler.model.config import PRESETS as PRESETS
    from nanoeuler.model.config import ModelConfig as ModelConfig
    from nanoeuler.tokenizer.tokenizer import Tokenizer as Tokenizer
    from nanoeuler.training.run import Settings as Settings
else:

    def __getattr__(name):
        """The public name `name`, imported now; AttributeError for any other."""
        if name not in HOMES:
            raise AttributeError(f"module 'nanoeuler' has no attribute {name!r}")
        return getattr(import_module(f"nanoeuler.{HOMES[name]}"), name)

    def __dir__():
        """What `dir(nanoeuler)` lists: the public names too."""
        return sorted({*globals(), *HOMES})
