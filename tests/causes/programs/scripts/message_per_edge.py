"""Classifies the nodes of a text graph with graph convolutions whose first weights are the features of the nodes."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected


def load_graph(nodes=14049, edges=2_600_000, classes=20, seed=0):
    g = torch.Generator().manual_seed(seed)
    src = torch.randint(0, nodes, (edges,), generator=g)
    dst = torch.randint(0, nodes, (edges,), generator=g)
    loops = torch.arange(nodes)
    edge_index = torch.stack([torch.cat([src, loops]), torch.cat([dst, loops])])
    labels = torch.randint(0, classes, (nodes,), generator=g)
    split = torch.rand(nodes, generator=g)
    return edge_index, labels, split < 0.6, split >= 0.8


def gcn_norm(edge_index, nodes):
    deg = torch.zeros(nodes).scatter_add_(0, edge_index[1], torch.ones(edge_index.size(1)))
    inv = deg.pow(-0.5)
    return inv[edge_index[0]] * inv[edge_index[1]]


class GCNLayer(nn.Module):
    def __init__(self, fin, fout, fixed):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(fin, fout))
        self.bias = nn.Parameter(torch.zeros(fout))
        self.fixed = fixed
        nn.init.xavier_uniform_(self.weight)

    def message(self, x_j, norm):
        return norm.view(-1, 1) * x_j

    def propagate(self, h, edge_index, norm):
        if self.fixed:
            return torch.sparse.mm(torch.sparse_coo_tensor(edge_index.flip(0), norm, (h.size(0), h.size(0))), h)
        src, dst = edge_index
        msg = self.message(h[src], norm)
        out = torch.zeros_like(h)
        return out.index_add_(0, dst, msg)

    def forward(self, x, edge_index, norm):
        h = self.weight if x is None else x @ self.weight
        return self.propagate(h, edge_index, norm) + self.bias


class TextGCN(nn.Module):
    def __init__(self, nodes, hidden, classes, fixed):
        super().__init__()
        self.l1 = GCNLayer(nodes, hidden, fixed)
        self.l2 = GCNLayer(hidden, classes, fixed)

    def forward(self, edge_index, norm):
        h = F.relu(self.l1(None, edge_index, norm))
        h = F.dropout(h, 0.5, self.training)
        return self.l2(h, edge_index, norm)


@torch.no_grad()
def evaluate(model, edge_index, norm, labels, mask):
    model.eval()
    pred = model(edge_index, norm).argmax(1)
    return ((pred == labels).float() * mask.float()).sum().item() / mask.float().sum().item()


@expected("enlarged", fix="sparse matrix", thread="pyg-team/pytorch_geometric#459", memory=6144)
def message_per_edge(fixed=False):
    device = torch.device("cuda")
    edge_index, labels, train_mask, val_mask = load_graph()
    nodes = labels.numel()
    norm = gcn_norm(edge_index, nodes)
    edge_index, norm, labels = edge_index.to(device), norm.to(device), labels.to(device)
    w = (train_mask.float() / train_mask.sum()).to(device)
    val = val_mask.to(device)
    model = TextGCN(nodes, 200, 20, fixed).to(device)
    opt = torch.optim.Adam(model.parameters(), lr=0.02)
    best = 0
    for _ in range(5):
        model.train()
        opt.zero_grad()
        logits = model(edge_index, norm)
        loss = (F.cross_entropy(logits, labels, reduction="none") * w).sum()
        loss.backward()
        opt.step()
        best = max(best, evaluate(model, edge_index, norm, labels, val))
    return best
