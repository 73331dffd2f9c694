"""Wrong answers to the exercises of chapter 19d, each of which its check must refuse."""

import numpy as np

CHAPTER = "19d-lora"
NAMES = dict(np=np)

dA, dB = "scale * x.T @ (dy @ B.T)", "scale * (x @ A).T @ dy"
PLACE = "B[row : row + part.shape[0], column : column + part.shape[1]] = part"
NEXT = "row, column = row + part.shape[0], column + part.shape[1]"
ANSWERS = [
    ("adapter_gradients", "dA without the scale", dA, "x.T @ (dy @ B.T)"),
    ("adapter_gradients", "dB without the scale", dB, "(x @ A).T @ dy"),
    ("adapter_gradients", "the dense gradient for dA", dA, "scale * (x.T @ dy) @ B.T"),
    ("adapter_gradients", "the dense gradient for dB", dB, "scale * A.T @ (x.T @ dy)"),
    ("adapter_gradients", "the scale twice", dA, "scale * scale * x.T @ (dy @ B.T)"),
    ("adapter_gradients", "divided by the scale", dB, "(x @ A).T @ dy / scale"),
    ("adapter_gradients", "dA is a descent", dA, "-scale * x.T @ (dy @ B.T)"),
    ("adapter_gradients", "a mean over positions", dA, "scale * x.T @ (dy @ B.T) / len(x)"),
    ("adapter_gradients", "dB transposed", "return dA, dB", "return dA, dB.T"),
    ("adapter_gradients", "the wrong order", "return dA, dB", "return dB, dA"),
    ("adapter_gradients", "dA alone", "return dA, dB", "return dA, None"),
    ("adapter_gradients", "it scales what came in", "dA = scale", "dy *= scale\n    dA = scale"),
    ("adapter_gradients", "the first position alone", dA, "scale * x[:1].T @ (dy[:1] @ B.T)"),
    ("adapter_gradients", "A moves B's way", dB, "scale * (x @ (A + dA)).T @ dy"),
    ("fused", "one below the other", "axis=1)\n    B", "axis=0)\n    B"),
    ("fused", "all at the left", PLACE, "B[row : row + part.shape[0], : part.shape[1]] = part"),
    ("fused", "all at the top", PLACE,
     "B[: part.shape[0], column : column + part.shape[1]] = part"),
    ("fused", "the rows stay", NEXT, "row, column = row, column + part.shape[1]"),
    ("fused", "the columns stay", NEXT, "row, column = row + part.shape[0], column"),
    ("fused", "rows and columns change places", NEXT,
     "row, column = row + part.shape[1], column + part.shape[0]"),
    ("fused", "the order of A is turned around", "for A, _ in adapters]",
     "for A, _ in adapters[::-1]]"),
    ("fused", "the order of B is turned around", "for _, part in adapters:",
     "for _, part in adapters[::-1]:"),
    ("fused", "the last is left out", "for _, part in adapters:", "for _, part in adapters[:-1]:"),
    ("fused", "B of ones", "np.zeros(", "np.ones("),
    ("fused", "a row that nobody needs", "B = np.zeros((A.shape[1],",
     "A = np.concatenate([A, A[:, :1]], axis=1)\n    B = np.zeros((A.shape[1],"),
    ("fused", "transposed", "return A, B", "return B.T, A.T"),
    ("fused", "A alone", "return A, B", "return A"),
    ("fused", "the mean of A", "return A, B", "return A / len(adapters), B"),
]
