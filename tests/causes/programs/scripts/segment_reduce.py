"""Trains a graph network on molecules whose sums over the edges are an autograd function of its own."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected


class SegmentSum(torch.autograd.Function):
    fixed = False

    @staticmethod
    def forward(ctx, src, index, n):
        out = src.new_zeros(n, src.shape[1]).index_add_(0, index, src)
        if SegmentSum.fixed:
            ctx.save_for_backward(src, index, out)
        else:
            ctx.backward_cache = src, index, out
        return out

    @staticmethod
    def backward(ctx, grad):
        src, index, out = ctx.saved_tensors if SegmentSum.fixed else ctx.backward_cache
        return grad.index_select(0, index), None, None


def segment_sum(src, index, n):
    return SegmentSum.apply(src, index, n)


class GINLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(()))
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
        self.edge = nn.Linear(8, dim)

    def forward(self, x, edge_attr, src, dst):
        msg = F.relu(x[src] + self.edge(edge_attr))
        agg = segment_sum(msg, dst, x.shape[0])
        return self.mlp((1 + self.eps) * x + agg)


class GIN(nn.Module):
    def __init__(self, dim=128, layers=4, tasks=12):
        super().__init__()
        self.embed = nn.Embedding(120, dim)
        self.layers = nn.ModuleList(GINLayer(dim) for _ in range(layers))
        self.head = nn.Linear(dim, tasks)

    def forward(self, g):
        x = self.embed(g["atom"])
        for layer in self.layers:
            x = F.relu(layer(x, g["edge_attr"], g["src"], g["dst"]))
        return self.head(segment_sum(x, g["graph"], g["label"].shape[0]))


def random_batches(n, graphs, atoms=28, bonds=60):
    for _ in range(n):
        N, E = graphs * atoms, graphs * bonds
        yield {"atom": torch.randint(0, 120, (N,)), "edge_attr": torch.randn(E, 8),
               "src": torch.randint(0, N, (E,)), "dst": torch.randint(0, N, (E,)),
               "graph": torch.arange(graphs).repeat_interleave(atoms), "label": torch.rand(graphs, 12).round()}


def run_epoch(model, opt, batches):
    for g in batches:
        g = {k: v.cuda() for k, v in g.items()}
        loss = F.binary_cross_entropy_with_logits(model(g), g["label"])
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss.item()


@expected("output_on_ctx", fix="save_for_backward", thread="dmlc/dgl#1060", memory=11900)
def segment_reduce(fixed=False):
    """The autograd function puts its own output on `ctx` as an attribute: output, node, `ctx` and output again are a cycle that is never
    freed. Cured by: `ctx.save_for_backward(...)`.
    """
    SegmentSum.fixed = fixed
    model = GIN().cuda()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(5):
        loss = run_epoch(model, opt, random_batches(20, 2048))
    return loss
