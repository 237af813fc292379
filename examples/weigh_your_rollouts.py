"""Weights for rollouts that another program produced: fill a `Rollouts`, read `w`, keep your own training loop."""

import numpy as np

from apportion import methods
from apportion.core.rollouts import Rollouts
from apportion.core.weigh import advantages, weights

rng = np.random.default_rng(0)
N, G, T = 2, 4, 5  # groups, siblings, decisions
length = rng.integers(2, T + 1, size=(N, G))
mask = np.arange(T) < length[..., None]
reward = np.zeros((N, G, T))
np.put_along_axis(reward, length[..., None] - 1, rng.integers(0, 2, size=(N, G, 1)) * 1.0, axis=-1)
logq = np.log(rng.uniform(0.2, 1.0, size=(N, G, T)))

book = Rollouts(reward=reward, mask=mask, logq=logq, logref=logq, horizon=T).check()
for method in (methods.grpo, methods.dr_grpo, methods.rloo):
    ledger = weights(method, advantages(method, book), logp=logq)
    print(f"{method.name:<10} first group's weights\n{ledger.w[0].round(3)}")
