"""The real command in a subprocess: exit codes, one-line errors with the nearest right name, JSON that parses."""

import json
import os
import subprocess
import sys
import time

import pytest

from apportion import cli
from apportion.audit.figures import Row
from apportion.cli import commands
from apportion.core.catalogue import METHODS


def run(*args, columns="200"):
    env = os.environ | {"COLUMNS": columns}
    return subprocess.run(
        [sys.executable, "-m", "apportion.cli", *args], capture_output=True, text=True, env=env, timeout=60
    )


def ok(*args, **kwargs):
    done = run(*args, **kwargs)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["methds"], "did you mean 'methods'?"),
        (["methods", "dr_grop"], "did you mean 'dr_grpo'?"),
        (["methods", "grpo", "--flt"], "did you mean '--flat'?"),
        (["--halp"], "did you mean '--help'?"),
        (["methods", "grpo", "extra"], "unexpected argument 'extra'"),
        (["train", "ppo"], "TASK"),
        (["train", "ppo", "CartPole-v1", "--seed", "x"], "--seed"),
        (["train", "ppo", "CartPole-v1", "--steps", "2.5"], "'2.5' is not a whole number of 1 or more"),
        (["audit", "ppo", "--group", "0"], "--group"),
        (["eval", "there-is-no-run"], "there is no folder there-is-no-run"),
        (["audit", "ppo", "--task", "tooy"], "did you mean 'toy'?"),
        (["trace", "grpo", "--prompt", "9"], "prompt is 9"),
        (["train", "rloo", "CartPole"], "unknown task 'CartPole'; did you mean 'CartPole-v1'?"),
        (["train", "rloo", "CartPole-v2"], "unknown task 'CartPole-v2'; did you mean 'CartPole-v1'?"),
        (["train", "rloo", "CartPole-v1", "--set", "setup.enws=2"], "did you mean 'envs'?"),
        (["train", "pppo", "CartPole-v1"], "did you mean 'ppo'?"),
        (["train", "distill", "CartPole-v1"], "distill on CartPole-v1: control learns from the task's reward"),
        (["train", "dpo", "CartPole-v1"], "dpo on CartPole-v1: control learns from the task's reward"),
        (["train", "ppo", "CartPole-v1", "--set", "value_loss.learning_rate=0.1"], "value_loss.learning_rate=None"),
        (["toy", "figurs"], "did you mean 'figures'?"),
        (["methods", "grpo", "--set", "scal=NoScale()"], "did you mean 'scale'?"),
        (["methods", "grpo", "--set", "scale=NoScal()"], "did you mean 'NoScale'?"),
        (["methods", "grpo", "--set", "scale=NoScal"], "did you mean 'NoScale'?"),
        (["methods", "grpo", "--set", "trust.hihg=0.3"], "did you mean 'high'?"),
        (["methods", "grpo", "--set", "trust=Clip(hihg=0.3)"], "did you mean 'high'?"),
        (["methods", "grpo", "--set", "trust=Clip(0.1, 0.1, 3, 4)"], "Clip takes low, high, dual"),
        (["methods", "grpo", "--set", "trust.low=wide"], "trust.low is 'wide'"),
        (["methods", "grpo", "--set", "update.b1=wide"], "update.b1 is 'wide'; it must be a finite number"),
        (["methods", "grpo", "--set", "update.learning_rate=1e999"], "update.learning_rate is inf"),
        (["methods", "grpo", "--set", "sampler.greedy=3"], "sampler.greedy is 3; it must be True or False"),
        (["methods", "grpo", "--set", "claim.kind=true"], "claim.kind is 'true'; it must be 'unbiased' or"),
        (["methods", "grpo", "--set", "name=mine"], "unknown part of grpo 'name'"),
        (["audit", "grpo", "--group", "1e9"], "at most 128 siblings"),
        (["trace", "grpo", "--seed", "-1"], "seed is -1"),
        (["toy", "figures", "--out", "/proc/nowhere"], "cannot write /proc/nowhere"),
        (["demo", "--out", "/proc/nowhere"], "cannot write /proc/nowhere"),
        (["methods", "grpo", "--set", "trust.low=2"], "Clip.low is 2"),
        (["methods", "grpo", "--set", "sampler.group=1"], "set sampler.group to 2 or more"),
        (["methods", "grpo", "--set", "sampler.group"], "PART.FIELD=VALUE"),
        (["train", "ppo", "CartPole-v1", "--set", "setup.hidden=64"], "setup.hidden is 64"),
        (["train", "ppo", "CartPole-v1", "--set", "setup.log_std=abc"], "setup.log_std is 'abc'"),
        (["train", "ppo", "CartPole-v1", "--set", "setup.envs=True"], "setup.envs is True"),
        (["train", "ppo", "HalfCheetah-v5", "--set", "setup.stagger=3"], "setup.stagger is 3"),
        (["methods", "grpo", "--set", "trust=open('x')"], "unknown part 'open'"),
        (["methods", "grpo", "--set", "trust=().__class__"], "cannot read"),
        (["methods", "--set", "scale=NoScale()"], "--set needs a method"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(args, says):
    done = run(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("apportion: error: ")
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


def test_help_names_every_command_and_answers_fast():
    text = ok("--help")
    for name in commands.RUN:
        assert f"\n    {name}" in text
    took = []
    for _ in range(5):
        start = time.perf_counter()
        ok("--help")
        took.append(time.perf_counter() - start)
    assert min(took) < 0.3


def test_help_imports_nothing_heavy():
    heavy = ("numpy", "jax", "torch", "rich", "plotly", "array_api_compat")
    code = f"import sys; from apportion.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n\
print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_family_as_a_table_and_as_blocks():
    wide, narrow = ok("methods"), ok("methods", columns="80")
    for name in METHODS:
        assert name in wide
        assert name in narrow
    assert "per-sample weight" in wide
    assert max(len(line) for line in narrow.splitlines()) <= 80


def test_a_card_names_parts_sources_claim_and_differences():
    text = ok("methods", "grpo")
    for piece in (
        "GroupMean()",
        "b_i = mean_j R_j",
        "Shao et al. 2024",
        "Claim",
        "biased",
        "Differs from the paper in",
    ):
        assert piece in text


def test_json_is_a_list_of_objects_with_every_part():
    everything = json.loads(ok("methods", "--json"))
    assert [m["name"] for m in everything] == list(METHODS)
    (grpo,) = json.loads(ok("methods", "grpo", "--json"))
    assert grpo == everything[list(METHODS).index("grpo")]
    for part in METHODS["grpo"].parts:
        assert set(grpo[part]) == {"type", "fields", "equation", "source", "scope"}
    assert grpo["sampler"]["fields"]["keep"]["type"] == "KeepAll"
    assert grpo["scale"]["fields"] == {"ddof": 0, "eps": 1e-6}
    assert grpo["claim"] == {"kind": "biased", "given": ""}
    assert {"symbol", "value", "source"} == set(grpo["settings"][0])


def test_set_changes_one_part_and_renames_the_variant():
    (m,) = json.loads(ok("methods", "dr_grpo", "--set", "baseline=LeaveOneOut()", "--set", "sampler.group=4", "--json"))
    assert m["baseline"]["type"] == "LeaveOneOut"
    assert m["sampler"]["fields"]["group"] == 4
    assert m["name"].startswith("dr_grpo[")


def test_a_doubtful_variant_is_one_line_of_warning():
    done = run("methods", "grpo", "--set", "sampler.group=2", "--json")
    assert done.returncode == 0
    assert done.stderr.startswith("apportion: warning: grpo[group=2]: with two siblings")
    assert done.stderr.count("\n") == 1


def test_flat_is_a_program():
    compile(ok("methods", "ppo", "--flat"), "flat", "exec")


def test_cite_prints_bibtex():
    assert "@misc{shao2024deepseekmath," in ok("methods", "grpo", "--cite")
    assert "@misc{schulman2017ppo," in ok("methods", "--cite")


def test_a_reader_that_leaves_causes_no_noise():
    code = f"{sys.executable} -m apportion.cli methods --json | head -1"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[\n"
    assert done.stderr == ""


def test_an_interrupt_is_one_line_and_130(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setitem(commands.RUN, "methods", interrupted)
    assert cli.main(["methods"]) == 130
    assert capsys.readouterr().err == "apportion: interrupted\n"


def test_audit_prints_lines_and_json():
    text = ok("audit", "dr_grpo")
    assert "claim holds" in text
    report = json.loads(ok("audit", "rloo", "--group", "4", "--json"))
    assert report["method"] == "rloo"
    assert report["claim_holds"] is True


@pytest.mark.parametrize(("ours", "code"), [(1.0, 0), (2.0, 1)], ids=["within", "out"])
def test_figures_print_their_table_and_fail_when_a_row_is_out(ours, code, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("apportion.audit.figures.figures", lambda out: [Row(1, "zero signal", 1.0, ours, 0.1)])
    assert cli.main(["toy", "figures", "--out", str(tmp_path / "new")]) == code
    text = capsys.readouterr().out
    assert "zero signal" in text
    assert f"{1 - code} of 1 compared rows within tolerance" in text


def test_trace_prints_one_group_from_reward_to_w():
    text = ok("trace", "dr_grpo", "--task", "toy", "--group", "2")
    assert "reward" in text
    assert "gate" in text


@pytest.mark.slow
def test_train_then_evaluate_then_refuse_the_full_folder(tmp_path):
    out = str(tmp_path / "run")
    summary = json.loads(ok("train", "rloo", "CartPole-v1", "--steps", "2e3", "--out", out, "--json"))
    needed = {"return_mean", "env_steps", "wall_seconds", "compile_seconds", "steps_per_second"}
    assert needed <= set(summary)
    assert summary["env_steps"] >= 2_000
    scored = json.loads(ok("eval", out, "--episodes", "3", "--json"))
    assert scored["episodes"] == 3
    again = run("train", "rloo", "CartPole-v1", "--steps", "2e3", "--out", out)
    assert again.returncode == 2
    assert "--resume" in again.stderr
