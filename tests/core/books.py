"""Made-up books of rollouts for the tests: ragged, with holes (tool output), ends, values and a reference."""

from __future__ import annotations

from typing import Any

import numpy as np

from apportion.core.method import Method
from apportion.core.parts import KeepMixed, PairLogistic
from apportion.core.rollouts import Rollouts

DECISION = ("reward", "mask", "logq", "terminated", "truncated", "logref", "value", "next_value", "step")
DROP = {"mask": False, "terminated": False, "truncated": False, "step": False}
"""What a padded position holds; numbers get junk, because nothing may read them (rewards stay 0)."""


def draw(
    seed: int, N: int = 3, G: int = 4, T: int = 6, spread: float = 0.4, holes: bool = True, steps: bool = False
) -> dict[str, Any]:
    """Fields of `Rollouts` as NumPy float64, with `logp` (the policy now) beside them.

    spread: of log pi - log q. Rows have 1 to T decisions, padded on the right; holes are masked in their middle.
    Some rows are cut by a time limit. With `steps`, several decisions of a row carry a process reward.
    """
    rng = np.random.default_rng(seed)
    at = np.arange(T)
    length = rng.integers(1, T + 1, (N, G, 1))
    mask = at < length
    if holes:
        mask &= (rng.random((N, G, T)) > 0.2) | (at == 0) | (at == length - 1)
    last = at == length - 1
    cut = rng.random((N, G, 1)) < 0.3
    step = last | (mask & (rng.random((N, G, T)) < 0.4)) if steps else last
    logq = np.where(mask, -rng.gamma(2.0, 0.5, (N, G, T)), -7.0)
    return {
        "reward": np.where(step, np.round(rng.normal(0.3, 1.0, (N, G, T)), 3), 0.0),
        "mask": mask,
        "logq": logq,
        "terminated": last & ~cut,
        "truncated": last & cut,
        "logref": np.where(mask, logq + rng.normal(0, 0.5, (N, G, T)), -9.0),
        "value": rng.normal(size=(N, G, T)),
        "next_value": rng.normal(size=(N, G, T)),
        "step": step if steps else None,
        "greedy_return": rng.normal(size=N),
        "horizon": T + 3,
        "logp": np.where(mask, logq + spread * rng.normal(size=(N, G, T)), -5.0),
    }


def for_method(method: Method, seed: int, **kind: Any) -> dict[str, Any]:
    """A book that the method can use: pairs for DPO, process rewards where they are asked for, some uniform groups."""
    pairs = isinstance(method.trust, PairLogistic)
    book = draw(seed, **({"steps": method.name.startswith("grpo_process")} | kind | ({"G": 2} if pairs else {})))
    at_end = book["terminated"] | book["truncated"]
    if pairs:
        chosen = np.random.default_rng(seed).random((book["reward"].shape[0], 1, 1)) < 0.5
        book["reward"] = np.where(at_end, np.concatenate([chosen, ~chosen], axis=1), 0.0).astype(float)
    if isinstance(method.sampler.keep, KeepMixed):
        book["reward"][0] = np.where(at_end[0], 0.7, 0.0)
    return book


def rollouts(book: dict[str, Any], convert: Any = lambda x: x) -> Rollouts:
    """The book as Rollouts, each array passed through `convert` (to another library or type)."""
    fields = {k: v for k, v in book.items() if k != "logp"}
    return Rollouts(**{k: v if v is None or k == "horizon" else convert(v) for k, v in fields.items()})


def single(reward: Any, **fields: Any) -> Rollouts:
    """Groups [N G] (or one group [G]) of one-decision trajectories with these rewards."""
    r = np.asarray(reward)
    r = r.astype(r.dtype if r.dtype.kind == "f" else float)
    r = (r[None] if r.ndim == 1 else r)[..., None]
    return Rollouts(reward=r, mask=np.ones(r.shape, bool), logq=np.zeros_like(r), **fields)


def rows(*rewards: list[float], **fields: Any) -> Rollouts:
    """One group of trajectories with the rewards of their decisions, padded to the longest (or to `width`)."""
    T = fields.pop("width", max(map(len, rewards)))
    r, mask = np.zeros((1, len(rewards), T)), np.zeros((1, len(rewards), T), bool)
    for i, row in enumerate(rewards):
        r[0, i, : len(row)], mask[0, i, : len(row)] = row, True
    return Rollouts(**({"reward": r, "mask": mask, "logq": np.zeros_like(r)} | fields))
