"""Gymnasium's classic control tasks as pure JAX functions, equal to the originals step by step."""

from apportion.control.simulators.acrobot import ACROBOT
from apportion.control.simulators.base import Simulator
from apportion.control.simulators.cartpole import CARTPOLE
from apportion.control.simulators.mountain_car import MOUNTAIN_CAR, MOUNTAIN_CAR_CONTINUOUS
from apportion.control.simulators.pendulum import PENDULUM
from apportion.core.errors import UnknownName

SIMULATORS: dict[str, Simulator] = {
    each.id: each for each in (CARTPOLE, ACROBOT, MOUNTAIN_CAR, MOUNTAIN_CAR_CONTINUOUS, PENDULUM)
}


def simulator(id: str) -> Simulator:
    """Look up a simulator by its Gymnasium id.

    Raises:
        UnknownName: When no simulator has this id.

    >>> simulator("CartPole-v1").horizon
    500
    """
    if id not in SIMULATORS:
        raise UnknownName("task", id, SIMULATORS)
    return SIMULATORS[id]


__all__ = ["SIMULATORS", "Simulator", "simulator"]
