"""The report's fields, words and refusals; the trace."""

import json

import numpy as np
import pytest

from apportion.audit import audit, trace
from apportion.audit.report import length_drift, policy_of
from apportion.core.catalogue import METHODS, dr_grpo, grpo, reinforce, rloo
from apportion.core.errors import ApportionError, InvalidMethod, UnknownName
from apportion.core.parts import KL
from apportion.toy import policy
from apportion.toy.language import language

KEYS = [
    "method",
    "task",
    "how",
    "cosine",
    "size_ratio",
    "bias_norm",
    "variance",
    "snr",
    "prompt_weight",
    "success_rate",
    "zero_signal",
    "length_drift",
    "target",
    "claim",
    "claim_holds",
]


@pytest.mark.parametrize("name", ["grpo", "rloo", "dpo", "dapo", "remax"])
def test_json_has_exactly_the_keys(name):
    found = json.loads(json.dumps(audit(METHODS[name]).to_json(), allow_nan=False))
    assert list(found) == KEYS
    assert found["method"] == name
    assert found["task"] == "toy"
    assert found["claim_holds"] is True
    assert all(len(found[k]) == 4 for k in ("prompt_weight", "success_rate", "zero_signal"))


def test_known_numbers():
    found = audit(grpo)
    assert found.success_rate == pytest.approx([0.017, 0.187, 0.707, 0.439], abs=5e-4)
    assert found.zero_signal == pytest.approx([0.869, 0.19, 0.063, 0.011], abs=5e-4)
    assert found.how == "exact (sum over success counts)"
    assert audit(dr_grpo).prompt_weight == pytest.approx([7 / 8] * 4)
    assert audit(dr_grpo).length_drift == pytest.approx({"correct": 0.0, "wrong": 0.0}, abs=1e-12)


def test_exact_methods_end_at_the_optimum():
    for name in ("rloo", "distill", "dpo", "ppo_rlhf", "reinforce_pp"):
        assert audit(METHODS[name]).target["kl_to_optimum"] < 1e-3, name
    assert audit(grpo).target["kl_to_optimum"] > 0.5


@pytest.mark.parametrize("part", ["how", "claim", "cosine"])
def test_the_text_says(part):
    assert part in audit(rloo).lines()
    assert "affine in the siblings' rewards" in audit(rloo).lines()


def test_beta_moves_the_objective_and_needs_a_penalty():
    assert audit(rloo, beta=0.5, policy="perturbed").size_ratio == pytest.approx(1)
    assert audit(rloo, beta=0.5, policy="perturbed").snr != audit(rloo, policy="perturbed").snr
    with pytest.raises(ApportionError, match="reinforce has no KL penalty"):
        audit(reinforce, beta=0.5)


def test_at_the_optimum_the_gradient_is_zero_and_ratios_do_not_exist():
    found = audit(reinforce.replace(kl=KL("reward", "k1", 0.5)), policy="optimum").to_json()
    assert found["bias_norm"] < 1e-12


def test_bad_input_is_named():
    with pytest.raises(UnknownName, match="toy-eos"):
        audit(grpo, task="toy-eso")
    with pytest.raises(UnknownName, match="perturbed"):
        audit(grpo, policy="pertubed")
    with pytest.raises(InvalidMethod, match="group size is 1"):
        audit(grpo, group=1)
    with pytest.raises(ApportionError, match="prompts 0 to 3"):
        trace(grpo, prompt=4)


def test_length_drift_is_the_finite_difference():
    lang = language("toy-eos")
    logits = policy_of("perturbed", lang)
    update = np.random.default_rng(0).normal(size=logits.shape)
    found, h = length_drift(lang, logits, update), 1e-5
    ahead, behind = (policy.mean_length(lang, logits + s * h * update) for s in (1, -1))
    for name in ("correct", "wrong"):
        slope = (getattr(ahead, name) - getattr(behind, name)).mean() / (2 * h)
        assert found[name] == pytest.approx(slope, rel=1e-6)


def test_a_length_divisor_shortens_right_answers_and_lengthens_wrong_ones():
    drift = audit(grpo, task="toy-eos").length_drift
    assert drift["correct"] < 0 < drift["wrong"]


def test_replicated_reports_give_intervals():
    found = audit(grpo.replace(kl=KL("reward", "k1", 0.5)), policy="perturbed")
    assert "replicated (n=" in found.how
    assert "cosine ±" in found.how
    assert found.claim_holds is None


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_trace(name):
    text = trace(METHODS[name], prompt=3, group=3)
    rows = [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]
    siblings = 2 if name == "dpo" else 3
    assert len(rows) == siblings * 4
    for column in ("reward", "credit", "baseline", "scale", "share", "ratio", "gate", "w"):
        assert f"{column} = " in text


def test_a_trace_multiplies_up():
    text = trace(METHODS["ppo_rlhf"], task="toy-eos", prompt=0, seed=4)
    rows = [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]
    for row in rows:
        advantage, share, ratio, gate, w = (float(x) for x in row[-5:])
        assert w == pytest.approx(advantage * share * ratio * gate, rel=2e-3)
