"""The study that the tests run: four runs of about a second each."""

from pathlib import Path

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
every = 50_000
thresholds = { "CartPole-v1" = 30 }
"""
SAME = ("metrics.jsonl", "checkpoint.safetensors", "policy.safetensors")


def bytes_of(out: Path) -> dict[str, bytes]:
    """Whatever of the runs must not depend on where and in how many pieces they ran."""
    return {f.relative_to(out).as_posix(): f.read_bytes() for f in sorted(out.glob("cells/*/*")) if f.name in SAME}
