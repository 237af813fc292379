"""The toy language: what can be said, what it is worth, and the reference policy that says it.

A task is small enough to write down whole. A policy is one softmax per (prompt, prefix), so it is a table of
logits `[N, K, V]`, and any distribution over responses can be written as one.

Axes: `N` prompts (a group starts from one prompt), `S` distinct responses, `L` decisions in a response,
`K` prefixes at which a decision is made, `V` tokens. Logs are natural; everything is float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np

from apportion.core.errors import UnknownName

CORPUS = 4_000  # responses per prompt from which the reference policy is counted
SMOOTHING = 0.5  # added to every count, so that no response is impossible


@dataclass(frozen=True)
class Recipe:
    """The constants that define one task, before anything is enumerated."""

    V: int
    L: int
    targets: tuple[int, ...]
    eos: int | None
    seed: int
    concentration: float


RECIPES = {
    "toy": Recipe(V=5, L=4, targets=(1, 2, 0, 0), eos=None, seed=1, concentration=0.3),
    "toy-eos": Recipe(V=5, L=6, targets=(0, 1, 2, 3), eos=4, seed=4, concentration=0.6),
}


@dataclass(frozen=True, eq=False)
class Language:
    """One enumerated task. All arrays are read-only; compare and hash by identity.

    Responses are in lexicographic order. With an end of sequence the `V**L` padded strings hold duplicates
    of probability zero (something said after the end); only the distinct responses are listed, which leaves
    every distribution unchanged and makes the masses sum to one.
    """

    name: str
    V: int
    L: int
    targets: tuple[int, ...]
    eos: int | None
    sequences: np.ndarray
    """int [S, L]: the tokens; `eos` at every decision after the first end of sequence."""
    prefix: np.ndarray
    """int [S, L]: the prefix each decision is made at; where masked, 0 (the empty prefix), which is inert."""
    mask: np.ndarray
    """float [S, L]: 1 while the response is being written (its end of sequence included), 0 after."""
    reward: np.ndarray
    """float [N, S]: 1 if the response is correct for the prompt, else 0."""
    length: np.ndarray
    """int [S]: decisions in the response, the end of sequence included."""
    reference: np.ndarray
    """float [N, K, V]: logits of the reference policy."""
    edge: np.ndarray
    """int [S, L]: `prefix * V + token`, the flat (prefix, token) pair of each decision."""
    end: np.ndarray
    """int [S]: the edge of each response's last decision."""
    child: np.ndarray
    """int [K, V]: the prefix a token leads to, or `~s` (negative) where it completes response `s`."""
    levels: tuple[slice, ...]
    """L slices of the prefix axis: the prefixes of length 0, 1, ... L - 1."""

    @property
    def horizon(self) -> int:
        """The most decisions a response can have."""
        return self.L

    @property
    def prompts(self) -> int:
        """The number of prompts, N."""
        return len(self.targets)

    @property
    def prefixes(self) -> int:
        """The number of prefixes at which a decision is made, K."""
        return self.child.shape[0]

    @property
    def branching(self) -> int:
        """Tokens that continue a response (every token but the end of sequence); they come first."""
        return self.V if self.eos is None else self.V - 1


def _responses(recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """Distinct responses [S, L] in lexicographic order and their mask [S, L]."""
    index = np.arange(recipe.V**recipe.L)
    place = recipe.V ** np.arange(recipe.L - 1, -1, -1)
    said = index[:, None] // place % recipe.V
    if recipe.eos is None:
        return said, np.ones(said.shape)
    over = _after_end(said, recipe.eos)
    distinct = np.all(~over | (said == recipe.eos), axis=1)
    return said[distinct], 1.0 - over[distinct]


def _after_end(tokens: np.ndarray, eos: int) -> np.ndarray:
    """Bool [..., L]: decisions that come after the first end of sequence."""
    ended = tokens == eos
    return (np.cumsum(ended, axis=-1) - ended) > 0


def _prefixes(tokens: np.ndarray, mask: np.ndarray, branching: int) -> tuple[np.ndarray, tuple[slice, ...]]:
    """Index of the prefix of each decision [..., L] and the slice of each prefix length.

    Prefixes of one length are contiguous, in lexicographic order, so the children of a level's prefix `i`
    are `branching * i, ... branching * i + branching - 1` of the next: sweeps over the tree are reshapes.
    """
    L = tokens.shape[-1]
    starts = np.concatenate([[0], np.cumsum(branching ** np.arange(L))])
    index = np.zeros(tokens.shape, dtype=np.int64)
    within = np.zeros(tokens.shape[:-1], dtype=np.int64)
    for t in range(L):
        index[..., t] = starts[t] + within
        within = within * branching + tokens[..., t]
    levels = tuple(slice(int(a), int(b)) for a, b in pairwise(starts))
    return np.where(mask > 0, index, 0), levels


def _children(tokens: np.ndarray, prefix: np.ndarray, length: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Where each token leads from each prefix [K, V]: the next prefix, or `~s` for a completed response s."""
    child = np.zeros(shape, dtype=np.int64)
    S, L = tokens.shape
    for t in range(L - 1):
        goes_on = length > t + 1
        child[prefix[goes_on, t], tokens[goes_on, t]] = prefix[goes_on, t + 1]
    every, last = np.arange(S), length - 1
    child[prefix[every, last], tokens[every, last]] = ~every
    return child


def _reward(recipe: Recipe, tokens: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Correctness [N, S]: the content tokens sum to the target, modulo the number of content tokens."""
    targets = np.asarray(recipe.targets)[:, None]
    if recipe.eos is None:
        return (tokens.sum(axis=1) % recipe.V == targets).astype(float)
    content = np.where(tokens == recipe.eos, 0, tokens).sum(axis=1)
    says_something = length > 1  # a response of length 1 is a bare end of sequence
    return ((content % (recipe.V - 1) == targets) & says_something).astype(float)


def _corpus(recipe: Recipe, rng: np.random.Generator) -> np.ndarray:
    """One prompt's corpus [CORPUS, L] from a random Markov chain; the order of draws is part of the task."""
    concentration = np.full(recipe.V, recipe.concentration)
    first = rng.dirichlet(concentration)
    transition = rng.dirichlet(concentration, size=recipe.V).cumsum(axis=1)
    tokens = np.empty((CORPUS, recipe.L), dtype=np.int64)
    tokens[:, 0] = rng.choice(recipe.V, size=CORPUS, p=first)
    for t in range(1, recipe.L):
        uniform = rng.random(CORPUS)[:, None]
        passed = (uniform > transition[tokens[:, t - 1]]).sum(axis=1)
        tokens[:, t] = np.minimum(passed, recipe.V - 1)  # rounding can leave the last cumulative sum below 1
    return tokens


def _reference(recipe: Recipe, branching: int, prefixes: int) -> np.ndarray:
    """Reference logits [N, K, V]: smoothed log counts of each prompt's corpus, from one random stream."""
    rng = np.random.default_rng(recipe.seed)
    counts = np.full((len(recipe.targets), prefixes * recipe.V), SMOOTHING)
    for count in counts:
        tokens = _corpus(recipe, rng)
        over = np.zeros(tokens.shape, bool) if recipe.eos is None else _after_end(tokens, recipe.eos)
        prefix, _ = _prefixes(tokens, ~over, branching)
        count += np.bincount((prefix * recipe.V + tokens)[~over], minlength=prefixes * recipe.V)
    return np.log(counts).reshape(len(recipe.targets), prefixes, recipe.V)


@cache
def language(name: str) -> Language:
    """Build the task `toy` or `toy-eos`; the same object on every call."""
    if name not in RECIPES:
        raise UnknownName("toy task", name, sorted(RECIPES))
    recipe = RECIPES[name]
    tokens, mask = _responses(recipe)
    length = mask.sum(axis=1).astype(np.int64)
    branching = recipe.V if recipe.eos is None else recipe.V - 1
    prefix, levels = _prefixes(tokens, mask, branching)
    edge = prefix * recipe.V + tokens
    K = levels[-1].stop
    arrays = {
        "sequences": tokens,
        "prefix": prefix,
        "mask": mask,
        "reward": _reward(recipe, tokens, length),
        "length": length,
        "reference": _reference(recipe, branching, K),
        "edge": edge,
        "end": edge[np.arange(len(edge)), length - 1],
        "child": _children(tokens, prefix, length, (K, recipe.V)),
    }
    for array in arrays.values():
        array.flags.writeable = False
    return Language(
        name=name,
        V=recipe.V,
        L=recipe.L,
        targets=recipe.targets,
        eos=recipe.eos,
        levels=levels,
        **arrays,
    )
