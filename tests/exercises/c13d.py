"""Wrong answers to the exercises of chapter 13d, each of which its check must refuse."""

import numpy as np

CHAPTER = "13d-twelve-minutes"
NAMES = dict(np=np)

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
]
