"""Cells on an existing Ray cluster. Its machines share the study's folder; where a run was cut off, another goes on."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from apportion.core.errors import ApportionError
from apportion.study.cells import mark, run_cell
from apportion.study.design import Cell
from apportion.study.local import TICK, one_core

TRIES = 5
"""How often a cell is started again after its machine or process was lost."""


def _run(cell: Cell, root: Path) -> str:
    one_core()
    return run_cell(cell, root)


def _connect(address: str) -> Any:
    try:
        import ray
    except ImportError as error:
        raise ApportionError(f"--ray needs Ray ({error}): pip install 'apportion[ray]'") from None
    try:
        _knock(address)  # Ray itself waits for minutes
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        raise ApportionError(f"no Ray cluster at {address}: {why}; start one with `ray start --head`") from error
    return ray


def _knock(address: str) -> None:
    """Raises OSError when nothing listens at HOST:PORT."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


def run_ray(cells: Sequence[Cell], root: Path, address: str) -> Iterator[Cell | None]:
    """Run the cells, a core each; yields each that is over, and None every so often, as `run_local`.

    Raises ApportionError when Ray is not installed or no cluster answers at `address` ("auto" finds a local one).
    """
    ray = _connect(address)
    remote = ray.remote(num_cpus=1, max_retries=TRIES)(_run)
    waiting = {remote.remote(cell, root.resolve()): cell for cell in cells}
    try:
        while waiting:
            for reference in ray.wait(list(waiting), timeout=TICK)[0]:
                cell = waiting.pop(reference)
                try:
                    ray.get(reference)
                except ray.exceptions.RayError as error:
                    mark(root / cell.folder, "failed", message=str(error).splitlines()[0])
                yield cell
            yield None
    finally:
        for reference in waiting:
            ray.cancel(reference)
        ray.shutdown()
