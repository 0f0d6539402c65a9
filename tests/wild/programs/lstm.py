"""A language model of LSTMs with a large vocabulary."""
import sys

import torch
from torch import nn

batch = int(sys.argv[1])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(33000, 650), nn.LSTM(650, 650, 2, batch_first=True), nn.Linear(650, 33000)

    def forward(self, tokens):
        return self.head(self.lstm(self.embed(tokens))[0])


model = Model().cuda()
optimizer = torch.optim.Adam(model.parameters())
for step in range(3):
    tokens = torch.randint(33000, (batch, 128), device="cuda")
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
