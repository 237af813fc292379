"""A study of a random language model of a few thousand weights, and the same without evaluation data."""

import json

from apportion.study.files import read

SAME = ("metrics.jsonl", "samples.jsonl", "model/model.safetensors")


def write_given(place):
    """A model, data and rewards on the disk, as a person has them."""
    from apportion.lm import tiny

    tiny.write(place / "model", width=16, layers=1, heads=2, key_heads=1, context=64)
    rows = [{"prompt": str(a), "answer": str(a)} for a in range(10)]
    (place / "digits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "mine.py").write_text(
        "def digit(completion):\n    return float(any(c.isdigit() for c in completion))\n\n\n"
        "def letters(completion):\n    return sum(c.isalpha() for c in completion) / 8\n\n\n"
        "def threads(completion):\n    import torch\n\n    return float(torch.get_num_threads())\n"
    )
    return place


def text(place, methods='"dr_grpo"', seeds=1, budget="completions = 48", reward="digit", evaluated=True, more=""):
    """A study file of the task `digits`."""
    unseen = 'eval_data = [{ prompt = "x", answer = "x" }, { prompt = "y", answer = "y" }]\neval_every = 2\n'
    return f"""
methods = [{methods}]
tasks = ["digits"]
seeds = {seeds}
{budget}
{more}
[lm.digits]
model = "{place}/model"
data = "{place}/digits.jsonl"
reward = "{place}/mine.py:{reward}"
prompts = 2
max_tokens = 4
{unseen if evaluated else ""}"""


def arm(method, label="", **more):
    """A table of `methods`, with groups of 4."""
    settings = ['set = { "sampler.group" = 4, "update.learning_rate" = 0.01 }']
    settings += [f"{key} = {value}" for key, value in more.items()]
    return f'{{ method = "{method}", label = "{label or method}", {", ".join(settings)} }}'


def plan(*args, **changes):
    return read(text(*args, **changes))


def bytes_of(out):
    """Whatever of the runs must not depend on where and in how many pieces they ran."""
    return {f"{f.name}/{name}": (f / name).read_bytes() for f in sorted(out.glob("cells/*")) for name in SAME}
