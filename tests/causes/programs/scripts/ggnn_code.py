"""Classifies the nodes of syntax trees with a gated graph network of twelve types of edges."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected


class GatedGraphConv(nn.Module):
    def __init__(self, dim, n_etypes, n_steps, fixed=False):
        super().__init__()
        self.dim, self.n_steps, self.fixed = dim, n_steps, fixed
        self.edge_embed = nn.Embedding(n_etypes, dim * dim)
        self.gru = nn.GRUCell(dim, dim)
        nn.init.xavier_normal_(self.edge_embed.weight)

    def messages(self, h, src, etypes):
        m = torch.zeros(len(src), self.dim, device=h.device)
        for kind, row in enumerate(self.edge_embed.weight):
            of_kind = (etypes == kind).nonzero().squeeze(1)
            m = m.index_add(0, of_kind, h[src[of_kind]] @ row.view(self.dim, self.dim).t())
        return m

    def forward(self, feat, src, dst, etypes):
        n = feat.shape[0]
        h = feat
        for _ in range(self.n_steps):
            if self.fixed:
                m = self.messages(h, src, etypes)
            else:
                W = self.edge_embed(etypes).view(-1, self.dim, self.dim)
                m = torch.bmm(W, h[src].unsqueeze(-1)).squeeze(-1)
            a = torch.zeros(n, self.dim, device=h.device).index_add_(0, dst, m)
            h = self.gru(a, h)
        return h


class CodeGraphModel(nn.Module):
    def __init__(self, vocab, dim, n_etypes, n_steps, classes, fixed=False):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.conv = GatedGraphConv(dim, n_etypes, n_steps, fixed)
        self.head = nn.Linear(2 * dim, classes)

    def forward(self, g):
        x = self.embed(g["tokens"])
        h = self.conv(x, g["src"], g["dst"], g["etype"])
        return self.head(torch.cat([x, h], dim=-1))


def ast_graph(n_nodes, n_edges, vocab, n_etypes):
    return {
        "tokens": torch.randint(0, vocab, (n_nodes,)),
        "src": torch.randint(0, n_nodes, (n_edges,)),
        "dst": torch.randint(0, n_nodes, (n_edges,)),
        "etype": torch.randint(0, n_etypes, (n_edges,)),
        "label": torch.randint(0, 60, (n_nodes,)),
    }


def batch_graphs(graphs):
    out, offset = {k: [] for k in graphs[0]}, 0
    for g in graphs:
        for k, v in g.items():
            out[k].append(v + offset if k in ("src", "dst") else v)
        offset += len(g["tokens"])
    return {k: torch.cat(v) for k, v in out.items()}


def loader(n, batch_size):
    for _ in range(n):
        yield batch_graphs([ast_graph(600 + 40 * j, 2500 + 150 * j, 10000, 12) for j in range(batch_size)])


def train(model, opt, batches):
    for g in batches:
        g = {k: v.cuda() for k, v in g.items()}
        loss = F.cross_entropy(model(g), g["label"])
        opt.zero_grad()
        loss.backward()
        opt.step()


@expected("enlarged", fix="one for each row of the table|enumerate", thread="dmlc/dgl#852", memory=11900)
def ggnn_code(fixed=False):
    """The embedding of the types of the edges makes a copy of the [D, D] matrix of its type for each edge ([E, D, D]), in each of six
    steps. Cured by: One linear layer for each type, applied to the edges of that type.
    """
    model = CodeGraphModel(vocab=10000, dim=128, n_etypes=12, n_steps=6, classes=60, fixed=fixed).cuda()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    train(model, opt, loader(10, batch_size=16))
