"""Building methods: what is refused and why, what is warned of, variants, names, claims; and the catalogue's cards."""

from __future__ import annotations

import dataclasses
import pickle
import warnings

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from apportion import methods
from apportion.core import catalogue as c
from apportion.core import parts
from apportion.core.errors import ApportionError, ApportionWarning, InvalidMethod, UnknownName
from apportion.core.method import _FAMILIES, W_PARTS, Claim, Method, Setting
from apportion.core.parts import (
    GAE,
    KL,
    AdaptiveBeta,
    BatchStd,
    Cap,
    Clip,
    Constant,
    Critic,
    DecisionMean,
    DecisionRatio,
    Greedy,
    GroupMean,
    GroupStd,
    KeepAccepted,
    KeepBest,
    KeepMixed,
    LeaveOneOut,
    NoBaseline,
    NoKL,
    NoRatio,
    NoScale,
    PairLogistic,
    Process,
    RewardToGo,
    SequenceDecisionRatio,
    SequenceRatio,
    SiblingMean,
    Total,
)
from apportion.core.sampler import Sampler
from apportion.core.update import Adam, NaturalGradient, ValueLoss

PAIR, EIGHT, CRITIC = Sampler(group=2), Sampler(group=8), Sampler(values="critic")

REFUSED = {
    "leave-one-out alone": ({"baseline": LeaveOneOut()}, "set sampler.group to 2 or more"),
    "a word for a number": ({"update": Adam(b1="x")}, "update.b1 is 'x'; it must be a finite number"),
    "a fraction of a decision": (
        {"sampler": Sampler(horizon=1.5)},
        "sampler.horizon is 1.5; it must be a whole number or None",
    ),
    "group mean alone": ({"baseline": GroupMean()}, "GroupMean compares siblings, but the group size is 1"),
    "sibling mean alone": ({"baseline": SiblingMean()}, "SiblingMean compares siblings"),
    "group spread alone": ({"scale": GroupStd()}, "GroupStd compares siblings"),
    "process alone": ({"credit": Process()}, "Process compares siblings"),
    "dynamic sampling alone": ({"sampler": Sampler(keep=KeepMixed())}, "KeepMixed compares siblings"),
    "best of one": ({"sampler": Sampler(keep=KeepBest())}, "KeepBest compares siblings"),
    "pairs of eight": ({"trust": PairLogistic(), "sampler": EIGHT}, r"sampler.group=2 \(not 8\)"),
    "pairs without preference": ({"trust": PairLogistic(), "sampler": PAIR}, "sampler.feedback='preference'"),
    "critic part, no critic": ({"baseline": Critic()}, "without a critic; set sampler.values to 'critic'"),
    "gae, no critic": ({"credit": GAE(), "baseline": Critic()}, "without a critic"),
    "gae, other baseline": (
        {"credit": GAE(), "sampler": CRITIC, "value_loss": ValueLoss()},
        r"its baseline must be Critic\(\)",
    ),
    "untrained critic": ({"baseline": Critic(), "sampler": CRITIC}, r"nothing trains; give value_loss=ValueLoss\(\)"),
    "loss of no critic": ({"value_loss": ValueLoss()}, "set sampler.values='critic' or value_loss=None"),
    "greedy, no rollout": ({"baseline": Greedy()}, "set sampler.greedy=True"),
    "clip of nothing": ({"trust": Clip()}, r"Clip bounds a ratio, but ratio is NoRatio\(\); use DecisionRatio\(\)"),
    "cap of nothing": ({"trust": Cap()}, "Cap bounds a ratio"),
    "stream with siblings": (
        {"sampler": Sampler(start="stream", group=4), "credit": RewardToGo()},
        r"no siblings \(sampler.group=1\)",
    ),
    "stream with totals": ({"sampler": Sampler(start="stream")}, "set sampler.start='reset' for whole episodes"),
    "nothing to learn from": ({"sampler": Sampler(feedback="none")}, "only a KL to a teacher can teach; give kl=KL"),
    "process centred twice": (
        {"credit": Process(), "baseline": GroupMean(), "sampler": EIGHT},
        r"use baseline=NoBaseline\(\)",
    ),
    "negative entropy": ({"entropy": -0.1}, "entropy is -0.1; it must be 0 or more"),
    "entropy of a wrong type": ({"entropy": "much"}, "entropy is 'much'"),
    "credit that is none": ({"credit": GroupMean()}, r"x.credit is GroupMean\(\); it must be a Credit part"),
    "kl that is none": ({"kl": None}, "x.kl is None; it must be a KL or NoKL part"),
    "class, not instance": ({"aggregate": DecisionMean}, "it must be a Aggregate part"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_parts_that_cannot_work_together_are_refused(case):
    """Each message names the method, says why, and gives the way out."""
    fields, message = REFUSED[case]
    with pytest.raises(InvalidMethod, match=message) as refused:
        Method("x", **fields)
    assert str(refused.value).startswith("x")
    assert "\n" not in str(refused.value)
    assert isinstance(refused.value, ApportionError)


VALUES = [
    (Sampler, "group", 0), (Sampler, "group", 2.5), (Sampler, "epochs", 0), (Sampler, "minibatches", 0),
    (Sampler, "value_rollouts", 0), (Sampler, "horizon", 0), (Sampler, "temperature", 0.0), (Sampler, "start", "here"),
    (Sampler, "proposer", "me"), (Sampler, "values", "some"), (Sampler, "feedback", "smile"),
    (Total, "gamma", 0.0), (Total, "gamma", 1.1), (RewardToGo, "gamma", -0.1), (GAE, "lam", 1.1), (GAE, "gamma", 0.0),
    (Process, "ddof", 2), (Process, "eps", -1e-9), (GroupStd, "ddof", 2), (BatchStd, "eps", -1e-9),
    (Clip, "low", 1.1), (Clip, "low", -0.1), (Clip, "high", -0.1), (Clip, "dual", 1.0), (Cap, "high", 0.0),
    (Cap, "low", 6.0), (PairLogistic, "beta", 0.0), (Constant, "length", 0.0), (KeepMixed, "max_batches", 0),
    (KeepAccepted, "beta", 0.0), (KL, "beta", -0.1), (KL, "estimator", "k4"), (KL, "place", "attic"),
    (KL, "corrected", True), (Adam, "learning_rate", 0.0), (Adam, "anneal", "up"), (Adam, "max_grad_norm", 0.0),
    (NaturalGradient, "delta", 0.0), (NaturalGradient, "iterations", 0), (NaturalGradient, "damping", -1.0),
    (NaturalGradient, "shrink", 1.0), (ValueLoss, "coefficient", 0.0), (ValueLoss, "clip", 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("part", "field", "value"), VALUES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_values_out_of_range_are_refused(part, field, value):
    with pytest.raises(InvalidMethod, match=rf"^{part.__name__}\.{field} is .*; it must be ") as refused:
        part(**{field: value})
    assert repr(value) in str(refused.value)


def test_a_filter_must_be_a_filter():
    with pytest.raises(InvalidMethod, match=r"Sampler.keep is 'all'; it must be a filter such as KeepAll\(\)"):
        Sampler(keep="all")


DOUBTFUL = {
    "discounted to go, whole baseline": (
        {"credit": RewardToGo(gamma=0.9), "baseline": GroupMean(), "sampler": EIGHT},
        r"use SiblingMean\(\) with RewardToGo",
    ),
    "discounted total, whole baseline": (
        {"credit": Total(gamma=0.9), "baseline": LeaveOneOut(), "sampler": EIGHT},
        r"Total\(gamma=1\) with this baseline",
    ),
    "reuse without a ratio": ({"sampler": Sampler(epochs=4)}, r"set ratio=DecisionRatio\(\) or epochs"),
    "spread of two": ({"scale": GroupStd(), "sampler": PAIR}, "only keeps the sign"),
    "a sequence of a thousand steps": (
        {"ratio": SequenceDecisionRatio(), "sampler": Sampler(horizon=1000)},
        r"SequenceDecisionRatio over 1000 decisions degenerates; consider ratio=DecisionRatio\(\)",
    ),
    "per-decision credit in one ratio": (
        {"ratio": SequenceRatio(), "credit": RewardToGo()},
        r"Use SequenceDecisionRatio\(\) or DecisionRatio\(\)",
    ),
    "a product counted once a decision": (
        {"ratio": SequenceRatio(geometric=False)},
        r"Sum counts a trajectory's one ratio once for each of its decisions.*use aggregate=SequenceMean\(\)",
    ),
    "k1 in the loss": ({"kl": KL("loss", "k1")}, "zero expected gradient; use place='reward', or estimator='k2'"),
}


@pytest.mark.parametrize("case", DOUBTFUL)
def test_doubtful_combinations_are_warned_of(case):
    fields, message = DOUBTFUL[case]
    with pytest.warns(ApportionWarning, match=message) as caught:
        Method("x", **fields)
    assert len(caught) == 1
    assert str(caught[0].message).startswith("x: ")


def test_the_horizon_of_a_task_is_checked_against_the_ratio():
    with pytest.warns(ApportionWarning, match="gspo: SequenceRatio over up to 1000 decisions degenerates"):
        c.gspo.check_horizon(1000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        c.gspo.check_horizon(100)
        c.ppo.check_horizon(1000)


# --- variants ---


def test_replace_names_the_change_and_claims_nothing():
    variant = c.dr_grpo.replace(baseline=LeaveOneOut())
    assert variant.name == "dr_grpo[baseline=LeaveOneOut()]"
    assert variant.claim == Claim("unstated")
    assert variant.replace(scale=BatchStd()).name.startswith("dr_grpo[baseline=LeaveOneOut(), scale=BatchStd(")
    assert c.dr_grpo.replace(baseline=LeaveOneOut(), claim=Claim("unbiased")).claim == Claim("unbiased")
    assert c.dr_grpo.replace(baseline=LeaveOneOut(), name="mine").name == "mine"


@pytest.mark.parametrize("method", c.METHODS.values(), ids=lambda m: m.name)
def test_replacing_by_the_same_changes_nothing(method):
    same = {name: getattr(method, name) for name in ("sampler", *W_PARTS, "update", "value_loss", "entropy")}
    assert method.replace(**same) == method


def test_size_and_reuse_keep_the_claim_and_what_is_sampled_does_not():
    assert c.grpo.set("sampler.group", 4).claim == c.grpo.claim
    assert c.grpo.set("sampler.group", 4).name == "grpo[group=4]"
    assert c.ppo.set("sampler.epochs", 2).claim == c.ppo.claim
    assert c.rloo.set("update.learning_rate", 1e-3) == c.rloo.replace(update=Adam(1e-3))
    assert c.rloo.set("update.learning_rate", 1e-3).claim == c.rloo.claim
    assert c.rloo.set("sampler.keep", KeepMixed()).claim == Claim()
    assert c.rloo.set("sampler.temperature", 0.5).claim == Claim()
    assert c.rloo.set("kl.beta", 0.5).claim == Claim()


def test_set_reaches_nested_fields():
    assert c.dapo.set("sampler.keep.max_batches", 3).sampler.keep == KeepMixed(3)
    assert c.ppo.set("trust.dual", 3.0).trust == Clip(0.2, 0.2, 3.0)
    assert c.a2c.set("entropy", 0.0).entropy == 0.0
    assert c.ppo_rlhf.set("kl.adaptive", AdaptiveBeta()).kl.adaptive.target == 6.0
    assert c.ppo_rlhf.set("kl.adaptive", AdaptiveBeta()).set("kl.adaptive.target", 1.0).kl.adaptive.target == 1.0


@pytest.mark.parametrize(
    ("path", "value", "error", "message"),
    [
        ("trsut.low", 0.1, UnknownName, "unknown part of ppo 'trsut'; did you mean 'trust'?"),
        ("trust.lwo", 0.1, UnknownName, r"unknown field of trust \(Clip\) 'lwo'; did you mean 'low'? Known: dual"),
        ("sampler.keep.beta", 1, UnknownName, r"unknown field of sampler.keep \(KeepAll\) 'beta'"),
        ("trust.low.more", 1, InvalidMethod, "trust.low is 0.2 and has no field 'more'; set trust.low itself"),
        ("trust.low", "wide", InvalidMethod, "trust.low is 'wide', of the wrong type; it was 0.2"),
        ("trust.low", 2.0, InvalidMethod, r"Clip.low is 2.0; it must be in \[0, 1\]"),
        ("sampler.group", "4", InvalidMethod, "Sampler.group is '4'; it must be a whole number"),
        ("entropy", "x", InvalidMethod, "entropy is 'x'"),
        ("credit", "total", InvalidMethod, "ppo.*credit is 'total'; it must be a Credit part"),
    ],
)
def test_set_refuses_in_one_line(path, value, error, message):
    with pytest.raises(error, match=message.replace("?", r"\?")) as refused:
        c.ppo.set(path, value)
    assert "\n" not in str(refused.value)


def test_replace_refuses_an_unknown_part():
    with pytest.raises(UnknownName, match=r"unknown part of grpo 'basline'; did you mean 'baseline'\?"):
        c.grpo.replace(basline=LeaveOneOut())


# --- names ---


@pytest.mark.parametrize("name", c.METHODS)
def test_a_method_is_found_by_its_name(name):
    assert c.method(name) is c.METHODS[name] is getattr(methods, name)
    with pytest.raises(UnknownName, match=rf"did you mean '{name}'\? Known: a2c, cispo, "):
        c.method(name.upper())


@given(
    name=st.sampled_from(sorted(c.METHODS)),
    at=st.integers(0, 20),
    letter=st.sampled_from("abcdefghijklmnopqrstuvwxyz_-"),
    how=st.sampled_from(["insert", "replace", "delete", "swap"]),
)
def test_one_slip_of_the_finger_still_suggests_a_name(name, at, letter, how):
    at = at % len(name)
    slip = {
        "insert": name[:at] + letter + name[at:],
        "replace": name[:at] + letter + name[at + 1 :],
        "delete": name[:at] + name[at + 1 :],
        "swap": name[:at] + name[at : at + 2][::-1] + name[at + 2 :],
    }[how]
    assume(slip not in c.METHODS)
    with pytest.raises(UnknownName) as refused:
        c.method(slip)
    message = str(refused.value)
    assert message.startswith(f"unknown method '{slip}'")
    assert "Known: a2c, " in message
    if len(name) > 5:
        suggested = message.split("did you mean '")[1].split("'")[0]
        assert suggested == name or suggested.startswith(name[:3]) or name.startswith(suggested[:3])


def test_nothing_near_suggests_nothing():
    assert str(UnknownName("task", "zzz", ["toy"])) == "unknown task 'zzz'. Known: toy"


# --- the catalogue ---

EXPECTED = {
    "reinforce", "reinforce_togo", "reinforce_batch_mean", "reinforce_pp", "reinforce_pp_baseline", "a2c",
    "trpo", "ppo", "ppo_rlhf", "rloo", "remax", "grpo", "grpo_process", "dr_grpo", "dapo", "gspo", "gspo_token",
    "cispo", "vineppo", "gpg", "raft", "dpo", "distill",
}  # fmt: skip
SYMBOLS = {
    "G": "sampler.group", "k": "sampler.group", "T": "sampler.horizon", "t_max": "sampler.horizon",
    "epochs": "sampler.epochs", "minibatches": "sampler.minibatches", "learning rate": "update.learning_rate",
    "max_grad_norm": "update.max_grad_norm", "ddof": "scale.ddof", "cap": "trust.high", "lambda": "credit.lam",
    "gamma": "credit.gamma", "delta": "update.delta", "entropy": "entropy", "gamma, lambda": "credit.gamma credit.lam",
    "eps": "trust.low", "eps low, high": "trust.low trust.high", "epochs, eps, lambda":
    "sampler.epochs trust.low credit.lam", "eps, gamma": "trust.low credit.gamma",
}  # fmt: skip


def at(method, path):
    for name in path.split("."):
        method = getattr(method, name)
    return method


def test_the_family_is_complete():
    assert set(c.METHODS) == EXPECTED


@pytest.mark.parametrize("method", c.METHODS.values(), ids=lambda m: m.name)
def test_every_card_is_filled_in(method):
    for field in ("title", "target", "lineage", "differs"):
        assert getattr(method, field).strip(), field
    assert method.claim.kind != "unstated"
    assert method.settings
    for setting in method.settings:
        assert isinstance(setting, Setting)
        assert setting.symbol
        assert setting.value is not None
        assert setting.source == "unstated" or any(ch.isdigit() for ch in setting.source), setting
    for part in (*(getattr(method, name) for name in W_PARTS), method.sampler.keep, method.update):
        assert part.equation, part
    assert str(method.claim).startswith(method.claim.kind)


@pytest.mark.parametrize("method", c.METHODS.values(), ids=lambda m: m.name)
def test_the_card_says_the_values_that_run(method):
    for setting in method.settings:
        paths = SYMBOLS.get(setting.symbol)
        if setting.symbol == "beta":
            paths = "trust.beta" if method is c.dpo else "kl.beta"
        if paths:
            values = [at(method, path) for path in paths.split()]
            assert setting.value == (values[0] if len(values) == 1 else tuple(values)), setting


@pytest.mark.parametrize("method", c.METHODS.values(), ids=lambda m: m.name)
def test_methods_are_values(method):
    """Frozen, comparable, hashable, picklable, and printed as the expression that builds them."""
    assert pickle.loads(pickle.dumps(method)) == method
    assert hash(method) == hash(dataclasses.replace(method))
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.name = "other"
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.sampler.group = 3
    scope = {n: getattr(parts, n) for n in parts.__all__}
    scope |= {x.__name__: x for x in (Sampler, Adam, NaturalGradient, ValueLoss, Claim, Setting, Method)}
    assert eval(repr(method), scope) == method


@pytest.mark.parametrize("method", c.METHODS.values(), ids=lambda m: m.name)
def test_scope_is_the_widest_of_its_parts(method):
    scopes = {getattr(method, n).scope for n in W_PARTS} | {method.sampler.keep.scope}
    assert method.scope == max(scopes, key=("trajectory", "group", "batch").index)


def test_scopes():
    assert c.reinforce.scope == "trajectory"
    assert {c.rloo.scope, c.grpo.scope, c.dr_grpo.scope, c.dpo.scope} == {"group"}
    assert {c.dapo.scope, c.ppo.scope, c.reinforce_pp.scope} == {"batch"}


def every_part():
    kinds = [getattr(parts, n) for n in parts.__all__]
    bases = {k for k in kinds if any(k in kind.__mro__[1:] for kind in kinds)}
    return [k for k in kinds if k not in bases and k is not AdaptiveBeta]


@pytest.mark.parametrize("kind", every_part(), ids=lambda k: k.__name__)
def test_every_part_says_its_equation_and_source(kind):
    part = kind()
    assert part.equation
    trivial = (NoBaseline, NoScale, NoRatio, NoKL, parts.NoTrust, parts.KeepAll)
    assert part.source != "unstated" or isinstance(part, trivial)
    assert kind.__doc__
    assert part.scope in ("trajectory", "group", "batch")
    assert part.replace() == part


def test_every_family_of_parts_is_checked():
    assert set(W_PARTS) < set(_FAMILIES)


@given(beta=st.floats(0.01, 1), kl=st.floats(0, 100), n=st.integers(1, 1000))
def test_adaptive_beta_moves_towards_its_target(beta, kl, n):
    """Ziegler et al. 2019: a proportional controller with a bounded step."""
    controller = AdaptiveBeta(target=6.0, horizon=10_000.0)
    new = controller(beta, kl, n)
    assert (new - beta) * (kl - 6.0) >= 0
    assert abs(new / beta - 1) <= 0.2 * n / 10_000 + 1e-12


def test_ratio_parts_say_whether_they_need_whole_trajectories():
    assert [r().per_sequence for r in (NoRatio, DecisionRatio, SequenceRatio, SequenceDecisionRatio)] == [0, 0, 1, 1]
