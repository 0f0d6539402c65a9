"""Trains a graph convolutional network on a graph whose nodes have no features."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected


class GCNLayer(nn.Module):
    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.linear = nn.Linear(in_feats, out_feats)

    def forward(self, h, src, dst):
        h = self.linear(h)
        out = torch.zeros_like(h)
        return out.index_add(0, dst, h[src])


@expected("dense_matrix", fix=r"nn\.Embedding", thread="dmlc/dgl#1202")
def eyefeat(fixed=False, num_nodes=20000, num_edges=100000, num_classes=2):
    device = "cuda"
    src = torch.randint(0, num_nodes, (num_edges,)).to(device)
    dst = torch.randint(0, num_nodes, (num_edges,)).to(device)
    if fixed:
        inputs = nn.Embedding(num_nodes, 16).to(device).weight
    else:
        inputs = torch.eye(num_nodes, device=device)
    layer1 = GCNLayer(inputs.shape[1], 16).to(device)
    layer2 = GCNLayer(16, num_classes).to(device)
    labeled_nodes = torch.tensor([0, 33]).to(device)
    labels = torch.tensor([0, 1]).to(device)
    params = list(layer1.parameters()) + list(layer2.parameters()) + ([inputs] if fixed else [])
    optimizer = torch.optim.Adam(params, lr=0.01)
    for _ in range(10):
        logits = layer2(torch.relu(layer1(inputs, src, dst)), src, dst)
        logp = F.log_softmax(logits, 1)
        loss = F.nll_loss(logp[labeled_nodes], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()
