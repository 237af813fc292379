"""Simulators on the host: MuJoCo's tasks on its native batch, and any other Gymnasium id. One interface, `Host`."""

from __future__ import annotations

import os
from functools import lru_cache, partial

from apportion.control.hosts.base import NO_LIMIT, Capabilities, Host, Step
from apportion.control.hosts.tasks import TASKS
from apportion.control.hosts.world import World, world_of
from apportion.core.errors import ApportionError


def host(id: str, size: int, threads: int | None = None, film: bool = False) -> Host:
    """M simulations of one task: MuJoCo's native batch for Gymnasium's eleven tasks, else Gymnasium itself.

    Args:
        id: A Gymnasium id.
        size: The number of simulations, M.
        threads: Native threads; None takes $APPORTION_THREADS, or all CPUs where that is not set. Gymnasium's
            environments run one after another whatever it is.
        film: Whether `Host.frame` will be asked for.

    Raises:
        UnknownName: When no environment has this id.
        ApportionError: When the task cannot be made here; the message says what is missing.
    """
    for name, value in (("size", size), ("threads", 1 if threads is None else threads)):
        if not isinstance(value, int) or value < 1:
            raise ApportionError(f"{name} is {value!r}; it must be a whole number of 1 or more")
    if id not in TASKS:
        from apportion.control.hosts.gym import GymHost

        return GymHost(id, size, film)
    try:
        from apportion.control.hosts.mujoco import MujocoHost
    except ImportError as error:
        raise ApportionError(f"{id} needs MuJoCo 4 ({error}): pip install 'apportion[mujoco]'") from None
    except (AttributeError, RuntimeError) as error:  # what it raises where MUJOCO_GL names what is not there
        given = os.environ.get("MUJOCO_GL", "")
        raise ApportionError(
            f"MuJoCo does not load with MUJOCO_GL={given} ({error}); unset it, or set it to egl"
        ) from None
    return MujocoHost(TASKS[id], size, threads or _threads())


def _threads() -> int | None:
    """What $APPORTION_THREADS says: where several runs share a machine, each keeps to its own cores."""
    text = os.environ.get("APPORTION_THREADS", "")
    if text and not (text.isdigit() and int(text) >= 1):
        raise ApportionError(f"APPORTION_THREADS is '{text}'; it must be a whole number of 1 or more, or not set")
    return int(text) if text else None


@lru_cache(maxsize=64)
def world(id: str) -> World:
    """A task by its Gymnasium id, before any simulation of it. Raises as `host` does."""
    return world_of(partial(host, id))


__all__ = ["NO_LIMIT", "TASKS", "Capabilities", "Host", "Step", "World", "host", "world", "world_of"]
