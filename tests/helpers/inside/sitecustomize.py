"""What processors.py and perturb.py change in each Python that they start: this folder is on its
path, and Python imports a module of this name before anything else.

EMULATED_CORES=4       it has as many cores as that.
PERTURBED=SEED:SIZE    initial weights are multiplied by 1 + SIZE * noise. The noise is of SEED and
                       of what was asked for, so the same call still gives the same weights.
"""

import importlib.util
import os
import sys

if "EMULATED_CORES" in os.environ:
    count = int(os.environ["EMULATED_CORES"])
    os.cpu_count = lambda: count
    os.sched_getaffinity = lambda process: set(range(count))


class Perturbing:
    """Finds the module that makes initial weights, and changes what it makes."""

    MODULE = "nanoeuler.model.weights"

    def find_spec(self, name, path=None, target=None):
        """The spec of MODULE, whose `initialise` perturbs; None for every other."""
        if name != self.MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.initialise = self.perturbing(module.initialise)

        spec.loader.exec_module = exec_module
        return spec

    @staticmethod
    def perturbing(initialise):
        """`initialise`, and noise on what it returns."""
        seed, size = os.environ["PERTURBED"].split(":")

        def perturbed(config, *arguments, **named):
            import numpy as np

            w = initialise(config, *arguments, **named)
            noise = np.random.default_rng([int(seed), w.flat.size]).standard_normal(w.flat.size)
            w.flat *= (1 + float(size) * noise).astype(w.flat.dtype)
            return w

        return perturbed


if "PERTURBED" in os.environ:
    sys.meta_path.insert(0, Perturbing())
