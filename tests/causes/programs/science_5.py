"""Programs after public threads of science and research code: meta learning, attribution, Bayesian optimisation, weather, molecules, genomics, proteins."""
import copy
import io
from functools import lru_cache

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from expected import expected


# Few-shot classification: MAML on mini-ImageNet.

class ConvBlock(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.normalize = nn.BatchNorm2d(out_channels, track_running_stats=False)

    def forward(self, x):
        return F.max_pool2d(F.relu(self.normalize(self.conv(x))), 2)


class MiniImagenetCNN(nn.Module):
    def __init__(self, output_size, hidden_size=32, layers=4):
        super().__init__()
        self.base = nn.Sequential(*[ConvBlock(3 if i == 0 else hidden_size, hidden_size) for i in range(layers)])
        self.linear = nn.Linear(25 * hidden_size, output_size)

    def forward(self, x):
        return self.linear(self.base(x).flatten(1))


def clone_module(module):
    clone = module.__new__(type(module))
    clone.__dict__ = module.__dict__.copy()
    clone._parameters = {name: None if p is None else p.clone() for name, p in module._parameters.items()}
    clone._buffers = dict(module._buffers)
    clone._modules = {name: clone_module(child) for name, child in module._modules.items()}
    return clone


def update_module(module, forget):
    for key, p in module._parameters.items():
        if p is not None and getattr(p, "update", None) is not None:
            module._parameters[key] = p + p.update
            if forget:
                p.update = None
    for child in module._modules.values():
        update_module(child, forget)
    return module


def maml_update(model, lr, grads, forget):
    for p, g in zip(list(model.parameters()), grads):
        p.update = -lr * g
    return update_module(model, forget)


class MAML(nn.Module):
    def __init__(self, model, lr, forget):
        super().__init__()
        self.module, self.lr, self.forget = model, lr, forget

    def forward(self, x):
        return self.module(x)

    def clone(self):
        return MAML(clone_module(self.module), self.lr, self.forget)

    def adapt(self, loss):
        params = list(self.module.parameters())
        grads = torch.autograd.grad(loss, params, retain_graph=True, create_graph=True)
        self.module = maml_update(self.module, self.lr, grads, self.forget)


def fast_adapt(batch, learner, loss, adaptation_steps, shots, ways, device):
    data, labels = batch[0].to(device), batch[1].to(device)
    adaptation = torch.zeros(len(data), dtype=torch.bool)
    adaptation[np.arange(shots * ways) * 2] = True
    index, other = adaptation.nonzero()[:, 0].to(device), (~adaptation).nonzero()[:, 0].to(device)
    for _ in range(adaptation_steps):
        learner.adapt(loss(learner(data[index]), labels[index]))
    predictions = learner(data[other])
    valid_error = loss(predictions, labels[other])
    valid_accuracy = (predictions.argmax(1) == labels[other]).float().mean()
    return valid_error, valid_accuracy


@expected("reference_cycle", fix="update", thread="learnables/learn2learn#284", memory=600, held_back=True)
def adapt_miniimagenet(fixed=False, ways=5, shots=1, meta_batch_size=4, adaptation_steps=2, num_iterations=6):
    """`maml_update` hangs the new step on every parameter as `p.update`, and `update_module` never takes it off again; the update carries
    the graph of the second-order gradient, which refers to the same parameter, so the clones of the validation tasks (on whose loss no
    backward is called) are never freed: the memory of every `fast_adapt` stays. Cured by: `update_module` sets `p.update = None` once it
    has made the new parameter.
    """
    device = torch.device("cuda")

    def sample():
        return torch.rand(2 * ways * shots, 3, 84, 84), torch.arange(ways).repeat_interleave(2 * shots)

    model = MiniImagenetCNN(ways).to(device)
    maml = MAML(model, lr=0.5, forget=fixed)
    opt = torch.optim.Adam(maml.parameters(), 0.003)
    loss = nn.CrossEntropyLoss(reduction="mean")
    for iteration in range(num_iterations):
        opt.zero_grad()
        meta_train_error = meta_valid_error = 0.0
        for task in range(meta_batch_size):
            learner = maml.clone()
            evaluation_error, evaluation_accuracy = fast_adapt(sample(), learner, loss, adaptation_steps, shots, ways, device)
            evaluation_error.backward()
            meta_train_error += evaluation_error.item()

            learner = maml.clone()
            evaluation_error, evaluation_accuracy = fast_adapt(sample(), learner, loss, adaptation_steps, shots, ways, device)
            meta_valid_error += evaluation_error.item()
        print("Iteration", iteration, "Meta Train Error", meta_train_error / meta_batch_size, "Meta Valid Error", meta_valid_error / meta_batch_size)
        for p in maml.parameters():
            p.grad.mul_(1.0 / meta_batch_size)
        opt.step()


# Reinforcement learning: CMPO looks one step ahead with a learned ensemble of world models.

class WorldModel(nn.Module):
    def __init__(self, obs_dim, action_dim, hidden=256):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(obs_dim + action_dim, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU())
        self.next_state = nn.Linear(hidden, obs_dim)
        self.reward = nn.Linear(hidden, 1)

    def forward(self, state, action):
        h = self.trunk(torch.cat([state, action], dim=-1))
        return state + self.next_state(h), self.reward(h).squeeze(-1)


class WorldModelEnsemble(nn.Module):
    def __init__(self, obs_dim, action_dim, num_members, running):
        super().__init__()
        self.members = nn.ModuleList(WorldModel(obs_dim, action_dim) for _ in range(num_members))
        self.running = running

    def forward(self, state, action):
        return self._predict(state, action)

    def _predict(self, state, action):
        if self.running:
            mean_state, mean_reward = self.members[0](state, action)
            for member in self.members[1:]:
                next_state, reward = member(state, action)
                mean_state, mean_reward = mean_state + next_state, mean_reward + reward
            return mean_state / len(self.members), mean_reward / len(self.members)
        preds_state, preds_reward = [], []
        for member in self.members:
            next_state, reward = member(state, action)
            preds_state.append(next_state)
            preds_reward.append(reward)
        return torch.stack(preds_state).mean(dim=0), torch.stack(preds_reward).mean(dim=0)


class MettaPolicy(nn.Module):
    def __init__(self, obs_dim, action_dim, hidden=256):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(obs_dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.actor, self.critic = nn.Linear(hidden, action_dim), nn.Linear(hidden, 1)

    def forward(self, obs):
        h = self.encoder(obs)
        return self.actor(h).log_softmax(-1), self.critic(h).squeeze(-1)


class CMPO:
    def __init__(self, policy, world_model, action_dim, gamma=0.99, q_value_batch_size=None):
        self.policy, self.world_model, self.action_dim, self.gamma = policy, world_model, action_dim, gamma
        self.q_value_batch_size = q_value_batch_size

    @torch.no_grad()
    def _compute_q_values(self, obs):
        state_flat = obs.flatten(0, 1)
        num_states, obs_dim = state_flat.shape
        states_per_chunk = num_states if self.q_value_batch_size is None else max(1, self.q_value_batch_size // self.action_dim)
        q_values = torch.zeros(num_states, self.action_dim, device=obs.device)
        action_eye = torch.eye(self.action_dim, device=obs.device)
        for start in range(0, num_states, states_per_chunk):
            state_chunk = state_flat[start:start + states_per_chunk]
            n = len(state_chunk)
            states = state_chunk.unsqueeze(1).expand(n, self.action_dim, obs_dim).reshape(n * self.action_dim, obs_dim)
            actions = action_eye.unsqueeze(0).expand(n, -1, -1).reshape(n * self.action_dim, self.action_dim)
            next_state, reward = self.world_model(states, actions)
            _, next_values = self.policy(next_state)
            q_values[start:start + n] = (reward + self.gamma * next_values).view(n, self.action_dim)
        return q_values.view(*obs.shape[:2], self.action_dim)

    def loss(self, minibatch):
        log_pi, values = self.policy(minibatch["env_obs"])
        pi_prior = log_pi.detach().exp()
        q_values = self._compute_q_values(minibatch["env_obs"])
        v_prior = (pi_prior * q_values).sum(-1, keepdim=True)
        pi_cmpo = pi_prior * torch.exp((q_values - v_prior).clamp(-1, 1))
        pi_cmpo = pi_cmpo / pi_cmpo.sum(-1, keepdim=True)
        kl_loss = -(pi_cmpo * log_pi).sum(-1).mean()
        return kl_loss + 0.5 * F.mse_loss(values, minibatch["returns"])

    def model_loss(self, minibatch):
        obs, nxt = minibatch["env_obs"][:, :-1].flatten(0, 1), minibatch["env_obs"][:, 1:].flatten(0, 1)
        actions = F.one_hot(minibatch["actions"][:, :-1].flatten(), self.action_dim).float()
        total = 0
        for member in self.world_model.members:
            next_state, reward = member(obs, actions)
            total = total + F.mse_loss(next_state, nxt) + F.mse_loss(reward, minibatch["rewards"][:, :-1].flatten())
        return total


@expected("batch_without_gradients", fix="split", thread="Metta-AI/metta#4575", memory=600, held_back=True)
def train_cmpo(fixed=False, obs_dim=600, action_dim=80, agents=32, horizon=16, epochs=3):
    """`_compute_q_values` pairs every state of the minibatch with every action and sends all `num_states * action_dim` pairs through the
    world model at once; in addition `WorldModelEnsemble._predict` keeps the prediction of each member and stacks them before it takes the
    mean. Cured by: the pairs go through in chunks of at most `q_value_batch_size`, and the ensemble sums up its mean as it goes.
    """
    device = "cuda"
    policy = MettaPolicy(obs_dim, action_dim).to(device)
    world_model = WorldModelEnsemble(obs_dim, action_dim, num_members=5, running=fixed).to(device)
    algo = CMPO(policy, world_model, action_dim, q_value_batch_size=4096 if fixed else None)
    optimizer = torch.optim.Adam([*policy.parameters(), *world_model.parameters()], lr=3e-4)
    for epoch in range(epochs):
        minibatch = {"env_obs": torch.rand(agents, horizon, obs_dim, device=device), "returns": torch.rand(agents, horizon, device=device),
                     "actions": torch.zeros(agents, horizon, dtype=torch.long, device=device), "rewards": torch.rand(agents, horizon, device=device)}
        loss = algo.loss(minibatch) + algo.model_loss(minibatch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("epoch", epoch, "loss", loss.item())


# Bayesian optimisation: a fully Bayesian GP, one kernel per MCMC sample.

MCMC_DIM = -3


class GPyTorchPosterior:
    def __init__(self, mean, covariance):
        self.mvn_mean, self.covariance_matrix = mean, covariance

    @property
    def mean(self):
        return self._mean

    @property
    def variance(self):
        return self._variance


def _quantile(posterior, value):
    if value.numel() > 1:
        return torch.stack([_quantile(posterior, v) for v in value], dim=0)
    dist = torch.distributions.Normal(loc=posterior.mean, scale=posterior.variance.sqrt())
    return dist.icdf(value).mean(dim=MCMC_DIM)


class MixturePosterior(GPyTorchPosterior):
    """A mixture of Gaussians, one of each MCMC sample."""

    def __init__(self, mean, covariance):
        super().__init__(mean, covariance)
        self._mean = mean.unsqueeze(-1)
        self._variance = covariance.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        self._mixture_mean = None

    @property
    def mixture_mean(self):
        if self._mixture_mean is None:
            self._mixture_mean = self._mean.mean(dim=MCMC_DIM)
        return self._mixture_mean

    @property
    def mixture_variance(self):
        second = (self._variance + self._mean.pow(2)).mean(dim=MCMC_DIM)
        return second - self.mixture_mean.pow(2)

    def quantile(self, value):
        return _quantile(self, value)


class FullyBayesianPosterior(MixturePosterior):
    def __init__(self, mean, covariance):
        super().__init__(mean, covariance)

        @lru_cache
        def _quantile(value):
            if value.numel() > 1:
                return torch.stack([self.quantile(v) for v in value], dim=0)
            dist = torch.distributions.Normal(loc=self.mean, scale=self.variance.sqrt())
            return dist.icdf(value).mean(dim=MCMC_DIM)

        self._quantile = _quantile

    def quantile(self, value):
        return self._quantile(value)


class SaasFullyBayesianSingleTaskGP(nn.Module):
    def __init__(self, train_X, train_Y, num_samples, posterior_class):
        super().__init__()
        self.train_X, self.train_Y, self.posterior_class = train_X, train_Y, posterior_class
        self.register_buffer("lengthscale", torch.rand(num_samples, 1, train_X.shape[-1], device=train_X.device) + 0.5)
        self.register_buffer("outputscale", torch.ones(num_samples, 1, 1, device=train_X.device))
        k = self.covar(train_X, train_X) + 1e-2 * torch.eye(len(train_X), device=train_X.device)
        self.register_buffer("solve", torch.linalg.solve(k, torch.eye(len(train_X), device=train_X.device)))

    def covar(self, x1, x2):
        a, b = x1 / self.lengthscale, x2 / self.lengthscale
        sq = a.pow(2).sum(-1, keepdim=True) + b.pow(2).sum(-1).unsqueeze(-2) - 2 * a @ b.mT
        return self.outputscale * torch.exp(-0.5 * sq.clamp_min_(0))

    def posterior(self, X):
        cross = self.covar(X, self.train_X) @ self.solve
        mean = (cross @ self.train_Y).squeeze(-1)
        covariance = self.covar(X, X) - cross @ self.covar(self.train_X, X)
        return self.posterior_class(mean, covariance)


@expected("reference_cycle", fix="weakref|cycle", thread="meta-pytorch/botorch#1951", memory=500, held_back=True)
def score_candidates(fixed=False, num_train=100, dim=20, num_samples=16, q=512, batches=120):
    """Each `FullyBayesianPosterior` stores in `self._quantile` an `lru_cache`d function defined in `__init__` that refers to `self`: a
    posterior refers to itself, is not freed when the loop drops it, and so the posteriors (means, variances, covariances of all MCMC
    samples) of the calls of `model.posterior` in the loop pile up. Cured by: `_quantile` becomes a function of the module that is given the
    posterior.
    """
    device = torch.device("cuda")
    train_X = torch.rand(num_train, dim, device=device)
    train_Y = torch.sin(train_X).sum(1, keepdim=True)
    model = SaasFullyBayesianSingleTaskGP(train_X, train_Y, num_samples, MixturePosterior if fixed else FullyBayesianPosterior).eval()
    best = []
    with torch.no_grad():
        for i in range(batches):
            X = torch.rand(q, dim, device=device)
            posterior = model.posterior(X)
            ucb = posterior.mixture_mean + 2.0 * posterior.mixture_variance.clamp_min(1e-9).sqrt()
            best.append(ucb.max().cpu())
    return {"best": len(best)}


# Influence functions: conjugate gradients with Hessian-vector products over the training set.

class Bottleneck(nn.Module):
    def __init__(self, channels, width):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, channels, 1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        return F.relu(self.bn3(self.conv3(out)) + x)


class ResNet50(nn.Module):
    def __init__(self, num_classes, channels=128):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 7, stride=4, padding=3)
        self.layers = nn.Sequential(*[Bottleneck(channels, channels // 2) for _ in range(6)])
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x):
        return self.fc(self.layers(F.relu(self.stem(x))).mean((2, 3)))


def flatten_dimensions(tensors):
    return torch.cat([t.reshape(-1) for t in tensors])


def align_structure(params, vec):
    out, at = {}, 0
    for k, p in params.items():
        out[k] = vec[at:at + p.numel()].view_as(p)
        at += p.numel()
    return out


def create_batch_loss_function(model, loss):
    def batch_loss(params, x, y):
        return loss(torch.func.functional_call(model, params, (x,)), y)
    return batch_loss


def create_hvp_function(model, loss, data_loader, precompute_grad=True):
    device = next(model.parameters()).device
    batch_loss = create_batch_loss_function(model, loss)
    if precompute_grad:
        model_params = {k: p for k, p in model.named_parameters() if p.requires_grad}
        total_grad_xy, total_points = torch.empty(0), 0
        grad_func = torch.func.grad(batch_loss)
        for x, y in iter(data_loader):
            grad_xy = flatten_dimensions(grad_func(model_params, x.to(device), y.to(device)).values())
            if total_grad_xy.nelement() == 0:
                total_grad_xy = torch.zeros_like(grad_xy)
            total_grad_xy += grad_xy * len(x)
            total_points += len(x)
        total_grad_xy /= total_points

        def precomputed_grads_hvp_function(vec):
            z = (total_grad_xy * vec).sum()
            return flatten_dimensions(torch.autograd.grad(z, list(model_params.values()), retain_graph=True)).detach()

        return precomputed_grads_hvp_function

    def avg_hvp_function(vec):
        params = {k: p.detach() for k, p in model.named_parameters() if p.requires_grad}
        avg_hessian = torch.zeros_like(vec)
        for x, y in iter(data_loader):
            x, y = x.to(device), y.to(device)
            _, vjp_fn = torch.func.vjp(lambda p: torch.func.grad(batch_loss)(p, x, y), params)
            avg_hessian += flatten_dimensions(vjp_fn(align_structure(params, vec))[0].values())
        return avg_hessian / len(data_loader)

    return avg_hvp_function


class CgInfluence:
    def __init__(self, model, loss, hessian_regularization=1e-2, maxiter=4, precompute_grad=True):
        self.model, self.loss = model, loss
        self.hessian_regularization, self.maxiter, self.precompute_grad = hessian_regularization, maxiter, precompute_grad

    def fit(self, data):
        self.train_dataloader = data
        return self

    def _solve_hvp(self, rhs):
        hvp = create_hvp_function(self.model, self.loss, self.train_dataloader, precompute_grad=self.precompute_grad)
        x = torch.zeros_like(rhs)
        r, p = rhs.clone(), rhs.clone()
        for _ in range(self.maxiter):
            ap = hvp(p) + self.hessian_regularization * p
            alpha = (r @ r) / (p @ ap)
            x = x + alpha * p
            new = r - alpha * ap
            p = new + (new @ new) / (r @ r) * p
            r = new
        return x

    def influence_factors(self, x, y):
        params = {k: p.detach() for k, p in self.model.named_parameters()}
        rhs = flatten_dimensions(torch.func.grad(create_batch_loss_function(self.model, self.loss))(params, x, y).values())
        return self._solve_hvp(rhs)


@expected("create_graph", fix="one batch at a time", thread="aai-institute/pyDVL#497", memory=1200, held_back=True)
def rank_training_images(fixed=False, num_images=192, batch_size=16, size=96):
    """`create_hvp_function` computes the mean gradient over the whole training set in advance (`total_grad_xy`) and keeps its computation
    graph, of every batch, to differentiate a second time in each CG step: memory grows with the number of batches. Cured by:
    `precompute_grad=False`: the Hessian-vector product is computed batch by batch and averaged, no graph is kept.
    """
    device = "cuda"
    model = ResNet50(100).to(device).eval()
    train = TensorDataset(torch.rand(num_images, 3, size, size), torch.randint(100, (num_images,)))
    loader = DataLoader(train, batch_size=batch_size)
    influence_model = CgInfluence(model, F.cross_entropy, precompute_grad=not fixed).fit(loader)
    x_test, y_test = torch.rand(4, 3, size, size, device=device), torch.zeros(4, dtype=torch.long, device=device)
    factors = influence_model.influence_factors(x_test, y_test)
    params = {k: p.detach() for k, p in model.named_parameters()}
    batch_loss = create_batch_loss_function(model, F.cross_entropy)
    values = []
    for x, y in loader:
        grads = flatten_dimensions(torch.func.grad(batch_loss)(params, x.to(device), y.to(device)).values())
        values.append((grads @ factors).cpu())
    return {"values": len(values)}


# Data attribution: DataInf on an MLP.

class MNISTMlp(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.linear1, self.linear2, self.linear3 = nn.Linear(784, hidden), nn.Linear(hidden, hidden // 2), nn.Linear(hidden // 2, 10)

    def forward(self, x):
        return self.linear3(F.relu(self.linear2(F.relu(self.linear1(x)))))


def _single_datainf_ifvp(v, grad, regularization):
    grad = grad.unsqueeze(-1)
    coef = (v @ grad) / (regularization + torch.norm(grad) ** 2)
    return (v - coef @ grad.T) / regularization


class IFAttributorDataInf:
    def __init__(self, model, regularization=0.1, split=False):
        self.model, self.regularization, self.split = model, regularization, split
        self.params = {k: p.detach() for k, p in model.named_parameters()}
        self.layers = [["linear1.weight", "linear1.bias"], ["linear2.weight", "linear2.bias"], ["linear3.weight", "linear3.bias"]]

        def loss_func(params, x, y):
            return F.cross_entropy(torch.func.functional_call(model, params, (x.unsqueeze(0),)), y.unsqueeze(0))

        self.batch_grad_func = torch.func.vmap(torch.func.grad(loss_func), in_dims=(None, 0, 0))

    def generate_rep(self, x, y):
        grads = self.batch_grad_func(self.params, x, y)
        return [torch.cat([grads[name].flatten(1) for name in layer], dim=1) for layer in self.layers]

    def ifvp(self, v, grads):
        single = torch.func.vmap(lambda grad: _single_datainf_ifvp(v, grad, self.regularization))
        if not self.split:
            return single(grads).mean(dim=0)
        running_transformation = torch.zeros_like(v)
        for batch in grads.split(len(v)):
            running_transformation += single(batch).sum(dim=0)
        return running_transformation / len(grads)

    def transform_test_rep(self, test_rep, train_loader):
        vector_product = [torch.zeros_like(rep) for rep in test_rep]
        for x, y in train_loader:
            train_rep = self.generate_rep(x.cuda(), y.cuda())
            for layer, (v, grads) in enumerate(zip(test_rep, train_rep)):
                vector_product[layer] += self.ifvp(v, grads)
        return [rep / len(train_loader) for rep in vector_product]

    def attribute(self, train_loader, test_loader):
        scores = []
        for x, y in test_loader:
            test_rep = self.transform_test_rep(self.generate_rep(x.cuda(), y.cuda()), train_loader)
            row = []
            for tx, ty in train_loader:
                train_rep = self.generate_rep(tx.cuda(), ty.cuda())
                row.append(sum(a @ b.T for a, b in zip(train_rep, test_rep)).cpu())
            scores.append(torch.cat(row))
        return torch.cat(scores, dim=1)


@expected("vectorized_over_all", fix="chunk_size", thread="TRAIS-Lab/dattri#123", memory=650, held_back=True)
def attribute_queries(fixed=False, hidden=128, n_train=256, n_test=16, train_batch=128, test_batch=8):
    """DataInf's `ifvp` maps `_single_datainf_ifvp` with `vmap` over all training gradients of the batch and thereby creates a tensor of
    (training samples, test samples, parameters) before it takes the mean over the training samples. Cured by: the training gradients are
    split into batches as small as the test batch, each contribution is summed at once.
    """
    model = MNISTMlp(hidden).cuda().eval()
    train = TensorDataset(torch.rand(n_train, 784), torch.randint(10, (n_train,)))
    test = TensorDataset(torch.rand(n_test, 784), torch.randint(10, (n_test,)))
    attributor = IFAttributorDataInf(model, split=fixed)
    score = attributor.attribute(DataLoader(train, batch_size=train_batch), DataLoader(test, batch_size=test_batch))
    return {"shape": list(score.shape)}


# Weather: the autoregressive rollout of an encoder-processor-decoder model.

class GraphForecaster(nn.Module):
    def __init__(self, multi_step, num_variables, num_out, hidden=64, num_hidden_nodes=2048, num_chunks=16):
        super().__init__()
        self.encoder = nn.Linear(multi_step * num_variables, hidden)
        self.processor = nn.ModuleList(nn.TransformerEncoderLayer(hidden, 4, 4 * hidden, batch_first=True) for _ in range(4))
        self.decoder = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.GELU(), nn.Linear(hidden, num_out))
        self.num_hidden_nodes, self.num_chunks = num_hidden_nodes, num_chunks

    def forward(self, x):
        batch, steps, values, variables = x.shape
        latent = [self.encoder(chunk.permute(0, 2, 1, 3).flatten(2)) for chunk in x.chunk(self.num_chunks, dim=2)]
        latent = torch.cat(latent, dim=1)
        hidden = F.adaptive_avg_pool1d(latent.transpose(1, 2), self.num_hidden_nodes).transpose(1, 2)
        for layer in self.processor:
            hidden = layer(hidden)
        nodes = torch.arange(values, device=x.device) * self.num_hidden_nodes // values
        out = x.new_empty(batch, 1, values, self.decoder[-1].out_features)
        for part, a, n in zip(out.chunk(self.num_chunks, 2), latent.chunk(self.num_chunks, 1), nodes.chunk(self.num_chunks)):
            part[:, 0] = self.decoder(torch.cat([a, hidden[:, n]], dim=-1))
        return out


class TensorHandler:
    def __init__(self, prognostic_input_mask, prognostic_output_mask, multi_step_input, in_place):
        self.prognostic_input_mask, self.prognostic_output_mask = prognostic_input_mask, prognostic_output_mask
        self.multi_step_input, self.in_place = multi_step_input, in_place

    def copy_prognostic_fields_to_input_tensor(self, input_tensor_torch, y_pred):
        prognostic_fields = torch.index_select(y_pred, dim=-1, index=self.prognostic_output_mask)
        keep_steps = min(y_pred.shape[1], self.multi_step_input)
        if self.in_place:
            for i in range(self.multi_step_input - keep_steps):
                input_tensor_torch[:, i] = input_tensor_torch[:, i + keep_steps]
        else:
            input_tensor_torch = input_tensor_torch.roll(-keep_steps, dims=1)
        for i in range(keep_steps):
            for slot, field in enumerate(self.prognostic_input_mask):
                input_tensor_torch[:, -(i + 1), :, field] = prognostic_fields[:, -(i + 1), :, slot]
        return input_tensor_torch

    def add_dynamic_forcings_to_input_tensor(self, input_tensor_torch, step):
        input_tensor_torch[:, -1, :, -2:] = float(np.cos(step / 4))
        return input_tensor_torch


@expected("large_result", fix="in place", thread="ecmwf/anemoi-inference#566", memory=1350, held_back=True)
def forecast_rollout(fixed=False, values=320_000, variables=200, lead_steps=6):
    """`copy_prognostic_fields_to_input_tensor` shifts the time steps with `roll`, which makes a second copy of the whole (large) input
    tensor while the first one and the prediction are still there. Cured by: the steps are shifted in place.
    """
    device = torch.device("cuda")
    prognostic = list(range(variables - 4))
    model = GraphForecaster(2, variables, len(prognostic)).to(device).eval()
    handler = TensorHandler(prognostic, torch.arange(len(prognostic), device=device), 2, in_place=fixed)
    input_tensor_torch = torch.zeros(1, 2, values, variables, device=device)
    states = []
    with torch.inference_mode():
        for step in range(lead_steps):
            y_pred = model(input_tensor_torch)
            states.append(y_pred[0, 0, ::1000].cpu().numpy())
            if step < lead_steps - 1:
                input_tensor_torch = handler.copy_prognostic_fields_to_input_tensor(input_tensor_torch, y_pred)
                input_tensor_torch = handler.add_dynamic_forcings_to_input_tensor(input_tensor_torch, step)
            del y_pred
    return {"states": len(states)}


# Molecules: a GNN for many assays, with a small trainer in the manner of Lightning.

class MolDataset(Dataset):
    def __init__(self, size, atoms, num_labels):
        self.size, self.atoms, self.num_labels = size, atoms, num_labels

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        edges = torch.stack([torch.arange(self.atoms), torch.arange(self.atoms).roll(1)])
        return torch.rand(self.atoms, 16), edges, torch.zeros(self.num_labels)


def goli_collate_fn(samples):
    atoms = samples[0][0].shape[0]
    edges = torch.cat([e + i * atoms for i, (_, e, _) in enumerate(samples)], dim=1)
    return {"feat": torch.cat([x for x, _, _ in samples]), "edges": edges, "labels": torch.stack([y for _, _, y in samples]),
            "weights": torch.ones(len(samples), 1), "graph": torch.arange(len(samples)).repeat_interleave(atoms)}


class FullDGLNetwork(nn.Module):
    def __init__(self, num_labels, hidden=96, depth=3):
        super().__init__()
        self.pre_nn = nn.Linear(16, hidden)
        self.gnn = nn.ModuleList(nn.Linear(2 * hidden, hidden) for _ in range(depth))
        self.post_nn = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, num_labels))

    def forward(self, batch):
        h = self.pre_nn(batch["feat"])
        for layer in self.gnn:
            messages = torch.zeros_like(h).index_add(0, batch["edges"][1], h[batch["edges"][0]])
            h = F.relu(layer(torch.cat([h, messages], dim=1)))
        num_graphs = batch["labels"].shape[0]
        return self.post_nn(torch.zeros(num_graphs, h.shape[1], device=h.device).index_add(0, batch["graph"], h))


class PredictorModule(nn.Module):
    def __init__(self, model, to_cpu):
        super().__init__()
        self.model, self.loss_fun, self.to_cpu = model, nn.BCEWithLogitsLoss(reduction="none"), to_cpu

    def _general_step(self, batch, step_name):
        preds = self.model(batch)
        targets = batch.pop("labels").to(dtype=preds.dtype)
        weights = batch.pop("weights")
        loss = (self.loss_fun(preds, targets) * weights).mean()
        if self.to_cpu:
            preds, targets, weights = preds.detach().cpu(), targets.detach().cpu(), weights.detach().cpu()
        return loss, {"preds": preds, "targets": targets, "weights": weights, f"BCE/{step_name}": loss.detach().cpu()}

    def training_step(self, batch, batch_idx):
        loss, step_dict = self._general_step(batch, "train")
        return {"loss": loss, **step_dict}

    def training_epoch_end(self, outputs):
        return float(np.mean([out["BCE/train"] for out in outputs]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Trainer:
    def __init__(self, max_epochs):
        self.max_epochs = max_epochs

    def fit(self, module, loader):
        module.cuda()
        optimizer = module.configure_optimizers()
        for epoch in range(self.max_epochs):
            epoch_output = []
            for batch_idx, batch in enumerate(loader):
                batch = {key: value.cuda() for key, value in batch.items()}
                output = module.training_step(batch, batch_idx)
                optimizer.zero_grad()
                output["loss"].backward()
                optimizer.step()
                epoch_output.append({key: value.detach() for key, value in output.items()})
            print("epoch", epoch, module.training_epoch_end(epoch_output))


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="datamol-io/graphium#61", memory=400, held_back=True)
def train_predictor(fixed=False, num_molecules=12_288, batch_size=512, num_labels=6000):
    """`training_step` returns `preds`, `targets` and `weights` of its batch as they are on the GPU; the trainer collects the outputs of all
    steps until the end of the epoch, so the predictions and targets of the whole epoch stay in GPU memory. Cured by: `_general_step`
    returns them detached and on the CPU.
    """
    dataset = MolDataset(num_molecules, 12, num_labels)
    predictor = PredictorModule(FullDGLNetwork(num_labels), to_cpu=fixed)
    Trainer(max_epochs=1).fit(predictor, DataLoader(dataset, batch_size=batch_size, collate_fn=goli_collate_fn))


# Federated learning: server and clients in one process.

class FedResNet(nn.Module):
    def __init__(self, width=512, num_classes=10):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, stride=4, padding=1), nn.GroupNorm(8, width), nn.ReLU())
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width), nn.ReLU()) for _ in range(3))
        self.fc = nn.Linear(width, num_classes)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.fc(x.mean((2, 3)))


class BasicClient:
    def __init__(self, cid, data, option):
        self.id, self.train_data, self.option = cid, data, option
        self.device = torch.device("cuda:0")

    def reply(self, svr_pkg):
        model = self.unpack(svr_pkg)
        self.train(model)
        return self.pack(model)

    def unpack(self, received_pkg):
        return received_pkg["model"]

    def pack(self, model):
        return {"model": model}

    def train(self, model):
        model.to(self.device).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=self.option["learning_rate"])
        for x, y in DataLoader(self.train_data, batch_size=self.option["batch_size"]):
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(self.device)), y.to(self.device)).backward()
            optimizer.step()
        model.zero_grad()


class BasicServer:
    def __init__(self, model, clients, option):
        self.option, self.clients = option, clients
        self.device = torch.device("cpu") if option["server_with_cpu"] else torch.device("cuda:0")
        self.model = model.to(self.device)

    def run(self):
        for current_round in range(self.option["num_rounds"]):
            self.iterate()

    def iterate(self):
        selected_clients = list(range(len(self.clients)))
        models = self.communicate(selected_clients)["model"]
        self.model = self.aggregate(models)

    def communicate(self, selected_clients):
        packages_received_from_clients = []
        for client_id in selected_clients:
            response = self.clients[client_id].reply(self.pack(client_id))
            response = {key: value.to(self.device) for key, value in response.items()}
            packages_received_from_clients.append(response)
        return self.unpack(packages_received_from_clients)

    def pack(self, client_id):
        return {"model": copy.deepcopy(self.model)}

    def unpack(self, packages):
        return {name: [package[name] for package in packages] for name in packages[0]}

    @torch.no_grad()
    def aggregate(self, models):
        res = copy.deepcopy(models[0])
        for params in zip(res.parameters(), *[m.parameters() for m in models]):
            params[0].zero_()
            for p in params[1:]:
                params[0].add_(p, alpha=1.0 / len(models))
        return res


@expected("kept_tensors", fix="cpu", thread="WwZzz/easyFL#44", memory=600, held_back=True)
def run_federated(fixed=False, num_clients=40, num_rounds=2):
    """By default `pack` gives every selected client a `copy.deepcopy` of the global model on the GPU, and the trained copies come back in
    the packages that the server collects until it aggregates: as many models as clients lie on the GPU at once. Cured by: option
    `server_with_cpu=True` (clients train one after the other, the server keeps the models it gets in host memory).
    """
    option = {"num_rounds": num_rounds, "learning_rate": 0.1, "batch_size": 8, "server_with_cpu": fixed}
    clients = [BasicClient(cid, TensorDataset(torch.rand(16, 3, 32, 32), torch.randint(10, (16,))), option) for cid in range(num_clients)]
    BasicServer(FedResNet(), clients, option).run()


# Genomics: ChromBPNet, a bias model and an accessibility model read from DNA.

class BPNet(nn.Module):
    def __init__(self, n_filters=32, n_layers=6, trimming=557):
        super().__init__()
        self.trimming = trimming
        self.iconv = nn.Conv1d(4, n_filters, 21, padding=10)
        self.rconvs = nn.ModuleList(nn.Conv1d(n_filters, n_filters, 3, padding=2 ** i, dilation=2 ** i) for i in range(1, n_layers + 1))
        self.fconv = nn.Conv1d(n_filters, 1, 75, padding=37)
        self.linear = nn.Linear(n_filters, 1)

    def forward(self, X):
        X = F.relu(self.iconv(X))
        for conv in self.rconvs:
            X = X + F.relu(conv(X))
        X = X[:, :, self.trimming:-self.trimming]
        return self.fconv(X), self.linear(X.mean(-1))


@torch.no_grad()
def predict(model, X, batch_size=64, device="cuda"):
    y = []
    for start in range(0, len(X), batch_size):
        y.append([part.cpu() for part in model(X[start:start + batch_size].to(device))])
    return tuple(torch.cat(parts) for parts in zip(*y))


def mnll_loss(logps, true_counts):
    return -(logps * true_counts).sum(-1).mean()


class ChromBPNet(nn.Module):
    def __init__(self, bias, accessibility):
        super().__init__()
        self.bias, self.accessibility = bias, accessibility
        for parameter in self.bias.parameters():
            parameter.requires_grad = False

    def forward(self, X):
        acc_profile, acc_counts = self.accessibility(X)
        bias_profile, bias_counts = self.bias(X)
        return acc_profile + bias_profile, torch.logaddexp(acc_counts, bias_counts)

    def fit(self, training_data, optimizer, X_valid, y_valid, max_epochs, validation_iter, batch_size=64, stream=False):
        if not stream:
            X_valid = X_valid.cuda(non_blocking=True)
        y_valid_counts = y_valid.sum(dim=2)
        iteration = 0
        for epoch in range(max_epochs):
            for X, y in training_data:
                self.train()
                X, y = X.cuda(), y.cuda()
                optimizer.zero_grad()
                y_profile, y_counts = self(X)
                profile_loss = mnll_loss(y_profile.flatten(1).log_softmax(-1), y.flatten(1))
                count_loss = F.mse_loss(torch.log(y.sum(dim=2) + 1), y_counts)
                loss = profile_loss + 10 * count_loss
                loss.backward()
                optimizer.step()
                if iteration % validation_iter == 0:
                    self.eval()
                    y_profile, y_counts = predict(self, X_valid, batch_size=batch_size)
                    valid_loss = mnll_loss(y_profile.flatten(1).log_softmax(-1), y_valid.flatten(1))
                    valid_counts = F.mse_loss(torch.log(y_valid_counts + 1), y_counts)
                    print(epoch, iteration, loss.item(), valid_loss.item(), valid_counts.item())
                iteration += 1


@expected("data_on_gpu", fix="host|DataLoader", thread="jmschrei/bpnet-lite#13", memory=580, held_back=True)
def fit_chrombpnet(fixed=False, n_train=128, n_valid=12_000, length=2114, out_length=1000, batch_size=32):
    """`ChromBPNet.fit` copies the entire validation set to the GPU at its start (`X_valid = X_valid.cuda()`) and keeps it there through the
    training, though `predict`, the only one to use it, moves its batches to the GPU and back by itself. Cured by: `X_valid` stays on the
    CPU.
    """
    model = ChromBPNet(BPNet(), BPNet()).cuda()
    peaks = TensorDataset(torch.zeros(n_train, 4, length), torch.ones(n_train, 1, out_length))
    X_valid, y_valid = torch.zeros(n_valid, 4, length), torch.ones(n_valid, 1, out_length)
    optimizer = torch.optim.Adam(model.accessibility.parameters(), lr=1e-3)
    model.fit(DataLoader(peaks, batch_size=batch_size), optimizer, X_valid, y_valid, max_epochs=1, validation_iter=4, stream=fixed)


# Proteins: embeddings of a FASTA file with a contrastive model.

class PatchedConvEncoder(nn.Module):
    def __init__(self, vocab=30, emb_dim=32, dim=256, patch_len=11):
        super().__init__()
        self.patch_len = patch_len
        self.embedding = nn.Embedding(vocab, emb_dim)
        self.convs = nn.Sequential(nn.Conv1d(emb_dim, dim // 2, 5), nn.ReLU(), nn.Conv1d(dim // 2, dim, 7), nn.ReLU())

    def forward(self, primary):
        n, length = primary.shape
        patches = primary[:, : length // self.patch_len * self.patch_len].reshape(-1, self.patch_len)
        z = self.convs(self.embedding(patches).transpose(1, 2)).squeeze(-1)
        return z.view(n, length // self.patch_len, -1)


class CausalLayer(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x):
        n, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        att = (q @ k.mT / (dim // self.heads) ** 0.5).masked_fill(mask, float("-inf")).softmax(-1)
        x = x + self.out((att @ v).transpose(1, 2).reshape(n, length, dim))
        return x + self.ff(self.norm2(x))


class CPCProtModel(nn.Module):
    def __init__(self, dim=256, layers=8):
        super().__init__()
        self.encoder = PatchedConvEncoder(dim=dim)
        self.autoregressor = nn.Sequential(*[CausalLayer(dim) for _ in range(layers)])

    @property
    def device(self):
        return next(self.parameters()).device

    def get_z(self, primary):
        return self.encoder(primary)

    def get_c(self, z):
        return self.autoregressor(z)


class CPCProtEmbedding(nn.Module):
    def __init__(self, model, track):
        super().__init__()
        self.cpc, self.track = model, track

    def get_z(self, data):
        return self.cpc.get_z(data["primary"].to(self.cpc.device))

    def get_c(self, data):
        z = self.get_z(data)
        with torch.set_grad_enabled(self.track):
            c = self.cpc.get_c(z)
        return c

    def get_c_mean(self, data):
        return self.get_c(data).mean(dim=1)


@expected("evaluation_keeps_graphs", fix="no_grad", thread="amyxlu/CPCProt#4", memory=700, held_back=True)
def embed_fasta(fixed=False, num_proteins=384, batch_size=128, max_length=1100):
    """`CPCProtEmbedding.get_c` runs the context network without `torch.no_grad()`: gradients are tracked though only embeddings are wanted,
    and the activations of `self.cpc.get_c` are kept for a backward that never comes. Cured by: `with torch.no_grad()` around it.
    """
    lengths = np.random.default_rng(0).integers(max_length // 2, max_length, num_proteins)

    def collate_fn(batch):
        longest = int(max(lengths[i] for i in batch))
        return {"primary": torch.zeros(len(batch), longest, dtype=torch.long), "protein_length": torch.tensor([int(lengths[i]) for i in batch])}

    model = CPCProtModel().cuda().eval()
    embedder = CPCProtEmbedding(model, track=not fixed)
    all_embs = []
    for batch in DataLoader(range(num_proteins), batch_size=batch_size, collate_fn=collate_fn):
        emb = embedder.get_c_mean(batch)
        emb = emb.detach().cpu().numpy()
        all_embs.append(emb)
    return {"shape": list(np.concatenate(all_embs).shape)}


# Knowledge graphs: RotatE, training and ranking.

class RotatE(nn.Module):
    def __init__(self, num_entities, num_relations, embedding_dim):
        super().__init__()
        self.num_entities = num_entities
        self.entity = nn.Embedding(num_entities, 2 * embedding_dim)
        self.relation = nn.Embedding(num_relations, embedding_dim)
        nn.init.xavier_uniform_(self.entity.weight)

    def interaction(self, h, r, t):
        h, t = h.view(*h.shape[:-1], -1, 2), t.view(*t.shape[:-1], -1, 2)
        re = h[..., 0] * r.cos() - h[..., 1] * r.sin()
        im = h[..., 0] * r.sin() + h[..., 1] * r.cos()
        diff = torch.stack([re, im], dim=-1) - t
        return -diff.norm(dim=-1).sum(-1)

    def score_hrt(self, hrt):
        return self.interaction(self.entity(hrt[:, 0]), self.relation(hrt[:, 1]), self.entity(hrt[:, 2]))

    def score_t(self, hr, slice_size=None):
        h, r = self.entity(hr[:, 0]).unsqueeze(1), self.relation(hr[:, 1]).unsqueeze(1)
        scores = [self.interaction(h, r, t.unsqueeze(0)) for t in self.entity.weight.split(slice_size or self.num_entities)]
        return torch.cat(scores, dim=1)


class RankBasedEvaluator:
    def __init__(self, batch_size, slice_size=None):
        self.batch_size, self.slice_size, self.ranks = batch_size, slice_size, []

    @torch.inference_mode()
    def evaluate(self, model, mapped_triples):
        model.eval()
        for batch in mapped_triples.split(self.batch_size):
            batch = batch.to("cuda")
            scores = model.score_t(batch[:, :2], slice_size=self.slice_size)
            true = scores.gather(1, batch[:, 2:])
            self.ranks.append((scores > true).sum(1).cpu())
        return torch.cat(self.ranks)


@expected("all_pairs", fix="split", thread="pykeen/pykeen#119", memory=600, held_back=True)
def evaluate_rotate(fixed=False, num_entities=24_000, num_relations=28, embedding_dim=50, triples=4096):
    """The evaluation scores each triple of the batch against all entities: RotatE's interaction makes tensors of (batch, `num_entities`,
    dimension), many times what training with one negative per positive needs. Cured by: the entities are scored in slices (`slice_size`).
    """
    rng = np.random.default_rng(0)

    def triples_factory(n):
        return torch.from_numpy(np.stack([rng.integers(num_entities, size=n), rng.integers(num_relations, size=n), rng.integers(num_entities, size=n)], 1))

    training, testing = triples_factory(triples), triples_factory(128)
    model = RotatE(num_entities, num_relations, embedding_dim).to("cuda")
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    for epoch in range(2):
        for positive in training.split(256):
            negative = positive.clone()
            negative[:, 2] = torch.randint(num_entities, (len(positive),))
            pos, neg = model.score_hrt(positive.cuda()), model.score_hrt(negative.cuda())
            loss = F.margin_ranking_loss(pos, neg, torch.ones_like(pos), margin=1.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    evaluator = RankBasedEvaluator(batch_size=64, slice_size=2000 if fixed else None)
    return {"ranks": len(evaluator.evaluate(model, testing))}


# Camera traps: a custom detector, its labels and its detections.

class Yolo(nn.Module):
    def __init__(self, names, width=512):
        super().__init__()
        self.names = names
        self.stem = nn.Sequential(nn.Conv2d(3, width, 6, stride=8, padding=2), nn.SiLU())
        self.stages = nn.Sequential(*[nn.Sequential(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.SiLU(),
                                                    nn.Conv2d(2 * width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.SiLU()) for _ in range(5)])
        self.neck = nn.Sequential(*[nn.Conv2d(width, width, 3, padding=1) for _ in range(12)])
        self.detect = nn.Conv2d(width, 3 * (5 + len(names)), 1)

    def forward(self, x):
        return self.detect(self.neck(self.stages(self.stem(x)))).flatten(2)


class PTDetector:
    def __init__(self, weights, force_cpu=False):
        self.device = "cpu" if force_cpu or not torch.cuda.is_available() else "cuda"
        weights.seek(0)
        checkpoint = torch.load(weights, map_location=self.device, weights_only=False)
        self.model = checkpoint["model"].eval()

    @torch.inference_mode()
    def generate_detections_one_image(self, image):
        x = torch.from_numpy(image).to(self.device).float().permute(2, 0, 1).unsqueeze(0) / 255
        prediction = self.model(x)
        return prediction.squeeze(0).T.cpu().numpy()


def fetch_label_map(weights, force_cpu):
    label_detector = PTDetector(weights, force_cpu)
    return label_detector, {str(number + 1): name for number, name in label_detector.model.names.items()}


@expected("loaded_onto_gpu", fix="map_location|host", thread="PetervanLunteren/AddaxAI#7", memory=620, held_back=True)
def identify_animals(fixed=False, num_images=6, size=(640, 640)):
    """To read the class names, `fetch_label_map` loads the custom model onto the GPU, and the detector loads it a second time for the
    detection itself: the weights lie on the GPU twice. Cured by: the model is loaded onto the CPU when only the labels are wanted.
    """
    weights = io.BytesIO()
    torch.save({"model": Yolo({0: "red fox", 1: "badger", 2: "roe deer", 3: "vehicle"}), "epoch": -1}, weights)
    label_detector, label_map = fetch_label_map(weights, force_cpu=fixed)
    detector = PTDetector(weights)
    results = []
    for i in range(num_images):
        image = np.full((*size, 3), i, dtype=np.uint8)
        detections = detector.generate_detections_one_image(image)
        results.append({"file": f"IMG_{i:04}.JPG", "detections": detections.shape[0]})
    return {"images": len(results), "detection_categories": label_map, "detector": type(label_detector.model).__name__}


# Prediction over a large set of signals.

class SignalNet(nn.Module):
    def __init__(self, num_labels, width=64):
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(2, width, 7, padding=3), nn.BatchNorm1d(width), nn.ReLU(), nn.MaxPool1d(2),
                                      nn.Conv1d(width, width, 5, padding=2), nn.BatchNorm1d(width), nn.ReLU(), nn.MaxPool1d(2),
                                      nn.Conv1d(width, 2 * width, 3, padding=1), nn.BatchNorm1d(2 * width), nn.ReLU())
        self.classifier = nn.Linear(2 * width, num_labels)

    def forward(self, x):
        return self.classifier(self.features(x).mean(-1)).softmax(1)


@expected("evaluation_keeps_graphs", fix="no_grad|detach", thread="pytorch/pytorch#13613", memory=600, held_back=True)
def predict_labels(fixed=False, num_signals=2048, batch_size=64, length=1024, num_labels=24):
    """`y_predlabel` is built up with `torch.cat` of `batch_y_predlabel.cpu()`; the copy on the CPU is still attached to the graph of its
    forward pass, so `y_predlabel` keeps the GPU activations of all batches alive. Cured by: `batch_y_predlabel` is detached before it is
    copied.
    """
    device = torch.device("cuda")
    model = SignalNet(num_labels).to(device)
    model.eval()
    loader = DataLoader(TensorDataset(torch.rand(num_signals, 2, length)), batch_size=batch_size, shuffle=False)
    y_predlabel = torch.empty(0, num_labels)
    for (batch_x,) in loader:
        batch_y_predlabel = model(batch_x.to(device))
        if fixed:
            batch_y_predlabel = batch_y_predlabel.detach()
        y_predlabel = torch.cat((y_predlabel, batch_y_predlabel.cpu()))
    return {"predicted": y_predlabel.shape[0]}


# Neural fields: the viewer renders an instant-ngp model while it trains.

class HashEncoding(nn.Module):
    def __init__(self, num_levels=8, features_per_level=2, log2_hashmap_size=15):
        super().__init__()
        self.size = 2 ** log2_hashmap_size
        self.hash_table = nn.Parameter(torch.rand(num_levels, self.size, features_per_level) * 1e-4)
        self.register_buffer("scalings", torch.tensor([16 * 1.5 ** level for level in range(num_levels)]))

    def forward(self, x):
        out = []
        for table, scaling in zip(self.hash_table, self.scalings):
            cell = (x * scaling).floor().long()
            index = (cell[:, 0] ^ (cell[:, 1] * 2654435761) ^ (cell[:, 2] * 805459861)) % self.size
            out.append(table[index.abs().clamp_max(self.size - 1)])
        return torch.cat(out, dim=-1)


class TCNNField(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.encoding = HashEncoding()
        self.mlp_base = nn.Sequential(nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, 16))
        self.mlp_head = nn.Sequential(nn.Linear(15 + 3, hidden), nn.ReLU(), nn.Linear(hidden, 3), nn.Sigmoid())

    def forward(self, positions, directions):
        h = self.mlp_base(self.encoding(positions))
        return h[:, :1].exp(), self.mlp_head(torch.cat([h[:, 1:], directions], dim=-1))


class NGPModel(nn.Module):
    def __init__(self, scene_aabb, num_rays_per_chunk, render_step_size=None):
        super().__init__()
        self.field = TCNNField()
        self.diagonal = float((scene_aabb[1] - scene_aabb[0]).pow(2).sum().sqrt())
        self.render_step_size = self.diagonal / 200 if render_step_size is None else render_step_size
        self.num_rays_per_chunk = num_rays_per_chunk

    def get_outputs(self, origins, directions):
        samples = int(self.diagonal / self.render_step_size)
        steps = (torch.arange(samples, device=origins.device) + 0.5) * self.render_step_size
        positions = (origins[:, None] + directions[:, None] * steps[:, None]).reshape(-1, 3)
        density, rgb = self.field(positions, directions[:, None].expand(-1, samples, -1).reshape(-1, 3))
        alpha = 1 - torch.exp(-density.view(-1, samples) * self.render_step_size)
        weights = alpha * torch.cumprod(1 - alpha + 1e-7, dim=1)
        return {"rgb": (weights[..., None] * rgb.view(-1, samples, 3)).sum(1), "depth": (weights * steps).sum(1)}

    @torch.no_grad()
    def get_outputs_for_camera_ray_bundle(self, origins, directions):
        outputs = [self.get_outputs(o, d) for o, d in zip(origins.split(self.num_rays_per_chunk), directions.split(self.num_rays_per_chunk))]
        return {key: torch.cat([out[key] for out in outputs]) for key in outputs[0]}


@expected("batch_without_gradients", fix="split", thread="nerfstudio-project/nerfstudio#1837", memory=600, held_back=True)
def render_view(fixed=False, aabb_scale=1.0, train_rays=32, resolution=64, iterations=4):
    """The viewer's `num_rays_per_chunk` is far too large for an NGP field, and the fixed `render_step_size=0.001` gives very many samples
    per ray when the scene's `aabb` is large: one chunk makes rays * samples points, with their encodings, at once. Cured by: a smaller
    `num_rays_per_chunk`, and the step size computed from the `aabb` (about a fixed number of samples per ray).
    """
    device = "cuda"
    aabb = torch.tensor([[-aabb_scale] * 3, [aabb_scale] * 3])
    model = NGPModel(aabb, num_rays_per_chunk=128 if fixed else 1024, render_step_size=None if fixed else 0.001).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-15)
    for step in range(iterations):
        origins, directions = torch.rand(train_rays, 3, device=device), F.normalize(torch.rand(train_rays, 3, device=device), dim=-1)
        loss = F.mse_loss(model.get_outputs(origins, directions)["rgb"], torch.rand(train_rays, 3, device=device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 2 == 1:
            rays = F.normalize(torch.rand(resolution * resolution, 3, device=device), dim=-1)
            image = model.get_outputs_for_camera_ray_bundle(torch.zeros_like(rays), rays)
            frame = image["rgb"].view(resolution, resolution, 3).cpu().numpy()
    return {"frame": list(frame.shape)}
