"""Callbacks see and stop a run and change nothing of it; trackers hold every row once, whatever happened to the run."""

import io
import itertools
import json
import os
import struct
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from apportion import control
from apportion.cli import main
from apportion.control import run
from apportion.control.run import train_run
from apportion.core.errors import ApportionError, ApportionWarning, UnknownName
from apportion.runs import display as display_module
from apportion.runs.callbacks import Callback, Callbacks, StopTraining
from apportion.runs.display import Display
from apportion.runs.files import CHECKPOINT, METRICS, POLICY, SUMMARY
from apportion.runs.trackers import STATE, Tracker, needed, trackers

SMALL = [("setup.envs", 4), ("setup.hidden", (8,)), ("sampler.horizon", 16), ("sampler.epochs", 1)]
SMALL += [("sampler.minibatches", 1)]


def short(out, *callbacks, **changes):
    given = {"method": "a2c", "task": "CartPole-v1", "steps": 2_000, "overrides": SMALL, "quiet": True}
    return train_run(**given | {"out": out, "callbacks": callbacks} | changes)


def rows_of(out):
    return [json.loads(line) for line in (out / METRICS).read_text().splitlines()]


class Witness(Callback):
    def __init__(self, stop_at=None):
        self.stop_at, self.rows, self.checkpoints, self.ends = stop_at, [], [], []

    def on_start(self, run):
        self.run = run

    def on_row(self, row):
        self.rows.append(row)
        if len(self.rows) == self.stop_at:
            raise StopTraining

    def on_checkpoint(self, path):
        self.checkpoints.append(path.read_bytes())

    def on_end(self, summary):
        self.ends.append(summary)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    return out, short(out)


def same(a, b):
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in (METRICS, CHECKPOINT, POLICY))


# --- callbacks


def test_what_a_callback_hears_and_that_it_changes_nothing(whole, tmp_path):
    seen, evaluated = Witness(), []

    def look(row):
        if len(evaluated) < 2:
            action, _ = seen.run.policy().predict(np.zeros(4))
            evaluated.append(int(action))

    summary = short(tmp_path / "run", seen, look)
    assert same(tmp_path / "run", whole[0])
    assert seen.rows == rows_of(whole[0])
    assert {"kl", "clip_fraction", "entropy", "explained_variance", "return_mean"} <= set(seen.rows[0])
    assert seen.checkpoints[-1] == (whole[0] / CHECKPOINT).read_bytes()
    assert seen.ends == [summary]
    assert (seen.run.name, seen.run.total, seen.run.rows) == ("a2c CartPole-v1", 2_000, [])
    assert seen.run.config == json.loads((whole[0] / "config.json").read_text())
    assert len(evaluated) == 2


@pytest.mark.parametrize("how", ["object", "function"])
def test_stopped_it_is_saved_and_goes_on_to_the_same_bytes(how, whole, tmp_path, capsys):
    count = iter(range(100))
    first = Witness(stop_at=3) if how == "object" else lambda row: next(count) < 2
    summary = short(tmp_path / "run", first)
    assert summary["stopped"]
    assert summary["env_steps"] == 192
    assert "stopped at 192 environment steps" in capsys.readouterr().err
    assert not (tmp_path / "run" / SUMMARY).exists()
    second = Witness()
    short(tmp_path / "run", second, resume=True)
    assert same(tmp_path / "run", whole[0])
    assert second.run.rows == rows_of(whole[0])[:3]
    assert second.run.rows + second.rows == rows_of(whole[0])


def test_in_memory():
    seen = Witness(stop_at=2)
    trained = control.train("a2c", "CartPole-v1", 2_000, overrides=SMALL, callbacks=[seen], episodes=2)
    assert trained.summary["env_steps"] == 128
    assert trained.metrics == seen.rows
    assert seen.ends == [trained.summary]
    assert seen.run.folder is None
    with pytest.raises(ApportionError, match="one run"):
        control.train("a2c", "CartPole-v1", 2_000, overrides=SMALL, callbacks=[seen], seeds=[0, 1])


def test_what_is_no_callback_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ApportionError, match="'tensorboard' is no function and has none of on_start"):
        short(tmp_path / "run", "tensorboard")
    assert not (tmp_path / "run").exists()


def test_every_callback_hears_a_row_also_when_another_stops():
    heard = []
    both = Callbacks([lambda row: False, heard.append])
    both("on_row", {})
    assert both.stopped
    assert heard == [{}]


# --- trackers


def scalars(out):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    files = sorted((out / "tensorboard").glob("events*"), key=lambda p: int(p.name.rsplit(".", 1)[1]))
    events = [e for f in files for e in loader.LegacyEventFileLoader(str(f)).Load()]
    return [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]


def offline(out):
    """The rows in a run's .wandb files: LevelDB's log format, protocol buffers inside."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    for file in sorted((out / "wandb").glob("offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime_ns):
        data, at, parts = file.read_bytes(), 7, b""
        while at < len(data):
            if (left := 32_768 - at % 32_768) < 7:
                at += left
                continue
            _, size, kind = struct.unpack("<IHB", data[at : at + 7])
            parts, at = parts + data[at + 7 : at + 7 + size], at + 7 + size
            if kind in (1, 4):
                record, parts = pb.Record.FromString(parts), b""
                if record.WhichOneof("record_type") == "history":
                    yield {(i.key or i.nested_key[0]): json.loads(i.value_json) for i in record.history.item}


class Killed(BaseException):
    """Stands for SIGKILL."""


def killed_and_resumed(out, monkeypatch, names):
    """Killed five rows past its only checkpoint, and gone on with."""

    def kill(row):
        if row["iteration"] == 8:
            raise Killed

    step = run.Loop.step
    monkeypatch.setattr(run.Loop, "step", lambda self: step(self, seconds=0.0))
    save = run.Session.save
    monkeypatch.setattr(run, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(run.Session, "save", lambda self: int(self.loop.iterations) == 3 and save(self))
    with pytest.raises(Killed):
        short(out, *trackers(names), kill)
    monkeypatch.undo()
    monkeypatch.setenv("WANDB_MODE", "offline")
    time.sleep(1.0)  # W&B names an offline folder by the second, and no real process is resumed sooner
    short(out, *trackers(names), resume=True)


@pytest.mark.slow
def test_trackers_hold_every_row_once(whole, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    out = tmp_path / "run"
    killed_and_resumed(out, monkeypatch, "tensorboard,wandb")
    assert same(out, whole[0])
    rows = rows_of(out)
    returns = [(r["env_steps"], np.float32(r["entropy"])) for r in rows]
    assert [(step, np.float32(x)) for step, tag, x in scalars(out) if tag == "entropy"] == returns
    logged = list(offline(out))
    assert [(r["_step"], np.float32(r["entropy"])) for r in logged] == returns
    assert len(list((out / "wandb").glob("offline-run-*"))) == 2
    state = json.loads((out / STATE).read_text())
    assert {name: told["rows"] for name, told in state.items()} == dict.fromkeys(("tensorboard", "wandb"), len(rows))
    assert all(folder.name.endswith(state["wandb"]["id"]) for folder in (out / "wandb").glob("offline-run-*"))


def test_trackio_holds_every_row_once(whole, tmp_path, monkeypatch):
    pytest.importorskip("trackio", exc_type=ImportError)
    there = "import json, sys; from trackio.sqlite_storage import SQLiteStorage as S; p = 'apportion'; "
    there += "print(json.dumps([S.get_logs(p, r) for r in S.get_runs(p)]))"
    here = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); from test_callbacks import *; "
    here += f"killed_and_resumed({str(tmp_path / 'run')!r}, pytest.MonkeyPatch(), 'trackio')"
    # It reads where its store is when it is imported, hence processes of their own.
    given = {"check": True, "text": True, "env": os.environ | {"TRACKIO_DIR": str(tmp_path / "store")}}
    subprocess.run([sys.executable, "-c", here], **given)
    found = subprocess.run([sys.executable, "-c", there], capture_output=True, **given).stdout
    (logs,) = json.loads(found.splitlines()[-1])
    assert [(r["step"], r["entropy"]) for r in logs] == [(r["env_steps"], r["entropy"]) for r in rows_of(whole[0])]


class Failing(Tracker):
    name = "failing"

    def __init__(self, at):
        self.at, self.told = at, []

    def _open(self, run):
        if self.at == 0:
            raise OSError("no server")

    def _tell(self, numbers, step):
        if step == 64 * self.at:
            raise ConnectionError("the server\nhas gone")
        self.told.append((step, numbers))

    def _close(self):
        self.told.append("closed")


@pytest.mark.parametrize(("at", "why"), [(0, "OSError: no server"), (5, "ConnectionError: the server has gone")])
def test_a_tracker_that_fails_warns_once_and_training_goes_on(at, why, whole, tmp_path):
    tracker = Failing(at)
    with pytest.warns(ApportionWarning, match=rf"failing failed \({why}\); training goes on without it") as caught:
        short(tmp_path / "run", tracker)
    assert len(caught) == 1
    assert same(tmp_path / "run", whole[0])
    assert len(tracker.told) == max(at - 1, 0)


def test_a_tracker_that_comes_late_is_told_what_it_missed(whole, tmp_path):
    short(tmp_path / "run", Witness(stop_at=6))
    tracker = Failing(-1)
    short(tmp_path / "run", tracker, resume=True)
    assert [step for step, _ in tracker.told[:-1]] == [r["env_steps"] for r in rows_of(whole[0])]
    assert tracker.told[-1] == "closed"
    assert all(x is not None for _, numbers in tracker.told[:-1] for x in numbers.values())


def test_names_and_packages_that_do_not_exist(monkeypatch, capsys):
    with pytest.raises(UnknownName, match="did you mean 'wandb'"):
        trackers("tensorboard,wanbd")
    with pytest.raises(ApportionError, match=r"there_is_none cannot be imported .*; pip install it"):
        needed("there_is_none", "pip install it")
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["train", "a2c", "CartPole-v1", "--log", "wandb"]) == 2
    error = capsys.readouterr().err
    assert "wandb cannot be imported" in error
    assert "pip install 'apportion[trackers]'" in error
    assert error.count("\n") == 1


# --- progress


def test_progress_fits_a_terminal_of_80_columns(monkeypatch):
    """The longest names and numbers there are take a line each of at most 80 characters."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    clock = itertools.chain([0.0, 0.0], itertools.repeat(30.0))
    monkeypatch.setattr(display_module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    row = {"return_mean": -12345.6, "kl": 1.2e-05, "clip_fraction": 0.25, "entropy": -12.34}
    with Display("ppo MountainCarContinuous-v0", 10_000_000) as display:
        display.row(row | {"explained_variance": -0.51})
        display.row(row | {"return_mean": None})
        display.at(0)
        display.at(1_234_567)
        assert display.signals == "return -12345.60  kl 1.2e-05  clip 0.25  entropy -12.34  explained -0.51"
        assert len(display.signals) <= 80
    text = terminal.getvalue()
    assert "1,234,567/10,000,000 steps" in text
    assert "41,152/s  213 s left" in text
    assert display.signals in text
