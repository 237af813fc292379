"""The book of what the sampler q produced. Read-only: nothing downstream rewrites a reward."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from apportion.core.arrays import Array, array_namespace, as_float, check_finite, reverse_cumulative_max
from apportion.core.errors import InvalidData

_DECISION = ("reward", "mask", "logq", "terminated", "truncated", "logref", "value", "next_value", "step")
_NUMBERS = ("logq", "logref", "value", "next_value")


@dataclass(frozen=True, eq=False)
class Rollouts:
    """What q produced, on the axes N groups, G siblings, T decisions.

    reward: [N G T] exactly as the task gave it; rewards after the end of a trajectory must be 0.
    mask: [N G T] bool, true where the policy decided (false: padding, tool output).
    logq: [N G T] log-probability (nats) under the distribution actually sampled (after temperature, top-p).
    terminated: [N G T] bool, the task ended after this decision. None: after the last decision of each row.
    truncated: [N G T] bool, a time limit cut the trajectory after this decision. None: nowhere.
    logref: [N G T] log-probability under the reference policy or teacher.
    value, next_value: [N G T] critic at the state and at the true next state, also at a time limit.
    step: [N G T] bool, the decision closes a step that carries a process reward. None: only the last one.
    scored: [N G] bool, false where the reward function failed; whatever it left behind is not read.
    greedy_return: [N] return of the greedy companion rollout.
    mass: [N] probability of each group; None: 1/N (sampled).
    horizon: the most decisions that the task allows (time limit, maximum response length).

    Raises InvalidData when an array does not have the shape above.
    """

    reward: Array
    mask: Array
    logq: Array
    terminated: Array | None = None
    truncated: Array | None = None
    logref: Array | None = None
    value: Array | None = None
    next_value: Array | None = None
    step: Array | None = None
    scored: Array | None = None
    greedy_return: Array | None = None
    mass: Array | None = None
    horizon: int | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.reward.shape)
        if len(shape) != 3:
            raise InvalidData(f"reward has shape {shape}; it must be [N groups, G siblings, T decisions]")
        expected: dict[str, tuple[int, ...]] = dict.fromkeys(_DECISION, shape)
        expected |= {"scored": shape[:2], "greedy_return": shape[:1], "mass": shape[:1]}
        for field in fields(self):
            x = getattr(self, field.name)
            if field.name in expected and x is not None and tuple(x.shape) != expected[field.name]:
                raise InvalidData(
                    f"{field.name} has shape {tuple(x.shape)}; with reward [N G T] = {shape} "
                    f"it must be {expected[field.name]}"
                )

    def check(self) -> Rollouts:
        """Refuse a non-finite number where it would count, with its index; returns itself.

        >>> import numpy as np
        >>> x = np.zeros((1, 2, 3)); x[0, 1, 2] = np.nan
        >>> Rollouts(reward=x, mask=x == x, logq=0 * np.ones((1, 2, 3))).check()
        Traceback (most recent call last):
        ...
        apportion.core.errors.InvalidData: reward is nan at [n=0, g=1, t=2]; it must be finite there; \
mark a trajectory that has no reward as unscored
        """
        xp = array_namespace(self.reward)
        counted = xp.logical_or(self.count[..., None], xp.zeros_like(self.mask))
        check_finite("reward", self.reward, counted, "mark a trajectory that has no reward as unscored")
        for name in _NUMBERS:
            if getattr(self, name) is not None:
                check_finite(name, getattr(self, name), self.mask, "mask out what the policy did not decide")
        paid = xp.logical_and(self.reward != 0, counted)
        if self.step is not None and bool(xp.any(xp.logical_and(paid, xp.logical_not(self.step)))):
            raise InvalidData("reward is not 0 at a decision that `step` does not mark; mark it as a step")
        if self.greedy_return is not None:
            check_finite("greedy_return", self.greedy_return, xp.ones_like(self.mask[:, 0, 0]), "score that rollout")
        return self

    def settled(self) -> Rollouts:
        """The same book with 0 wherever nothing may be read: rewards of unscored rows, the rest where masked.

        Anything may lie there (NaN from a failed reward, -inf at a padded position), and 0 times it is not 0.
        """
        xp = array_namespace(self.reward)
        counts = dict.fromkeys(_NUMBERS, self.mask) | {"reward": self.count[..., None]}
        arrays = {name: (getattr(self, name), valid) for name, valid in counts.items()}
        return replace(
            self, **{k: xp.where(valid, x, xp.zeros_like(x)) for k, (x, valid) in arrays.items() if x is not None}
        )

    @property
    def last(self) -> Array:
        """[N G T] bool: the last decision of each row (nowhere in a row without decisions)."""
        xp = array_namespace(self.reward)
        m = as_float(self.mask, self.reward)
        later = reverse_cumulative_max(m)
        after = xp.concat([later[..., 1:], xp.zeros_like(m[..., :1])], axis=-1)
        return xp.logical_and(self.mask, after == 0)

    @property
    def task_end(self) -> Array:
        """[N G T] bool: no reward can follow; the value of what comes next is 0."""
        if self.terminated is not None:
            return self.terminated
        xp = array_namespace(self.reward)
        last = self.last
        return last if self.truncated is None else xp.logical_and(last, xp.logical_not(self.truncated))

    @property
    def end(self) -> Array:
        """[N G T] bool: a trajectory stops here, by the task or by a time limit; credit never crosses it."""
        xp = array_namespace(self.reward)
        return self.task_end if self.truncated is None else xp.logical_or(self.task_end, self.truncated)

    @property
    def count(self) -> Array:
        """[N G] bool: siblings that count in a baseline."""
        xp = array_namespace(self.reward)
        return self.scored if self.scored is not None else xp.ones_like(self.mask[..., 0])

    @property
    def probability(self) -> Array:
        """[N] probability of each group; 1/N when sampled."""
        if self.mass is not None:
            return self.mass
        ones = array_namespace(self.reward).ones_like(self.reward[:, 0, 0])
        return ones / self.reward.shape[0]
