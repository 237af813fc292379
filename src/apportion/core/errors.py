"""The errors a user can meet: one line that names the input, its value and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ApportionError(ValueError):
    """Base of every error that bad input causes; the command line prints its message and exits with 2."""


class ApportionWarning(UserWarning):
    """A combination that runs but is doubtful; the message says why and what to do."""


class InvalidMethod(ApportionError):
    """Parts that cannot work together, found when the method is built."""


class InvalidData(ApportionError):
    """Data that no method can weigh: a wrong shape, a non-finite reward or log-probability."""


class Diverged(ApportionError):
    """Training that left a non-finite number."""


class InUse(ApportionError):
    """A folder that another process is working in."""


class UnknownName(ApportionError):
    """A name that does not exist, with the nearest one that does.

    >>> raise UnknownName("method", "gpro", ["grpo", "gspo", "ppo"])
    Traceback (most recent call last):
    ...
    apportion.core.errors.UnknownName: unknown method 'gpro'; did you mean 'grpo'? Known: grpo, gspo, ppo
    """

    def __init__(self, kind: str, name: str, known: Iterable[str]):
        names = sorted(str(k) for k in known)
        folded = {k.lower(): k for k in names}
        word = str(name).lower()
        # Of equally close names, the one with the same letters: swapped letters are the commonest slip.
        near = sorted(
            difflib.get_close_matches(word, list(folded), n=5, cutoff=0.4),
            key=lambda k: (sorted(k) == sorted(word), difflib.SequenceMatcher(None, k, word).ratio()),
        )[-1:]
        hint = f"; did you mean '{folded[near[0]]}'?" if near else "."
        super().__init__(f"unknown {kind} '{name}'{hint} Known: {', '.join(names)}")
