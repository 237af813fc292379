"""A run's folder: for one process at a time, and for one run only."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from apportion import __version__
from apportion.core.errors import ApportionError, ApportionWarning, InUse
from apportion.core.method import Method
from apportion.runs.files import CHECKPOINT, CONFIG, METRICS, POLICY, SUMMARY, cannot_write, read_config, write_json


def versions(*packages: str) -> dict[str, str]:
    """Versions of apportion, Python and the packages that a run's numbers depend on."""
    from importlib.metadata import version

    return {"apportion": __version__, "python": platform.python_version()} | {name: version(name) for name in packages}


def described(method: Method) -> dict[str, str | float | None]:
    """The method as config.json holds it: everything of it that decides a run."""
    told = ("claim", "title", "target", "lineage", "differs", "settings")
    fields = {f.name: getattr(method, f.name) for f in dataclasses.fields(method) if f.name not in told}
    return {name: v if isinstance(v, str | float | None) else repr(v) for name, v in fields.items()}


_held: set[int] = set()
"""Descriptors of locked folders. A forked child has copies of them, and would keep the lock when this process dies."""


def _let_go() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder, made if need be, for this process alone. The system lets go of it however the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise cannot_write(folder, error) from error
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise InUse(f"{folder} is in use by another process; wait for it, or name another --out") from None
    except (ImportError, OSError):
        pass  # no locks on this system or file system
    _held.add(descriptor)
    try:
        yield
    finally:
        if descriptor in _held:  # not so in a forked child
            _held.remove(descriptor)
            os.close(descriptor)


def claim(folder: Path, config: dict[str, Any], resume: bool) -> None:
    """Make the folder this run's, or find that it is. Raises ApportionError for another's."""
    if not (folder / CONFIG).exists():
        if strays := [n for n in (CHECKPOINT, METRICS, POLICY, SUMMARY) if (folder / n).exists()]:
            raise ApportionError(f"{folder} holds {strays[0]} but no {CONFIG}; name another --out")
        write_json(folder / CONFIG, config)
        return
    if not resume:
        raise ApportionError(f"{folder} already holds a run; go on with it by --resume, or name another --out")
    agree(folder, "run", config, read_config(folder), "repeat its command with --resume, or name another --out")


def agree(folder: Path, what: str, here: dict[str, Any], there: dict[str, Any], way_out: str) -> None:
    """Raise ApportionError where two configurations differ in more than versions, and warn where those differ."""
    # The task comes first: another task's preset differs in many values, which follow from it.
    for path, ours, theirs in sorted(differences(here, there), key=lambda d: d[0] != "task"):
        if not path.startswith("versions."):
            raise ApportionError(f"{folder} holds another {what}: {path} is {theirs} there and {ours} here; {way_out}")
        warnings.warn(
            f"{folder} was begun with {path.removeprefix('versions.')} {theirs} and goes on with {ours}; "
            "the last bits may differ",
            ApportionWarning,
            stacklevel=4,
        )


def differences(here: Any, there: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(path, here, there) of every value in which two JSON objects differ; causes (task, method) before effects.

    >>> list(differences({"seed": 1, "setup": {"envs": 8}}, {"seed": 0, "setup": {"envs": 8}}))
    [('seed', 1, 0)]
    """
    if isinstance(here, dict) and isinstance(there, dict):
        for key in [*here, *(k for k in there if k not in here)]:
            yield from differences(here.get(key), there.get(key), f"{path}.{key}" if path else key)
    elif here != there:
        yield path, here, there
