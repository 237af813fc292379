"""What control adds to a catalogue entry: settings found by one search rule, stored as data in `presets.toml`.

A preset changes only what the caller left as the catalogue has it; what was set by hand stays. Control has no
pretrained reference policy, so a catalogue entry's own KL penalty is dropped here (a KL set by hand is refused
by the engine, not dropped).
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from apportion.control.engine import Setup
from apportion.control.hosts import TASKS
from apportion.core.catalogue import METHODS
from apportion.core.catalogue import method as entry
from apportion.core.errors import UnknownName
from apportion.core.method import Method
from apportion.core.parts import NoKL

DEFAULT_STEPS = 100_000


class Resolved(NamedTuple):
    """What runs: the method and the setup with every value filled in, and the task's usual environment steps."""

    method: Method
    setup: Setup
    steps: int


@cache
def table() -> dict[str, dict[str, Any]]:
    """All presets, values by path; `keys` says which apply, in order."""
    return tomllib.loads(resources.files("apportion.control").joinpath("presets.toml").read_text())


def keys(stem: str, task: str) -> list[str]:
    """Names of the presets of a method on a task, later ones on top of earlier ones.

    >>> keys("ppo", "Hopper-v5")
    ['ppo', '*/mujoco', 'ppo/mujoco', '*/Hopper-v5', 'ppo/Hopper-v5']
    """
    families = ["mujoco"] if task in TASKS else []
    return [stem, *(f"{who}/{where}" for where in (*families, task) for who in ("*", stem))]


def resolve(method: Method | str, task: str, overrides: Iterable[tuple[str, Any]] = ()) -> Resolved:
    """The method as it runs on the task: catalogue, then presets, then overrides (paths such as "sampler.group").

    Raises UnknownName for an unknown method or path, InvalidMethod for values that do not fit.

    >>> resolve("ppo", "CartPole-v1", [("update.learning_rate", 0.01)]).method.update.learning_rate
    0.01
    """
    method = entry(method) if isinstance(method, str) else method
    stem = method.name.partition("[")[0]
    base = METHODS.get(stem, method)
    if method.kl == base.kl and method.sampler.feedback != "none":
        method = dataclasses.replace(method.replace(kl=NoKL()), name=method.name, claim=method.claim)
    setup = Setup()
    values: dict[str, Any] = {}
    for key in keys(stem, task):
        values |= table().get(key, {})
    steps = values.pop("steps", DEFAULT_STEPS)
    for path in [path for path in values if path.startswith("setup.")]:
        setup = set_setup(setup, path, values.pop(path))
    method = method.filled(base, values)
    for path, value in overrides:
        if path.partition(".")[0] == "setup":
            setup = set_setup(setup, path, value)
        else:
            method = method.set(path, value)
    return Resolved(method, setup, steps)


def set_setup(setup: Setup, path: str, value: Any) -> Setup:
    """The setup with one field changed by its path, e.g. "setup.envs"."""
    known = [f.name for f in dataclasses.fields(setup)]
    field = path.partition(".")[2]
    if field not in known:
        raise UnknownName("field of setup", field, known)
    change: dict[str, Any] = {field: tuple(value) if isinstance(value, list) else value}
    return dataclasses.replace(setup, **change)
