"""PyTorch's twin of a run: the same first weights, batches, rates and rules, as many seconds.

The first step of a command, in which torch.compile works, is timed apart. A run that is stopped
goes on in the next command from a checkpoint of its own, and compiles again.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanoeuler.data.batches import Batches, Prefetcher
from nanoeuler.data.dataset import Prepared
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.weights import Weights, initialise
from nanoeuler.training.optim import learning_rate
from nanoeuler.training.run import LARGEST, Settings

SETTLED, PACE, LOOK = 20, 100, 100  # steps before the pace is taken, of it, and between two looks


@dataclass
class Plan:
    """What the twin does: settings.steps None is as many as fit into `seconds` of steps."""

    config: ModelConfig
    settings: Settings
    seconds: float
    checkpoint: Path
    stop_after: float  # seconds of this command, at its start
    dry: bool = False


class Twin:
    """The twin between two steps."""

    def __init__(self, prepared: Prepared, plan: Plan) -> None:
        from torch_peer import Trainer

        settings, config = plan.settings, plan.config
        self.plan, self.began = plan, time.perf_counter()
        self.trainer = Trainer(config, initialise(config, settings.seed), "bf16", not plan.dry,
                               "cpu" if plan.dry else "cuda")  # fmt: skip
        for group in self.trainer.optimizer.param_groups:
            group["betas"] = group["betas"][0], settings.beta2
            group["weight_decay"] = settings.weight_decay if group["weight_decay"] else 0.0
        self.batches = Prefetcher(Batches(prepared.train, settings.batch_size, config.context,
                                          config.n_predict, settings.seed))  # fmt: skip
        self.step, self.steps, self.spent = 0, settings.steps, 0.0
        self.losses: list[tuple[int, float]] = []
        if plan.checkpoint.exists():
            self.resume()

    def resume(self) -> None:
        """Go on where the checkpoint is."""
        import torch

        kept = torch.load(self.plan.checkpoint, map_location=self.trainer.device)
        self.trainer.model.load_state_dict(kept["model"])
        self.trainer.optimizer.load_state_dict(kept["optimizer"])
        self.step, self.steps, self.spent = kept["step"], kept["steps"], kept["spent"]
        self.losses = kept["losses"]

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        import torch

        from nanoeuler.files import replacing

        kept = {"model": self.trainer.model.state_dict(), "step": self.step, "steps": self.steps,
                "optimizer": self.trainer.optimizer.state_dict(), "spent": self.spent,
                "losses": self.losses}  # fmt: skip
        with replacing(self.plan.checkpoint) as temporary:
            torch.save(kept, temporary)

    def take_step(self) -> None:
        """One training step, begun and not waited for."""
        settings, number = self.plan.settings, self.step + 1
        tokens, targets = self.batches.batch(number)
        rate = learning_rate(number, self.steps or LARGEST[int], settings.lr, settings.warmup)
        self.trainer.step(tokens, targets, rate, number)
        self.step = number

    def look(self) -> None:
        """Wait, and note the loss of the newest step; an error if it is not finite."""
        plan = self.plan
        count = plan.settings.batch_size * plan.config.context
        loss = float(self.trainer.sums[-1][0]) / count
        self.trainer.sums.clear()
        if not np.isfinite(loss):
            sys.exit(f"the twin's loss is not finite at step {self.step}: give a lower rate")
        self.losses.append((self.step, loss))
        print(f"twin: step {self.step:,} of {self.steps or 0:,}, loss {loss:.3f}", flush=True)

    def run(self) -> dict:
        """Steps to the end or to `stop_after`; what the command took."""
        first = self.step + 1
        self.take_step()
        self.trainer.wait()
        compiled = time.perf_counter() - self.began
        begin, before, at, spent = self.step, self.spent, time.perf_counter(), self.spent
        settled, pace = (1, 1) if self.plan.dry else (SETTLED, PACE)
        mark = at
        while self.steps is None or self.step < self.steps:
            self.take_step()
            if self.steps is None and self.step - begin in (settled, settled + pace):
                self.trainer.wait()
                now = time.perf_counter()
                if self.step - begin > settled:
                    each, self.spent = (now - mark) / pace, before + now - at
                    self.steps = self.step + max(1, int((self.plan.seconds - self.spent) / each))
                mark = now
            if self.step % LOOK == 0 or self.step == self.steps:
                self.look()
                if time.perf_counter() - self.began > self.plan.stop_after:
                    break
        self.trainer.wait()
        loop = time.perf_counter() - at
        loop *= 1 + 1 / max(1, self.step - begin)  # the first step's own share
        self.spent = spent + loop
        return {"first": compiled, "loop": loop, "from": first, "to": self.step,
                "steps": self.steps}  # fmt: skip

    def weights(self) -> Weights:
        """The weights as ours are laid."""
        from torch_peer import ours

        made = Weights(self.plan.config)
        for name, x in self.trainer.model.named_parameters():
            name, x = ours(name, x.detach())
            made[name][...] = x.cpu().numpy()
        return made
