"""A film of a run's policy: the very episodes that `evaluate_run` would score from the same seed, as MP4."""

from __future__ import annotations

import functools
import importlib
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from apportion.control.cache import enable
from apportion.control.evaluate import LONGEST, TrainedPolicy, actor_of, load, play, play_on_host
from apportion.control.hosts import Host, World, host, world_of
from apportion.core.errors import ApportionError
from apportion.runs.display import Display
from apportion.runs.files import cannot_write
from apportion.runs.seed import check_seed

Show = Callable[[np.ndarray], None]
"""What a frame, uint8 [height width 3], is handed to."""


class Film:
    """An MP4 (H.264) that grows by frames; a file of that name is only there when it is whole.

    fps: frames in a second. Raises ApportionError where PyAV is missing, and when the file cannot be written.
    """

    def __init__(self, path: Path, fps: float) -> None:
        try:
            self._av: Any = importlib.import_module("av")
        except ImportError as error:
            raise ApportionError(f"encoding needs PyAV ({error}); pip install 'apportion[video]'") from None
        self.path, self._part = path, path.with_name(path.name + ".part")
        self._fps = Fraction(fps).limit_denominator(1000)
        self._stream: Any = None

    def __enter__(self) -> Film:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._av.open(str(self._part), "w", format="mp4")
        except OSError as error:
            raise cannot_write(self.path, error) from None
        return self

    def add(self, frame: np.ndarray) -> None:
        """One more frame. Odd sizes lose their last row or column, which H.264 cannot hold."""
        height, width = (2 * (side // 2) for side in frame.shape[:2])
        if self._stream is None:
            self._stream = self._file.add_stream("libx264", rate=self._fps)
            self._stream.width, self._stream.height, self._stream.pix_fmt = width, height, "yuv420p"
        picture = np.ascontiguousarray(frame[:height, :width])
        self._mux(self._av.VideoFrame.from_ndarray(picture, format="rgb24"))

    def _mux(self, frame: Any) -> None:
        assert self._stream is not None
        try:
            for packet in self._stream.encode(frame):
                self._file.mux(packet)
        except OSError as error:
            raise cannot_write(self.path, error) from None

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            if kind is None:
                self._mux(None)
            self._file.close()
            if kind is None:
                os.replace(self._part, self.path)
        except OSError as error:
            raise cannot_write(self.path, error) from None
        finally:
            with suppress(OSError):
                self._part.unlink()


def video(
    out: str | Path,
    file: str | Path | None = None,
    episodes: int = 1,
    seed: int = 0,
    camera: str | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Film the policy of the run in a folder, deterministically, one episode after the other.

    file: None makes it video.mp4 in the folder. episodes, seed: those of `evaluate_run`, whose episodes they are.
    camera: of a MuJoCo model, by name. Returns the file, the frames, and return and length of each episode.

    Raises ApportionError as `evaluate.load` does, and for what is missing to draw or to encode.
    """
    _prefer_egl()
    enable()
    if episodes < 1:
        raise ApportionError(f"episodes is {episodes}; it must be 1 or more")
    check_seed(seed)
    config, _, trained = load(Path(out))
    path = Path(out, "video.mp4") if file is None else Path(file)
    act = _on_host if isinstance(trained.simulator, World) else _classic
    fps, longest, run = act(trained, episodes, seed, camera)
    with Display(f"video {config['task']}", longest, "frames", quiet) as display, Film(path, fps) as film:
        frames = 0

        def show(frame: np.ndarray) -> None:
            nonlocal frames
            film.add(frame)
            frames += 1
            display.at(frames)

        returns, lengths = run(show)
    told = {"task": config["task"], "out": str(path), "frames": frames, "seconds": round(frames / fps, 3)}
    return told | {"returns": [float(x) for x in returns], "lengths": [int(x) for x in lengths]}


def _prefer_egl() -> None:
    """Without a screen MuJoCo draws by EGL; it decides when it is imported, and by default for a screen."""
    if platform.system() == "Linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        os.environ.setdefault("MUJOCO_GL", "egl")


Run = Callable[[Show], tuple[Any, Any]]


def _on_host(trained: TrainedPolicy, count: int, seed: int, camera: str | None) -> tuple[float, int, Run]:
    """Frames in a second, the most frames there can be, and what plays, shows, and gives returns and lengths [E].

    All episodes run side by side, as in an evaluation, once for each that is filmed: rows of a batch may differ in
    their last bits from the same rows of a smaller one.
    """
    assert isinstance(trained.simulator, World)
    place = world_of(functools.partial(host, trained.simulator.id, film=True))
    actor, networks = actor_of(trained.policy, trained.networks)
    one = place.open(1)
    fps = one.fps
    one.close()

    def run(show: Show) -> tuple[Any, Any]:
        scores = []
        for k in range(count):

            def watch(now: Host, moved: np.ndarray, k: int = k) -> None:
                if moved[k]:
                    show(now.frame(k, camera))

            returns, lengths = play_on_host(place, actor, count, True, networks, seed, watch)
            scores.append((returns[k], lengths[k]))
        returned, lasted = zip(*scores, strict=True)
        return returned, lasted

    return fps, count * (min(place.horizon, LONGEST) + 1), run


def _classic(trained: TrainedPolicy, count: int, seed: int, camera: str | None) -> tuple[float, int, Run]:
    """As `_on_host`, for jitted simulators: their states, drawn by Gymnasium's environment of the same id."""
    assert not isinstance(trained.simulator, World)
    from apportion.control.hosts.gym import drawn, make

    simulator, env = trained.simulator, make(trained.simulator.id, film=True)
    if camera is not None:
        raise ApportionError(f"{simulator.id} has no cameras to choose from; leave camera out")
    actor, networks = actor_of(trained.policy, trained.networks)
    starts, book = jax.jit(play, static_argnums=(0, 1, 2, 3))(simulator, actor, count, True, networks, np.uint32(seed))

    def step(state: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        following, _, _ = jax.vmap(simulator.step)(state, actor.applied(action))
        return following, following

    _, after = jax.jit(lambda: jax.lax.scan(step, starts, book.action))()
    states = np.asarray(jnp.concatenate([starts[None], after]), np.float64)
    returns, lengths = np.asarray(book.reward.sum(0)), np.asarray(book.mask.sum(0))

    def run(show: Show) -> tuple[Any, Any]:
        env.reset()
        for k in range(count):
            for state in states[: lengths[k] + 1, k]:
                env.unwrapped.state = state  # type: ignore[attr-defined]
                show(drawn(simulator.id, env))
        env.close()
        return returns, lengths

    return float(env.metadata["render_fps"]), int(lengths.sum()) + count, run
