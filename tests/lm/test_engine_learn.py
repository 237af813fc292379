"""The learner: every method takes a step, what is reported is so, and a state goes on bitwise."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from apportion import methods
from apportion.core.errors import ApportionError, InvalidMethod
from apportion.core.parts import KL, NoKL
from apportion.core.parts.kl import AdaptiveBeta
from apportion.core.update import Adam
from apportion.lm.generate import Sampling
from apportion.lm.learn import Learner, rollouts
from apportion.lm.optimiser import join, split
from lm import plain

RUN = ("reinforce", "reinforce_togo", "reinforce_batch_mean", "reinforce_pp", "reinforce_pp_baseline", "rloo", "remax",
       "grpo", "grpo_process", "dr_grpo", "dapo", "gspo", "gspo_token", "cispo", "gpg", "raft", "distill")  # fmt: skip
REFUSED = {
    "a2c": "critic",
    "trpo": "critic",
    "ppo": "critic",
    "ppo_rlhf": "critic",
    "vineppo": "critic",
    "dpo": "pairs",
}


@pytest.fixture(scope="module")
def sampler():
    return plain.model()


@pytest.fixture(scope="module")
def completions(sampler):
    return plain.sample(replace(sampler, stop_ids=(2, 20, 33, 50, 61)), 4)


def fresh(sampler):
    return replace(sampler, model=copy.deepcopy(sampler.model))


def weights_of(made):
    return {name: p.detach().clone() for name, p in made.model.named_parameters()}


def test_the_catalogue_is_run_or_refused():
    from apportion.core.catalogue import METHODS

    assert set(RUN) | set(REFUSED) == set(METHODS)


@pytest.mark.parametrize("penalty", [False, True], ids=["as it is", "the other KL"])
@pytest.mark.parametrize("name", RUN)
def test_every_method_takes_a_step(sampler, completions, name, penalty):
    method = getattr(methods, name)
    if penalty and name != "distill":
        method = method.replace(kl=NoKL() if isinstance(method.kl, KL) else KL("loss", "k2", beta=0.1))
    made = fresh(sampler)
    fields = {}
    if name == "grpo_process":
        fields["step"] = [[np.arange(len(t))[::-1] % 2 == 0 for t in g] for g in completions.tokens]
    rolled = plain.book(completions, **fields)
    before = weights_of(made)
    learner = Learner(method, made, sampler if isinstance(method.kl, KL) else None)
    signals = learner.step(completions, rolled)
    assert signals.updates == method.sampler.epochs * min(method.sampler.minibatches, 12)
    assert all(not torch.equal(before[k], x) for k, x in weights_of(made).items())
    assert all(np.isfinite(list(signals.row().values())))
    assert signals.grad_norm > 0
    assert signals.mismatch < 1e-5


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_a_critic_or_pairs_is_refused(sampler, name):
    with pytest.raises(InvalidMethod, match=REFUSED[name]):
        Learner(getattr(methods, name), sampler, sampler)


def test_a_reference_that_is_missing_is_named(sampler):
    with pytest.raises(ApportionError, match="needs a reference"):
        Learner(methods.grpo, sampler)
    with pytest.raises(ApportionError, match="no adapter"):
        Learner(methods.dr_grpo, sampler).reference_logprobs(plain.sample(sampler, 1))


def test_minibatches_are_cut_anew_for_each_collection_and_epoch(sampler, completions):
    learner = Learner(methods.cispo.set("sampler.epochs", 2).set("sampler.minibatches", 4), fresh(sampler), seed=1)
    cuts = []
    learner._gradient = lambda account, cut, scale, fresh: cuts.append(list(cut))
    learner.optimiser.move = lambda rate: 0.0
    for _ in range(2):
        learner.step(completions, plain.book(completions))
    passes = [cuts[i : i + 4] for i in range(0, 16, 4)]
    everything = list(np.ndindex(3, 4))
    assert all(sorted(i for cut in one for i in cut) == everything for one in passes)
    assert len({str(one) for one in passes}) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_state_goes_on_bitwise(sampler, completions, dtype):
    """cases.md 70: moments, schedule, minibatch order, adaptive beta and float32 copies are all in the state."""
    kl = KL("reward", "k1", beta=0.1, adaptive=AdaptiveBeta(target=0.01, horizon=50))
    method = methods.cispo.replace(update=Adam(1e-3, anneal="linear", max_grad_norm=0.5), kl=kl)
    books = [plain.book(completions, seed) for seed in range(4)]

    def begin():
        made = fresh(sampler)
        made.model.to(dtype)
        return made, Learner(method, made, sampler)

    made, learner = begin()
    for i in range(4):
        learner.step(completions, books[i], done=i / 4)
        if i == 1:
            held = {k: x.clone() for k, x in learner.state_dict().items()}
            weights = weights_of(made)
    again, resumed = begin()
    again.model.load_state_dict(weights, strict=False)
    resumed.load_state_dict(held)
    for i in (2, 3):
        resumed.step(completions, books[i], done=i / 4)
    assert learner.beta == resumed.beta != 0.1
    for name, p in again.model.named_parameters():
        assert torch.equal(p, dict(made.model.named_parameters())[name])
    with pytest.raises(ApportionError, match=r"adam\.elsewhere"):
        resumed.load_state_dict(held | {"adam.elsewhere.exp_avg": torch.zeros(1)})


def test_adam_is_the_cases(sampler):
    """cases.md 70: the moments that matter are those before the cut, so the second step is not a first one."""
    made = fresh(sampler)
    learner = Learner(methods.dr_grpo.replace(update=Adam(0.1)), made)
    p = made.model.model.norm.weight
    with torch.no_grad():
        p.zero_()
    for sign in (1.0, -1.0):
        with learner.optimiser.gathering():
            (sign * p.sum()).backward()
            learner.optimiser.move(0.1)
        state = {k: x.clone() for k, x in learner.state_dict().items()}
        learner = Learner(learner.method, made)
        learner.load_state_dict(state)
    assert p[0].item() == pytest.approx(-0.0947368, abs=1e-6)


def test_small_steps_are_not_lost_in_sixteen_bits(sampler, completions):
    made = fresh(sampler)
    made.model.to(torch.bfloat16)
    learner = Learner(methods.dr_grpo.replace(update=Adam(1e-5)), made)
    names = [name for name, _ in learner.named]
    start = {name: learner.optimiser.weight(name).clone() for name in names}
    for _ in range(3):
        learner.step(completions, plain.book(completions))
    now = {name: learner.optimiser.weight(name) for name in names}
    assert all(float((now[name] - start[name]).abs().max()) > 1e-6 for name in names)
    assert all(torch.equal(p, now[name].bfloat16()) for name, p in learner.named)


def test_a_float32_weight_is_its_bfloat16_and_sixteen_more_bits():
    draw = torch.Generator().manual_seed(0)
    wide = torch.cat([torch.randn(10_000, generator=draw) * 10.0**k for k in range(-30, 31, 10)])
    ties = torch.tensor([1.00390625, 1.01171875, -1.00390625])  # half way between two bfloat16 numbers
    for x, most in ((wide, 10), (ties, 3)):
        weight, rest = torch.empty_like(x, dtype=torch.bfloat16), torch.empty_like(x, dtype=torch.int16)
        split(x, weight, rest)
        assert torch.equal(weight, x.bfloat16())
        apart = (join(weight, rest).view(torch.int32) - x.view(torch.int32)).abs()
        assert apart.max() <= 1
        assert apart.sum() <= most, "one in 65,536 lies half way"


def test_sixteen_bit_gradients_add_up_in_float32(sampler, completions):
    """Many batches: their sum in bfloat16 would lose what is small beside what has been added up."""
    made = fresh(sampler)
    made.model.to(torch.bfloat16)
    method = methods.dr_grpo.replace(update=Adam(1e-9))
    whole, cut = (Learner(method, made, tokens=tokens) for tokens in (10_000, 1))
    norms = [learner.step(completions, plain.book(completions)).grad_norm for learner in (whole, cut)]
    assert norms[1] == pytest.approx(norms[0], rel=0.02)
    assert all(p.grad is None for p in made.model.parameters())


def test_the_gradient_is_clipped_and_the_rate_annealed(sampler, completions):
    method = methods.dr_grpo.replace(update=Adam(1e-3, anneal="cosine", final_fraction=0.1, max_grad_norm=1e-3))
    learner = Learner(method, fresh(sampler))
    rates, grads = [], []
    learner.optimiser._step = lambda name, p, grad, rate: grads.append(grad.clone()) or rates.append(rate)
    signals = learner.step(completions, plain.book(completions), done=0.5)
    assert signals.learning_rate == pytest.approx(1e-3 * (0.1 + 0.9 * 0.5))
    assert set(rates) == {signals.learning_rate}
    assert float(torch.nn.utils.get_total_norm(grads)) == pytest.approx(1e-3, rel=1e-4)
    assert signals.grad_norm > 1e-3


def test_a_gradient_that_is_not_finite_stops_before_the_step(sampler, completions):
    made = fresh(sampler)
    learner = Learner(methods.dr_grpo, made)
    before = weights_of(made)
    made.model.model.norm.weight.register_hook(lambda grad: grad * torch.nan)
    with pytest.raises(ApportionError, match="gradient's norm is nan"):
        learner.step(completions, plain.book(completions))
    assert all(torch.equal(before[k], x) for k, x in weights_of(made).items())


def off(completions, by):
    """The same responses as if a sampler that is off by `by` nats a token had drawn them."""
    return replace(completions, logq=[[q - by for q in group] for group in completions.logq])


@pytest.mark.parametrize(("kind", "by", "factor"), [("token", 0.1, np.exp(0.1)), ("token", 5.0, 2.0),
                                                    ("sequence", 0.02, None), ("sequence", -0.01, None)])  # fmt: skip
def test_truncated_importance_sampling_weighs_trainer_against_sampler(sampler, completions, kind, by, factor):
    """cases.md 44: the sequence weight is the product over its tokens, not a mean."""
    elsewhere = off(completions, by)
    true, told = plain.book(completions), plain.book(elsewhere)
    same = np.exp(np.minimum(by * completions.lengths, np.log(2.0)))[..., None] if factor is None else factor
    wanted_book = replace(true, reward=true.reward)
    plainly = plain.engine_gradient(methods.reinforce, fresh(sampler), completions, wanted_book)
    scaled = plain.engine_gradient(
        methods.reinforce, fresh(sampler), completions, replace(true, reward=true.reward * same)
    )
    found = plain.engine_gradient(methods.reinforce, fresh(sampler), elsewhere, told, correction=kind)
    plain.assert_same(found, scaled, near=1e-4)
    with pytest.raises(AssertionError):
        plain.assert_same(found, plainly, near=1e-4)


def test_sampler_and_trainer_are_compared(sampler, completions):
    elsewhere = off(completions, 0.5)
    signals = Learner(methods.dr_grpo, fresh(sampler), old="trainer").step(elsewhere, plain.book(elsewhere))
    assert signals.mismatch == pytest.approx(0.5, abs=1e-4)
    assert signals.mismatch_ratio == pytest.approx(np.exp(0.5), abs=1e-3)
    assert signals.kl == 0.0
    many = methods.dr_grpo.replace(sampler=methods.dr_grpo.sampler.replace(epochs=2))
    elsewhere = off(completions, 1.0)
    again = Learner(many, fresh(sampler), correction="token").step(elsewhere, plain.book(elsewhere))
    assert again.mismatch == pytest.approx(1.0, abs=1e-4)
    assert again.capped == 1.0
    with pytest.raises(ApportionError, match="old must be 'trainer'"):
        Learner(methods.dr_grpo, sampler, old="sampler", correction="token")


def test_on_policy_nothing_is_clipped_and_the_ratio_is_one(sampler, completions):
    """cases.md 38."""
    method = methods.gspo.set("sampler.minibatches", 1)
    signals = Learner(method, fresh(sampler)).step(completions, plain.book(completions))
    assert signals.clip_fraction == 0.0
    assert signals.kl == pytest.approx(0.0, abs=1e-9)
    _, entropy = plain.logprobs(copy.deepcopy(sampler.model), completions)
    assert signals.entropy == pytest.approx(float(entropy.detach().sum()) / completions.lengths.sum(), rel=1e-4)
    assert signals.live == 1.0


def test_a_book_of_completions(completions):
    reward = np.arange(12.0).reshape(3, 4)
    rolled = rollouts(completions, reward, scored=reward != 5)
    assert rolled.horizon == 9
    assert (rolled.reward.sum(-1) == reward).all()
    assert (rolled.reward[rolled.last] == reward.ravel()).all()
    assert (rolled.mask.sum(-1) == completions.lengths).all()
    assert (rolled.terminated.any(-1) == completions.terminated).all()
    assert (rolled.truncated.any(-1) == completions.truncated).all()
    per_token = rollouts(completions, rolled.reward)
    assert (per_token.reward == rolled.reward).all()
    unscored = np.where(reward == 5, np.nan, reward)
    assert not rollouts(completions, unscored, scored=reward != 5).settled().reward[1, 1].any()


def test_a_trivial_task_is_learned(sampler):
    """Reward for the first token only: the policy learns to begin with "1"."""
    from apportion.lm import tiny
    from apportion.lm.generate import generate

    made = tiny.model(width=32)
    learner = Learner(methods.dr_grpo.replace(update=Adam(3e-2)), made)
    one = made.tokenizer("1")["input_ids"][0]
    rate = []
    for i in range(25):
        c = generate(made, plain.prompts(made), 16, sampling=Sampling(max_tokens=2), seeds=[(i, n) for n in range(3)])
        reward = np.array([[t[0] == one for t in group] for group in c.tokens]).astype(float)
        rate.append(reward.mean())
        learner.step(c, rollouts(c, reward))
    assert rate[0] < 0.2
    assert rate[-1] > 0.9
