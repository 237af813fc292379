"""A run's folder: killed at any moment it is gone on with to bitwise the same files; what does not fit is refused."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from apportion import lm, methods
from apportion.cli import main
from apportion.core.errors import ApportionError
from apportion.lm import checkpoint, run, tiny
from apportion.runs import display
from apportion.runs.files import CONFIG, METRICS, SUMMARY, TIMING

SAME = (METRICS, run.SAMPLES, "model/model.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, data and a reward on the disk, as a person has them."""
    place = tmp_path_factory.mktemp("given")
    tiny.write(place / "model", width=16, layers=1, heads=2, key_heads=1, context=64)
    rows = [{"prompt": str(a), "answer": str(a)} for a in range(10)]
    (place / "digits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "unseen.jsonl").write_text("".join(json.dumps({"prompt": x}) + "\n" for x in "abcdef"))
    (place / "mine.py").write_text("def letters(completion):\n    return sum(c.isalpha() for c in completion) / 4\n")
    return place


def settings(folder):
    return {
        "model": str(folder / "model"), "data": str(folder / "digits.jsonl"), "reward": f"{folder}/mine.py:letters",
        "prompts": 2, "max_tokens": 4, "steps": 6, "reward_timeout": None, "eval_every": 2,
        "eval_data": [{"prompt": "x", "answer": "x"}],
    }  # fmt: skip


def short(folder, out, method=methods.grpo, **changes):
    given = {"overrides": [("sampler.group", 4), ("sampler.minibatches", 2), ("update.learning_rate", 1e-3)]}
    return lm.train(method, out=out, quiet=True, **settings(folder) | given | changes)


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """A short run that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return out, short(folder, out)


def same(a, b):
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in SAME)


def test_files_of_a_run(whole):
    out, done = whole
    assert {p.name for p in out.iterdir()} == {CONFIG, METRICS, TIMING, SUMMARY, run.SAMPLES, run.MODEL}
    config = json.loads((out / CONFIG).read_text())
    assert config["task"] == "lm"
    assert config["setup"]["reward"].endswith("mine.py:letters")
    assert (config["given"], config["setup"]["eval_data"]) == (["eval_data"], "the data")
    rows = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    assert rows == done.metrics
    assert [r["step"] for r in rows] == list(range(7))
    assert not any("second" in name for r in rows for name in r)
    assert json.loads((out / SUMMARY).read_text()) == done.summary
    samples = [json.loads(line) for line in (out / run.SAMPLES).read_text().splitlines()]
    assert [s["step"] for s in samples] == [0, 2, 4, 6]
    assert {"prompt", "completion", "answer", "reward"} <= samples[0].keys()


def test_the_model_is_an_ordinary_folder(whole):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out, done = whole
    theirs = AutoModelForCausalLM.from_pretrained(out / run.MODEL)
    ours = done.language_model.model.state_dict()
    assert all((ours[name] == value).all() for name, value in theirs.state_dict().items())
    assert AutoTokenizer.from_pretrained(out / run.MODEL).chat_template == tiny.CHAT


class Killed(BaseException):
    """Stands for SIGKILL between two steps."""


@pytest.mark.parametrize("at", [1, 3, 6])
@pytest.mark.parametrize(
    ("method", "changes"),
    [(methods.grpo, {}), (methods.dapo, {"lora": {"r": 2}}), (methods.remax, {"dtype": "bfloat16"})],
    ids=["reference", "adapter", "bfloat16"],
)
def test_stopped_and_gone_on_with_ends_bitwise_the_same(method, changes, at, folder, tmp_path, monkeypatch):
    overrides = [("update.learning_rate", 1e-2)]
    overrides += [("sampler.group", 4)] if method.sampler.group > 1 else []
    given = {"method": method, "overrides": overrides, **changes}
    short(folder, tmp_path / "whole", **given)
    monkeypatch.setattr(run, "CHECKPOINT_SECONDS", 0.0)
    real = checkpoint.save

    def save(place, loop, logs):
        real(place, loop, logs)
        if loop.step == at:
            raise Killed

    monkeypatch.setattr(checkpoint, "save", save)
    with pytest.raises(Killed):
        short(folder, tmp_path / "run", **given)
    monkeypatch.setattr(checkpoint, "save", real)
    with open(tmp_path / "run" / METRICS, "ab") as file:
        file.write(b'{"step": 99')  # a row that no checkpoint counts on
    short(folder, tmp_path / "run", resume=True, **given)
    assert same(tmp_path / "whole", tmp_path / "run")
    assert not list((tmp_path / "run").glob("checkpoint-*"))


KILLED = """
import sys
from apportion.lm import run
from apportion.cli import main
run.CHECKPOINT_SECONDS = 0.1
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_killed_in_earnest_ends_bitwise_the_same(folder, tmp_path):
    """A process of the command is killed; this one goes on with its folder."""
    given = {"steps": 40, "eval_data": None, "eval_every": 0, "reward_timeout": 10.0}
    given |= {"method": methods.dr_grpo, "overrides": [("update.learning_rate", 0.01)]}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    short(folder, whole, **given)
    options = [
        "train", "dr_grpo", "lm", "--model", folder / "model", "--data", folder / "digits.jsonl", "--reward",
        f"{folder}/mine.py:letters", "--prompts", 2, "--max-tokens", 4, "--steps", 40, "--set",
        "update.learning_rate=0.01", "--json", "--out", broken,
    ]  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", KILLED, *map(str, options)], stdout=subprocess.DEVNULL)
    while not any(broken.glob("checkpoint-*")) and process.poll() is None:
        time.sleep(0.002)
    time.sleep(0.05)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not (broken / SUMMARY).exists()
    short(folder, broken, resume=True, **given)
    assert (whole / METRICS).read_bytes() == (broken / METRICS).read_bytes()
    assert (whole / SAME[2]).read_bytes() == (broken / SAME[2]).read_bytes()


def test_a_checkpoint_that_was_cut_short_is_passed_over(folder, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "CHECKPOINT_SECONDS", 0.0)
    real, seen = checkpoint.save_arrays, []

    def save_arrays(path, arrays, about):
        seen.append(path)
        if len(seen) == 4:
            raise Killed
        real(path, arrays, about)

    monkeypatch.setattr(checkpoint, "save_arrays", save_arrays)
    with pytest.raises(Killed):
        short(folder, tmp_path / "run")
    assert len(list((tmp_path / "run").glob("checkpoint-*"))) == 2  # the third one whole, the fourth without its arrays
    short(folder, tmp_path / "run", resume=True)
    assert same(whole[0], tmp_path / "run")


def test_a_full_disk_is_one_line(folder, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ApportionError, match="No space left on device; make room"):
        short(folder, tmp_path / "run")


def test_interrupted_it_saves_and_says_how_to_go_on(folder, whole, tmp_path, capsys):
    def interrupt(row):
        if row["step"] == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        short(folder, tmp_path / "run", callbacks=[interrupt])
    assert "stopped at step 3, saved in" in capsys.readouterr().err
    short(folder, tmp_path / "run", resume=True)
    assert same(whole[0], tmp_path / "run")


class Heard:
    """Every hook, as it is called; stops at a step."""

    def __init__(self, at=None):
        self.at, self.hooks = at, []

    def on_start(self, run):
        self.hooks.append(("start", len(run.rows), run.step))

    def on_row(self, row):
        self.hooks.append(("row", row["step"]))
        return row["step"] != self.at

    def on_checkpoint(self, path):
        self.hooks.append(("checkpoint", path.name))

    def on_end(self, summary):
        self.hooks.append(("end", summary.get("stopped", False)))


def test_a_callback_stops_a_run_that_can_be_gone_on_with(folder, whole, tmp_path, capsys):
    first, second = Heard(3), Heard()
    run = short(folder, tmp_path / "run", callbacks=[first])
    assert "stopped at step 3, saved in" in capsys.readouterr().err
    assert run.summary["stopped"]
    assert not (tmp_path / "run" / SUMMARY).exists()
    assert first.hooks[0] == ("start", 0, "step")
    assert first.hooks[-3:] == [("row", 3), ("checkpoint", "run"), ("end", True)]
    short(folder, tmp_path / "run", resume=True, callbacks=[second])
    told = sum(hook[0] == "row" for hook in first.hooks)
    assert second.hooks[0] == ("start", told, "step")
    assert second.hooks[-1] == ("end", False)
    assert same(whole[0], tmp_path / "run")


def test_resuming_a_finished_run_tells_its_summary(folder, whole):
    again = short(folder, whole[0], resume=True)
    assert again.summary == whole[1].summary
    theirs = whole[1].language_model.model.state_dict()
    assert all((theirs[k] == v).all() for k, v in again.language_model.model.state_dict().items())


def test_another_run_is_refused(folder, whole, tmp_path):
    with pytest.raises(ApportionError, match="already holds a run"):
        short(folder, whole[0])
    shutil.copytree(whole[0], tmp_path / "run")
    with pytest.raises(ApportionError, match=r"holds another run: setup.max_tokens is 4 there and 5 here"):
        short(folder, tmp_path / "run", resume=True, max_tokens=5)


def test_what_cannot_run_leaves_no_folder(folder, tmp_path):
    for method, changes in ((methods.ppo, {"overrides": []}), (methods.grpo, {"top_p": 7.0})):
        with pytest.raises(ApportionError):
            short(folder, tmp_path / "run", method=method, **changes)
        assert not (tmp_path / "run").exists()


def test_a_failing_reward_stops_the_run_where_it_can_be_gone_on_with(folder, tmp_path):
    place = tmp_path / "given"
    shutil.copytree(folder, place)
    good = (place / "mine.py").read_text()
    (place / "mine.py").write_text(good + "\nraise_from = 0\n")
    bad = good.replace("return ", "import os; assert not os.path.exists('STOP')\n    return ").replace(
        "STOP", str(tmp_path / "stop")
    )
    (place / "mine.py").write_text(bad)

    def stop(row):
        if row["step"] == 3:
            (tmp_path / "stop").touch()

    with pytest.raises(
        ApportionError, match=r"no completion could be scored in step 4: reward letters: AssertionError"
    ):
        short(place, tmp_path / "run", callbacks=[stop], eval_every=0)
    (tmp_path / "stop").unlink()
    done = short(place, tmp_path / "run", resume=True, eval_every=0)
    assert done.summary["step"] == 6
    assert [r["step"] for r in done.metrics] == [4, 5, 6]


# --- the command


def command(capsys, *args):
    code = main([str(a) for a in args])
    return code, *capsys.readouterr()


def test_the_command_trains_and_prints_its_summary(folder, tmp_path, capsys):
    code, out, err = command(
        capsys, "train", "rloo", "lm", "--model", folder / "model", "--data", f"{folder}/digits.jsonl", "--reward",
        "last_number", "--reward", f"{folder}/mine.py:letters=0.5", "--prompts", 2, "--max-tokens", 4, "--steps", 2,
        "--temperature", 0.7, "--lora", "r=2", "lora_alpha=4", "--out", tmp_path / "run", "--json",
    )  # fmt: skip
    assert (code, err) == (0, "")
    summary = json.loads(out)
    assert (summary["step"], summary["completions"]) == (2, 16)
    config = json.loads((tmp_path / "run" / CONFIG).read_text())
    assert config["setup"]["reward"] == ["last_number", f"{folder}/mine.py:letters=0.5"]
    assert config["setup"]["lora"] == {"r": 2, "lora_alpha": 4}
    assert "temperature=0.7" in config["method"]["sampler"]


def test_the_command_shows_progress_and_completions(folder, tmp_path, capsys):
    code, _, err = command(
        capsys, "train", "sft", "lm", "--model", folder / "model", "--data", f"{folder}/digits.jsonl", "--eval-data",
        f"{folder}/digits.jsonl", "--reward", "accuracy", "--prompts", 2, "--max-tokens", 4, "--steps", 2, "--out",
        tmp_path / "run",
    )  # fmt: skip
    assert code == 2
    assert "every prompt of" in err
    code, out, err = command(
        capsys, "train", "dr_grpo", "lm", "--model", folder / "model", "--data", f"{folder}/digits.jsonl", "--reward",
        f"{folder}/mine.py:letters", "--prompts", 2, "--max-tokens", 4, "--steps", 1, "--out", tmp_path / "run",
    )  # fmt: skip
    assert code == 0
    assert "return mean" in out
    assert "step 1 (train)" in err


def test_the_command_evaluates_a_run(folder, tmp_path, capsys):
    given = {"data": f"{folder}/digits.jsonl", "eval_data": f"{folder}/unseen.jsonl", "steps": 1}
    warm = [("sampler.group", 4), ("sampler.temperature", 0.5)]
    done = short(folder, tmp_path / "run", max_tokens=4, eval_samples=2, overrides=warm, **given)
    code, out, err = command(capsys, "eval", tmp_path / "run", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["accuracy"] == done.summary["eval_accuracy"]
    assert found["length_mean"] == done.summary["eval_length_mean"]
    assert (found["prompts"], found["step"]) == (6, 1)
    code, out, err = command(capsys, "eval", tmp_path / "run", "--episodes", 2)
    assert re.search(r"^prompts +2$", out, re.MULTILINE)
    code, out, _ = command(capsys, "eval", tmp_path / "run", "--samples", 3, "--json")
    assert {"pass@1", "pass@3"} <= set(json.loads(out))
    (tmp_path / "run" / SUMMARY).unlink()
    code, _, err = command(capsys, "eval", tmp_path / "run")
    assert (code, "is not finished" in err) == (2, True)


def test_a_run_on_python_objects_is_not_evaluated_by_the_command(whole, folder, tmp_path, capsys):
    short(folder, tmp_path / "run", steps=1, data=[{"prompt": "1"}], eval_data=None, eval_every=0)
    code, _, err = command(capsys, "eval", tmp_path / "run")
    assert (code, "given in Python" in err) == (2, True)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["dr_grpo", "lm", "--modell", "x"], "did you mean '--model'?"),
        (["dr_grpoo", "lm", "--model", "x"], "did you mean 'dr_grpo'?"),
        (["ppo", "CartPole-v1", "--max-tokens", "3"], "--max-tokens belongs to language models"),
        (["dr_grpo", "lm", "--data", "x.jsonl"], "there is no model"),
        (["dr_grpo", "lm", "--prompts", "0"], "'0' is not a whole number of 1 or more"),
        (["dr_grpo", "lm", "--top-p", "half"], "'half' is not a number"),
        (["dr_grpo", "lm", "--model", "x", "--data", "x", "--lora", "r"], "--lora 'r' is not FIELD=VALUE"),
        (["dr_grpo", "lm", "--model", "x", "--data", "x.jsonl", "--reward", "acc"], "did you mean 'accuracy'?"),
        (["dr_grpo", "lm", "--model", "x", "--data", "x.jsonl", "--reward", "task"], "cannot read data x.jsonl"),
    ],
)
def test_bad_options_are_one_line(args, says, capsys):
    code, out, err = command(capsys, "train", *args)
    assert (code, out) == (2, "")
    assert err.startswith("apportion: error: ")
    assert err.count("\n") == 1
    assert says in err


def test_progress_says_what_goes_on_with_pace_and_time_left(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(display, "PLAIN_SECONDS", 0.0)
    lm.train(methods.dr_grpo, out=tmp_path / "run", **settings(folder) | {"steps": 3, "samples": 0})
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "dr_grpo lm: 0/3 steps  evaluating 1/1"
    assert any("  sampling" in line for line in lines)
    assert any("2/3 steps" in line and " s left  " in line and "  return " in line for line in lines)


def test_control_does_without_torch():
    code = "import sys; from apportion.cli import main; main(['train', 'ppo', 'CartPole-v2'])"
    code += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False"
    assert "unknown task 'CartPole-v2'" in done.stderr
