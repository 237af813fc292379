"""Methods side by side: the family table, method cards, studies and their reports.

from apportion import methods, study

study.run(study.plan([methods.ppo, methods.rloo], ["CartPole-v1"], seeds=3, steps=50_000), "studies/mine")
study.load("studies/mine")
"""

from __future__ import annotations

from apportion.study.design import Arm, Evaluation, Study, plan
from apportion.study.runner import run
from apportion.study.table import load

__all__ = ["Arm", "Evaluation", "Study", "load", "plan", "run"]
