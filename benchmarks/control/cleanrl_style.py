"""A PPO in one file of PyTorch, in the manner of CleanRL's `ppo_continuous_action`, as a peer to measure beside.

Its settings: one environment, 2,048 steps, 10 epochs of 32 minibatches, 64-64 tanh actor and critic, Adam at 3e-4 with
eps 1e-5, gamma 0.99, lambda 0.95, clip 0.2, clipped value loss, advantages normalised by minibatch, gradient norm 0.5,
and its chain of wrappers for clipped actions and normalised observations and rewards.
"""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import torch
from torch import nn

STEPS, MINIBATCHES, EPOCHS, GAMMA, LAM, CLIP = 2_048, 32, 10, 0.99, 0.95, 0.2


def environment(task: str) -> gym.vector.VectorEnv:
    def make() -> gym.Env:
        env: gym.Env = gym.make(task)
        env = gym.wrappers.RecordEpisodeStatistics(env)
        env = gym.wrappers.ClipAction(env)
        env = gym.wrappers.NormalizeObservation(env)
        env = gym.wrappers.TransformObservation(env, lambda x: np.clip(x, -10, 10), env.observation_space)
        env = gym.wrappers.NormalizeReward(env, gamma=GAMMA)
        return gym.wrappers.TransformReward(env, lambda r: float(np.clip(r, -10, 10)))

    return gym.vector.SyncVectorEnv([make])


def network(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    layers = [nn.Linear(inputs, 64), nn.Linear(64, 64), nn.Linear(64, outputs)]
    for layer, scale in zip(layers, (2**0.5, 2**0.5, gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class Agent(nn.Module):
    def __init__(self, observations: int, actions: int) -> None:
        super().__init__()
        self.critic, self.mean = network(observations, 1, 1.0), network(observations, actions, 0.01)
        self.log_std = nn.Parameter(torch.zeros(1, actions))

    def forward(self, x: torch.Tensor, action: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        normal = torch.distributions.Normal(self.mean(x), self.log_std.exp())
        action = normal.sample() if action is None else action
        return action, normal.log_prob(action).sum(1), self.critic(x).flatten()


class Program:
    """One collection and update a call; returns the environment steps taken."""

    def __init__(self, task: str) -> None:
        torch.manual_seed(0)
        self.envs = environment(task)
        self.agent = Agent(self.envs.single_observation_space.shape[0], self.envs.single_action_space.shape[0])
        self.optimiser = torch.optim.Adam(self.agent.parameters(), 3e-4, eps=1e-5)
        self.seen, self.done = torch.as_tensor(self.envs.reset(seed=0)[0], dtype=torch.float32), torch.zeros(1)

    def collect(self) -> tuple[torch.Tensor, ...]:
        rows: list[tuple[torch.Tensor, ...]] = []
        with torch.no_grad():
            for _ in range(STEPS):
                action, logp, value = self.agent(self.seen)
                following, reward, terminated, truncated, _ = self.envs.step(action.numpy())
                rows.append((self.seen, action, logp, value, torch.as_tensor(reward, dtype=torch.float32), self.done))
                self.seen = torch.as_tensor(following, dtype=torch.float32)
                self.done = torch.as_tensor(terminated | truncated, dtype=torch.float32)
            seen, action, logp, value, reward, done = (torch.cat(x) for x in zip(*rows, strict=True))
            advantage, last = torch.zeros(STEPS), torch.zeros(())
            values, ends = torch.cat([value, self.agent(self.seen)[2]]), torch.cat([done, self.done])
            for t in reversed(range(STEPS)):
                alive = 1 - ends[t + 1]
                delta = reward[t] + GAMMA * values[t + 1] * alive - values[t]
                advantage[t] = last = delta + GAMMA * LAM * alive * last
        return seen, action, logp, value, advantage

    def __call__(self) -> int:
        seen, action, logp, value, advantage = self.collect()
        target = advantage + value
        for _ in range(EPOCHS):
            for cut in torch.randperm(STEPS).split(STEPS // MINIBATCHES):
                _, new_logp, new_value = self.agent(seen[cut], action[cut])
                ratio = (new_logp - logp[cut]).exp()
                a = (advantage[cut] - advantage[cut].mean()) / (advantage[cut].std() + 1e-8)
                policy = torch.max(-a * ratio, -a * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
                near = value[cut] + (new_value - value[cut]).clamp(-CLIP, CLIP)
                critic = torch.max((new_value - target[cut]) ** 2, (near - target[cut]) ** 2).mean() / 2
                self.optimiser.zero_grad()
                (policy + 0.5 * critic).backward()
                nn.utils.clip_grad_norm_(self.agent.parameters(), 0.5)
                self.optimiser.step()
        return STEPS
