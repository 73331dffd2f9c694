"""Wrong answers to the exercises of chapter 7, each of which its check must refuse."""

import numpy as np

CHAPTER = "07-the-first-run"
NAMES = dict(np=np)

SIGN = "np.sign(beta1 * m + (1 - beta1) * g)"
KEEP = "    m *= beta2\n    m += (1 - beta2) * g"
ANSWERS = [
    ("lion", "no sign", SIGN, "beta1 * m + (1 - beta1) * g"),
    ("lion", "the sign of the gradient alone", SIGN, "np.sign(g)"),
    ("lion", "the sign of the old moment alone", SIGN, "np.sign(m)"),
    ("lion", "the step with beta2", SIGN, "np.sign(beta2 * m + (1 - beta2) * g)"),
    ("lion", "the two weights of the step exchanged", SIGN, "np.sign((1 - beta1) * m + beta1 * g)"),
    ("lion", "the gradient is not weighed", SIGN, "np.sign(beta1 * m + g)"),
    ("lion", "it climbs", "w -= lr", "w += lr"),
    ("lion", "no decay", "(s + decay * w)", "s"),
    ("lion", "decay without the rate", "lr * (s + decay * w)", "lr * s + decay * w"),
    ("lion", "decay by the sign of the weight", "decay * w", "decay * np.sign(w)"),
    ("lion", "decay inside the sign", SIGN, "np.sign(beta1 * m + (1 - beta1) * (g + decay * w))"),
    ("lion", "a new array, not w", "w -= lr * (s + decay * w)", "w = w - lr * (s + decay * w)"),
    ("lion", "a new array, not m", KEEP, "    m = beta2 * m + (1 - beta2) * g"),
    ("lion", "the moment with beta1", KEEP, "    m *= beta1\n    m += (1 - beta1) * g"),
    ("lion", "the moment forgets nothing", "    m *= beta2\n", ""),
    ("lion", "the gradient joins the moment whole", "+= (1 - beta2) * g", "+= g"),
    ("lion", "the moment keeps signs", "+= (1 - beta2) * g", "+= (1 - beta2) * np.sign(g)"),
    ("lion", "the gradient is overwritten", KEEP, "    g *= 1 - beta2\n    m *= beta2\n    m += g"),
    ("held", "the first step stands still", "number / warmup", "(number - 1) / warmup"),
    ("held", "the line never arrives", "number / warmup", "number / (warmup + 1)"),
    ("held", "the line is as long as the run", "peak * number / warmup", "peak * number / steps"),
    ("held", "no warm-up", "peak * number / warmup", "peak"),
    ("held", "the peak is forgotten in the line", "peak * number / warmup", "number / warmup"),
    ("held", "the peak is forgotten at the end", "peak * min", "min"),
    ("held", "the last step stands still", "steps + 1 - number", "steps - number"),
    ("held", "the fall begins late", "left / (fall + 1)", "left / fall if fall else 1.0"),
    ("held", "no fall", "min(1.0, left / (fall + 1))", "1.0"),
    ("held", "the fall begins above the peak", "min(1.0, left / (fall + 1))", "left / (fall + 1)"),
    ("held", "the larger of the two", "min(1.0", "max(1.0"),
    ("held", "it falls from the warm-up on", "left / (fall + 1)", "left / (steps - warmup + 1)"),
    (
        "held",
        "half a cosine",
        "left / (fall + 1))",
        "0.5 - 0.5 * np.cos(np.pi * min(1.0, left / (fall + 1))))",
    ),
    (
        "held",
        "warm-up is a tenth at most",
        "if number <= warmup:",
        "warmup = min(warmup, steps // 10)\n    if number <= warmup:",
    ),
    (
        "epoch",
        "steps are counted from 0",
        "range((step - 1) * B, step * B)",
        "range(step * B, (step + 1) * B)",
    ),
    (
        "epoch",
        "the batches overlap",
        "range((step - 1) * B, step * B)",
        "range(step - 1, step - 1 + B)",
    ),
    ("epoch", "one too few", "step * B)", "step * B - 1)"),
    ("epoch", "every epoch in one order", "place // n", "0"),
    ("epoch", "the order of the step", "place // n", "step"),
    ("epoch", "an order for each window", "place // n", "place"),
    ("epoch", "the seed does nothing", "[seed, place // n]", "[place // n]"),
    ("epoch", "seeds are moved epochs", "[seed, place // n]", "seed + place // n"),
    ("epoch", "chance from outside", "default_rng([seed, place // n])", "default_rng()"),
    ("epoch", "windows drawn and put back", "permutation(n)", "integers(n, size=n)"),
    ("epoch", "in the order of the text", "order[place % n]", "place % n"),
    ("epoch", "the last window is never read", "permutation(n)", "permutation(n - 1)"),
    ("epoch", "places of the batch, not of the epoch", "order[place % n]", "order[place % B % n]"),
    ("epoch", "only the first", "np.array(drawn)", "np.array(drawn[:1])"),
]
