"""Whole episodes of a trained policy, as one jitted program where the simulator is one, and a run folder's score."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from apportion.control import checkpoint
from apportion.control.cache import enable
from apportion.control.collect import Collection
from apportion.control.collect import episodes as collect_episodes
from apportion.control.engine import Plan
from apportion.control.host_collect import bounded
from apportion.control.hosts import Host, World, world
from apportion.control.policy import Parameters, Policy
from apportion.control.simulators import SIMULATORS, Simulator
from apportion.core.errors import ApportionError
from apportion.runs.files import read_config
from apportion.runs.seed import check_seed

EPISODES = 20
LONGEST = 100_000
"""Decisions after which the evaluation of a task without a time limit stops."""
_STREAM = 0x0E7A1
"""Folded into the seed, so that no evaluation replays the start states of training."""


class Evaluation(NamedTuple):
    """returns [E] (units of the task's reward) and lengths [E] (decisions) of E episodes."""

    returns: np.ndarray
    lengths: np.ndarray

    def summary(self) -> dict[str, Any]:
        """Mean return, its 95% interval, mean length and number of episodes."""
        return {
            "return_mean": float(np.mean(self.returns, dtype=np.float64)),
            "return_ci": interval(self.returns),
            "length_mean": float(np.mean(self.lengths)),
            "episodes": len(self.returns),
        }


def interval(x: np.ndarray) -> list[float]:
    """95% interval of the mean of x [E] by Student's t; the mean twice when E is 1.

    >>> interval(np.array([1.0, 1.0, 1.0]))
    [1.0, 1.0]
    >>> [round(edge, 3) for edge in interval(np.array([0.0, 1.0, 2.0]))]
    [-1.484, 3.484]
    """
    from scipy.special import stdtrit

    x = np.asarray(x, np.float64)
    mean = float(np.mean(x))
    if len(x) < 2:
        return [mean, mean]
    half = float(stdtrit(len(x) - 1, 0.975)) * float(np.std(x, ddof=1)) / math.sqrt(len(x))
    return [mean - half, mean + half]


def actor_of(policy: Policy, parameters: Parameters) -> tuple[Policy, Parameters]:
    """The same policy and parameters without the critic, which acting does not need."""
    actor = dataclasses.replace(policy, critic=False, log_std=0.0)
    return actor, {name: value for name, value in parameters.items() if name != "critic"}


def play(
    simulator: Simulator, policy: Policy, count: int, deterministic: bool, parameters: Parameters, seed: jax.Array
) -> tuple[jax.Array, Collection]:
    """E episodes of an actor: their start states [E D], and what happened."""
    start_key, act_key = jax.random.split(jax.random.fold_in(jax.random.key(seed), _STREAM))
    starts = jax.vmap(simulator.reset)(jax.random.split(start_key, count))
    greedy = jnp.full(count, deterministic)
    return starts, collect_episodes(simulator, policy, parameters, starts, act_key, greedy, simulator.horizon)


def _episodes(*given: Any) -> tuple[jax.Array, jax.Array]:
    _, book = play(*given)
    return jnp.sum(book.reward, axis=0), jnp.sum(book.mask, axis=0)


@functools.lru_cache(maxsize=64)
def program(simulator: Simulator, policy: Policy, episodes: int, deterministic: bool) -> Any:
    """The compiled evaluation of an actor: (parameters, seed uint32) -> returns [E], lengths [E]."""
    parameters = checkpoint.networks_template(policy)
    body = functools.partial(_episodes, simulator, policy, episodes, deterministic)
    return jax.jit(body).lower(parameters, jax.ShapeDtypeStruct((), np.uint32)).compile()


def find(id: str) -> Simulator | World:
    """The jitted simulator of a Gymnasium id, or else its simulations on the host. Raises as `hosts.host` does."""
    return SIMULATORS[id] if id in SIMULATORS else world(id)


def play_on_host(
    world: World,
    policy: Policy,
    count: int,
    deterministic: bool,
    networks: Parameters,
    seed: int,
    watch: Callable[[Host, np.ndarray], None] = lambda host, moved: None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns [E] and lengths [E] of E episodes of an actor.

    watch: called with the simulations and which of them [E] have just moved: all at the start, the live ones after.
    """
    host = world.open(count)
    try:
        host.reset(None, np.random.SeedSequence([seed, _STREAM]).generate_state(count).tolist())
        total, length, live = np.zeros(count), np.zeros(count, np.int64), np.ones(count, bool)
        watch(host, live)
        for t in range(min(world.horizon, LONGEST)):
            seen = host.observe().astype(np.float32)
            action = np.asarray(_act(policy, deterministic, networks, seen, np.uint32(seed), np.uint32(t)))
            step = host.step(bounded(host, action), live)
            total += step.reward
            length += live & ~step.broken
            watch(host, live & ~step.broken)
            live = live & ~(step.terminated | step.broken | host.truncated())
            if not live.any():
                break
        return total, length
    finally:
        host.close()


def evaluate_policy(
    simulator: Simulator | World,
    policy: Policy,
    parameters: Parameters,
    episodes: int = EPISODES,
    seed: int = 0,
    deterministic: bool = True,
) -> Evaluation:
    """Whole episodes from fresh start states, until each ends or the task's time limit cuts it.

    parameters: the networks as a pytree. deterministic: take the most likely action instead of a sample.
    Raises ApportionError for a number of episodes below 1, and as `check_seed`.
    """
    check_seed(seed)
    if episodes < 1:
        raise ApportionError(f"episodes is {episodes}; it must be 1 or more")
    enable()
    actor, parameters = actor_of(policy, parameters)
    if isinstance(simulator, World):
        return Evaluation(*play_on_host(simulator, actor, episodes, deterministic, parameters, seed))
    returns, lengths = program(simulator, actor, episodes, deterministic)(parameters, np.uint32(seed))
    return Evaluation(np.asarray(returns), np.asarray(lengths))


def evaluate(
    engine: Plan, parameters: Any, episodes: int = EPISODES, seed: int = 0, deterministic: bool = True
) -> Evaluation:
    """`evaluate_policy` of an engine's policy without statistics. parameters: flat [P], as in TrainState."""
    networks = checkpoint.unflatten(engine.policy, parameters)
    return evaluate_policy(engine.simulator, engine.policy, networks, episodes, seed, deterministic)


@dataclass(frozen=True)
class TrainedPolicy:
    """A policy to act with, in the form that users of Stable-Baselines3 expect.

    networks: the parameters as a pytree (see `Policy.init`).
    """

    simulator: Simulator | World
    policy: Policy
    networks: Parameters = field(repr=False)
    seed: int = 0
    _draws: Any = field(default_factory=itertools.count, repr=False, compare=False)

    def predict(self, observation: Any, deterministic: bool = True) -> tuple[np.ndarray, None]:
        """Action for one observation [O] or a batch [B O]; the second value is the state of a memory it lacks.

        Continuous actions are clipped to the task's bounds. Raises ApportionError for another shape.
        """
        x = np.asarray(observation, np.float32)
        if x.ndim not in (1, 2) or x.shape[-1] != self.policy.observation_size:
            size = self.policy.observation_size
            raise ApportionError(
                f"observation has shape {list(x.shape)}; {self.simulator.id} has [{size}] or [B, {size}]"
            )
        draw = 0 if deterministic else next(self._draws)
        actor, networks = actor_of(self.policy, self.networks)
        action = np.asarray(_act(actor, deterministic, networks, x, np.uint32(self.seed), np.uint32(draw)))
        if self.policy.discrete:
            return action.astype(np.int64), None
        low, high = (np.asarray(edge, np.float32) for edge in (self.simulator.action_low, self.simulator.action_high))
        return np.clip(action, low, high), None


@functools.partial(jax.jit, static_argnums=(0, 1))
def _act(
    policy: Policy, greedy: bool, networks: Parameters, x: jax.Array, seed: jax.Array, draw: jax.Array
) -> jax.Array:
    if greedy:
        return policy.applied(policy.mode(networks, x))
    key = jax.random.fold_in(jax.random.key(seed), draw)
    return policy.applied(policy.sample(networks, x, policy.noise(key, x.shape[:-1]))[0])


def load(out: Path) -> tuple[dict[str, Any], dict[str, Any], TrainedPolicy]:
    """The run in a folder: its configuration, where it stands, and its finished policy or else its last checkpoint's.

    Raises ApportionError for a folder that is missing, holds no run, or holds a checkpoint of another task.
    """
    config = read_config(out)
    fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in config["policy"].items()}
    policy = Policy(**fields)
    about, networks = checkpoint.load_networks(out, policy, config)
    return config, about, TrainedPolicy(find(config["task"]), policy, networks, config["seed"])


def evaluate_run(out: str | Path, episodes: int = EPISODES, seed: int = 0) -> dict[str, Any]:
    """Score the run in a folder, deterministically: its finished policy, or its last checkpoint.

    seed: of the start states. Returns method, task, seed (of training), env_steps and `Evaluation.summary`. Raises as
    `load` and `evaluate_policy` do.
    """
    config, about, p = load(Path(out))
    result = evaluate_policy(p.simulator, p.policy, p.networks, episodes, seed)
    told = {"method": config["method"]["name"], "task": config["task"], "seed": config["seed"]}
    return told | {"env_steps": about["env_steps"]} | result.summary()
