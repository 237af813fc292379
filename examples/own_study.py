"""A study of one's own: a changed method beside the original, on a Gymnasium task that nobody else has."""

import tempfile

import gymnasium
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from apportion import methods, study
from apportion.core.parts import LeaveOneOut

# The task: any Gymnasium environment under an id. Each process of the study reads this file and so knows it too.
gymnasium.register("ShortPole-v0", entry_point=CartPoleEnv, max_episode_steps=100)

# The methods: whatever the catalogue or a line of changed parts gives.
mine = methods.dr_grpo.replace(baseline=LeaveOneOut())

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as out:
        plan = study.plan([methods.dr_grpo, mine], ["ShortPole-v0"], seeds=1, steps=2_000)
        study.run(plan, out, workers=2)
        table = study.load(out)
        final = table[table["kind"] == "final"]
        print(final.groupby("arm", observed=True)["return_mean"].describe()[["count", "mean", "min", "max"]])
