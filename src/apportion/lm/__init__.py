"""Language models: the catalogue's methods on PyTorch and Hugging Face.

from apportion import lm, methods

run = lm.train(methods.dr_grpo, model="folder", data="sums.jsonl", reward="last_number", steps=200, out="runs/sums")
run.summary["return_mean"], run.language_model
"""

from apportion.lm.data import Dataset, dataset
from apportion.lm.models import LanguageModel, load, save, wrap
from apportion.lm.rewards import Reward
from apportion.lm.run import Run, train
from apportion.lm.setup import Setup
from apportion.lm.sft import sft

__all__ = ["Dataset", "LanguageModel", "Reward", "Run", "Setup", "dataset", "load", "save", "sft", "train", "wrap"]
