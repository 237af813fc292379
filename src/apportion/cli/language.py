"""`apportion train METHOD lm`: the options of language models, each a field of `lm.setup.Setup`, and the command."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from apportion.core.errors import ApportionError

TASK = "lm"


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None


def _seconds(text: str) -> float | None:
    return None if text == "none" else _number(text)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None


def options(p: argparse.ArgumentParser, count: Callable[[str], int]) -> None:
    """Add the options to `train`. Those that are not given leave no trace, so that a preset can fill them in."""
    p.epilog = (
        "A language model, as TRL would train it: apportion train dr_grpo lm --model FOLDER --data sums.jsonl --reward "
        "last_number --set sampler.group=8 --set update.learning_rate=1e-6. METHOD may also be sft. See docs/lm.md."
    )
    kinds = {"count": count, "number": _number, "seconds": _seconds, "whole": _whole}
    for title, table in (("model, data, reward", WHAT), ("batches and budget", HOW)):
        group = p.add_argument_group(f"language models (TASK lm): {title}")
        for flag, kind, metavar, text in table:
            how: dict[str, Any] = {"metavar": metavar, "type": kinds.get(kind)}
            if kind == "switch":
                how = {"action": "store_true"}
            elif kind in ("append", "fields"):
                how = {"metavar": metavar} | ({"action": "append"} if kind == "append" else {"nargs": "+"})
            group.add_argument(flag, default=argparse.SUPPRESS, help=text, **how)


WHAT = (
    ("--preset", "text", "NAME", "fill in what is not given, e.g. lm_arithmetic"),
    ("--model", "text", "MODEL", "a Hugging Face folder or hub name, or package:NAME"),
    ("--data", "text", "DATA", "a .jsonl file, reasoning_gym:NAME?option=value or hf:NAME?split=train"),
    (
        "--reward",
        "append",
        "REWARD",
        "accuracy, format, last_number, math_verify, task or FILE.py:FUNCTION, with =WEIGHT; may be repeated",
    ),
    ("--eval-data", "text", "DATA", "measure accuracy on it; its prompts are left out of training"),
    ("--system", "text", "TEXT", "a system message before every prompt"),
    ("--plain", "switch", "", "give prompts as they are, without the chat template"),
    ("--reward-timeout", "seconds", "S", "seconds a reward may take (default: 10; none for rewards on a GPU)"),
    ("--reference", "text", "MODEL", "of the KL penalty (default: the model before the run)"),
    ("--gguf-file", "text", "FILE", "a GGUF file in the model's folder"),
    ("--lora", "fields", "FIELD=VALUE", "train an adapter, e.g. --lora r=8"),
    ("--dtype", "text", "TYPE", "of the weights: float32 (default) or bfloat16"),
    ("--device", "text", "DEVICE", "cpu or cuda (default: cuda where there is one)"),
)
HOW = (
    ("--prompts", "count", "N", "prompts of a batch, each with sampler.group responses (default: 8)"),
    ("--max-tokens", "count", "N", "the longest response (default: 256)"),
    ("--temperature", "number", "T", "of sampling; the same as --set sampler.temperature=T"),
    ("--top-p", "number", "P", "sample from the most probable tokens that hold P (default: 1, all)"),
    ("--top-k", "whole", "K", "sample from the K most probable tokens (default: 0, all)"),
    ("--overlong", "count", "N", "punish the last N tokens before --max-tokens softly (DAPO)"),
    ("--mask-truncated", "switch", "", "responses cut at --max-tokens do not train (DAPO's overlong filtering)"),
    ("--correction", "text", "LEVEL", "importance weights against the sampler: token or sequence"),
    ("--weight-decay", "number", "X", "of AdamW (default: 0)"),
    ("--batch-tokens", "count", "N", "tokens in the model at once, for memory (default: 512 on a CPU, 16384 on a GPU)"),
    ("--checkpointing", "switch", "", "less memory for more time"),
    ("--completions", "count", "N", "end with the update that reaches N sampled responses"),
    ("--tokens", "count", "N", "end with the update that reaches N sampled tokens"),
    ("--eval-every", "count", "N", "also on a control task: steps between evaluations (default: only at the ends)"),
    ("--eval-size", "count", "N", "problems of an evaluation (default: 200)"),
    ("--eval-samples", "count", "N", "answers to each; more than 1 gives pass@k (default: 1, the most probable)"),
    ("--samples", "whole", "N", "completions to show now and then (default: 3)"),
)
"""(option, kind of its value, its name in the help, what it is). Without its dashes an option is a field of Setup."""


def given(args: Namespace) -> dict[str, Any]:
    """The options of language models that were given, by field."""
    names = [flag.removeprefix("--").replace("-", "_") for flag, *_ in (*WHAT, *HOW)]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def refuse(args: Namespace) -> None:
    """Refuse an option of language models for a control task."""
    for name in given(args).keys() - {"eval_every"}:
        option = "--" + name.replace("_", "-")
        raise ApportionError(f"{option} belongs to language models (TASK lm), and the task is '{args.task}'")


def train(args: Namespace) -> dict[str, Any]:
    """Run the command; the run's summary."""
    from apportion.core.catalogue import method
    from apportion.core.values import override, value

    if args.workers is not None:
        raise ApportionError("--workers is for a3c on a control task; a language model trains in one process")
    if args.method != "sft":
        method(args.method)  # refused before torch is imported
    overrides = [override(text) for text in args.overrides]
    settings = given(args)
    if "temperature" in settings:
        overrides.append(("sampler.temperature", settings.pop("temperature")))
    if "lora" in settings:
        pairs = [text.partition("=") for text in settings["lora"]]
        if bad := next(
            (text for text, (_, equals, _) in zip(settings["lora"], pairs, strict=True) if not equals), None
        ):
            raise ApportionError(f"--lora '{bad}' is not FIELD=VALUE, e.g. --lora r=8")
        settings["lora"] = {name: value(rest) for name, _, rest in pairs}
    if args.steps is not None:
        settings["steps"] = args.steps
    if len(settings.get("reward", [])) == 1:
        settings["reward"] = settings["reward"][0]
    from apportion.lm.run import train as run
    from apportion.lm.sft import sft
    from apportion.runs.trackers import trackers

    out = Path("runs", f"{args.method}-lm-seed{args.seed}") if args.out is None else Path(args.out)
    common: dict[str, Any] = {
        "seed": args.seed,
        "overrides": overrides,
        "out": out,
        "resume": args.resume,
        "quiet": args.json,
        "callbacks": trackers(args.log),
    }
    if args.method == "sft":
        return sft(**common, **settings).summary
    return run(args.method, **common, **settings).summary
