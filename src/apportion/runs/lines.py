"""A log that grows by whole lines and can be cut back to those that a checkpoint counts on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any

from apportion.core.errors import ApportionError
from apportion.runs.files import cannot_write


class Lines:
    """A file of JSON lines that grows; `size` bytes and `rows` lines of it are known to be whole."""

    def __init__(self, path: Path, size: int = 0, rows: int = 0) -> None:
        self.path, self.size, self.rows = path, size, rows
        try:
            self._file: IO[bytes] = open(path, "ab", buffering=0)  # noqa: SIM115 (lives as long as the session)
            found = os.fstat(self._file.fileno()).st_size
            if found < size:
                raise ApportionError(f"{path} is shorter than its checkpoint says; start again in another folder")
            self._file.truncate(size)
        except OSError as error:
            raise cannot_write(path, error) from error

    def add(self, row: dict[str, Any]) -> None:
        """Append one line. Raises ApportionError when the disk refuses."""
        data = (json.dumps(row) + "\n").encode()
        try:
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise cannot_write(self.path, error) from error
        self.size, self.rows = self.size + len(data), self.rows + 1

    def read(self) -> list[dict[str, Any]]:
        """The lines that there are."""
        return [json.loads(line) for line in self.path.read_bytes().splitlines()]

    def settle(self) -> None:
        """Have everything on the disk."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def timing(path: Path, rows: int) -> tuple[int, dict[str, float]]:
    """Bytes of the first `rows` lines of timing.jsonl, and the last of them. It is only told, never relied upon."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)[:rows]
        return sum(map(len, lines)), json.loads(lines[-1]) if lines else {}
    except (OSError, ValueError):
        return 0, {}
