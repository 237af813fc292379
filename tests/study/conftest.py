"""A study of four runs of a second each, run once where nothing disturbs it."""

from pathlib import Path

import pytest

from apportion.study.files import read
from apportion.study.runner import run

FILE = """
title = "Two small methods"
methods = [
  { label = "A2C", method = "a2c", set = { "setup.hidden" = [8], "setup.envs" = 4, "sampler.horizon" = 16 } },
  { label = "RLOO", method = "rloo", set = { "setup.hidden" = [8], "sampler.group" = 4, "sampler.horizon" = 40 } },
]
tasks = ["CartPole-v1"]
seeds = 2
steps = 120_000

[evaluation]
episodes = 3
thresholds = { "CartPole-v1" = 30 }
"""
SAME = ("metrics.jsonl", "checkpoint.safetensors", "policy.safetensors")


def bytes_of(out: Path) -> dict[str, bytes]:
    """Whatever of the runs must not depend on where and in how many pieces they ran."""
    return {f.relative_to(out).as_posix(): f.read_bytes() for f in sorted(out.glob("cells/*/*")) if f.name in SAME}


@pytest.fixture(scope="package")
def cache(tmp_path_factory):
    """Programs of these tests are made in a hurry and kept in a folder of their own, for their processes too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("APPORTION_CACHE", str(tmp_path_factory.mktemp("xla")))
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        yield


@pytest.fixture(scope="session")
def study_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "small.toml"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="package")
def undisturbed(cache, tmp_path_factory):
    """The study's folder after it ran with two processes, one runner, no trouble."""
    out = tmp_path_factory.mktemp("undisturbed") / "study"
    run(read(FILE), out, workers=2, source=FILE, quiet=True)
    return out
