"""A film shows the episodes that an evaluation scores, and says what is missing where it cannot be made."""

import json
import os
import subprocess
import sys

import gymnasium
import numpy as np
import pytest

from apportion.control.evaluate import evaluate_policy, load
from apportion.control.run import train_run
from apportion.control.video import Film, video
from apportion.core.errors import ApportionError

av = pytest.importorskip("av")
SMALL = [("setup.envs", 2), ("setup.hidden", (8,)), ("sampler.horizon", 16)]


def frames(path):
    with av.open(str(path)) as file:
        return [f.to_ndarray(format="rgb24") for f in file.decode(file.streams.video[0])], file.streams.video[0]


class Painted(gymnasium.Env):
    """A walk that paints where it stands: the height of a white bar, of a picture with odd sides."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 12}  # noqa: RUF012
    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.uniform(0.2, 0.8)
        return np.array([self.place], np.float32), {}

    def step(self, action):
        self.place += self.np_random.uniform(-0.1, 0.1)
        return np.array([self.place], np.float32), self.place, not 0 < self.place < 1, False, {}

    def render(self):
        picture = np.zeros((65, 33, 3), np.uint8)
        picture[: round(64 * min(max(self.place, 0), 1))] = 255
        return picture


@pytest.fixture(scope="module")
def painted(tmp_path_factory):
    gymnasium.register("Painted-v0", Painted, max_episode_steps=9)
    out = tmp_path_factory.mktemp("painted") / "run"
    train_run("a2c", "Painted-v0", 64, out=out, overrides=SMALL, quiet=True)
    yield out
    del gymnasium.registry["Painted-v0"]


def test_the_film_is_the_evaluation(painted, tmp_path):
    told = video(painted, tmp_path / "films" / "walk.mp4", episodes=3, seed=5, quiet=True)
    _, _, p = load(painted)
    score = evaluate_policy(p.simulator, p.policy, p.networks, 3, 5)
    assert told["returns"] == score.returns.tolist()
    assert told["lengths"] == score.lengths.tolist()
    seen, stream = frames(tmp_path / "films" / "walk.mp4")
    assert len(seen) == told["frames"] == sum(told["lengths"]) + 3
    assert seen[0].shape == (64, 32, 3)
    assert stream.average_rate == 12
    # The bar of every later frame is its step's reward; each episode's rewards add up to its return.
    bars = [np.mean(f > 127) for f in seen]
    at = 0
    for total, length in zip(told["returns"], told["lengths"], strict=True):
        assert sum(bars[at + 1 : at + 1 + length]) == pytest.approx(total, abs=0.02 * length)
        at += length + 1


def test_an_environment_that_does_not_draw_says_so(painted, monkeypatch):
    monkeypatch.setattr(Painted, "__init__", lambda self: None)
    with pytest.raises(ApportionError, match=r"Painted-v0 draws no picture: .*render_mode"):
        video(painted, quiet=True)


def test_by_default_it_lies_in_the_run(painted):
    assert video(painted, quiet=True)["out"] == str(painted / "video.mp4")
    assert (painted / "video.mp4").exists()


def test_a_film_that_fails_leaves_what_was_there(painted, tmp_path, monkeypatch):
    path = tmp_path / "walk.mp4"
    path.write_bytes(b"before")
    monkeypatch.setattr(Painted, "render", lambda self: None)
    with pytest.raises(ApportionError, match=r"Painted-v0 draws no picture: its render\(\) gives NoneType"):
        video(painted, path, quiet=True)
    assert [p.name for p in tmp_path.iterdir()] == ["walk.mp4"]
    assert path.read_bytes() == b"before"


def test_what_is_refused(painted, tmp_path, monkeypatch):
    with pytest.raises(ApportionError, match="has no cameras to choose from"):
        video(painted, tmp_path / "a.mp4", camera="track", quiet=True)
    with pytest.raises(ApportionError, match="episodes is 0"):
        video(painted, episodes=0, quiet=True)
    with pytest.raises(ApportionError, match="seed is -1"):
        video(painted, seed=-1, quiet=True)
    with pytest.raises(ApportionError, match=r"cannot write /proc/a\.mp4"):
        video(painted, "/proc/a.mp4", quiet=True)
    with pytest.raises(ApportionError, match="there is no folder"):
        video(tmp_path / "none", quiet=True)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ApportionError, match=r"encoding needs PyAV .*pip install 'apportion\[video\]'"):
        Film(tmp_path / "a.mp4", 30)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def pendulum(tmp_path_factory):
    out = tmp_path_factory.mktemp("pendulum") / "run"
    train_run("a2c", "Pendulum-v1", 64, out=out, overrides=SMALL, quiet=True)
    return out


def test_jitted_simulators_are_drawn_from_their_states(pendulum, tmp_path, monkeypatch):
    """Whatever draws: the states it is given are the evaluated episodes', as Gymnasium's own step would make them."""
    seen = []

    def picture(id, env):
        seen.append(np.array(env.unwrapped.state))
        return np.zeros((8, 8, 3), np.uint8)

    monkeypatch.setattr("apportion.control.hosts.gym.drawn", picture)
    told = video(pendulum, tmp_path / "a.mp4", episodes=2, seed=3, quiet=True)
    _, _, p = load(pendulum)
    score = evaluate_policy(p.simulator, p.policy, p.networks, 2, 3)
    np.testing.assert_allclose(told["returns"], score.returns, rtol=1e-5)
    assert told["lengths"] == [200, 200]
    env = gymnasium.make("Pendulum-v1").unwrapped
    env.reset()
    for start in (0, 201):
        env.state = seen[start]
        for t in range(5):
            angle, spin = env.state
            action, _ = p.predict(np.array([np.cos(angle), np.sin(angle), spin], np.float32))
            env.step(action)
            np.testing.assert_allclose(env.state, seen[start + t + 1], atol=1e-4)


def test_classic_tasks_are_drawn_by_pygame(pendulum, tmp_path):
    pytest.importorskip("pygame")
    told = video(pendulum, tmp_path / "a.mp4", quiet=True)
    seen, stream = frames(tmp_path / "a.mp4")
    assert len(seen) == told["frames"] == 201
    assert stream.average_rate == 30
    assert max(float(np.abs(a.astype(float) - b).max()) for a, b in zip(seen[1:], seen, strict=False)) > 50


def test_without_pygame_the_message_says_what_to_install(pendulum, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(ApportionError, match=r"cannot draw Pendulum-v1 \(pygame .*pip install 'apportion\[video\]'"):
        video(pendulum, tmp_path / "a.mp4", quiet=True)


@pytest.fixture(scope="module")
def robot(tmp_path_factory):
    pytest.importorskip("mujoco")
    out = tmp_path_factory.mktemp("robot") / "run"
    train_run("a2c", "InvertedPendulum-v5", 64, out=out, overrides=SMALL, quiet=True)
    return out


def filmed(out, gl, *args):
    """In a process of its own, as MuJoCo chooses its OpenGL when it is imported."""
    command = [sys.executable, "-m", "apportion.cli", "video", str(out), "--json", *args]
    environ = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL")}
    return subprocess.run(command, capture_output=True, text=True, env=environ | gl, timeout=120)


def test_mujoco_tasks_are_drawn_by_mujoco(robot, tmp_path):
    done = filmed(robot, {}, "--out", str(tmp_path / "a.mp4"), "--seed", "2")
    if "finds no OpenGL" in done.stderr:
        pytest.skip("no EGL on this machine")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    _, _, p = load(robot)
    assert told["returns"] == evaluate_policy(p.simulator, p.policy, p.networks, 1, 2).returns.tolist()
    seen, stream = frames(tmp_path / "a.mp4")
    assert len(seen) == told["frames"] == told["lengths"][0] + 1
    assert seen[0].shape == (480, 640, 3)
    assert stream.average_rate == 25
    assert seen[0].std() > 5
    assert float(np.abs(seen[-1].astype(float) - seen[0]).max()) > 50


@pytest.mark.parametrize(("gl", "word"), [("glfw", "finds no OpenGL"), ("nonsense", "does not load")])
def test_without_opengl_the_message_names_mujoco_gl(gl, word, robot):
    done = filmed(robot, {"MUJOCO_GL": gl})
    assert done.returncode == 2
    assert word in done.stderr
    assert "MUJOCO_GL" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (robot / "video.mp4").exists()


def test_cameras_are_refused_by_name(robot):
    from apportion.control.hosts import host

    with pytest.raises(ApportionError, match="unknown camera 'side'"):
        host("InvertedPendulum-v5", 1).frame(0, "side")
