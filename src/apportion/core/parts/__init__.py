"""The parts of q and w. Frozen dataclasses with one equation each; a method is an expression in them."""

from apportion.core.parts.aggregate import Aggregate, Constant, DecisionMean, SequenceMean, Sum
from apportion.core.parts.base import Part
from apportion.core.parts.baseline import (
    Baseline,
    BatchMean,
    Critic,
    Greedy,
    GroupMean,
    LeaveOneOut,
    NoBaseline,
    SiblingMean,
)
from apportion.core.parts.credit import GAE, Credit, Imitate, Process, RewardToGo, Total
from apportion.core.parts.keep import Keep, KeepAccepted, KeepAll, KeepBest, KeepMixed
from apportion.core.parts.kl import KL, AdaptiveBeta, NoKL
from apportion.core.parts.ratio import DecisionRatio, NoRatio, Ratio, SequenceDecisionRatio, SequenceRatio
from apportion.core.parts.scale import BatchStd, GroupStd, NoScale, Scale
from apportion.core.parts.trust import Cap, Clip, NoTrust, PairLogistic, Trust

__all__ = [
    "GAE",
    "KL",
    "AdaptiveBeta",
    "Aggregate",
    "Baseline",
    "BatchMean",
    "BatchStd",
    "Cap",
    "Clip",
    "Constant",
    "Credit",
    "Critic",
    "DecisionMean",
    "DecisionRatio",
    "Greedy",
    "GroupMean",
    "GroupStd",
    "Imitate",
    "Keep",
    "KeepAccepted",
    "KeepAll",
    "KeepBest",
    "KeepMixed",
    "LeaveOneOut",
    "NoBaseline",
    "NoKL",
    "NoRatio",
    "NoScale",
    "NoTrust",
    "PairLogistic",
    "Part",
    "Process",
    "Ratio",
    "RewardToGo",
    "Scale",
    "SequenceDecisionRatio",
    "SequenceMean",
    "SequenceRatio",
    "SiblingMean",
    "Sum",
    "Total",
    "Trust",
]
