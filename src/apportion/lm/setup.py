"""What a run needs beside its method, and the presets that fill it in."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from apportion.core.catalogue import METHODS
from apportion.core.catalogue import method as entry
from apportion.core.errors import ApportionError, UnknownName
from apportion.core.method import Method

STEPS = 100
"""Updates of a run that says nothing about its budget."""


@dataclass(frozen=True)
class Setup:
    """Model, data, rewards, and how a run goes about them. The method's own values (group, learning rate) are not here.

    model: a Hugging Face folder or hub name, `package:NAME` for the folder of an installed Python package, or a
        `models.LanguageModel`. gguf_file: a GGUF file inside it. dtype: of the weights. device: "cpu", "cuda", or None
        for CUDA where there is one. lora: fields of peft.LoraConfig, such as {"r": 8}; None trains all weights.
    reference: the model of the KL penalty, as `model`; None for the model itself as it was before the run.
    data, reward, eval_data: see `data.dataset` and `rewards.rewards` (fine-tuning needs no reward). Prompts of
        eval_data are left out of training.
    system: a system message before every prompt. plain: give prompts as they are, without the chat template.

    prompts: N, prompts of a batch; each gets sampler.group responses. max_tokens: the longest response.
    top_p, top_k: truncation of the sampled distribution (1 and 0: none); the temperature is sampler.temperature.
    reward_timeout: seconds that a reward may take a completion; None trusts it (see `scoring.score`).
    overlong: the last so many tokens before max_tokens are punished softly (DAPO, eq. 13); 0 for none.
    mask_truncated: responses cut at max_tokens keep their reward in the baseline, but do not train.
    correction: importance weights against a sampler that differs from the trainer, "token" or "sequence"; None: none.
    weight_decay: AdamW's. checkpointing: less memory for more time. batch_tokens: tokens in the model at once
    (None: see `Learner`).

    steps: updates (collections learned from) of the run. completions, tokens: the run also ends with the update that
    reaches so many sampled responses, or response tokens. None of the three: 100 steps.
    eval_every: steps between two evaluations; 0 evaluates before the first and after the last. eval_size: problems.
    eval_samples: answers to a problem: 1 takes the most probable one, more are sampled and give pass@k.
    samples: completions that are shown and kept in samples.jsonl with every evaluation, or every 10 steps without.
    """

    model: Any = None
    data: Any = None
    reward: Any = None
    eval_data: Any = None
    gguf_file: str | None = None
    dtype: str = "float32"
    device: str | None = None
    lora: dict[str, Any] | None = None
    reference: Any = None
    system: str | None = None
    plain: bool = False
    prompts: int = 8
    max_tokens: int = 256
    top_p: float = 1.0
    top_k: int = 0
    reward_timeout: float | None = 10.0
    overlong: int = 0
    mask_truncated: bool = False
    correction: str | None = None
    weight_decay: float = 0.0
    checkpointing: bool = False
    batch_tokens: int | None = None
    steps: int | None = None
    completions: int | None = None
    tokens: int | None = None
    eval_every: int = 0
    eval_size: int = 200
    eval_samples: int = 1
    samples: int = 3

    def __post_init__(self) -> None:
        for name in ("model", "data"):
            if getattr(self, name) is None:
                raise ApportionError(f"there is no {name}; give {name}=... (--{name})")
        for name, least in _COUNTS.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ApportionError(f"{_option(name)} is {value!r}; it must be a whole number of {least} or more")
        if self.overlong > self.max_tokens:
            raise ApportionError(f"overlong is {self.overlong}; it must be at most max_tokens ({self.max_tokens})")
        if self.correction not in (None, "token", "sequence"):
            raise UnknownName("correction", str(self.correction), ["token", "sequence"])
        if self.reward_timeout is not None and not (_real(self.reward_timeout) and self.reward_timeout > 0):
            raise ApportionError(f"reward_timeout is {self.reward_timeout!r}; it must be seconds, more than 0, or None")
        if not (_real(self.weight_decay) and self.weight_decay >= 0):
            raise ApportionError(f"weight_decay is {self.weight_decay!r}; it must be 0 or more")
        if self.lora is not None and not isinstance(self.lora, Mapping):
            raise ApportionError(f"lora is {self.lora!r}; it must map fields of peft.LoraConfig, such as {{'r': 8}}")

    @property
    def budget(self) -> dict[str, int]:
        """What the run may use, of each kind that is limited."""
        given = {name: getattr(self, name) for name in ("steps", "completions", "tokens")}
        return {name: value for name, value in given.items() if value is not None} or {"steps": STEPS}


_COUNTS = {
    "prompts": 1, "max_tokens": 1, "top_k": 0, "overlong": 0, "batch_tokens": 1, "steps": 1, "completions": 1,
    "tokens": 1, "eval_every": 0, "eval_size": 1, "eval_samples": 1, "samples": 0,
}  # fmt: skip
_OPTIONAL = ("steps", "completions", "tokens", "batch_tokens")


def _real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _option(name: str) -> str:
    return name.replace("_", "-") if "_" not in name else f"{name} (--{name.replace('_', '-')})"


class Resolved(NamedTuple):
    """What runs: the method and the setup with every value filled in."""

    method: Method
    setup: Setup


@cache
def presets() -> dict[str, dict[str, Any]]:
    """All presets: values by name of a Setup field, or by path of a method's field."""
    return tomllib.loads(resources.files("apportion.lm").joinpath("presets.toml").read_text(encoding="utf-8"))


def resolve(
    method: Method | str,
    settings: Mapping[str, Any],
    overrides: Iterable[tuple[str, Any]] = (),
    preset: str | None = None,
) -> Resolved:
    """The method and the setup as they run: catalogue, then preset, then what was set by hand.

    settings: fields of Setup. overrides: (path, value) of the method's fields, such as ("sampler.group", 8).
    Raises UnknownName for a preset, field or path that does not exist, ApportionError for values that do not fit.

    >>> grpo, reinforce = (resolve(name, {}, preset="lm_arithmetic") for name in ("grpo", "reinforce"))
    >>> (grpo.setup.prompts, grpo.method.sampler.group), (reinforce.setup.prompts, reinforce.method.sampler.group)
    ((8, 8), (64, 1))
    """
    method = entry(method) if isinstance(method, str) else method
    if preset is not None and preset not in presets():
        raise UnknownName("preset", preset, presets())
    values = dict(presets()[preset]) if preset else {}
    base = METHODS.get(method.name.partition("[")[0], method)
    if base.sampler.group == 1 and "sampler.group" in values:
        # A method without siblings draws as many responses from as many prompts.
        values["prompts"] *= values.pop("sampler.group")
    method = method.filled(base, {path: value for path, value in values.items() if "." in path})
    for path, value in overrides:
        method = method.set(path, value)
    known = [f.name for f in dataclasses.fields(Setup)]
    for field in settings:
        if field not in known:
            raise UnknownName("setting", field, known)
    return Resolved(method, Setup(**{k: v for k, v in values.items() if "." not in k} | dict(settings)))
