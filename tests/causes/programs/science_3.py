"""Programs after public threads about graphs, simulation, meta-learning, recommenders, volumes and time series."""
import itertools
from collections import deque, namedtuple
from dataclasses import dataclass
from types import MethodType

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from expected import expected


# Node classification: after training, every node of the graph gets its prediction, one layer at a time.

class SAGEConv(nn.Module):
    def __init__(self, in_size, out_size):
        super().__init__()
        self.fc_self, self.fc_neigh = nn.Linear(in_size, out_size), nn.Linear(in_size, out_size)

    def forward(self, h_self, h_neigh):
        return self.fc_self(h_self) + self.fc_neigh(h_neigh.mean(1))


class GraphSAGE(nn.Module):
    def __init__(self, in_size, hidden_size, out_size):
        super().__init__()
        self.layers = nn.ModuleList([SAGEConv(in_size, hidden_size), SAGEConv(hidden_size, hidden_size),
                                     SAGEConv(hidden_size, out_size)])
        self.hidden_size, self.out_size = hidden_size, out_size

    @torch.no_grad()
    def inference(self, features, dataloader, device, storage_device):
        feature = features
        for layer_idx, layer in enumerate(self.layers):
            is_last_layer = layer_idx == len(self.layers) - 1
            y = torch.empty(len(features), self.out_size if is_last_layer else self.hidden_size)
            feature = feature.to(storage_device)
            for seeds, neighbors in dataloader:
                h_self = feature[seeds.to(storage_device)].to(device)
                h_neigh = feature[neighbors.to(storage_device)].to(device)
                hidden_x = layer(h_self, h_neigh)
                y[seeds] = (hidden_x if is_last_layer else F.relu(hidden_x)).cpu()
            feature = y
        return y


class AllNodes:
    def __init__(self, indices, batch_size):
        self.indices, self.batch_size = indices, batch_size

    def __iter__(self):
        for seeds in torch.arange(len(self.indices)).split(self.batch_size):
            yield seeds, self.indices[seeds]


@expected("data_on_gpu", fix="part|on the host", thread="dmlc/dgl#7037", memory=500, held_back=True)
def layerwise_infer(fixed=False):
    """In the layer-wise inference `feature = feature.to(storage_device)` moves the whole input of a layer, the features of all nodes, to
    the GPU, which defeats the purpose of inferring layer by layer and in batches. The first layer's features alone are larger than the GPU.
    Cured by: The features stay in host memory (`storage_device` is the CPU); only the rows that a batch needs are copied to the GPU.
    """
    num_nodes, in_size, fanout = 300_000, 512, 4
    device = torch.device("cuda")
    features = torch.rand(num_nodes, in_size)
    indices = torch.randint(num_nodes, (num_nodes, fanout))
    model = GraphSAGE(in_size, 128, 47).to(device).eval()
    all_nodes = AllNodes(indices, batch_size=8192)
    pred = model.inference(features, all_nodes, device, "cpu" if fixed else device)
    return pred.argmax(1)


# Relaxing a library of molecules: as soon as one has converged, another takes its place in the batch.

@dataclass
class FireState:
    positions: torch.Tensor
    velocities: torch.Tensor
    energy: torch.Tensor
    forces: torch.Tensor

    def pick(self, rows):
        return FireState(*(torch.cat([getattr(self, n)[r:r + 1] for r in rows]) for n in self.__dataclass_fields__))

    def detach(self):
        return FireState(*(getattr(self, n).detach() for n in self.__dataclass_fields__))


class AtomicModel(nn.Module):
    def __init__(self, channels=64):
        super().__init__()
        self.radial = nn.Sequential(nn.Linear(16, channels), nn.SiLU(), nn.Linear(channels, channels), nn.SiLU())
        self.energy_head, self.force_head = nn.Linear(channels, 1), nn.Linear(channels, 1)
        self.register_buffer("centers", torch.linspace(0, 6, 16))

    def forward(self, positions):
        vectors = positions.unsqueeze(2) - positions.unsqueeze(1)
        distances = (vectors.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
        pair = self.radial(torch.exp(-(distances - self.centers) ** 2))
        energy = self.energy_head(pair.sum(2)).sum((1, 2))
        forces = (self.force_head(pair) * vectors / distances).sum(2)
        return {"energy": energy, "forces": forces.detach()}


def fire_step(model, state, dt=0.05):
    velocities = 0.9 * state.velocities + dt * state.forces
    positions = state.positions + dt * velocities
    out = model(positions)
    return FireState(positions, velocities, out["energy"], out["forces"])


class InFlightAutoBatcher:
    def __init__(self, systems, batch_size, fixed):
        self.waiting, self.batch_size, self.fixed = deque(systems), batch_size, fixed

    def next_systems(self, model, count):
        systems = [self.waiting.popleft() for _ in range(min(count, len(self.waiting)))]
        positions = torch.stack([s for s, _ in systems]).cuda()
        out = model(positions)
        state = FireState(positions, torch.zeros_like(positions), out["energy"], out["forces"])
        return state, [steps for _, steps in systems]

    def next_batch(self, model, state, steps_left):
        completed = [i for i, left in enumerate(steps_left) if left <= 0]
        running = [i for i, left in enumerate(steps_left) if left > 0]
        completed_states = [state.pick([i]) for i in completed]
        if self.fixed:
            completed_states = [s.detach() for s in completed_states]
        parts, left = ([state.pick(running)], [steps_left[i] for i in running]) if running else ([], [])
        if completed and self.waiting:
            fresh, steps = self.next_systems(model, len(completed))
            parts, left = parts + [fresh], left + steps
        if not parts:
            return None, [], completed_states
        columns = zip(*([getattr(p, n) for n in FireState.__dataclass_fields__] for p in parts))
        return FireState(*(torch.cat(c) for c in columns)), left, completed_states


@expected("evaluation_keeps_graphs", fix="no_grad|detach", thread="TorchSim/torch-sim#590", memory=600, held_back=True)
def relax_library(fixed=False):
    """The completed states that `InFlightAutoBatcher.next_batch` pops are kept in `all_completed_states` to the end of the run, and their
    `energy` still carries its `grad_fn`. So each finished system pins the whole forward graph of the step in which it finished. Cured by:
    The completed states are detached before they're kept.
    """
    model = AtomicModel().cuda()
    library = [(torch.rand(64, 3) * 8, 4 + 3 * i % 7) for i in range(96)]
    batcher = InFlightAutoBatcher(library, batch_size=8, fixed=fixed)
    state, steps_left = batcher.next_systems(model, batcher.batch_size)
    all_completed_states = []
    while state is not None:
        state = fire_step(model, state)
        steps_left = [left - 1 for left in steps_left]
        state, steps_left, completed_states = batcher.next_batch(model, state, steps_left)
        all_completed_states.extend(completed_states)
    return torch.cat([s.energy for s in all_completed_states]).tolist()


# Reinforcement learning with a memory: the critic values each piece of a long episode as it arrives.

class ValueNetwork(nn.Module):
    def __init__(self, memory_size=256):
        super().__init__()
        self.memory_size = memory_size
        self.visual_encoder = nn.Sequential(nn.Conv2d(3, 16, 8, 4), nn.LeakyReLU(), nn.Conv2d(16, 32, 4, 2),
                                            nn.LeakyReLU(), nn.Flatten(), nn.Linear(2592, 256), nn.LeakyReLU())
        self.lstm = nn.LSTM(256, memory_size, batch_first=True)
        self.value_head = nn.Linear(memory_size, 1)

    def forward(self, obs, memories):
        h0, c0 = memories.split(self.memory_size, -1)
        encoding = self.visual_encoder(obs).unsqueeze(0)
        encoding, (h, c) = self.lstm(encoding, (h0.contiguous(), c0.contiguous()))
        return self.value_head(encoding).view(-1), torch.cat([h, c], -1)


class TorchPPOOptimizer:
    def __init__(self, fixed):
        self.critic, self.fixed = ValueNetwork().cuda(), fixed
        self.optimizer = torch.optim.Adam(self.critic.parameters(), lr=3e-4)
        self.critic_memory_dict = {}

    def get_trajectory_value_estimates(self, obs, agent_id, done):
        if agent_id in self.critic_memory_dict:
            memory = self.critic_memory_dict[agent_id]
        else:
            memory = torch.zeros(1, 1, 2 * self.critic.memory_size, device="cuda")
        value_estimates, next_memory = self.critic(obs, memory)
        if done:
            self.critic_memory_dict.pop(agent_id, None)
        else:
            self.critic_memory_dict[agent_id] = next_memory.detach() if self.fixed else next_memory
        return value_estimates.detach().cpu().numpy()

    def update(self, obs, returns):
        memory = torch.zeros(1, 1, 2 * self.critic.memory_size, device="cuda")
        values, _ = self.critic(obs, memory)
        loss = F.mse_loss(values, returns)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


@expected("graph_of_earlier_steps", fix="detach", thread="Unity-Technologies/ml-agents#5048", memory=500, held_back=True)
def train_hallway_agent(fixed=False):
    """The LSTM's memory is stored in `critic_memory_dict` as a tensor that keeps its gradient history (`next_memory`), and is fed in again
    for the next piece of the trajectory. In a long episode the graph grows with every piece. Cured by: `next_memory` is detached before
    it's stored.
    """
    optimizer, time_horizon, episode_length = TorchPPOOptimizer(fixed), 128, 60 * 128
    for episode in range(2):
        for step in range(0, episode_length, time_horizon):
            obs = torch.randint(0, 255, (time_horizon, 3, 84, 84), dtype=torch.uint8).cuda().float() / 255
            done = step + time_horizon >= episode_length
            values = optimizer.get_trajectory_value_estimates(obs, agent_id="agent_0-0", done=done)
            rewards = np.zeros(time_horizon, dtype=np.float32)
            returns = torch.from_numpy(rewards[::-1].cumsum()[::-1] + 0.99 * values).float().cuda()
            optimizer.update(obs, returns)


# Anderson acceleration: the optimizer's last iterates are mixed into a better one.

def anderson_normal_equation(X, reg):
    DX = X[:, 1:] - X[:, :-1]
    DR = DX[:, 1:] - DX[:, :-1]
    RR = DR.t() @ DR + reg * torch.eye(DR.shape[1], device=X.device)
    gamma = torch.linalg.pinv(torch.nan_to_num(RR)) @ (DR.t() @ DX[:, -1])
    return X[:, -2] + DX[:, -1] - (DX[:, :-1] + DR) @ gamma


@torch.no_grad()
def accelerated_step(self, closure=None):
    loss = self.orig_step(closure)
    self.acc_call_counter += 1
    for group, group_hist in zip(self.param_groups, self.acc_param_hist):
        group_hist.append(nn.utils.parameters_to_vector(group["params"]).to(self.history_device))
        if self.acc_call_counter > self.acc_wait_iterations and self.acc_call_counter % self.acc_frequency == 0:
            X = torch.stack(list(group_hist)[-5:], dim=1)
            acc_param = anderson_normal_equation(X, self.acc_reg).to(group["params"][0].device)
            nn.utils.vector_to_parameters(acc_param, group["params"])
    return loss


def accelerate(optimizer, history_depth=15, wait_iterations=5, frequency=10, reg=1e-8, history_device="cuda"):
    optimizer.acc_param_hist = [deque(maxlen=history_depth) for _ in optimizer.param_groups]
    optimizer.acc_wait_iterations, optimizer.acc_frequency = wait_iterations, frequency
    optimizer.acc_reg, optimizer.acc_call_counter, optimizer.history_device = reg, 0, history_device
    optimizer.orig_step = optimizer.step
    optimizer.step = MethodType(accelerated_step, optimizer)


@expected("kept_tensors", fix=r"\.cpu\(\)|\bdel\b|clear|None", thread="ORNL/AADL#3", memory=500, held_back=True)
def train_with_anderson(fixed=False):
    """The Anderson acceleration keeps the last 24 parameter vectors of the model in `acc_param_hist`, on the GPU: each is a full copy of
    the parameters. Memory grows by a copy of the model with each step until the history is full, and it doesn't fit. Cured by: The history
    is kept in host memory (`history_device="cpu"`).
    """
    model = nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1024),
                          nn.ReLU(), nn.Linear(1024, 10)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    if fixed:
        accelerate(optimizer, history_depth=24, history_device="cpu")
    else:
        accelerate(optimizer, history_depth=24)
    for iteration in range(60):
        data, target = torch.rand(256, 784).cuda(), torch.randint(10, (256,)).cuda()

        @torch.enable_grad()
        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            loss.backward()
            return loss

        optimizer.step(closure)


# Neural recordings: a trained model's outputs are averaged over samples of its posterior, trial after trial.

SessionOutput = namedtuple("SessionOutput", "output_params factors gen_states gen_inputs con_states")


class LFADS(nn.Module):
    def __init__(self, neurons, factors=40, gen_dim=200, con_dim=64):
        super().__init__()
        self.encoder = nn.GRU(neurons, con_dim, batch_first=True)
        self.co_mean, self.co_std = nn.Linear(con_dim, 16), nn.Linear(con_dim, 16)
        self.generator, self.gen_dim = nn.GRU(16, gen_dim, batch_first=True), gen_dim
        self.fac_linear, self.readout = nn.Linear(gen_dim, factors), nn.Linear(factors, neurons)

    def predict_step(self, spikes, sample_posteriors=True):
        con_states, _ = self.encoder(spikes)
        gen_inputs = self.co_mean(con_states)
        if sample_posteriors:
            gen_inputs = gen_inputs + self.co_std(con_states).exp() * torch.randn_like(gen_inputs)
        gen_states, _ = self.generator(gen_inputs)
        factors = self.fac_linear(gen_states)
        return SessionOutput(self.readout(factors).exp(), factors, gen_states, gen_inputs, con_states)


def transpose_lists(nested):
    return list(map(list, zip(*nested)))


@expected("kept_tensors", fix=r"\.cpu\(\)|\bdel\b|clear|None", thread="arsedler9/lfads-torch#27", memory=800, held_back=True)
def run_posterior_sampling(fixed=False):
    """All averaged outputs that `run_ps_batch` returns are accumulated on the GPU (in `post_means`) and only moved to the CPU once all
    trials have been analysed. Cured by: `run_ps_batch` returns `(s / num_samples).cpu()`.
    """
    num_samples, neurons = 3, 180
    model = LFADS(neurons).cuda().eval()
    dataloaders = {"train": DataLoader(torch.rand(256 * 14, 120, neurons), batch_size=256),
                   "valid": DataLoader(torch.rand(256 * 2, 120, neurons), batch_size=256)}

    def run_ps_batch(batch):
        batch = batch.cuda()
        for i in range(num_samples):
            output = model.predict_step(batch, sample_posteriors=True)
            if i == 0:
                sums = [o.detach() for o in output]
            else:
                sums = [s + o.detach() for s, o in zip(sums, output)]
        if fixed:
            return [(s / num_samples).cpu() for s in sums]
        return [s / num_samples for s in sums]

    results = {}
    for split in dataloaders:
        with torch.no_grad():
            post_means = [run_ps_batch(batch) for batch in dataloaders[split]]
        post_means = SessionOutput(*[torch.cat(o).cpu().numpy() for o in transpose_lists(post_means)])
        results[split] = {name: getattr(post_means, name).shape for name in SessionOutput._fields}
    return results


# Detection in point clouds: points vote for the centres of objects; every few epochs the network is evaluated.

class VoteNet(nn.Module):
    def __init__(self, num_proposal=256):
        super().__init__()
        self.num_proposal = num_proposal
        self.backbone_net = nn.Sequential(*self.mlp(4, 128), *(m for _ in range(5) for m in self.mlp(128, 128)))
        self.vgen = nn.Conv1d(128, 3, 1)
        self.pnet = nn.Conv1d(128, 3 + 2 + 18, 1)

    @staticmethod
    def mlp(in_channels, out_channels):
        return nn.Conv1d(in_channels, out_channels, 1), nn.BatchNorm1d(out_channels), nn.ReLU(inplace=True)

    def forward(self, inputs):
        end_points = {}
        features = self.backbone_net(inputs["point_clouds"].transpose(1, 2))
        end_points["vote_xyz"] = inputs["point_clouds"][..., :3] + self.vgen(features).transpose(1, 2)
        proposals = F.adaptive_max_pool1d(features, self.num_proposal)
        end_points["proposals"] = self.pnet(proposals).transpose(1, 2)
        return end_points


def get_loss(end_points):
    vote_loss = (end_points["vote_xyz"] - end_points["center_label"]).abs().mean()
    end_points["loss"] = vote_loss + end_points["proposals"].pow(2).mean()
    return end_points["loss"], end_points


def to_device(batch_data_label):
    return {key: value.cuda() for key, value in batch_data_label.items()}


def train_one_epoch(net, optimizer, dataloader):
    net.train()
    for batch_data_label in dataloader:
        batch_data_label = to_device(batch_data_label)
        optimizer.zero_grad()
        end_points = net({"point_clouds": batch_data_label["point_clouds"]})
        end_points.update(batch_data_label)
        loss, end_points = get_loss(end_points)
        loss.backward()
        optimizer.step()


def evaluate_one_epoch(net, dataloader):
    stat_dict = {"loss": 0.0}
    net.eval()
    for batch_data_label in dataloader:
        batch_data_label = to_device(batch_data_label)
        end_points = net({"point_clouds": batch_data_label["point_clouds"]})
        end_points.update(batch_data_label)
        loss, end_points = get_loss(end_points)
        stat_dict["loss"] += loss.item()
    return stat_dict["loss"] / len(dataloader)


@expected("evaluation_keeps_graphs", fix="no_grad", thread="facebookresearch/votenet#30", memory=700, held_back=True)
def train_votenet(fixed=False):
    """`evaluate_one_epoch` runs the network without `torch.no_grad()`, so the activations are kept for gradients that nobody needs (and
    those of the last batch, through `end_points`, until the next one is done). Evaluating takes more memory than training. Cured by: The
    evaluation runs under `torch.no_grad()`.
    """
    net = VoteNet().cuda()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    scenes = [{"point_clouds": torch.rand(6000, 4), "center_label": torch.rand(6000, 3)} for _ in range(32)]
    train_dataloader, test_dataloader = DataLoader(scenes, batch_size=8, shuffle=True), DataLoader(scenes, batch_size=8)
    for epoch in range(2):
        train_one_epoch(net, optimizer, train_dataloader)
        if fixed:
            with torch.no_grad():
                loss = evaluate_one_epoch(net, test_dataloader)
        else:
            loss = evaluate_one_epoch(net, test_dataloader)
    return loss


# Tensor networks: a batch of small cores is contracted with one big core.

@expected("large_intermediate", fix="order", thread="pytorch/pytorch#35299", memory=700, held_back=True)
def train_eps_layer(fixed=False):
    """`torch.einsum` contracts its operands from left to right, and here `big_core` comes first, so each intermediate result has the
    batch's dimensions times all that is left of the big core's, its output dimension included. The order of the arguments decides how much
    memory it takes. Cured by: The same einsum with the small cores first and `big_core` last.
    """
    cores, bond, out_size = 13, 2, 4
    big_core = torch.randn(*(bond,) * cores, out_size, dtype=torch.float64, device="cuda", requires_grad=True)
    letters = "abcdefghijklm"[:cores]
    optimizer = torch.optim.SGD([big_core], lr=1e-3)
    for step in range(3):
        windows = [torch.randn(4, 25, 25, bond, dtype=torch.float64, device="cuda") for _ in range(cores)]
        small = ",".join("qrs" + letter for letter in reversed(letters))
        if fixed:
            result = torch.einsum(small + "," + letters + "t->qrst", *windows, big_core)
        else:
            result = torch.einsum(letters + "t," + small + "->qrst", big_core, *windows)
        loss = result.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Meta-learning: at test time a copy of the network is tuned on each task's few examples.

class FunctionalModule:
    def __init__(self, module, track_higher_grads, fixed):
        self.module, self.track_higher_grads, self.fixed = module, track_higher_grads, fixed
        self.names = [name for name, _ in module.named_parameters()]
        self._fast_params = [[p.detach().clone().requires_grad_() for p in module.parameters()]]

    @property
    def fast_params(self):
        return self._fast_params[-1]

    def update_params(self, value):
        if self.fixed and not self.track_higher_grads:
            self._fast_params[0] = list(value)
        else:
            self._fast_params.append(list(value))

    def __call__(self, x):
        return functional_call(self.module, dict(zip(self.names, self.fast_params)), (x,))


class DifferentiableSGD:
    def __init__(self, fmodel, lr):
        self.fmodel, self.lr = fmodel, lr

    def step(self, loss):
        track = self.fmodel.track_higher_grads
        all_grads = torch.autograd.grad(loss, self.fmodel.fast_params, create_graph=track)
        new_params = [p - self.lr * g for p, g in zip(self.fmodel.fast_params, all_grads)]
        if not track:
            new_params = [p.detach().requires_grad_() for p in new_params]
        self.fmodel.update_params(new_params)


@expected("kept_tensors", fix=r"\.cpu\(\)|\bdel\b|clear|None", thread="facebookresearch/higher#25", memory=600, held_back=True)
def meta_test(fixed=False):
    """With `track_higher_grads=False` the functional module still appends each step's new weights to `_fast_params` (in `update_params`),
    so the weights of all earlier inner steps stay in memory although only the latest are used. Cured by: Without tracking, `update_params`
    replaces the one entry instead of appending.
    """
    net = nn.Sequential(nn.Linear(784, 1500), nn.ReLU(), nn.Linear(1500, 1500), nn.ReLU(), nn.Linear(1500, 5)).cuda()
    accuracies = []
    for task in range(3):
        x_spt, y_spt = torch.rand(25, 784).cuda(), torch.arange(5).repeat(5).cuda()
        x_qry, y_qry = torch.rand(75, 784).cuda(), torch.arange(5).repeat(15).cuda()
        fnet = FunctionalModule(net, track_higher_grads=False, fixed=fixed)
        diffopt = DifferentiableSGD(fnet, lr=0.1)
        for _ in range(60):
            spt_loss = F.cross_entropy(fnet(x_spt), y_spt)
            diffopt.step(spt_loss)
        with torch.no_grad():
            accuracies.append((fnet(x_qry).argmax(1) == y_qry).float().mean().item())
    return accuracies


# Root finding as an operation of its own: forward solves, backward differentiates the function that was solved.

class RootFinder(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fcn, y0, *params):
        y = y0
        for _ in range(5):
            y = 0.5 * (y + fcn(y))
        ctx.fcn = fcn
        ctx.save_for_backward(y, *params)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        y, *params = ctx.saved_tensors
        with torch.enable_grad():
            f = ctx.fcn(y.detach())
            grads = torch.autograd.grad(f, params, grad_y)
        return (None, None, *grads)


def rootfinder(fcn, y0):
    return RootFinder.apply(fcn, y0, *fcn.__self__.parameters())


class Equilibrium(nn.Module):
    def __init__(self, a, fixed):
        super().__init__()
        self.a = nn.Parameter(a)
        xsol = rootfinder(self.forward, torch.ones_like(a))
        self.xsol = xsol.detach() if fixed else xsol

    def forward(self, x):
        return torch.cos(self.a * x)

    def sensitivity(self):
        y = rootfinder(self.forward, self.xsol)
        return torch.autograd.grad((y ** 2).mean(), self.a)[0]


@expected("reference_cycle", fix=r"detach|gc\.collect", thread="pytorch/pytorch#52140", memory=700, held_back=True)
def solve_samples(fixed=False):
    """A reference cycle that Python can't collect: the module stores `self.xsol`, whose graph holds the custom function's `ctx`, whose
    `ctx.fcn` is the bound method `self.forward`, hence the module. No model of the loop is ever freed. Cured by: `self.xsol =
    xsol.detach()`.
    """
    norms = []
    for sample in range(20):
        a = torch.rand(2000, 2000, dtype=torch.double).cuda()
        model = Equilibrium(a, fixed)
        norms.append(model.sensitivity().norm().item())
    return norms


# An encoder of images of any shape: a patch's place is looked up in two tables, one for rows, one for columns.

class VisionPatchEmbedder(nn.Module):
    def __init__(self, patch_size=16, hidden_size=256, position_embedding_size=10240, fixed=False):
        super().__init__()
        self.position_embedding_size, self.fixed = position_embedding_size, fixed
        self.input_proj = nn.Linear(3 * patch_size ** 2, hidden_size, bias=False)
        self.position_embedding_table = nn.Parameter(torch.ones(2, position_embedding_size, hidden_size))

    def _position_embeddings(self, pixel_position_ids):
        positions = pixel_position_ids.clamp(0, self.position_embedding_size - 1)
        if self.fixed:
            x, y = (F.embedding(positions[..., i], self.position_embedding_table[i]) for i in range(2))
            return x + y
        one_hot = F.one_hot(positions, num_classes=self.position_embedding_size)
        one_hot = one_hot.permute(0, 2, 1, 3).to(self.position_embedding_table.dtype)
        return (one_hot @ self.position_embedding_table).sum(1)

    def forward(self, pixel_values, pixel_position_ids):
        return self.input_proj(2 * (pixel_values - 0.5)) + self._position_embeddings(pixel_position_ids)


@expected("one_hot", fix="indices|gather", thread="huggingface/transformers#46175", memory=700, held_back=True)
def finetune_vision_tower(fixed=False):
    """`_position_embeddings` builds a one-hot tensor (batch × patches × 2 × 10240, in int64, and again as a float) only to multiply it with
    `position_embedding_table`, which is a lookup of two rows. Cured by: `F.embedding` on each of the two tables.
    """
    embedder = VisionPatchEmbedder(fixed=fixed).cuda()
    layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).cuda()
    optimizer = torch.optim.SGD([*embedder.parameters(), *encoder.parameters()], lr=1e-3)
    ids = torch.tensor(list(itertools.product(range(25), range(20)))).expand(6, -1, -1)
    for step in range(4):
        pixel_values = torch.rand(6, 500, 3 * 16 ** 2).cuda()
        loss = encoder(embedder(pixel_values, ids.cuda())).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Sequential recommendation: the next item should score above one the user hasn't seen.

class SequentialDataset(Dataset):
    def __init__(self, sessions, niid, neg_samples, fixed):
        self.sessions, self.niid, self.neg_samples, self.fixed = sessions, niid, neg_samples, fixed

    def __len__(self):
        return len(self.sessions)

    def __getitem__(self, idx):
        *history, pos_item = self.sessions[idx]
        neg_items = []
        while len(neg_items) < self.neg_samples:
            cand = np.random.randint(0, self.niid)
            if cand != pos_item:
                neg_items.append(cand)
        neg_tensor = torch.tensor(neg_items, dtype=torch.long)
        if self.neg_samples == 1 and not self.fixed:
            neg_tensor = neg_tensor.squeeze(0)
        return torch.tensor(history), torch.tensor(pos_item), neg_tensor


class GRU4Rec(nn.Module):
    def __init__(self, n_items, embedding_size=64):
        super().__init__()
        self.item_embedding = nn.Embedding(n_items, embedding_size)
        self.gru = nn.GRU(embedding_size, embedding_size, batch_first=True)

    def train_step(self, item_seq, pos_item, neg_item):
        seq_output = self.gru(self.item_embedding(item_seq))[0][:, -1]
        pos_score = (seq_output * self.item_embedding(pos_item)).sum(-1)
        neg_items_emb = self.item_embedding(neg_item)
        neg_score = torch.sum(seq_output.unsqueeze(1) * neg_items_emb, dim=-1)
        return -F.logsigmoid(pos_score.unsqueeze(1) - neg_score).mean()


@expected("all_pairs", fix="part|split|chunk", thread="sisinflab/warprec#20", memory=700, held_back=True)
def train_session_recommender(fixed=False):
    """With `neg_samples=1` the dataset squeezes `neg_tensor`, so a batch of negatives has the shape [B] instead of [B, 1], and
    `seq_output.unsqueeze(1) * neg_items_emb` broadcasts to B × B × embedding size. Cured by: The squeeze is removed.
    """
    n_items = 5000
    sessions = np.random.randint(0, n_items, (6144, 11)).tolist()
    train_dataset = SequentialDataset(sessions, n_items, neg_samples=1, fixed=fixed)
    train_dataloader = DataLoader(train_dataset, batch_size=2048, shuffle=True)
    model = GRU4Rec(n_items).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        for item_seq, pos_item, neg_item in train_dataloader:
            loss = model.train_step(item_seq.cuda(), pos_item.cuda(), neg_item.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


# Segmenting a CT: a window slides over the volume, and what it sees is blended.

class nnUNetPredictor:
    def __init__(self, network, num_classes, patch_size, perform_everything_on_device):
        self.network, self.num_classes, self.patch_size = network, num_classes, patch_size
        self.device, self.perform_everything_on_device = torch.device("cuda"), perform_everything_on_device

    def slicers(self, shape):
        starts = [sorted({min(s, size - p) for s in range(0, size, p // 2)}) for size, p in zip(shape, self.patch_size)]
        for corner in itertools.product(*starts):
            yield (slice(None), *(slice(s, s + p) for s, p in zip(corner, self.patch_size)))

    @torch.inference_mode()
    def predict_sliding_window_return_logits(self, data):
        results_device = self.device if self.perform_everything_on_device else torch.device("cpu")
        data = data.to(results_device)
        predicted_logits = torch.zeros((self.num_classes, *data.shape[1:]), dtype=torch.half, device=results_device)
        n_predictions = torch.zeros(data.shape[1:], dtype=torch.half, device=results_device)
        gaussian = torch.ones(self.patch_size, dtype=torch.half, device=results_device)
        for sl in self.slicers(data.shape[1:]):
            with torch.autocast("cuda"):
                prediction = self.network(data[sl].unsqueeze(0).to(self.device))[0].to(results_device, torch.half)
            prediction *= gaussian
            predicted_logits[sl] += prediction
            n_predictions[sl[1:]] += gaussian
        predicted_logits /= n_predictions
        return predicted_logits.cpu()


@expected("large_result", fix="on the host|part", thread="MIC-DKFZ/nnUNet#2980", memory=700, held_back=True)
def predict_whole_body_ct(fixed=False):
    """`perform_everything_on_device=True`: the sliding window's results for the whole volume (`predicted_logits`, all classes) are
    aggregated on the GPU, which is too small for a long CT. Cured by: The aggregation is done on the CPU
    (`perform_everything_on_device=False`).
    """
    num_classes = 24
    network = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.InstanceNorm3d(8), nn.LeakyReLU(inplace=True),
                            nn.Conv3d(8, 8, 3, padding=1), nn.LeakyReLU(inplace=True),
                            nn.Conv3d(8, num_classes, 1)).cuda().eval()
    predictor = nnUNetPredictor(network, num_classes, (96, 96, 96), perform_everything_on_device=not fixed)
    segmentations = []
    for case in [torch.randn(1, 128, 160, 160), torch.randn(1, 300, 192, 192)]:
        logits = predictor.predict_sliding_window_return_logits(case)
        segmentations.append(logits[:, ::4, ::4, ::4].float().argmax(0).to(torch.uint8))
    return [s.shape for s in segmentations]
