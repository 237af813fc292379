"""From made-up runs with known answers to the numbers, and to a page that a browser shows without network."""

import re
import shutil
import time

import numpy as np
import pytest
from made_up import noisy, write_study

from apportion import study
from apportion.core.errors import UnknownName
from apportion.study import findings, publish
from apportion.study.budgets import Budget
from apportion.study.files import read_record
from apportion.study.results import results
from apportion.study.table import area

LEVELS = {"ppo": 100.0, "rloo": 50.0}


def two(seeds=4, **evaluation):
    given = {"bounds": {"CartPole-v1": [0, 100]}} | evaluation
    return study.plan(["ppo", "rloo"], ["CartPole-v1"], seeds=seeds, steps=1_000, evaluation=given)


def found(plan, out, **changes):
    write_study(plan, out, **{"level": lambda c: LEVELS[c.arm]} | changes)
    return results(study.load(out), read_record(out))


def test_scores_areas_and_thresholds(tmp_path):
    r = found(two(thresholds={"CartPole-v1": 75}), tmp_path)
    assert r.arms == ["ppo", "rloo"]
    assert r.aggregate("ppo")["iqm"] == (1.0, 1.0, 1.0)
    assert r.aggregate("rloo")["median"] == (0.5, 0.5, 0.5)
    ppo, rloo = (r.on_task(a, "CartPole-v1") for a in r.arms)
    assert ppo["area"].value == pytest.approx(50.6)  # of 1 to 100, the first four held at 5
    assert (ppo["steps_to_threshold"], ppo["reached"]) == (750.0, 4)
    assert (rloo["steps_to_threshold"], rloo["reached"]) == (np.inf, 0)
    assert ppo["seconds"] == 12.0
    assert r.seconds["ppo", "CartPole-v1"][0][-1] == 10.0, "compilation is left out of the clock of curves"
    (pair,) = r.pairs()
    assert pair.better == (1.0, 1.0, 1.0)
    assert pair.difference == (0.5, 0.5, 0.5)
    assert pair.p == pair.corrected == pytest.approx(2 / 2**4)


def test_a_diverged_run_counts_as_the_worst_and_a_failed_one_is_counted_apart(tmp_path):
    states = {("ppo", 0): "diverged", ("ppo", 1): "failed"}
    r = found(two(), tmp_path, state=lambda c: states.get((c.arm, c.seed), "done"))
    assert sorted(r.scores["ppo", "CartPole-v1"]) == [0, 100, 100]
    assert r.on_task("ppo", "CartPole-v1")["diverged"] == 1
    assert r.curves["ppo", "CartPole-v1"][0][-1] == 0, "past the divergence the curve is at the lower bound"
    assert r.states["ppo", "CartPole-v1"] == {"diverged": 1, "failed": 1, "done": 2}
    (pair,) = r.pairs()
    assert pair.pairs == 3, "pairs share a seed"
    assert pair.difference.value == pytest.approx((-0.5 + 0.5 + 0.5) / 3)
    told = publish.write(tmp_path).with_name("report.md").read_text()
    assert "ppo, CartPole-v1, seed 1 | failed: it went wrong" in told
    assert "7 of 8 runs have ended" in told
    assert area(tmp_path / two().cells()[0].folder, Budget("steps", 1_000)) == -np.inf


def test_the_last_tenth_of_training(tmp_path):
    r = found(two(score="last_tenth"), tmp_path)
    assert r.scores["ppo", "CartPole-v1"][0] == pytest.approx(97.5)  # the rows at 950 and 1,000 steps


def test_without_bounds_the_study_gives_them(tmp_path):
    plan = study.plan(["ppo", "rloo"], ["Pendulum-v1"], seeds=2, steps=1_000)
    assert found(plan, tmp_path).bounds == {"Pendulum-v1": (50.0, 100.0)}


def test_an_unfinished_study_has_a_report_too(tmp_path):
    plan = two()
    write_study(plan, tmp_path, lambda c: LEVELS[c.arm])
    for cell in plan.cells():
        if cell.arm == "rloo":
            shutil.rmtree(tmp_path / cell.folder)
    text = publish.write(tmp_path).read_text()
    assert "4 of 8 runs have ended" in text
    assert "not on every task" in text


def test_a_figure_prints_its_numbers(tmp_path):
    write_study(two(), tmp_path, lambda c: LEVELS[c.arm])
    lines = publish.figure(tmp_path, "curves-CartPole-v1").splitlines()
    assert lines[0] == "method,environment steps,mean,low,high"
    assert lines[100] == "ppo,1000.0,100.0,100.0,100.0"
    assert publish.figure(tmp_path, "matrix").splitlines()[1] == 'ppo,-,"1 [1, 1]"'
    with pytest.raises(UnknownName, match="did you mean 'matrix'"):
        publish.figure(tmp_path, "matrx")


def test_every_part_names_the_command_of_its_numbers(tmp_path):
    write_study(two(), tmp_path, lambda c: LEVELS[c.arm])
    text, told = (publish.write(tmp_path).with_name(n).read_text() for n in ("report.html", "report.md"))
    names = re.findall(r"--figure ([\w-]+)", told)
    assert len(names) == 8
    for name in names:
        assert f"--figure {name}<" in text
        assert publish.figure(tmp_path, name)
    assert "the card of ppo" in text
    assert "ppo,CartPole-v1,area," in (tmp_path / "results.csv").read_text()


def test_the_first_parts_are_the_headline_and_the_tasks(tmp_path):
    r = found(two(), tmp_path)
    head, task = findings.headline(r), findings.of_task(r, "CartPole-v1")
    assert head.rows[0] == ["ppo", "1 [1, 1]", "1 [1, 1]", "1 [1, 1]", "4", "0", "0"]
    assert task.rows[1][4:6] == [">1,000", "0 of 4"]


def test_pairs_task_by_task_are_in_the_tasks_own_units(tmp_path):
    plan = study.plan(["ppo", "rloo"], ["CartPole-v1", "Pendulum-v1"], seeds=3, steps=1_000)
    level = {"CartPole-v1": 2.0, "Pendulum-v1": 10.0}
    r = found(plan, tmp_path, level=lambda c: LEVELS[c.arm] * level[c.task])
    assert r.pairs_on("CartPole-v1") == {("ppo", "rloo"): pytest.approx((100, 100, 100))}
    assert findings.paired_by_task(r).rows == [["ppo – rloo", "100 [100, 100]", "500 [500, 500]"]]


@pytest.fixture(scope="module")
def five_hundred(tmp_path_factory):
    arms, tasks = (
        ["a2c", "dapo", "grpo", "ppo", "rloo"],
        ["CartPole-v1", "Acrobot-v1", "HalfCheetah-v5", "X-v0", "Y-v0"],
    )
    plan = study.plan(arms, tasks, seeds=20, steps=10_000, title="Five hundred runs")
    return write_study(plan, tmp_path_factory.mktemp("many"), noisy(), rows=200)


@pytest.mark.slow
def test_five_hundred_runs_take_ten_seconds_and_ten_megabytes(five_hundred):
    began = time.process_time()
    page = publish.write(five_hundred)
    assert time.process_time() - began < 10
    assert page.stat().st_size < 10e6
    assert (five_hundred / "evaluations.parquet").stat().st_size < 5e6


@pytest.mark.slow
@pytest.mark.browser
def test_a_browser_shows_it_without_network_by_keyboard_and_on_a_phone(five_hundred):
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium here")
    page_file = publish.write(five_hundred)
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium)
        page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme="dark")
        trouble, asked = [], []
        page.on("pageerror", lambda e: trouble.append(str(e)))
        page.on("request", lambda r: asked.append(r.url))
        page.goto(page_file.as_uri(), timeout=120_000)
        page.wait_for_selector("#clock-Y-v0 svg.main-svg", timeout=120_000)
        assert not trouble
        assert asked == [page_file.as_uri()], "nothing but the file itself is asked for"
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, "nothing sticks out of a phone's screen"
        assert page.locator(".chart svg.main-svg").first.is_visible()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.keyboard.press("Tab")  # the skip link, then the theme
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
        page.locator("summary", has_text="ppo: card and audit").focus()
        page.keyboard.press("Enter")
        assert page.get_by_text("the card of ppo").is_visible()
        browser.close()
