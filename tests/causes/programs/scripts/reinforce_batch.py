"""Trains a policy with REINFORCE, with several episodes in each batch."""
import os
import tempfile

import numpy as np
import torch
import torch.nn as nn

from expected import expected

DEVICE = "cuda"


class PongLike:
    """Stands for an Atari environment: 4 stacked frames, 6 actions."""

    def __init__(self, length=100, seed=0):
        self.length = length
        self.rng = np.random.default_rng(seed)

    def _frame(self):
        return self.rng.random((4, 84, 84), dtype=np.float32)

    def reset(self):
        self.t = 0
        return self._frame()

    def step(self, action):
        self.t += 1
        return self._frame(), float(self.rng.choice([-1, 0, 1])), self.t >= self.length


class PolicyNet(nn.Module):
    def __init__(self, n_actions=6):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(4, 64, 5, stride=2), nn.ReLU(),
            nn.Conv2d(64, 128, 3, stride=2), nn.ReLU(),
            nn.Conv2d(128, 128, 3, stride=1), nn.ReLU())
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(128 * 17 * 17, 256), nn.ReLU(), nn.Linear(256, n_actions))

    def forward(self, x):
        return self.head(self.conv(x))


class Reinforce:
    def __init__(self, folder, fixed, gamma=0.99, lr=1e-4, num_batch_episodes=2):
        self.folder, self.fixed = folder, fixed
        self.net = PolicyNet().to(DEVICE)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=lr)
        self.gamma, self.num_batch_episodes = gamma, num_batch_episodes
        self.env = PongLike()
        self.state = self.env.reset()
        self.cur_rewards = []
        self.batch_states, self.batch_actions, self.batch_qvals = [], [], []
        self.total_rewards = []

    @torch.no_grad()
    def act(self, state):
        logits = self.net(torch.from_numpy(state).unsqueeze(0).to(DEVICE))
        return int(torch.distributions.Categorical(logits=logits.cpu()).sample())

    def calc_qvals(self, rewards):
        res, acc = [], 0.0
        for r in reversed(rewards):
            acc = r + self.gamma * acc
            res.append(acc)
        res = res[::-1]
        mean = sum(res) / len(res)
        return [q - mean for q in res]

    def train_batch(self):
        """Yields a batch for each num_batch_episodes."""
        episodes = 0
        while True:
            action = self.act(self.state)
            next_state, reward, done = self.env.step(action)
            self.cur_rewards.append(reward)
            self.batch_states.append(self.state)
            self.batch_actions.append(action)
            self.state = next_state
            if done:
                self.batch_qvals.extend(self.calc_qvals(self.cur_rewards))
                self.total_rewards.append(sum(self.cur_rewards))
                self.cur_rewards = []
                self.state = self.env.reset()
                episodes += 1
                if episodes == self.num_batch_episodes:
                    yield (torch.from_numpy(np.stack(self.batch_states)), torch.tensor(self.batch_actions),
                           torch.tensor(self.batch_qvals, dtype=torch.float32))
                    if self.fixed:
                        self.batch_states.clear()
                        self.batch_actions.clear()
                        self.batch_qvals.clear()
                    episodes = 0

    def loss(self, states, actions, qvals):
        logits = self.net(states)
        log_prob = torch.log_softmax(logits, dim=1)
        chosen = log_prob[torch.arange(len(actions), device=DEVICE), actions]
        return -(qvals * chosen).mean()

    def fit(self, steps=15):
        batches = self.train_batch()
        for _ in range(steps):
            states, actions, qvals = (t.to(DEVICE) for t in next(batches))
            loss = self.loss(states, actions, qvals)
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
            self.optimizer.step()
            avg = sum(self.total_rewards[-100:]) / len(self.total_rewards[-100:])
        torch.save(self.net.state_dict(), os.path.join(self.folder, "policy.pt"))
        return avg


@expected("growing_steps", fix=r"\.clear\(\)", thread="Lightning-Universe/lightning-bolts#425", memory=3072)
def reinforce_batch(fixed=False):
    """The lists of states, actions and values are never emptied, so that each batch has all the episodes of those before as well. Cured by:
    `.clear()` of the lists after each batch.
    """
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        return Reinforce(folder, fixed).fit()
