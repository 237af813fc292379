"""Rewards: what is called with what, what a failure costs, and that nothing can stop the run."""

import math
import os
import random
import signal
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.core.errors import ApportionError
from apportion.lm.rewards import RULES, Reward, overlong, rewards
from apportion.lm.scoring import Item, score

ITEMS = [Item("p", text, {"answer": "7", "level": i}) for i, text in enumerate(["7", "3+4=7", "8", ""])]
EITHER = pytest.mark.parametrize("limit", [None, 5.0], ids=["here", "apart"])


def length(completion):
    return len(completion)


@EITHER
def test_one_at_a_time_and_in_batches(limit):
    def single(prompt, completion, level):
        return len(prompt + completion) + level

    def batch(completions, **columns):
        assert columns["prompts"] == ["p"] * 4
        assert columns["answer"] == ["7"] * 4
        return [len(c) for c in completions]

    found = score([Reward(single), Reward(batch, weight=0.5)], ITEMS, limit)
    assert found.value.tolist() == [[2, 1], [7, 5], [4, 1], [4, 0]]
    assert found.total.tolist() == [2.5, 9.5, 4.5, 4.0]
    assert found.scored.all()
    assert not found.failures


BAD = {
    "raised": lambda c: 1 / 0,
    "None": lambda c: None,
    "not finite": lambda c: math.nan,
    "no number": lambda c: "seven",
}


@EITHER
@pytest.mark.parametrize("kind", BAD)
def test_a_failure_unscores_that_sibling_only(kind, limit):
    def reward(completion):
        return BAD[kind](completion) if completion == "8" else 1.0

    found = score([Reward(reward), Reward(length)], ITEMS, limit)
    assert found.scored.tolist() == [True, True, False, True]
    assert found.total.tolist() == [2.0, 6.0, 0.0, 1.0]
    assert found.failures == {kind: 1}
    assert found.example.startswith("reward reward: ")


@EITHER
def test_a_batch_of_the_wrong_length_unscores_the_batch(limit):
    found = score([Reward(lambda completions: [1.0], name="short")], ITEMS, limit)
    assert not found.scored.any()
    assert found.failures == {"wrong length": 4}
    assert found.example == "reward short: returned 1 values for 4 completions"


def test_what_hangs_or_crashes_is_ended_and_the_rest_is_scored():
    def reward(completion):
        if completion == "7":
            time.sleep(60)
        if completion == "8":
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0

    began = time.monotonic()
    found = score([Reward(reward), Reward(length)], ITEMS, 0.3)
    assert time.monotonic() - began < 10
    assert found.scored.tolist() == [False, True, False, True]
    assert found.failures == {"too slow": 1, "died": 1}
    assert found.value[:, 1].tolist() == [1, 5, 1, 0]


def test_a_loop_that_never_lets_go_of_the_interpreter_is_ended():
    import re

    def reward(completion):
        return float(bool(re.fullmatch("(a+)+b", "a" * 40)))

    assert score([Reward(reward)], ITEMS[:1], 0.3).failures == {"too slow": 1}


def test_what_a_reward_draws_leaves_the_run_alone():
    state = random.getstate()
    score([Reward(lambda completion: random.random(), name="noise")], ITEMS, 5.0)
    assert random.getstate() == state


@EITHER
def test_step_rewards_add_up(limit):
    found = score(
        [Reward(lambda completion: [(1, 0.5), (len(completion), 1)], weight=2.0, name="steps")], ITEMS[:2], limit
    )
    assert found.value.tolist() == [[1.5], [1.5]]
    assert found.steps == [[(1, 1.0), (1, 2.0)], [(1, 1.0), (5, 2.0)]]
    assert found.total.tolist() == [3.0, 3.0]


def refuse_missing(completion, solution):
    return 0.0


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (lambda: 0.0, r"has the parameters \(\); it must take `completion`"),
        (lambda text: 0.0, "must take `completion`"),
        (lambda completion, completions: 0.0, "must take `completion`"),
        (lambda completion, /: 0.0, "by position only"),
        (lambda *completion: 0.0, "by position only"),
        (3, "reward 3 is no function"),
        ([], "there is no reward"),
        ([length, length], "two rewards are called length"),
        ("acuracy", "did you mean 'accuracy'"),
        ("accuracy=much", "the weight 'much' is no number"),
        ("nofile.py:reward", "there is no Python file nofile.py"),
        (Reward, "hides its parameters|must take"),
    ],
)
def test_what_is_no_reward_is_refused(source, says):
    with pytest.raises(ApportionError, match=says):
        rewards(source)


def test_a_reward_that_needs_what_the_data_lacks_is_refused():
    with pytest.raises(ApportionError, match=r"reward refuse_missing needs `solution`, which the data lacks; .*answer"):
        Reward(refuse_missing).check(["answer"])
    Reward(refuse_missing).check(["solution"])
    with pytest.raises(ApportionError, match="needs `verifier`"):
        rewards("task")[0].check(["answer"])


def test_a_reward_from_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def half(completion):\n    return 0.5\n")
    (found,) = rewards(f"{path}:half=2")
    assert (found.name, found.weight) == ("half", 2.0)
    assert score([found], ITEMS).total.tolist() == [1.0] * 4
    with pytest.raises(ApportionError, match="did you mean 'half'"):
        rewards(f"{path}:haf")
    path.write_text("import nothing_like_this\n")
    with pytest.raises(ApportionError, match="cannot be imported: ModuleNotFoundError"):
        rewards(f"{path}:half")


@pytest.mark.parametrize(
    ("rule", "completion", "answer", "right"),
    [
        ("last_number", "First 3, then 1,234.", "1234", 1.0),
        ("last_number", "3 - 5 = −2", "-2", 1.0),
        ("last_number", "7 and 8", "7", 0.0),
        ("last_number", "", "7", 0.0),
        ("accuracy", r"so \boxed{7}", "7", 1.0),
        ("accuracy", "<answer>8</answer> <answer> Paris </answer>", "paris", 1.0),
        ("accuracy", "7", "7", 0.0),
        ("math_verify", r"it is $\frac{1}{2}$", "0.5", 1.0),
        ("math_verify", r"\boxed{3}", "4", 0.0),
    ],
)
def test_the_rules(rule, completion, answer, right):
    assert RULES[rule](completion, answer) == right


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("\n<think>a\nb</think>\n\n<answer>c</answer>\n", 1.0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0.0),
        ("<think>a<answer>x</answer></think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> and so", 0.0),
    ],
)
def test_the_format_rule(text, right):
    assert RULES["format"](text) == right


def test_overlong_punishment_is_the_papers():
    """Yu et al. 2025, eq. 13, case by case."""
    limit, cache = 20, 8

    def paper(y):
        if y <= limit - cache:
            return 0.0
        return ((limit - cache) - y) / cache if y <= limit else -1.0

    y = np.arange(0, 30)
    assert overlong(y, limit, cache).tolist() == [paper(n) for n in y]


OUTCOMES = {"fine": 1.5, "none": None, "nan": math.nan, "raise": None, "text": "x", "huge": 10**400}


@settings(max_examples=30)
@given(st.lists(st.sampled_from(sorted(OUTCOMES)), min_size=1, max_size=6), st.booleans())
def test_whatever_fails_only_that_completion_is_unscored(kinds, apart):
    def reward(completion):
        kind = kinds[int(completion)]
        return 1 / 0 if kind == "raise" else OUTCOMES[kind]

    items = [Item("p", str(k), {}) for k in range(len(kinds))]
    found = score([Reward(reward)], items, 5.0 if apart else None)
    assert found.scored.tolist() == [kind == "fine" for kind in kinds]
    assert found.total.tolist() == [1.5 if kind == "fine" else 0.0 for kind in kinds]
    assert sum(found.failures.values()) == sum(kind != "fine" for kind in kinds)
