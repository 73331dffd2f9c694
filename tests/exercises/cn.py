"""Wrong answers to the exercises of appendix N: each must be refused by its check."""

import numpy as np
from helpers.exercises import cells_of, definitions

CHAPTER = "n-cublas"
NAMES = dict(np=np)
for cell in cells_of(CHAPTER):  # the library's product, by NumPy
    if "def gemm(" in cell:
        exec(definitions(cell, CHAPTER), NAMES)

REACH = "(columns - 1) * distance + rows"
CALL = '"A", lda, "B", ldb'
PITCH = "array.strides[0] // array.itemsize"
# (exercise, what is wrong, text of the solution, what it becomes)
# fmt: off
ANSWERS = [
    ("reach", "as if columns were dense", REACH, "columns * rows"),
    ("reach", "whole columns", REACH, "columns * distance"),
    ("reach", "without the last column", REACH, "(columns - 1) * distance"),
    ("reach", "rows for columns", REACH, "(rows - 1) * distance + columns"),
    ("reach", "the last place, not a count", REACH, REACH + " - 1"),
    ("reach", "bytes", REACH, f"4 * ({REACH})"),
    ("reach", "A is never transposed", "(k, m) if transa else (m, k)", "(m, k)"),
    ("reach", "B is never transposed", "(n, k) if transb else (k, n)", "(k, n)"),
    ("reach", "A's letter is read the other way", "if transa", "if not transa"),
    ("reach", "B's letter is read the other way", "if transb", "if not transb"),
    ("reach", "A by the letter of B", "if transa", "if transb"),
    ("reach", "C by rows", "(m, n, ldc)", "(n, m, ldc)"),
    ("reach", "B by A's distance", "(*of_b, ldb)", "(*of_b, lda)"),
    ("transposed", "as it lies", "True, True", "False, False"),
    ("transposed", "A alone is transposed", "True, True", "True, False"),
    ("transposed", "B alone is transposed", "True, True", "False, True"),
    ("transposed", "B first", CALL, '"B", ldb, "A", lda'),
    ("transposed", "the product itself", "True, True, m, n, k, " + CALL,
     'False, False, n, m, k, "B", ldb, "A", lda'),
    ("transposed", "m and n exchanged", "m, n, k, ", "n, m, k, "),
    ("transposed", "A's sizes exchanged", "(m, k), n", "(k, m), n"),
    ("transposed", "D's columns for n", "B.shape[1]", "D.shape[1]"),
    ("transposed", "as if rows were dense", PITCH, "array.shape[1]"),
    ("transposed", "the length of columns", PITCH, "array.shape[0]"),
    ("transposed", "bytes", PITCH, "array.strides[0]"),
    ("transposed", "distances exchanged", CALL, '"A", ldb, "B", lda'),
    ("transposed", "D's rows are dense", "ldb, ldd", "ldb, m"),
]
