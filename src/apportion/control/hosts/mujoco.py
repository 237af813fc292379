"""Gymnasium's MuJoCo tasks on MuJoCo's native batch: every simulation a row, stepped on native threads."""

from __future__ import annotations

import importlib.resources
import logging
import os
import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import mujoco
import numpy as np
from mujoco.batch import Batch, SimulationError
from numpy.typing import ArrayLike

from apportion.control.hosts import streams
from apportion.control.hosts.base import Array, Capabilities, Host, Ids, Step, actions_for, indices, seeds_for
from apportion.control.hosts.contacts import ContactBatch
from apportion.control.hosts.tasks.base import Move, Physics, Task
from apportion.core.errors import ApportionError, InvalidData, UnknownName

_NONE = mujoco.mjtStage.mjSTAGE_NONE.value
_FIRST_BAD = int(mujoco.mjtWarning.mjWARN_BADQPOS)
"""Warnings from here on say that a number was not finite or huge; MuJoCo has then reset the simulation."""
_STATE = ("qpos", "qvel", "ctrl")


class Simulations(Protocol):
    """What is used of `mujoco.batch.Batch` and of `ContactBatch`."""

    state: Any
    warning: Any

    def bind(self, name: str) -> Array:
        """A live array over a field."""

    def step(self, ids: Any = None, nstep: int = 1) -> None:
        """Advance."""

    def forward(self, ids: Any = None) -> None:
        """Compute derived fields."""

    def reset(self, ids: Any = None, *, stage: int = ...) -> None:
        """Defaults."""


class MujocoHost(Host):
    """M simulations of one task, equal to Gymnasium's environment step by step.

    A snapshot row is the integration state (with warmstart and time), the derived fields that the task reads (they lag
    one substep behind, so the state does not determine them), the clock and the random stream: all float64, all
    finite, fit for any array file.

    A simulation that goes non-finite is put into the model's default pose and reported as broken.

    Raises:
        ApportionError: When the model does not load.
    """

    def __init__(self, task: Task, size: int, threads: int | None = None):
        self.task, self.id, self.size, self.horizon = task, task.id, size, task.horizon
        _quieten()
        model = load(task)
        kind = ContactBatch if task.contacts else Batch
        self._batch: Simulations = kind(model, size, threads or 0)
        self._default = model.qpos0.copy(), np.zeros(model.nv)
        self._model, self.fps = model, 1 / (model.opt.timestep * task.frame_skip)
        self._physics, self._derived = self._bind(model)
        self._whole = {name: self._physics[name] for name in (*_STATE, *self._derived)}
        self.clock = np.zeros(size, np.int64)
        self.terms = {}
        self._streams = np.zeros((size, streams.WIDTH))  # zeros: not seeded yet
        self._batch.reset()
        self.action_count, self.action_size = 0, model.nu
        # Gymnasium's action spaces are float32; the same numbers here.
        low, high = model.actuator_ctrlrange.astype(np.float32).astype(float).T
        self.action_low, self.action_high = tuple(low.tolist()), tuple(high.tolist())
        self.observation_size = self.observe().shape[1]
        derived = sum(a[0].size for a in self._derived.values())
        self.row_size = self._batch.state.shape[1] + derived + 1 + streams.WIDTH

    def _bind(self, model: mujoco.MjModel) -> tuple[Physics, dict[str, Array]]:
        """The task's view of the batch, and the derived fields in it, writable."""
        fields = (*self.task.fields, *(("xpos",) if self.task.bodies else ()))
        derived = {}
        for name in fields:
            # The batch's own output buffer: what is written lasts until the simulation's next call, as a restore needs.
            derived[name] = self._batch.bind(name)
            derived[name].flags.writeable = True
        arrays = {name: self._batch.bind(name) for name in _STATE} | derived
        for name in self.task.bodies:
            arrays[name] = derived["xpos"][:, model.body(name).id]
        step = model.opt.timestep
        return Physics(arrays, model.body_mass.copy(), step, step * self.task.frame_skip), derived

    @property
    def capabilities(self) -> Capabilities:
        """Both, exactly."""
        return Capabilities(snapshot=True, seeded=True)

    def reset(self, ids: Ids = None, seeds: int | Sequence[int] | None = None) -> None:
        """See `Host`. A seed gives the start that Gymnasium's ``reset(seed=)`` gives, and its stream from there on."""
        chosen = indices(ids, self.size)
        if seeds is not None:
            self.reseed(chosen, seeds)
        if not len(chosen):
            return
        ordered = np.sort(chosen)
        self._batch.reset(ordered, stage=_NONE)
        for i in chosen:
            rng = streams.unpack(self._streams[i]) if self._streams[i].any() else streams.generator(None)
            start = self.task.start(self.task, rng, *self._default)
            self._physics["qpos"][i], self._physics["qvel"][i] = start
            self._streams[i] = streams.pack(rng)
        self._batch.forward(ordered)
        self.clock[chosen] = 0

    def reseed(self, ids: Ids, seeds: int | Sequence[int]) -> None:
        """See `Host`."""
        chosen = indices(ids, self.size)
        for i, seed in zip(chosen, seeds_for(chosen, seeds), strict=True):
            self._streams[i] = streams.pack(streams.generator(seed))

    def observe(self) -> Array:
        """See `Host`; float64, as Gymnasium's."""
        return self.task.observe(self.task, self._physics)

    def step(self, actions: ArrayLike, live: Ids = None) -> Step:
        """See `Host`."""
        chosen = indices(live, self.size)
        if not len(chosen):
            self.terms = {name: np.zeros(self.size) for name in self.terms}
            return Step(np.zeros(self.size), np.zeros(self.size, bool), np.zeros(self.size, bool))
        everyone = len(chosen) == self.size
        ids: Any = slice(None) if everyone else np.sort(chosen)
        action = actions_for(actions, self, chosen)[ids]
        position = self.task.position or _nowhere
        before = position(self._view(ids))
        self._physics["ctrl"][ids] = action
        failed = self._advance(None if everyone else ids)
        self.clock[ids] += 1
        after = self._view(ids)
        move = Move(action, (position(after) - before) / after.dt)
        terms, terminated = self.task.score(self.task, after, move)
        return self._report(ids, terms, terminated, failed)

    def _view(self, ids: Any) -> Physics:
        return self._physics if isinstance(ids, slice) else self._physics.take(ids)

    def _advance(self, ids: Array | None) -> Array | None:
        """Step; returns ids of simulations in which MuJoCo raised, if any."""
        try:
            self._batch.step(ids, nstep=self.task.frame_skip)
        except SimulationError as error:
            return error.ids
        return None

    def _report(self, ids: Any, terms: dict[str, Array], terminated: Array, failed: Array | None) -> Step:
        """Fill ``[M]`` arrays from the stepped simulations, and take the broken ones out."""
        reward = sum(terms.values(), np.zeros(len(terminated)))
        if isinstance(ids, slice):
            self.terms = {name: np.asarray(term, np.float64) for name, term in terms.items()}
        else:
            reward, terminated = self._spread(ids, reward), self._spread(ids, terminated)
            self.terms = {name: self._spread(ids, term).astype(np.float64) for name, term in terms.items()}
        broken = self._broken(reward, failed)
        if broken.any():
            self._batch.reset(np.flatnonzero(broken))
            reward[broken], terminated[broken] = 0, False
            for term in self.terms.values():
                term[broken] = 0
        return Step(reward, terminated, broken)

    def _spread(self, ids: Array, values: Array) -> Array:
        """``[n]`` to ``[M]``, zero elsewhere."""
        full = np.zeros(self.size, values.dtype)
        full[ids] = values
        return full

    def _broken(self, reward: Array, failed: Array | None) -> Array:
        """Which simulations went non-finite, bool ``[M]``."""
        broken = self._batch.warning[:, _FIRST_BAD:, 1].any(1)
        if failed is not None:
            broken[failed] = True
        # One sum per field is cheap, and is finite unless an entry is not (or the sum overflows: then the rows decide).
        for values in (reward, *self._whole.values()):
            if not np.isfinite(values.sum()):
                broken |= ~np.isfinite(values.reshape(self.size, -1)).all(1)
        return broken

    def snapshot(self, ids: Ids = None) -> Array:
        """See `Host`; float64 ``[n row_size]``."""
        chosen = indices(ids, self.size)
        derived = [a[chosen].reshape(len(chosen), -1) for a in self._derived.values()]
        clock = self.clock[chosen, None].astype(np.float64)
        return np.concatenate([self._batch.state[chosen], *derived, clock, self._streams[chosen]], 1)

    def restore(self, ids: Ids, rows: Array) -> None:
        """See `Host`."""
        chosen, rows = indices(ids, self.size), np.atleast_2d(np.asarray(rows, np.float64))
        if rows.shape[1] != self.row_size:
            raise InvalidData(f"snapshot rows have {rows.shape[1]} entries; {self.id} needs {self.row_size}")
        if len(rows) not in (1, len(chosen)):
            raise InvalidData(f"{len(rows)} snapshot rows for {len(chosen)} simulations")
        if not np.isfinite(rows).all():
            raise InvalidData(f"snapshot rows of {self.id} are not finite")
        at = self._batch.state.shape[1]
        self._batch.state[chosen] = rows[:, :at]
        for values in self._derived.values():
            width = values[0].size
            values[chosen] = rows[:, at : at + width].reshape(-1, *values.shape[1:])
            at += width
        self.clock[chosen] = rows[:, at].astype(np.int64)
        self._streams[chosen] = rows[:, at + 1 :]

    def frame(self, index: int, camera: str | None = None) -> Array:
        """See `Host`; MuJoCo's renderer, with the model's camera "track" if it has one."""
        cameras = [self._model.camera(i).name for i in range(self._model.ncam)]
        if camera is not None and camera not in cameras:
            raise UnknownName("camera", camera, cameras or ["(it has none)"])
        usual = "track" if "track" in cameras else -1
        renderer, data = self._painter
        data.qpos[:], data.qvel[:] = self._physics["qpos"][index], self._physics["qvel"][index]
        mujoco.mj_forward(self._model, data)
        renderer.update_scene(data, usual if camera is None else camera)
        return renderer.render()

    @cached_property
    def _painter(self) -> tuple[mujoco.Renderer, mujoco.MjData]:
        """Made at the first frame, as it needs OpenGL."""
        # Whatever a missing driver raises: MuJoCo's, GLFW's, EGL's or OSMesa's own errors have no common base.
        try:
            with warnings.catch_warnings(action="ignore"):
                return mujoco.Renderer(self._model, 480, 640), mujoco.MjData(self._model)
        except Exception as error:
            why, given = str(error).strip().partition("\n")[0], os.environ.get("MUJOCO_GL", "")
            raise ApportionError(
                f"MuJoCo finds no OpenGL to draw {self.id} with ({why}); set MUJOCO_GL to egl or osmesa before it "
                f"starts and install that library (MUJOCO_GL is {given!r})"
            ) from None

    def close(self) -> None:
        """Let go of the renderer, if there is one."""
        if "_painter" in self.__dict__:
            self._painter[0].close()


def _nowhere(physics: Physics) -> Array:
    """The position of tasks that pay for no speed."""
    return np.zeros(len(physics["qpos"]))


def _quieten() -> None:
    """Send MuJoCo's warnings to Python's log ("apportion.mujoco"), unless the user sends them elsewhere.

    MuJoCo would print each one and write MUJOCO_LOG.TXT into the current directory. Nothing is lost: a broken
    simulation is flagged.
    """
    if mujoco.get_mju_user_warning() is None:
        mujoco.set_mju_user_warning(logging.getLogger("apportion.mujoco").debug)


def load(task: Task) -> mujoco.MjModel:
    """The task's model, from the assets of the installed Gymnasium.

    Raises:
        ApportionError: When the file is missing or does not load.
    """
    try:
        path = importlib.resources.files("gymnasium") / "envs" / "mujoco" / "assets" / task.xml
        return mujoco.MjModel.from_xml_path(str(path))
    except (ModuleNotFoundError, ValueError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        raise ApportionError(f"the model of {task.id} does not load ({task.xml} of Gymnasium): {first}") from None
