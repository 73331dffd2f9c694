"""Wrong answers to the exercises of chapter 9a, each of which its check must refuse."""

import numpy as np

from nanoeuler.training.optim import learning_rate

CHAPTER = "09a-twelve-minutes"
NAMES = dict(np=np, learning_rate=learning_rate)

RATE = 'learning_rate(step, training["steps"], training["lr"], training["warmup"])'
STEPS = '1 / (rate * training["weight_decay"])'
ANSWERS = [
    ("readings", "at the peak throughout", RATE, 'training["lr"]'),
    ("readings", "a step late", "learning_rate(step,", "learning_rate(step + 1,"),
    ("readings", "at the end of the run", "learning_rate(step,",
     'learning_rate(training["steps"],'),
    ("readings", "without warm-up", 'training["warmup"])', "0)"),
    ("readings", "a run of twice the length", 'training["steps"],', '2 * training["steps"],'),
    ("readings", "the decay alone", STEPS, '1 / training["weight_decay"]'),
    ("readings", "the rate alone", STEPS, "1 / rate"),
    ("readings", "not turned over", STEPS, 'rate * training["weight_decay"]'),
    ("readings", "half-lives", STEPS, 'np.log(2) / (rate * training["weight_decay"])'),
    ("readings", "a sum, not a product", STEPS, '1 / (rate + training["weight_decay"])'),
    ("readings", "steps, not readings", 'steps * training["tokens_a_step"] / tokens', "steps"),
    ("readings", "tokens, not readings", "/ tokens", "/ 1"),
    ("readings", "readings of a step", 'steps * training["tokens_a_step"]', "steps"),
    ("readings", "rounded", "return steps *", "return round(steps) *"),
    ("left", "its own step takes some", "range(step + 1,", "range(step,"),
    ("left", "the next step takes none", "range(step + 1,", "range(step + 2,"),
    ("left", "the last step takes none", "steps + 1):", "steps):"),
    ("left", "the steps before it", "range(step + 1, steps + 1)", "range(1, step + 1)"),
    ("left", "all steps", "range(step + 1, steps + 1)", "range(1, steps + 1)"),
    ("left", "at the rate of its own step", "learning_rate(later,", "learning_rate(step,"),
    ("left", "at the last rate", "learning_rate(later,", "learning_rate(steps,"),
    ("left", "at the peak", 'learning_rate(later, steps, training["lr"], training["warmup"])',
     'training["lr"]'),
    ("left", "without warm-up", 'training["warmup"])', "0)"),
    ("left", "the decay alone", 'rate * training["weight_decay"]', 'training["weight_decay"]'),
    ("left", "the rate alone", 'rate * training["weight_decay"]', "rate"),
    ("left", "a sum of losses", 'left *= 1 - rate * training["weight_decay"]',
     'left -= rate * training["weight_decay"]'),
    ("left", "what is taken", "return left", "return 1 - left"),
    ("left", "an exponential", "left *= 1 - rate * training[\"weight_decay\"]",
     "left *= np.exp(-rate * training[\"weight_decay\"])"),
    ("left", "the square of the rate", 'rate * training["weight_decay"]',
     'rate**2 * training["weight_decay"]'),
]
