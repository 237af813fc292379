"""A run's folder: killed at any moment it is gone on with to bitwise the same files; what does not fit is refused."""

import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from apportion import control
from apportion.control import checkpoint, run
from apportion.control.run import evaluate_run, train_run
from apportion.core.errors import ApportionError, ApportionWarning
from apportion.runs import display
from apportion.runs.files import CHECKPOINT, CONFIG, METRICS, POLICY, SUMMARY, TIMING, load_arrays
from apportion.runs.folder import differences, locked

SMALL = [("setup.envs", 4), ("setup.hidden", (8,)), ("sampler.horizon", 16), ("sampler.epochs", 1)]
SMALL += [("sampler.minibatches", 1)]
SAME = (METRICS, CHECKPOINT, POLICY)


def short(out, **changes):
    given = {"method": "a2c", "task": "CartPole-v1", "steps": 2_000, "overrides": SMALL, "quiet": True}
    return train_run(**given | {"out": out} | changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A short run that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return out, short(out)


def copy(whole, tmp_path, *without):
    out = tmp_path / "run"
    shutil.copytree(whole[0], out)
    for name in without:
        (out / name).unlink()
    return out


def same(a, b):
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in SAME)


# --- what a run leaves behind


def test_files_of_a_run(whole):
    out, summary = whole
    config = json.loads((out / CONFIG).read_text())
    assert config["task"] == "CartPole-v1"
    assert config["method"]["sampler"].startswith("Sampler(group=1, start='stream', horizon=16")
    assert json.loads((out / SUMMARY).read_text()) == summary
    assert {"return_mean", "return_ci", "env_steps", "wall_seconds", "compile_seconds", "steps_per_second"} <= set(
        summary
    )
    rows = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    assert [r["iteration"] for r in rows] == list(range(1, len(rows) + 1))  # 64 steps an iteration, a row every 10
    assert [r["env_steps"] for r in rows] == [64 * r["iteration"] for r in rows]
    assert rows[-1]["env_steps"] == summary["env_steps"] == 2_048
    assert sum(r["episodes"] * r["length_mean"] for r in rows if r["episodes"]) <= 2_048
    assert all("second" not in name for r in rows for name in r)
    assert len((out / TIMING).read_text().splitlines()) == len(rows)
    arrays, about = load_arrays(out / CHECKPOINT)
    assert about["env_steps"] == 2_048
    assert arrays["state.optimiser.1.count"].dtype == np.int32
    assert arrays["state.key"].dtype == np.uint32
    assert not list(out.glob("*.part"))


def test_rows_are_as_many_whatever_the_pace(whole, tmp_path, monkeypatch):
    """A row's bounds are environment steps; how many iterations a call makes is the clock's and must not show."""
    step = run.Loop.step
    monkeypatch.setattr(run.Loop, "step", lambda self: step(self, seconds=0.0))
    short(tmp_path / "run")
    assert same(tmp_path / "run", whole[0])


def test_evaluating_a_run(whole):
    out, summary = whole
    found = evaluate_run(out, episodes=20, seed=0)
    assert found["return_mean"] == summary["return_mean"]
    assert found["env_steps"] == 2_048
    assert evaluate_run(out, episodes=3)["episodes"] == 3
    assert evaluate_run(out, seed=1)["return_mean"] != found["return_mean"]
    refused(["seed is -1"], evaluate_run, out, seed=-1)


def test_evaluating_an_unfinished_run(whole, tmp_path):
    out = copy(whole, tmp_path, POLICY, SUMMARY)
    assert evaluate_run(out)["return_mean"] == whole[1]["return_mean"]


# --- evaluated on the way


def test_evaluations_on_the_way_change_nothing_but_their_rows(whole, tmp_path):
    every, out = 700, tmp_path / "run"
    summary = short(out, eval_every=every, episodes=3)
    rows = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    plain = [json.loads(line) for line in (whole[0] / METRICS).read_text().splitlines()]
    told = [r["env_steps"] for r in rows if "eval_return_mean" in r]
    assert told == [704, 1408]  # the first rows, of 64 steps each, after 700 and 1400
    assert [{k: v for k, v in r.items() if not k.startswith("eval_")} for r in rows] == plain
    here, there = (load_arrays(folder / CHECKPOINT)[0] for folder in (out, whole[0]))
    assert all(np.array_equal(here[name], there[name]) for name in here.keys() | there.keys())
    evaluated = [r for r in rows if "eval_return_mean" in r]
    assert all(r["eval_return_low"] < r["eval_return_mean"] < r["eval_return_high"] for r in evaluated)
    assert [r["eval_episodes"] for r in evaluated] == [3, 3]
    timing = [json.loads(line) for line in (out / TIMING).read_text().splitlines()]
    spent = [t["eval_seconds"] for t in timing]
    assert spent == sorted(spent)
    assert spent[0] == 0 < spent[-1] < summary["wall_seconds"]


def test_an_evaluation_is_that_of_a_run_which_ends_there(tmp_path):
    """Whole segments of 64 steps and a constant rate, so the longer run passes through the shorter one's end."""
    given = {"overrides": [*SMALL, ("update.anneal", "constant")], "episodes": 3}
    row = next(
        r
        for r in control.train("a2c", "CartPole-v1", 2_000, eval_every=1_024, **given).metrics
        if "eval_return_mean" in r
    )
    ended = control.train("a2c", "CartPole-v1", 1_024, **given).summary
    assert row["env_steps"] == ended["env_steps"] == 1_024
    assert [row["eval_return_mean"], row["eval_length_mean"]] == [ended["return_mean"], ended["length_mean"]]
    both = control.train("a2c", "CartPole-v1", 2_000, seeds=[0, 1], eval_every=1_024, **given)
    assert [[r["env_steps"] for r in one.metrics if "eval_return_mean" in r] for one in both] == [[1_024, 2_048]] * 2


@pytest.mark.parametrize("every", [0, -5, 2.5, True, "often"])
def test_an_evaluation_every_so_many_steps_must_be_a_number_of_them(every, tmp_path):
    refused(["eval_every", repr(every), "whole number"], short, tmp_path / "run", eval_every=every)
    assert not (tmp_path / "run" / METRICS).exists()


# --- killed and gone on with

KILLED = """
import sys
from apportion.control import run
run.CHECKPOINT_SECONDS = 0.02
step = run.Loop.step
run.Loop.step = lambda self: step(self, seconds=0.01)
given = dict(steps={steps}, overrides={overrides!r}, eval_every=20_000)
run.train_run({method!r}, "CartPole-v1", out=sys.argv[1], resume=True, quiet=True, **given)
"""
EPISODES = [("setup.envs", 4), ("setup.hidden", (8,)), ("sampler.horizon", 40), ("sampler.group", 4)]


def start(script, out):
    return subprocess.Popen([sys.executable, "-c", script, str(out)], stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "steps", "overrides", "kills"),
    [("ppo", 60_000, [*SMALL[:3], ("sampler.minibatches", 4)], 5), ("dr_grpo", 60_000, EPISODES, 3)],
    ids=["stream", "episodes"],
)
def test_killed_at_random_moments_ends_bitwise_the_same(method, steps, overrides, kills, tmp_path):
    script = KILLED.format(method=method, steps=steps, overrides=overrides)
    undisturbed, broken = tmp_path / "undisturbed", tmp_path / "broken"
    assert start(script, undisturbed).wait() == 0
    draw, sessions = random.Random(0), 0
    for _ in range(kills):
        process = start(script, broken)
        begun = time.monotonic()
        seen = checkpoint_time(broken)
        # Half of the kills fall anywhere, half into training, that is after a fresh checkpoint of this process.
        if draw.random() < 0.5:
            time.sleep(draw.uniform(0.0, 1.5))
        else:
            while checkpoint_time(broken) == seen and process.poll() is None and time.monotonic() - begun < 60:
                time.sleep(0.005)
            time.sleep(draw.uniform(0.0, 0.1))
        process.kill()
        sessions += process.wait() == -signal.SIGKILL
        process.stderr.close()
    assert sessions == kills, "the run was over before it could be killed often enough; make it longer"
    last = start(script, broken)
    assert last.wait() == 0, last.stderr.read()
    assert same(undisturbed, broken)


def checkpoint_time(out):
    try:
        return (out / CHECKPOINT).stat().st_mtime_ns
    except OSError:
        return 0


class Killed(BaseException):
    """Stands for SIGKILL between two system calls."""


@pytest.mark.slow
def test_killed_between_any_two_system_calls(whole, tmp_path, monkeypatch):
    """Every point in a row at which the file system changes, with a checkpoint at each step."""
    monkeypatch.setattr(run, "CHECKPOINT_SECONDS", 0.0)
    calls = {"left": -1}

    def counted(real):
        def call(*args, **kwargs):
            calls["left"] -= 1
            if calls["left"] == 0:
                raise Killed
            return real(*args, **kwargs)

        return call

    monkeypatch.setattr(os, "fsync", counted(os.fsync))
    monkeypatch.setattr(os, "replace", counted(os.replace))
    # 3 calls for config.json, then 4 a checkpoint; the last ones are policy and summary.
    for nth in (1, 2, 4, 5, 6, 7, 31, 33):
        out = tmp_path / str(nth)
        calls["left"] = nth
        with pytest.raises(Killed):
            short(out)
        calls["left"] = -1
        short(out, resume=True)
        assert same(out, whole[0]), nth


@pytest.mark.parametrize("torn", [b'{"env_st', b'{"env_steps": 64}\n{"env_steps": 128}\n'], ids=["torn", "ahead"])
def test_log_rows_past_the_checkpoint_are_cut_back(torn, whole, tmp_path):
    out = copy(whole, tmp_path, SUMMARY, POLICY)
    for name in (METRICS, TIMING):
        with open(out / name, "ab") as file:
            file.write(torn)
    short(out, resume=True)
    assert same(out, whole[0])
    assert len((out / TIMING).read_text().splitlines()) == len((out / METRICS).read_text().splitlines())


def test_resuming_a_finished_run_tells_its_summary(whole):
    assert short(whole[0], resume=True) == whole[1]


def test_resuming_where_nothing_was_begun_begins(whole, tmp_path):
    short(tmp_path / "run", resume=True)
    assert same(tmp_path / "run", whole[0])


@pytest.mark.slow
def test_interrupted_it_saves_and_goes_on(whole, tmp_path, monkeypatch, capsys):
    step, before = run.Loop.step, signal.getsignal(signal.SIGINT)

    def interrupted(self):
        if int(self.iterations) == 10:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, seconds=0.0)

    monkeypatch.setattr(run.Loop, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        short(tmp_path / "run")
    assert "--resume" in capsys.readouterr().err
    assert load_arrays(tmp_path / "run" / CHECKPOINT)[1]["iterations"] == 11
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.setattr(run.Loop, "step", step)
    short(tmp_path / "run", resume=True)
    assert same(tmp_path / "run", whole[0])


# --- what is refused, in one line


def refused(words, call, *args, **kwargs):
    with pytest.raises(ApportionError) as caught:
        call(*args, **kwargs)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text
    return text


def test_a_folder_that_holds_a_run(whole):
    before = (whole[0] / METRICS).read_bytes()
    refused([str(whole[0]), "already holds a run", "--resume"], short, whole[0])
    assert (whole[0] / METRICS).read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 1}, ["seed is 0 there and 1 here"]),
        ({"steps": 3_000}, ["steps is 2000 there and 3000 here"]),
        ({"task": "Acrobot-v1"}, ["task is CartPole-v1 there and Acrobot-v1 here"]),
        ({"method": "ppo"}, ["method.name is a2c[horizon=16] there and ppo["]),
        ({"overrides": [*SMALL, ("entropy", 0.5)]}, ["method.entropy is 0.01 there and 0.5 here"]),
        ({"overrides": [("setup.envs", 5), *SMALL[1:]]}, ["setup.envs"]),
    ],
    ids=["seed", "steps", "task", "method", "part", "setup"],
)
def test_resuming_another_run(changes, words, whole):
    refused([*words, "--resume"], short, whole[0], resume=True, **changes)


def test_other_versions_are_told(whole, tmp_path):
    out = copy(whole, tmp_path)
    config = json.loads((out / CONFIG).read_text())
    config["versions"]["jax"] = "0.0.1"
    (out / CONFIG).write_text(json.dumps(config))
    with pytest.warns(ApportionWarning, match=r"begun with jax 0.0.1"):
        short(out, resume=True)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_checkpoint(keep, whole, tmp_path):
    out = copy(whole, tmp_path, SUMMARY, POLICY)
    data = (out / CHECKPOINT).read_bytes()
    (out / CHECKPOINT).write_bytes(data[:keep])
    refused([CHECKPOINT, "truncated"], short, out, resume=True)
    refused([CHECKPOINT, "truncated"], evaluate_run, out)


def test_a_foreign_checkpoint(whole, tmp_path):
    from safetensors.numpy import save

    out = copy(whole, tmp_path, SUMMARY, POLICY)
    (out / CHECKPOINT).write_bytes(save({"weight": np.zeros(3)}))
    refused([CHECKPOINT, "foreign"], short, out, resume=True)
    refused([CHECKPOINT, "foreign"], evaluate_run, out)


def test_a_checkpoint_of_another_run(whole, tmp_path):
    short(tmp_path / "other", task="Acrobot-v1")
    out = copy(whole, tmp_path, SUMMARY, POLICY)
    shutil.copy(tmp_path / "other" / CHECKPOINT, out / CHECKPOINT)
    refused(["task Acrobot-v1"], short, out, resume=True)
    refused(["task Acrobot-v1", "CartPole-v1"], evaluate_run, out)


def test_a_checkpoint_of_another_shape(whole, tmp_path):
    arrays, _ = load_arrays(whole[0] / CHECKPOINT)
    path = tmp_path / CHECKPOINT
    template = {name: np.zeros_like(x) for name, x in arrays.items()}
    wrong = dict(arrays, **{"state.parameters": arrays["state.parameters"].astype(np.float64)})
    refused(["state.parameters is float64", "not float32"], checkpoint.restore, path, wrong, template)
    refused(
        ["lacks state.key"], checkpoint.restore, path, {k: v for k, v in arrays.items() if "key" not in k}, template
    )
    refused(["unexpected extra"], checkpoint.restore, path, {**arrays, "extra": np.zeros(1)}, template)


def test_metrics_that_were_cut_by_hand(whole, tmp_path):
    out = copy(whole, tmp_path, SUMMARY, POLICY)
    (out / METRICS).write_text("")
    refused([METRICS, "shorter"], short, out, resume=True)


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    """Rewards are called in one, and it may outlive a run that was killed."""
    fork = multiprocessing.get_context("fork")
    there = fork.Event()
    child = fork.Process(target=lambda: there.set() or time.sleep(60))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, which this child does not need
        with locked(tmp_path):
            child.start()
            assert there.wait(60)
        try:
            with locked(tmp_path):
                refused(["in use"], short, tmp_path)
        finally:
            child.kill()
            child.join()


def test_files_without_a_configuration(whole, tmp_path):
    refused(["but no config.json"], short, copy(whole, tmp_path, CONFIG))


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_broken_configuration(text, whole, tmp_path):
    out = copy(whole, tmp_path)
    (out / CONFIG).write_text(text)
    refused([CONFIG, "not the configuration of a run"], short, out, resume=True)
    refused([CONFIG, "not the configuration of a run"], evaluate_run, out)


def test_folders_without_a_run(tmp_path):
    refused(["no folder", "missing"], evaluate_run, tmp_path / "missing")
    refused(["holds no run"], evaluate_run, tmp_path)
    (tmp_path / "file").write_text("")
    refused(["is a file"], evaluate_run, tmp_path / "file")
    refused(["cannot write", "file"], short, tmp_path / "file")
    refused(["cannot write", "name a folder"], short, tmp_path / "file" / "run")


def test_a_folder_in_use(whole, tmp_path):
    out = copy(whole, tmp_path, SUMMARY)
    with locked(out):
        refused(["in use by another process"], short, out, resume=True)
    short(out, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("when", [2, 9])
def test_a_full_disk_leaves_the_last_checkpoint(when, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "CHECKPOINT_SECONDS", 0.0)
    real, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) >= 4 * when:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    refused(["No space left on device", "make room"], short, tmp_path / "run")
    assert load_arrays(tmp_path / "run" / CHECKPOINT)
    assert not list((tmp_path / "run").glob("*.part"))
    monkeypatch.setattr(os, "fsync", real)
    short(tmp_path / "run", resume=True)
    assert same(tmp_path / "run", whole[0])


def test_training_that_diverges_names_the_iteration(tmp_path):
    bad = [*SMALL, ("update.learning_rate", 1e38)]
    refused(["non-finite in iteration 1;", "update.learning_rate"], short, tmp_path / "run", overrides=bad)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": "CartPole-v2"}, ["CartPole-v2", "CartPole-v1"]),
        ({"method": "gpro"}, ["gpro", "grpo"]),
        ({"overrides": [("setup.env", 4)]}, ["env", "envs"]),
        ({"overrides": [("sampler.grup", 4)]}, ["grup", "group"]),
        ({"steps": 0}, ["steps is 0"]),
        ({"steps": 3_000_000_000}, ["2,000,000,000"]),
        ({"seed": -1}, ["seed is -1"]),
    ],
)
def test_bad_input_leaves_no_folder(changes, words, tmp_path):
    refused(words, short, tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


# --- small parts


def test_differences_name_causes_first():
    assert [d[0] for d in differences({"a": 1, "b": {"c": 2, "d": 3}}, {"a": 0, "b": {"c": 2}, "e": 1})] == [
        "a",
        "b.d",
        "e",
    ]


def test_progress_without_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(display, "PLAIN_SECONDS", 0.0)
    short(tmp_path / "run", quiet=False)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("a2c CartPole-v1: 2,048/2,000 steps")
    assert "return" in lines[-1]
    assert "entropy" in lines[-1]


def test_outside_the_main_thread(whole, tmp_path):
    thread = threading.Thread(target=short, args=(tmp_path / "run",))
    thread.start()
    thread.join()
    assert same(tmp_path / "run", whole[0])


def test_default_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert short(None, steps=64)["out"] == str(Path("runs", "a2c-CartPole-v1-seed0"))
