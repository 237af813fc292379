"""The demo in small: every contestant on both tasks, the table, and a page that needs no network."""

import json
import re

import numpy as np
import pytest

from apportion.study import pages, report
from apportion.study.demo import CARTPOLE, CONTESTANTS, LANGUAGE, MEASURED, Result, demo, on_language


def made_up(task, label, curves):
    rng = np.random.default_rng(0)
    drawn = {name: rng.uniform(0.1, 1.0, (3, 4)) for name in curves}
    return Result(label, task, np.arange(4.0), drawn, {name: y[:, -1] for name, y in drawn.items()}, 1234, 1.0, 0.5)


@pytest.fixture
def results():
    return [
        made_up(task, who.label, curves)
        for task, curves in ((CARTPOLE, ("return",)), (LANGUAGE, MEASURED))
        for who in CONTESTANTS
    ]


def test_the_page_asks_no_network_and_holds_every_curve(results):
    text = pages.demo_page(results, (0, 1, 2), 60.0)
    own = text.replace(re.search(r"<script>(/\*\*.*?)</script>", text, re.DOTALL)[1], "")
    assert not re.search(r"(src|href)=[\"'](?!#)", own)
    assert "http" not in own
    assert "{{" not in own
    charts = json.loads(re.search(r"const CHARTS = (.*);\n", text)[1])
    assert [len(c["curves"]) for c in charts] == [len(CONTESTANTS)] * 3
    assert "reinforce_pp_baseline" in own, "the family table"


def test_a_closing_tag_in_the_data_cannot_end_the_script():
    curve = report.Curve("</script><b>", [0.0], [1.0], [1.0], [1.0])
    text = report.page("t", "", [report.Chart("c", "t", "n", "x", "y", [curve])])
    assert "</script><b>" not in text


def test_the_interval_is_students_and_stays_in_range():
    x = np.array([1.0, 2.0, 3.0])
    low, high = pages.interval(x, -np.inf, np.inf)
    assert (round(low, 3), round(high, 3)) == (-0.484, 4.484)
    assert pages.interval(x, 0.0, 3.0) == (0.0, 3.0)


def test_the_table_fits_a_narrow_terminal(results, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    pages.show(results, 3)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines), "nothing is cut off"


def test_the_language_run_reports_every_update():
    seen = []
    result = on_language(CONTESTANTS[2], 20, (0, 1), lambda done, of: seen.append((done, of)))
    assert seen[-1] == (40, 40)
    assert result.curves["kl_to_optimum"].shape == (2, 21)


@pytest.mark.slow
def test_the_demo_runs_in_small(tmp_path, capsys, monkeypatch):
    # The workers find them by their place in the whole list.
    monkeypatch.setattr("apportion.study.demo.CONTESTANTS", CONTESTANTS[:2])
    monkeypatch.setattr("apportion.study.pages.CONTESTANTS", CONTESTANTS[:2])
    page = demo(tmp_path, steps=2_000, updates=20, seeds=(0, 1))
    out = capsys.readouterr().out
    for who in CONTESTANTS[:2]:
        assert who.label in out
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
