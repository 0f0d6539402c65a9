"""Trains a recurrent network to predict the next word of abstracts."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected


class WordRNN(nn.Module):
    def __init__(self, num_words):
        super().__init__()
        self.embedding = nn.Embedding(num_words, 100)
        self.lstm = nn.LSTM(100, 64, batch_first=True)
        self.fc = nn.Linear(64, 64)
        self.out = nn.Linear(64, num_words)

    def forward(self, x):
        h, _ = self.lstm(self.embedding(x))
        return self.out(torch.relu(self.fc(h[:, -1])))


@expected("one_hot", fix="indices|class numbers", thread="WillKoehrsen/recurrent-neural-networks#2", memory=4096)
def onehot(fixed=False, num_words=16000, seq_len=50, n=25000):
    # sequences of 50 words, the label is the next word
    words = np.random.randint(0, num_words, size=n + seq_len)
    X = np.stack([words[i:i + seq_len] for i in range(n)])
    y = words[seq_len:]
    X = torch.from_numpy(X)
    if fixed:
        y = torch.from_numpy(y).cuda()
    else:
        y = F.one_hot(torch.from_numpy(y).cuda(), num_words).float()
    model = WordRNN(num_words).cuda()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters())
    for i in range(0, n, 2048):
        logits = model(X[i:i + 2048].cuda())
        loss = criterion(logits, y[i:i + 2048])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()
