"""Trains a double DQN agent of a platform game on stacked frames from a replay memory."""
import random
from collections import deque

import numpy as np
import torch
import torch.nn as nn

from expected import expected


class Emulator:
    """Gives four stacked grey frames per step."""

    def __init__(self, shape=(4, 240, 256), seed=0):
        self.t, rng = 0, np.random.default_rng(seed)
        self.pool = rng.random((16, *shape), dtype=np.float32)

    def reset(self):
        self.t = 0
        return self.pool[0]

    def step(self, action):
        self.t += 1
        return self.pool[(self.t + action) % 16], float(action), self.t % 100 == 0


class MarioNet(nn.Module):
    def __init__(self, actions):
        super().__init__()
        self.online, self.target = self.build(actions), self.build(actions)
        self.target.load_state_dict(self.online.state_dict())
        for p in self.target.parameters():
            p.requires_grad = False

    @staticmethod
    def build(actions):
        return nn.Sequential(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
                             nn.Conv2d(64, 64, 3, 2), nn.ReLU(), nn.Flatten(),
                             nn.Linear(64 * 13 * 14, 512), nn.ReLU(), nn.Linear(512, actions))

    def forward(self, x, model):
        return self.online(x) if model == "online" else self.target(x)


class Mario:
    def __init__(self, actions, device, fixed):
        self.device, self.actions, self.fixed = device, actions, fixed
        self.net = MarioNet(actions).to(device)
        self.memory = deque(maxlen=100000)
        self.batch_size, self.gamma = 32, 0.9
        self.eps, self.eps_decay, self.eps_min = 1.0, 0.9999, 0.1
        self.curr_step, self.burnin, self.learn_every, self.sync_every = 0, 100, 30, 1000
        self.opt = torch.optim.Adam(self.net.online.parameters(), lr=0.00025)
        self.loss_fn = nn.SmoothL1Loss()

    def act(self, state):
        if random.random() < self.eps:
            a = random.randrange(self.actions)
        else:
            with torch.no_grad():
                s = torch.tensor(state, device=self.device).unsqueeze(0)
                a = int(self.net(s, "online").argmax(1).item()) % self.actions
        self.eps = max(self.eps_min, self.eps * self.eps_decay)
        self.curr_step += 1
        return a

    def cache(self, state, next_state, action, reward, done):
        device = "cpu" if self.fixed else self.device
        state = torch.tensor(state, device=device)
        next_state = torch.tensor(next_state, device=device)
        action = torch.tensor([action], device=device)
        reward = torch.tensor([reward], device=device)
        done = torch.tensor([done], device=device)
        self.memory.append((state, next_state, action, reward, done))

    def recall(self):
        batch = random.sample(self.memory, self.batch_size)
        state, next_state, action, reward, done = (torch.stack(x).to(self.device) for x in zip(*batch))
        return state, next_state, action.squeeze(1), reward.squeeze(1), done.squeeze(1)

    def learn(self):
        if self.curr_step % self.sync_every == 0:
            self.net.target.load_state_dict(self.net.online.state_dict())
        if self.curr_step < self.burnin or self.curr_step % self.learn_every:
            return None
        state, next_state, action, reward, done = self.recall()
        q = self.net(state, "online").gather(1, action[:, None]).squeeze(1)
        with torch.no_grad():
            best = self.net(next_state, "online").argmax(1)
            nq = self.net(next_state, "target").gather(1, best[:, None]).squeeze(1)
            tgt = reward + (1 - done.float()) * self.gamma * nq
        loss = self.loss_fn(q, tgt)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return loss.item()


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="pytorch/tutorials#2381")
def replay_on_gpu(fixed=False, episodes=5):
    random.seed(0)
    env, agent, rewards, losses = Emulator(), Mario(5, "cuda", fixed), [], []
    for _ in range(episodes):
        state, done, total = env.reset(), False, 0.0
        while not done:
            a = agent.act(state)
            nxt, r, done = env.step(a)
            agent.cache(state, nxt, a, r, done)
            loss = agent.learn()
            if loss is not None:
                losses.append(loss)
            total += r
            state = nxt
        rewards.append(total)
    return rewards, losses
