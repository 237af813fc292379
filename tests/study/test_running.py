"""Studies that run: what they leave, what a kill costs (nothing), what trouble does to the others (nothing)."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from small_study import FILE, bytes_of

from apportion import cli, study
from apportion.core.errors import ApportionError, InUse
from apportion.runs.folder import locked
from apportion.study import cells, watch
from apportion.study.budgets import Budget
from apportion.study.files import read
from apportion.study.runner import TUNING, run


def start(file, out, *more):
    command = [sys.executable, "-m", "apportion.cli", "study", str(file), "--out", str(out), "--workers", "2", *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def running(out):
    """The first cell that has logged something and is not over."""
    until = time.monotonic() + 180  # compiling takes long where much else runs
    while time.monotonic() < until:
        for row in (p.poll() for p in (watch.progress(out) if (out / "study.json").exists() else [])):
            if row.state == "running" and row.done:
                return row
        time.sleep(0.02)
    raise AssertionError("no cell got going")


def states(out):
    return sorted(json.loads(f.read_text())["state"] for f in out.glob("cells/*/cell.json"))


def test_what_a_study_leaves(undisturbed):
    assert states(undisturbed) == ["done"] * 4
    for name in ("study.json", "study.toml", "methods.json", "evaluations.parquet", "report.html", "report.md"):
        assert (undisturbed / name).stat().st_size > 0, name
    table = study.load(undisturbed)
    assert set(table["arm"]) == {"A2C", "RLOO"}
    assert (table["kind"] == "final").sum() == 4
    assert (table.loc[table["kind"] == "final", "episodes"] == 3).all()
    between = table[table["kind"] == "evaluation"]
    assert len(between) == 8, "every 50,000 steps of 120,000"
    assert (between["episodes"] == 3).all()
    assert between["return_low"].notna().all()
    assert "CartPole-v1: return of evaluations" in (undisturbed / "report.md").read_text()
    assert table["method"].str.contains("baseline = LeaveOneOut()", regex=False).any()
    for name in ("commit", "versions", "machine", "setup"):
        assert (table[name] != "").all(), name
    assert table.groupby(["arm", "seed"], observed=True)["steps"].max().ge(120_000).all()


def test_the_table_survives_without_its_runs(undisturbed, tmp_path):
    for name in ("study.json", "evaluations.parquet", "methods.json"):
        (tmp_path / name).write_bytes((undisturbed / name).read_bytes())
    kept, whole = study.load(tmp_path), study.load(undisturbed)
    assert kept.astype(str).equals(whole.astype(str))


def test_a_finished_study_is_not_run_again(undisturbed):
    before = bytes_of(undisturbed)
    run(read(FILE), undisturbed, source=FILE, quiet=True)
    assert bytes_of(undisturbed) == before
    assert {json.loads(f.read_text())["sessions"] for f in undisturbed.glob("cells/*/cell.json")} == {1}


def test_a_study_goes_on_from_its_table(undisturbed, tmp_path):
    """What a repository keeps of a study is enough: runs in the table are not run again, one that is not in it is."""
    for name in ("study.json", "study.toml", "methods.json"):
        (tmp_path / name).write_bytes((undisturbed / name).read_bytes())
    whole = study.load(undisturbed)
    lost = (whole["arm"] == "RLOO") & (whole["seed"] == 1)
    whole[~lost].to_parquet(tmp_path / "evaluations.parquet")
    assert [row.state for row in watch.progress(tmp_path)] == ["done", "done", "done", "waiting"]
    run(read(FILE), tmp_path, source=FILE, quiet=True)
    assert [f.name for f in tmp_path.glob("cells/*")] == ["rloo--CartPole-v1--seed1"]
    assert {name: bytes_of(undisturbed)[name] for name in bytes_of(tmp_path)} == bytes_of(tmp_path)
    both = [t.sort_values(["arm", "seed", "steps", "kind"]) for t in (study.load(tmp_path), whole)]
    columns = [c for c in whole if c not in ("seconds", "compile_seconds", "commit", "setup")]
    assert both[0][columns].astype(str).to_numpy().tolist() == both[1][columns].astype(str).to_numpy().tolist()


def test_another_study_is_refused(undisturbed):
    with pytest.raises(ApportionError, match=r"holds another study: steps.CartPole-v1 is 120000 there and 119000 here"):
        run(read(FILE.replace("120_000", "119_000")), undisturbed, quiet=True)
    with locked(undisturbed), pytest.raises(InUse):
        run(read(FILE), undisturbed, quiet=True)


def test_the_view_is_a_reader(undisturbed, capsys):
    screen = watch.Screen("s", watch.progress(undisturbed))
    from rich.console import Console

    console = Console(width=100)
    console.print(screen)
    shown = capsys.readouterr().out
    assert shown.count("done") == 5
    assert "480,000/480,000 steps" in shown
    watch.attach(undisturbed)  # everything is over: it returns
    assert not watch.runs(undisturbed)


@pytest.mark.slow
def test_killed_and_gone_on_with_it_ends_bitwise_the_same(undisturbed, study_file, tmp_path):
    out = tmp_path / "study"
    first = start(study_file, out)
    cell = running(out)
    os.kill(json.loads((cell.folder / "cell.json").read_text())["process"], signal.SIGKILL)
    _, told = first.communicate(timeout=90)
    assert first.returncode == 1
    assert "runs failed, " in told
    assert states(out) == ["done"] * 3 + ["failed"], "one process died; the others went on"
    assert "its process ended with exit code -9" in (out / "report.md").read_text()
    assert "3 of 4 runs have ended" in (out / "report.html").read_text()
    second = start(study_file, out)
    running(out)
    assert watch.runs(out)
    second.kill()  # the runner itself; its processes go with it
    second.communicate()
    third = start(study_file, out)  # at once: what the second one's process holds is waited for
    _, told = third.communicate(timeout=90)
    assert third.returncode == 0, told
    assert states(out) == ["done"] * 4
    assert bytes_of(out) == bytes_of(undisturbed)
    sessions = sorted(json.loads(f.read_text())["sessions"] for f in out.glob("cells/*/cell.json"))
    assert sessions == [1, 1, 1, 3], "nothing ran twice"


@pytest.mark.slow
def test_in_the_background_it_is_watched_and_interrupted(cache, tmp_path):
    file = tmp_path / "long.toml"
    file.write_text(FILE.replace("120_000", "3_000_000"))
    out = tmp_path / "study"
    shown, told = start(file, out, "--detach").communicate(timeout=60)
    assert told == ""
    pid = int(re.search(r"as process (\d+)", shown)[1])
    try:
        cell = running(out)
        assert watch.runs(out)
    finally:
        os.kill(pid, signal.SIGINT)
    for _ in range(600):
        if not watch.runs(out):
            break
        time.sleep(0.1)
    assert (out / cells.LOG).read_text().endswith("apportion: interrupted\n")
    assert cell.poll().state == "stopped"
    assert (cell.folder / "checkpoint.safetensors").exists()


def test_diverged_and_failed_runs_are_marked(cache, tmp_path, monkeypatch):
    """One process, so that training can be made to go wrong."""
    from apportion.control import run as control_run
    from apportion.core.errors import Diverged

    def broken(method, task, steps, seed, *_, **__):
        raise Diverged("non-finite") if seed == 0 else RuntimeError("out of luck")

    monkeypatch.setattr(control_run, "train_run", broken)
    todo = [c for c in read(FILE).cells() if c.arm == "A2C"]
    assert [cells.run_cell(c, tmp_path) for c in todo] == ["diverged", "failed"]
    assert cells.state(tmp_path / todo[1].folder)["message"] == "out of luck"
    assert "Traceback" in (tmp_path / todo[1].folder / cells.LOG).read_text()
    monkeypatch.setattr(control_run, "train_run", lambda *_, **__: None)
    assert [cells.run_cell(c, tmp_path) for c in todo] == ["diverged", "done"], "only what failed is tried again"


@pytest.mark.slow
def test_tuning_picks_and_the_picked_settings_run(cache, tmp_path):
    text = FILE.replace("120_000", "4_000").replace("seeds = 2", "seeds = 1")
    text = "\n".join(line for line in text.splitlines() if "A2C" not in line) + "\n"
    text += "[tuning]\ntrials = 2\nseeds = [50]\nsteps = 3_000\n"
    text += '[tuning.candidates]\n"update.learning_rate" = [1e-9, 1e-2]\n'
    plan = read(text)
    out = tmp_path / "study"
    run(plan, out, workers=2, quiet=True)
    told = json.loads((out / TUNING).read_text())
    assert len(told["arms"]) == 1
    for one in told["arms"]:
        areas = [t["areas"][0] for t in one["trials"]]
        assert one["picked"] == areas.index(max(areas))
        assert one["steps"] >= 2 * 3_000
        (folder,) = {c.folder for c in plan.cells({(one["arm"], one["task"]): ()}) if c.seed == 0}
        config = json.loads((out / folder / "config.json").read_text())
        settings = one["trials"][one["picked"]]["settings"]
        assert config["overrides"]["update.learning_rate"] == settings["update.learning_rate"]
    table = study.load(out)
    assert set(table["phase"]) == {"study", "tuning"}
    assert "environment steps in all" in (out / "report.md").read_text()
    for folder in ("cells", "tuning"):
        shutil.rmtree(out / folder)
    before = (out / TUNING).read_text(), (out / "results.csv").read_text()
    run(plan, out, workers=2, quiet=True)
    assert before == ((out / TUNING).read_text(), (out / "results.csv").read_text())
    assert not (out / "tuning").exists(), "its table and its choice were kept: nothing runs again"
    (out / TUNING).unlink()
    assert [row.state for row in watch.progress(out)] == ["waiting", "waiting", "done"], "trials without their choice"


def test_the_command_prints_its_plan_and_runs_nothing(study_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["study", str(study_file), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for piece in ("A2C, RLOO", "4 runs, 480,000 environment steps", "about", "MB"):
        assert piece in shown
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["study"], "name a study file or one of the presets"),
        (["study", "nowhere.toml"], "cannot read nowhere.toml"),
        (["study", "cartpole", "--wrokers", "2"], "did you mean '--workers'?"),
        (["study", "--attach", "nowhere"], "nowhere holds no study"),
        (["report", "nowhere"], "nowhere holds no study"),
    ],
)
def test_bad_commands_are_one_line(args, says, capsys):
    assert cli.main(args) == 2
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1


def test_a_folder_that_another_process_holds_fails_the_cell(cache, tmp_path, monkeypatch):
    cell = replace(read(FILE).cells()[0], budget=Budget("steps", 500))
    monkeypatch.setattr(cells, "PATIENCE", 0.0)
    with locked(Path(tmp_path / cell.folder)):
        assert cells.run_cell(cell, tmp_path) == "failed"
    assert "in use by another process" in cells.state(tmp_path / cell.folder)["message"]
