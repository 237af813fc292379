"""One collection: prompts drawn, answered, scored, filtered, and entered into core's book."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from apportion.core.parts import KeepMixed
from apportion.core.rollouts import Rollouts
from apportion.lm import learn
from apportion.lm.data import Example, draw
from apportion.lm.generate import Completions, Sampling, Seed, generate, greedy
from apportion.lm.job import Job
from apportion.lm.metrics import SOLVED
from apportion.lm.rewards import overlong
from apportion.lm.scoring import Item, Scores, Steps, score


@dataclass(frozen=True, eq=False)
class Batch:
    """Answered and scored prompts, on the axes N prompts, G siblings, F reward functions.

    texts: [N][G]. value: [N G F], nan where a function failed. steps: [N][G] step rewards or None. total: [N G] the
    weighted sum, 0 where unscored. scored: [N G] bool. greedy_return: [N] of the greedy companions, if there are any.
    """

    examples: list[Example]
    completions: Completions
    texts: list[list[str]]
    value: np.ndarray
    steps: list[list[Steps | None]]
    total: np.ndarray
    scored: np.ndarray
    greedy_return: np.ndarray | None

    @property
    def right(self) -> np.ndarray:
        """[N G] bool: the first reward was reached in full."""
        return np.nan_to_num(self.value[..., 0]) >= SOLVED - 1e-9

    def __getitem__(self, index: np.ndarray) -> Batch:
        """Some of the groups."""
        pick = np.arange(len(self.examples))[index]
        lists: list[list[Any]] = [[x[i] for i in pick] for x in (self.examples, self.texts, self.steps)]
        companions = None if self.greedy_return is None else self.greedy_return[pick]
        return Batch(
            lists[0], self.completions[pick], lists[1], self.value[pick], lists[2],
            self.total[pick], self.scored[pick], companions,
        )  # fmt: skip

    @staticmethod
    def of(examples: list[Example], completions: Completions, texts: list[list[str]], scores: Scores) -> Batch:
        """The batch of N examples with G responses each, and the scores [N · G]."""
        shape = N, G = completions.terminated.shape
        steps = [scores.steps[n * G : (n + 1) * G] for n in range(N)]
        total, scored = scores.total.reshape(shape), scores.scored.reshape(shape)
        return Batch(examples, completions, texts, scores.value.reshape(*shape, -1), steps, total, scored, None)

    @staticmethod
    def join(parts: Sequence[Batch]) -> Batch:
        """Several batches, one after another."""
        lists: list[list[Any]] = [[x for p in parts for x in getattr(p, n)] for n in ("examples", "texts", "steps")]
        arrays = [np.concatenate([getattr(p, n) for p in parts]) for n in ("value", "total", "scored")]
        companions = [p.greedy_return for p in parts if p.greedy_return is not None]
        return Batch(
            lists[0], Completions.join([p.completions for p in parts]), lists[1], arrays[0], lists[2],
            arrays[1], arrays[2], np.concatenate(companions) if companions else None,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Collection:
    """What one update learns from, and what it cost.

    batch: the groups that stay; None when the filter left none. drawn: all groups, those filtered out included.
    draws: how often prompts were drawn. full: the batch has as many groups as were asked for.
    completions, tokens: responses and response tokens sampled, greedy companions included.
    """

    batch: Batch | None
    drawn: Batch
    draws: int
    full: bool
    completions: int
    tokens: int
    failures: Counter[str]
    example: str


def answer(
    job: Job, examples: Sequence[Example], group: int, sampling: Sampling, seeds: Sequence[Seed]
) -> tuple[Completions, list[list[str]], Scores]:
    """`group` responses to each example, their texts [N][G] and their scores [N · G]."""
    prompts = [job.prompter.ids(example.prompt) for example in examples]
    completions = generate(job.language_model, prompts, group, sampling=sampling, seeds=seeds)
    decode = job.language_model.tokenizer.decode
    texts = [[decode(ids, skip_special_tokens=True) for ids in siblings] for siblings in completions.tokens]
    items = [
        Item(example.prompt, text, example.columns)
        for example, siblings in zip(examples, texts, strict=True)
        for text in siblings
    ]
    return completions, texts, score(job.rewards, items, job.setup.reward_timeout)


def collect(job: Job, position: int) -> Collection:
    """Draw, answer and score prompts from `position` of the data on, until the batch is full.

    Dynamic sampling draws again for the groups that it drops, up to its cap, and then goes on with what there is. The
    filter reads the rewards of the functions alone: the punishment of long responses would make any group mixed.
    """
    keep = job.method.sampler.keep
    most = keep.max_batches if isinstance(keep, KeepMixed) else 1
    missing, draws, kept, drawn = job.setup.prompts, 0, [], []
    failures: Counter[str] = Counter()
    example, completions, tokens = "", 0, 0
    while missing and draws < most:
        batch, scores, spent = _draw(job, position, missing)
        position, draws = position + missing, draws + 1
        completions, tokens = completions + spent[0], tokens + spent[1]
        failures += scores.failures
        example = example or scores.example
        drawn.append(batch)
        stays = np.ones(missing, bool)
        if isinstance(keep, KeepMixed):
            stays = keep(learn.rollouts(batch.completions, batch.total, scored=batch.scored)).any(1)
        kept.append(batch[stays])
        missing -= int(stays.sum())
    whole = Batch.join(kept) if missing < job.setup.prompts else None
    return Collection(whole, Batch.join(drawn), draws, missing == 0, completions, tokens, failures, example)


def _draw(job: Job, position: int, count: int) -> tuple[Batch, Scores, tuple[int, int]]:
    """`count` prompts answered and scored; the scores; responses and tokens that it took."""
    examples = [job.data[i] for i in draw(len(job.data), job.seed, position, count)]
    seeds: list[Seed] = [(job.seed, 0, position + i) for i in range(count)]
    group = job.method.sampler.group
    completions, texts, scores = answer(job, examples, group, job.sampling, seeds)
    batch = Batch.of(examples, completions, texts, scores)
    spent = (count * group, int(completions.lengths.sum()))
    if job.method.sampler.greedy:
        greedily, _, theirs = answer(job, examples, 1, greedy(job.sampling), seeds)
        spent = (spent[0] + count, spent[1] + int(greedily.lengths.sum()))
        # Without its companion a group has no baseline.
        scored = batch.scored & theirs.scored[:, None]
        returns = theirs.total + _punishment(job, greedily.lengths[:, 0])
        batch = replace(batch, scored=scored, total=np.where(scored, batch.total, 0.0), greedy_return=returns)
    return batch, scores, spent


def _punishment(job: Job, length: np.ndarray) -> np.ndarray:
    if not job.setup.overlong:
        return np.zeros(length.shape)
    return overlong(length, job.sampling.max_tokens, job.setup.overlong)


def rewarded(job: Job, batch: Batch) -> np.ndarray:
    """[N G] what each response is paid in all: the rewards' sum and the punishment of its length."""
    return batch.total + _punishment(job, batch.completions.lengths)


def book(job: Job, batch: Batch, logref: Sequence[Sequence[np.ndarray]] | None) -> Rollouts:
    """The batch as core's rollouts. Step rewards are paid where their steps end, the rest at the last token."""
    paid = rewarded(job, batch)
    step = None
    if any(s is not None for siblings in batch.steps for s in siblings):
        paid, step = _stepwise(job, batch, paid)
    return learn.rollouts(
        batch.completions,
        paid,
        scored=batch.scored,
        logref=logref,
        step=step,
        greedy_return=batch.greedy_return,
        mask_truncated=job.setup.mask_truncated,
    )


def _stepwise(job: Job, batch: Batch, paid: np.ndarray) -> tuple[np.ndarray, list[list[np.ndarray]]]:
    """Rewards [N G T] with each step's at its last token, and the tokens [N][G] that close a step."""
    lengths = batch.completions.lengths
    reward = np.zeros((*lengths.shape, int(lengths.max())))
    closes = [[np.zeros(n, bool) for n in row] for row in lengths]
    decode = job.language_model.tokenizer.decode
    for n, g in np.ndindex(*lengths.shape):
        ids, left, steps = batch.completions.tokens[n][g], paid[n, g], batch.steps[n][g]
        if steps is not None and batch.scored[n, g]:
            ends = np.array([len(decode(ids[: i + 1], skip_special_tokens=True)) for i in range(len(ids))])
            for end, number in steps:
                t = min(int(np.searchsorted(ends, end)), len(ids) - 1)
                reward[n, g, t] += number
                closes[n][g][t] = True
                left -= number
        if steps is None or abs(left) > 1e-12:
            reward[n, g, len(ids) - 1] += left
            closes[n][g][-1] = True
    return reward, closes
