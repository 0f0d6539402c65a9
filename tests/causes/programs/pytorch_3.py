"""Programs after public threads: repositories of PyTorch itself and scientific code on top of it."""
import copy
import math
import random
from collections import deque, namedtuple
from enum import Enum

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from expected import expected


# Molecular dynamics with a deep potential: energy, forces and virial at each step.

class DescrptBlock(nn.Module):
    def __init__(self, ntypes, neuron, axis_neuron):
        super().__init__()
        self.axis_neuron = axis_neuron
        self.type_embedding = nn.Embedding(ntypes, 8)
        self.filter_layers = nn.Sequential(nn.Linear(9, neuron), nn.Tanh(), nn.Linear(neuron, neuron), nn.Tanh(), nn.Linear(neuron, neuron), nn.Tanh())

    def forward(self, extended_coord, atype, nlist, rcut):
        nf, nloc, nnei = nlist.shape
        index = nlist.view(nf, -1, 1).expand(-1, -1, 3)
        neighbor = torch.gather(extended_coord, 1, index).view(nf, nloc, nnei, 3)
        diff = neighbor - extended_coord[:, :nloc, None]
        length = torch.linalg.norm(diff, dim=-1, keepdim=True)
        weight = (1 - length / rcut).clamp(min=0) ** 2
        env_mat = torch.cat([weight / length, weight * diff / length ** 2], -1)
        embedding = self.type_embedding(torch.gather(atype, 1, nlist.view(nf, -1))).view(nf, nloc, nnei, -1)
        gg = self.filter_layers(torch.cat([env_mat[..., :1], embedding], -1))
        gr = torch.matmul(env_mat.transpose(-1, -2), gg) / nnei
        return torch.matmul(gr.transpose(-1, -2), gr[..., :self.axis_neuron]).flatten(2)


class FittingNet(nn.Module):
    def __init__(self, dim_descrpt, neuron):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(dim_descrpt, neuron), nn.Tanh(), nn.Linear(neuron, neuron), nn.Tanh(), nn.Linear(neuron, 1))

    def forward(self, descriptor):
        return self.layers(descriptor)


def atomic_virial_corr(extended_coord, atom_energy, inference):
    nloc = atom_energy.shape[1]
    ce = extended_coord[:, :nloc].detach() * atom_energy
    corrections = []
    for sumce in ce.sum(dim=1).split(1, dim=-1):
        if inference:
            corr = torch.autograd.grad([sumce], [extended_coord], [torch.ones_like(sumce)], create_graph=False, retain_graph=True)[0]
        else:
            corr = torch.autograd.grad([sumce], [extended_coord], [torch.ones_like(sumce)], create_graph=True)[0]
        corrections.append(corr.unsqueeze(-1))
    return torch.cat(corrections, -1)


def task_deriv_one(atom_energy, energy, extended_coord, inference):
    if inference:
        force = -torch.autograd.grad([energy], [extended_coord], [torch.ones_like(energy)], create_graph=False, retain_graph=True)[0]
    else:
        force = -torch.autograd.grad([energy], [extended_coord], [torch.ones_like(energy)], create_graph=True)[0]
    virial = force.unsqueeze(-1) @ extended_coord.unsqueeze(-2)
    return force, virial + atomic_virial_corr(extended_coord, atom_energy, inference)


class EnergyModel(nn.Module):
    def __init__(self, ntypes=2, neuron=64, axis_neuron=8, rcut=6.0):
        super().__init__()
        self.rcut = rcut
        self.descriptor = DescrptBlock(ntypes, neuron, axis_neuron)
        self.fitting_net = FittingNet(neuron * axis_neuron, 120)

    def forward(self, coord, atype, nlist, inference):
        coord.requires_grad_(True)
        atom_energy = self.fitting_net(self.descriptor(coord, atype, nlist, self.rcut))
        energy = atom_energy.sum(dim=1)
        force, virial = task_deriv_one(atom_energy, energy, coord, inference)
        return {"energy": energy, "force": force, "virial": virial.sum(dim=1), "atom_virial": virial}


@expected("second_derivatives", fix="create_graph=False", thread="deepmodeling/deepmd-kit#4006", memory=500)
def run_md_steps(fixed=False, nloc=1536, nnei=64, steps=5):
    """At inference `task_deriv_one` and `atomic_virial_corr` differentiate the energy with `create_graph=True`, so the forces and the three
    parts of the atomic virial each record the graph of their own backward pass, which nobody differentiates, beside the graph of the
    forward pass. Cured by: `create_graph` only when training (`inference=True` gives `create_graph=False, retain_graph=True`) in the
    derivatives.
    """
    device = torch.device("cuda")
    model = EnergyModel().to(device).eval()
    rng = np.random.default_rng(0)
    coord = torch.from_numpy(rng.random((1, nloc, 3)).astype(np.float32) * 20).to(device)
    atype = torch.from_numpy(rng.integers(0, 2, (1, nloc))).to(device)
    nlist = torch.from_numpy(rng.integers(0, nloc, (1, nloc, nnei))).to(device)
    velocity = torch.zeros_like(coord)
    for step in range(steps):
        model_predict = model(coord, atype, nlist, inference=fixed)
        velocity = velocity + 1e-3 * model_predict["force"].detach()
        coord = coord.detach() + 1e-3 * velocity
        pressure = model_predict["virial"].detach().cpu()
        del model_predict
    return pressure


# A network learns the dynamics of a tossed cube; at the end all sets of trajectories are predicted.

class ResidualContactSystem(nn.Module):
    def __init__(self, n_x, width):
        super().__init__()
        self.inertia = nn.Parameter(torch.ones(n_x))
        self.network = nn.Sequential(nn.Linear(n_x, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, n_x))

    def carry_callback(self):
        return torch.zeros(1)

    def step(self, x, carry):
        return x + 1e-2 * self.inertia * self.network(x), carry

    def simulate(self, x_0, carry_0, steps):
        x, carry = x_0[..., -1, :], carry_0
        trajectory = [x]
        for _ in range(steps):
            x, carry = self.step(x, carry)
            trajectory.append(x)
        return torch.stack(trajectory, dim=-2), carry


class SupervisedLearningExperiment:
    def __init__(self, n_x, trajectories, t_skip, do_detach):
        self.n_x, self.t_skip, self.do_detach = n_x, t_skip, do_detach
        self.train_set, self.valid_set = trajectories[8:], trajectories[:8]

    def trajectory_predict(self, x, system):
        known = self.t_skip + 1
        predictions, targets = [], []
        for tossed in x:
            past, future = tossed.split([known, tossed.shape[-2] - known], dim=-2)
            simulated, _ = system.simulate(past, system.carry_callback(), future.shape[-2])
            prediction = simulated.narrow(-2, 1, future.shape[-2])
            if self.do_detach:
                prediction = prediction.detach().clone()
            predictions.append(prediction)
            targets.append(future)
        return predictions, targets

    def train_epoch(self, system, optimizer):
        for x_i in self.train_set[:4]:
            optimizer.zero_grad()
            windows = x_i.unfold(-2, 2, 1).flatten(0, -3)
            predicted, _ = system.step(windows[..., 0], None)
            loss = F.mse_loss(predicted, windows[..., 1])
            loss.backward()
            optimizer.step()

    def evaluate_systems_on_sets(self, systems, sets):
        statistics = {}
        for set_name, trajectories in sets.items():
            for system_name, system in systems.items():
                predictions, targets = self.trajectory_predict(trajectories, system)
                errors = [(p - t).square().sum(-1).mean() for p, t in zip(predictions, targets)]
                statistics[f"{set_name}_{system_name}"] = torch.stack(errors).detach().cpu().numpy()
        return statistics

    def _evaluation(self, learned_system):
        return self.evaluate_systems_on_sets({"model": learned_system}, {"valid": self.valid_set, "train": self.train_set})


@expected("evaluation_keeps_graphs", fix="no_grad|detach", thread="DAIRLab/dair_pll#20", memory=350)
def evaluate_contact_model(fixed=False, n_x=13, horizon=60, tosses=64):
    """`SupervisedLearningExperiment.trajectory_predict` simulates every trajectory of the training set with gradients on and collects the
    predictions undetached in `predictions`, so the graph of each simulated trajectory stays until the final evaluation is over. Cured by:
    `do_detach=True`: each prediction is detached and cloned before it goes into the list.
    """
    trajectories = [torch.randn(128, horizon, n_x, device="cuda") for _ in range(tosses)]
    system = ResidualContactSystem(n_x, 128).cuda()
    experiment = SupervisedLearningExperiment(n_x, trajectories, t_skip=0, do_detach=fixed)
    optimizer = torch.optim.Adam(system.parameters(), lr=1e-3)
    for epoch in range(2):
        experiment.train_epoch(system, optimizer)
    return experiment._evaluation(system)["train_model"].mean()


# A scanned surface is smoothed with the laplacian of its mesh.

def uv_sphere(rows, columns):
    theta = np.linspace(0.05, np.pi - 0.05, rows)[:, None]
    phi = np.linspace(0, 2 * np.pi, columns, endpoint=False)[None]
    points = np.stack([np.sin(theta) * np.cos(phi), np.sin(theta) * np.sin(phi), np.cos(theta) + 0 * phi], -1).reshape(-1, 3)
    index = np.arange(rows * columns).reshape(rows, columns)
    a, b = index[:-1], index[1:]
    c, d = np.roll(index, -1, 1)[:-1], np.roll(index, -1, 1)[1:]
    faces = np.concatenate([np.stack([a, b, c], -1).reshape(-1, 3), np.stack([b, d, c], -1).reshape(-1, 3)])
    return torch.from_numpy(points).float(), torch.from_numpy(faces)


def adjacency_matrix(num_vertices, faces, device):
    rolled = torch.roll(faces, 1, dims=-1)
    indices = torch.cat([torch.stack([faces, rolled], -1), torch.stack([rolled, faces], -1)], 1).reshape(-1, 2).unique(dim=0)
    indices = indices.to(device)
    adjacency = torch.zeros((num_vertices, num_vertices), device=device)
    adjacency[indices[:, 0], indices[:, 1]] = 1
    return adjacency


def uniform_laplacian(num_vertices, faces, device, fixed):
    adjacency = adjacency_matrix(num_vertices, faces, device)
    L = adjacency / adjacency.sum(dim=1, keepdim=True)
    if fixed:
        torch.diagonal(L).fill_(-1.0)
    else:
        L = L - torch.eye(num_vertices, device=device)
    return L.nan_to_num_(nan=0.0)


class DeformedMesh(nn.Module):
    def __init__(self, vertices):
        super().__init__()
        self.register_buffer("rest", vertices)
        self.offsets = nn.Parameter(torch.zeros_like(vertices))

    def forward(self):
        return self.rest + self.offsets


def chamfer_to_scan(vertices, scan):
    return torch.cdist(scan, vertices).min(dim=1).values.mean()


@expected("square_matrices", fix="diagonal", thread="NVIDIAGameWorks/kaolin#639", memory=680)
def fair_mesh(fixed=False, rows=60, columns=110, iterations=10):
    """`uniform_laplacian` puts -1 on the diagonal by way of a dense identity matrix of num_vertices x num_vertices and a new matrix for the
    difference, on top of the dense adjacency and the laplacian itself. Cured by: `torch.diagonal(L)` written in place.
    """
    device = torch.device("cuda")
    vertices, faces = uv_sphere(rows, columns)
    num_vertices = vertices.shape[0]
    scan = (vertices[::16] + 0.02 * torch.randn(len(vertices[::16]), 3)).to(device)
    laplacian = uniform_laplacian(num_vertices, faces, device, fixed)
    mesh = DeformedMesh(vertices).to(device)
    optim = torch.optim.Adam(mesh.parameters(), lr=1e-3)
    for iteration in range(iterations):
        optim.zero_grad()
        current = mesh()
        smoothness = torch.matmul(laplacian, current).norm(dim=1).mean()
        loss = chamfer_to_scan(current, scan) + 0.1 * smoothness
        loss.backward()
        optim.step()
    return mesh().detach().cpu()


# Which codes of a patient's visits speak for the prediction? Integrated gradients on the embeddings.

class StageNetLayer(nn.Module):
    def __init__(self, input_dim, hidden, levels=3):
        super().__init__()
        self.hidden, self.levels = hidden, levels
        self.kernel = nn.Linear(input_dim, 4 * hidden + 2 * levels)
        self.recurrent = nn.Linear(hidden, 4 * hidden + 2 * levels)
        self.nn_conv = nn.Conv1d(hidden, hidden, 3, padding=1)

    def forward(self, x):
        h = c = x.new_zeros(x.shape[0], self.hidden)
        states = []
        for visit in x.unbind(1):
            gates = self.kernel(visit) + self.recurrent(h)
            master = gates[:, :self.levels].softmax(-1).cumsum(-1).mean(-1, keepdim=True)
            f, i, o, g = gates[:, 2 * self.levels:].chunk(4, -1)
            c = master * f.sigmoid() * c + (1 - master) * i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            states.append(h)
        return self.nn_conv(torch.stack(states, -1)).relu().mean(-1)


class StageNet(nn.Module):
    def __init__(self, vocabularies, embedding_dim, hidden):
        super().__init__()
        self.embedding_model = nn.ModuleDict({key: nn.Embedding(size, embedding_dim) for key, size in vocabularies.items()})
        self.stagenet = nn.ModuleDict({key: StageNetLayer(embedding_dim, hidden) for key in vocabularies})
        self.fc = nn.Linear(hidden * len(vocabularies), 1)

    def forward_from_embedding(self, feature_embeddings):
        patient_emb = [self.stagenet[key](value.sum(2)) for key, value in feature_embeddings.items()]
        return self.fc(torch.cat(patient_emb, 1)).sigmoid()


class IntegratedGradients:
    def __init__(self, model, steps, fixed):
        self.model, self.steps, self.fixed = model.eval(), steps, fixed

    def attribute(self, data):
        input_embs = {key: self.model.embedding_model[key](codes).detach() for key, codes in data.items()}
        baseline_embs = {key: torch.zeros_like(value) for key, value in input_embs.items()}
        average = self._integrated_gradients(input_embs, baseline_embs)
        attributions = {}
        for key in input_embs:
            attributions[key] = ((input_embs[key] - baseline_embs[key]) * average[key]).sum(-1).cpu()
        return attributions

    def _integrated_gradients(self, xs, baselines):
        all_grads = {key: [] for key in xs}
        sums = {key: torch.zeros_like(value) for key, value in xs.items()}
        for step in range(self.steps):
            alpha = (step + 1) / self.steps
            scaled = {key: (baselines[key] + alpha * (xs[key] - baselines[key])).requires_grad_(True) for key in xs}
            output = self.model.forward_from_embedding(scaled)
            self.model.zero_grad()
            output.sum().backward()
            for key, value in scaled.items():
                if self.fixed:
                    sums[key] += value.grad
                else:
                    all_grads[key].append(value.grad)
        if self.fixed:
            return {key: value / self.steps for key, value in sums.items()}
        return {key: torch.stack(values).mean(0) for key, values in all_grads.items()}


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="sunlabuiuc/PyHealth#807", memory=480)
def attribute_visits(fixed=False, patients=20, visits=24, codes=32):
    """`IntegratedGradients._integrated_gradients` keeps the gradient of every interpolation step in `all_grads` (and stacks them for the
    mean), so the memory is steps times the size of the embeddings. Cured by: a running sum of the gradients in place of the list.
    """
    vocabularies = {"conditions": 4000, "procedures": 1500, "labs": 600}
    model = StageNet(vocabularies, embedding_dim=64, hidden=96).cuda()
    explainer = IntegratedGradients(model, steps=50, fixed=fixed)
    collected = []
    for _ in range(2):
        data = {key: torch.randint(0, size, (patients, visits, codes)).cuda() for key, size in vocabularies.items()}
        collected.append(explainer.attribute(data))
    return collected


# Does an image belong to the training distribution? The norm of the gradient of each single image decides.

class BasicBlock(nn.Module):
    def __init__(self, in_planes, planes, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.GroupNorm(8, planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.GroupNorm(8, planes)
        self.shortcut = nn.Conv2d(in_planes, planes, 1, stride, bias=False)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class WideResNet(nn.Module):
    def __init__(self, num_classes, width):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.block1, self.block2, self.block3 = BasicBlock(width, width, 1), BasicBlock(width, 2 * width, 2), BasicBlock(2 * width, 4 * width, 2)
        self.fc = nn.Linear(4 * width, num_classes)

    def forward(self, x):
        x = self.block3(self.block2(self.block1(F.relu(self.conv1(x)))))
        return self.fc(x.mean((2, 3)))


class GradNormKL:
    def __init__(self, model, param_filter=None, micro_batch_size=None):
        self.model, self.micro_batch_size = model.eval(), micro_batch_size
        self.param_filter = param_filter or (lambda name: True)
        self.params = {name: p.detach() for name, p in model.named_parameters() if self.param_filter(name)}
        self.frozen = {name: p.detach() for name, p in model.named_parameters() if not self.param_filter(name)}

    def _kl_to_uniform(self, params, x):
        logits = functional_call(self.model, {**params, **self.frozen}, (x.unsqueeze(0),))
        return -F.log_softmax(logits, dim=1).mean()

    def _gradient_norms(self, x):
        grads = vmap(grad(self._kl_to_uniform), in_dims=(None, 0))(self.params, x)
        return sum(g.flatten(1).abs().sum(1) for g in grads.values())

    def _predict_batched(self, x):
        if self.micro_batch_size is None:
            return self._gradient_norms(x)
        return torch.cat([self._gradient_norms(chunk) for chunk in x.split(self.micro_batch_size)])

    def predict(self, x):
        return -self._predict_batched(x)


class OODMetrics:
    def __init__(self):
        self.scores, self.labels = [], []

    def update(self, scores, y):
        self.scores.append(scores.cpu())
        self.labels.append(y.cpu())

    def compute(self):
        return torch.cat(self.scores).mean(), torch.cat(self.labels).float().mean()


@expected("vectorized_over_all", fix="chunk|part|half the batch", thread="kkirchheim/pytorch-ood#163", memory=600)
def score_images(fixed=False, batch_size=128):
    """`vmap(grad(...))` in `_predict_batched` computes the gradients of all samples of the batch at once, so the activations of the network
    (and the gradients of its parameters) of every sample are held together and the peak grows with the batch size. Cured by:
    `micro_batch_size`: the batch is taken in chunks, only the scores are kept.
    """
    model = WideResNet(num_classes=100, width=16).cuda()
    detector = GradNormKL(model, micro_batch_size=32 if fixed else None)
    loader = DataLoader(TensorDataset(torch.rand(256, 3, 64, 64), torch.randint(-1, 100, (256,))), batch_size=batch_size)
    metrics = OODMetrics()
    for x, y in loader:
        metrics.update(detector.predict(x.cuda()), y)
    return metrics.compute()


# Federated learning with differential privacy: every client clips the gradients of its single samples.

class CNNMnist(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 5, padding=2), nn.Conv2d(16, 32, 5, padding=2)
        self.fc1, self.fc2 = nn.Linear(32 * 7 * 7, 96), nn.Linear(96, num_classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class GradSampleModule(nn.Module):
    def __init__(self, module):
        super().__init__()
        self._module = module
        for layer in module.modules():
            if isinstance(layer, (nn.Linear, nn.Conv2d)):
                layer.register_forward_hook(self.capture_activations)
                layer.register_full_backward_hook(self.capture_backprops)

    def forward(self, x):
        return self._module(x)

    @staticmethod
    def capture_activations(layer, inputs, output):
        layer.activations = inputs[0].detach()

    @staticmethod
    def capture_backprops(layer, grad_input, grad_output):
        activations, backprops = layer.activations, grad_output[0] * len(grad_output[0])
        if isinstance(layer, nn.Conv2d):
            patches = F.unfold(activations, layer.kernel_size, padding=layer.padding)
            backprops = backprops.flatten(2)
            layer.weight.grad_sample = torch.einsum("nol,nil->noi", backprops, patches).view(-1, *layer.weight.shape)
            layer.bias.grad_sample = backprops.sum(2)
        else:
            layer.weight.grad_sample = torch.einsum("no,ni->noi", backprops, activations)
            layer.bias.grad_sample = backprops
        del layer.activations


class LocalUpdateDP:
    def __init__(self, images, labels, dp_clip, noise_scale, serial_bs=None):
        self.images, self.labels = images, labels
        self.dp_clip, self.noise_scale, self.serial_bs = dp_clip, noise_scale, serial_bs

    def clip_gradients(self, net):
        norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in net.parameters()]).norm(dim=0)
        factor = (self.dp_clip / (norms + 1e-6)).clamp(max=1.0)
        clipped = [torch.einsum("n,n...->...", factor, p.grad_sample) for p in net.parameters()]
        for p in net.parameters():
            p.grad_sample = None
        return clipped

    def train(self, net):
        net.train()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        total = [torch.zeros_like(p) for p in net.parameters()]
        size = self.serial_bs or len(self.images)
        for images, labels in zip(self.images.split(size), self.labels.split(size)):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images.cuda()), labels.cuda())
            loss.backward()
            for summed, clipped in zip(total, self.clip_gradients(net)):
                summed += clipped
        for p, summed in zip(net.parameters(), total):
            p.grad = (summed + self.noise_scale * self.dp_clip * torch.randn_like(summed)) / len(self.images)
        optimizer.step()
        return {name: p.detach().clone() for name, p in net.named_parameters()}, loss.item()


@expected("gradients_of_samples", fix="part|chunk", thread="wenzhu23333/Differential-Privacy-Based-Federated-Learning#10", memory=600)
def train_dp_clients(fixed=False, num_users=4, samples=900):
    """The data set of a client is one batch, and the per-sample gradients that the hooks store in `grad_sample` are number of samples times
    number of parameters. Cured by: `--serial`: small virtual batches of `serial_bs`, the clipped sum added up over them before the one
    step.
    """
    net_glob = GradSampleModule(CNNMnist()).cuda()
    clients = []
    for _ in range(num_users):
        images, labels = torch.rand(samples, 1, 28, 28), torch.randint(0, 10, (samples,))
        clients.append(LocalUpdateDP(images, labels, dp_clip=10, noise_scale=0.5, serial_bs=128 if fixed else None))
    w_glob = {name: p.detach().clone() for name, p in net_glob.named_parameters()}
    for iteration in range(2):
        w_locals, loss_locals = [], []
        for local in clients:
            net_glob.load_state_dict(w_glob)
            w, loss = local.train(net_glob)
            w_locals.append(w)
            loss_locals.append(loss)
        w_glob = {name: torch.stack([w[name] for w in w_locals]).mean(0) for name in w_glob}
    return sum(loss_locals) / len(loss_locals)


# A variational model of single-cell counts: posterior predictive samples of all cells.

class FCLayers(nn.Module):
    def __init__(self, n_in, n_out, n_batch, n_hidden):
        super().__init__()
        self.n_batch = n_batch
        self.layers = nn.Sequential(nn.Linear(n_in + n_batch, n_hidden), nn.BatchNorm1d(n_hidden), nn.ReLU(), nn.Linear(n_hidden, n_out))

    def forward(self, x, batch_index):
        return self.layers(torch.cat([x, F.one_hot(batch_index, self.n_batch).float()], 1))


class VAE(nn.Module):
    def __init__(self, n_input, n_batch, n_hidden=128, n_latent=10):
        super().__init__()
        self.z_encoder, self.l_encoder = FCLayers(n_input, 2 * n_latent, n_batch, n_hidden), FCLayers(n_input, 2, n_batch, n_hidden)
        self.decoder = FCLayers(n_latent, n_input, n_batch, n_hidden)
        self.px_r = nn.Parameter(torch.randn(n_input))

    def inference(self, x, batch_index, n_samples):
        x_ = torch.log1p(x)
        qz_m, qz_v = self.z_encoder(x_, batch_index).chunk(2, 1)
        ql_m, _ = self.l_encoder(x_, batch_index).chunk(2, 1)
        rates = []
        for _ in range(n_samples):
            z = qz_m + (0.5 * qz_v).exp() * torch.randn_like(qz_v)
            rates.append(self.decoder(z, batch_index).softmax(-1) * ql_m.exp())
        return torch.stack(rates), self.px_r.exp()


class Posterior:
    def __init__(self, model, counts, batch_indices, fixed, use_cuda=True):
        self.model, self.fixed, self.use_cuda = model, fixed, use_cuda
        self.data_loader = DataLoader(TensorDataset(counts, batch_indices), batch_size=128)

    def __iter__(self):
        return (tuple(t.cuda() if self.use_cuda else t for t in tensors) for tensors in self.data_loader)

    @torch.no_grad()
    def generate(self, n_samples=1, genes=None):
        original_list, posterior_list = [], []
        for sample_batch, batch_index in self:
            px_rate, px_r = self.model.inference(sample_batch, batch_index, n_samples)
            gene_expressions = torch.poisson(torch._standard_gamma(px_r.expand_as(px_rate)) * px_rate / px_r)
            if genes is not None:
                gene_expressions = gene_expressions[..., genes]
            gene_expressions = gene_expressions.permute(1, 2, 0)
            if self.fixed:
                sample_batch, gene_expressions = sample_batch.cpu(), gene_expressions.cpu()
            original_list.append(sample_batch)
            posterior_list.append(gene_expressions)
        return torch.cat(posterior_list), torch.cat(original_list)


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="scverse/scvi-tools#468", memory=380)
def sample_expression(fixed=False, n_cells=6000, n_genes=1200, n_samples=6):
    """`Posterior.generate` keeps the counts and the sampled expressions of each batch on the GPU in `original_list` and `posterior_list`
    and concatenates them there. Cured by: each batch goes to the CPU before it is stored.
    """
    counts = torch.poisson(torch.rand(n_cells, n_genes))
    batch_indices = torch.randint(0, 3, (n_cells,))
    model = VAE(n_genes, n_batch=3).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for start in range(0, 1280, 128):
        x, b = counts[start:start + 128].cuda(), batch_indices[start:start + 128].cuda()
        rate, _ = model.inference(x, b, 1)
        loss = F.poisson_nll_loss(rate[0], x, log_input=False)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    generated, original = Posterior(model, counts, batch_indices, fixed).generate(n_samples)
    return generated.mean(-1).cpu(), original.cpu()


# Bayesian last layer: NUTS over the weights of a regression on learned features.

class FeatureNet(nn.Module):
    def __init__(self, inputs, features):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, 48), nn.Tanh(), nn.Linear(48, features), nn.Tanh())

    def forward(self, x):
        return self.layers(x)


class LastLayerModel:
    def __init__(self, net, x, y):
        self.net, self.x, self.y = net, x, y

    def potential_fn(self, z):
        mean = self.net(self.x) @ z["weight"] + z["bias"]
        log_likelihood = -0.5 * (self.y - mean).square().sum() / z["scale"].exp() ** 2 - len(self.y) * z["scale"].sum()
        log_prior = -0.5 * sum(value.square().sum() for value in z.values())
        return -(log_likelihood + log_prior).sum()


def _potential_grad(potential_fn, z, fixed):
    sites = list(z)
    for site in sites:
        z[site].requires_grad_()
    potential_energy = potential_fn(z)
    slopes = torch.autograd.grad(potential_energy, [z[site] for site in sites])
    for site in sites:
        z[site].requires_grad_(False)
    if fixed:
        potential_energy = potential_energy.detach()
    return {site: slope for site, slope in zip(sites, slopes)}, potential_energy


def velocity_verlet(z, r, potential_fn, step_size, z_grads, fixed):
    r = {key: r[key] - 0.5 * step_size * z_grads[key] for key in r}
    z = {key: z[key] + step_size * r[key] for key in z}
    z_grads, potential_energy = _potential_grad(potential_fn, z, fixed)
    return z, {key: r[key] - 0.5 * step_size * z_grads[key] for key in r}, z_grads, potential_energy


Tree = namedtuple("Tree", "z_left r_left grads_left z_right r_right grads_right z_proposal proposal_pe weight sum_accept_probs")


class NUTS:
    def __init__(self, potential_fn, step_size, max_tree_depth, fixed):
        self.potential_fn, self.step_size, self.max_tree_depth, self.fixed = potential_fn, step_size, max_tree_depth, fixed

    def _build_basetree(self, z, r, z_grads, direction, energy_current):
        z, r, z_grads, potential_energy = velocity_verlet(z, r, self.potential_fn, direction * self.step_size, z_grads, self.fixed)
        energy_new = potential_energy + 0.5 * sum(value.square().sum() for value in r.values())
        delta_energy = energy_new - energy_current
        return Tree(z, r, z_grads, z, r, z_grads, z, potential_energy, -delta_energy, (-delta_energy).exp().clamp(max=1.0))

    def _merge(self, tree, other, direction):
        left, right = (tree, other) if direction == 1 else (other, tree)
        chosen = random.choice([tree, other])
        return Tree(left.z_left, left.r_left, left.grads_left, right.z_right, right.r_right, right.grads_right, chosen.z_proposal,
                    chosen.proposal_pe, torch.logaddexp(tree.weight, other.weight), tree.sum_accept_probs + other.sum_accept_probs)

    def _build_tree(self, z, r, z_grads, direction, depth, energy_current):
        if depth == 0:
            return self._build_basetree(z, r, z_grads, direction, energy_current)
        half = self._build_tree(z, r, z_grads, direction, depth - 1, energy_current)
        edge = (half.z_right, half.r_right, half.grads_right) if direction == 1 else (half.z_left, half.r_left, half.grads_left)
        return self._merge(half, self._build_tree(*edge, direction, depth - 1, energy_current), direction)

    def sample(self, z):
        r = {key: torch.randn_like(value) for key, value in z.items()}
        z_grads, potential_energy = _potential_grad(self.potential_fn, z, self.fixed)
        energy_current = potential_energy + 0.5 * sum(value.square().sum() for value in r.values())
        tree = Tree(z, r, z_grads, z, r, z_grads, z, potential_energy, torch.zeros_like(energy_current), torch.zeros_like(energy_current))
        for depth in range(self.max_tree_depth):
            direction = random.choice([-1, 1])
            edge = (tree.z_right, tree.r_right, tree.grads_right) if direction == 1 else (tree.z_left, tree.r_left, tree.grads_left)
            tree = self._merge(tree, self._build_tree(*edge, direction, depth, energy_current), direction)
        return tree.z_proposal, (tree.sum_accept_probs / 2 ** self.max_tree_depth).item()


@expected("graph_of_earlier_steps", fix="detach", thread="pyro-ppl/pyro#1914", memory=350)
def sample_last_layer(fixed=False, observations=40_000, num_samples=5):
    """`_potential_grad` returns the potential energy attached to its graph; with learnable parameters in the model (the feature network)
    each leapfrog step's graph stays alive through the energies that the tree of NUTS sums up. Cured by: `potential_energy.detach()` in
    `_potential_grad`.
    """
    random.seed(0)
    net = FeatureNet(8, 24).cuda()
    x, y = torch.randn(observations, 8).cuda(), torch.randn(observations, 1).cuda()
    kernel = NUTS(LastLayerModel(net, x, y).potential_fn, step_size=1e-3, max_tree_depth=5, fixed=fixed)
    z = {"weight": torch.zeros(24, 1).cuda(), "bias": torch.zeros(1).cuda(), "scale": torch.zeros(1).cuda()}
    samples = []
    for _ in range(num_samples):
        z, accept_prob = kernel.sample(z)
        samples.append({key: value.cpu() for key, value in z.items()})
    return samples


# Deep Q-learning: a pole is balanced from the pixels of the screen.

Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))


class ReplayMemory:
    def __init__(self, capacity):
        self.memory = deque([], maxlen=capacity)

    def push(self, state, action, next_state, reward):
        self.memory.append(Transition(state, action, next_state, reward))

    def sample(self, batch_size):
        chosen = random.sample(range(len(self.memory)), batch_size)
        return [self.memory[index] for index in chosen]

    def __len__(self):
        return len(self.memory)


class DQN(nn.Module):
    def __init__(self, h, w, outputs, device):
        super().__init__()
        self.device = device
        self.features = nn.Sequential(nn.Conv2d(3, 16, 5, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 5, 2), nn.BatchNorm2d(32), nn.ReLU(),
                                      nn.Conv2d(32, 32, 5, 2), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d((4, 8)))
        self.head = nn.Linear(32 * 4 * 8, outputs)

    def forward(self, x):
        return self.head(self.features(x.to(self.device)).flatten(1))


class CartPole:
    def __init__(self, height, width):
        self.height, self.width = height, width

    def reset(self):
        self.position, self.angle, self.t = 0.0, random.uniform(-0.05, 0.05), 0

    def render(self):
        screen = np.ones((3, self.height, self.width), dtype=np.float32)
        cart = int((self.position + 2.4) / 4.8 * (self.width - 12))
        screen[:, -12:-6, max(0, cart):cart + 12] = 0.0
        return screen

    def step(self, action):
        self.t += 1
        self.position = float(np.clip(self.position + (0.02 if action else -0.02), -2.4, 2.4))
        self.angle += random.uniform(-0.02, 0.02)
        return 1.0, self.t >= 60 or abs(self.angle) > 0.4


class Agent:
    def __init__(self, env, fixed, device="cuda"):
        self.env, self.fixed, self.device = env, fixed, torch.device(device)
        self.policy_net = DQN(env.height, env.width, 2, self.device).to(self.device)
        self.target_net = copy.deepcopy(self.policy_net).eval()
        self.optimizer = torch.optim.RMSprop(self.policy_net.parameters())
        self.memory, self.steps_done = ReplayMemory(10000), 0

    def get_screen(self):
        screen = torch.from_numpy(np.ascontiguousarray(self.env.render())).unsqueeze(0)
        return screen if self.fixed else screen.to(self.device)

    def select_action(self, state):
        self.steps_done += 1
        if random.random() > 0.05 + 0.85 * math.exp(-self.steps_done / 200):
            with torch.no_grad():
                return self.policy_net(state).argmax(1, keepdim=True)
        return torch.full((1, 1), random.randrange(2), device=self.device)

    def optimize_model(self, batch_size=16):
        if len(self.memory) < batch_size:
            return
        transitions = self.memory.sample(batch_size)
        going_on = [number for number, t in enumerate(transitions) if t.next_state is not None]
        actions, rewards = torch.cat([t.action for t in transitions]), torch.cat([t.reward for t in transitions])
        q_values = self.policy_net(torch.cat([t.state for t in transitions])).gather(1, actions).squeeze(1)
        targets = rewards.clone()
        with torch.no_grad():
            best = self.target_net(torch.cat([transitions[number].next_state for number in going_on])).amax(1)
            targets[torch.tensor(going_on, device=self.device)] += 0.99 * best
        loss = F.huber_loss(q_values, targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def run_episode(self):
        self.env.reset()
        last_screen = current_screen = self.get_screen()
        state, done = current_screen - last_screen, False
        while not done:
            action = self.select_action(state)
            reward, done = self.env.step(random.randrange(2))
            last_screen, current_screen = current_screen, self.get_screen()
            next_state = None if done else current_screen - last_screen
            self.memory.push(state, action, next_state, torch.tensor([reward], device=self.device))
            state = next_state
            if self.steps_done % 8 == 0:
                self.optimize_model()


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="pytorch/tutorials#415", memory=480)
def train_cart_pole(fixed=False, num_episodes=12):
    """`get_screen` returns the screen on the GPU, and so the states in the replay memory (`memory.push`) fill the GPU with every step.
    Cured by: `get_screen` returns a CPU tensor, `DQN.forward` moves its input to the device.
    """
    random.seed(1)
    agent = Agent(CartPole(200, 300), fixed)
    for i_episode in range(num_episodes):
        agent.run_episode()
        if i_episode % 4 == 0:
            agent.target_net.load_state_dict(agent.policy_net.state_dict())
    return agent.steps_done


# Cells on a whole slide: a network gives the flows tile by tile, the masks come from following them.

class CPnet(nn.Module):
    def __init__(self, nbase=(2, 16, 32, 64)):
        super().__init__()
        self.down = nn.ModuleList(self.block(a, b) for a, b in zip(nbase[:-1], nbase[1:]))
        self.up = nn.ModuleList(self.block(b + a, a) for a, b in zip(nbase[1:-1], nbase[2:]))
        self.output = nn.Conv2d(nbase[1], 3, 1)

    @staticmethod
    def block(a, b):
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.Conv2d(b, b, 3, padding=1), nn.ReLU())

    def forward(self, x):
        skips = []
        for block in self.down:
            x = block(x if not skips else F.max_pool2d(x, 2))
            skips.append(x)
        for block, skip in zip(reversed(self.up), reversed(skips[:-1])):
            x = block(torch.cat([F.interpolate(x, scale_factor=2), skip], 1))
        return self.output(x)


class CellposeModel:
    def __init__(self, mask_device, bsize=256, batch_size=4):
        self.device, self.mask_device = torch.device("cuda"), torch.device(mask_device)
        self.bsize, self.batch_size = bsize, batch_size
        self.net = CPnet().to(self.device).eval()

    @torch.no_grad()
    def _run_tiled(self, img):
        _, ly, lx = img.shape
        yf = np.zeros((3, ly, lx), dtype=np.float32)
        corners = [(y, x) for y in range(0, ly, self.bsize) for x in range(0, lx, self.bsize)]
        for start in range(0, len(corners), self.batch_size):
            chosen = corners[start:start + self.batch_size]
            tiles = np.stack([img[:, y:y + self.bsize, x:x + self.bsize] for y, x in chosen])
            predicted = self.net(torch.from_numpy(tiles).to(self.device)).cpu().numpy()
            for (y, x), tile in zip(chosen, predicted):
                yf[:, y:y + self.bsize, x:x + self.bsize] = tile
        return yf

    def follow_flows(self, dP, inds, niter):
        shape = torch.tensor(dP.shape[1:], device=self.mask_device, dtype=torch.float32) - 1
        pt = torch.from_numpy(np.stack(inds[::-1], -1)).float().to(self.mask_device)[None, None]
        im = torch.from_numpy(np.ascontiguousarray(dP[::-1])).to(self.mask_device)[None]
        scale = shape.flip(0)
        im = im * (2 / scale)[None, :, None, None]
        pt = pt * (2 / scale) - 1
        for _ in range(niter):
            dPt = F.grid_sample(im, pt, align_corners=False)
            pt = (pt + dPt.permute(0, 2, 3, 1)).clamp_(-1.0, 1.0)
        return ((pt + 1) * 0.5 * scale)[0, 0].cpu().numpy()

    def compute_masks(self, dP, cell_probability, niter):
        inds = np.nonzero(cell_probability > 0)
        p_final = self.follow_flows(dP, inds, niter)
        seeds = np.nan_to_num(p_final, nan=0.0).astype(np.int32) // 30
        masks = np.zeros(cell_probability.shape, dtype=np.int32)
        masks[inds] = seeds[:, 0] * 1000 + seeds[:, 1] + 1
        return masks

    def eval(self, img, cell_probability, niter=6):
        yf = self._run_tiled(img)
        return self.compute_masks(yf[:2], cell_probability, niter)


@expected("data_on_gpu", fix=r"host|\.cpu\(\)", thread="MouseLand/cellpose#693", memory=430)
def segment_slide(fixed=False, side=3584):
    """The network runs on tiles, but `compute_masks` moves the flow field of the whole slide to the GPU and follows the flows of all its
    cell pixels there, a spike that grows with the size of the image. Cured by: the masks (flow following) are computed on the CPU, the
    network stays on the GPU.
    """
    model = CellposeModel(mask_device="cpu" if fixed else "cuda")
    slide = np.random.default_rng(0).random((2, side, side), dtype=np.float32)
    tissue = np.sin(np.arange(side) / 40)[:, None] + np.sin(np.arange(side) / 55)[None] + 0.4  # stands in for the map of the network
    return model.eval(slide, tissue).max()


# Organs in CT scans: windows slide over volumes of different sizes.

class UNet3D(nn.Module):
    def __init__(self, in_channels, out_channels, width=8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv3d(in_channels, width, 3, padding=1), nn.InstanceNorm3d(width), nn.LeakyReLU(0.1))
        self.bottom = nn.Sequential(nn.Conv3d(width, 2 * width, 3, stride=2, padding=1), nn.InstanceNorm3d(2 * width), nn.LeakyReLU(0.1))
        self.up = nn.ConvTranspose3d(2 * width, width, 2, stride=2)
        self.head = nn.Conv3d(2 * width, out_channels, 1)

    def forward(self, x):
        skip = self.encoder(x)
        return self.head(torch.cat([skip, self.up(self.bottom(skip))], 1))


def dense_patch_slices(image_size, roi_size, overlap):
    starts = []
    for size, roi in zip(image_size, roi_size):
        interval = int(roi * (1 - overlap))
        starts.append(sorted({min(s, size - roi) for s in range(0, size - roi + interval, interval)}))
    return [tuple(slice(s, s + roi) for s, roi in zip((a, b, c), roi_size)) for a in starts[0] for b in starts[1] for c in starts[2]]


def sliding_window_inference(inputs, roi_size, sw_batch_size, predictor, overlap, sw_device, device):
    image_size = inputs.shape[2:]
    slices = dense_patch_slices(image_size, roi_size, overlap)
    output_image = count_map = None
    importance_map = torch.ones(roi_size, device=device)
    for start in range(0, len(slices), sw_batch_size):
        chosen = slices[start:start + sw_batch_size]
        window_data = torch.cat([inputs[(slice(None), slice(None), *s)] for s in chosen]).to(sw_device)
        seg_prob = predictor(window_data).to(device)
        if output_image is None:
            output_image = torch.zeros((1, seg_prob.shape[1], *image_size), device=device)
            count_map = torch.zeros((1, 1, *image_size), device=device)
        for s, prob in zip(chosen, seg_prob):
            output_image[(slice(None), slice(None), *s)] += importance_map * prob
            count_map[(slice(None), slice(None), *s)] += importance_map
    output_image /= count_map
    return output_image


class SlidingWindowInferer:
    def __init__(self, roi_size, sw_batch_size, overlap, cpu_thresh=None):
        self.roi_size, self.sw_batch_size, self.overlap, self.cpu_thresh = roi_size, sw_batch_size, overlap, cpu_thresh

    def __call__(self, inputs, network):
        device = inputs.device
        if self.cpu_thresh is not None and inputs.shape[2:].numel() > self.cpu_thresh:
            device = torch.device("cpu")
        return sliding_window_inference(inputs, self.roi_size, self.sw_batch_size, network, self.overlap, inputs.device, device)


@expected("large_result", fix="on the host", thread="Project-MONAI/MONAI#5297", memory=560)
@torch.no_grad()
def infer_volumes(fixed=False, num_classes=15):
    """`sliding_window_inference` stitches the windows in an `output_image` of all classes (and a `count_map`) of the whole volume on the
    GPU, which does not fit for the one large volume of the set. Cured by: `cpu_thresh`: volumes of more voxels are stitched in CPU memory.
    """
    device = torch.device("cuda")
    model = UNet3D(1, num_classes).to(device).eval()
    inferer = SlidingWindowInferer((48, 48, 48), 4, overlap=0.25, cpu_thresh=128 ** 3 if fixed else None)
    volumes = [(96, 96, 80), (112, 112, 96), (208, 208, 160), (96, 112, 96)]
    voxels = []
    for shape in volumes:
        image = torch.randn(1, 1, *shape).to(device)
        output = inferer(image, model)
        labels = output[0].argmax(0).to(torch.uint8).cpu()
        voxels.append((labels > 0).sum())
    return torch.stack(voxels)


# Crops on hyperspectral images are segmented with a small engine: events, handlers, and an evaluator at the end of each epoch.

class Events(Enum):
    EPOCH_STARTED = "epoch_started"
    ITERATION_COMPLETED = "iteration_completed"
    EPOCH_COMPLETED = "epoch_completed"


class State:
    def __init__(self):
        self.iteration, self.epoch, self.batch, self.output, self.metrics = 0, 0, None, None, {}


class Engine:
    def __init__(self, process_function, release=False):
        self._process_function, self._release = process_function, release
        self._event_handlers, self.state = {event: [] for event in Events}, State()

    def on(self, event):
        def decorator(handler):
            self._event_handlers[event].append(handler)
            return handler
        return decorator

    def fire_event(self, event):
        for handler in self._event_handlers[event]:
            handler(self)

    def _run_once_on_dataset(self, data):
        for self.state.batch in data:
            self.state.iteration += 1
            self.state.output = self._process_function(self, self.state.batch)
            self.fire_event(Events.ITERATION_COMPLETED)
        if self._release:
            self.state.batch = self.state.output = None

    def run(self, data, max_epochs=1):
        while self.state.epoch < max_epochs:
            self.state.epoch += 1
            self.fire_event(Events.EPOCH_STARTED)
            self._run_once_on_dataset(data)
            self.fire_event(Events.EPOCH_COMPLETED)
        self.state.epoch = 0
        return self.state


class CudaLoader:
    def __init__(self, dataset, batch_size):
        self.loader = DataLoader(dataset, batch_size=batch_size)

    def __iter__(self):
        return (tuple(t.cuda(non_blocking=True) for t in batch) for batch in self.loader)


class CropFields(Dataset):
    def __init__(self, length, bands, size, classes):
        self.length, self.image, self.mask = length, torch.rand(bands, size, size), torch.randint(0, classes, (size // 4, size // 4))

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.image, self.mask


class SpectralNet(nn.Module):
    def __init__(self, bands, classes):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(bands, 24, 4, 4), nn.ReLU(), nn.Conv2d(24, 48, 3, 2, 1), nn.ReLU(), nn.Conv2d(48, 48, 3, 1, 1), nn.ReLU())
        self.classifier = nn.Conv2d(48, classes, 1)

    def forward(self, x):
        return F.interpolate(self.classifier(self.down(x)), scale_factor=2, mode="bilinear")


class ConfusionMatrix:
    def __init__(self, num_classes):
        self.num_classes = num_classes
        self.matrix = torch.zeros(num_classes)

    def attach(self, engine):
        engine.on(Events.EPOCH_STARTED)(lambda _: self.matrix.zero_())
        engine.on(Events.ITERATION_COMPLETED)(self.update)

    def update(self, engine):
        y_pred, y = engine.state.output
        self.matrix += (y_pred.argmax(1) == y).float().mean().cpu()


@expected("kept_tensors", fix=r"None|\bdel\b", thread="pytorch/ignite#1919", memory=920)
def run_segmentation(fixed=False, bands=72, classes=12):
    """`Engine.state.batch` and `Engine.state.output` still refer to the last batch (given on the GPU) and its prediction when the epoch is
    over, so they lie on the GPU beside the batches of the evaluator that runs in the `EPOCH_COMPLETED` handler. Cured by: `state.batch` and
    `state.output` are set to None at the end of the epoch's data.
    """
    model = SpectralNet(bands, classes).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    train_loader, val_loader = CudaLoader(CropFields(48, bands, 256, classes), 16), CudaLoader(CropFields(32, bands, 256, classes), 16)

    def update(engine, batch):
        model.train()
        optimizer.zero_grad()
        x, y = batch
        y_pred = model(x)
        loss = F.cross_entropy(y_pred, y)
        loss.backward()
        optimizer.step()
        return y_pred.detach(), y

    def inference(engine, batch):
        model.eval()
        with torch.no_grad():
            return model(batch[0]), batch[1]

    trainer, evaluator = Engine(update, release=fixed), Engine(inference, release=fixed)
    confusion = ConfusionMatrix(classes)
    confusion.attach(evaluator)

    @trainer.on(Events.EPOCH_COMPLETED)
    def validate(engine):
        evaluator.run(val_loader)
        engine.state.metrics["accuracy"] = confusion.matrix.mean().item()

    return trainer.run(train_loader, max_epochs=2).metrics


# Tomography: slices are reconstructed by gradient steps with the projection and its adjoint.

class Radon(nn.Module):
    def __init__(self, in_size, theta):
        super().__init__()
        self.in_size = in_size
        angles = torch.deg2rad(theta)
        rotation = torch.stack([torch.stack([angles.cos(), angles.sin(), 0 * angles], -1), torch.stack([-angles.sin(), angles.cos(), 0 * angles], -1)], 1)
        self.register_buffer("all_grids", F.affine_grid(rotation, (len(theta), 1, in_size, in_size), align_corners=True))

    def forward(self, x):
        n, angles = len(x), len(self.all_grids)
        rotated = F.grid_sample(x.repeat(angles, 1, 1, 1), self.all_grids.repeat_interleave(n, 0), align_corners=True)
        return rotated.sum(2).view(angles, n, 1, -1).permute(1, 2, 3, 0)


def adjoint_function(A, input_size, device):
    projected, vjpfunc = torch.func.vjp(A, torch.zeros(input_size, device=device))

    class Adjoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx, sinogram):
            assert sinogram.shape == projected.shape
            (image,) = vjpfunc(sinogram)
            return image

        @staticmethod
        def backward(ctx, image_grad):
            return A(image_grad)

    return Adjoint.apply


class Tomography(nn.Module):
    def __init__(self, angles, img_width, keep_adjoint, device="cuda"):
        super().__init__()
        self.radon = Radon(img_width, torch.linspace(0, 180, angles + 1)[:-1]).to(device)
        self.keep_adjoint, self._auto_grad_adjoint_fn = keep_adjoint, None

    def A(self, x):
        return self.radon(x) / self.radon.in_size

    def A_adjoint(self, y):
        input_size = (y.shape[0], 1, self.radon.in_size, self.radon.in_size)
        if not self.keep_adjoint:
            return adjoint_function(self.A, input_size, y.device)(y)
        if self._auto_grad_adjoint_fn is None:
            self._auto_grad_adjoint_fn = adjoint_function(self.A, input_size, y.device)
        return self._auto_grad_adjoint_fn(y)


class L2:
    def grad(self, x, y, physics):
        return physics.A_adjoint(physics.A(x) - y)


@expected("reference_cycle", fix=r"gc\.collect", thread="deepinv/deepinv#650", memory=450)
def reconstruct_slices(fixed=False, iterations=40):
    """`Tomography.A_adjoint` calls `adjoint_function` anew each time; each makes a new autograd function class `Adjoint` whose closure
    holds the `vjpfunc` with the graph and saved tensors of the projection, and these are not freed when the call is over. Cured by: the
    adjoint function is made once and kept in the operator (`_auto_grad_adjoint_fn`).
    """
    physics = Tomography(angles=20, img_width=224, keep_adjoint=fixed)
    data_fidelity, denoiser = L2(), nn.AvgPool2d(3, stride=1, padding=1)
    psnr = []
    for _ in range(2):
        target = torch.rand(4, 1, 224, 224, device="cuda")
        with torch.no_grad():
            y = physics.A(target)
            x = torch.zeros_like(target)
            for iteration in range(iterations):
                x = x - 0.5 * data_fidelity.grad(x, y, physics)
                x = 0.9 * x + 0.1 * denoiser(x)
            psnr.append((x - target).square().mean().cpu())
    return psnr


# The coefficients of a potential surface are fitted to reference forces.

class PolynomialSurface(nn.Module):
    def __init__(self, degree):
        super().__init__()
        self.powers = [(i, j) for i in range(degree + 1) for j in range(degree + 1 - i) if i + j > 0]
        self.coefficients = nn.Parameter(torch.randn(len(self.powers)) / len(self.powers))

    def forward(self, x, y):
        terms = [c * x ** i * y ** j for c, (i, j) in zip(self.coefficients, self.powers)]
        return sum(terms)


class ForceReference:
    def __init__(self, replicas, atoms, device):
        self.shape, self.device = (replicas, atoms), device

    def batches(self, count):
        for _ in range(count):
            x = torch.randn(self.shape, device=self.device)
            y = torch.randn(self.shape, device=self.device)
            yield x, y, -2 * x - y, -x - 2 * y


class Fitter:
    def __init__(self, surface, lr, drop_history):
        self.surface, self.drop_history = surface, drop_history
        self.optimizer = torch.optim.Adam(surface.parameters(), lr=lr)
        self.history = []

    def step(self, x, y, force_x, force_y):
        x.requires_grad_(True)
        y.requires_grad_(True)
        self.optimizer.zero_grad()
        z = self.surface(x, y)
        z.backward(torch.ones_like(z), create_graph=True)
        mismatch = (x.grad + force_x).square() + (y.grad + force_y).square()
        loss = mismatch[:, :-1].mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.drop_history:
            x.grad.detach_()
            y.grad.detach_()
        return loss.item()

    def fit(self, reference, steps):
        for number, batch in enumerate(reference.batches(steps)):
            loss = self.step(*batch)
            if number % 10 == 0:
                self.history.append(loss)
        return self.history


@expected("create_graph", fix="detach|grad = None", thread="pytorch/pytorch#1346", memory=350)
def match_forces(fixed=False, steps=120):
    """`z.backward(..., create_graph=True)` gives `x.grad` and `y.grad` a history, which is never detached, so the graphs (with `x` and `y`)
    of all iterations stay alive although the loop makes new `x` and `y` each time. Cured by: `x.grad.detach_()`, `y.grad.detach_()` at the
    end of the iteration.
    """
    device = torch.device("cuda")
    surface = PolynomialSurface(2).to(device)
    reference = ForceReference(replicas=512, atoms=512, device=device)
    fitter = Fitter(surface, 1e-2, drop_history=fixed)
    return fitter.fit(reference, steps)
