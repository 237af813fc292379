"""Expected update of a method and its spread, by whichever of the exact ways applies, else by replication.

Units: an update is multiplied by the aggregation's own length, so that methods that divide by it compare with the
gradient of J; it is the mean over prompts, as J is. Variances are of one group of every prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import numpy as np

from apportion.audit import enumeration
from apportion.audit.enumeration import Kind, Weighed
from apportion.audit.pairs import weigh_pairs
from apportion.audit.replicate import Replicates, replicate, squared_norms, updates
from apportion.audit.tables import Tables, penalty, prepare, returns, tabulate
from apportion.core.method import Method
from apportion.core.parts import BatchStd, Constant, PairLogistic, Sum
from apportion.toy import policy
from apportion.toy.collect import BETA
from apportion.toy.language import Language

REPLICATES = 2_000
"""Groups of every prompt drawn where nothing is exact."""


@dataclass(frozen=True, eq=False)
class Moments:
    """First and second moments of the update by one group of every prompt."""

    update: np.ndarray
    """[N, K, V]: expected update, mean over prompts, in the units of the gradient of J."""
    variance: float
    """E||g||² - ||E g||², summed over coordinates."""
    silent: np.ndarray
    """[N]: probability that a prompt's group gives no policy gradient at all."""
    how: str
    blocks: np.ndarray | None = None
    """[B, N, K, V]: independent estimates of `update`, where it is replicated."""


def unit(method: Method, tables: Tables) -> float:
    """What the aggregation divides by: 1 for a sum, its constant, or the expected length under q."""
    if isinstance(method.aggregate, Sum):
        return 1.0
    if isinstance(method.aggregate, Constant):
        return float(method.aggregate.length or tables.language.horizon)
    return float((tables.mass @ tables.language.length).mean())


def batch_parts(method: Method) -> list[str]:
    """Names of the parts that look at the whole batch."""
    parts = (*method.parts.values(), method.sampler.keep)
    return [type(p).__name__ for p in parts if p.scope == "batch"]


def describe(method: Method, kind: Kind, count: int = REPLICATES) -> str:
    """How the expectation is had, in words."""
    G = method.sampler.group
    words = {
        "own": "exact (each trajectory on its own)",
        "counts": "exact (sum over success counts)",
        "affine": "exact (affine in the siblings' rewards)",
        "multisets": f"exact (multisets of siblings, G={G})",
        "pairs": "exact (pairs of responses, interpolated to 1e-12)",
        "replicated": f"replicated (n={count}, 95% intervals)",
    }[kind]
    batch = batch_parts(method)
    return words + (f"; large-batch limit ({', '.join(batch)})" if batch else "")


def expected_weight(
    method: Method, tables: Tables, precision: float = 1e-12, only_direction: bool = False
) -> np.ndarray | None:
    """Weight [N, S, L] of each response averaged over its siblings, given the response; None if only replicated.

    only_direction: the size of a whitened update may be off, which saves half of the work.
    """
    kind = enumeration.kind(method, tables)
    if kind == "pairs":
        return weigh_pairs(method, tables, precision)
    if kind == "own":
        return enumeration.weigh_singles(method, tables)
    if kind == "affine":
        # The mean of an affine function needs no second moment of the siblings; a spread over the batch does, but
        # that spread is one factor on the whole update.
        sides = (-1.0, 1.0) if isinstance(method.scale, BatchStd) and not only_direction else (0.0,)
        return np.mean(enumeration.weigh_affine(method, tables, sides)[0], axis=0)
    if kind == "replicated":
        return None
    return enumeration.average(enumeration.weigh(method, tables), method, tables)


def update_of(weight: np.ndarray, method: Method, tables: Tables) -> np.ndarray:
    """The expected update [N, K, V] of per-response weights."""
    mass = tables.mass[..., None] / len(tables.mass)
    return policy.score_sum(tables.language, tables.logits, mass * weight) * unit(method, tables)


def expected_update(method: Method, language: Language, logits: np.ndarray, group: int | None = None) -> np.ndarray:
    """Exact expected update [N, K, V] of a method at a policy, or the mean of `REPLICATES` groups of every prompt."""
    method = prepare(method, group)
    tables = tabulate(method, language, logits)
    weight = expected_weight(method, tables)
    if weight is not None:
        return update_of(weight, method, tables)
    return updates(tables, replicate(method, tables, REPLICATES)).mean(axis=0) * _scale(method, tables)


def _scale(method: Method, tables: Tables) -> float:
    return unit(method, tables) / len(tables.mass)


def moments(method: Method, language: Language, logits: np.ndarray, group: int | None = None, seed: int = 0) -> Moments:
    """Expected update, variance and chance of silence of `method` with `group` siblings, at `logits [N, K, V]`.

    Raises InvalidMethod for a group too small for the parts, ApportionError for a part that cannot be evaluated.
    """
    method = prepare(method, group)
    tables = tabulate(method, language, logits)
    kind = enumeration.kind(method, tables)
    if kind == "own":
        return _own(method, tables)
    if kind == "affine":
        return _affine(method, tables)
    if kind == "pairs":
        weight = weigh_pairs(method, tables)
        return _drawn(method, tables, kind, update_of(weight, method, tables), seed)
    if kind == "replicated":
        return _drawn(method, tables, kind, None, seed)
    weighed = enumeration.weigh(method, tables)
    mean = update_of(enumeration.average(weighed, method, tables), method, tables)
    plan = weighed.layout
    silent = np.bincount(plan.prompts, weights=weighed.mass * weighed.silent, minlength=len(tables.mass))
    if kind == "multisets":
        return _drawn(method, tables, kind, mean, seed, silent)
    return Moments(mean, _counts_variance(method, tables, weighed, mean), silent, describe(method, kind))


# --- each trajectory on its own --------------------------------------------------------------------------


def _square(tables: Tables, weight: np.ndarray) -> np.ndarray:
    """E||v||² of v = sum_t w_t score_t, [N]: prefixes of one response differ, so its scores are orthogonal."""
    norm2 = policy.score_norm2(tables.language, tables.logits)
    return (tables.mass[..., None] * weight**2 * norm2).sum(axis=(1, 2))


def _own(method: Method, tables: Tables) -> Moments:
    G, scale = method.sampler.group, _scale(method, tables)
    weight = enumeration.weigh_singles(method, tables)
    mean = update_of(weight, method, tables)
    variance = (scale**2 * _square(tables, weight).sum() - (mean**2).sum()) / G
    nothing = (np.abs(_policy_part(weight, method, tables)) * tables.language.mask).max(axis=-1) == 0
    silent = (tables.mass * nothing).sum(axis=1) ** G
    return Moments(mean, float(variance), silent, describe(method, "own"))


def _policy_part(weight: np.ndarray, method: Method, tables: Tables) -> np.ndarray:
    """The weights without a penalty in the loss."""
    if penalty(method, tables) is None:
        return weight
    return enumeration.weigh_singles(enumeration.without_loss_kl(method), tables)


# --- success counts --------------------------------------------------------------------------------------


def _counts_variance(method: Method, tables: Tables, weighed: Weighed, mean: np.ndarray) -> float:
    """Given the labels siblings are independent, so two of them meet only through conditional means."""
    G, N, plan = method.sampler.group, len(tables.mass), weighed.layout
    reward = tables.language.reward
    good = reward > reward.min(axis=1, keepdims=True)
    stands_good = good[_home(plan.other, len(plan.stand)), plan.stand]
    count = stands_good[plan.members].sum(axis=1)
    p = (tables.mass * good).sum(axis=1)
    square, part = np.zeros(N), {}
    for k in range(G):
        weight = enumeration.average(weighed, method, tables, (count == k) * 1.0)
        square += comb(G - 1, k) * p**k * (1 - p) ** (G - 1 - k) * _square(tables, weight)
        for r in (0, 1):
            mine = weight * (tables.mass * (good == r))[..., None]
            part[r, k] = policy.score_sum(tables.language, tables.logits, mine)
    cross = np.zeros(N)
    for k in range(G - 1):
        chance = comb(G - 2, k) * p**k * (1 - p) ** (G - 2 - k)
        for a in (0, 1):
            for b in (0, 1):
                cross += chance * (part[a, k + b] * part[b, k + a]).sum(axis=(1, 2))
    total = _scale(method, tables) ** 2 * (square / G + (1 - 1 / G) * cross).sum()
    return float(total - (mean**2).sum())


def _home(label: np.ndarray, size: int) -> np.ndarray:
    """The prompt of each class."""
    home = np.empty(size, dtype=np.int64)
    for n, row in enumerate(label):
        home[row] = n
    return home


# --- affine in the others' rewards -----------------------------------------------------------------------


def _affine(method: Method, tables: Tables) -> Moments:
    """w = a + d (O - E O) with O the others' sum; moments of O up to the second are those of the stand-ins."""
    G, scale = method.sampler.group, _scale(method, tables)
    (low, high), deviation = enumeration.weigh_affine(method, tables)
    mean = update_of((low + high) / 2, method, tables)
    width = 2 * np.sqrt(G - 1) * deviation[:, None, None]
    slope = np.divide(high - low, width, out=np.zeros_like(low), where=width > 0)
    total = returns(method, tables)
    centred = (total - (tables.mass * total).sum(axis=1, keepdims=True))[..., None]

    def vector(weight: np.ndarray) -> np.ndarray:
        return policy.score_sum(tables.language, tables.logits, tables.mass[..., None] * weight)

    a, d = vector((low + high) / 2), vector(slope)
    ra, rd = vector(centred * (low + high) / 2), vector(centred * slope)
    spare = (G - 2) * deviation[:, None, None] ** 2
    cross = (a * a + 2 * ra * d + rd * rd + spare * d * d).sum(axis=(1, 2))
    square = (_square(tables, low) + _square(tables, high)) / 2
    variance = scale**2 * (square / G + (1 - 1 / G) * cross).sum() - (mean**2).sum()
    return Moments(mean, float(variance), _all_equal(total, tables.mass, G), describe(method, "affine"))


def _all_equal(total: np.ndarray, mass: np.ndarray, G: int) -> np.ndarray:
    """Probability [N] that G siblings have the same return."""
    out = []
    for key, m in zip(np.round(total, 12), mass, strict=True):
        _, inverse = np.unique(key, return_inverse=True)
        out.append((np.bincount(inverse.ravel(), weights=m) ** G).sum())
    return np.array(out)


# --- replicated ------------------------------------------------------------------------------------------


def _drawn(
    method: Method, tables: Tables, kind: Kind, mean: np.ndarray | None, seed: int, silent: np.ndarray | None = None
) -> Moments:
    """Moments with whatever has no closed form drawn: the variance, and the mean where it is not given."""
    drawn: Replicates = replicate(method, tables, REPLICATES, seed)
    scale, how, blocks = _scale(method, tables), describe(method, kind), None
    square = (scale**2 * squared_norms(tables, drawn)).mean(axis=1).sum()
    if mean is None:
        blocks = updates(tables, drawn) * scale
        mean = blocks.mean(axis=0)
        length = (mean**2).sum() - ((blocks - mean) ** 2).sum() / (len(blocks) * (len(blocks) - 1))
    else:
        length = (mean**2).sum()
        how += f"; variance replicated (n={REPLICATES})"
    if isinstance(method.trust, PairLogistic):
        silent = np.zeros(len(tables.mass))
    return Moments(mean, float(square - length), drawn.silent.mean(axis=1) if silent is None else silent, how, blocks)


# --- the truth -------------------------------------------------------------------------------------------


def true_gradient(method: Method, language: Language, logits: np.ndarray) -> np.ndarray:
    """Gradient [N, K, V] of the method's own J, mean over prompts: E[R] - beta KL(pi || pi_ref), with beta from its
    KL, or from its preference loss, or 0; for a distillation -beta KL(pi || teacher)."""
    beta = method.trust.beta if isinstance(method.trust, PairLogistic) else method.kl.beta
    if method.sampler.feedback != "none":
        return policy.true_gradient(language, logits, beta).total / language.prompts
    log_p = policy.sequence_log_probs(language, logits)
    away = log_p - policy.tilted(language, BETA).log_probs
    return policy.score_sum(language, logits, (-beta * np.exp(log_p) * away)[..., None]) / language.prompts
