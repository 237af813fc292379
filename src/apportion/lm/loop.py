"""The loop: collect, learn, tell; and all that it depends on, as arrays and numbers that a checkpoint holds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from apportion.core.errors import ApportionError, ApportionWarning
from apportion.lm import metrics
from apportion.lm.collect import Batch, Collection, book, collect, rewarded
from apportion.lm.evaluate import evaluation
from apportion.lm.job import Job
from apportion.lm.learn import Learner, Signals

EVERY = 10
"""Steps between two looks at training completions, where no evaluation shows any."""


class Loop:
    """A run between its steps.

    step, position, completions, tokens: updates made, prompts drawn, responses and response tokens sampled so far.
    """

    def __init__(self, job: Job) -> None:
        setup = job.setup
        self.job = job
        self.learner = Learner(
            job.method,
            job.language_model,
            job.reference,
            seed=job.seed,
            tokens=setup.batch_tokens,
            correction=setup.correction,  # type: ignore[arg-type]
            checkpointing=setup.checkpointing,
            weight_decay=setup.weight_decay,
        )
        self.step = self.position = self.completions = self.tokens = 0
        self._told: set[str] = set()

    @property
    def fraction(self) -> float:
        """How much of the budget is used, of the kind that is used most."""
        used = {"steps": self.step, "completions": self.completions, "tokens": self.tokens}
        return max(used[name] / limit for name, limit in self.job.setup.budget.items())

    @property
    def done(self) -> bool:
        """Whether the budget is used up."""
        return self.fraction >= 1

    @property
    def counters(self) -> dict[str, int]:
        """Where the run stands."""
        names = ("step", "position", "completions", "tokens")
        return {name: getattr(self, name) for name in names}

    def go_on(self, counters: Mapping[str, int]) -> None:
        """Take up the counters of a checkpoint."""
        for name in self.counters:
            setattr(self, name, int(counters[name]))

    def advance(self, doing: Callable[[str], None]) -> tuple[dict[str, Any], Batch | None]:
        """One update; its log row, and all that was drawn for it.

        doing: told what goes on, in a word.
        Raises ApportionError when no completion could be scored, and for a gradient that is not finite.
        """
        job, done = self.job, self.fraction
        doing("sampling")
        found = collect(job, self.position)
        self._warn(found)
        signals, drift = Signals(), None
        doing("learning")
        if found.batch is not None:
            logref = None
            if self.learner.needs_reference:
                logref = self.learner.reference_logprobs(found.batch.completions)
                drift = _drift(found.batch, logref)
            signals = self.learner.step(found.batch.completions, book(job, found.batch, logref), done)
        self.step += 1
        self.position += len(found.drawn.examples)
        self.completions += found.completions
        self.tokens += found.tokens
        return self.counters | self._row(found) | {"kl_reference": drift} | signals.row(), found.drawn

    def _warn(self, found: Collection) -> None:
        """Say once what went wrong with rewards and with dynamic sampling; the metrics count it."""
        if found.failures and not found.drawn.scored.any():
            raise ApportionError(f"no completion could be scored in step {self.step + 1}: {found.example}")
        said = []
        if found.failures:
            kinds = ", ".join(f"{n} {kind}" for kind, n in found.failures.items())
            said.append(("scores", f"completions without a score leave their group ({kinds}); {found.example}"))
        if not found.full:
            left = len(found.batch.examples) if found.batch else 0
            said.append(
                (
                    "full",
                    f"after {found.draws} draws only {left} of {self.job.setup.prompts} groups have unequal rewards; "
                    "going on with these (sampler.keep.max_batches)",
                )
            )
        for kind, text in said:
            if kind not in self._told:
                warnings.warn(f"{text}; said once, counted in the metrics", ApportionWarning, stacklevel=3)
                self._told.add(kind)

    def _row(self, found: Collection) -> dict[str, Any]:
        """What a collection shows: over all that was drawn, so that a filter does not flatter it."""
        drawn, job = found.drawn, self.job
        kept = 0 if found.batch is None else len(found.batch.examples)
        paid = rewarded(job, drawn)
        row: dict[str, Any] = {
            "return_mean": metrics.average(paid[drawn.scored]),
            "accuracy": metrics.average(drawn.right[drawn.scored]),
            "zero_signal": metrics.zero_signal(drawn.total, drawn.scored),
            "unscored": int((~drawn.scored).sum()),
            "draws": found.draws,
            "kept": kept,
        }
        row |= metrics.lengths(drawn.completions.lengths, drawn.right, drawn.completions.truncated)
        for f, reward in enumerate(job.rewards):
            value = drawn.value[..., f]
            row[f"reward/{reward.name}"] = metrics.average(value[np.isfinite(value)])
        return row

    def evaluate(self, progress: Callable[[int], None]) -> tuple[dict[str, Any], Batch | None]:
        """See `evaluate.evaluation`; on the evaluation data of the job."""
        assert self.job.eval_data is not None
        return evaluation(self.job, self.job.eval_data, progress)


def _drift(batch: Batch, logref: Any) -> float | None:
    """Mean log q - log pi_ref over the response tokens: the KL to the reference (nats a token), as k1 estimates it."""
    pairs = zip(batch.completions.logq, logref, strict=True)
    return metrics.average(np.concatenate([q - r for mine, theirs in pairs for q, r in zip(mine, theirs, strict=True)]))
