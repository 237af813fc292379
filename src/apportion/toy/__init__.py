"""The exact toy language: every response enumerated in float64, so that every expectation is a finite sum.

`language` builds the two tasks, `policy` is the arithmetic of a tabular softmax policy on them, and `adam`
is the optimiser. NumPy only.
"""
