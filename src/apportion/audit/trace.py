"""The ledger of one group, reward to w: the walkthrough of a method, and its debugger."""

from __future__ import annotations

import numpy as np

from apportion.audit.replicate import labelled
from apportion.audit.tables import prepare, quietly, tabulate
from apportion.core.errors import ApportionError
from apportion.core.method import Method
from apportion.core.parts import KL
from apportion.core.weigh import Ledger, advantages, weights
from apportion.toy import policy
from apportion.toy.language import Language
from apportion.toy.language import language as load

COLUMNS = ("reward", "kl", "credit", "baseline", "scale", "advantage", "share", "ratio", "gate", "w")


def trace(method: Method, task: str = "toy", prompt: int = 1, seed: int = 0, group: int | None = 4) -> str:
    """One group's ledger as a table, a row for each sibling and decision, and each column's equation.

    The group is drawn from the reference policy, at which the ratio is 1; a method that takes responses singly
    shows `group` groups of one. Values, if any, are exact.

    Raises UnknownName for a task, ApportionError for a prompt that it does not have or a negative seed, InvalidMethod
    for a group too small for the parts.
    """
    language = load(task)
    if not 0 <= prompt < language.prompts:
        raise ApportionError(f"prompt is {prompt}; {task} has prompts 0 to {language.prompts - 1}")
    if seed < 0:
        raise ApportionError(f"seed is {seed}; it must be a whole number of 0 or more")
    single = method.sampler.group == 1
    # The group shown is no population: its own spread stays as the method says it.
    method = quietly(prepare(method, None if single else group), scale=method.scale)
    rows, ledger = _group(method, language, prompt, seed, (group or 1) if single else 1)
    head = f"{method.name} on {task}, prompt {prompt} (target {language.targets[prompt]}), seed {seed}"
    return "\n".join([head, "", *_table(language, rows, ledger), "", *_legend(method)])


def _group(method: Method, language: Language, prompt: int, seed: int, count: int) -> tuple[np.ndarray, Ledger]:
    """Responses [R, G] and their ledger, drawn from the reference."""
    rng = np.random.default_rng(seed)
    prompts = np.full(count, prompt)
    rows = policy.sample(language, language.reference, rng, method.sampler.group, prompts)
    tables = tabulate(method, language, language.reference)
    book = tables.book(prompts, rows, np.full(count, 1 / count))
    if method.sampler.feedback == "preference":
        book = labelled(tables, book, prompts, rows, rng)
    ledger = weights(method, advantages(method, book), book.logq)
    return rows, ledger


def _table(language: Language, rows: np.ndarray, ledger: Ledger) -> list[str]:
    cells = [["group" if rows.shape[1] == 1 else "sibling", "t", "token", *COLUMNS]]
    for r, group in enumerate(rows):
        for g, s in enumerate(group):
            for t in range(int(language.length[s])):
                numbers = [f"{float(np.asarray(getattr(ledger, c))[r, g, t]) + 0.0:.4g}" for c in COLUMNS]
                cells.append([str(r if rows.shape[1] == 1 else g), str(t), str(language.sequences[s, t]), *numbers])
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(x.rjust(w) for x, w in zip(row, widths, strict=True)) for row in cells]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def _legend(method: Method) -> list[str]:
    """One line a column, from the equations of the parts."""
    placed = isinstance(method.kl, KL) and method.kl.place == "reward"
    inside = isinstance(method.kl, KL) and method.kl.place == "loss"
    loss = " - share · beta · dk/dlogp" if inside else ""
    rows = {
        "reward": "as the task gave it",
        "kl": f"{method.kl!r}: {method.kl.equation}" if placed else "nothing is taken from the reward",
        "credit": f"{method.credit!r}: {method.credit.equation}",
        "baseline": f"{method.baseline!r}: {method.baseline.equation}",
        "scale": f"{method.scale!r}: {method.scale.equation}",
        "advantage": "(credit - baseline) / scale",
        "share": f"{method.aggregate!r}: {method.aggregate.equation}; {method.sampler.keep.equation}",
        "ratio": f"{method.ratio!r}: {method.ratio.equation}",
        "gate": f"{method.trust!r}: {method.trust.equation}",
        "w": "share · advantage · gate · ratio" + loss + "; the update is sum(w · grad log pi)",
    }
    return [f"{name:>10} = {text}" for name, text in rows.items()]
