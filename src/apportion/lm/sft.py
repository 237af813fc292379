"""Supervised fine-tuning, to warm-start a run: the same update with other people's answers in place of samples.

As (q, w): the proposer is the data, every response token counts 1, and all tokens of a batch share one denominator.
The loss is on response tokens only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from apportion.core.errors import ApportionError
from apportion.core.method import Method, Setting
from apportion.core.parts import DecisionMean, Imitate
from apportion.core.update import Adam
from apportion.lm import learn
from apportion.lm.collect import Batch
from apportion.lm.data import Example, draw
from apportion.lm.generate import Completions
from apportion.lm.job import Job, prepare
from apportion.lm.loop import Loop
from apportion.lm.run import Run, carry_out

METHOD = Method(
    name="sft",
    title="Supervised fine-tuning",
    credit=Imitate(),
    aggregate=DecisionMean(),
    update=Adam(2e-5, anneal="linear"),
    target="the distribution of the data",
    lineage="maximum likelihood: reinforce where the data proposes and every reward is 1",
    differs="nothing",
    settings=(Setting("learning rate", 2e-5, "the default of TRL's SFTTrainer"),),
)


def sft(
    *,
    preset: str | None = None,
    seed: int = 0,
    overrides: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
    out: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    callbacks: Iterable[Any] = (),
    **settings: Any,
) -> Run:
    """Fine-tune a language model on answers, and return the run; everything as in `run.train`.

    A row of the data holds its answer in the column `completion`, or else `answer`; or its prompt is messages that end
    with the assistant's. `prompts` is the number of rows a step; answers are cut at max_tokens. With eval_data and a
    reward, accuracy is measured; with eval_data alone, the loss on it.

    Raises ApportionError as `run.train`, and for rows without an answer.

        run = lm.sft(model="folder", data=[{"prompt": "1+1=", "completion": "2"}], steps=10)
    """
    pairs = list(overrides.items() if isinstance(overrides, Mapping) else overrides)
    job = prepare(METHOD, settings, pairs, preset, seed, judged=False)
    pair(job, job.data[0])
    return carry_out(job, Imitation, out, resume, quiet, callbacks)


class Imitation(Loop):
    """The loop whose collections come from the data."""

    def advance(self, doing: Callable[[str], None]) -> tuple[dict[str, Any], Batch | None]:
        """One update on the next rows; its log row. `loss` is the mean -log pi of response tokens before it."""
        job, done, count = self.job, self.fraction, self.job.setup.prompts
        rows = [job.data[i] for i in draw(len(job.data), job.seed, self.position, count)]
        given = completions(job, rows)
        doing("learning")
        signals = self.learner.step(given, learn.rollouts(given, np.ones((count, 1))), done)
        self.step += 1
        self.position += count
        self.completions += count
        self.tokens += int(given.lengths.sum())
        # Log q is 0 here, so that the distance between trainer and sampler is -log pi.
        kept = {k: v for k, v in signals.row().items() if k in ("entropy", "grad_norm", "learning_rate", "updates")}
        shown = {"length_mean": float(given.lengths.mean()), "truncated_fraction": float(given.truncated.mean())}
        return self.counters | {"loss": signals.mismatch} | shown | kept, None

    def evaluate(self, progress: Callable[[int], None]) -> tuple[dict[str, Any], Batch | None]:
        """As `Loop.evaluate` where there is a reward; otherwise the loss on the evaluation data."""
        if self.job.rewards:
            return super().evaluate(progress)
        assert self.job.eval_data is not None
        given = completions(self.job, list(self.job.eval_data))
        logp = np.concatenate([x for row in self.learner.old_logprobs(given) for x in row])
        return {"eval_loss": float(-logp.mean()), "eval_prompts": len(given.prompt)}, None


def pair(job: Job, example: Example) -> tuple[Any, str]:
    """The prompt of a row and its answer. Raises ApportionError when it has none."""
    prompt, columns = example.prompt, example.columns
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant" and len(prompt) > 1:
        return prompt[:-1], prompt[-1]["content"]
    answer = columns.get("completion", columns.get("answer"))
    if answer is None:
        raise ApportionError(
            f"{job.data.name} has no answers to learn from: give a column completion or answer, or messages that end "
            f"with the assistant's; its columns: {', '.join(columns) or 'none but the prompt'}"
        )
    return prompt, str(answer)


def completions(job: Job, rows: Sequence[Example]) -> Completions:
    """The rows' answers as a sampler would have given them, with log q = 0; the end token closes each."""
    language_model, limit = job.language_model, job.sampling.max_tokens
    pairs = [pair(job, row) for row in rows]
    encode = language_model.tokenizer
    answers = [encode(text, add_special_tokens=False)["input_ids"] + [language_model.stop_ids[0]] for _, text in pairs]
    cut = np.array([[len(a) > limit] for a in answers])
    tokens = [[np.asarray(a[:limit], np.int64)] for a in answers]
    logq = [[np.zeros(len(t)) for t in row] for row in tokens]
    prompts = [job.prompter.ids(prompt) for prompt, _ in pairs]
    return Completions(prompts, tokens, logq, ~cut, cut, job.sampling)
