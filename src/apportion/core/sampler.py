"""The sampler q: where groups start, how many siblings, what is kept, how often a collection is used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from apportion.core.errors import InvalidMethod
from apportion.core.parts.base import Part
from apportion.core.parts.keep import Keep, KeepAll

_CHOICES: dict[str, tuple[str, ...]] = {
    "start": ("reset", "visited", "independent", "stream"),
    "proposer": ("policy", "reference"),
    "values": ("none", "critic", "rollouts"),
    "feedback": ("reward", "preference", "none"),
}


@dataclass(frozen=True)
class Sampler(Part):
    """How decisions are drawn and offered to the update.

    group: siblings G in a group.
    start: "reset" (a fresh start state or prompt, shared by the siblings), "visited" (an exact state met on the
        way), "independent" (each sibling its own start), "stream" (segments that go on where the last one ended).
    horizon: decisions per trajectory or segment; None takes the task's time limit.
    proposer: who proposes: the "policy" or the frozen "reference".
    feedback: "reward", "preference" (the siblings of a pair are labelled 1 chosen / 0 rejected) or "none"
        (the task's reward is not read; only the KL to a teacher counts).
    values: where V comes from: "none", a learned "critic", or fresh "rollouts" from the state.
    value_rollouts: how many, when values is "rollouts".
    greedy: add one greedy companion rollout a group.
    keep: the filter on what was drawn.
    epochs, minibatches: passes over a collection, and cuts of each pass.
    temperature: of sampling; log-probabilities carry it.
    """

    group: int = 1
    start: Literal["reset", "visited", "independent", "stream"] = "reset"
    horizon: int | None = None
    proposer: Literal["policy", "reference"] = "policy"
    feedback: Literal["reward", "preference", "none"] = "reward"
    values: Literal["none", "critic", "rollouts"] = "none"
    value_rollouts: int = 9
    greedy: bool = False
    keep: Keep = field(default_factory=KeepAll)
    epochs: int = 1
    minibatches: int = 1
    temperature: float = 1.0

    def __post_init__(self) -> None:
        for name in ("group", "epochs", "minibatches", "value_rollouts"):
            value: Any = getattr(self, name)
            self._require(name, isinstance(value, int) and value >= 1, "a whole number of 1 or more")
        self._require("horizon", self.horizon is None or self.horizon >= 1, "1 or more, or None")
        self._require("temperature", self.temperature > 0, "more than 0; for the mode use greedy=True")
        for name, known in _CHOICES.items():
            self._require(name, getattr(self, name) in known, "one of " + ", ".join(known))
        if not isinstance(self.keep, Keep):
            raise InvalidMethod(f"Sampler.keep is {self.keep!r}; it must be a filter such as KeepAll()")
