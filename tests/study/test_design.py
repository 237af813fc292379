"""What a study file may say, and that what it may not is named before anything runs."""

import pytest

from apportion import methods
from apportion.core.errors import ApportionError
from apportion.core.parts import LeaveOneOut
from apportion.study import Arm, lm_runs, plan
from apportion.study.files import presets, read, record, source
from apportion.study.runner import check, printed_plan
from apportion.study.tuning import Tuning

SMALLEST = 'methods = ["ppo", "dr_grpo"]\ntasks = ["CartPole-v1"]\nseeds = 2\nsteps = 60000\n'
TUNED = (
    SMALLEST + '[tuning]\ntrials = 2\nseeds = [7]\n[tuning.candidates]\n"update.learning_rate" = [1e-3, 1e-2, 3e-2]\n'
)


def test_the_smallest_file():
    study = read(SMALLEST)
    cells = study.cells()
    assert [c.name for c in cells[:2]] == ["ppo on CartPole-v1, seed 0", "dr_grpo on CartPole-v1, seed 0"]
    assert len({c.folder for c in cells}) == len(cells) == 4
    assert {c.budget for c in cells} == {("steps", 60_000)}
    assert study.tuning_cells() == []


def test_methods_with_changed_parts():
    study = plan(
        [
            methods.ppo,
            methods.dr_grpo.replace(baseline=LeaveOneOut()),
            Arm("mine", methods.rloo, (("sampler.group", 4),)),
            {"label": "own", "method": "grpo", "set": {"sampler.start": "independent", "baseline": "LeaveOneOut()"}},
        ],
        ["CartPole-v1"],
        seeds=[3, 5],
        steps={"CartPole-v1": 100},
    )
    assert [a.label for a in study.arms] == ["ppo", "dr_grpo[baseline=LeaveOneOut()]", "mine", "own"]
    assert study.arms[3].changes == (("sampler.start", "independent"), ("baseline", LeaveOneOut()))
    check(study)


def test_tuning_runs_come_on_seeds_of_their_own():
    study = read(TUNED)
    trials = study.tuning_cells()
    assert len(trials) == 2 * 2
    assert {c.seed for c in trials} == {7}
    assert len({c.folder for c in trials}) == 4
    chosen = {("ppo", "CartPole-v1"): (("update.learning_rate", 0.03),)}
    compared = study.cells(chosen)
    assert {c.arm for c in compared} == {"ppo"}, "an arm without a choice is not compared"
    assert all(c.settings == chosen["ppo", "CartPole-v1"] for c in compared)


def test_two_paths_may_move_together():
    drawn = Tuning(3, (1,), (("setup.envs, sampler.horizon", [[2, 8], [4, 4]]), ("entropy", [0, 0.1]))).drawn("mine")
    assert len(drawn) == len(set(drawn)) == 3
    assert all(dict(d)["setup.envs"] * dict(d)["sampler.horizon"] == 16 for d in drawn)


def test_a_task_may_have_fewer_seeds():
    text = SMALLEST.replace('["CartPole-v1"]', '["CartPole-v1", "Acrobot-v1"]').replace("seeds = 2", "")
    study = read(text + '[seeds]\n"CartPole-v1" = 3\n"Acrobot-v1" = [4]\n')
    assert study.seeds == (0, 1, 2, 4)
    assert {(c.task, c.seed) for c in study.cells()} == {*(("CartPole-v1", s) for s in range(3)), ("Acrobot-v1", 4)}
    assert record(study)["task_seeds"] == {"CartPole-v1": [0, 1, 2], "Acrobot-v1": [4]}
    assert "  seeds    4 on Acrobot-v1\n" in printed_plan(study, 1)


@pytest.mark.parametrize("name", presets())
def test_presets_are_studies_that_can_run(name):
    study = read(*reversed(source(name)))
    if study.lm:  # its methods and settings; its model takes long to load
        assert all(lm_runs.method(cell) for cell in study.cells())
    else:
        check(study)
    if study.tuning is not None:
        assert {len(study.tuning.drawn(a.label, a.tune)) for a in study.arms} == {study.tuning.trials}
        assert not set(study.tuning.seeds) & set(study.seeds)


def test_the_record_tells_studies_apart():
    assert record(read(SMALLEST)) == record(read(SMALLEST))
    assert record(read(SMALLEST)) != record(read(SMALLEST.replace("60000", "60001")))
    assert record(read(TUNED)) != record(read(TUNED.replace("3e-2", "4e-2")))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (SMALLEST + "sedds = 3", "unknown key of the study 'sedds'; did you mean 'seeds'?"),
        (SMALLEST.replace("steps = 60000", ""), "the study lacks 'steps'"),
        (SMALLEST.replace("60000", "0"), "steps is 0 for CartPole-v1"),
        (SMALLEST.replace("60000", "true"), "steps is True for CartPole-v1"),
        (SMALLEST.replace("seeds = 2", "seeds = 0"), "seeds is 0"),
        (SMALLEST.replace("seeds = 2", "seeds = [1, 1]"), "seeds holds 1 twice"),
        (SMALLEST.replace("seeds = 2", "") + '[seeds]\n"CartPole-v0" = 1', "unknown task in seeds 'CartPole-v0'"),
        (SMALLEST.replace("seeds = 2", "seeds = {}"), "seeds has no number for CartPole-v1"),
        (SMALLEST.replace("seeds = 2", 'seeds = { "CartPole-v1" = 0 }'), "seeds of CartPole-v1 is 0"),
        (SMALLEST.replace('"ppo", ', '"pppo", '), "did you mean 'ppo'?"),
        (SMALLEST.replace('"ppo", ', '"dr_grpo", '), "methods holds 'dr_grpo' twice; give each its own label"),
        (SMALLEST.replace('"ppo", ', '{ label = "x" }, '), "give a name, or a table"),
        (SMALLEST.replace('"ppo", ', '{ method = "ppo", st = {} }, '), "did you mean 'set'?"),
        (SMALLEST.replace("tasks = [", "tasks = 3 #"), "tasks is 3"),
        (SMALLEST + "[evaluation]\nepisods = 3", "did you mean 'episodes'?"),
        (SMALLEST + "[evaluation]\nepisodes = 0", "evaluation.episodes is 0"),
        (SMALLEST + "[evaluation]\nevery = 0", "evaluation.every is 0; it must be a whole number of environment steps"),
        (SMALLEST + '[evaluation]\nscore = "best"', "unknown evaluation.score 'best'"),
        (SMALLEST + '[evaluation.bounds]\n"CartPole-v1" = [5, 5]', "evaluation.bounds of CartPole-v1 is [5, 5]"),
        (SMALLEST + '[evaluation.bounds]\n"CartPole-v0" = [0, 5]', "did you mean 'CartPole-v1'?"),
        (SMALLEST + "steps = 3", "is not TOML"),
        (TUNED.replace("[7]", "[1]"), "tuning.seeds and seeds share 1"),
        (
            TUNED.replace("trials = 2", "trials = 4"),
            "ppo has 3 combinations of candidates, fewer than tuning.trials = 4",
        ),
        (TUNED.replace("trials = 2\n", ""), "tuning lacks 'trials'"),
        (TUNED.replace("[1e-3, 1e-2, 3e-2]", "3"), "it must be a list of values"),
    ],
)
def test_bad_files_are_refused_by_name(text, says):
    with pytest.raises(ApportionError) as error:
        read(text)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"ppo"', '"distill"', "distill on CartPole-v1: control learns from the task's reward"),
        ('"CartPole-v1"', '"CartPole-v9"', "did you mean 'CartPole-v1'?"),
        (
            '"ppo"',
            '{ method = "ppo", set = { "sampler.minibatches" = 7 } }',
            "do not divide into sampler.minibatches=7",
        ),
        ('"ppo"', '{ method = "ppo", set = { "sampler.horzon" = 7 } }', "did you mean 'horizon'?"),
        ("seeds", 'imports = ["no_such_module"]\nseeds', "imports names no_such_module"),
    ],
)
def test_what_a_task_cannot_run_is_refused_before_anything_runs(old, new, says):
    with pytest.raises(ApportionError) as error:
        check(read(SMALLEST.replace(old, new)))
    assert says in str(error.value)


def test_a_task_of_ones_own_may_lie_beside_the_file(tmp_path):
    (tmp_path / "tasks_of_mine.py").write_text(
        "import gymnasium\nfrom gymnasium.envs.classic_control.cartpole import CartPoleEnv\n"
        "gymnasium.register('Mine-v0', entry_point=CartPoleEnv, max_episode_steps=20)\n"
    )
    file = tmp_path / "mine.toml"
    file.write_text(SMALLEST.replace("CartPole-v1", "Mine-v0") + 'imports = ["tasks_of_mine"]')
    name, text = source(str(file))
    assert name == "mine"
    check(read(text, name))


def test_a_file_that_is_not_there():
    with pytest.raises(ApportionError, match=r"cannot read nowhere\.toml"):
        source("nowhere.toml")
    with pytest.raises(ApportionError, match="did you mean 'cartpole'"):
        source("cartpol")
