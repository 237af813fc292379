"""Cells on this machine: a few processes that keep to one core each and take one cell after another."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from apportion.study.cells import mark, run_cell, state
from apportion.study.design import Cell

TICK = 0.5
"""Seconds after which a runner answers even if no cell has ended."""
GRACE, LANGUAGE_GRACE = 30.0, 900.0
"""Seconds that a stopped process has to save its run; a language model ends its step first."""


def one_core() -> None:
    """Have whatever this process loads later keep to one core."""
    flags, one = os.environ.get("XLA_FLAGS", ""), "--xla_cpu_multi_thread_eigen=false"
    os.environ["XLA_FLAGS"] = flags if one in flags else f"{flags} {one}".strip()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "APPORTION_THREADS"):
        os.environ[name] = "1"


def _serve(orders: Connection, root: Path) -> None:
    """A process's life: cells until there are no more, or until the parent is gone."""
    one_core()
    os.setpgrp()  # Ctrl-C is the parent's; it passes it on, once
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have had ignored
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        while (cell := orders.recv()) is not None:
            run_cell(cell, root)
            orders.send(True)
    except (EOFError, KeyboardInterrupt):
        pass


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class _Worker:
    """A process and the cell it has."""

    def __init__(self, root: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.orders, theirs = context.Pipe()
        self.process: Any = context.Process(target=_serve, args=(theirs, root))
        self.process.start()
        theirs.close()
        self.cell: Cell | None = None

    def give(self, cell: Cell | None) -> None:
        """The next cell; None when there is none left."""
        self.cell = cell
        if cell is not None:
            self.orders.send(cell)

    def finished(self) -> bool:
        """Whether the process lives on after the cell that has ended."""
        try:
            return bool(self.orders.recv())
        except (EOFError, OSError):
            self.process.join()
            return False


def run_local(cells: Sequence[Cell], root: Path, workers: int) -> Iterator[Cell | None]:
    """Run the cells; yields each that is over, whatever became of it, and None every `TICK` seconds.

    Where there is one process, language models have all cores: their matrices are large enough to be worth it.

    A process that dies (out of memory, a crash in native code) fails its cell and is replaced. Interrupted or closed,
    it has every process save its run and end.
    """
    threads = (os.cpu_count() or 1) if workers == 1 else 1
    waiting = deque(dataclasses.replace(cell, threads=threads) for cell in cells)
    team = [_Worker(root) for _ in range(min(workers, len(waiting)))]
    try:
        for worker in team:
            worker.give(waiting.popleft())
        while busy := [w for w in team if w.cell is not None]:
            ready = wait([w.orders for w in busy], TICK)
            for i, worker in enumerate(team):
                if worker.orders not in ready or (cell := worker.cell) is None:
                    continue
                if not worker.finished():
                    if state(root / cell.folder).get("state") == "stopped":
                        raise KeyboardInterrupt
                    code = worker.process.exitcode
                    mark(root / cell.folder, "failed", message=f"its process ended with exit code {code}")
                    worker = team[i] = _Worker(root)
                worker.give(waiting.popleft() if waiting else None)
                yield cell
            yield None
    finally:
        _end(team)


def _end(team: list[_Worker]) -> None:
    slow = [w for w in team if w.cell is not None and w.cell.lm is not None and w.process.is_alive()]
    for worker in team:
        if worker.cell is None:
            worker.orders.close()
        elif worker.process.is_alive():
            os.kill(worker.process.pid, signal.SIGINT)
    if slow:
        told = "language models end their step, then save; interrupt again not to wait"
        print(f"apportion: stopping ({told})", file=sys.stderr, flush=True)
    try:
        for worker in team:
            worker.process.join(LANGUAGE_GRACE if worker in slow else GRACE)
    finally:
        for worker in team:
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
