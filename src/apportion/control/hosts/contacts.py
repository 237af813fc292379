"""MuJoCo's batch with contact forces: what Gymnasium computes after the step and `mujoco.batch.Batch` cannot.

Gymnasium calls ``mj_rnePostConstraint`` after ``mj_step`` to fill ``cfrc_ext``. A force sensor would make MuJoCo do it
inside the step, but at the first stage of Runge-Kutta and not at the last, so the numbers differ. The C interface
underneath Batch (``mujoco/mjbatch.h``) has ``mjb_apply``, which runs any C function on every simulation's ``MjData`` on
the native threads, and ``mj_rnePostConstraint`` is such a function.

It needs one ``MjData`` per simulation (``persistent``): the constraint forces of the last substep must still be there.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import mujoco
import numpy as np
from mujoco import _batch
from mujoco.batch import SimulationError

from apportion.control.hosts.base import Array
from apportion.core.errors import ApportionError

_NONE, _ACC = mujoco.mjtStage.mjSTAGE_NONE.value, mujoco.mjtStage.mjSTAGE_ACC.value
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


class _Config(ctypes.Structure):
    """``mjBatchConfig``."""

    _fields_ = (("nthread", _INT), ("persistent", ctypes.c_bool))


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "mjb_makeBatch": (_POINTER, [_POINTER, _INT, ctypes.POINTER(_Config), ctypes.c_char_p, _INT]),
    "mjb_deleteBatch": (None, [_POINTER]),
    "mjb_nstate": (_INT, [_POINTER]),
    "mjb_state": (ctypes.POINTER(ctypes.c_double), [_POINTER]),
    "mjb_stateComponent": (_POINTER, [_POINTER, _INT, ctypes.POINTER(_INT)]),
    "mjb_warning": (ctypes.POINTER(_INT), [_POINTER]),
    "mjb_status": (ctypes.POINTER(_INT), [_POINTER]),
    "mjb_error": (ctypes.c_char_p, [_POINTER, _INT]),
    "mjb_output": (
        ctypes.POINTER(ctypes.c_double),
        [_POINTER, ctypes.c_char_p, ctypes.POINTER(_INT), ctypes.POINTER(_INT)],
    ),
    "mjb_step": (_INT, [_POINTER, _POINTER, _INT, _INT, _INT]),
    "mjb_forward": (_INT, [_POINTER, _POINTER, _INT, _INT]),
    "mjb_reset": (_INT, [_POINTER, _POINTER, _INT, _POINTER, _INT]),
    "mjb_apply": (_INT, [_POINTER, _POINTER, _INT, _POINTER, _POINTER, _INT]),
}


def _load() -> tuple[Any, ctypes.c_void_p]:
    """The C library that the bindings already loaded, with signatures, and the address of the function to apply."""
    # Looked up through the extension that links to it, so that the library's own file name does not matter.
    library = ctypes.CDLL(_batch.__file__)
    try:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        # It takes (model, data); the simulation's number and argument that mjb_apply adds are left unread.
        return library, ctypes.cast(library.mj_rnePostConstraint, _POINTER)
    except AttributeError as error:
        raise ApportionError(f"MuJoCo {mujoco.__version__} gives no access to contact forces: {error}") from None


class ContactBatch:
    """The part of `mujoco.batch.Batch` that a host uses, with ``cfrc_ext`` current after every step.

    Arrays are views of the library's memory: they must not outlive this object.

    Attributes:
        state: Integration-state rows, float64 ``[M S]``.
        warning: Counters, int32 ``[M 7 2]``; ``[..., 1]`` is the number.
    """

    def __init__(self, model: mujoco.MjModel, size: int, threads: int):
        self._library, self._contact_forces = _load()
        config, message = _Config(threads, True), ctypes.create_string_buffer(500)
        self._handle = self._library.mjb_makeBatch(model._address, size, ctypes.byref(config), message, len(message))
        if not self._handle:
            raise ApportionError(f"MuJoCo cannot make {size} simulations: {message.value.decode()}")
        weakref.finalize(self, self._library.mjb_deleteBatch, self._handle)
        self.size = size
        self._template = mujoco.MjData(model)
        self._warnings = int(mujoco.mjtWarning.mjNWARNING)
        width = self._library.mjb_nstate(self._handle)
        self.state = np.ctypeslib.as_array(self._library.mjb_state(self._handle), (size, width))
        counters = self._library.mjb_warning(self._handle)
        self.warning = np.ctypeslib.as_array(counters, (size, self._warnings, 2))

    def bind(self, name: str) -> Array:
        """A live array ``[M ...]`` over a float64 field of MjData; qpos, qvel and ctrl are views of the state."""
        shape = (self.size, *getattr(self._template, name).shape)
        component = {"qpos": "QPOS", "qvel": "QVEL", "ctrl": "CTRL"}.get(name)
        if component:
            size = _INT()
            bit = getattr(mujoco.mjtState, f"mjSTATE_{component}").value
            address = self._library.mjb_stateComponent(self._handle, bit, ctypes.byref(size))
            offset = (address - self.state.ctypes.data) // self.state.itemsize
            return self.state[:, offset : offset + size.value].reshape(shape)
        pointer = self._library.mjb_output(self._handle, name.encode(), None, None)
        if not pointer:
            raise ApportionError(f"MuJoCo {mujoco.__version__} cannot copy out {name}")
        return np.ctypeslib.as_array(pointer, shape)

    def step(self, ids: Array | None = None, nstep: int = 1) -> None:
        """Advance by nstep substeps, then compute contact forces, as Gymnasium does. Raises SimulationError."""
        sims, count = self._sims(ids)
        failed = self._library.mjb_step(self._handle, sims, count, nstep, _NONE)
        error = self._error(ids) if failed else None
        if error:  # nothing can be computed where the step itself failed
            called = np.arange(self.size) if ids is None else np.asarray(ids)
            sims, count = self._sims(np.setdiff1d(called, error.ids))
        self._library.mjb_apply(self._handle, sims, count, self._contact_forces, None, 0)
        # Outputs are copied out after calls that compute stages, not after mjb_apply: ask for none.
        self._library.mjb_forward(self._handle, sims, count, _NONE)
        if error:
            raise error

    def forward(self, ids: Array | None = None) -> None:
        """Run mj_forward. Raises SimulationError."""
        if self._library.mjb_forward(self._handle, *self._sims(ids), _ACC):
            raise self._error(ids)

    def reset(self, ids: Array | None = None, stage: int = _ACC) -> None:
        """Put simulations into the model's default state. Raises SimulationError."""
        if self._library.mjb_reset(self._handle, *self._sims(ids), None, stage):
            raise self._error(ids)

    def _sims(self, ids: Array | None) -> tuple[Any, int]:
        """Pointer to sorted ids, which must outlive the call, and their number."""
        if ids is None:
            return None, self.size
        kept = np.ascontiguousarray(ids, np.int32)
        pointer = kept.ctypes.data_as(_POINTER)  # holds a reference to kept
        return pointer, len(kept)

    def _error(self, ids: Array | None) -> SimulationError:
        status = np.ctypeslib.as_array(self._library.mjb_status(self._handle), (self.size,))
        called = np.arange(self.size) if ids is None else np.asarray(ids)
        failed = called[status[called] != 0]
        return SimulationError(failed, self._library.mjb_error(self._handle, int(failed[0])).decode(), len(called))
