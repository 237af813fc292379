"""CartPole-v1 side by side: apportion, Rejax 0.1.3 and Stable-Baselines3 2.9.2, in one run on one machine.

    pip install -e ".[bench]" && python benchmarks/control/cartpole.py [--seeds 10] [--sb3-seeds 10] [--json FILE]

Speed: PPO with the same network (64-64 swish actor and critic), batch (64 x 64), minibatches (16) and epochs (8),
which are Rejax's defaults; the programs take turns and the best of each is compared. Time to solve: environment steps
until 20 deterministic episodes average 495 or more, and the training seconds up to there (evaluation is not counted,
compilation is, and is also shown apart), each library at its own best settings: apportion's preset, Rejax at its
defaults and at our settings (the better counts), Stable-Baselines3 at the tuned settings of its zoo.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from typing import Any

ENVS, STEPS, MINIBATCHES, EPOCHS = 64, 64, 16, 8
SOLVED, BUDGET, EVERY = 495.0, 500_000, 2_048
SPEED_STEPS = 524_288


def matrix_rate() -> float:
    """GFLOP/s of the largest product in the update ([64 64] @ [64 256]), the limit of one core."""
    import jax
    import jax.numpy as jnp

    a, b, repeats = jnp.eye(64), jnp.ones((64, 256)), 2000
    program = jax.jit(lambda a, b: jax.lax.fori_loop(0, repeats, lambda i, x: a @ x, b)).lower(a, b).compile()
    best = min(_timed(program, a, b)[0] for _ in range(7))
    return 2 * 64 * 64 * 256 * repeats / best / 1e9


def _timed(f: Any, *args: Any) -> tuple[float, Any]:
    import jax

    began = time.perf_counter()
    out = jax.block_until_ready(f(*args))
    return time.perf_counter() - began, out


def update_flops() -> float:
    """Floating-point operations of the matrix products in one iteration's minibatch gradients."""
    actor, critic = (4, 64, 64, 2), (4, 64, 64, 1)
    forward = sum(i * o for net in (actor, critic) for i, o in itertools.pairwise(net))
    back_to_input = sum(net[0] * net[1] for net in (actor, critic))
    return 2 * (3 * forward - back_to_input) * ENVS * STEPS * EPOCHS


def speed_ours() -> dict[str, Any]:
    """Environment steps per second of our PPO at Rejax's default sizes."""
    import jax

    from apportion.control.cache import COMPILER_OPTIONS
    from apportion.control.engine import Engine, Setup
    from apportion.control.simulators import simulator
    from apportion.core.catalogue import ppo
    from apportion.core.update import Adam, ValueLoss

    method = ppo.replace(
        sampler=ppo.sampler.replace(horizon=STEPS, minibatches=MINIBATCHES, epochs=EPOCHS),
        update=Adam(3e-4),
        value_loss=ValueLoss(0.5, clip=0.2),
        entropy=0.01,
    )
    engine = Engine(method, simulator("CartPole-v1"), Setup(envs=ENVS, activation="swish"), SPEED_STEPS)
    state = engine.init(0)
    compiling, program = _timed(lambda: jax.jit(engine.iterate).lower(state).compile(COMPILER_OPTIONS))
    state, _ = program(state)
    began = time.perf_counter()
    for _ in range(SPEED_STEPS // (ENVS * STEPS)):
        state, _ = program(state)
    jax.block_until_ready(state)
    return {"rate": SPEED_STEPS / (time.perf_counter() - began), "compile": compiling, "matrix": matrix_rate()}


def speed_rejax() -> dict[str, Any]:
    """Environment steps per second of Rejax's PPO at its defaults, evaluation off."""
    import jax
    from rejax import PPO

    algo = PPO.create(
        env="CartPole-v1", total_timesteps=SPEED_STEPS, eval_freq=SPEED_STEPS, skip_initial_evaluation=True
    ).replace(eval_callback=lambda *_: ())
    key = jax.random.key(0)
    compiling, program = _timed(lambda: jax.jit(algo.train).lower(key).compile())
    jax.block_until_ready(program(key))
    seconds, _ = _timed(program, key)
    return {"rate": SPEED_STEPS / seconds, "compile": compiling}


def solve_ours(seeds: int) -> dict[str, Any]:
    """Steps and training seconds until solved, our preset."""
    import jax

    from apportion.control.cache import COMPILER_OPTIONS
    from apportion.control.engine import Engine
    from apportion.control.evaluate import evaluate
    from apportion.control.presets import resolve
    from apportion.control.simulators import simulator

    method, setup, steps = resolve("ppo", "CartPole-v1")
    engine = Engine(method, simulator("CartPole-v1"), setup, steps)
    began = time.perf_counter()
    start = jax.jit(engine.init).lower(0).compile(COMPILER_OPTIONS)
    program = jax.jit(engine.iterate).lower(start(0)).compile(COMPILER_OPTIONS)
    compiling = time.perf_counter() - began
    evaluate(engine, start(0).parameters, 20, 0)
    runs = []
    for seed in range(seeds):
        state, spent, at, due, solved = start(seed), 0.0, 0, EVERY, False
        while at < steps and not solved:
            seconds, (state, _) = _timed(program, state)
            spent, at = spent + seconds, int(state.env_steps)
            if at >= due:
                due += EVERY
                solved = evaluate(engine, state.parameters, 20, seed).returns.mean() >= SOLVED
        runs.append((at if solved else None, spent))
    return {"compile": compiling, "runs": runs}


def solve_rejax(seeds: int, ours: bool) -> dict[str, Any]:
    """Steps and training seconds until solved; at Rejax's defaults or at our preset's values.

    Evaluations come from one run with them; the seconds per step from the same program without them.
    """
    import jax
    import jax.numpy as jnp
    from rejax import PPO

    settings: dict[str, Any] = {"env": "CartPole-v1", "total_timesteps": BUDGET}
    if ours:
        settings |= {
            "num_envs": 8, "num_steps": 32, "num_minibatches": 1, "num_epochs": 20, "learning_rate": 1e-3,
            "gamma": 0.98, "gae_lambda": 0.8, "ent_coef": 0.0, "max_grad_norm": 0.5, "total_timesteps": 100_096,
            "agent_kwargs": {"activation": "tanh"},
        }  # fmt: skip
    total = settings["total_timesteps"]
    every = 4096 if not ours else EVERY
    watched = PPO.create(**settings, eval_freq=every, skip_initial_evaluation=True)
    returns = jax.jit(lambda key: jnp.mean(watched.train(key)[1][1], axis=-1))
    bare = PPO.create(**settings, eval_freq=total, skip_initial_evaluation=True)
    bare = bare.replace(eval_callback=lambda *_: ())
    key = jax.random.key(0)
    compiling, program = _timed(lambda: jax.jit(bare.train).lower(key).compile())
    jax.block_until_ready(program(key))
    per_step = _timed(program, key)[0] / total
    runs = []
    for seed in range(seeds):
        curve = [float(x) for x in returns(jax.random.key(seed))]
        first = next((i for i, x in enumerate(curve) if x >= SOLVED), None)
        at = total if first is None else (first + 1) * every
        runs.append((None if first is None else at, at * per_step))
    return {"compile": compiling, "runs": runs}


def solve_sb3(seeds: int) -> dict[str, Any]:
    """Steps and training seconds until solved, Stable-Baselines3 PPO at rl-baselines3-zoo's tuned settings."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    class Watch(BaseCallback):
        due, solved, paused = EVERY, None, 0.0

        def __init__(self, seed: int):
            super().__init__()
            self.eval_env = make_vec_env("CartPole-v1", 8, seed=1000 + seed)

        def _on_step(self) -> bool:
            return self.solved is None

        def _on_rollout_start(self) -> None:
            if self.num_timesteps < self.due or self.solved is not None:
                return
            self.due += EVERY
            began = time.perf_counter()
            if evaluate_policy(self.model, self.eval_env, 20, deterministic=True)[0] >= SOLVED:
                self.solved = self.num_timesteps
            self.paused += time.perf_counter() - began

    runs = []
    for seed in range(seeds):
        env = make_vec_env("CartPole-v1", 8, seed=seed)
        model = PPO(
            "MlpPolicy", env, n_steps=32, batch_size=256, gae_lambda=0.8, gamma=0.98, n_epochs=20, ent_coef=0.0,
            learning_rate=lambda left: 1e-3 * left, clip_range=lambda left: 0.2 * left, seed=seed, device="cpu",
        )  # fmt: skip
        watch = Watch(seed)
        began = time.perf_counter()
        model.learn(100_000, callback=watch)
        runs.append((watch.solved, time.perf_counter() - began - watch.paused))
        print(f"  Stable-Baselines3 seed {seed}: {runs[-1]}", file=sys.stderr, flush=True)
    return {"compile": 0.0, "runs": runs}


def worker(what: str, *args: str) -> Any:
    """Run one measurement in a fresh process, so that no library warms another's caches."""
    command = [sys.executable, __file__, "--worker", what, *args]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure everything and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--sb3-seeds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json")
    options = parser.parse_args()
    ours = [worker("speed_ours")]
    rejax = [worker("speed_rejax")]
    for _ in range(options.repeats - 1):
        ours.append(worker("speed_ours"))
        rejax.append(worker("speed_rejax"))
    best, peer = max(r["rate"] for r in ours), max(r["rate"] for r in rejax)
    ratio = statistics.median(a["rate"] / b["rate"] for a, b in zip(ours, rejax, strict=True))
    matrix = max(r["matrix"] for r in ours)
    reached = update_flops() * best / (ENVS * STEPS) / 1e9
    print(f"PPO on CartPole-v1, {ENVS} x {STEPS}, {MINIBATCHES} minibatches, {EPOCHS} epochs, 64-64 swish")
    print(f"  apportion  {best:10,.0f} env steps/s   compile {min(r['compile'] for r in ours):.1f} s")
    print(f"  Rejax      {peer:10,.0f} env steps/s   compile {min(r['compile'] for r in rejax):.1f} s")
    print(f"  ratio      {best / peer:10.2f} (best to best)   {ratio:.2f} (median of turns)")
    print(
        f"  update     {reached:10.0f} GFLOP/s, {reached / matrix:.0%} of one core's {matrix:.0f} on [64 64]@[64 256]"
    )
    solved = {
        "apportion": worker("solve_ours", str(options.seeds)),
        "Rejax, its defaults": worker("solve_rejax", str(options.seeds), "0"),
        "Rejax, our settings": worker("solve_rejax", str(options.seeds), "1"),
        "Stable-Baselines3, zoo": worker("solve_sb3", str(options.sb3_seeds)),
    }
    print(f"\nSteps and seconds until 20 deterministic episodes average {SOLVED:.0f}")
    print(f"  {'':24}{'solved':>8}{'median':>9}{'worst':>9}{'s a seed':>10}{'compile s':>11}{'in all, s':>11}")
    for name, result in solved.items():
        steps = sorted(at for at, _ in result["runs"] if at is not None)
        each = statistics.mean(s for _, s in result["runs"])
        middle, worst = (steps[len(steps) // 2], steps[-1]) if steps else (0, 0)
        share = f"{len(steps)}/{len(result['runs'])}"
        whole = sum(s for _, s in result["runs"]) + result["compile"]
        print(f"  {name:24}{share:>8}{middle:>9,}{worst:>9,}{each:>10.2f}{result['compile']:>11.2f}{whole:>11.2f}")
    if options.json:
        with open(options.json, "w") as f:
            json.dump({"ours": ours, "rejax": rejax, "solved": solved}, f, indent=1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        name, *rest = sys.argv[2:]
        print(json.dumps(globals()[name](*(int(x) for x in rest))))
    else:
        main()
