"""Programs after public threads: Bayesian libraries, graphs, physics, biology, interpretability, checkpoints, encoders."""
import copy
import functools
import math
import weakref
from collections import OrderedDict

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from expected import expected


# A mixture of Gaussians is fitted by stochastic variational inference; the assignments are summed out.

class _LeafBackward:
    def __init__(self, target):
        self.target = weakref.ref(target)

    def process(self, message):
        self.target()._pyro_backward_result = message


def require_backward(tensor):
    tensor._pyro_backward = _LeafBackward(tensor)


def einsum(equation, *operands, copy_identity=False):
    inputs, output = equation.split("->")
    if inputs == output:
        return operands[0].clone() if copy_identity else operands[0][...]
    shift = [op.max(0, keepdim=True)[0].detach() for op in operands]
    exps = [(op - s).exp() for op, s in zip(operands, shift)]
    return torch.einsum(equation, *exps).log() + sum(s.squeeze(0) for s in shift)


class Mixture(nn.Module):
    def __init__(self, num_components, dim):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(num_components))
        self.locs = nn.Parameter(torch.randn(num_components, dim))
        self.log_scale = nn.Parameter(torch.zeros(()))

    def log_factors(self, data):
        scale = self.log_scale.exp()
        assignment = F.log_softmax(self.weights, 0).unsqueeze(1)
        deviation = torch.cdist(self.locs, data) / scale
        obs = -0.5 * deviation ** 2 - data.shape[1] * (self.log_scale + 0.5 * math.log(2 * math.pi))
        return assignment, obs


class TraceEnumELBO:
    def __init__(self, copy_identity):
        self.copy_identity = copy_identity

    def contract_tensor_tree(self, assignment, obs):
        messages = []
        for factor in (assignment, obs):
            require_backward(factor)
            message = einsum("ab->ab", factor, copy_identity=self.copy_identity)
            factor._pyro_backward.process(message)
            messages.append(message)
        return torch.logsumexp(messages[0] + messages[1], 0)

    def loss_and_grads(self, model, data):
        assignment, obs = model.log_factors(data)
        loss = -self.contract_tensor_tree(assignment, obs).sum() / len(data)
        loss.backward()
        return loss.detach()


class SVI:
    def __init__(self, model, optim, loss):
        self.model, self.optim, self.loss = model, optim, loss

    def step(self, data):
        self.optim.zero_grad()
        loss = self.loss.loss_and_grads(self.model, data)
        self.optim.step()
        return loss


@expected("reference_cycle", fix=r"clone\(\)", thread="pyro-ppl/pyro#3131", memory=600)
def fit_mixture(fixed=False):
    """For an identity equation `einsum` returns `operands[0][...]`, a view of the factor; `_LeafBackward.process` stores that view as an
    attribute (`_pyro_backward_result`) on the very factor it is a view of, so factor and view keep each other alive and the `[clusters,
    data]` factor of every `step` is never freed, not even by the garbage collector. Cured by: `einsum` returns `operands[0].clone()`
    instead of the view.
    """
    data = torch.randn(200_000, 3).cuda()
    model = Mixture(12, 3).cuda()
    optim = torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.8, 0.99))
    svi = SVI(model, optim, loss=TraceEnumELBO(copy_identity=fixed))
    losses = []
    for iteration in range(200):
        losses.append(svi.step(data))
    return torch.stack(losses)


# The walks through a two-layer graph network that matter for the class of a molecule.

class MoleculeData:
    def __init__(self, x, edge_index):
        self.x, self.edge_index = x, edge_index


class MoleculeDataset:
    def __init__(self, num_graphs, dim_node):
        generator = np.random.default_rng(0)
        self.graphs, xs, edges, start = [], [], [], 0
        for _ in range(num_graphs):
            size = int(generator.integers(15, 21))
            chain = np.stack([np.arange(size - 1), np.arange(1, size)])
            ring = np.stack([np.arange(0, size - 5, 5), np.arange(5, size, 5)])
            bonds = np.concatenate([chain, ring], 1)
            edge_index = torch.from_numpy(np.concatenate([bonds, bonds[::-1]], 1))
            self.graphs.append(MoleculeData(torch.rand(size, dim_node), edge_index))
            xs.append(self.graphs[-1].x)
            edges.append(edge_index + start)
            start += size
        self.data = MoleculeData(torch.cat(xs), torch.cat(edges, 1))

    def __getitem__(self, index):
        return self.graphs[index]


class GCNConv(nn.Module):
    def __init__(self, dim_in, dim_out):
        super().__init__()
        self.lin, self.edge_weight = nn.Linear(dim_in, dim_out), None

    def forward(self, x, edge_index):
        self.edge_weight = torch.ones(edge_index.shape[1], device=x.device, requires_grad=True)
        message = self.lin(x)[edge_index[0]] * self.edge_weight.unsqueeze(1)
        return torch.zeros(len(x), message.shape[1], device=x.device).index_add(0, edge_index[1], message)


class GCN_2l(nn.Module):
    def __init__(self, dim_node, dim_hidden, num_classes):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(dim_node, dim_hidden), GCNConv(dim_hidden, dim_hidden)])
        self.ffn = nn.Linear(dim_hidden, num_classes)

    def forward(self, x, edge_index):
        for conv in self.convs:
            x = F.relu(conv(x, edge_index))
        return self.ffn(x.mean(0, keepdim=True))


class GNN_GI:
    def __init__(self, model):
        self.model = model

    def explain_edges_with_loop(self, walks, label, num_edges):
        walks_ids, walks_score = walks["ids"], walks["score"][:, label]
        idx_ensemble = torch.cat([(walks_ids == i).int().sum(dim=1).unsqueeze(0) for i in range(num_edges)], dim=0)
        return (idx_ensemble * walks_score.unsqueeze(0)).sum(1)

    def __call__(self, x, edge_index, num_classes):
        loops = torch.arange(len(x)).repeat(2, 1)
        self_loop_edge_index = torch.cat([edge_index, loops], 1)
        source, target = self_loop_edge_index.tolist()
        incoming = [[] for _ in range(len(x))]
        for edge, node in enumerate(target):
            incoming[node].append(edge)
        output = self.model(x.cuda(), self_loop_edge_index.cuda())

        def compute_walk_score(adjs, r, allow_edges, walk_idx):
            if not adjs:
                walk_indices.append(walk_idx)
                walk_scores.append(r.detach())
                return
            grads, = torch.autograd.grad(outputs=r, inputs=adjs[0], create_graph=True)
            for i in allow_edges:
                compute_walk_score(adjs[1:], grads[i] * adjs[0][i], incoming[source[i]], [i] + walk_idx)

        all_scores = []
        for label in range(num_classes):
            walk_indices, walk_scores = [], []
            adjs = [conv.edge_weight for conv in reversed(self.model.convs)]
            compute_walk_score(adjs, output[0, label], range(len(target)), [])
            all_scores.append(torch.stack(walk_scores).view(-1, 1))
        walks = {"ids": torch.tensor(walk_indices).cuda(), "score": torch.cat(all_scores, 1)}
        with torch.no_grad():
            return walks, [self.explain_edges_with_loop(walks, label, len(target)).cpu() for label in range(num_classes)]


@expected("all_pairs", fix="part|split", thread="divelab/DIG#126", memory=320)
def explain_mutag(fixed=False):
    """The explainer gets `dataset.data`, i.e. all molecules joined to one huge graph; `GNN_GI` is a walk-based explainer, and what it holds
    over all walks (`idx_ensemble`, edges times walks) becomes huge for a huge graph. Cured by: explain a small graph (one molecule) at a
    time.
    """
    dataset = MoleculeDataset(36, 7)
    data = dataset[0] if fixed else dataset.data
    model = GCN_2l(7, 64, 2).cuda().eval()
    explainer = GNN_GI(model)
    walks, edge_masks = explainer(data.x, data.edge_index, num_classes=2)
    return edge_masks


# Spike sorting: the spikes around each position of the probe are clustered.

def kmeans_plusplus(Xg, niter=200, seed=1, device=torch.device("cuda"), tidy=False):
    vtot = torch.norm(Xg, 2, dim=1) ** 2 if tidy else (Xg ** 2).sum(1)
    torch.manual_seed(seed)
    ntry = 100
    NN, nfeat = Xg.shape
    mu = torch.zeros((niter, nfeat), device=device)
    vexp0 = torch.zeros(NN, device=device)
    iclust = torch.zeros((NN,), dtype=torch.int, device=device)
    for j in range(niter):
        v2 = torch.relu(vtot - vexp0)
        isamp = torch.randint(len(v2), (ntry,)).to(device)
        Xc = Xg[isamp]
        vexp = 2 * Xg @ Xc.T - (Xc ** 2).sum(1)
        dexp = vexp - vexp0.unsqueeze(1)
        dexp = torch.relu(dexp)
        imax = torch.argmax(dexp.sum(0)).view(1)
        ix = dexp.index_select(1, imax).squeeze(1) > 0
        mu[j] = (ix.float() @ Xg) / ix.sum()
        vexp0 = torch.where(ix, vexp.index_select(1, imax).squeeze(1), vexp0)
        iclust = torch.where(ix, torch.full_like(iclust, j), iclust)
        if tidy:
            del vexp, dexp
    return iclust, mu


def assign_neighbours(Xg, iclust, mu, nclust):
    counts = torch.zeros(nclust, device=Xg.device).index_add(0, iclust.long(), torch.ones(len(Xg), device=Xg.device))
    return mu * counts.unsqueeze(1)


@expected("outputs_of_earlier_turn", fix=r"\bdel\b", thread="MouseLand/Kilosort#775", memory=1610)
def sort_spikes(fixed=False):
    """In `kmeans_plusplus` the large `vexp` and `dexp` of one pass of the loop stay bound while those of the next pass are computed, so two
    generations of them are in memory at once. (`vtot` also needs a full squared copy of `Xg` for a moment.). Cured by: `del` `vexp` and
    `dexp` at the end of the loop; `vtot` by `torch.norm`.
    """
    device = torch.device("cuda")
    ycent, nclust, templates = [20, 60, 100], 12, []
    for kk in range(len(ycent)):
        Xd = torch.rand(1_000_000, 3 * 6)
        Xg = Xd.to(device)
        iclust, mu = kmeans_plusplus(Xg, niter=nclust, seed=5, device=device, tidy=fixed)
        templates.append(assign_neighbours(Xg, iclust, mu, nclust).cpu())
    return torch.cat(templates)


# Bayesian optimisation of a beam line from simulations of two fidelities.

class MultiTaskGP(nn.Module):
    def __init__(self, train_X, train_task, train_Y, num_tasks):
        super().__init__()
        self.train_X, self.train_task, self.train_Y = train_X, train_task, train_Y
        self.lengthscale = nn.Parameter(torch.ones(train_X.shape[1], dtype=train_X.dtype))
        self.task_factor = nn.Parameter(torch.randn(num_tasks, num_tasks, dtype=train_X.dtype))
        self.noise = 1e-4

    def forward(self, X, task):
        X = X / self.lengthscale
        data_covar = torch.exp(-0.5 * torch.cdist(X, X) ** 2)
        task_covar = (self.task_factor @ self.task_factor.T)[task.unsqueeze(-1), task.unsqueeze(-2)]
        return data_covar * task_covar

    def posterior(self, X):
        n = len(self.train_X)
        full_X = torch.cat([self.train_X.expand(len(X), n, -1), X], 1)
        full_task = F.pad(self.train_task, (0, X.shape[1])).expand(len(X), -1)
        covar = self(full_X, full_task)
        train_train = covar[:, :n, :n] + self.noise * torch.eye(n, device=X.device, dtype=X.dtype)
        test_train, test_test = covar[:, n:, :n], covar[:, n:, n:]
        root, _ = torch.linalg.cholesky_ex(train_train)
        half = torch.linalg.solve_triangular(root, test_train.transpose(1, 2), upper=False)
        weights = torch.linalg.solve_triangular(root, self.train_Y.expand(len(X), n, 1), upper=False)
        mean = (half * weights).sum(1)
        return mean, (test_test.diagonal(dim1=1, dim2=2) - (half ** 2).sum(1)).clamp_min(1e-9)


class ExpectedImprovement:
    def __init__(self, model, best_f):
        self.model, self.best_f = model, best_f

    def __call__(self, X):
        mean, variance = self.model.posterior(X)
        u = (mean - self.best_f) / variance.sqrt()
        normal = torch.distributions.Normal(torch.zeros_like(u), torch.ones_like(u), validate_args=False)
        return (variance.sqrt() * (normal.log_prob(u).exp() + u * normal.cdf(u))).squeeze(-1)


def gen_batch_initial_conditions(acq_function, dim, num_restarts, raw_samples, init_batch_limit):
    X_rnd = torch.rand(raw_samples, 1, dim, dtype=torch.double).cuda()
    with torch.no_grad():
        Y_rnd = torch.cat([acq_function(X) for X in X_rnd.split(init_batch_limit or raw_samples)])
    return X_rnd[Y_rnd.topk(num_restarts)[1]]


def optimize_acqf(acq_function, dim, num_restarts=5, raw_samples=1000, init_batch_limit=None):
    X = gen_batch_initial_conditions(acq_function, dim, num_restarts, raw_samples, init_batch_limit)
    X = X.clone().requires_grad_()
    optimizer = torch.optim.Adam([X], lr=0.02)
    for _ in range(10):
        optimizer.zero_grad()
        (-acq_function(X).sum()).backward()
        optimizer.step()
    return X.detach().clamp(0, 1)


class MultitaskGenerator:
    def __init__(self, num_settings, init_batch_limit=None):
        self.num_settings, self.init_batch_limit = num_settings, init_batch_limit
        self.X, self.task, self.Y = [], [], []

    def tell(self, X, task, Y):
        self.X.append(X)
        self.task.append(torch.full((len(X),), task))
        self.Y.append(Y)

    def ask(self):
        X, task, Y = torch.cat(self.X).cuda(), torch.cat(self.task).cuda(), torch.cat(self.Y).cuda()
        model = MultiTaskGP(X, task, Y, 2).cuda()
        acq_function = ExpectedImprovement(model, best_f=Y.max())
        return optimize_acqf(acq_function, self.num_settings, init_batch_limit=self.init_batch_limit)[:1, 0].cpu()


@expected("all_pairs", fix="half the batch|part|split", thread="optimas-org/optimas#57", memory=900)
def propose_beam_settings(fixed=False):
    """`optimize_acqf` first evaluates the acquisition function at all `raw_samples` (1000) random points in one batch, and the multitask
    model builds a covariance matrix over training points and candidate for each of them; together the batch of matrices is larger than the
    memory. Cured by: evaluate the raw samples in several batches (`init_batch_limit`).
    """
    gen = MultitaskGenerator(6, init_batch_limit=50 if fixed else None)
    for task, number in ((0, 60), (1, 240)):
        gen.tell(torch.rand(number, 6, dtype=torch.double), task, torch.randn(number, 1, dtype=torch.double))
    for _ in range(2):
        trial = gen.ask()
        gen.tell(torch.rand_like(trial), 0, torch.randn(1, 1, dtype=torch.double))
    return trial


# The best recipe is searched among listed amounts of each ingredient.

class SingleTaskGP:
    def __init__(self, train_X, train_Y):
        self.train_X = train_X
        root, _ = torch.linalg.cholesky_ex(self.covar(train_X, train_X) + 1e-3 * torch.eye(len(train_X), device=train_X.device))
        self.root, self.alpha = root, torch.cholesky_solve(train_Y, root)

    def covar(self, a, b):
        return torch.exp(-0.5 * torch.cdist(a, b) ** 2)

    def posterior(self, X):
        k_star = self.covar(X, self.train_X.expand(len(X), -1, -1))
        half = torch.linalg.solve_triangular(self.root, k_star.flatten(0, 1).T, upper=False).T.view_as(k_star)
        return (k_star @ self.alpha).squeeze(-1), self.covar(X, X) - half @ half.transpose(1, 2)


class qExpectedImprovement:
    def __init__(self, model, best_f, num_samples):
        self.model, self.best_f, self.num_samples = model, best_f, num_samples
        self.X_pending = None

    def set_X_pending(self, X):
        self.X_pending = X

    def __call__(self, X):
        if self.X_pending is not None:
            X = torch.cat([X, self.X_pending.expand(len(X), -1, -1)], 1)
        mean, covar = self.model.posterior(X)
        root, _ = torch.linalg.cholesky_ex(covar)
        base = torch.randn(self.num_samples, 1, X.shape[1], device=X.device)
        samples = mean + (root @ base.unsqueeze(-1)).squeeze(-1)
        return (samples - self.best_f).clamp_min(0).amax(-1).mean(0)


def _generate_neighbors(x, discrete_choices):
    X_loc = []
    for i, choices in enumerate(discrete_choices):
        neighbors = x.repeat(len(choices), 1)
        neighbors[:, i] = choices
        X_loc.append(neighbors)
    return torch.cat(X_loc)


@torch.no_grad()
def optimize_acqf_discrete_local_search(acq_function, discrete_choices, q, num_restarts, max_batch_size=None, num_moves=3):
    candidates = []
    for _ in range(q):
        best = None
        for restart in range(num_restarts):
            x = torch.stack([choices[torch.randint(len(choices), ())] for choices in discrete_choices])
            for move in range(num_moves):
                X_loc = _generate_neighbors(x, discrete_choices)
                parts = [X_loc] if max_batch_size is None else X_loc.split(max_batch_size)
                acqvals = torch.cat([acq_function(part.unsqueeze(1)) for part in parts])
                x = X_loc.index_select(0, acqvals.argmax().view(1))[0]
            best = x if best is None else best
        candidates.append(best)
        acq_function.set_X_pending(torch.stack(candidates))
    return torch.stack(candidates)


@expected("all_pairs", fix="part|split", thread="meta-pytorch/botorch#2682", memory=700)
def choose_recipe(fixed=False):
    """`optimize_acqf_discrete_local_search` evaluates the acquisition function on all neighbours `X_loc` of a point at once; with many
    choices per parameter there are very many neighbours. Cured by: evaluate the neighbours in mini-batches (`max_batch_size`).
    """
    num_ingredients = 12
    train_X, train_Y = torch.rand(250, num_ingredients).cuda(), torch.randn(250, 1).cuda()
    discrete_choices = [torch.linspace(0, 1, 4000).cuda() for _ in range(num_ingredients)]
    model = SingleTaskGP(train_X, train_Y)
    acq_function = qExpectedImprovement(model, best_f=train_Y.max(), num_samples=128)
    return optimize_acqf_discrete_local_search(acq_function, discrete_choices, q=3, num_restarts=2,
                                               max_batch_size=2048 if fixed else None)


# Embeddings of proteins by a language model.

@expected("unused_decoder", fix="half|encoder", thread="agemagician/ProtTrans#77", memory=1100)
def embed_protein_set(fixed=False):
    """Only embeddings are wanted, but `T5Model` loads and runs the whole encoder-decoder, and in full precision. Cured by: load only the
    encoder (`T5EncoderModel`), in half precision.
    """
    from transformers import T5Config, T5EncoderModel, T5Model
    config = T5Config(vocab_size=128, d_model=768, d_kv=64, d_ff=3072, num_layers=6, num_heads=12)
    if fixed:
        model = T5EncoderModel(config).half()
    else:
        model = T5Model(config)
    model = model.to("cuda").eval()
    amino_acids = "LAGVESIKRDTPNQFYMHCWX"
    generator = np.random.default_rng(0)
    sequences = {f"P{i:05d}": "".join(generator.choice(list(amino_acids), length)) for i, length in enumerate([310, 780, 1460, 2050, 1900])}
    embeddings = {}
    for name, sequence in sequences.items():
        ids = [amino_acids.index(residue) + 3 for residue in sequence] + [1]
        input_ids = torch.tensor([ids]).cuda()
        attention_mask = torch.ones_like(input_ids)
        with torch.no_grad():
            if fixed:
                embedding = model(input_ids=input_ids, attention_mask=attention_mask)[0]
            else:
                embedding = model(input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=input_ids)[2]
        embeddings[name] = embedding[0, :-1].mean(0).float().cpu().numpy()
    return np.stack(list(embeddings.values()))


# Variational Monte Carlo: the energy of a molecule is minimised over the parameters of its wave function.

class AtomicOrbitals(nn.Module):
    def __init__(self, nao, natom):
        super().__init__()
        self.bas_exp = nn.Parameter(torch.rand(nao) + 0.5)
        self.register_buffer("atom_coords", torch.rand(natom, 3))
        self.register_buffer("centre", torch.arange(nao) % natom)

    def forward(self, pos, derivative=(0,)):
        xyz = pos.unsqueeze(2) - self.atom_coords[self.centre]
        r2 = (xyz ** 2).sum(-1)
        value = torch.exp(-self.bas_exp * r2)
        if derivative == (0,):
            return value
        first = -2 * (self.bas_exp * value).unsqueeze(-1) * xyz
        second = (4 * self.bas_exp ** 2 * r2 - 6 * self.bas_exp) * value
        return value, first, second


class SlaterJastrow(nn.Module):
    def __init__(self, nelec, nao, natom):
        super().__init__()
        self.ao = AtomicOrbitals(nao, natom)
        self.mo = nn.Linear(nao, nelec // 2, bias=False)
        self.jastrow_weight = nn.Parameter(torch.ones(()))
        self.nup = nelec // 2

    def jastrow(self, pos):
        distance = torch.cdist(pos, pos)
        return torch.exp(0.5 * (distance / (1 + self.jastrow_weight * distance)).sum((1, 2)))

    def forward(self, pos):
        mo = self.mo(self.ao(pos))
        return self.jastrow(pos) * torch.linalg.det(mo[:, :self.nup]) * torch.linalg.det(mo[:, self.nup:])

    def kinetic_energy_jacobi(self, pos):
        ao, dao, d2ao = self.ao(pos, derivative=(0, 1, 2))
        mo, d2mo = self.mo(ao), self.mo(d2ao)
        dmo = self.mo(dao.transpose(2, 3))
        kinetic = 0
        for spin in (slice(None, self.nup), slice(self.nup, None)):
            inv_mo, _ = torch.linalg.inv_ex(mo[:, spin])
            hess = (inv_mo @ d2mo[:, spin]).diagonal(dim1=1, dim2=2).sum(1)
            grad = torch.einsum("bij,bjdi->bd", inv_mo, dmo[:, spin])
            kinetic = kinetic - 0.5 * (hess + (grad ** 2).sum(1))
        return kinetic

    def local_energy(self, pos):
        nuclear = -(1 / torch.cdist(pos, self.ao.atom_coords.expand(len(pos), -1, -1)).clamp_min(1e-3)).sum((1, 2))
        electronic = 0.5 * (1 / torch.cdist(pos, pos).clamp_min(1e-3)).sum((1, 2))
        return self.kinetic_energy_jacobi(pos) + nuclear + electronic


class Solver:
    def __init__(self, wf, opt, no_grad_eloc):
        self.wf, self.opt, self.no_grad_eloc = wf, opt, no_grad_eloc

    def evaluate_grad_manual(self, lpos):
        with torch.set_grad_enabled(not self.no_grad_eloc):
            eloc = self.wf.local_energy(lpos)
        psi = self.wf(lpos)
        weight = eloc.clone()
        weight -= torch.mean(eloc)
        weight /= psi.clone()
        weight *= 2.0 / len(psi)
        psi.backward(weight)
        return torch.mean(eloc), eloc

    def run(self, nepoch, sampler):
        energies = []
        for _ in range(nepoch):
            self.opt.zero_grad()
            loss, eloc = self.evaluate_grad_manual(sampler())
            self.opt.step()
            energies.append(loss.detach().cpu())
        return torch.stack(energies)


@expected("outputs_of_earlier_step", fix="no_grad", thread="NLESC-JCER/QMCTorch#190", memory=500)
def optimise_wavefunction(fixed=False):
    """`evaluate_grad_manual` computes the local energy `eloc` with autograd on although it serves only as a weight of the gradient; the
    graph of `local_energy` (orbitals with first and second derivatives) is kept until the step ends. Cured by: compute `eloc` under
    `torch.no_grad()`.
    """
    wf = SlaterJastrow(nelec=12, nao=80, natom=4).cuda()
    walkers = torch.randn(5000, 12, 3).cuda()

    def sampler():
        walkers.add_(0.05 * torch.randn_like(walkers))
        return walkers.clone()

    solver = Solver(wf, torch.optim.Adam(wf.parameters(), lr=1e-3), no_grad_eloc=fixed)
    return solver.run(6, sampler)


# A trial trains a denoiser and reports running metrics.

X, Y_TRUE, Y_PRED, LOSS, METRICS = "x", "y_true", "y_pred", "loss", "metrics"


class State(dict):
    @property
    def data(self):
        return State({key: value.data if torch.is_tensor(value) else value for key, value in self.items()})


class Metric:
    def __init__(self, name):
        self.name = name

    @torch.no_grad()
    def process(self, *args):
        pass

    def process_final(self):
        pass

    def reset(self):
        pass


class BatchLambda(Metric):
    def __init__(self, name, metric_function):
        super().__init__(name)
        self.metric_function = metric_function

    def process(self, state):
        return self.metric_function(state[Y_PRED], state[Y_TRUE])


class Mean(Metric):
    def __init__(self, metric):
        super().__init__("mean_" + metric.name)
        self.metric = metric
        self.reset()

    def process(self, state):
        value = self.metric.process(state)
        self._sum = self._sum + value.sum()
        self._count += value.numel()

    def process_final(self):
        return self._sum / self._count

    def reset(self):
        self._sum, self._count = 0.0, 0


class MetricList(Metric):
    def __init__(self, metrics, gradless):
        super().__init__("metrics")
        self.metrics, self.gradless = metrics, gradless

    def process(self, state):
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.gradless):
            for metric in self.metrics:
                metric.process(state)

    def process_final(self):
        return {metric.name: metric.process_final() for metric in self.metrics}

    def reset(self):
        for metric in self.metrics:
            metric.reset()


class Trial:
    def __init__(self, model, optimizer, criterion, metrics, detach_state):
        self.model, self.optimizer, self.criterion = model, optimizer, criterion
        self.metric_list, self.detach_state = MetricList(metrics, detach_state), detach_state

    def run(self, epochs, train_steps, generator):
        history = []
        for _ in range(epochs):
            state = State()
            self.metric_list.reset()
            for _ in range(train_steps):
                state[X], state[Y_TRUE] = (part.cuda() for part in next(generator))
                self.optimizer.zero_grad()
                state[Y_PRED] = self.model(state[X])
                state[LOSS] = self.criterion(state[Y_PRED], state[Y_TRUE])
                state[LOSS].backward()
                self.optimizer.step()
                self.metric_list.process(state.data if self.detach_state else state)
            history.append({name: float(value) for name, value in self.metric_list.process_final().items()})
        return history


def psnr(y_pred, y_true):
    mse = (y_pred - y_true).pow(2).mean((1, 2, 3))
    return -10 * torch.log10(mse + 1e-8)


@expected("graph_of_earlier_steps", fix="detach|item", thread="pytorchbearer/torchbearer#533", memory=500)
def fit_denoiser(fixed=False):
    """`no_grad` decorates `process` of the base class `Metric`, which every metric overrides, so it has no effect: metrics get the live
    `y_pred` of the state and the running sum of `Mean` strings together the graphs of all steps of an epoch, each with its saved tensors.
    Cured by: `MetricList.process` is under `no_grad` and is given a state of detached tensors (`state.data`).
    """
    clean = torch.rand(32, 3, 128, 128)

    def noisy():
        while True:
            yield clean + 0.1, clean

    model = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(True), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(True),
                          nn.Conv2d(12, 3, 3, padding=1)).cuda()
    trial = Trial(model, torch.optim.Adam(model.parameters(), lr=1e-3), nn.MSELoss(),
                  [Mean(BatchLambda("psnr", psnr))], detach_state=fixed)
    return trial.run(2, 120, noisy())


# A network predicts all organs in scans, batch after batch.

class UNet3d(nn.Module):
    def __init__(self, num_classes, width):
        super().__init__()
        self.down = nn.Conv3d(1, width, 3, stride=2, padding=1)
        self.body = nn.Sequential(nn.Conv3d(width, width, 3, padding=1), nn.InstanceNorm3d(width), nn.LeakyReLU(inplace=True))
        self.up = nn.ConvTranspose3d(width, width, 2, stride=2)
        self.final = nn.Conv3d(width, num_classes, 1)

    def forward(self, data):
        return {"pred": self.final(self.up(self.body(self.down(data)))).softmax(1)}


class BaseNetworkTrainer:
    def __init__(self, network, metrics, free_predictions):
        self.network, self.metrics, self.free_predictions = network.cuda().eval(), metrics, free_predictions

    def predict(self, batch_dict):
        with torch.no_grad():
            return self.network(batch_dict["data"].cuda())

    def predict_data_mgr(self, datamgr):
        metric_values = {key: [] for key in self.metrics}
        for batch_dict in datamgr:
            preds_batch = self.predict(batch_dict)
            labels = batch_dict["label"].cuda()
            for key, metric in self.metrics.items():
                metric_values[key].append(metric(preds_batch["pred"], labels).cpu())
            if self.free_predictions:
                del preds_batch
        return {key: torch.stack(values).mean(0) for key, values in metric_values.items()}


def volume_error(pred, label):
    share = torch.zeros(pred.shape[1], device=pred.device).index_add(0, label.flatten(), torch.ones(label.numel(), device=pred.device))
    return pred.mean((0, 2, 3, 4)) - share / label.numel()


@expected("kept_tensors", fix=r"\bdel\b|\.cpu\(\)", thread="delira-dev/delira#185", memory=790)
def predict_volumes(fixed=False):
    """`preds_batch` of the previous batch is still referenced in `predict_data_mgr` while the predictions of the next batch are computed.
    Cured by: delete `preds_batch` at the end of each pass of the loop.
    """
    def datamgr(num_batches):
        for _ in range(num_batches):
            yield {"data": torch.rand(1, 1, 128, 128, 96), "label": torch.zeros(1, 128, 128, 96, dtype=torch.long)}

    trainer = BaseNetworkTrainer(UNet3d(40, 8), {"volume": volume_error}, free_predictions=fixed)
    return trainer.predict_data_mgr(datamgr(4))["volume"]


# Active learning by influence: the gradient of the validation loss.

class ResBlock(nn.Module):
    def __init__(self, width_in, width_out, stride):
        super().__init__()
        self.f = nn.Sequential(nn.Conv2d(width_in, width_out, 3, stride, 1, bias=False), nn.BatchNorm2d(width_out), nn.ReLU(True),
                               nn.Conv2d(width_out, width_out, 3, 1, 1, bias=False), nn.BatchNorm2d(width_out))
        self.proj = nn.Conv2d(width_in, width_out, 1, stride, bias=False)

    def forward(self, x):
        return F.relu(self.f(x) + self.proj(x))


class ResNetCifar(nn.Module):
    def __init__(self, num_classes, widths=(64, 128, 256, 256)):
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.stages = nn.Sequential(*[ResBlock(a, b, 1 if a == b else 2) for a, b in zip((widths[0],) + widths, widths)])
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, x):
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


def construct_test_loader(batch_size):
    images, labels = torch.rand(160, 3, 32, 32), torch.randint(0, 10, (160,))
    return zip(images.split(batch_size), labels.split(batch_size))


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="dragonlzm/ISAL#2", memory=700)
def validation_gradients(fixed=False):
    """For each batch of the validation set the gradients of all parameters are kept on the GPU in `grad_list`; with `TEST.BATCH_SIZE` 1
    there is one full set of gradients for each image. Cured by: a larger batch size, so that fewer sets of gradients are stored.
    """
    test_batch_size = 16 if fixed else 1
    model = ResNetCifar(10).cuda()
    params = [p for p in model.parameters() if p.requires_grad and len(p.size()) != 1]
    model.eval()
    loss_fun = nn.CrossEntropyLoss()
    grad_list = []
    for inputs, labels in construct_test_loader(test_batch_size):
        inputs, labels = inputs.cuda(), labels.cuda(non_blocking=True)
        preds = model(inputs)
        loss = loss_fun(preds, labels)
        grad_result = torch.autograd.grad(loss, params)
        for ele in grad_result:
            ele.detach()
        grad_list.append(grad_result)
    saved = []
    for i in range(len(grad_list[0])):
        per_param_grad = torch.cat([per_img_grad[i].unsqueeze(0) for per_img_grad in grad_list], dim=0)
        saved.append(per_param_grad.sum(dim=0).cpu())
    return saved


# Checkpoints of a sweep are loaded one after another, scored, and written out with canonical names.

def _unwrapped_fqns(model, name):
    module, parts = model, []
    for part in name.split(".")[:-1]:
        if not isinstance(module, Wrapped) or part != "module":
            parts.append(part)
        module = getattr(module, part)
    return {".".join(parts + name.split(".")[-1:])}


@functools.cache
def _get_fqns(model, name):
    return _unwrapped_fqns(model, name)


class Wrapped(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)


class Decoder(nn.Module):
    def __init__(self, vocab, dim, num_layers):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Wrapped(nn.TransformerEncoderLayer(dim, 8, 4 * dim, batch_first=True)) for _ in range(num_layers))
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def get_model_state_dict(model, get_fqns):
    state_dict = {}
    for name, value in model.state_dict().items():
        for fqn in get_fqns(model, name):
            state_dict[fqn] = value.detach().cpu()
    return state_dict


@expected("several_models", fix="cache_clear", thread="pytorch/pytorch#149354", memory=450)
def sweep_checkpoints(fixed=False):
    """`_get_fqns` is wrapped in `functools.cache` and gets the model as an argument, so the cache keeps each model alive after it has been
    deleted. Cured by: remove `functools.cache`.
    """
    get_fqns = _unwrapped_fqns if fixed else _get_fqns
    tokens, scores = torch.randint(0, 4000, (4, 32)), {}
    template = Decoder(4000, 512, 4)
    for step in range(1000, 10_000, 1000):
        model = copy.deepcopy(template).cuda()
        with torch.no_grad():
            logits = model(tokens.cuda())
            scores[step] = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten().cuda()).cpu()
        state_dict = get_model_state_dict(model, get_fqns)
        scores[step] = scores[step], sum(value.numel() for value in state_dict.values())
        del model, state_dict, logits
    return list(scores.items())


# An intent classifier is trained; at the end the best epoch's weights come back.

class DocModel(nn.Module):
    def __init__(self, vocab, dim, num_intents):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.representation = nn.LSTM(dim, dim // 2, bidirectional=True, batch_first=True)
        self.decoder = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, num_intents))

    def forward(self, tokens):
        return self.decoder(self.representation(self.embedding(tokens))[0].amax(1))


class TrainingState:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.best_model_state, self.best_model_metric = None, -math.inf


class Trainer:
    def __init__(self, epochs, make_room):
        self.epochs, self.make_room = epochs, make_room

    def run_epoch(self, state, batches):
        for tokens, labels in batches:
            state.optimizer.zero_grad()
            loss = F.cross_entropy(state.model(tokens.cuda()), labels.cuda())
            loss.backward()
            state.optimizer.step()

    def save_best(self, state, metric):
        if metric > state.best_model_metric:
            state.best_model_metric = metric
            state.best_model_state = OrderedDict((name, value.cpu()) for name, value in state.model.state_dict().items())

    def load_best_model(self, state):
        if self.make_room:
            state.model.cpu()
        state.model.load_state_dict({name: value.cuda() for name, value in state.best_model_state.items()})
        state.model.cuda()

    def train(self, state, batches, metrics):
        for epoch in range(self.epochs):
            self.run_epoch(state, batches)
            self.save_best(state, metrics[epoch])
        self.load_best_model(state)
        return state.model


@expected("several_models", fix=r"model\.cpu", thread="facebookresearch/pytext#865", memory=1110)
def train_intent_model(fixed=False):
    """`load_best_model` puts the state of the best model on the GPU while the current model is still there, so two models are in GPU
    memory. Cured by: move the current model to the CPU before the best one is moved to the GPU.
    """
    model = DocModel(120_000, 768, 60).cuda()
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batches = [(torch.randint(0, 120_000, (32, 24)), torch.randint(0, 60, (32,))) for _ in range(8)]
    model = Trainer(epochs=3, make_room=fixed).train(state, batches, metrics=[0.61, 0.74, 0.73])
    model.eval()
    with torch.no_grad():
        return model(batches[0][0].cuda()).argmax(1).cpu()


# Simulation-based inference in rounds, with a network that embeds long observations.

class EmbeddingNet(nn.Module):
    def __init__(self, num_features, hidden, out):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(num_features, hidden), nn.ReLU(), nn.Linear(hidden, out))

    def forward(self, x):
        return self.net(x)


class DensityEstimator(nn.Module):
    def __init__(self, embedding_net, context, dim):
        super().__init__()
        self.embedding_net = embedding_net
        self.head = nn.Sequential(nn.Linear(context, 128), nn.ReLU(), nn.Linear(128, 2 * dim))

    def log_prob(self, theta, x):
        mean, log_std = self.head(self.embedding_net(x)).chunk(2, 1)
        return (-0.5 * ((theta - mean) / log_std.exp()) ** 2 - log_std).sum(1)

    def sample(self, number, x):
        mean, log_std = self.head(self.embedding_net(x)).chunk(2, 1)
        return mean + log_std.exp() * torch.randn(number, mean.shape[1], device=mean.device)


class DirectPosterior:
    def __init__(self, net):
        self.net = net

    def set_default_x(self, x):
        self.default_x = x
        return self

    @torch.no_grad()
    def sample(self, number):
        return self.net.sample(number, self.default_x.cuda()).cpu()


class SNPE:
    def __init__(self, density_estimator):
        self._neural_net, self._model_bank = density_estimator.cuda(), []
        self._theta, self._x = [], []

    def append_simulations(self, theta, x):
        self._theta.append(theta)
        self._x.append(x)
        return self

    def train(self, batch_size=50, epochs=2):
        theta, x = self._theta[-1], self._x[-1]
        optimizer = torch.optim.Adam(self._neural_net.parameters(), lr=5e-4)
        for _ in range(epochs):
            for theta_batch, x_batch in zip(theta.split(batch_size), x.split(batch_size)):
                optimizer.zero_grad()
                (-self._neural_net.log_prob(theta_batch.cuda(), x_batch.cuda()).mean()).backward()
                optimizer.step()
        self._neural_net.zero_grad(set_to_none=True)
        return self._neural_net

    def build_posterior(self):
        self._posterior = DirectPosterior(self._neural_net)
        self._model_bank.append(copy.deepcopy(self._posterior))
        return copy.copy(self._posterior)


@expected("kept_tensors", fix=r"clear|\bdel\b", thread="sbi-dev/sbi#812", memory=650)
def infer_parameters(fixed=False):
    """After every round a deep copy of the posterior with its network is appended to `_model_bank`, so there is one more copy of the
    networks (with the big embedding net) each round. Cured by: keep only the last one: `inference._model_bank =
    inference._model_bank[-1:]`.
    """
    num_features, dim = 20_000, 5
    mixing, x_o = torch.rand(dim, num_features), torch.rand(1, num_features)
    inference = SNPE(DensityEstimator(EmbeddingNet(num_features, 400, 200), 200, dim))
    proposal = None
    for round_ in range(24):
        theta = torch.rand(100, dim) if proposal is None else proposal.sample(100).nan_to_num(0, 0, 0).clamp(0, 1)
        x = theta @ mixing
        inference.append_simulations(theta, x).train()
        proposal = inference.build_posterior().set_default_x(x_o)
        inference._x = inference._x[-1:]
        if fixed:
            inference._model_bank = inference._model_bank[-1:]
    return proposal.sample(1000)


# Sentence embeddings of a whole corpus.

class Encoder:
    def __init__(self, cuda_device, output_device):
        from transformers import RobertaConfig, RobertaModel
        config = RobertaConfig(vocab_size=5000, hidden_size=1024, num_hidden_layers=2, num_attention_heads=16, intermediate_size=2048)
        self._device, self._output_device = torch.device("cuda", cuda_device), output_device
        self._model = RobertaModel(config, add_pooling_layer=False).to(self._device).eval()

    def _tokenize(self, texts, max_length=12):
        rows = [[4 + hash(word) % 4900 for word in text.split()][:max_length] for text in texts]
        ids = torch.from_numpy(np.array([row + [1] * (max_length - len(row)) for row in rows]))
        return ids, (ids != 1).long()

    def __call__(self, inputs, batch_size=32, normalize=True):
        embeddings = []
        for begin in range(0, len(inputs), batch_size):
            ids, mask = (part.to(self._device) for part in self._tokenize(inputs[begin:begin + batch_size]))
            with torch.no_grad():
                hidden = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
                pooled = (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
                if normalize:
                    pooled = F.normalize(pooled, dim=1)
            embeddings.append(pooled.to(self._output_device) if self._output_device is not None else pooled)
        return torch.cat(embeddings)


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="JohnGiorgi/DeCLUTR#151", memory=430)
def encode_corpus(fixed=False):
    """`Encoder` collects the embeddings of all batches on the GPU. Cured by: collect them on the CPU."""
    words = [f"word{i}" for i in range(500)]
    corpus = [" ".join(words[(7 * i + j) % 500] for j in range(6)) for i in range(50_000)]
    encoder = Encoder(cuda_device=0, output_device="cpu" if fixed else None)
    return encoder(corpus, batch_size=256)
