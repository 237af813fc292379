"""Control: simulators in JAX and on the host, policies and training.

from apportion import control, methods

run = control.train(methods.ppo, "CartPole-v1", seed=0)
run.summary["return_mean"], run.policy.predict(observation)
"""

from apportion.control.a3c import train_a3c
from apportion.control.engine import Engine, Setup
from apportion.control.evaluate import Evaluation, TrainedPolicy, evaluate, evaluate_policy
from apportion.control.host_engine import HostEngine
from apportion.control.hosts import World, world, world_of
from apportion.control.run import evaluate_run, train_run
from apportion.control.simulators import SIMULATORS, Simulator, simulator
from apportion.control.train import Run, train

__all__ = [
    "SIMULATORS",
    "Engine",
    "Evaluation",
    "HostEngine",
    "Run",
    "Setup",
    "Simulator",
    "TrainedPolicy",
    "World",
    "evaluate",
    "evaluate_policy",
    "evaluate_run",
    "simulator",
    "train",
    "train_a3c",
    "train_run",
    "world",
    "world_of",
]
