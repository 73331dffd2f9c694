"""Wrong answers to the exercises of chapter 3: each must be refused by its check."""

import numpy as np

CHAPTER = "03-euler"
NAMES = dict(np=np)

LEFT, SOLVE = "np.eye(len(x)) - h * A", "np.linalg.solve(left, x)"
FIRST, SECOND = "x[0] - h * x[1]", "x[1] + h * first"
MEAN = "[(a + b) / 2 for a, b in zip(here, there, strict=True)]"
# (exercise, what is wrong, text of the solution, what it becomes)
ANSWERS = [
    ("implicit", "a step back in time", LEFT, "np.eye(len(x)) + h * A"),
    ("implicit", "the matrix is transposed", LEFT, "np.eye(len(x)) - h * A.T"),
    ("implicit", "h is forgotten", LEFT, "np.eye(len(x)) - A"),
    ("implicit", "half a step", LEFT, "np.eye(len(x)) - h / 2 * A"),
    ("implicit", "h is squared", LEFT, "np.eye(len(x)) - h * h * A"),
    ("implicit", "the diagonal alone", LEFT, "np.eye(len(x)) - h * np.diag(np.diag(A)) * 0.5"),
    ("implicit", "no identity", LEFT, "-h * A"),
    ("implicit", "explicit Euler", SOLVE, "x + h * A @ x"),
    ("implicit", "one round of guessing", SOLVE, "x + h * A @ (x + h * A @ x)"),
    ("implicit", "the mean of both velocities", SOLVE, "np.linalg.solve(left, x + h / 2 * A @ x)"),
    ("implicit", "the step and not the place", SOLVE, "np.linalg.solve(left, h * A @ x)"),
    ("implicit", "two steps", SOLVE, "np.linalg.solve(left @ left, x)"),
    ("implicit", "multiplied and not solved", SOLVE, "left @ x"),
    ("implicit", "a column", SOLVE, "np.linalg.solve(left, x[:, None])"),
    ("implicit", "x is overwritten", SOLVE, "np.copyto(x, np.linalg.solve(left, x)) or x"),
    ("circle", "both with the old ones", SECOND, "x[1] + h * x[0]"),
    ("circle", "the wrong way round", FIRST, "x[0] + h * x[1]"),
    ("circle", "the second turns back", SECOND, "x[1] - h * first"),
    ("circle", "h is forgotten in the first", FIRST, "x[0] - x[1]"),
    ("circle", "h is forgotten in the second", SECOND, "x[1] + first"),
    ("circle", "the mean of old and new", SECOND, "x[1] + h * (x[0] + first) / 2"),
    ("circle", "half a step first", FIRST, "x[0] - h / 2 * x[1]"),
    ("circle", "the first with itself", FIRST, "x[0] - h * x[0]"),
    ("circle", "the second with itself", SECOND, "x[1] + h * x[1]"),
    ("circle", "starts from the new first", SECOND, "first + h * x[1]"),
    ("circle", "scaled back to the circle", "np.stack([first, second])",
     "np.stack([first, second]) * np.hypot(*x) / np.hypot(first, second)"),
    ("circle", "the coordinates change places", "[first, second]", "[second, first]"),
    ("circle", "a row for each point", "np.stack([first, second])", "np.stack([first, second], 1)"),
    ("circle", "the first is not moved", "[first, second]", "[x[0], second]"),
    ("circle", "the second first", f"first = {FIRST}\n    second = {SECOND}",
     "second = x[1] + h * x[0]\n    first = x[0] - h * second"),
    ("circle", "x is overwritten", f"first = {FIRST}", "first = x[0]\n    first -= h * x[1]"),
    ("insert", "the last has no mean", "following = [], [*blocks[1:], blocks[-1]]",
     "following = [], [*blocks[1:], blocks[0]]"),
    ("insert", "the mean with the one before", "[*blocks[1:], blocks[-1]]",
     "[blocks[0], *blocks[:-1]]"),
    ("insert", "each with itself", "[*blocks[1:], blocks[-1]]", "blocks"),
    ("insert", "sums, not means", "(a + b) / 2", "(a + b)"),
    ("insert", "differences", "(a + b) / 2", "(a - b) / 2"),
    ("insert", "a third of the way", "(a + b) / 2", "(2 * a + b) / 3"),
    ("insert", "the geometric mean", "(a + b) / 2", "np.sqrt(np.abs(a * b))"),
    ("insert", "the next one itself", "(a + b) / 2", "b"),
    ("insert", "the block once more", "(a + b) / 2", "a"),
    ("insert", "means only", "        finer.append(here)\n", ""),
    ("insert", "the mean comes first", f"finer.append(here)\n        finer.append({MEAN})",
     f"finer.append({MEAN})\n        finer.append(here)"),
    ("insert", "half a block", MEAN, "[(here[0] + there[0]) / 2, here[1]]"),
    ("insert", "one array short", MEAN, "[(here[0] + there[0]) / 2]"),
    ("insert", "nothing after the last", "return finer", "return finer[:-1]"),
    ("insert", "in place", MEAN, "[np.divide(a + b, 2, out=a) for a, b in zip(here, there)]"),
    ("insert", "the means overwrite the stack", "return finer",
     "blocks[:] = finer\n    return finer"),
]
