"""Cross-check against the PyPI package polgrad, an independent reference for these losses and advantages."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from apportion.core import catalogue as c
from apportion.core.parts import KL, BatchStd, Cap, Clip, GroupStd, KeepAll
from apportion.core.weigh import advantages, weights
from core.books import draw, rollouts

torch = pytest.importorskip("torch")
polgrad = pytest.importorskip("polgrad")

LOSSES = {
    "ppo": c.ppo,
    "grpo": c.grpo,
    "dr_grpo": c.dr_grpo,
    "dapo": c.dapo.set("sampler.keep", KeepAll()),
    "gspo": c.gspo,
    "gspo_token": c.gspo_token,
    "cispo": c.cispo.replace(trust=Cap(high=1.2)),
    "rloo": c.rloo,
    "dual": c.ppo.replace(trust=Clip(0.2, 0.2, dual=1.3)),
}


def flat(x):
    """[N G T] as polgrad's [B T]."""
    return torch.from_numpy(np.ascontiguousarray(x)).reshape(-1, x.shape[-1])


def loss_of(name):
    """polgrad's own loss of that name, dual clip and Dr. GRPO's budget filled in."""
    config = polgrad.get_algorithm("ppo" if name == "dual" else name).loss
    if name == "dual":
        return dataclasses.replace(config, clip=dataclasses.replace(config.clip, ratio_cap=1.3))
    return config


@pytest.mark.parametrize("name", LOSSES)
def test_loss_gradient(name):
    method = LOSSES[name]
    for seed in range(6):
        book = draw(seed, spread=5e-4 if name.startswith("gspo") else 0.4)
        config = loss_of(name)
        if name == "dr_grpo":
            config = dataclasses.replace(config, norm_len=book["horizon"])
        ledger = advantages(method, rollouts(book))
        logp = flat(book["logp"]).requires_grad_()
        result = polgrad.policy_loss(
            config,
            logprobs=logp,
            old_logprobs=flat(book["logq"]),
            advantages=flat(ledger.advantage),
            response_mask=flat(book["mask"]),
            ref_logprobs=flat(book["logref"]),
        )
        result.loss.backward()
        beta = config.kl.coef if config.kl else None
        ours = -weights(method, ledger, book["logp"], beta=beta).w
        np.testing.assert_allclose(ours.reshape(logp.shape), logp.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.filterwarnings("ignore::apportion.core.errors.ApportionWarning")
def test_kl_loss_and_kl_in_the_reward(estimator):
    book = draw(1)
    kind, mask = polgrad.KLEstimator(estimator), flat(book["mask"])
    logp = flat(book["logp"]).requires_grad_()
    polgrad.kl_loss(logp, flat(book["logref"]), kind, polgrad.Aggregation.TOKEN_MEAN, response_mask=mask).backward()
    method = c.dapo.replace(kl=KL("loss", estimator, beta=1.0)).set("sampler.keep", KeepAll())
    silent = dataclasses.replace(rollouts(book), reward=np.zeros_like(book["reward"]))
    w = weights(method, advantages(method, silent), book["logp"]).w
    np.testing.assert_allclose(-w.reshape(logp.shape), logp.grad, rtol=1e-9, atol=1e-12)

    ledger = advantages(c.rloo.replace(kl=KL("reward", estimator, beta=0.3)), rollouts(book))
    shaped = polgrad.kl_in_reward(
        flat(book["reward"]), flat(book["logq"]), flat(book["logref"]), kind, 0.3, response_mask=mask
    )
    np.testing.assert_allclose(flat(ledger.reward - ledger.kl), shaped, rtol=1e-9, atol=1e-12)


def test_group_advantages():
    book = draw(2, N=3, G=4)
    total = torch.from_numpy(book["reward"].sum(-1)).reshape(-1)
    group = torch.arange(3).repeat_interleave(4)
    for unbiased in (False, True):
        config = polgrad.GroupNormConfig(eps=1e-4, unbiased=unbiased)
        method = c.grpo.replace(scale=GroupStd(ddof=int(unbiased), eps=1e-4))
        ours = advantages(method, rollouts(book)).advantage[..., 0].ravel()
        np.testing.assert_allclose(ours, polgrad.grpo_advantages(total, group, config), rtol=1e-9)
    ours = advantages(c.dr_grpo, rollouts(book)).advantage[..., 0].ravel()
    plain = polgrad.grpo_advantages(total, group, polgrad.GroupNormConfig(scale="none"))
    np.testing.assert_allclose(ours, plain, rtol=1e-9, atol=1e-12)
    ours = advantages(c.rloo, rollouts(book | {"logref": book["logq"]})).advantage[..., 0].ravel()
    np.testing.assert_allclose(ours, polgrad.rloo_advantages(total, group), rtol=1e-9, atol=1e-12)


def test_gae_and_whitening():
    """polgrad takes V of the next decision, and 0 after the last."""
    book = draw(4, holes=False)
    last = book["terminated"] | book["truncated"]
    shifted = np.concatenate([book["value"][..., 1:], np.zeros_like(book["value"][..., :1])], -1)
    book |= {"next_value": np.where(last, 0.0, shifted), "terminated": last, "truncated": None}
    mask = flat(book["mask"])
    A, returns = polgrad.gae(
        flat(book["reward"]), flat(book["value"]), config=polgrad.GAEConfig(0.99, 0.95), response_mask=mask
    )
    plain = advantages(c.trpo.set("credit.lam", 0.95), rollouts(book))
    np.testing.assert_allclose(flat(plain.credit * book["mask"]), returns, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(flat(plain.advantage * book["mask"]), A, rtol=1e-9, atol=1e-12)
    whitened = advantages(c.ppo.replace(scale=BatchStd(ddof=1, eps=0.0)), rollouts(book)).advantage
    np.testing.assert_allclose(flat(whitened * book["mask"]), polgrad.whiten(A, mask, eps=0.0), rtol=1e-9, atol=1e-9)
