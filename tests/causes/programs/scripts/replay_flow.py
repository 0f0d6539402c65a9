"""Trains a policy by trajectory balance on molecule fragments and fills a replay buffer."""
import random
from collections import deque

import torch
import torch.nn as nn

from expected import expected

cuda = torch.device("cuda")
STATE, ACTIONS, HORIZON, PARALLEL = 256, 72, 12, 512


class Policy(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(STATE, width), nn.LeakyReLU(), nn.Linear(width, width),
                                  nn.LeakyReLU(), nn.Linear(width, width), nn.LeakyReLU())
        self.logits = nn.Linear(width, ACTIONS)
        self.log_z = nn.Parameter(torch.zeros(()))

    def forward(self, s):
        return self.logits(self.body(s))


class ReplayBuffer:
    def __init__(self, capacity=10000):
        self.items = deque(maxlen=capacity)

    def push(self, trajectory):
        self.items.append(trajectory)

    def sample(self, k):
        return random.sample(list(self.items), min(k, len(self.items)))

    def __len__(self):
        return len(self.items)


class Environment:
    def __init__(self):
        self.effect = torch.randn(ACTIONS, STATE, device=cuda) * 0.1

    def step(self, state, action):
        return torch.tanh(state + self.effect[action])

    def reward(self, state):
        return state.pow(2).mean(-1)


def rollout(policy, env):
    state = torch.zeros(PARALLEL, STATE, device=cuda)
    states, log_pf = [state], 0
    for _ in range(HORIZON):
        dist = torch.distributions.Categorical(logits=policy(state), validate_args=False)
        action = torch.randint(0, ACTIONS, (PARALLEL,), device=cuda)
        log_pf = log_pf + dist.log_prob(action)
        state = env.step(state, action)
        states.append(state)
    return {"states": torch.stack(states), "log_pf": log_pf, "reward": env.reward(state)}


def tb_loss(policy, traj):
    return (policy.log_z + traj["log_pf"] - traj["reward"].clamp(min=1e-4).log()).pow(2).mean()


def replay_stats(buffer):
    picked = buffer.sample(8)
    return sum(t["reward"].mean().item() for t in picked) / len(picked)


@expected("graph_of_earlier_steps", fix="detach", thread="recursionpharma/gflownet#130", memory=3072)
def replay_flow(fixed=False):
    """The trajectories in the replay buffer keep their tensors on the GPU, and the graph of their `log_pf`. Cured by: Detach each tensor
    that is pushed, and send it to the CPU.
    """
    policy, env, buffer = Policy().to(cuda), Environment(), ReplayBuffer()
    opt = torch.optim.Adam(policy.parameters(), lr=5e-4)
    for _ in range(30):
        for _ in range(2):
            trajectory = rollout(policy, env)
            buffer.push({key: value.detach().cpu() for key, value in trajectory.items()} if fixed else trajectory)
        traj = rollout(policy, env)
        loss = tb_loss(policy, traj)
        opt.zero_grad()
        loss.backward()
        opt.step()
        loss.item(), replay_stats(buffer)
    return loss.shape
