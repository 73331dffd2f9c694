"""A GPU that pretends to be another card: what it's told of it, what it refuses, what it computes.

The kernels of a step are tested with theirs; here whole steps, texts and adapters go through the
engines as NANOEULER_CAPABILITY has them, in the emulator, beside the engine of a processor.
"""

import lazy_driver
import numpy as np
import pytest
import recorded as helpers
from idle_card import IdleCard, install
from tiers import kept

from nanoeuler.emulator import Device
from nanoeuler.engines import registry
from nanoeuler.engines.gpu.decode import decoder as decoder_module
from nanoeuler.engines.gpu.gemm.mma_form import MmaForm
from nanoeuler.engines.gpu.gemm.mma_kernel import mma_kernel
from nanoeuler.engines.gpu.gemm.wgmma_form import Form
from nanoeuler.engines.gpu.gemm.wgmma_kernel import gemm_kernel
from nanoeuler.engines.gpu.host import device as device_module
from nanoeuler.engines.gpu.host.compile import machine
from nanoeuler.engines.gpu.lang.card import PRETENDED, SHARED, TYPICAL, Card, pretended, stand_in
from nanoeuler.engines.gpu.step import backends, stepper
from nanoeuler.engines.gpu.step.lora import LoraStepper
from nanoeuler.engines.gpu.step.matmul import Multiplier
from nanoeuler.engines.gpu.step.precision import PRECISIONS
from nanoeuler.engines.gpu.step.stepper import CudaStepper
from nanoeuler.errors import UserError
from nanoeuler.inference.backends import make_reader
from nanoeuler.inference.decoder import Decoder
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.lora import AdaptedWeights, Lora
from nanoeuler.planning import gpu_memory, plan
from nanoeuler.planning.cards import CARDS
from nanoeuler.training.lora import LoraAdamW
from nanoeuler.training.optim import AdamW

TINY = ModelConfig(
    vocab_size=64, dim=64, n_layers=1, n_heads=2, n_kv_heads=1, hidden=64, context=16, n_predict=1
)
H100, RTX_3090 = TYPICAL[9, 0], Card((8, 6), 82, 6 << 20)
OTHERS = [".".join(map(str, capability)) for capability in TYPICAL if capability != (9, 0)]


@pytest.mark.parametrize("said, card", [
    ("", None), (" ", None), ("8.9", TYPICAL[8, 9]), ("12.0", TYPICAL[12, 0]),
    ("8.9x132", Card((8, 9), 132, 36 << 20)), ("8.6x1", Card((8, 6), 1, 3 << 20)),
])  # fmt: skip
def test_the_variable_names_a_card(monkeypatch, said, card):
    monkeypatch.setenv(PRETENDED, said)
    assert pretended() == card


@pytest.mark.parametrize(
    "said", ["7.5", "8.9x0", "8.9x", "89", "8.90", "rtx-4070", "x132", "8.9 8"]
)
def test_what_names_no_card_is_refused(monkeypatch, said):
    monkeypatch.setenv(PRETENDED, said)
    with pytest.raises(UserError, match=f"8.9, 9.0 or 12.0, .*got '{said}': choose one of them"):
        pretended()


def test_the_cards_are_those_of_the_plans_table():
    for key in "a100", "rtx-3060", "rtx-4070", "h100", "rtx-5090":
        card = CARDS[key]
        assert TYPICAL[card.capability] == (card.capability, card.multiprocessors, card.l2_bytes)
    assert {*TYPICAL} <= {*SHARED}


@pytest.mark.parametrize("said, real, found", [
    ("", RTX_3090, RTX_3090), ("8.9", H100, TYPICAL[8, 9]), ("8.0", H100, TYPICAL[8, 0]),
    ("12.0", H100, TYPICAL[12, 0]._replace(multiprocessors=132)),
    ("8.9x200", H100, Card((8, 9), 132, 36 << 20)), ("9.0", H100, H100),
    ("8.6", TYPICAL[12, 0], TYPICAL[8, 6]), ("8.6", RTX_3090, TYPICAL[8, 6]),
    # An older card, one with less shared memory, one without Hopper's instructions.
    ("8.9", RTX_3090, None), ("8.0", TYPICAL[8, 9], None), ("9.0", TYPICAL[12, 0], None),
    ("12.0", TYPICAL[8, 9], None),
])  # fmt: skip
def test_who_can_pretend_to_be_whom(monkeypatch, said, real, found):
    monkeypatch.setenv(PRETENDED, said)
    if found:
        assert stand_in(real) == found
    else:
        said = f"{PRETENDED} is {said}, and this GPU, of capability .* a card: name another, or"
        with pytest.raises(UserError, match=said):
            stand_in(real)


def test_a_gpu_compiles_for_itself_what_it_chooses_for_another(monkeypatch):
    driver, targets = lazy_driver.Driver(), []

    def compiled(kernels, capability):
        targets.append(machine(*kernels, capability))
        return [device_module.Code(".entry some_kernel(", target=targets[-1])]

    monkeypatch.setattr(device_module.libraries, "driver", lambda: driver)
    monkeypatch.setattr(device_module, "compiled", compiled)
    monkeypatch.setenv(PRETENDED, "8.9")
    gpu = device_module.Device()
    assert (gpu.real, gpu.card) == (H100, TYPICAL[8, 9])
    assert (gpu.capability, gpu.multiprocessors) == ((8, 9), 46)
    fits, wide = (mma_kernel(MmaForm("NT", columns=columns)) for columns in (128, 256))
    driver.kernels["some_kernel"] = fits
    gpu.load(fits)
    assert targets == [(9, 0)]
    for each in gpu, Device():  # the emulator's, too
        with pytest.raises(UserError, match=r"147584 bytes .* \(8, 9\) gives it 101376 at most"):
            each.load(wide)
        with pytest.raises(UserError, match=r"for GPUs of capability 9.0, not \(8, 9\)"):
            each.load(gemm_kernel(Form()))
    Device(capability=(8, 0)).load(wide)
    with pytest.raises(UserError, match="expected the compute capability"):
        monkeypatch.setenv(PRETENDED, "Ada")
        device_module.Device()


def test_what_is_pretended_is_said(monkeypatch):
    card = install(monkeypatch, IdleCard())
    assert "pretend" not in gpu_memory.found() + gpu_memory.words(TINY, 2, 1, "cuda")
    assert "pretend" not in plan.report(TINY)
    monkeypatch.setenv(PRETENDED, "8.9")
    card.card = stand_in(card.real)
    card.capability, card.multiprocessors, _ = card.card
    told = f"{PRETENDED} has it pretend to be a card of capability 8.9 with 46 multiprocessors"
    assert gpu_memory.found().startswith("an idle card, compute capability 9.0, 20.0 of 24.0 GB")
    for said in gpu_memory.found(), gpu_memory.words(TINY, 2, 1, "cuda"):
        assert told in said and "our kernels multiply" in said
    assert f"{PRETENDED} has this machine's GPU pretend to be a card of capability 8.9" in (
        plan.report(TINY)
    )


def test_the_library_cannot_pretend(monkeypatch):
    monkeypatch.setattr(backends, "find_spec", lambda name: True)
    assert backends.multiplier() is backends.Fastest
    monkeypatch.setenv(PRETENDED, "8.9")
    assert backends.multiplier() is Multiplier


def test_of_two_cards_one_is_named(monkeypatch):
    driver = lazy_driver.Driver()
    driver.names = b"NVIDIA GeForce RTX 4070\0", b"NVIDIA GeForce RTX 3060\0"
    monkeypatch.setattr(device_module.libraries, "driver", lambda: driver)
    monkeypatch.setattr(stepper, "gpu", stepper.gpu.__wrapped__)
    monkeypatch.setenv(stepper.NUMBER, "1")
    told = gpu_memory.found()
    assert told.startswith("NVIDIA GeForce RTX 3060, compute capability 9.0")
    assert "(1 of several, 0 is NVIDIA GeForce RTX 4070: NANOEULER_GPU selects one)" in told
    for wrong, why in ("2", "of this machine, 0 to 1, got 2"), ("first", "as 0 or 1, got 'first'"):
        monkeypatch.setenv(stepper.NUMBER, wrong)
        with pytest.raises(UserError, match=f"expected the number of a GPU .*{why}"):
            stepper.gpu()
    driver.names = driver.names[:1]
    monkeypatch.setenv(stepper.NUMBER, "1")
    with pytest.raises(UserError, match="0 alone, got 1"):
        stepper.gpu()


# ---- What is computed


def step(capability, engine, monkeypatch):
    """Two steps of training and a loss, as `capability` has them, are those of the reference."""
    monkeypatch.setenv(PRETENDED, capability)
    both = []
    for _ in range(2):
        w, tokens, targets, _ = helpers.problem(TINY, 2, 4)
        both.append(w)
    ours = CudaStepper(both[0], AdamW(both[0]), Device(), precision=PRECISIONS[engine])
    theirs = registry.make_stepper("reference", both[1], AdamW(both[1]))
    room = 0.02 if engine == "cuda" else 2e-4  # as in test_cuda_engine: 2^-9, 2^-16, many times
    for number in 1, 2:
        ours.step(tokens, targets, 1e-3, number)
        (mine,), (exact,) = ours.finish(), theirs.step(tokens, targets, 1e-3, number)
        np.testing.assert_allclose(mine.sums, exact.sums, rtol=room)
        np.testing.assert_allclose(mine.norm, exact.norm, rtol=room)
    kernels = {launch.kernel for launch in ours.programs.popitem()[1].graph.launches}
    names = {kernel.function.__name__ for kernel in kernels}
    assert "gemm_mma" in names and not any("wgmma" in name for name in names)


@pytest.mark.parametrize("capability, engine", kept(
    [(capability, engine) for capability in OTHERS for engine in PRECISIONS], ("8.9", "cuda")
))  # fmt: skip
def test_steps_are_the_references(capability, engine, monkeypatch):
    step(capability, engine, monkeypatch)


@pytest.mark.parametrize("capability", kept(OTHERS, "8.9"))
def test_a_text_goes_on_as_on_a_processor(capability, monkeypatch):
    monkeypatch.setenv(PRETENDED, capability)
    monkeypatch.setattr(registry, "_no_gpu", lambda: "")
    monkeypatch.setattr(decoder_module, "gpu", Device)
    w, tokens, _, _ = helpers.problem(TINY, 2, 4)
    logits = []
    for engine in "cuda", "reference":
        decoder = Decoder(TINY, w, make_reader(TINY, w, engine))
        decoder.read(tokens[0, :3])
        logits.append(decoder.read(tokens[0, 3:]))
    assert np.linalg.norm(logits[0] - logits[1]) <= 0.02 * np.linalg.norm(logits[1])


@pytest.mark.parametrize("capability", kept(OTHERS, "8.9"))
def test_adapters_learn_as_by_the_reference(capability, monkeypatch):
    monkeypatch.setenv(PRETENDED, capability)
    both = []
    for _ in range(2):
        w, tokens, targets, _ = helpers.problem(TINY, 2, 4)
        both.append(AdaptedWeights(w, Lora(2).settled(TINY)))
        both[-1].begin(1)
        both[-1].merge()
    ours = LoraStepper(both[0], LoraAdamW(both[0]), Device())
    theirs = registry.make_stepper("reference", both[1], LoraAdamW(both[1]))
    ours.step(tokens, targets, 1e-2, 1)
    (mine,), (exact,) = ours.finish(), theirs.step(tokens, targets, 1e-2, 1)
    # Some twenty roundings to bf16 on the way, by 2^-9 at most and of either sign: 2^-9 times the
    # root of 20 is 0.009, and twice that.
    np.testing.assert_allclose(mine.sums, exact.sums, rtol=0.02)
    np.testing.assert_allclose(mine.norm, exact.norm, rtol=0.02)
