"""Mistakes by the dozen in kernels: `python tests/helpers/kernel_mutants.py [MODULE...] [-n 40]`.

A variant is a module of engines/gpu with one small thing changed in one function that runs on the
GPU: a comparison, a number by one, an operator, two indices, min for max, a barrier or a wait left
out. A check plays the kernels on paper, at small sizes, and has to fail. The survivors are printed:
each is a test that is missing, or a change that changes nothing.
"""

import argparse
import ast
import copy
import importlib
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
from mutants import execute

TESTS = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(TESTS), str(TESTS / "helpers")]

LIMIT = 20  # seconds after which a check counts as hanging, of a slow one four times its own
WAITS = re.compile(r"sync|barrier|fence|wait|arrive|commit")
# Functions of the host, whose mistakes are others' business.
HOST = re.compile("launch|shape|blocks|form|segments|tiles|schedule|plan|choose|fit|check|verify")
COMPARE = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}  # fmt: skip
BINARY = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Div: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
OTHER = {"min": "max", "max": "min", "larger": "smaller"}


class Variant(NamedTuple):
    """A change: where, what was there, what is there now, and the source with it."""

    function: str
    line: int
    old: str
    new: str
    source: str

    def __str__(self) -> str:
        return f"{self.function}:{self.line}: {self.old}  ->  {self.new}"


def name_of(call: ast.AST) -> str:
    """The last part of the name of what is called; "" if nothing is."""
    function = call.func if isinstance(call, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", ""))


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What could stand in a node's place."""
    new = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARE:
        new.ops[0] = COMPARE[type(node.ops[0])]()
        yield new
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield ast.Constant(node.value + 1)
        yield ast.Constant(node.value - 1)
    elif isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        new.op = BINARY[type(node.op)]()
        yield new
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple):
        new.slice.elts.reverse()
        yield new
    elif name_of(node) in ("min", "max"):
        new.func.id = OTHER[name_of(node)]
        yield new
    elif isinstance(node, ast.Expr) and WAITS.search(name_of(node.value)):
        yield ast.Pass()


def places(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """(parent, field, number, node) of everything inside a function's body that runs on a GPU."""
    for field, value in ast.iter_fields(node):
        if field in ("decorator_list", "args", "keywords", "returns", "annotation") and not (
            isinstance(node, ast.Call) and name_of(node) != "Kernel"
        ):
            continue
        for number, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.AST) and not isinstance(child, ast.Raise):
                yield node, field, number if isinstance(value, list) else None, child
                yield from places(child)


def put(parent: ast.AST, field: str, number: int | None, node: ast.AST) -> None:
    """Put a node into its place."""
    if number is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[number] = node


def variants(source: str) -> Iterator[Variant]:
    """All variants of a module's source."""
    tree = ast.parse(source)
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef) or HOST.search(function.name):
            continue
        for parent, field, number, node in list(places(function)):
            for new in changes(node):
                line = getattr(node, "lineno", 0)
                put(parent, field, number, ast.copy_location(new, node))
                text = ast.unparse(ast.fix_missing_locations(tree))
                put(parent, field, number, node)
                yield Variant(function.name, line, ast.unparse(node), ast.unparse(new), text)


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    """TimeoutError in what takes longer."""

    def stop(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def killed(
    variant: Variant, name: str, check: Callable[[ModuleType], None], seconds: float = 0
) -> bool:
    """Whether a check of a module fails, or does not end in time, with this variant in it."""
    module = ModuleType(f"variant_{name}")
    try:
        with limit(int(max(LIMIT, seconds))):
            execute(variant.source, variant.function, module)
            check(module)
    except Exception:
        return True
    return False


def source_of(name: str) -> str:
    """The source of a module of engines/gpu, by its room and its name."""
    module = importlib.import_module(f"nanoeuler.engines.gpu.{name}")
    return Path(module.__file__).read_text(encoding="utf-8")


def survivors(name: str, check: Callable, count: int, seed: int = 0) -> tuple[list[Variant], int]:
    """Those of `count` variants of a module, drawn at random, that live on, and how many of all."""
    begin = time.perf_counter()
    check(importlib.import_module(f"nanoeuler.engines.gpu.{name}"))  # as it is, it has to pass
    patience = 4 * (time.perf_counter() - begin)
    everything = list(variants(source_of(name)))
    sample = random.Random(seed).sample(everything, min(count, len(everything)))
    left = [variant for variant in sample if not killed(variant, name, check, patience)]
    return left, len(sample)


# ---- The checks, at the sizes of the families' own tests


def check_rows_residual_norm(module):
    import test_rows

    for norm in ("rms", "layer"):
        test_rows.check_move_norm(module, 3, 72, norm, seed=0)
        test_rows.check_move_norm(module, 2, 1032, norm, "float32")
    test_rows.added(module)


def check_rows_residual_norm_backward(module):
    import test_rows

    for norm, out in (("rms", "bf16"), ("layer", "float32")):
        test_rows.check_backward(module, 5, 136, norm, ("bf16", "bf16", out), cores=1)
    test_rows.check_backward(module, 3, 64, "rms", copied=False, moved=False, added=False)
    test_rows.check_backward(module, 3, 1032, "layer", cores=1)


def check_rows_column_sums(module):
    import test_rows

    for add, kind in ((True, "bf16"), (False, "float32")):
        test_rows.check_columns(module, 70, 136, kind, add=add, cores=1)
    for rows in range(1, 40, 3):  # as many rows as a thread has on the way, and one more or less
        test_rows.check_columns(module, rows, 8, "bf16", cores=1)
    test_rows.check_columns(module, 5, 1032, "bf16", cores=1, seed=0)
    with mock.patch.object(test_rows.stream_backward, "sum_launch", module.sum_launch):
        test_rows.check_backward(test_rows.stream_backward, 3, 64, "layer", cores=1)  # three sums


def check_rows_rope(module):
    import test_rows

    for kind in ("bf16", "float32"):
        test_rows.check_rope(module, 2, 3, 2, 3, 16, kind, start=1, seed=0)
        test_rows.check_head_norm(module, 26, 3, 2, 32, kind, seed=0)


def check_rows_activations(module):
    import test_rows

    for what in ("swiglu", "gelu", "gelu_exact"):
        test_rows.check_gates(module, what, 3, 72, "float32", cores=1)
        test_rows.check_gates(module, what, 70, 8, cores=1)
        test_rows.check_gates(module, what, 70, 24, forward=False, cores=1, seed=0)
        test_rows.check_gates(
            module, what, 3, 24, "float32", False, again=False, summed=False, place=True
        )


def check_rows_embedding(module):
    import test_rows

    test_rows.looked_up(module)
    test_rows.check_embed(module, test_rows.sequences(2, 3, 5), 5, 8, "float32", learned=False)
    test_rows.scattered(module)
    test_rows.in_turns(module)


def attention_mma(module):
    import test_flash_mma as family

    with pytest.MonkeyPatch.context() as patch:
        family.use(module, patch)
        family.check_both(2, 2, 1, 5, 32)
        family.check_both(1, 1, 1, 70, 32)
        family.check_forward(1, 1, 1, 208, 32, forms=family.PARKED)


check_attention_softmax = check_attention_operands = attention_mma
check_attention_mma_parts = check_attention_mma_forward = check_attention_mma_backward = (
    attention_mma
)


def check_attention_float32_operands(module):
    import test_flash_pieces as family

    with pytest.MonkeyPatch.context() as patch:
        family.use(module, patch)
        for pieces in 2, 3:
            assert family.pairs_seen(pieces) < 1
            family.check_both((1, 2, 1, 24, 32), pieces)


def check_rows_cross_entropy(module):
    import test_update

    test_update.play_loss(module)


def check_rows_gradient_norm(module):
    import test_update

    test_update.play_norm(module)
    case = test_update.Judgement(np.ones(16))
    for _ in range(5):
        case.run(0, module)
        case.check()


def check_rows_adamw(module):
    import test_update

    test_update.play_update(module)
    many = replace(test_update.TINY, vocab_size=260)  # 4160 parameters: tiles of two rounds
    case = test_update.Training(many, 2)
    for seed in (0, 1):
        case.step(seed, module)
        case.check()


def check_rows_lora_merge(module):
    import test_lora_gpu

    test_lora_gpu.play_merge(module)


def check_products(module):
    import test_gemm

    test_gemm.play(module)


CHECKS = {
    name.removeprefix("check_").replace("_", ".", 1): check
    for name, check in list(globals().items())
    if name.startswith("check_") and name != "check_products"
} | {
    f"gemm.wgmma_{part}": check_products
    for part in ("form", "column_sums", "epilogue", "split_k", "kernel")
} | {f"tile.{part}": check_products for part in ("layout", "curves", "accumulator")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("modules", nargs="*", default=list(CHECKS))
    parser.add_argument("-n", type=int, default=40, help="variants of each, at random")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing")
    options = parser.parse_args()
    for name in options.modules:
        begin = time.perf_counter()
        left, count = survivors(name, CHECKS[name], options.n, options.seed)
        spent = time.perf_counter() - begin
        print(f"{name}: {count - len(left)} of {count} killed, {spent:.0f} s", flush=True)
        for variant in left:
            print(f"  {variant}", flush=True)


if __name__ == "__main__":
    main()
