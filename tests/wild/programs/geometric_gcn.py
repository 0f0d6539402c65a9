"""Two layers of a graph network on a graph of a million nodes and twenty million edges."""
import sys

import torch
from torch_geometric.nn import GAT, GCN

kind, nodes, edges = sys.argv[1], 1_000_000, int(sys.argv[2])
model = (GCN(64, 64, 2, 16) if kind == "gcn" else GAT(64, 64, 2, 16, heads=2)).cuda()
optimizer = torch.optim.Adam(model.parameters())
x = torch.randn(nodes, 64, device="cuda")
graph = torch.randint(nodes, (2, edges)).cuda()
for step in range(2):
    loss = torch.nn.functional.cross_entropy(model(x, graph), torch.randint(16, (nodes,), device="cuda"))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
