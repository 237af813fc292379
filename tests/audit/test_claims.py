"""Every claim of the catalogue, measured; and the conditions under which a claim turns into another."""

import pytest

from apportion.audit import audit
from apportion.audit.report import measure_claim, with_beta
from apportion.core.catalogue import METHODS, a2c, dr_grpo, gpg, grpo, ppo, raft, reinforce, reinforce_togo, rloo, trpo
from apportion.core.method import Claim
from apportion.core.parts import GAE, KL, KeepAccepted, LeaveOneOut, RewardToGo, SequenceMean, SiblingMean
from apportion.toy.language import language

TOY = language("toy")


@pytest.mark.parametrize("name", METHODS)
def test_the_claim_of_every_method_holds(name):
    report = audit(METHODS[name])
    assert METHODS[name].claim.kind != "unstated"
    assert report.claim_holds is True, report.lines()


@pytest.mark.parametrize("group", [2, 5, 16])
@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo", "gpg", "raft", "reinforce_pp_baseline"])
def test_claims_hold_at_other_group_sizes(name, group):
    if (name, group) == ("raft", 2):
        pytest.skip("the better of two, with 0/1 rewards, pushes by exactly the gradient")
    method = with_beta(METHODS[name], 0.5) if METHODS[name].kl.beta else METHODS[name]
    assert measure_claim(method, TOY, group=group) is True


def claimed(method, kind):
    return method.replace(claim=Claim(kind))


OTHERS = {
    "a discount bends it, nothing else": claimed(a2c.replace(credit=GAE(1.0, 1.0)), "unbiased"),
    "lambda below 1 does not, given exact values": claimed(trpo.replace(credit=GAE(1.0, 0.5)), "unbiased"),
    "whitening only scales": claimed(ppo.replace(credit=GAE(1.0, 0.95)), "proportional"),
    "discounted returns-to-go are biased": claimed(reinforce_togo.replace(credit=RewardToGo(0.9)), "biased"),
    "leave-one-out repairs Dr. GRPO": claimed(dr_grpo.replace(baseline=LeaveOneOut()), "unbiased"),
    "and GPG": claimed(gpg.replace(baseline=SiblingMean(leave_one_out=True)), "unbiased"),
    "k2 of each decision leaves out what a decision does to later ones": claimed(
        reinforce.replace(kl=KL("loss", "k2", 0.5)), "biased"
    ),
    "k3 pulls by the forward KL": claimed(reinforce.replace(kl=KL("loss", "k3", 0.5)), "biased"),
    "the better of two, with 0/1 rewards, pushes by the gradient": claimed(raft.set("sampler.group", 2), "unbiased"),
    "acceptance, with 0/1 rewards, is straight too": claimed(
        raft.replace(sampler=raft.sampler.replace(group=1, keep=KeepAccepted(0.5))), "proportional"
    ),
}


@pytest.mark.parametrize("why", OTHERS)
def test_what_turns_one_claim_into_another(why):
    method = OTHERS[why]
    assert measure_claim(method, TOY, group=2 if method.sampler.group == 2 else 8) is True


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        (rloo, "biased"),
        (rloo, "proportional"),
        (grpo, "unbiased"),
        (grpo, "proportional"),
        (dr_grpo, "unbiased"),
        (a2c, "unbiased"),
        (ppo, "proportional"),
    ],
)
def test_a_wrong_claim_is_found_out(method, wrong):
    assert measure_claim(claimed(method, wrong), TOY) is False


def test_nothing_claimed_is_not_a_failure():
    assert measure_claim(dr_grpo.replace(aggregate=SequenceMean()), TOY) is None


@pytest.mark.parametrize(
    "name", ["reinforce", "rloo", "ppo_rlhf", "dr_grpo", "distill", "reinforce_pp_baseline", "remax"]
)
def test_unbiased_and_proportional_claims_hold_with_unequal_lengths(name):
    assert measure_claim(METHODS[name], language("toy-eos")) is True
