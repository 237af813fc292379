"""What the command line accepts, and how it says that it does not."""

from __future__ import annotations

import argparse
import math
from typing import NoReturn

from apportion import __version__
from apportion.cli import commands, language
from apportion.core.errors import ApportionError, UnknownName


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are the library's one-line errors."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and exiting."""
        raise ApportionError(f"{message}; see '{self.prog} --help'")


def _count(text: str) -> int:
    """A whole number of 1 or more; `5e5` is one."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (1 <= number < 2**53 and number == int(number)):
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of 1 or more")
    return int(number)


def _method(p: argparse.ArgumentParser, **kwargs: object) -> None:
    p.add_argument("method", metavar="METHOD", help="a name from `apportion methods`", **kwargs)  # type: ignore[arg-type]


def _set(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="PART.FIELD=VALUE",
        help="change one field, e.g. sampler.group=4 or baseline=LeaveOneOut(); may be repeated",
    )


def _json(p: argparse.ArgumentParser) -> None:
    p.add_argument("--json", action="store_true", help="print JSON")


def _methods(p: argparse.ArgumentParser) -> None:
    _method(p, nargs="?")
    p.add_argument("--flat", action="store_true", help="the method as the lines of NumPy it reduces to")
    p.add_argument("--cite", action="store_true", help="BibTeX of every paper that its parts name")
    p.add_argument("--markdown", action="store_true", help="table and cards as Markdown, as docs/methods.md holds them")
    _json(p)
    _set(p)


def _trace(p: argparse.ArgumentParser) -> None:
    _method(p)
    p.add_argument("--task", default="toy", help="toy or toy-eos (default: toy)")
    p.add_argument("--prompt", type=int, default=1, metavar="N", help="which prompt (default: 1)")
    p.add_argument("--seed", type=int, default=0, metavar="S", help="of the draw (default: 0)")
    p.add_argument("--group", type=_count, default=4, metavar="G", help="siblings (default: 4)")
    _set(p)


def _audit(p: argparse.ArgumentParser) -> None:
    _method(p)
    p.add_argument("--task", default="toy", help="toy or toy-eos (default: toy)")
    p.add_argument("--group", type=_count, default=8, metavar="G", help="siblings (default: 8)")
    _json(p)
    _set(p)


def _toy(p: argparse.ArgumentParser) -> None:
    p.add_argument("what", metavar="figures", help="figures: the published figures, reproduced")
    p.add_argument("--out", default="figures", metavar="DIR", help="where to write them (default: figures)")


def _train(p: argparse.ArgumentParser) -> None:
    _method(p)
    p.add_argument("task", metavar="TASK", help="lm for a language model, or a control task, e.g. CartPole-v1")
    p.add_argument(
        "--steps",
        type=_count,
        metavar="N",
        help="environment steps, e.g. 5e5; of a language model: updates (default: the preset's)",
    )
    p.add_argument("--seed", type=int, default=0, metavar="S", help="of everything random (default: 0)")
    p.add_argument("--out", metavar="DIR", help="the run's folder")
    p.add_argument("--resume", action="store_true", help="go on with the run that --out holds")
    p.add_argument("--workers", type=_count, metavar="N", help="of METHOD a3c, asynchronous on Ray (default: 2)")
    p.add_argument(
        "--log", default="", metavar="NAMES", help="trackers told of every row, of tensorboard,wandb,trackio"
    )
    _json(p)
    _set(p)
    language.options(p, _count)


def _eval(p: argparse.ArgumentParser) -> None:
    p.add_argument("dir", metavar="DIR", help="the folder of a run")
    p.add_argument(
        "--episodes",
        type=_count,
        metavar="N",
        help="how many; of a language model: problems (default: 20, or as many as the run evaluated on)",
    )
    p.add_argument("--seed", type=int, metavar="S", help="of a control task's start states (default: 0)")
    p.add_argument(
        "--samples",
        type=_count,
        metavar="K",
        help="answers of a language model to each problem; more than 1 are sampled as in training (default: the run's)",
    )
    _json(p)


def _video(p: argparse.ArgumentParser) -> None:
    p.add_argument("dir", metavar="DIR", help="the folder of a run")
    p.add_argument("--out", metavar="FILE.mp4", help="the film (default: video.mp4 in the folder)")
    p.add_argument("--episodes", type=_count, default=1, metavar="N", help="how many, one after another (default: 1)")
    p.add_argument("--seed", type=int, default=0, metavar="S", help="of the start states (default: 0)")
    p.add_argument("--camera", metavar="NAME", help="a camera of the MuJoCo model")
    _json(p)


def _demo(p: argparse.ArgumentParser) -> None:
    p.add_argument("--out", default="demo", metavar="DIR", help="where to write the report (default: demo)")


def _study(p: argparse.ArgumentParser) -> None:
    p.add_argument("study", nargs="?", metavar="FILE|PRESET", help="a study file, or the name of a preset")
    p.add_argument("--out", metavar="DIR", help="the study's folder (default: studies/NAME); a study there goes on")
    p.add_argument("--workers", type=_count, metavar="N", help="runs at once on this machine (default: one a core)")
    p.add_argument("--ray", metavar="ADDRESS", help="run on this Ray cluster instead; it shares the folder")
    p.add_argument("--dry-run", action="store_true", help="check the study and print its plan; run nothing")
    p.add_argument("--detach", action="store_true", help="run in the background")
    p.add_argument("--attach", metavar="DIR", help="watch the study that runs in DIR; Ctrl-C leaves it running")


def _report(p: argparse.ArgumentParser) -> None:
    p.add_argument("dir", metavar="DIR", help="the folder of a study")
    p.add_argument("--figure", metavar="NAME", help="print the numbers of one figure as CSV instead")


COMMANDS = {
    "methods": ("the family of methods, or one method's card", _methods),
    "trace": ("the ledger of one group, from reward to weight", _trace),
    "audit": ("a method's expected update against the true gradient", _audit),
    "toy": ("the published figures of the exact language, reproduced", _toy),
    "train": ("train a method on a control task or a language model", _train),
    "eval": ("evaluate a trained policy or language model", _eval),
    "video": ("a film of a trained policy", _video),
    "demo": ("five methods on CartPole and on the exact language, with a report", _demo),
    "study": ("methods on tasks over seeds: plan, run, compare", _study),
    "report": ("the report of a study, from what it has found so far", _report),
}


def build() -> tuple[Parser, dict[str, Parser]]:
    """The parser and its sub-commands' parsers by name."""
    top = Parser(
        prog="apportion",
        description="Every policy-gradient method as one sampler and one weight.",
        epilog="Start with: apportion methods; apportion methods grpo --flat; apportion train ppo CartPole-v1",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"apportion {__version__}")
    subparsers = top.add_subparsers(metavar="COMMAND")
    subs = {}
    for name, (help_, fill) in COMMANDS.items():
        subs[name] = subparsers.add_parser(name, help=help_, description=help_, allow_abbrev=False)
        fill(subs[name])
        subs[name].set_defaults(run=commands.RUN[name])
    return top, subs


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments of one command. Raises ApportionError naming the nearest right word."""
    top, subs = build()
    if argv and not argv[0].startswith("-") and argv[0] not in subs:
        raise UnknownName("command", argv[0], subs)
    if not argv:
        argv = ["--help"]
    args, left = top.parse_known_args(argv)
    here = subs.get(argv[0], top)
    for word in left:
        if word.startswith("--"):
            known = [o for a in here._actions for o in a.option_strings if o.startswith("--")]
            raise UnknownName("option", word.split("=")[0], known)
        raise ApportionError(f"unexpected argument '{word}'; see '{here.prog} --help'")
    return args
