"""One function a sub-command. Each imports what it needs when it runs."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from apportion.core.errors import ApportionError, UnknownName


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _folder(name: str) -> Path:
    """The folder to write to, made if need be: before minutes of work, not after them."""
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ApportionError(f"cannot write {path}: {error.strerror}; name another --out") from None
    if not os.access(path, os.W_OK):
        raise ApportionError(f"cannot write {path}: permission denied; name another --out")
    return path


def _method(args: Namespace) -> Any:
    from apportion.core.catalogue import method
    from apportion.core.values import apply

    return apply(method(args.method), args.overrides)


def methods(args: Namespace) -> None:
    """`apportion methods [NAME] [--flat] [--cite] [--json]`."""
    from apportion.core.catalogue import METHODS

    if args.overrides and args.method is None:
        raise ApportionError("--set needs a method to change, e.g. apportion methods grpo --set scale=NoScale()")
    chosen = list(METHODS.values()) if args.method is None else [_method(args)]
    if args.json:
        from apportion.study.card import record

        _print_json([record(m) for m in chosen])
    elif args.cite:
        from apportion.core.references import bibtex

        print(bibtex(chosen))
    elif args.markdown:
        from apportion.study import card as cards
        from apportion.study import family

        pieces = [family.markdown(chosen)] if args.method is None else []
        print("\n\n".join(pieces + [cards.markdown(m) for m in chosen]))
    elif args.flat:
        from apportion.core.flat import flat

        print("\n\n".join(flat(m) for m in chosen))
    elif args.method is not None:
        from apportion.study.card import card

        print(card(chosen[0], min(_width(), 120)))
    else:
        _print_family(chosen)


def _width() -> int:
    import shutil

    return shutil.get_terminal_size((200, 50)).columns


def _print_family(chosen: list[Any]) -> None:
    from apportion.study import family

    width = _width()
    if width < 150:
        print(family.blocks(chosen, width))
        return
    from rich.console import Console

    Console(width=width, highlight=False).print(family.table(chosen))


def trace(args: Namespace) -> None:
    """`apportion trace METHOD --task toy`."""
    from apportion.audit.trace import trace as run

    print(run(_method(args), task=args.task, prompt=args.prompt, seed=args.seed, group=args.group))


def audit(args: Namespace) -> None:
    """`apportion audit METHOD [--task toy|toy-eos] [--group G] [--json]`."""
    from apportion.audit.report import audit as run

    report = run(_method(args), task=args.task, group=args.group)
    if args.json:
        _print_json(report.to_json())
    else:
        print(report.lines())


def toy(args: Namespace) -> int:
    """`apportion toy figures [--out DIR]`; 1 if a row is out of tolerance."""
    if args.what != "figures":
        raise UnknownName("toy command", args.what, ["figures"])
    from apportion.audit.figures import figures, passed, table

    out = _folder(args.out)
    rows = figures(out)
    print(table(rows))
    print(f"\nplots: {out / 'figures.html'}")
    return 0 if passed(rows) else 1


def train(args: Namespace) -> None:
    """`apportion train METHOD TASK`."""
    from apportion.cli import language
    from apportion.core.catalogue import method
    from apportion.core.values import override

    if args.task == language.TASK:
        _print_summary(language.train(args), args.json)
        return
    language.refuse(args)
    # Refused before JAX is imported; whether an override fits is decided where the task's preset is known.
    asynchronous = args.method == "a3c"
    if not asynchronous:
        method(args.method)
        if args.workers is not None:
            raise ApportionError(f"--workers is for a3c; {args.method} trains in one process")
    overrides = [override(text) for text in args.overrides]
    from apportion.runs.trackers import trackers

    given = {
        "task": args.task,
        "steps": args.steps,
        "seed": args.seed,
        "out": None if args.out is None else Path(args.out),
        "overrides": overrides,
        "resume": args.resume,
        "quiet": args.json,
        "callbacks": trackers(args.log),
        "eval_every": getattr(args, "eval_every", None),
    }
    if asynchronous:
        from apportion.control.a3c import train_a3c

        summary = train_a3c(workers=args.workers or 2, **given)
    else:
        from apportion.control.run import train_run

        summary = train_run(args.method, **given)
    _print_summary(summary, args.json)


def evaluate(args: Namespace) -> None:
    """`apportion eval DIR [--episodes N] [--seed S] [--samples K] [--json]`."""
    from apportion.cli import language
    from apportion.runs.files import read_config

    out = Path(args.dir)
    if read_config(out)["task"] == language.TASK:
        if args.seed is not None:
            raise ApportionError(f"--seed is of start states, and {out} holds a language model, which has none")
        from apportion.lm.evaluate import evaluate_run as of_language

        _print_summary(of_language(out, args.episodes, args.samples, quiet=args.json), args.json)
        return
    if args.samples is not None:
        raise ApportionError(f"--samples is of a language model's answers, and {out} holds a control task's run")
    from apportion.control.evaluate import EPISODES, evaluate_run

    _print_summary(evaluate_run(out, args.episodes or EPISODES, args.seed or 0), args.json)


def video(args: Namespace) -> None:
    """`apportion video DIR [--out FILE.mp4] [--episodes N] [--seed S] [--camera NAME]`."""
    from apportion.control.video import video as run

    film = run(Path(args.dir), args.out, args.episodes, args.seed, args.camera, quiet=args.json)
    if args.json:
        _print_json(film)
        return
    for k, (total, length) in enumerate(zip(film["returns"], film["lengths"], strict=True)):
        print(f"episode {k}: return {total:,.6g} in {length:,} steps")
    print(f"{film['out']}: {film['frames']:,} frames, {film['seconds']:g} s")


def _print_summary(summary: dict[str, Any], as_json: bool) -> None:
    if as_json:
        _print_json(summary)
        return
    width = max(20, *(len(name) + 2 for name in summary))
    for name, value in summary.items():
        if isinstance(value, str | int | float | bool):
            text = f"{value:,.6g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
            print(f"{name.replace('_', ' '):<{width}}{text}")


def demo(args: Namespace) -> None:
    """`apportion demo [--out DIR]`."""
    from apportion.study.demo import demo as run

    run(out=_folder(args.out))


def study(args: Namespace) -> int:
    """`apportion study FILE|PRESET [--out DIR] [--workers N] [--ray ADDRESS] [--dry-run] [--detach] [--attach DIR]`.

    Returns 1 if a run failed.
    """
    from apportion.study import files, runner, table, watch

    if args.attach is not None:
        watch.attach(Path(args.attach))
        return 0
    if args.study is None:
        raise ApportionError(f"name a study file or one of the presets: {', '.join(files.presets())}")
    table.pandas()
    name, text = files.source(args.study)
    chosen = files.read(text, name)
    out, workers = Path(args.out or f"studies/{name}"), args.workers or os.cpu_count() or 1
    runner.check(chosen)
    print(runner.printed_plan(chosen, workers), flush=True)
    if args.dry_run:
        return 0
    if args.detach:
        pid = runner.detach(args.study, _folder(str(out)), args.workers, args.ray)
        print(f"  runs     as process {pid}; watch it with: apportion study --attach {out}")
        return 0
    print(f"  out      {out}", flush=True)
    print(f"report: {runner.run(chosen, out, workers, args.ray, text)}")
    failed = [row.name for row in watch.progress(out) if row.poll().state == "failed"]
    if failed:
        print(
            f"apportion: {len(failed)} runs failed, {failed[0]} first; repeat the command to try again", file=sys.stderr
        )
    return 1 if failed else 0


def report(args: Namespace) -> None:
    """`apportion report DIR [--figure NAME]`."""
    from apportion.study import publish

    if args.figure is not None:
        print(publish.figure(Path(args.dir), args.figure), end="")
        return
    print(f"report: {publish.write(Path(args.dir))}")


RUN = {
    "methods": methods,
    "trace": trace,
    "audit": audit,
    "toy": toy,
    "train": train,
    "eval": evaluate,
    "video": video,
    "demo": demo,
    "study": study,
    "report": report,
}
