"""Where a run stands, on the disk: an ordinary Hugging Face folder with the optimiser and the counters inside.

A checkpoint is `checkpoint-STEP`. Its arrays are written last, so that a folder without them is one that was cut
short, and it is passed over.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from apportion.core.errors import ApportionError
from apportion.lm import models
from apportion.lm.loop import Loop
from apportion.runs.files import CHECKPOINT, METRICS, load_arrays, save_arrays

PREFIX = "checkpoint-"
LOGS = (METRICS, "samples.jsonl")


def save(folder: Path, loop: Loop, logs: dict[str, list[int]]) -> None:
    """Write the checkpoint of the loop's step, then remove the older ones.

    logs: [bytes, rows] of each log that the checkpoint counts on. Raises ApportionError when the disk refuses.
    """
    place = folder / f"{PREFIX}{loop.step:06}"
    if (place / CHECKPOINT).exists():
        return
    language_model = loop.job.language_model
    models.save(language_model, place)
    arrays = {f"learner.{name}": x.detach().cpu().numpy() for name, x in loop.learner.state_dict().items()}
    if language_model.adapted:
        # The folder holds the sum of base and adapter; going on needs the adapter alone.
        arrays |= {f"adapter.{name}": p.detach().float().cpu().numpy() for name, p in loop.learner.named}
    save_arrays(place / CHECKPOINT, arrays, {"task": "lm", "counters": loop.counters, "logs": logs})
    clear(folder, but=place)


def restore(folder: Path, loop: Loop) -> dict[str, list[int]]:
    """Put the loop where the folder's newest whole checkpoint left it; [bytes, rows] of each log there.

    Raises ApportionError for a checkpoint that is broken or of another model.
    """
    whole = sorted(place for place in folder.glob(f"{PREFIX}*") if (place / CHECKPOINT).exists())
    if not whole:
        return {name: [0, 0] for name in LOGS}
    place = whole[-1]
    arrays, about = load_arrays(place / CHECKPOINT)
    held = {name: torch.from_numpy(x) for name, x in arrays.items()}
    language_model = loop.job.language_model
    try:
        if language_model.adapted:
            with torch.no_grad():
                for name, p in loop.learner.named:
                    p.copy_(held[f"adapter.{name}"])
        else:
            saved = models.load(place, dtype=loop.job.setup.dtype, device=str(language_model.device))
            language_model.model.load_state_dict(saved.model.state_dict())
        learner = {k.removeprefix("learner."): x for k, x in held.items() if k.startswith("learner.")}
        loop.learner.load_state_dict(learner)
        loop.go_on(about["counters"])
        return {name: about["logs"][name] for name in LOGS}
    except (KeyError, RuntimeError) as error:
        raise ApportionError(f"{place} does not fit this run: {' '.join(str(error).split())[:200]}") from error


def clear(folder: Path, but: Path | None = None) -> None:
    """Remove every checkpoint but one, and what is left of those that were cut short."""
    for place in folder.glob(f"{PREFIX}*"):
        if place != but:
            shutil.rmtree(place, ignore_errors=True)
