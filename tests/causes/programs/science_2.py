"""Programs after public threads about science and geometry."""

import math
from collections import defaultdict

import torch
from torch import nn
from torch.nn import functional as F

from expected import expected

# A radiance field with hashed feature grids, trained on random rays and validated on whole images.


class HashEncoding(nn.Module):
    def __init__(self, L=4, F_=2, log2_T=16, N_min=16):
        super().__init__()
        self.tables = nn.Parameter(torch.rand(L, 2**log2_T, F_) * 1e-4)
        self.resolutions, self.T, self.n_output_dims = [N_min * 2**i for i in range(L)], 2**log2_T, L * F_

    def forward(self, x):
        features = []
        for table, resolution in zip(self.tables, self.resolutions):
            cell = (x * resolution).long()
            index = (cell[:, 0] ^ cell[:, 1] * 2654435761 ^ cell[:, 2] * 805459861) % self.T
            features.append(table[index])
        return torch.cat(features, 1)


class NGP(nn.Module):
    def __init__(self, scale=0.5):
        super().__init__()
        self.scale = scale
        self.xyz_encoder = HashEncoding()
        self.sigma_net = nn.Sequential(nn.Linear(self.xyz_encoder.n_output_dims, 64), nn.ReLU(), nn.Linear(64, 16))
        self.rgb_net = nn.Sequential(nn.Linear(16 + 3, 64), nn.ReLU(), nn.Linear(64, 3), nn.Sigmoid())

    def forward(self, x, d):
        h = self.sigma_net(self.xyz_encoder((x + self.scale) / (2 * self.scale)))
        return torch.exp(h[:, 0]), self.rgb_net(torch.cat([d, h], 1))


def render(model, rays_o, rays_d, n_samples=32):
    z_vals = torch.linspace(0.05, 1, n_samples, device=rays_o.device)
    xyzs = rays_o[:, None] + rays_d[:, None] * z_vals[:, None]
    dirs = rays_d[:, None].expand_as(xyzs)
    sigmas, rgbs = model(xyzs.reshape(-1, 3), dirs.reshape(-1, 3))
    sigmas, rgbs = sigmas.view(-1, n_samples), rgbs.view(-1, n_samples, 3)
    alphas = 1 - torch.exp(-sigmas / n_samples)
    T = torch.cumprod(torch.cat([torch.ones_like(alphas[:, :1]), 1 - alphas + 1e-10], 1), 1)[:, :-1]
    weights = alphas * T
    return {"rgb": (weights[..., None] * rgbs).sum(1), "depth": (weights * z_vals).sum(1), "opacity": weights.sum(1)}


class NeRFSystem:
    def __init__(self, img_wh, val_chunk):
        self.model, self.img_wh, self.val_chunk = NGP().cuda(), img_wh, val_chunk
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-2, eps=1e-15)

    def training_step(self, batch):
        results = render(self.model, batch["rays_o"], batch["rays_d"])
        loss = F.mse_loss(results["rgb"], batch["rgb"])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    @torch.no_grad()
    def validation_step(self, rays_o, rays_d, rgb_gt):
        if self.val_chunk:
            chunks = [render(self.model, o, d) for o, d in zip(rays_o.split(self.val_chunk), rays_d.split(self.val_chunk))]
            results = {k: torch.cat([chunk[k] for chunk in chunks]) for k in chunks[0]}
        else:
            results = render(self.model, rays_o, rays_d)
        return -10 * torch.log10(F.mse_loss(results["rgb"], rgb_gt))


@expected("batch_without_gradients", fix="split|part", thread="kwea123/ngp_pl#44", memory=1000)
def fit_garden_scene(fixed=False):
    """Training renders 8192 rays at a time, but `validation_step` hands all 120,000 rays of the image to `render` in one call, so the
    network's activations are made for all samples of all rays at once. Cured by: the rays of a validation image are rendered in chunks.
    """
    system = NeRFSystem(img_wh=(400, 300), val_chunk=8192 if fixed else None)
    for _ in range(10):
        batch = {
            "rays_o": torch.rand(8192, 3).cuda() - 0.5,
            "rays_d": F.normalize(torch.randn(8192, 3)).cuda(),
            "rgb": torch.rand(8192, 3).cuda(),
        }
        system.training_step(batch)
    n_pixels = system.img_wh[0] * system.img_wh[1]
    psnrs = []
    for _ in range(2):
        rays_o, rays_d = torch.zeros(n_pixels, 3).cuda(), F.normalize(torch.randn(n_pixels, 3)).cuda()
        psnrs.append(system.validation_step(rays_o, rays_d, torch.rand(n_pixels, 3).cuda()).item())
    return {"images": len(psnrs)}


# Probabilistic programming: Hamiltonian Monte Carlo runs a model under a handler that records its sites.


class Normal:
    def __init__(self, loc, scale):
        self.loc, self.scale = loc, scale

    def sample(self):
        return self.loc + self.scale * torch.randn_like(self.loc)

    def log_prob(self, value):
        return -(((value - self.loc) / self.scale) ** 2) / 2 - math.log(self.scale * math.sqrt(2 * math.pi))


class Trace:
    def __init__(self):
        self.nodes = {}

    def add_node(self, name, fn, value, is_observed):
        self.nodes[name] = {"fn": fn, "value": value, "is_observed": is_observed}

    def log_prob_sum(self):
        for site in self.nodes.values():
            site["log_prob"] = site["fn"].log_prob(site["value"])
        return sum(site["log_prob"].sum() for site in self.nodes.values())


def get_trace(model, data, substitution):
    trace = Trace()

    def sample(name, fn, obs=None):
        value = obs if obs is not None else substitution.get(name)
        value = fn.sample() if value is None else value
        trace.add_node(name, fn, value, obs is not None)
        return value

    model(sample, data)
    return trace


class HMC:
    def __init__(self, model, step_size=1e-3, num_steps=3):
        self.model, self.step_size, self.num_steps = model, step_size, num_steps

    def _potential_grad(self, data, z):
        z = {name: value.detach().requires_grad_() for name, value in z.items()}
        potential_energy = -get_trace(self.model, data, z).log_prob_sum()
        grads = torch.autograd.grad(potential_energy, list(z.values()))
        return dict(zip(z, grads)), potential_energy.detach()

    def sample(self, data, z):
        r = {name: torch.randn_like(value) for name, value in z.items()}
        z_grads, energy = self._potential_grad(data, z)
        z_new = dict(z)
        for _ in range(self.num_steps):
            r = {name: r[name] - self.step_size / 2 * z_grads[name] for name in r}
            z_new = {name: z_new[name] + self.step_size * r[name] for name in r}
            z_grads, energy_new = self._potential_grad(data, z_new)
            r = {name: r[name] - self.step_size / 2 * z_grads[name] for name in r}
        accept = torch.rand_like(energy) < torch.exp(energy - energy_new)
        return {name: torch.where(accept, z_new[name], z[name]) for name in z}


class MCMC:
    def __init__(self, kernel, num_samples, keep_traces):
        self.kernel, self.num_samples, self.keep_traces = kernel, num_samples, keep_traces
        self.exec_traces, self.samples = [], defaultdict(list)

    @torch.no_grad()
    def _add_sample(self, data, z):
        if not self.keep_traces:
            for name, value in z.items():
                self.samples[name].append(value)
            return
        trace = get_trace(self.kernel.model, data, z)
        trace.log_prob_sum()
        self.exec_traces.append(trace)

    def run(self, data, z):
        for _ in range(self.num_samples):
            z = self.kernel.sample(data, z)
            self._add_sample(data, z)
        return self

    def marginal(self, site):
        return torch.stack(self.samples[site] if self.samples else [trace.nodes[site]["value"] for trace in self.exec_traces])


@expected("kept_tensors", fix=r"\.cpu\(\)|\bdel\b|clear|None", thread="pyro-ppl/pyro#1787", memory=1000)
def infer_scale_of_signal(fixed=False):
    """`MCMC._add_sample` keeps the whole execution trace of the model for every sample in `exec_traces`, with the distribution of the data
    (its `loc`, as large as the data) and the log-probabilities, though only the scalar `x` is wanted; memory grows with each sample. Cured
    by: only the values of the latent sites are stored, not the traces.
    """
    data = torch.ones(2000, 1024, device="cuda")

    def model(sample, data):
        x = sample("x", Normal(torch.zeros((), device="cuda"), 1.0))
        sample("data", Normal(x * data, 0.01), obs=data)

    posterior = MCMC(HMC(model), num_samples=80, keep_traces=not fixed).run(data, {"x": torch.zeros((), device="cuda")})
    return {"samples": len(posterior.marginal("x"))}


# An open quantum system: gradients of an observable by the adjoint method, with an explicit Runge-Kutta solver.


def new_leaf_tensor(x):
    return x.detach().clone().requires_grad_(True)


def dag(x):
    return x.mH


class MEAdjointSolver:
    def __init__(self, H, jump_op, params, dt, recompute_derivatives):
        self.H, self.jump_op, self.params, self.dt, self.recompute_derivatives = H, jump_op, params, dt, recompute_derivatives

    def lindbladian(self, t, rho):
        kappa, amplitude = self.params
        H = amplitude * math.cos(t) * self.H
        LdagL = dag(self.jump_op) @ self.jump_op
        out = (-1j * H - 0.5 * kappa * LdagL) @ rho
        return out + dag(out) + kappa * self.jump_op @ rho @ dag(self.jump_op)

    def odefun_backward(self, t, rho):
        return -self.lindbladian(-t, rho)

    def odefun_adjoint(self, t, phi):
        kappa, amplitude = self.params
        H = amplitude * math.cos(t) * self.H
        LdagL = dag(self.jump_op) @ self.jump_op
        out = (1j * H - 0.5 * kappa * LdagL) @ phi
        return out + dag(out) + kappa * dag(self.jump_op) @ phi @ self.jump_op

    def step(self, t, y, f0, dt, fun):
        k2 = fun(t + dt / 2, y + dt / 2 * f0)
        k3 = fun(t + 3 * dt / 4, y + 3 * dt / 4 * k2)
        y_new = y + dt * (2 / 9 * f0 + 1 / 3 * k2 + 4 / 9 * k3)
        f_new = fun(t + dt, y_new)
        return f_new, y_new

    @torch.no_grad()
    def integrate(self, t0, t1, y):
        fyt, t = self.lindbladian(t0, y), t0
        while t < t1:
            fyt, y = self.step(t, y, fyt, self.dt, self.lindbladian)
            t += self.dt
        return y

    def integrate_augmented(self, t0, t1, y, a, g):
        fyt, fat, t = self.odefun_backward(t0, y), self.odefun_adjoint(t0, a), t0
        while t < t1:
            y, a = new_leaf_tensor(y), new_leaf_tensor(a)
            with torch.enable_grad():
                if self.recompute_derivatives:
                    fyt, fat = self.odefun_backward(t, y), self.odefun_adjoint(t, a)
                fyt_new, y_new = self.step(t, y, fyt, self.dt, self.odefun_backward)
                fat_new, a_new = self.step(t, a, fat, self.dt, self.odefun_adjoint)
                t, y, a, fyt, fat = t + self.dt, y_new, a_new, fyt_new, fat_new
                dg = torch.autograd.grad(a, self.params, y, allow_unused=True, retain_graph=True)
            g = [total + new for total, new in zip(g, dg)]
        return y.detach(), a.detach(), g


@expected("graph_of_earlier_steps", fix=r"detach|item\(\)", thread="dynamiqs/dynamiqs#352", memory=1000)
def optimize_qubit_pulse(fixed=False, n=400):
    """`integrate_augmented` makes leaves of `y` and `a` at each step, but the derivatives `fyt` and `fat` are carried over from the step
    before with their graph; so the graph of the backward integration chains through all steps (and `retain_graph=True` keeps it) and grows
    with each time step. Cured by: `fyt` and `fat` are recomputed from the new leaves at each step, so that nothing of the old graph is
    carried over.
    """
    H = torch.randn(n, n, dtype=torch.complex64, device="cuda")
    jump_op = torch.diag(torch.arange(1, n, device="cuda").sqrt(), 1).to(torch.complex64)
    kappa, amplitude = nn.Parameter(torch.tensor(0.1, device="cuda")), nn.Parameter(torch.tensor(1.0, device="cuda"))
    solver = MEAdjointSolver(H + dag(H), jump_op, (kappa, amplitude), dt=0.02, recompute_derivatives=fixed)
    optimizer = torch.optim.Adam([kappa, amplitude], 0.05)
    rho0 = torch.zeros(n, n, dtype=torch.complex64, device="cuda")
    rho0[0, 0] = 1
    for _ in range(2):
        rho = solver.integrate(0.0, 1.0, rho0)
        exp_op = torch.eye(n, dtype=torch.complex64, device="cuda")
        zeros = [torch.zeros((), device="cuda"), torch.zeros((), device="cuda")]
        _, _, grads = solver.integrate_augmented(-1.0, 0.0, rho, exp_op, zeros)
        kappa.grad, amplitude.grad = grads
        optimizer.step()
    return {"kappa": kappa.item()}


# Gaussian surfels: a trained scene is rendered from all of its views and compared with the photos.


class Camera:
    def __init__(self, uid, image, mask, mono, R, T, data_device="cuda"):
        self.uid, self.data_device = uid, torch.device(data_device)
        self.original_image, self.mask, self.mono = image, mask, mono
        self.image_height, self.image_width = image.shape[1:]
        self.world_view_transform = torch.cat([R, T[:, None]], 1)
        self.focal = 0.8 * self.image_width

    def to_device(self, device=None):
        device = self.data_device if device is None else device
        attr_dict = vars(self)
        for k in [k for k, v in attr_dict.items() if type(v) == torch.Tensor]:
            attr_dict[k] = attr_dict[k].to(device)

    def to_cpu(self):
        self.to_device(torch.device("cpu"))

    def get_gtImage(self, bg, with_mask=False):
        if not with_mask:
            return self.original_image
        return self.original_image * self.mask + bg[:, None, None] * (1 - self.mask)


class GaussianModel:
    def __init__(self, num_points):
        self._xyz = nn.Parameter(torch.randn(num_points, 3, device="cuda"))
        self._features = nn.Parameter(torch.rand(num_points, 3, device="cuda"))
        self._opacity = nn.Parameter(torch.zeros(num_points, 1, device="cuda"))


def render_surfels(viewpoint_camera, pc, bg_color):
    viewpoint_camera.to_device()
    w2c = viewpoint_camera.world_view_transform
    xyz_cam = pc._xyz @ w2c[:, :3].T + w2c[:, 3]
    h, w = viewpoint_camera.image_height, viewpoint_camera.image_width
    u = (viewpoint_camera.focal * xyz_cam[:, 0] / xyz_cam[:, 2] + w / 2).long().clamp(0, w - 1)
    v = (viewpoint_camera.focal * xyz_cam[:, 1] / xyz_cam[:, 2] + h / 2).long().clamp(0, h - 1)
    opacity = torch.sigmoid(pc._opacity)
    canvas = torch.zeros(h * w, 4, device="cuda").index_add_(0, v * w + u, torch.cat([pc._features * opacity, opacity], 1))
    canvas = canvas.view(h, w, 4).permute(2, 0, 1)
    opac = canvas[3:].clamp(0, 1)
    return {"render": canvas[:3] + bg_color[:, None, None] * (1 - opac), "opac": opac}


def psnr(img1, img2):
    return 20 * torch.log10(1 / (img1 - img2).square().mean().sqrt())


@torch.no_grad()
def render_set(views, gaussians, to_cpu_after_view):
    psnr_all = []
    for view in views:
        background = torch.zeros(3, device="cuda")
        render_pkg = render_surfels(view, gaussians, background)
        gt_image = view.get_gtImage(background, with_mask=True).cuda()
        psnr_all.append(psnr(gt_image, render_pkg["render"]).item())
        if to_cpu_after_view:
            view.to_cpu()
    return psnr_all


@expected("data_on_gpu", fix=r"\.cpu\(\)|on the host", thread="turandai/gaussian_surfels#26", memory=800)
def evaluate_surfels(fixed=False, h=960, w=1280):
    """Rendering moves the photo, mask and normals of a view to the GPU as attributes of the `Camera` (`to_device`), where they stay after
    the view was evaluated; as `views` holds all cameras, one more view's data stays on the GPU for each view. Cured by: `view.to_cpu()` at
    the end of the loop over views.
    """
    def make_view(uid):
        return Camera(
            uid, torch.zeros(3, h, w), torch.ones(1, h, w), torch.zeros(3, h, w), torch.eye(3), torch.tensor([0.0, 0.0, 4.0])
        )

    gaussians = GaussianModel(200_000)
    psnr_all = render_set([make_view(uid) for uid in range(22)], gaussians, to_cpu_after_view=fixed)
    return {"views": len(psnr_all)}


# Single cells: a joint model of sequencing and spatial data imputes the genes that were not measured.


class MultiEncoder(nn.Module):
    def __init__(self, n_inputs, n_latent, n_hidden=128):
        super().__init__()
        self.encoders = nn.ModuleList([nn.Sequential(nn.Linear(n, n_hidden), nn.ReLU()) for n in n_inputs])
        self.shared = nn.Sequential(nn.Linear(n_hidden, n_hidden), nn.ReLU(), nn.Linear(n_hidden, n_latent))

    def forward(self, x, mode):
        return self.shared(self.encoders[mode](torch.log(1 + x)))


class JVAE(nn.Module):
    def __init__(self, gene_mappings, n_genes, n_latent=10):
        super().__init__()
        self.gene_mappings, self.n_genes = gene_mappings, n_genes
        self.encoder = MultiEncoder([len(m) for m in gene_mappings], n_latent)
        self.decoder = nn.Sequential(nn.Linear(n_latent + 2, 128), nn.ReLU(), nn.Linear(128, n_genes))

    def sample_rate(self, x, mode, batch_index):
        z = self.encoder(x, mode)
        scale = torch.softmax(self.decoder(torch.cat([z, F.one_hot(batch_index, 2).float()], 1)), -1)
        return scale * x.sum(1, keepdim=True)

    def forward(self, x, mode):
        batch_index = torch.full((len(x),), mode, device=x.device)
        rate = self.sample_rate(x, mode, batch_index)[:, self.gene_mappings[mode]]
        return (rate - x * torch.log(rate + 1e-8)).sum(1).mean()


class GIMVI:
    def __init__(self, counts_seq, counts_spatial, gene_mappings, n_genes, batches_to_cpu):
        self.adatas, self.batches_to_cpu = [counts_seq, counts_spatial], batches_to_cpu
        self.module = JVAE(gene_mappings, n_genes).cuda()

    def _make_scvi_dls(self, batch_size):
        return [counts.split(batch_size) for counts in self.adatas]

    def train(self, batch_size=128, max_steps=5):
        optimizer = torch.optim.Adam(self.module.parameters(), 1e-3)
        for tensors in list(zip(*self._make_scvi_dls(batch_size)))[:max_steps]:
            loss = sum(self.module(x.float().cuda(), mode) for mode, x in enumerate(tensors))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @torch.inference_mode()
    def get_imputed_values(self, batch_size=128):
        self.module.eval()
        imputed_values = []
        for mode, scdl in enumerate(self._make_scvi_dls(batch_size)):
            imputed_value = []
            for sample_batch in scdl:
                x = sample_batch.float().cuda()
                rate = self.module.sample_rate(x, mode, torch.full((len(x),), mode, device="cuda"))
                imputed_value.append(rate.cpu() if self.batches_to_cpu else rate)
            imputed_values.append(torch.cat(imputed_value).cpu().detach().numpy())
        return imputed_values


@expected("kept_tensors", fix=r"\.cpu\(\)|\bdel\b|clear|None", thread="scverse/scvi-tools#3058", memory=600)
def impute_spatial_genes(fixed=False, n_genes=14_000):
    """`get_imputed_values` collects the imputed rates of every batch (all 14,000 genes) in `imputed_value` on the GPU and only moves them
    to the CPU after `torch.cat` of the whole dataset. Cured by: each mini-batch is moved to the CPU before it is appended.
    """
    gene_mappings = [torch.arange(n_genes), torch.arange(0, n_genes, 20)]
    counts_seq = torch.randint(0, 5, (1280, n_genes), dtype=torch.uint8)
    counts_spatial = torch.randint(0, 5, (7680, len(gene_mappings[1])), dtype=torch.uint8)
    model = GIMVI(counts_seq, counts_spatial, gene_mappings, n_genes, batches_to_cpu=fixed)
    model.train()
    imputed_spatial_rates = model.get_imputed_values()[1]
    return {"cells": len(imputed_spatial_rates)}


# Interatomic potentials: the Hessian of the energy of a molecule, for its vibrations.


class PairBackbone(nn.Module):
    def __init__(self, hidden, num_layers=2):
        super().__init__()
        self.atom_embedding = nn.Embedding(100, hidden)
        self.edge_mlps = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(2 * hidden + 32, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
                for _ in range(num_layers)
            ]
        )
        self.centers = nn.Parameter(torch.linspace(0, 6, 32), requires_grad=False)

    def forward(self, data):
        source, target = data["edge_index"]
        distance = (data["pos"][source] - data["pos"][target]).square().sum(-1, keepdim=True).sqrt()
        x_edge = torch.exp(-((distance - self.centers) ** 2))
        x = self.atom_embedding(data["atomic_numbers"])
        for mlp in self.edge_mlps:
            message = mlp(torch.cat([x[source], x[target], x_edge], 1))
            x = x + torch.zeros_like(x).index_add(0, target, message) / 10
        return x


def compute_forces(energy, pos, create_graph):
    return -torch.autograd.grad(energy.sum(), pos, create_graph=create_graph)[0]


def compute_hessian_loop(forces, pos, training):
    forces_flat = forces.flatten()
    rows = []
    for i in range(forces_flat.numel()):
        row = torch.autograd.grad(-forces_flat[i], pos, retain_graph=True, create_graph=training)[0]
        rows.append(row.flatten())
    return torch.stack(rows)


class MLP_EFS_Head(nn.Module):
    def __init__(self, backbone, hidden, regress_hessian, hessian_graph_in_training_only):
        super().__init__()
        self.backbone, self.regress_hessian = backbone, regress_hessian
        self.hessian_graph_in_training_only = hessian_graph_in_training_only
        self.energy_block = nn.Sequential(nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 1))

    def forward(self, data):
        data["pos"].requires_grad_(True)
        energy = self.energy_block(self.backbone(data)).sum()
        create_graph = self.training or self.regress_hessian
        outputs = {"energy": energy.detach(), "forces": compute_forces(energy, data["pos"], create_graph)}
        if self.regress_hessian:
            training = self.training if self.hessian_graph_in_training_only else create_graph
            outputs["hessian"] = compute_hessian_loop(outputs["forces"], data["pos"], training)
        return {name: output.detach() for name, output in outputs.items()}


@expected("create_graph", fix="create_graph=False", thread="facebookresearch/fairchem#2100", memory=1000)
def vibrations_of_molecule(fixed=False, natoms=24, hidden=512):
    """At inference each row of the Hessian is differentiated with `create_graph=True` (`create_graph` is true as soon as the Hessian is
    wanted), so each of the 3N rows keeps its own graph for third derivatives that nobody takes; the forces need it, the Hessian's rows
    don't. Cured by: the rows' `create_graph` is `self.training` instead.
    """
    model = (
        MLP_EFS_Head(PairBackbone(hidden), hidden, regress_hessian=True, hessian_graph_in_training_only=fixed).cuda().eval()
    )
    source, target = torch.cartesian_prod(torch.arange(natoms), torch.arange(natoms)).T
    edge_index = torch.stack([source, target])[:, source != target].cuda()
    data = {
        "pos": torch.randn(natoms, 3).cuda() * 3,
        "atomic_numbers": torch.randint(1, 9, (natoms,)).cuda(),
        "edge_index": edge_index,
    }
    outputs = model(data)
    masses = torch.full((3 * natoms,), 12.0, device="cuda")
    dynamical_matrix = outputs["hessian"] / torch.sqrt(masses[:, None] * masses)
    return {"modes": dynamical_matrix.diagonal().sum().item()}


# Implicit surfaces: the mesh of a trained distance field is extracted on a fine grid.


class VolumeSDF(nn.Module):
    def __init__(self, n_neurons=64):
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(39, n_neurons),
            nn.Softplus(100),
            nn.Linear(n_neurons, n_neurons),
            nn.Softplus(100),
            nn.Linear(n_neurons, 1),
        )

    def forward_level(self, points):
        octaves = [f(points * 2**i) for i in range(6) for f in (torch.sin, torch.cos)]
        return self.network(torch.cat([points, *octaves], -1)).squeeze(-1)


class MarchingCubeHelper:
    def __init__(self, resolution):
        self.resolution, self.points_range = resolution, (0.0, 1.0)

    def grid_vertices(self):
        ticks = torch.linspace(*self.points_range, self.resolution)
        verts = torch.empty(self.resolution, self.resolution, self.resolution, 3)
        verts[..., 0], verts[..., 1], verts[..., 2] = ticks[:, None, None], ticks[:, None], ticks
        return verts.view(-1, 3)

    def surface_cells(self, level):
        level = level.view(self.resolution, self.resolution, self.resolution)
        inside = level < 0
        return (inside[1:] != inside[:-1]).sum()


def chunk_batch(func, chunk_size, move_to_cpu, points):
    out = []
    for i in range(0, len(points), chunk_size):
        out_chunk = func(points[i : i + chunk_size])
        out.append(out_chunk.cpu() if move_to_cpu else out_chunk)
    return torch.cat(out)


class NeuSModel:
    def __init__(self, resolution, isosurface_chunk=131_072, radius=1.0, grid_on_cpu=False):
        self.geometry, self.helper = VolumeSDF().cuda(), MarchingCubeHelper(resolution)
        self.isosurface_chunk, self.radius, self.grid_on_cpu = isosurface_chunk, radius, grid_on_cpu

    def train_step(self, optimizer, points):
        points.requires_grad_(True)
        sdf = self.geometry.forward_level(points)
        (grad,) = torch.autograd.grad(sdf.sum(), points, create_graph=True)
        loss = (grad.norm(dim=-1) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def isosurface(self):
        def batch_func(x):
            return self.geometry.forward_level(x.cuda() * 2 * self.radius - self.radius)

        verts = self.helper.grid_vertices()
        if not self.grid_on_cpu:
            verts = verts.to("cuda")
        level = chunk_batch(batch_func, self.isosurface_chunk, True, verts)
        return self.helper.surface_cells(level)


@expected("data_on_gpu", fix=r"on the host|\.cpu\(\)|DataLoader|part", thread="bennyguo/instant-nsr-pl#46", memory=700)
def export_high_resolution_mesh(fixed=False):
    """`isosurface` moves the coordinates of the whole 384^3 grid (`verts`) to the GPU at once, and only then cuts them into chunks for the
    network. Cured by: the grid stays on the CPU, each chunk is moved to the GPU when it is needed.
    """
    model = NeuSModel(resolution=384, grid_on_cpu=fixed)
    optimizer = torch.optim.Adam(model.geometry.parameters(), 1e-3)
    for _ in range(10):
        model.train_step(optimizer, torch.rand(4096, 3).cuda() * 2 - 1)
    return {"cells": model.isosurface().item()}


# Protein structure: triangle attention over the pair representations of several templates, a chunk of rows at a time.


def flat_chunk_slice(t, flat_start, flat_end, no_batch_dims):
    rows, pieces = t.shape[1], []
    assert no_batch_dims == 2
    while flat_start < flat_end:
        first, row = divmod(flat_start, rows)
        stop = min(rows, row + flat_end - flat_start)
        pieces.append(t[first, row:stop])
        flat_start += stop - row
    return torch.cat(pieces)


def chunk_layer(layer, inputs, chunk_size, no_batch_dims, low_mem=False):
    tensors = [inputs["q_x"], inputs["kv_x"], *inputs["biases"]]
    orig_batch_dims = tuple(max(sizes) for sizes in zip(*[t.shape[:no_batch_dims] for t in tensors]))

    def prep_inputs(t):
        t = t.expand(orig_batch_dims + t.shape[no_batch_dims:])
        return t if low_mem else t.reshape(-1, *t.shape[no_batch_dims:])

    prepped = [prep_inputs(t) for t in tensors]
    flat_batch_dim, out = math.prod(orig_batch_dims), None
    for i in range(0, flat_batch_dim, chunk_size):
        end = min(flat_batch_dim, i + chunk_size)
        chunk = [flat_chunk_slice(t, i, end, no_batch_dims) if low_mem else t[i:end] for t in prepped]
        output_chunk = layer(chunk[0], chunk[1], chunk[2:])
        if out is None:
            out = output_chunk.new_zeros((flat_batch_dim, *output_chunk.shape[1:]))
        out[i:end] = output_chunk
    return out.view(orig_batch_dims + out.shape[1:])


class Attention(nn.Module):
    def __init__(self, c_in, c_hidden, no_heads):
        super().__init__()
        self.c_hidden, self.no_heads = c_hidden, no_heads
        self.linear_q, self.linear_k, self.linear_v, self.linear_g = (nn.Linear(c_in, c_hidden * no_heads) for _ in range(4))
        self.linear_o = nn.Linear(c_hidden * no_heads, c_in)

    def forward(self, q_x, kv_x, biases):
        heads = lambda x: x.unflatten(-1, (self.no_heads, self.c_hidden)).transpose(-2, -3)
        a = heads(self.linear_q(q_x)) / math.sqrt(self.c_hidden) @ heads(self.linear_k(kv_x)).mT
        for b in biases:
            a = a + b
        o = (torch.softmax(a, -1) @ heads(self.linear_v(kv_x))).transpose(-2, -3).flatten(-2)
        return self.linear_o(o * torch.sigmoid(self.linear_g(q_x)))


class TriangleAttention(nn.Module):
    def __init__(self, c_in=64, c_hidden=16, no_heads=4, inf=1e9, low_mem=False):
        super().__init__()
        self.layer_norm, self.linear = nn.LayerNorm(c_in), nn.Linear(c_in, no_heads, bias=False)
        self.mha, self.inf, self.low_mem = Attention(c_in, c_hidden, no_heads), inf, low_mem

    def forward(self, x, mask, chunk_size):
        x = self.layer_norm(x)
        mask_bias = (self.inf * (mask - 1))[..., :, None, None, :]
        triangle_bias = self.linear(x).permute(0, 3, 1, 2).unsqueeze(-4)
        inputs = {"q_x": x, "kv_x": x, "biases": [mask_bias, triangle_bias]}
        return chunk_layer(self.mha, inputs, chunk_size, no_batch_dims=2, low_mem=self.low_mem)


class TemplatePairStack(nn.Module):
    def __init__(self, no_blocks, c_t=64, low_mem=False):
        super().__init__()
        self.blocks = nn.ModuleList([TriangleAttention(c_t, low_mem=low_mem) for _ in range(no_blocks)])
        self.transition = nn.Sequential(nn.LayerNorm(c_t), nn.Linear(c_t, c_t), nn.ReLU(), nn.Linear(c_t, c_t))

    def forward(self, t, mask, chunk_size):
        for attention in self.blocks:
            t = t + attention(t, mask, chunk_size)
            t = t + self.transition(t)
        return t


@expected("repeated_copies", fix="expand", thread="aqlaboratory/openfold#16", memory=1000)
def embed_templates(fixed=False, n_templ=4, n_res=240):
    """`chunk_layer` (meant to save memory) first expands every input over all batch dimensions and flattens them with `reshape`; for
    `triangle_bias`, which is the same for all rows, that copies it for each of the 240 rows of each template: templates x rows x heads x N
    x N. Cured by: a low-memory version that only expands (a view) and slices out each chunk.
    """
    model = TemplatePairStack(no_blocks=2, low_mem=fixed).cuda().eval()
    t, mask = torch.randn(n_templ, n_res, n_res, 64).cuda(), torch.ones(n_templ, n_res, n_res).cuda()
    with torch.no_grad():
        t = model(t, mask, chunk_size=16)
    return {"mean": t.mean().item()}


# Inverse problems: posterior sampling with a diffusion prior and Langevin dynamics for the measurements.


class FourierImaging:
    def __init__(self, resolution, sigma_noise=0.05):
        self.mask, self.sigma_noise = torch.rand(resolution, resolution, device="cuda") < 0.3, sigma_noise

    def __call__(self, x):
        return torch.fft.fft2(x, norm="ortho") * self.mask

    @torch.no_grad()
    def gradient(self, x, observation, return_loss=True):
        residual = self(x) - observation
        return 2 * torch.fft.ifft2(residual * self.mask, norm="ortho").real, residual.abs().square().sum()


class Denoiser(nn.Module):
    def __init__(self, channels=16):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.SiLU(), nn.Conv2d(channels, 1, 3, padding=1))

    def forward(self, x, sigma):
        return x / (1 + sigma**2) + self.net(x) * sigma / (1 + sigma**2) ** 0.5


class LangevinDynamics:
    def __init__(self, num_steps, lr, tau, detach_gradient):
        self.num_steps, self.lr, self.tau, self.detach_gradient = num_steps, lr, tau, detach_gradient

    def sample(self, x0hat, forward_op, observation, sigma):
        x = x0hat.clone().detach().requires_grad_(True)
        optimizer = torch.optim.SGD([x], self.lr)
        for _ in range(self.num_steps):
            optimizer.zero_grad()
            gradient, loss = forward_op.gradient(x, observation, return_loss=True)
            anchor = x.detach() if self.detach_gradient else x
            gradient = gradient / (2 * self.tau**2) + (anchor - x0hat) / sigma**2
            x.grad = gradient
            optimizer.step()
            with torch.no_grad():
                x.data = x.data + (2 * self.lr) ** 0.5 * torch.randn_like(x)
        if self.detach_gradient:
            x.grad = None
        return x.detach()


class DAPS:
    def __init__(self, net, forward_op, num_steps, lgvd):
        self.net, self.forward_op, self.lgvd = net, forward_op, lgvd
        self.sigmas = torch.logspace(1, -2, num_steps + 1).tolist()

    @torch.no_grad()
    def reverse_ode(self, xt, sigma, steps=3):
        schedule = torch.linspace(sigma, sigma / 10, steps + 1).tolist()
        for now, after in zip(schedule, schedule[1:]):
            xt = xt + (after - now) * (xt - self.net(xt, now)) / now
        return xt

    def inference(self, observation, shape):
        xt = torch.randn(shape, device="cuda") * self.sigmas[0]
        for sigma, sigma_next in zip(self.sigmas, self.sigmas[1:]):
            x0hat = self.reverse_ode(xt, sigma)
            x0y = self.lgvd.sample(x0hat, self.forward_op, observation, sigma)
            xt = x0y + torch.randn_like(x0y) * sigma_next
        return xt


@expected("reference_cycle", fix="detach", thread="devzhk/InverseBench#22", memory=1000)
def reconstruct_from_fourier(fixed=False, resolution=768):
    """In `LangevinDynamics.sample` the hand-made gradient contains `(x - x0hat)` of the leaf `x` that requires grad, so the tensor assigned
    to `x.grad` has a graph that leads back to `x`: a reference cycle through autograd, which keeps `x` and its gradient alive after each
    call of the sampler, one more for each noise level. Cured by: `x` is detached in the anchor term (and the gradient detached and
    cleared).
    """
    forward_op = FourierImaging(resolution)
    target = torch.rand(3, 1, resolution, resolution, device="cuda")
    observation = forward_op(target)
    algo = DAPS(Denoiser().cuda(), forward_op, num_steps=60, lgvd=LangevinDynamics(4, 1e-4, 0.05, detach_gradient=fixed))
    recon = algo.inference(observation, target.shape)
    return {"error": F.mse_loss(recon, target).item()}


# Finite elements: a rubber part under load, whose material density is optimized through the nonlinear solver.


class Hyperelastic3D:
    def psi(self, deformation_gradient, rho):
        J = torch.linalg.det(deformation_gradient)
        I1 = deformation_gradient.square().sum()
        stiffness = rho**3
        return stiffness * (0.5 * (I1 - 3 - 2 * torch.log(J)) + 2.0 * (J - 1) ** 2)

    def step(self, deformation_gradient, rho):
        stress = torch.func.vmap(torch.func.grad(self.psi))(deformation_gradient, rho)
        ddsdde = torch.func.vmap(torch.func.jacfwd(torch.func.grad(self.psi)))(deformation_gradient, rho)
        return stress, ddsdde


def apply_stiffness(k, elements, x):
    return torch.zeros_like(x).index_add(0, elements.flatten(), torch.einsum("eIiJj,eJj->eIi", k, x[elements]).flatten(0, 1))


def conjugate_gradient(k, elements, b, iterations=12):
    x, r = torch.zeros_like(b), b
    p, rr = r, (r * r).sum()
    for _ in range(iterations):
        Ap = apply_stiffness(k, elements, p)
        alpha = rr / (p * Ap).sum()
        x, r = x + alpha * p, r - alpha * Ap
        rr, previous = (r * r).sum(), rr
        p = r + rr / previous * p
    return x


class SparseSolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, k, b, elements):
        x = conjugate_gradient(k, elements, b)
        ctx.save_for_backward(k, x, elements)
        return x

    @staticmethod
    def backward(ctx, grad):
        k, x, elements = ctx.saved_tensors
        gradb = conjugate_gradient(k, elements, grad)
        return -torch.einsum("eIi,eJj->eIiJj", gradb[elements], x[elements]), gradb, None


class Solid:
    def __init__(self, n_nodes, n_elements, material):
        self.elements = torch.randint(0, n_nodes, (n_elements, 4), device="cuda")
        self.B, self.volume = torch.randn(n_elements, 4, 3, device="cuda"), torch.full((n_elements,), 1e-3, device="cuda")
        self.material, self.n_nodes = material, n_nodes
        self.forces = torch.zeros(n_nodes, 3, device="cuda")
        self.forces[-100:, 2] = -0.1

    def integrate_material(self, u, rho):
        deformation_gradient = torch.eye(3, device="cuda") + torch.einsum("eIi,eIj->eij", u[self.elements], self.B)
        stress, ddsdde = self.material.step(deformation_gradient, rho)
        k = torch.einsum("eIj,eijkl,eKl,e->eIiKk", self.B, ddsdde, self.B, self.volume)
        f = torch.einsum("eij,eIj,e->eIi", stress, self.B, self.volume)
        return k, torch.zeros_like(u).index_add(0, self.elements.flatten(), f.flatten(0, 1))

    def newton(self, u, rho, load, max_iter):
        for _ in range(max_iter):
            k, F_int = self.integrate_material(u, rho)
            u = u + SparseSolve.apply(k, load - F_int, self.elements)
        return u

    def solve(self, rho, increments, max_iter=8, adjoint=False):
        u = torch.zeros(self.n_nodes, 3, device="cuda")
        for increment in increments:
            load = increment * self.forces
            u = NewtonSolve.apply(self, u, rho, load, max_iter) if adjoint else self.newton(u, rho, load, max_iter)
        return u


class NewtonSolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, model, u, rho, load, max_iter):
        ctx.model = model
        u = model.newton(u, rho, load, max_iter)
        ctx.save_for_backward(u, rho)
        return u

    @staticmethod
    def backward(ctx, grad_u):
        u, rho = ctx.saved_tensors
        with torch.enable_grad():
            rho = rho.detach().requires_grad_(True)
            k, F_int = ctx.model.integrate_material(u.detach(), rho)
            lam = conjugate_gradient(k.detach(), ctx.model.elements, grad_u)
            (grad_rho,) = torch.autograd.grad(F_int, rho, -lam)
        return None, None, grad_rho, None, None


@expected("create_graph", fix="detach|create_graph=False", thread="meyer-nils/torch-fem#29", memory=1000)
def optimize_rubber_part(fixed=False, n_nodes=1500, n_elements=6000):
    """The whole Newton iteration is differentiated by autograd: the graph of the material law and its tangent (derivatives of `psi`), the
    stiffnesses and the linear solves of every Newton iteration of every load increment is kept until `compliance.backward()`, so memory
    grows with each iteration. Cured by: implicit differentiation: an autograd Function that iterates without a graph and solves one adjoint
    system in backward (torch-fem PR #34).
    """
    box = Solid(n_nodes, n_elements, Hyperelastic3D())
    rho = torch.full((n_elements,), 0.5, device="cuda", requires_grad=True)
    optimizer = torch.optim.Adam([rho], 0.02)
    for _ in range(2):
        u = box.solve(rho.clamp(0.1, 1), increments=(0.25, 0.5, 0.75, 1.0), adjoint=fixed)
        compliance = (box.forces * u).sum()
        optimizer.zero_grad()
        compliance.backward()
        optimizer.step()
    return {"compliance": compliance.item()}
