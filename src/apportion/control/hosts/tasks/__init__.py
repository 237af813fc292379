"""Gymnasium's eleven MuJoCo tasks, version 5, as data. Importing this loads neither MuJoCo nor Gymnasium."""

from apportion.control.hosts.tasks.arms import PUSHER, REACHER
from apportion.control.hosts.tasks.base import Move, Noise, Physics, Task
from apportion.control.hosts.tasks.humanoids import ANT, HUMANOID, HUMANOID_STANDUP
from apportion.control.hosts.tasks.pendulums import INVERTED_DOUBLE_PENDULUM, INVERTED_PENDULUM
from apportion.control.hosts.tasks.runners import HALF_CHEETAH, HOPPER, SWIMMER, WALKER2D

TASKS: dict[str, Task] = {
    each.id: each
    for each in (
        HALF_CHEETAH,
        HOPPER,
        WALKER2D,
        SWIMMER,
        ANT,
        HUMANOID,
        HUMANOID_STANDUP,
        REACHER,
        PUSHER,
        INVERTED_PENDULUM,
        INVERTED_DOUBLE_PENDULUM,
    )
}

__all__ = ["TASKS", "Move", "Noise", "Physics", "Task"]
