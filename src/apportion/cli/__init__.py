"""The command line. Nothing heavy is imported before it is needed, so that `apportion --help` answers at once."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from apportion.core.errors import ApportionError, ApportionWarning


def _warn(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    name = "" if issubclass(category, ApportionWarning) else f"{category.__name__}: "
    print(f"apportion: warning: {name}{message}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0; 1 for figures that differ or runs that failed; 2 for bad input; 130 when interrupted.
    """
    from apportion.cli import parser

    warnings.showwarning = _warn
    try:
        args = parser.parse(list(sys.argv[1:] if argv is None else argv))
        code = args.run(args)
        sys.stdout.flush()
    except ApportionError as error:
        print(f"apportion: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("apportion: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) has gone; keep the interpreter from complaining once more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code or 0
