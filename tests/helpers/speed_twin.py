"""PyTorch in the race of five minutes: `python tests/helpers/speed_twin.py SPEC.json`.

The specification is what `tests/bench/speedrun.py` writes: model, settings, minutes. The clock, the
plan and the order of the data are ours, and so are the rules: everything counts from the start of
this process to the end of the last step. First weights are drawn on the device, as PyTorch's users
do. With "steps" it takes only so many, and says when the first had ended, on the clock of the
machine, which all processes share.
"""

import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from nanoeuler.training.clock import Clock, Plan  # noqa: E402

DEVIATION = 0.02  # of first weights: `model.weights.INITIAL_DEVIATION`
# As `training.speedrun` has them, which would import much that isn't needed.
SETTLED, MEASURED, SHARE, LOOKS, RESERVE = 10, 20, 0.01, (0.25, 0.5, 0.75, 0.95), 0.25


def drawn(config, device, seed):
    """A model on the device, with first weights distributed as ours are."""
    import torch
    from torch_peer import Model

    torch.manual_seed(seed)
    with torch.device(device):
        model = Model(config)
    model = model.to(device, torch.float32)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if x.ndim < 2:
                x.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            small = name.endswith(("wo.weight", "w_down.weight"))
            by = (0.0 if config.init == "zero" else (2 * config.n_layers) ** -0.5) if small else 1
            x.normal_(0, DEVIATION).mul_(by)
    return model


class Racer:
    """A model in training, whose steps are begun and not waited for."""

    def __init__(self, spec, config, device):
        import torch
        from torch_peer import adamw

        settings, dry = spec["settings"], spec["dry"]
        torch.set_float32_matmul_precision("high")
        torch._dynamo.config.error_on_recompile = True
        self.torch, self.device, self.settings = torch, device, settings
        self.model = drawn(config, device, settings["seed"])
        mode = {} if spec["mode"] == "default" else {"mode": spec["mode"]}
        self.loss = self.model if dry else torch.compile(self.model, **mode)
        self.muon, self.ratio = None, spec["ratio"]
        if settings["optimizer"] == "muon":
            from torch_muon import Muon

            self.muon = Muon(self.model, config, settings["weight_decay"], not dry)
        self.optimizer = adamw(self.model)
        mine = self.muon.learned if self.muon else set()
        for group in self.optimizer.param_groups:
            group["params"] = [x for x in group["params"] if id(x) not in mine]
            group["betas"] = group["betas"][0], settings["beta2"]
            group["weight_decay"] = settings["weight_decay"] if group["weight_decay"] else 0.0
        count = settings["batch_size"] * config.context
        self.scale = torch.full((1,), 1 / count, device=device)
        self.losses, self.events = [], []

    def there(self, x):
        """A batch's array on the device; nobody waits for it."""
        x = self.torch.from_numpy(x).long()
        if self.device == "cpu":
            return x
        return x.pin_memory().to(self.device, non_blocking=True)

    def step(self, tokens, targets, rate):
        """Begin a step, and wait for the one before the last: no more than two are under way."""
        torch = self.torch
        with torch.autocast(self.device, torch.bfloat16):
            value, _ = self.loss(self.there(tokens), self.there(targets), self.scale)
        value.backward()
        self.losses = [*self.losses[-1:], value.detach()]
        clip = self.settings["clip"]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip, foreach=True)
        if self.muon:
            self.muon.step(self.ratio * rate)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.model.zero_grad(set_to_none=True)  # AdamW has not all of them
        if self.device != "cpu":
            self.events.append(torch.cuda.Event())
            self.events[-1].record()
            if len(self.events) > 2:
                self.events.pop(0).synchronize()

    def wait(self):
        """Wait for all steps that were begun; an error if the last loss isn't finite."""
        if self.device != "cpu":
            self.torch.cuda.synchronize()
        if self.losses and not self.torch.isfinite(self.losses[-1]).item():
            sys.exit("PyTorch's loss isn't finite: lower the learning rate")


def race(racer, batches, plan, clock, most):
    """Steps until the clock is over, or `most` of them; how many, and when the first had ended."""
    number, pace, mark, first, looks = 0, 0.0, (0.0, 0), 0.0, [*LOOKS]
    while (plan.steps is None or number < plan.steps) and clock.left > 3 * pace and number != most:
        number += 1
        racer.step(*batches.batch(number), plan.rate(number))
        if number in (1, SETTLED):
            racer.wait()
            if number == 1:
                first = clock()
                print(f"first {time.monotonic()}", flush=True)
            mark = clock(), number
            continue
        since = clock() - mark[0]
        if plan.steps is None:
            enough = number >= SETTLED + MEASURED and since >= SHARE * clock.budget
            due = enough or clock.left < clock.budget / 2
        else:
            due = bool(looks) and number >= max(looks[0] * plan.steps, mark[1] + MEASURED)
            looks = looks[due:]
        if due:
            racer.wait()
            pace = (clock() - mark[0]) / (number - mark[1])
            plan.revise(number, number + int((clock.left - RESERVE) / pace))
            mark = clock(), number
            print(f"{clock():6.1f} s  {plan.steps:,} steps fit, at {1e3 * pace:.2f} ms; loss "
                  f"{float(racer.losses[-1]):.3f}", flush=True)  # fmt: skip
    racer.wait()
    if not number:
        sys.exit(f"PyTorch began no step within {clock.budget:.1f} s: give more minutes")
    return number, first


def main():
    spec = json.loads(Path(sys.argv[1]).read_text())
    clock = Clock(60 * spec["minutes"])
    from nanoeuler.data.batches import Batches, Prefetcher
    from nanoeuler.data.dataset import Prepared
    from nanoeuler.model.config import ModelConfig

    config, settings = ModelConfig(**spec["model"]), spec["settings"]
    prepared = Prepared(spec["data"])
    racer = Racer(spec, config, "cpu" if spec["dry"] else "cuda")
    batches = Prefetcher(Batches(prepared.train, settings["batch_size"], config.context,
                                 config.n_predict, settings["seed"]))  # fmt: skip
    plan = Plan(settings["lr"], settings["warmup"])
    steps, first = race(racer, batches, plan, clock, spec.get("steps"))
    seconds = clock()
    print(f"{steps:,} steps in {seconds:.1f} s, the first after {first:.2f} s", flush=True)
    if out := spec.get("out"):
        from torch_peer import ours

        from nanoeuler.model.weights import Weights
        from nanoeuler.training.checkpoint import write_model

        made = Weights(config)
        for name, x in racer.model.named_parameters():
            name, x = ours(name, x.detach())
            made[name][...] = x.cpu().numpy()
        write_model(Path(out), config, prepared.tokenizer, made, "PyTorch, in five minutes")
    if told := spec.get("told"):
        count = settings["batch_size"] * config.context
        Path(told).write_text(json.dumps({
            "steps": steps, "tokens": steps * count, "seconds": seconds, "first_step": first,
            "tokens_per_second": steps * count / seconds, "plans": plan.revisions,
            "cut": plan.steps is None or steps < plan.steps, "clock": clock.source,
        }))  # fmt: skip


if __name__ == "__main__":
    main()
