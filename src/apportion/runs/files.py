"""Files of a run: written whole or not at all, read with one clear line for whatever else is found. No pickle.

Arrays are safetensors with one name a leaf ("state.optimiser.1.mu"). What a file is stands in its metadata under one
key, because safetensors orders several at random and equal runs must leave equal bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from apportion.core.errors import ApportionError

CHECKPOINT, POLICY, CONFIG = "checkpoint.safetensors", "policy.safetensors", "config.json"
METRICS, TIMING, SUMMARY = "metrics.jsonl", "timing.jsonl", "summary.json"
FORMAT = 1
_KEY = "apportion"


def write_atomic(path: Path, data: bytes) -> None:
    """Put `data` at `path`: a reader, or a crash at any moment, finds the old file or the new one, never a part.

    Raises ApportionError when the disk refuses (full, read-only, no such folder); the old file is then intact.
    """
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise cannot_write(path, error) from error


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def cannot_write(path: Path, error: OSError) -> ApportionError:
    """What to say when the disk refuses."""
    way_out = "make room, then go on with --resume" if path.name in (CHECKPOINT, METRICS, TIMING) else "make room"
    if isinstance(error, PermissionError | FileExistsError | NotADirectoryError | FileNotFoundError):
        way_out = "name a folder that can be written"
    return ApportionError(f"cannot write {path}: {error.strerror or error}; {way_out}")


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of indented JSON. Raises as it does."""
    write_atomic(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The object in a JSON file. Raises ApportionError naming `what` it should have been."""
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise ApportionError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ApportionError(f"{path} is not {what} (broken JSON); start again in another folder") from error
    if not isinstance(value, dict):
        raise ApportionError(f"{path} is not {what}; start again in another folder")
    return value


def read_config(out: Path) -> dict[str, Any]:
    """The configuration of the run in `out`. Raises ApportionError when there is none."""
    if not out.exists():
        raise ApportionError(f"there is no folder {out}; name one that `apportion train` wrote")
    if not out.is_dir():
        raise ApportionError(f"{out} is a file; name a folder that `apportion train` wrote")
    if not (out / CONFIG).exists():
        raise ApportionError(f"{out} holds no run (no {CONFIG}); name a folder that `apportion train` wrote")
    config = read_json(out / CONFIG, "the configuration of a run")
    for name in ("task", "seed", "steps", "method", "policy", "setup"):
        if name not in config:
            raise ApportionError(f"{out / CONFIG} is not the configuration of a run: it lacks '{name}'")
    return config


def save_arrays(path: Path, arrays: Mapping[str, Any], about: dict[str, Any]) -> None:
    """Write arrays by name, dtype and all, with `about` as metadata. Atomic; raises as `write_atomic`."""
    from safetensors.numpy import save as serialise

    whole = {name: np.ascontiguousarray(leaf).reshape(np.shape(leaf)) for name, leaf in arrays.items()}
    text = json.dumps({"format": FORMAT} | about, sort_keys=True)
    write_atomic(path, serialise(whole, metadata={_KEY: text}))


def load_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays by name, and the metadata. Raises ApportionError for a truncated or foreign file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            about = json.loads((file.metadata() or {}).get(_KEY, "{}"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except OSError as error:
        raise ApportionError(f"cannot read {path}: {error.strerror or error}") from error
    except (SafetensorError, ValueError) as error:
        why = " ".join(str(error).split())
        raise ApportionError(f"{path} is truncated or no safetensors file ({why}); start again without it") from error
    if about.get("format") != FORMAT:
        found = f"of format {about['format']}" if "format" in about else "a foreign safetensors file"
        raise ApportionError(f"{path} is {found}, not a checkpoint of this version of apportion")
    return arrays, about
