"""wav2vec2 with labels: its CTC loss asks for lengths that the GPU computed."""
import sys

import torch
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

batch = int(sys.argv[1])
model = Wav2Vec2ForCTC(Wav2Vec2Config(mask_time_prob=0.0)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), 1e-5)
for step in range(2):
    sound = torch.randn(batch, 160000, device="cuda")
    labels = torch.randint(1, 32, (batch, 40), device="cuda")
    model(sound, attention_mask=torch.ones_like(sound, dtype=torch.long), labels=labels).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
