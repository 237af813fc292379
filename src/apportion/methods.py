"""The catalogue under the name users type: `from apportion import methods; methods.ppo`."""

from apportion.core.catalogue import *  # noqa: F403
from apportion.core.catalogue import METHODS, method

__all__ = ["METHODS", "method", *METHODS]
