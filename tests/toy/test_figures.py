"""The published figures: exact ones whole, training runs in short. `apportion toy figures` runs them all in full."""

import dataclasses

import numpy as np
import pytest

from apportion.audit import figures as package
from apportion.audit.figures import collect, exact, passed, runs, table
from apportion.audit.figures.page import page
from apportion.audit.figures.rows import HEADER, Row, comma_separated, markdown
from apportion.toy import policy
from apportion.toy.language import language


@pytest.mark.parametrize(
    "make",
    [exact.zero_signal, exact.difficulty_weight, exact.two_actions, exact.groups, exact.variance_by_baseline],
    ids=lambda f: f.__name__,
)
def test_exact_figures(make):
    figure = make()
    assert figure.rows
    assert passed(figure.rows), table(figure.rows)
    assert figure.plot.series


def test_no_weight_is_above_the_bound():
    """The published 2.68 is; no group of eight can push harder than sqrt(7)."""
    success, weight = exact.difficulty(exact.GRPO.name)
    assert len(success) == 23
    assert (min(weight), max(weight)) == pytest.approx((1.857, 2.597), abs=1e-3)
    assert max(weight) < np.sqrt(7)


@pytest.mark.slow
def test_where_the_penalty_goes():
    jobs = [dataclasses.replace(j, every=500) for j in runs.placement_jobs()]
    results = {(j.figure, j.name): [runs.run(j)] for j in jobs}
    rows = runs.placement(results).rows
    assert passed(rows), table(rows)


@pytest.mark.slow
def test_exact_roads_arrive_in_a_quarter_of_the_steps():
    for job in runs.road_jobs(steps=250):
        if job.seed is None:
            assert runs.run(dataclasses.replace(job, every=250))[-1]["kl_to_optimum"] < 1e-3, job.name


@pytest.mark.slow
def test_sampled_roads_set_out_in_the_right_direction():
    """One seed and 150 steps of 1,000: those that arrive are on their way, GRPO as published turns off."""
    ends = {}
    for job in runs.road_jobs(steps=150, seeds=1):
        if job.seed is not None and job.options.get("pool", 0) <= 5_000:
            ends[job.name] = runs.run(dataclasses.replace(job, every=150))[-1]["kl_to_optimum"]
    arriving = ("distillation from pi*", "RLOO, KL in the reward", "PPO-RLHF", "GRPO, k1 in the reward")
    assert all(ends[name] < 0.06 for name in arriving), ends
    assert ends["GRPO as published"] > 0.15


@pytest.mark.slow
def test_length_bias_shows_early():
    work = [dataclasses.replace(j, every=100) for j in runs.length_jobs(steps=100, seeds=1)]
    results = {(j.figure, j.name): [runs.run(j)] for j in work}
    end = {name: rows[0][-1] for (_, name), rows in results.items()}
    assert end["GRPO"]["length_correct"] < end["constant normaliser, std kept"]["length_correct"] < 4.53
    assert end["GRPO"]["length_wrong"] > end["Dr. GRPO"]["length_wrong"] > 3.97


def test_two_processes_give_what_one_gives():
    work = [dataclasses.replace(j, every=2) for j in runs.length_jobs(steps=2, seeds=2)[:3]]
    seen = []
    together = collect(work, lambda done, total, seconds: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert together[3, "GRPO"] == [runs.run(work[0]), runs.run(work[1])]


def test_one_decision_is_the_same_task():
    lang = language("toy")
    flat = runs.one_decision(lang)
    assert policy.mass(flat, flat.reference) == pytest.approx(policy.mass(lang, lang.reference))
    assert policy.tilted(flat, 0.5).log_probs == pytest.approx(policy.tilted(lang, 0.5).log_probs)


def test_rows_say_what_is_out_and_what_is_a_correction():
    out = Row(1, "a|b", 1.0, 2.0, 0.5)
    wrong = Row(2, "c", 1.0, 2.0, 0.5, remark="why", correction=True)
    assert (out.verdict, wrong.verdict, Row(3, "d", None, 2.0, None).verdict) == ("OUT", "corrected", "-")
    assert not passed([out])
    assert passed([wrong])
    assert "0 of 1 compared rows" in table([out, wrong])
    assert "a\\|b" in markdown([out])
    assert comma_separated([out]).splitlines()[0] == ",".join(HEADER)


def test_files_and_page_need_no_network(tmp_path, monkeypatch):
    made = [exact.zero_signal(), exact.groups(), exact.two_actions()]
    monkeypatch.setattr(package, "reproduce", lambda progress: made)
    rows = package.figures(tmp_path / "deep" / "er", progress=lambda *_: None)
    assert len(rows) == sum(len(f.rows) for f in made)
    assert sorted(p.name for p in (tmp_path / "deep" / "er").iterdir()) == ["figures.csv", "figures.html", "figures.md"]
    html = page(made)
    assert 'src="http' not in html
    assert html.count("Plotly.newPlot(") >= 3
    assert html.count("plotly.js v") <= 2
