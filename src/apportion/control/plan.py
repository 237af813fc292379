"""What is trained: a method on a task with its settings, and everything of an iteration but the collection."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from apportion.control.checkpoint import unflatten
from apportion.control.collect import Collection, Finished
from apportion.control.hosts.world import World
from apportion.control.learn import Learner, Rows, Signals, optimiser
from apportion.control.natural import natural_update
from apportion.control.normalise import Normaliser, nothing, statistics
from apportion.control.policy import ACTIVATIONS, LOG_STD_BOUNDS, STDS, Parameters, Policy, Std, policy_for
from apportion.control.simulators import Simulator
from apportion.core.errors import ApportionError, InvalidMethod, UnknownName
from apportion.core.method import Method
from apportion.core.parts import NoKL, PairLogistic
from apportion.core.rollouts import Rollouts
from apportion.core.update import NaturalGradient
from apportion.core.weigh import advantages


@dataclass(frozen=True)
class Setup:
    """What a run needs beside its method.

    envs: simulations in a stream, or groups N of a collection of episodes. hidden, activation, log_std: the networks.
    std: "independent" of the state or "dependent" on it; squash: actions through tanh to the task's bounds, instead of
    clipped to them (see `Policy`; both for continuous actions).
    normalise_observation: centre and scale observations by their running statistics, clipped to ±10.
    normalise_reward: divide rewards by the running standard deviation of the discounted return; what is reported
    stays raw. stagger: cut the first episodes of a stream at times spread over the time limit, so that a segment shows
    all parts of an episode; those cut short are left out of the reported returns.
    stagger is for simulators outside of jit.
    """

    envs: int = 8
    hidden: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    log_std: float = 0.0
    normalise_observation: bool = False
    normalise_reward: bool = False
    stagger: bool = False
    std: Std = "independent"
    squash: bool = False

    def __post_init__(self) -> None:
        def count(x: Any) -> bool:
            return isinstance(x, int) and not isinstance(x, bool) and x >= 1

        if not count(self.envs):
            raise ApportionError(f"setup.envs is {self.envs!r}; it must be a whole number of 1 or more")
        if not (isinstance(self.hidden, tuple) and all(count(h) for h in self.hidden)):
            raise ApportionError(f"setup.hidden is {self.hidden!r}; it must be a tuple of widths such as (64, 64)")
        real = isinstance(self.log_std, int | float) and not isinstance(self.log_std, bool)
        if not (real and math.isfinite(self.log_std)):
            raise ApportionError(f"setup.log_std is {self.log_std!r}; it must be a finite number")
        for name in ("normalise_observation", "normalise_reward", "stagger", "squash"):
            if not isinstance(getattr(self, name), bool):
                raise ApportionError(f"setup.{name} is {getattr(self, name)!r}; it must be True or False")
        if self.activation not in ACTIVATIONS:
            raise UnknownName("activation", self.activation, ACTIVATIONS)
        if self.std not in STDS:
            raise UnknownName("setup.std", self.std, STDS)
        low, high = LOG_STD_BOUNDS
        if self.std == "dependent" and not low < self.log_std < high:
            raise ApportionError(
                f"setup.log_std is {self.log_std}; with setup.std='dependent' it must be between {low:g} and {high:g}"
            )


class TrainState(NamedTuple):
    """Everything that the next iteration depends on; saving it is a checkpoint.

    parameters: flat [P]. stream: None for episodes. env_steps: float32 would stop counting at 2^24, hence int32.
    normaliser: the statistics that the run normalises by, if it does.
    """

    parameters: jax.Array
    optimiser: Any
    stream: Any
    key: jax.Array
    env_steps: jax.Array
    iteration: jax.Array
    normaliser: Normaliser = Normaliser()


class Metrics(NamedTuple):
    """What one iteration reports. finished: episodes that ended in it."""

    finished: Finished
    signals: Signals
    explained_variance: jax.Array
    kept: jax.Array
    learning_rate: jax.Array


@dataclass(frozen=True)
class Plan:
    """A method on a simulator, and all of an iteration but its collection.

    Raises InvalidMethod for what control cannot run.
    """

    method: Method
    simulator: Simulator | World
    setup: Setup
    total_steps: int

    def __post_init__(self) -> None:
        if self.total_steps < 1:
            raise ApportionError(f"steps is {self.total_steps}; it must be 1 or more environment steps")
        for bad, why in self._refusals():
            if bad:
                raise InvalidMethod(f"{self.method.name} on {self.simulator.id}: {why}")
        if not self.streams:
            self.method.check_horizon(self.horizon)

    def _refusals(self) -> list[tuple[bool, str]]:
        return refusals(self)

    @property
    def streams(self) -> bool:
        """Whether collections are segments of a stream, not whole episodes."""
        return self.method.sampler.start == "stream"

    @property
    def horizon(self) -> int:
        """Decisions per segment, or the longest an episode may last."""
        limit = self.method.sampler.horizon
        if self.streams:
            return limit or self.simulator.horizon
        return min(limit or self.simulator.horizon, self.simulator.horizon)

    @property
    def shape(self) -> tuple[int, int]:
        """Groups N and siblings G of a collection; a stream's simulations are groups of one."""
        return self.setup.envs, 1 if self.streams else self.method.sampler.group

    @property
    def width(self) -> int:
        """Simulations of one group: its siblings and, last, the greedy companion, if any."""
        return self.shape[1] + self.method.sampler.greedy

    @property
    def gamma(self) -> float:
        """The discount of the return whose spread rewards are divided by: the method's own."""
        return float(getattr(self.method.credit, "gamma", 1.0))

    @property
    def batch(self) -> int:
        """Decisions of one segment over all simulations."""
        return self.setup.envs * self.horizon

    @cached_property
    def policy(self) -> Policy:
        """The networks' description."""
        return policy_for(
            self.simulator,
            critic=self.method.sampler.values == "critic",
            hidden=self.setup.hidden,
            activation=self.setup.activation,
            log_std=self.setup.log_std,
            normalise=self.setup.normalise_observation,
            std=self.setup.std,
            squash=self.setup.squash,
        )

    @cached_property
    def learner(self) -> Learner:
        """The update, with the way back from the flat vector to the networks."""
        template = jax.eval_shape(self.policy.init, jax.random.key(0))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), template)
        return Learner(self.method, self.policy, ravel_pytree(zeros)[1])

    def parameters(self, state: TrainState) -> Parameters:
        """The networks' parameters as a pytree."""
        return self.learner.unravel(state.parameters)

    def networks(self, state: TrainState) -> Parameters:
        """The networks to act with, NumPy: the trained parameters and the statistics that they see through."""
        return unflatten(self.policy, state.parameters) | statistics(state.normaliser)

    def begin(self, net: jax.Array, key: jax.Array, stream: Any) -> TrainState:
        """The state before the first iteration, its normaliser aside. net: key of the networks."""
        flat = ravel_pytree(self.policy.init(net))[0]
        zero = jnp.zeros((), jnp.int32)
        return TrainState(flat, optimiser(self.method.update).init(flat), stream, key, zero, zero)

    def unnormalised(self, dtype: Any) -> Normaliser:
        """The normaliser before the first observation."""
        seen = nothing((self.policy.observation_size,), dtype) if self.setup.normalise_observation else None
        return Normaliser(seen, nothing((), dtype) if self.setup.normalise_reward else None)

    def seen(self, book: Collection, known: dict[str, Any], scale: Any) -> Collection:
        """The collection as the update sees it. known: see `normalise.statistics`. scale: multiplies rewards."""
        parts = {"observation": self.policy.observed(known, book.observation), "reward": scale * book.reward}
        if self.policy.critic:
            parts["next_observation"] = self.policy.observed(known, book.next_observation)
        return book._replace(**parts)

    def rate(self, env_steps: jax.Array) -> jax.Array:
        """The learning rate after so many environment steps; nan where the update finds its own step."""
        if isinstance(self.method.update, NaturalGradient):
            return jnp.full((), jnp.nan)
        return jnp.asarray(self.method.update.rate(jnp.clip(env_steps / self.total_steps, 0.0, 1.0)), jnp.float32)

    def learn(
        self,
        flat: jax.Array,
        opt: Any,
        book: Collection,
        finished: Finished,
        key: jax.Array,
        rate: jax.Array,
        greedy_return: jax.Array | None = None,
    ) -> tuple[jax.Array, Any, Metrics]:
        """The update from a collection. Pure.

        flat, opt: parameters [P] and the optimiser's state. finished: the episodes that ended in the collection,
        for the metrics. greedy_return: [N] of the greedy companions.
        """
        value, next_value = self._values(self.learner.unravel(flat), book)
        rollouts = grouped(book, self.shape, value, next_value, self.simulator.horizon, greedy_return)
        rows, kept = self._rows(rollouts, book)
        if isinstance(self.method.update, NaturalGradient):
            flat, opt, signals = natural_update(self.learner, flat, opt, rows, key)
        elif self.streams:
            flat, opt, signals = self.learner.even(flat, opt, rows, key, rate)
        else:
            valid = (rows.share > 0).reshape(rollouts.mask.shape)
            flat, opt, signals = self.learner.ragged(flat, opt, rows, valid, key, rate)
        return flat, opt, Metrics(finished, signals, explained_variance(rows, rollouts), kept, rate)

    def apart(self, book: Collection) -> tuple[jax.Array | None, Collection]:
        """Returns [N] of the greedy companions (None without), and the collection of the siblings alone."""
        return split_greedy(book, self.setup.envs, self.width, self.method.sampler.greedy)

    def _values(self, parameters: Parameters, book: Collection) -> tuple[jax.Array | None, jax.Array | None]:
        """Critic's values [T M] of each state and of the true next one."""
        if not self.policy.critic:
            return None, None
        value = self.policy.value(parameters, book.observation)
        last = self.policy.value(parameters, book.next_observation[-1:])
        following = jnp.concatenate([value[1:], last])

        def at_limit() -> jax.Array:
            return jnp.where(book.truncated, self.policy.value(parameters, book.next_observation), following)

        # The next row's value is the next state's, except where a time limit cut in between (a real end has none).
        return value, jax.lax.cond(jnp.any(book.truncated), at_limit, lambda: following)

    def _rows(self, rollouts: Rollouts, book: Collection) -> tuple[Rows, jax.Array]:
        """Flat rows for the learner, in [N G T] order, and the fraction of trajectories the filter kept."""
        ledger = advantages(self.method, rollouts)
        observed = jnp.moveaxis(book.observation, 0, 1)
        acted = jnp.moveaxis(book.action, 0, 1)
        flat = ledger.map(lambda x: x.reshape(-1))
        kept = jnp.where(flat.share > 0, 1.0, 0.0)
        rows = Rows(
            observation=observed.reshape(-1, observed.shape[-1]),
            action=acted.reshape(-1, *acted.shape[2:]),
            logq=flat.logq,
            advantage=flat.advantage,
            share=flat.share,
            weight=kept / jnp.maximum(jnp.sum(kept), 1),
            target=flat.credit,
            old_value=flat.credit if rollouts.value is None else rollouts.value.reshape(-1),
        )
        return rows, jnp.mean(self.method.sampler.keep(rollouts) > 0)


def refusals(plan: Plan) -> list[tuple[bool, str]]:
    """(whether it holds, what to say) of everything that no engine runs."""
    method, sampler = plan.method, plan.method.sampler
    reference = not isinstance(method.kl, NoKL) or isinstance(method.trust, PairLogistic)
    foreign = sampler.proposer != "policy" or sampler.feedback != "reward"
    whole = sampler.greedy or method.ratio.per_sequence
    continuous = plan.setup.squash or plan.setup.std != "independent"
    bounds = (*plan.simulator.action_low, *plan.simulator.action_high)
    return [
        (
            continuous and plan.simulator.action_count > 0,
            "its actions are discrete; leave setup.std and setup.squash as they are",
        ),
        (
            plan.setup.squash and not all(math.isfinite(x) for x in bounds),
            "its actions have no finite bounds to squash them to; set setup.squash=False",
        ),
        (
            foreign,
            "control learns from the task's reward on the policy's own actions; choose another method, or train this "
            "one on the toy language (apportion.toy.train)",
        ),
        (reference, "control has no reference policy; set kl=NoKL()"),
        (sampler.values == "rollouts", "values from fresh rollouts are not offered here; set sampler.values='critic'"),
        (sampler.start == "visited", "groups from visited states are not offered here; set sampler.start='reset'"),
        (
            isinstance(method.update, NaturalGradient)
            and not (plan.streams and method.value_loss and method.entropy == 0),
            "the natural gradient runs on a stream with a critic and no entropy bonus; set sampler.start='stream' and "
            "entropy=0, or update=Adam()",
        ),
        (
            not isinstance(method.update, NaturalGradient)
            and method.value_loss is not None
            and method.value_loss.learning_rate is not None,
            "one Adam steps policy and critic together; set value_loss.learning_rate=None",
        ),
        (
            plan.streams and whole,
            "a stream has no whole trajectories for a greedy companion or a sequence ratio; set sampler.start='reset'",
        ),
        (
            plan.streams and plan.batch % sampler.minibatches > 0,
            f"{plan.batch} decisions (setup.envs {plan.setup.envs} x sampler.horizon {plan.horizon}) do not "
            f"divide into sampler.minibatches={sampler.minibatches}",
        ),
    ]


def grouped(
    book: Collection,
    groups: tuple[int, int],
    value: jax.Array | None,
    next_value: jax.Array | None,
    horizon: int,
    greedy_return: jax.Array | None = None,
) -> Rollouts:
    """The collection as core's Rollouts: [T M] becomes [N G T]."""

    def turn(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(*groups, x.shape[0])

    return Rollouts(
        reward=turn(book.reward),
        mask=turn(book.mask),
        logq=turn(book.logq),
        terminated=turn(book.terminated),
        truncated=turn(book.truncated),
        value=None if value is None else turn(value),
        next_value=None if next_value is None else turn(next_value),
        greedy_return=greedy_return,
        horizon=horizon,
    )


def split_greedy(book: Collection, groups: int, width: int, greedy: bool) -> tuple[jax.Array | None, Collection]:
    """Take the greedy companion (last of each group) out of the collection; its return [N] is all that is used."""
    if not greedy:
        return None, book
    apart = Collection(*(x.reshape(x.shape[0], groups, width, *x.shape[2:]) for x in book))
    rest = Collection(*(x[:, :, :-1].reshape(x.shape[0], groups * (width - 1), *x.shape[3:]) for x in apart))
    return jnp.sum(apart.reward[:, :, -1], axis=0), rest


def explained_variance(rows: Rows, rollouts: Rollouts) -> jax.Array:
    """1 - Var(target - value) / Var(target) over the decisions; nan without a critic."""
    if rollouts.value is None:
        return jnp.full((), jnp.nan)
    mean = jnp.sum(rows.weight * rows.target)
    error = rows.target - rows.old_value
    spread = jnp.sum(rows.weight * (rows.target - mean) ** 2)
    return 1 - jnp.sum(rows.weight * (error - jnp.sum(rows.weight * error)) ** 2) / jnp.maximum(spread, 1e-12)
