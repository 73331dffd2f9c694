"""Wrong answers to the exercises of chapter 9b, each of which its check must refuse."""

import numpy as np

CHAPTER = "09b-better-than-adamw"
NAMES = dict(np=np)

ROWS = "G / np.linalg.norm(G, axis=1, keepdims=True)"
MOMENT = "(1 - beta2) * np.mean(o**2, axis=0)"
ROOT = "(np.sqrt(v) + 1e-8)"
ANSWERS = [
    ("steepest", "the gradient as it is", "return G / np.linalg.norm(G)\n", "return G\n"),
    ("steepest", "divided by the spectral norm", "return G / np.linalg.norm(G)\n",
     "return G / np.linalg.norm(G, 2)\n"),
    ("steepest", "the norm squared", "return G / np.linalg.norm(G)\n",
     "return G / np.linalg.norm(G)**2\n"),
    ("steepest", "divided by the largest number", "np.sign(G)", "G / np.abs(G).max()"),
    ("steepest", "against the gradient", "np.sign(G)", "-np.sign(G)"),
    ("steepest", "the largest number alone", "np.sign(G)",
     "np.sign(G) * (np.abs(G) == np.abs(G).max())"),
    ("steepest", "signs, shortened", "np.sign(G)", "np.sign(G) / np.linalg.norm(G)"),
    ("steepest", "columns, not rows", "axis=1", "axis=0"),
    ("steepest", "all rows by one length", ROWS, "G / np.linalg.norm(G, axis=1).max()"),
    ("steepest", "the longest row alone", ROWS,
     f"{ROWS} * (np.linalg.norm(G, axis=1, keepdims=True) == np.linalg.norm(G, axis=1).max())"),
    ("steepest", "turned over", "return U @ Vt", "return (U @ Vt)[::-1]"),
    ("steepest", "the strongest direction alone", "return U @ Vt", "return U[:, :1] @ Vt[:1]"),
    ("steepest", "singular values kept", "return U @ Vt", "return G"),
    ("steepest", "into the gradient", "return U @ Vt", "G[...] = U @ Vt; return G"),
    ("normuon", "no memory", "v *= beta2", "v *= 0"),
    ("normuon", "nothing is forgotten", "v *= beta2", "v *= 1"),
    ("normuon", "the new one in full", MOMENT, "np.mean(o**2, axis=0)"),
    ("normuon", "a sum, not a mean", "np.mean(o**2", "np.sum(o**2"),
    ("normuon", "the mean of all", "np.mean(o**2, axis=0)", "np.mean(o**2)"),
    ("normuon", "no squares", "np.mean(o**2", "np.mean(abs(o)"),
    ("normuon", "the other share", "(1 - beta2) * np", "beta2 * np"),
    ("normuon", "no root", ROOT, "(v + 1e-8)"),
    ("normuon", "epsilon under the root", ROOT, "np.sqrt(v + 1e-2)"),
    ("normuon", "multiplied", f"o / {ROOT}", f"o * {ROOT}"),
    ("normuon", "another length", "return step * (np.linalg.norm(o) / np.linalg.norm(step))",
     "return step"),
    ("normuon", "length one", "np.linalg.norm(o) / np.linalg.norm(step)",
     "1 / np.linalg.norm(step)"),
    ("normuon", "turned over", "np.linalg.norm(o) / np.linalg.norm(step)",
     "np.linalg.norm(step) / np.linalg.norm(o)"),
    ("normuon", "into the step that was given", "step = o / (", "o[...] = step = o / ("),
    ("normuon", "v is made anew", "v *= beta2", "v = v * beta2"),
]
