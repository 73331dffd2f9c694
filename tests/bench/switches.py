"""Published families' switches on a GPU: `python tests/bench/switches.py [FAMILY ...] [--dry]`.

Small models, each with the switches of one family. Of each, by the engine cuda in bf16:
    gradients   of all weights, and of adapters, beside the reference in float64
    logits      of a text that is read in pieces by the decode kernels, likewise
Gradients are to be as near as those of the same kernels on paper, whose products NumPy does: two
draws of the same roundings, over thousands of numbers, so that their lengths differ by a few
percent, and by half at most. --dry makes those, of all models or of those named; the rows of both
are in data/measurements/interop.json. Logits have the bound of tests/test_cuda_engine.py, and half
of its roundings, the forward ones.
"""

import argparse
import sys
import traceback
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from nanoeuler import measurements
from nanoeuler.errors import UserError
from nanoeuler.model.config import ModelConfig

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "helpers")]

from bench.gpu import circumstances  # noqa: E402
from bench.step import relative  # noqa: E402
from recorded import by_numpy, problem, step_on_paper  # noqa: E402
from step_sides import card  # noqa: E402
from test_cuda_engine import bound  # noqa: E402
from test_lora import drawn  # noqa: E402
from test_lora_gpu import HOPPER, exactly, relative_errors  # noqa: E402
from test_lora_gpu import step_on_paper as lora_on_paper  # noqa: E402

from nanoeuler.engines.gpu.decode.decoder import CudaReader  # noqa: E402
from nanoeuler.engines.gpu.lang.bf16 import from_bf16, to_bf16  # noqa: E402
from nanoeuler.engines.gpu.step.lora import LoraStepper, Packing  # noqa: E402
from nanoeuler.engines.gpu.step.precision import BF16  # noqa: E402
from nanoeuler.engines.gpu.step.recording import GRADIENTS  # noqa: E402
from nanoeuler.engines.gpu.step.stepper import CudaStepper  # noqa: E402
from nanoeuler.engines.reference import ReferenceEngine  # noqa: E402
from nanoeuler.model.lora import AdaptedWeights, Adapters, Lora  # noqa: E402
from nanoeuler.model.transformer import forward, loss_and_gradients  # noqa: E402
from nanoeuler.model.weights import Weights  # noqa: E402
from nanoeuler.training.lora import LoraAdamW  # noqa: E402
from nanoeuler.training.optim import AdamW  # noqa: E402

LLAMA = ModelConfig(
    vocab_size=512, dim=256, n_layers=2, n_heads=4, n_kv_heads=2, hidden=512, context=256,
    n_predict=1, tied=True,
)  # fmt: skip
GPT = replace(LLAMA, n_kv_heads=4, norm="layer", position="learned", mlp="gelu", bias=True)
T = 96  # positions of a text
MOST = 1.5  # of the error on paper
FAMILIES = {
    "llama": replace(LLAMA, rope_base=5e5, rope_scaling="llama3", rope_factor=8.0,
                     rope_original_context=64),
    "mistral": replace(LLAMA, tied=False, sliding_window=70),
    "qwen2": replace(LLAMA, qkv_bias=True, rope_base=1e6, norm_eps=1e-6),
    "qwen3": replace(LLAMA, qk_norm=True, head_width=128, rope_base=1e6),
    "qwen3, a pattern of windows": replace(LLAMA, qk_norm=True, sliding_window=33,
                                           window_pattern="SL"),
    "gpt2": GPT,
    "gpt2, exact GELU": replace(GPT, mlp="gelu_exact"),
}  # fmt: skip


def gradients(config):
    """Relative errors of all gradients and of the loss."""
    w, tokens, targets, scale = problem(config, 2, T)
    exact_w = Weights(config, np.float64, w.flat.astype(np.float64))
    exact = exact_w.zeros_like()
    given = config, exact_w, tokens, targets, scale, exact
    sums = loss_and_gradients(ReferenceEngine(), *given)
    there, taken = one_step(CudaStepper(w, AdamW(w), card(False)), tokens, targets)
    made = Weights(config, flat=there[: w.flat.size])
    errors = {name: relative(made[name], exact[name]) for name in exact}
    return errors | {"sums": relative(taken.sums, sums)}


def adapters(config):
    """The same of adapters of rank 8 at every matrix; of A and B of a matrix as a whole."""
    w, *batch = problem(config, 2, T)
    both = AdaptedWeights(w, Lora(8).settled(config))
    drawn(both.adapters, size=0.1)  # not merged: each side does that
    exact, sums = exactly(both, *batch)
    there, taken = one_step(LoraStepper(both, LoraAdamW(both), card(False)), *batch[:2])
    packing, made = Packing(config, both.lora), Adapters(config, both.lora)
    packing.unpack(there[: packing.size], made)
    return relative_errors(packing, (taken.sums, made), (sums, exact))


def on_paper(config, what):
    """Errors of the same step on paper."""
    if what == "gradient":
        return step_on_paper(config, 2, T, HOPPER, BF16).errors()
    return lora_on_paper((config, Lora(8), 1), 2, T)


def one_step(stepper, tokens, targets):
    """The buffer of gradients after a step of rate 0, and what was taken."""
    as_int = [np.ascontiguousarray(x, np.int32) for x in (tokens, targets)]
    taken = stepper.step(*as_int, 0.0, 1) + stepper.finish()
    stepper.device.synchronize()
    (program,) = stepper.programs.values()
    return stepper.device.host(program.shared[GRADIENTS]).reshape(-1).view(np.float32), taken[-1]


def logits(config):
    """The error of logits at all positions, the text in pieces; matrices are bf16's values."""
    w, tokens, *_ = problem(config, 1, T)
    for name, tensor in w.items():
        if tensor.ndim == 2 and name != "positions":
            tensor[...] = from_bf16(to_bf16(tensor))
    exact_w = Weights(config, np.float64, w.flat.astype(np.float64))
    exact = forward(ReferenceEngine(), config, exact_w, tokens)[0][0, :, 0]
    reader, text, at, made = CudaReader(config, w, card(False), "bf16", 1), tokens[0], 0, []
    for n in (4, 1, T - 6, 1):
        made.append(reader.read([text[at : at + n].tolist()], [at], rows=n)[0, :, 0])
        at += n
    return {"logits": relative(np.concatenate(made), exact)}


def peer(what, case, config):
    """What an error is held against: (peer, its value)."""
    if what == "logits":
        return "bound", bound(config) * 0.5**0.5
    rows = measurements.load("interop")
    found = [row["value"] for row in rows if row["engine"] == "paper" and row["case"] == case
             and row["what"] == f"{what}, largest error"]  # fmt: skip
    return "paper", found[-1] if found else None


class Patches:
    """Stands for pytest's, for good."""

    setattr = staticmethod(setattr)


def main():
    known = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known.add_argument("families", nargs="*", choices=[*FAMILIES, []])
    known.add_argument("--dry", action="store_true")
    known.add_argument("--commit", default="")
    options, failed = known.parse_args(), 0
    commit = options.commit or measurements.commit()
    where = {} if options.dry else circumstances(card(False).name, commit)
    finds = {"gradient": gradients, "adapter gradient": adapters, "logits": logits}
    if options.dry:
        by_numpy(Patches, attention=False)
        finds = {what: partial(on_paper, what=what) for what in list(finds)[:2]}
    for family, (what, find) in product(options.families or FAMILIES, finds.items()):
        config, case = FAMILIES[family], f"{family}, bf16"
        try:
            errors = find(config)
        except UserError as error:
            print(f"{family}, {what}: refused: {error}", flush=True)
            continue
        except Exception:
            traceback.print_exc()
            failed += 1
            continue
        worst = max(errors, key=errors.get)
        given = f"{what}, largest error", case, "paper" if options.dry else "cuda"
        row = measurements.row(*given, float(errors[worst]), "relative to float64") | where
        if not options.dry:
            row["peer"], row["peer_value"] = peer(what, case, config)
            most = row["peer_value"] and row["peer_value"] * (1 if what == "logits" else MOST)
            wrong = not (most and errors[worst] < most)
            failed += wrong
            print("FAILED: more than" if wrong else "less than", most, end=" ")
        print(f"{family}, {what}: {errors[worst]:.2e}, {worst}", flush=True)
        measurements.update("interop", [row])
    return failed


if __name__ == "__main__":
    sys.exit(main())
