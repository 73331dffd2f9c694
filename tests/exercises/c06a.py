"""Wrong answers to the exercises of chapter 6a: each must be refused by its check."""

import tracemalloc
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from nanoeuler.checks.derivatives import relative_error
from nanoeuler.checks.gradcheck import TINY, TINY_GPT2, tiny_problem
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.model.transformer import loss_and_gradients, stream

CHAPTER = "06a-engines"


def hear_queries(heads, n_kv, start):
    """As the chapter has it: stand in for a cache's attention, return the queries."""
    return heads[:, :, : -2 * n_kv].reshape(*heads.shape[:2], -1)


# What the cells of the chapter have imported before; the rest each check imports itself.
NAMES = dict(
    np=np,
    replace=replace,
    relative_error=relative_error,
    TINY=TINY,
    TINY_GPT2=TINY_GPT2,
    tiny_problem=tiny_problem,
    ReferenceEngine=ReferenceEngine,
    loss_and_gradients=loss_and_gradients,
    stream=stream,
    tracemalloc=tracemalloc,
    SimpleNamespace=SimpleNamespace,
    hear_queries=hear_queries,
)
# (exercise, what is wrong, text of the solution, what it becomes)
# fmt: off
ANSWERS = [
    ("thrifty", "attention keeps n", "saved._replace(n=None)", "saved"),
    ("thrifty", "attention keeps a copy of n", "saved._replace(n=None)",
     "saved._replace(n=n.copy())"),
    ("thrifty", "the MLP keeps h", "_replace(n=None, h=None)", "_replace(n=None)"),
    ("thrifty", "the MLP keeps n", "_replace(n=None, h=None)", "_replace(h=None)"),
    ("thrifty", "the engine itself keeps n", "out, saved = super().mlp(config, b, n)",
     "self.kept, (out, saved) = [n, *getattr(self, 'kept', [])], super().mlp(config, b, n)"),
    ("thrifty", "GELU is forgotten", "getattr(self, config.mlp)(saved.u)",
     "self.swiglu(saved.u) if config.mlp == 'swiglu' else saved.u"),
    ("thrifty", "SwiGLU is forgotten", "getattr(self, config.mlp)(saved.u)",
     "saved.u[..., : config.hidden] if config.mlp == 'swiglu' else self.gelu(saved.u)"),
    ("thrifty", "the gradient stands in for attention's n", "_replace(n=again())",
     "_replace(n=dout)"),
    ("thrifty", "the gradient stands in for the MLP's n", "n=again(), h=h", "n=dout, h=h"),
    ("thrifty", "attention's gradients are added twice",
     "return super().attend_backward(config, b, db, saved, dout, again)",
     "super().attend_backward(config, b, db, saved, dout, again)\n"
     "            return super().attend_backward(config, b, db, saved, dout, again)"),
    ("thrifty", "the MLP's gradients are added twice",
     "return super().mlp_backward(config, b, db, saved, dout, again)",
     "super().mlp_backward(config, b, db, saved, dout, again)\n"
     "            return super().mlp_backward(config, b, db, saved, dout, again)"),
    ("thrifty", "several texts are forgotten", "n, start, cache, first)", "n, start, cache)"),
    ("thrifty", "the first position is forgotten", "n, start, cache, first)",
     "n, 0, cache, first)"),
    ("midpoint", "a whole step to the second question", "(1 / 2,)", "(1.0,)"),
    ("midpoint", "a quarter of a step", "(1 / 2,)", "(1 / 4,)"),
    ("midpoint", "two thirds of a step", "(1 / 2,)", "(2 / 3,)"),
    ("midpoint", "no step to the second question", "(1 / 2,)", "(0.0,)"),
    ("midpoint", "half a step backwards", "(1 / 2,)", "(-1 / 2,)"),
    ("midpoint", "Heun's weights", "(0.0, 1.0)", "(1 / 2, 1 / 2)"),
    ("midpoint", "Ralston's method", "(1 / 2,)), (0.0, 1.0)", "(2 / 3,)), (1 / 4, 3 / 4)"),
    ("midpoint", "the first answer is believed", "(0.0, 1.0)", "(1.0, 0.0)"),
    ("midpoint", "both answers are added", "(0.0, 1.0)", "(1.0, 1.0)"),
    ("midpoint", "half a step is taken", "(0.0, 1.0)", "(0.0, 1 / 2)"),
    ("midpoint", "twice the step is taken", "(0.0, 1.0)", "(0.0, 2.0)"),
    ("midpoint", "a third question for nothing", "(1 / 2,)), (0.0, 1.0)",
     "(1 / 2,), (0.0, 1.0)), (0.0, 1.0, 0.0)"),
]
