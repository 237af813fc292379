"""Studies of language models: what they leave and report, what a kill costs, what is refused before anything starts."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from small_lm import arm, bytes_of, plan, text, write_given

from apportion import study
from apportion.cli import main
from apportion.core.errors import ApportionError
from apportion.study import cells, estimate, publish, runner, watch
from apportion.study.files import read, read_record, record
from apportion.study.results import results
from apportion.study.runner import TUNING, check, printed_plan, run

pytest.importorskip("transformers")

ARMS = ", ".join([arm("dr_grpo", "Dr. GRPO"), arm("grpo", "GRPO", seeds="[1]"), arm("dapo", "DAPO", seeds="[1]")])


def here(told, out):
    """Run a study in this process: starting others takes longer than such runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "run_local", lambda todo, root, _: (c for c in todo if cells.run_cell(c, root)))
        return run(told, out, quiet=True)


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    return write_given(tmp_path_factory.mktemp("given"))


@pytest.fixture(scope="module")
def whole(given, tmp_path_factory):
    """The folder of a study of four runs that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "study"
    here(plan(given, ARMS, seeds=2), out)
    return out


@pytest.fixture(autouse=True)
def _threads():
    """Runs in this process leave PyTorch's number of threads as it was."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_an_arm_may_have_fewer_seeds(given):
    told = plan(given, ARMS, seeds=2)
    assert [c.name for c in told.cells()] == [
        "Dr. GRPO on digits, seed 0",
        *(f"{label} on digits, seed 1" for label in ("Dr. GRPO", "GRPO", "DAPO")),
    ]
    assert record(told)["arms"]["GRPO"]["seeds"] == [1]
    assert "seeds" not in record(told)["arms"]["Dr. GRPO"]


def test_the_table_holds_training_and_evaluations(whole):
    table = study.load(whole)
    assert set(table["state"]) == {"done"}
    mine = table[(table["arm"] == "Dr. GRPO") & (table["seed"] == 1)]
    assert list(mine.loc[mine["kind"] == "evaluation", "completions"]) == [0, 16, 32]
    assert list(mine.loc[mine["kind"] == "training", "completions"]) == [8 * k for k in range(1, 7)]
    (final,) = mine[mine["kind"] == "final"].to_dict("records")
    assert (final["steps"], final["completions"], final["episodes"]) == (6, 48, 2)
    assert final["accuracy_low"] <= final["accuracy"] <= final["accuracy_high"]
    assert (mine.loc[mine["kind"] == "training", "episodes"] == 8).all()
    assert mine["length_wrong"].notna().any()
    assert "torch" in final["versions"]
    assert "scale = NoScale()" in final["method"]
    for arm_, run_ in table.groupby("arm", observed=True):
        assert run_["completions"].max() >= 48, arm_
    publish.write(whole)
    kept = study.load(whole).astype(str)
    assert kept.equals(table.astype(str))


def test_scores_are_accuracies_between_0_and_1(whole):
    found = results(study.load(whole), read_record(whole))
    assert found.measures == {"digits": "accuracy"}
    assert found.bounds == {"digits": (0.0, 1.0)}
    table = study.load(whole)
    last = table[(table["kind"] == "final") & (table["arm"] == "Dr. GRPO")].sort_values("seed")
    assert list(found.scores["Dr. GRPO", "digits"]) == list(last["accuracy"])
    first = table[(table["kind"] == "training") & (table["arm"] == "GRPO")].iloc[0]
    assert found.curves["GRPO", "digits"][0][0] == first["accuracy"]
    pairs = {(p.first, p.second): p.pairs for p in found.pairs()}
    assert pairs == {("Dr. GRPO", "GRPO"): 1, ("Dr. GRPO", "DAPO"): 1, ("GRPO", "DAPO"): 1}, "shared seeds only"


def test_the_report_shows_what_language_models_are_looked_at_by(whole):
    publish.write(whole)
    told, page = ((whole / name).read_text() for name in ("report.md", "report.html"))
    assert "runs have ended; the others" not in told, "an arm with fewer seeds is not incomplete"
    for name in ("curves-digits", "accuracy-digits", "length-right-digits", "length-wrong-digits", "clock-digits"):
        assert f"--figure {name}`" in told
        assert f'id="{name}"' in page
        assert publish.figure(whole, name).count("\n") > 100
    assert publish.figure(whole, "curves-digits").startswith("method,completions,mean")
    assert "the accuracy of the trained language model on its evaluation data" in told
    assert "completions to threshold" in told
    assert "48 completions a run" in told
    assert "Dr. GRPO: card and audit" in told


def test_the_view_counts_completions(whole):
    rows = [p.poll() for p in watch.progress(whole)]
    assert {r.state for r in rows} == {"done"}
    assert all(r.rate > 0 and r.best is not None for r in rows)
    assert watch.Screen("s", rows).headline().endswith("192/192 completions")


def test_without_evaluation_data_the_last_tenth_of_training_counts(given, tmp_path):
    told = plan(given, arm("dr_grpo", "A"), seeds=2, reward="letters", evaluated=False, budget="tokens = 300")
    here(told, tmp_path / "study")
    table = study.load(tmp_path / "study")
    assert set(table["kind"]) == {"training"}
    found = results(table, read_record(tmp_path / "study"))
    assert found.measures == {"digits": "return_mean"}
    mine = table[table["seed"] == 0]
    late = mine[mine["tokens"] > 270]
    assert late["tokens"].max() >= 300
    expected = np.average(late["return_mean"], weights=late["episodes"])
    assert found.scores["A", "digits"][0] == pytest.approx(expected)
    assert "response tokens" in (tmp_path / "study" / "report.md").read_text()


class Killed(BaseException):
    """Stands for SIGKILL between two steps."""


def test_killed_and_gone_on_with_it_ends_bitwise_the_same(whole, given, tmp_path, monkeypatch):
    from apportion.lm import checkpoint
    from apportion.lm import run as lm_run

    cell = plan(given, ARMS, seeds=2).cells()[0]
    real = checkpoint.save

    def save(folder, loop, logs):
        real(folder, loop, logs)
        if loop.step == 3:
            raise Killed

    monkeypatch.setattr(lm_run, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(checkpoint, "save", save)
    with pytest.raises(Killed):
        cells.run_cell(cell, tmp_path)
    assert cells.state(tmp_path / cell.folder)["state"] == "running"
    monkeypatch.setattr(checkpoint, "save", real)
    assert cells.run_cell(cell, tmp_path) == "done"
    assert cells.state(tmp_path / cell.folder)["sessions"] == 2
    undisturbed = bytes_of(whole)
    for name, found in bytes_of(tmp_path).items():
        assert found == undisturbed[name], name


@pytest.mark.slow
def test_interrupted_it_ends_its_step_and_saves(given, tmp_path):
    file, out = tmp_path / "study.toml", tmp_path / "study"
    file.write_text(text(given, arm("dr_grpo", "A"), budget="completions = 100_000", evaluated=False))
    command = [sys.executable, "-m", "apportion.cli", "study", str(file), "--out", str(out), "--workers", "2"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not ((out / "study.json").exists() and watch.progress(out)[0].poll().done):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "language models end their step, then save" in said
    (cell,) = out.glob("cells/*")
    assert cells.state(cell)["state"] == "stopped"
    assert list(cell.glob("checkpoint-*"))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_each_of_several_processes_keeps_to_one_core_and_one_alone_has_all(workers, given, tmp_path):
    told = plan(given, arm("dr_grpo", "A"), seeds=2, reward="threads", budget="completions = 8", evaluated=False)
    run(told, tmp_path / "study", workers=workers, quiet=True)
    cores = {float(os.cpu_count() or 1)} if workers == 1 else {1.0}
    assert set(study.load(tmp_path / "study")["return_mean"]) == cores


def test_a_gradient_that_is_not_finite_is_a_diverged_run(given, tmp_path):
    told = plan(given, '{ method = "dr_grpo", set = { "sampler.group" = 4, "update.learning_rate" = 1e30 } }')
    (cell,) = told.cells()
    assert cells.run_cell(cell, tmp_path) == "diverged"
    assert "lower update.learning_rate" in cells.state(tmp_path / cell.folder)["message"]


def test_a_reward_that_always_fails_fails_its_run(given, tmp_path):
    (given / "broken.py").write_text("def no(completion):\n    raise ValueError('out of luck')\n")
    (cell,) = plan(given, arm("dr_grpo")).cells()
    cell = replace(cell, lm={**cell.lm, "reward": f"{given}/broken.py:no"})
    assert cells.run_cell(cell, tmp_path) == "failed"
    assert "out of luck" in cells.state(tmp_path / cell.folder)["message"]


def test_tuning_reaches_methods_and_setup(given, tmp_path):
    more = (
        '[tuning]\ntrials = 2\nseeds = [50]\ncompletions = 16\n[tuning.candidates]\n"setup.prompts" = [1, 2]\n'
        '"update.learning_rate" = [1e-2]\n'
    )
    told = plan(given, arm("dr_grpo", "A"), more=more)
    assert {c.budget for c in told.tuning_cells()} == {("completions", 16)}
    here(told, tmp_path / "study")
    (one,) = json.loads((tmp_path / "study" / TUNING).read_text())["arms"]
    assert one["completions"] >= 32
    (folder,) = (tmp_path / "study").glob("cells/*")
    picked = one["trials"][one["picked"]]["settings"]["setup.prompts"]
    assert json.loads((folder / "config.json").read_text())["setup"]["prompts"] == int(picked)
    assert f"{one['completions']} completions in all" in (tmp_path / "study" / "report.md").read_text()


def test_the_plan_says_what_it_does_not_know(given):
    told = printed_plan(plan(given, ARMS, seeds=2), 2)
    assert "4 runs, 192 completions" in told
    assert "no estimate for digits" in told
    assert "about 0 s" not in told
    assert "1 of GRPO" in told


def test_the_time_of_a_preset_is_known_and_of_another_model_not():
    file = (
        'methods = ["dr_grpo"]\ntasks = ["sums"]\nseeds = 2\ncompletions = 1280\n[lm.sums]\npreset = "lm_arithmetic"\n'
    )
    time, unknown = estimate.seconds(read(file).cells(), 1)
    assert (time, unknown) == (2 * (estimate.START_SECONDS + 1280 / estimate.rates()["lm_arithmetic"]), [])
    assert estimate.seconds(read(file + 'model = "mine"\n').cells(), 1) == (0.0, ["sums"])
    assert estimate.seconds(read(file.replace("completions", "tokens")).cells(), 1) == (0.0, ["sums"])


CONTROL = 'methods = ["ppo"]\ntasks = ["CartPole-v1"]\nseeds = 1\n'


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"budget": "steps = 80"}, "steps is 80 for digits, but digits is a language-model task; give its budget as"),
        ({"budget": "completions = 80\ntokens = 10"}, "tokens is 10 for digits, which has completions = 80 already"),
        ({"budget": "completions = 0"}, "completions is 0 for digits; it must be a whole number of completions"),
        ({"budget": ""}, "the study lacks 'completions': digits is a language-model task"),
        ({"methods": arm("grpo", seeds="[3]")}, "seeds of grpo holds 3, which is none of the study's seeds"),
        ({"more": "[lm.didgits]\n"}, "did you mean 'digits'?"),
        ({"more": "[tuning]\ntrials = 1\nseeds = [9]\nsteps = 4\ncandidates = {}\n"}, "tuning.steps is 4 for digits"),
    ],
)
def test_bad_files_are_refused_by_name(words, says, given):
    with pytest.raises(ApportionError) as error:
        read(text(given, **words))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("file", "says"),
    [
        (CONTROL + "completions = 80", "CartPole-v1 is a control task, as there is no table [lm.CartPole-v1]"),
        (CONTROL + "completions = 80\n[lm]\nCartPole-v1 = 3", "lm.CartPole-v1 is 3; it must be a table"),
        (
            CONTROL + "completions = 80\n[lm.CartPole-v1]\nsteps = 3",
            "lm.CartPole-v1 holds steps = 3; the budget is the",
        ),
    ],
)
def test_what_is_no_language_model_task_is_said(file, says):
    with pytest.raises(ApportionError) as error:
        read(file)
    assert says in str(error.value)


def test_a_python_object_is_no_setting(given):
    with pytest.raises(ApportionError, match=r"lm.digits.reward is function; .* FILE.py:FUNCTION"):
        study.plan(["grpo"], ["digits"], 1, completions=8, lm={"digits": {"reward": lambda completion: 1.0}})


@pytest.mark.parametrize(
    ("words", "more", "says"),
    [
        ({"methods": '"ppo"'}, "", "ppo on digits: ppo needs a critic"),
        ({"methods": '"dpo"'}, "", "dpo on digits: dpo"),
        ({}, 'preset = "lm_arithmetc"', "unknown preset 'lm_arithmetc'; did you mean 'lm_arithmetic'?"),
        ({}, "promts = 3", "unknown setting 'promts'; did you mean 'prompts'?"),
        ({}, 'reference = "x"', "dr_grpo has no KL penalty, so it reads no reference"),
        ({"methods": '{ method = "grpo", set = { "setup.tokens" = 9 } }'}, "", "setup.tokens is 9; the budget is the"),
        ({"methods": '{ method = "grpo", set = { "sampler.grup" = 9 } }'}, "", "did you mean 'group'?"),
        ({"reward": "no_such"}, "", "no_such"),
    ],
)
def test_what_a_task_cannot_run_is_refused_before_anything_starts(words, more, says, given, tmp_path, capsys):
    file = tmp_path / "bad.toml"
    file.write_text(text(given, **words) + more)
    assert main(["study", str(file), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_method_of_language_models_alone_is_refused_on_control(given):
    mixed = text(given, '"distill"', more="steps = 100").replace('["digits"]', '["CartPole-v1", "digits"]')
    with pytest.raises(ApportionError, match="distill on CartPole-v1: control learns from the task's reward"):
        check(read(mixed))


def test_without_the_extra_one_line_says_how_to_have_it(given, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ApportionError, match=r"digits is a .* needs transformers: pip install 'apportion\[lm\]'"):
        check(plan(given))


def test_torch_is_loaded_for_language_models_only(tmp_path):
    code = (
        "import sys; from apportion import study; from apportion.study import cluster, files, publish, runner, watch\n"
        f"plan = files.read({CONTROL + 'steps = 100'!r}); runner.check(plan); runner.printed_plan(plan, 1)\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
