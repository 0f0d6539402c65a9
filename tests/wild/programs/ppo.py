"""PPO of stable-baselines3 with a convolutional policy."""
import sys

import gymnasium
import numpy
from stable_baselines3 import PPO


class Pictures(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 255, (3, 84, 84), numpy.uint8)
    action_space = gymnasium.spaces.Discrete(6)

    def reset(self, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 1.0, False, numpy.random.random() < 0.05, {}


batch = int(sys.argv[1])
PPO("CnnPolicy", Pictures(), n_steps=batch, batch_size=batch, n_epochs=1, device="cuda").learn(batch)
