"""TRL's own loss code, called on our numbers, has the gradient of sum(w · log pi). Runs where TRL is installed."""

from __future__ import annotations

from collections import defaultdict
from types import MethodType, SimpleNamespace

import numpy as np
import pytest

from apportion.core import catalogue as c
from apportion.core.parts import KL, Cap, Clip, GroupStd, KeepAll, NoKL, SequenceMean, SequenceRatio
from apportion.core.weigh import advantages, weights
from core.books import draw, rollouts

torch = pytest.importorskip("torch")
pytest.importorskip("trl", minversion="1.16.0")

TRL_STD = GroupStd(ddof=1, eps=1e-4)
CASES = {
    "grpo": (c.grpo.replace(scale=TRL_STD), {}),
    "grpo, corrected kl": (
        c.grpo.replace(scale=TRL_STD, kl=KL("loss", "k3", beta=0.04, corrected=True)),
        {"use_bias_correction_kl": True},
    ),
    "dual clip": (c.grpo.replace(scale=TRL_STD, trust=Clip(0.2, 0.2, dual=1.5)), {"delta": 1.5}),
    "dr_grpo": (c.dr_grpo, {"loss_type": "dr_grpo"}),
    "dapo": (
        c.dapo.replace(scale=TRL_STD).set("sampler.keep", KeepAll()),
        {"loss_type": "dapo", "epsilon_high": 0.28},
    ),
    "gspo": (
        c.gspo.replace(scale=TRL_STD),
        {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    ),
    "cispo": (c.cispo.replace(scale=TRL_STD, trust=Cap(high=1.3)), {"loss_type": "cispo", "epsilon_high": 1.3}),
}


def stub(per_token, book, beta, loss_type="grpo", delta=None, use_bias_correction_kl=False, **settings):
    """What the trainer's loss reads of itself, with the model replaced by its log-probabilities."""
    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, sync_gradients=True, reduce=lambda x, **_: x)
    fields = {
        "aux_loss_enabled": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None,
        "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.2, "use_vllm": False,
        "vllm_importance_sampling_correction": False, "_entropy_bonus_enabled": False, "use_adaptive_entropy": False,
        "current_gradient_accumulation_steps": 1, "max_completion_length": book["horizon"], "beta": beta,
        "model": SimpleNamespace(training=True), "accelerator": accelerator, "loss_type": loss_type,
        "_metrics": {"train": defaultdict(list)}, "num_generations": book["mask"].shape[1],
        "args": SimpleNamespace(
            delta=delta, use_bias_correction_kl=use_bias_correction_kl, steps_per_generation=1,
        ),
    }  # fmt: skip
    self = SimpleNamespace(**(fields | settings))
    self._get_per_token_logps_and_entropies = lambda *_, **__: (per_token, torch.zeros_like(per_token), None)
    return self


def inputs_of(book, advantage):
    flat = {k: torch.from_numpy(book[k]).reshape(-1, book["mask"].shape[-1]) for k in ("mask", "logq", "logref")}
    B, T = flat["mask"].shape
    return {
        "prompt_ids": torch.zeros(B, 1, dtype=torch.long),
        "prompt_mask": torch.ones(B, 1, dtype=torch.long),
        "completion_ids": torch.zeros(B, T, dtype=torch.long),
        "completion_mask": flat["mask"].double(),
        "advantages": torch.from_numpy(advantage.reshape(B, T)[:, 0].copy()),
        "old_per_token_logps": flat["logq"],
        "old_logps": (flat["logq"] * flat["mask"]).sum(1),
        "ref_per_token_logps": flat["logref"],
        "num_items_in_batch": flat["mask"].sum(),
    }


def leaf(book):
    return torch.from_numpy(book["logp"]).reshape(-1, book["mask"].shape[-1]).clone().requires_grad_()


@pytest.mark.parametrize("case", CASES)
def test_grpo_trainer(case):
    from trl.trainer.grpo_trainer import GRPOTrainer

    method, settings = CASES[case]
    for seed in range(5):
        book = draw(seed, spread=5e-4 if case == "gspo" else 0.4)
        ledger = advantages(method, rollouts(book))
        logp = leaf(book)
        trainer = stub(logp, book, method.kl.beta, **settings)
        MethodType(GRPOTrainer._compute_loss, trainer)(None, inputs_of(book, ledger.advantage)).backward()
        ours = -weights(method, ledger, book["logp"]).w.reshape(logp.shape)
        np.testing.assert_allclose(ours, logp.grad, rtol=1e-9, atol=1e-12)


def test_rloo_trainer():
    from trl.trainer.rloo_trainer import RLOOTrainer

    ratio, clip = SequenceRatio(geometric=False), Clip(0.2, 0.2)
    method = c.rloo.replace(ratio=ratio, trust=clip, aggregate=SequenceMean(), kl=NoKL())
    for seed in range(5):
        book = draw(seed, spread=0.1)
        ledger = advantages(method, rollouts(book))
        logp = leaf(book)
        trainer = stub(logp, book, beta=0.0)
        MethodType(RLOOTrainer._compute_loss, trainer)(None, inputs_of(book, ledger.advantage)).backward()
        ours = -weights(method, ledger, book["logp"]).w.reshape(logp.shape)
        np.testing.assert_allclose(ours, logp.grad, rtol=1e-9, atol=1e-12)
