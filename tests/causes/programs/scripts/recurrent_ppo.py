"""Trains a recurrent agent by PPO on rollouts that go on with the state of its LSTM."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected


class GridAgent(nn.Module):
    def __init__(self, obs_dim=512, hidden=512, actions=9):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(obs_dim, 1024), nn.ELU(), nn.Linear(1024, hidden), nn.ELU())
        self.lstm = nn.LSTM(hidden, hidden, num_layers=2)
        self.actor = nn.Linear(hidden, actions)
        self.critic = nn.Linear(hidden, 1)

    def forward(self, obs, state):
        z = self.encoder(obs).unsqueeze(0)
        z, state = self.lstm(z, state)
        z = z.squeeze(0)
        return self.actor(z), self.critic(z).squeeze(-1), state


class Experience:
    def __init__(self, horizon, agents, obs_dim, hidden, device, fixed=False):
        self.obs = torch.zeros(horizon, agents, obs_dim, device=device)
        self.actions = torch.zeros(horizon, agents, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(horizon, agents, device=device)
        self.values = torch.zeros(horizon, agents, device=device)
        self.rewards = torch.zeros(horizon, agents, device=device)
        self.lstm_h = torch.zeros(2, agents, hidden, device=device)
        self.lstm_c = torch.zeros(2, agents, hidden, device=device)
        self.ptr, self.fixed = 0, fixed

    def get_state(self):
        return self.lstm_h, self.lstm_c

    def store(self, obs, action, logprob, value, reward, state):
        t = self.ptr
        self.obs[t] = obs
        self.actions[t] = action
        self.logprobs[t] = logprob.detach()
        self.values[t] = value.detach()
        self.rewards[t] = reward
        self.lstm_h, self.lstm_c = (s.detach() for s in state) if self.fixed else state
        self.ptr += 1

    def full(self):
        return self.ptr >= self.obs.shape[0]

    def reset(self):
        self.ptr = 0


class VecEnv:
    def __init__(self, n, obs_dim):
        self.n, self.obs_dim = n, obs_dim

    def step(self, action):
        return torch.randn(self.n, self.obs_dim), torch.randn(self.n)


def rollout(agent, env, exp, obs):
    exp.reset()
    while not exp.full():
        logits, value, state = agent(obs, exp.get_state())
        dist = torch.distributions.Categorical(logits=logits, validate_args=False)
        action = dist.sample()
        next_obs, reward = env.step(action)
        exp.store(obs, action, dist.log_prob(action), value, reward.cuda(), state)
        obs = next_obs.cuda()
    return obs


def update(agent, opt, exp, minibatch=16):
    returns = exp.rewards.flip(0).cumsum(0).flip(0)
    adv = returns - exp.values
    for start in range(0, exp.obs.shape[0], minibatch):
        sl = slice(start, start + minibatch)
        z = agent.encoder(exp.obs[sl])
        z, _ = agent.lstm(z)
        logp = F.log_softmax(agent.actor(z), -1).gather(-1, exp.actions[sl].unsqueeze(-1)).squeeze(-1)
        ratio = (logp - exp.logprobs[sl]).exp()
        pg = -torch.min(ratio * adv[sl], ratio.clamp(0.8, 1.2) * adv[sl]).mean()
        vf = F.mse_loss(agent.critic(z).squeeze(-1), returns[sl])
        loss = pg + 0.5 * vf
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss.item()


@expected("recurrent_state", fix="detach|no_grad", thread="Metta-AI/metta#1139", memory=11900)
def recurrent_ppo(fixed=False):
    """`store` keeps the state of the LSTM with its graph, and the next step goes on with it: the graph of the rollout, which runs with
    gradients, grows without end. Cured by: Detach the state where it is stored, or `torch.no_grad()` around the rollout.
    """
    agents, horizon, obs_dim, hidden = 1024, 32, 512, 512
    agent = GridAgent(obs_dim, hidden).cuda()
    opt = torch.optim.Adam(agent.parameters(), lr=3e-4)
    env = VecEnv(agents, obs_dim)
    exp = Experience(horizon, agents, obs_dim, hidden, "cuda", fixed)
    obs = torch.randn(agents, obs_dim).cuda()
    for _ in range(14):
        obs = rollout(agent, env, exp, obs)
        loss = update(agent, opt, exp)
    return loss
