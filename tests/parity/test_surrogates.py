"""Every published surrogate, written down here as its paper has it: its gradient is that of sum(sg[w] · log pi)."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.core import catalogue as c
from apportion.core.method import Method
from apportion.core.parts import KL, Clip, NoKL, SequenceMean, SequenceRatio
from apportion.core.weigh import advantages, weights
from core.books import for_method, rollouts

torch = pytest.importorskip("torch")


# --- what the papers write, one book [N G T] at a time; d.m is the mask as 0 and 1 ---


def total(d, reward=None):
    return (d.reward if reward is None else reward).sum(-1, keepdim=True)


def group_advantage(d, std=True):
    R = total(d)
    A = R - R.mean(1, keepdim=True)
    return A / (R.std(1, correction=0, keepdim=True) + 1e-6) if std else A


def leave_one_out(R):
    G = R.shape[1]
    return R - (R.sum(1, keepdim=True) - R) / (G - 1)


def backwards(x, d, factor):
    """y_t = x_t + factor · y_{t+1} over the decisions of each trajectory; tool output passes on undiscounted."""
    out, y, ones = torch.zeros_like(x), torch.zeros_like(x[..., 0]), torch.ones_like(x[..., 0])
    for t in reversed(range(x.shape[-1])):
        decay = torch.where(d.mask[..., t], factor * ones, ones)
        stop = d.terminated[..., t] | d.truncated[..., t]
        y = x[..., t] + torch.where(stop, 0.0, decay * y)
        out[..., t] = y
    return out


def gae(d, gamma, lam, reward=None):
    reward = d.reward if reward is None else reward
    after = torch.where(d.terminated, 0.0, d.next_value)
    return backwards(reward + d.m * (gamma * after - d.value), d, gamma * lam)


def whiten(A, d):
    x = A[d.mask]
    return (A - x.mean()) / (x.std(correction=1) + 1e-8)


def k1_in_reward(d, beta):
    return d.reward - beta * torch.where(d.mask, d.logq - d.logref, 0.0)


def ppo_clip(rho, A, low=0.2, high=0.2, dual=None):
    objective = torch.minimum(rho * A, rho.clamp(1 - low, 1 + high) * A)
    return objective if dual is None else torch.where(A < 0, torch.maximum(objective, dual * A), objective)


def rho(d):
    return torch.exp(torch.where(d.mask, d.logp - d.logq, 0.0))


def rho_sequence(d, geometric=True):
    s = torch.where(d.mask, d.logp - d.logq, 0.0).sum(-1, keepdim=True)
    return torch.exp(s / d.m.sum(-1, keepdim=True) if geometric else s)


def k(name, d):
    delta = torch.where(d.mask, d.logref - d.logp, 0.0)
    return {"k1": -delta, "k2": delta**2 / 2, "k3": torch.exp(delta) - 1 - delta}[name]


def seq_mean_token_mean(x, d):
    return ((d.m * x).sum(-1) / d.m.sum(-1)).mean()


def token_mean(x, d):
    return (d.m * x).sum() / d.m.sum()


def token_sum(x, d):
    return (d.m * x).sum(-1).mean()


def constant(x, d):
    return (d.m * x).sum(-1).mean() / d.horizon


def dapo(d):
    R = total(d)[..., 0]
    mixed = (R.amax(1) > R.amin(1)).nonzero()[:, 0]  # dynamic sampling: groups without a spread never enter
    if not len(mixed):
        return (0 * d.logp).sum()
    d = SimpleNamespace(**{n: x[mixed] if torch.is_tensor(x) and x.ndim == 3 else x for n, x in vars(d).items()})
    return -token_mean(ppo_clip(rho(d), group_advantage(d), 0.2, 0.28), d)


def grpo(d):
    return -seq_mean_token_mean(ppo_clip(rho(d), group_advantage(d)) - 0.04 * k("k3", d), d)


def grpo_process(d):
    A = torch.zeros_like(d.reward)
    for n in range(A.shape[0]):
        r = d.reward[n][d.step[n]]
        A[n][d.step[n]] = (r - r.mean()) / (r.std(correction=0) + 1e-6)
    A = A.flip(-1).cumsum(-1).flip(-1)
    return -seq_mean_token_mean(ppo_clip(rho(d), A) - 0.04 * k("k3", d), d)


def gspo(d):
    return -ppo_clip(rho_sequence(d), group_advantage(d), 3e-4, 4e-4).mean()


def gspo_token(d):
    s = rho_sequence(d).detach() * torch.exp(d.logp - d.logp.detach())
    return -seq_mean_token_mean(ppo_clip(s, group_advantage(d), 3e-4, 4e-4), d)


def cispo(d):
    return -token_mean(rho(d).clamp(max=5.0).detach() * group_advantage(d) * d.logp, d)


def rloo(d):
    R = total(d, k1_in_reward(d, 0.03))
    return -(leave_one_out(R)[..., 0] * (d.m * d.logp).sum(-1)).mean()


def rloo_trl(d):
    R = total(d, k1_in_reward(d, 0.03))
    return -ppo_clip(rho_sequence(d, geometric=False), leave_one_out(R)).mean()


def reinforce_pp(d, group=False):
    shaped = k1_in_reward(d, 0.01)
    A = backwards(shaped, d, 1.0)
    if group:
        A = A - total(d, shaped).mean(1, keepdim=True)
    return -token_mean(ppo_clip(rho(d), whiten(A, d)), d)


def dpo(d, beta=0.1):
    h = torch.where(d.mask, d.logp - d.logref, 0.0).sum(-1)
    chosen = total(d)[..., 0] > 0
    return -torch.nn.functional.logsigmoid(beta * (h[chosen] - h[~chosen])).mean()


def gpg(d):
    C = backwards(d.reward, d, 1.0)
    A = C - (d.m * C).sum(1, keepdim=True) / d.m.sum(1, keepdim=True).clamp(min=1)
    return -token_mean(ppo_clip(rho(d), A), d)


def raft(d):
    best = total(d)[..., 0].argmax(1)
    n = torch.arange(len(best))
    return -(d.m * d.logp).sum(-1)[n, best].mean()


def batch_mean(d):
    C = backwards(d.reward, d, 1.0)
    return -token_sum((C - C[d.mask].mean()) * d.logp, d)


def a2c(d):
    return -token_mean(gae(d, 0.99, 1.0) * d.logp, d)


def ppo(d, lam=0.95, gamma=0.99, reward=None, dual=None):
    return -token_mean(ppo_clip(rho(d), whiten(gae(d, gamma, lam, reward), d), dual=dual), d)


PUBLISHED = {
    c.reinforce: lambda d: -token_sum(total(d) * d.logp, d),
    c.reinforce_togo: lambda d: -token_sum(backwards(d.reward, d, 1.0) * d.logp, d),
    c.reinforce_batch_mean: batch_mean,
    c.reinforce_pp: reinforce_pp,
    c.reinforce_pp_baseline: lambda d: reinforce_pp(d, group=True),
    c.a2c: a2c,
    c.trpo: lambda d: -token_mean(rho(d) * gae(d, 0.99, 0.97), d),
    c.ppo: ppo,
    c.ppo_rlhf: lambda d: ppo(d, gamma=1.0, reward=k1_in_reward(d, 0.05)),
    c.rloo: rloo,
    c.remax: lambda d: -token_sum((backwards(d.reward, d, 1.0) - d.greedy_return[:, None, None]) * d.logp, d),
    c.grpo: grpo,
    c.grpo_process: grpo_process,
    c.dr_grpo: lambda d: -constant(ppo_clip(rho(d), group_advantage(d, std=False)), d),
    c.dapo: dapo,
    c.gspo: gspo,
    c.gspo_token: gspo_token,
    c.cispo: cispo,
    c.vineppo: lambda d: ppo(d, gamma=1.0, lam=0.0),
    c.gpg: gpg,
    c.raft: raft,
    c.dpo: dpo,
    c.distill: lambda d: -token_sum(backwards(torch.where(d.mask, d.logref - d.logq, 0.0), d, 1.0) * d.logp, d),
}
TRL_RLOO = c.rloo.replace(ratio=SequenceRatio(geometric=False), trust=Clip(0.2, 0.2), aggregate=SequenceMean())
VARIANTS = {
    c.ppo.replace(trust=Clip(0.2, 0.2, dual=1.5)): lambda d: ppo(d, dual=1.5),
    TRL_RLOO: rloo_trl,
}
ALL = PUBLISHED | VARIANTS


def tensors(book, logp):
    d = {n: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for n, x in book.items()}
    return SimpleNamespace(**(d | {"m": d["mask"].double(), "logp": logp}))


def both(method: Method, surrogate, book):
    """(d surrogate / d log pi, -w, gate) on the decisions of the book."""
    logp = torch.from_numpy(book["logp"]).requires_grad_()
    surrogate(tensors(book, logp)).backward()
    ledger = weights(method, advantages(method, rollouts(book).check()), book["logp"])
    return logp.grad.numpy(), -ledger.w, ledger.gate[book["mask"]]


def spread_of(method: Method) -> float:
    """Of log pi - log q, so that the ratios fall on both sides of the method's band."""
    return 1.5 * min(getattr(method.trust, "high", 0.4), 0.6)


def test_every_catalogue_entry_has_its_surrogate_written_down():
    assert {m.name for m in PUBLISHED} == set(c.METHODS)


@pytest.mark.parametrize("method", ALL, ids=lambda m: m.name)
@given(
    seed=st.integers(0, 2**32 - 1),
    N=st.integers(1, 4),
    G=st.integers(2, 5),
    T=st.integers(1, 8),
    far=st.sampled_from([0.05, 1.0, 3.0]),
)
def test_weights_are_the_gradient_of_the_published_surrogate(method, seed, N, G, T, far):
    book = for_method(method, seed, N=N, G=G, T=max(T, 2), spread=far * spread_of(method))
    published, ours, _ = both(method, ALL[method], book)
    np.testing.assert_allclose(ours, published, rtol=1e-9, atol=1e-9 * max(1.0, np.abs(published).max()))


@pytest.mark.parametrize("method", [m for m in ALL if isinstance(m.trust, Clip)], ids=lambda m: m.name)
def test_the_books_reach_both_sides_of_the_clip(method):
    gates = [both(method, ALL[method], for_method(method, seed, spread=spread_of(method)))[2] for seed in range(10)]
    silent = 1 - np.concatenate(gates).mean()
    assert 0.02 < silent < 0.9


def test_dual_clip_silences_what_the_plain_clip_lets_push():
    dual = next(m for m in VARIANTS if getattr(m.trust, "dual", None))
    pairs = [[both(m, ALL[m], for_method(m, s, spread=0.6))[2] for m in (c.ppo, dual)] for s in range(10)]
    assert any((plain > bounded).any() for plain, bounded in pairs)


@pytest.mark.parametrize("corrected", [False, True], ids=["plain", "corrected"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("aggregate", ["grpo", "dr_grpo", "dapo", "reinforce"])
@pytest.mark.filterwarnings("ignore::apportion.core.errors.ApportionWarning")
def test_kl_in_the_loss(estimator, corrected, aggregate):
    """Corrected: rho · k with rho differentiated, whose gradient is that of the reverse KL."""
    base = c.METHODS[aggregate].replace(kl=NoKL())
    method = base.replace(kl=KL("loss", estimator, beta=0.3, corrected=corrected))
    mean = {"grpo": seq_mean_token_mean, "dr_grpo": constant, "dapo": token_mean, "reinforce": token_sum}[aggregate]

    def penalty(d):
        return 0.3 * mean((rho(d) if corrected else 1.0) * k(estimator, d), d)

    for seed in range(5):
        book = for_method(c.grpo, seed)
        gradient, with_kl, _ = both(method, penalty, book)
        without = -weights(base, advantages(base, rollouts(book)), book["logp"]).w
        np.testing.assert_allclose(with_kl - without, gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", ALL, ids=lambda m: m.name)
def test_through_a_softmax(method):
    """The same through parameters: logits of a tabular policy, one row a state."""
    book = for_method(method, 3, N=2, spread=0.0)
    generator = torch.Generator().manual_seed(0)
    shape, V = book["mask"].shape, 5
    logits = (0.5 * torch.randn(7, V, generator=generator, dtype=torch.float64)).requires_grad_()
    state = torch.randint(0, 7, shape, generator=generator)
    action = torch.randint(0, V, shape, generator=generator)[..., None]

    def log_pi():
        return torch.log_softmax(logits, -1)[state].gather(-1, action)[..., 0]

    noise = spread_of(method) * torch.randn(shape, generator=generator, dtype=torch.float64)
    book["logq"] = (log_pi() - noise).detach().numpy()
    book["logp"] = log_pi().detach().numpy()
    ALL[method](tensors(book, log_pi())).backward()
    published, logits.grad = logits.grad, None
    w = torch.from_numpy(weights(method, advantages(method, rollouts(book)), book["logp"]).w)
    (-(w * log_pi()).sum()).backward()
    torch.testing.assert_close(logits.grad, published, rtol=1e-9, atol=1e-12)
