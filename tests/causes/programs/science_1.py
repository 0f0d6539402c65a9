"""Programs after public threads about science and geometry."""

import functools
import math

import torch
from torch import nn
from torch.nn import functional as F

from expected import expected

# An ODE solver with the adjoint method, which stops at an event: when has a mixture decayed below each of some levels?


def rk4_step(func, t, dt, y):
    k1 = func(t, y)
    k2 = func(t + dt / 2, y + dt * k1 / 2)
    k3 = func(t + dt / 2, y + dt * k2 / 2)
    k4 = func(t + dt, y + dt * k3)
    return y + dt * (k1 + 2 * k2 + 2 * k3 + k4) / 6


def integrate_until_event(func, y0, t0, event_fn, step_size, num_steps):
    event_t, y_event, y = t0.clone(), y0, y0
    before = event_fn(t0, y0)
    for i in range(num_steps):
        t = t0 + i * step_size
        y_next = rk4_step(func, t, step_size, y)
        after = event_fn(t + step_size, y_next)
        crossed = torch.sign(before) != torch.sign(after)
        fraction = before / (before - after)
        event_t = torch.where(crossed, t + fraction * step_size, event_t)
        y_event = torch.where(crossed, torch.lerp(y, y_next, fraction), y_event)
        y, before = y_next, after
    return event_t, torch.stack([y0, y_event])


class OdeintAdjointMethod(torch.autograd.Function):
    @staticmethod
    def forward(ctx, func, y0, t, event_fn, step_size, options, *adjoint_params):
        ctx.func, ctx.step_size, ctx.options = func, step_size, options
        with torch.no_grad():
            event_t, y = integrate_until_event(func, y0, t, event_fn, step_size, options["num_steps"])
        if options["event_t_as_saved_tensor"]:
            ctx.save_for_backward(t, y, event_t, *adjoint_params)
        else:
            ctx.event_t = event_t
            ctx.save_for_backward(t, y, *adjoint_params)
        return event_t, y

    @staticmethod
    def backward(ctx, grad_event_t, grad_y):
        if ctx.options["event_t_as_saved_tensor"]:
            t, y, event_t, *adjoint_params = ctx.saved_tensors
        else:
            t, y, *adjoint_params = ctx.saved_tensors
            event_t = ctx.event_t
        state, adj_y = y[1], grad_y[1]
        adj_params = [torch.zeros_like(param) for param in adjoint_params]
        dt = (t - event_t) / ctx.options["num_steps"]
        for i in range(ctx.options["num_steps"]):
            with torch.enable_grad():
                state = state.detach().requires_grad_(True)
                func_eval = ctx.func(event_t + i * dt, state)
                vjp_y, *vjp_params = torch.autograd.grad(func_eval, (state, *adjoint_params), -adj_y, allow_unused=True)
            state, adj_y = state + dt * func_eval, adj_y + dt * vjp_y
            adj_params = [a + dt * v for a, v in zip(adj_params, vjp_params)]
        return (None, adj_y + grad_y[0], None, None, None, None, *adj_params)


def odeint_event(func, y0, t0, event_fn, step_size, options):
    event_t, solution = OdeintAdjointMethod.apply(func, y0, t0, event_fn, step_size, options, *func.parameters())
    return event_t, solution


class Decay(nn.Module):
    def __init__(self, species):
        super().__init__()
        self.rate = nn.Parameter(torch.rand(species))

    def forward(self, t, y):
        return -self.rate * y


@expected("output_on_ctx", fix="save_for_backward", thread="rtqichen/torchdiffeq#180", memory=1000)
def time_decay_to_levels(fixed=False, species=3_000_000):
    """`OdeintAdjointMethod.forward` puts its own output `event_t` on the context as an attribute (`ctx.event_t = event_t`); the output
    refers to the node and the node to the output, so each call of `odeint_event` (nobody calls backward here) leaves its node with the
    saved solution `y` alive in a reference cycle, one more for each level. Cured by: `event_t` is saved with `ctx.save_for_backward` as the
    others.
    """
    decay = Decay(species).cuda()
    y_init, t_init = torch.ones(species, device="cuda"), torch.zeros((), device="cuda")
    options = {"num_steps": 5, "event_t_as_saved_tensor": fixed}
    times = []
    for level in torch.linspace(0.95, 0.05, 60).tolist():
        event_t, solution = odeint_event(decay, y_init, t_init, lambda t, y: y.mean() - level, 0.5, options)
        times.append(event_t.item())
    return {"times": len(times)}


# Exact Gaussian processes: a look-ahead acquisition conditions the model on fantasies at each of many candidates.


def cached(name):
    def wrapper(method):
        @functools.wraps(method)
        def g(self):
            if name not in self._memoize_cache:
                self._memoize_cache[name] = method(self)
            return self._memoize_cache[name]

        return g

    return wrapper


def clear_cache_hook(module, *args, **kwargs):
    module._memoize_cache = {}


def register_cache_clear_hook(tsr, module, weak):
    if weak:
        import weakref

        module_ref = weakref.ref(module)

        def wrapper(*args, **kwargs):
            alive = module_ref()
            if alive is not None:
                clear_cache_hook(alive)

    else:
        wrapper = functools.partial(clear_cache_hook, module)
    tsr.grad_fn.register_hook(wrapper)


class DefaultPredictionStrategy:
    def __init__(self, train_inputs, train_targets, covar_module, noise, weak_hooks):
        self.train_inputs, self.train_targets = train_inputs, train_targets
        self.covar_module, self.noise, self.weak_hooks = covar_module, noise, weak_hooks
        self._memoize_cache = {}

    @property
    @cached("lik_train_train_covar_root")
    def lik_train_train_covar_root(self):
        covar = self.covar_module(self.train_inputs, self.train_inputs)
        return torch.linalg.cholesky(covar + self.noise * torch.eye(covar.shape[-1], device=covar.device))

    @property
    @cached("mean_cache")
    def mean_cache(self):
        mean_cache = torch.cholesky_solve(self.train_targets.unsqueeze(-1), self.lik_train_train_covar_root).squeeze(-1)
        if mean_cache.grad_fn is not None:
            register_cache_clear_hook(mean_cache, self, self.weak_hooks)
        return mean_cache

    def exact_predictive_mean(self, test_inputs):
        return self.covar_module(test_inputs, self.train_inputs) @ self.mean_cache

    def get_fantasy_strategy(self, inputs, targets):
        return DefaultPredictionStrategy(
            torch.cat([self.train_inputs, inputs]),
            torch.cat([self.train_targets, targets]),
            self.covar_module,
            self.noise,
            self.weak_hooks,
        )


class ScaleRBFKernel(nn.Module):
    def __init__(self):
        super().__init__()
        self.raw_lengthscale, self.raw_outputscale = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x1, x2):
        x1, x2 = x1 / F.softplus(self.raw_lengthscale), x2 / F.softplus(self.raw_lengthscale)
        sq_dist = x1.square().sum(-1, keepdim=True) + x2.square().sum(-1) - 2 * x1 @ x2.T
        return F.softplus(self.raw_outputscale) * torch.exp(-sq_dist / 2)


def integrated_posterior(strategy, X, mc_points):
    fantasy_Y = strategy.exact_predictive_mean(X) + 0.1 * torch.randn(len(X), device=X.device)
    fantasy_strategy = strategy.get_fantasy_strategy(X, fantasy_Y)
    return fantasy_strategy.exact_predictive_mean(mc_points).mean()


@expected("reference_cycle", fix=r"gc\.collect|weakref", thread="cornellius-gp/gpytorch#2734", memory=1000)
def choose_candidates(fixed=False, d=10, n_train=1500):
    """`mean_cache` registers `clear_cache_hook`, bound to the prediction strategy itself, as a hook on the cached tensor's `grad_fn`:
    strategy -> cache -> tensor -> grad_fn -> hook -> strategy. That cycle goes through C++ and is never collected, so each candidate's
    fantasy strategy stays with its covariance matrices and graph. Cured by: the hook holds the strategy only by a `weakref`.
    """
    train_X, mc_points = torch.rand(n_train, d, device="cuda"), torch.rand(200, d, device="cuda")
    train_Y = train_X.sin().sum(-1)
    covar_module = ScaleRBFKernel().cuda()
    strategy = DefaultPredictionStrategy(train_X, train_Y, covar_module, 1e-2, weak_hooks=fixed)
    values = []
    for _ in range(60):
        X = torch.rand(5, d, device="cuda", requires_grad=True)
        acq_value = integrated_posterior(strategy, X, mc_points)
        values.append(acq_value.item())
    return {"values": len(values)}


# Tensor networks: a picture with many channels is fitted by a tensor train.


class Tensor:
    def __init__(self, cores):
        self.cores = cores

    def torch(self):
        full = self.cores[0]
        for core in self.cores[1:]:
            full = torch.tensordot(full, core, dims=1)
        return full.squeeze(0).squeeze(-1)


def rand(shape, ranks_tt, device, requires_grad):
    ranks = [1] + [ranks_tt] * (len(shape) - 1) + [1]
    return Tensor(
        [torch.randn(ranks[i], shape[i], ranks[i + 1], device=device, requires_grad=requires_grad) for i in range(len(shape))]
    )


def relative_error(gt, approx):
    return torch.linalg.vector_norm(gt - approx.torch()) / torch.linalg.vector_norm(gt)


def optimize(tensors, loss_function, optimizer=torch.optim.Adam, max_iter=60, print_freq=20, detach_history=False):
    parameters = [core for t in tensors for core in t.cores if core.requires_grad]
    optimizer = optimizer(parameters)
    losses = []
    for iteration in range(max_iter):
        optimizer.zero_grad()
        loss = loss_function(*tensors)
        if not isinstance(loss, (tuple, list)):
            loss = [loss]
        total_loss = functools.reduce(lambda x, y: x + y, loss)
        total_loss.backward(retain_graph=True)
        optimizer.step()
        losses.append(total_loss.detach() if detach_history else total_loss)
        if len(losses) >= 2 and iteration % print_freq == 0:
            delta_loss = losses[-1] - losses[-2]
            print("iter:", iteration, "| loss:", " + ".join(f"{l.item():.6f}" for l in loss), "| change:", delta_loss.item())
    return losses


@expected("graph_of_earlier_steps", fix=r"detach|item\(\)", thread="rballester/tntorch#19", memory=1000)
def complete_picture(fixed=False):
    """`optimize` appends `total_loss` itself, with its graph, to `losses`; and as backward is called with `retain_graph=True`, each old
    loss keeps what its graph saved (differences as large as the picture), so memory grows with each iteration. Cured by:
    `losses.append(total_loss.detach())`.
    """
    gt = torch.rand(720, 960, 4).cuda()
    t = rand((720, 960, 4), ranks_tt=10, device="cuda", requires_grad=True)

    def loss_function(t):
        smoothness = sum(core.diff(dim=1).square().mean() for core in t.cores)
        return relative_error(gt, t), 1e-4 * smoothness

    losses = optimize([t], loss_function, detach_history=fixed)
    return {"losses": len(losses)}


# Bayesian deep learning: a Laplace approximation of the last layer of a classifier with many classes.


class FeatureExtractor(nn.Module):
    def __init__(self, in_features, features, n_classes):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(in_features, 512), nn.ReLU(), nn.Linear(512, features), nn.Tanh())
        self.last_layer = nn.Linear(features, n_classes)

    def forward_with_features(self, x):
        phi = self.body(x)
        return self.last_layer(phi), phi


class DiagLLLaplace:
    def __init__(self, model, prior_precision=1.0, fast_variance=False):
        self.model, self.prior_precision, self.fast_variance = model, prior_precision, fast_variance
        self.H = torch.zeros(sum(p.numel() for p in model.last_layer.parameters()), device="cuda")

    @torch.no_grad()
    def fit(self, train_loader):
        for X, y in train_loader:
            f, phi = self.model.forward_with_features(X.cuda())
            p = f.softmax(-1)
            lambda_ = p * (1 - p)
            self.H += torch.cat([(lambda_.T @ phi.square()).flatten(), lambda_.sum(0)])

    @property
    def posterior_variance(self):
        return 1 / (self.H + self.prior_precision)

    def last_layer_jacobians(self, x):
        f, phi = self.model.forward_with_features(x)
        bsize, output_dim = f.shape
        identity = torch.eye(output_dim, device=x.device).unsqueeze(0).tile(bsize, 1, 1)
        Js = torch.einsum("kp,kij->kijp", phi, identity).reshape(bsize, output_dim, -1)
        return torch.cat([Js, identity], dim=2), f

    def functional_variance(self, Js):
        return torch.einsum("ncp,p,nkp->nck", Js, self.posterior_variance, Js)

    def functional_variance_fast(self, x):
        f, phi = self.model.forward_with_features(x)
        k, d = f.shape[-1], phi.shape[-1]
        f_var = torch.einsum("bd,kd,bd->bk", phi, self.posterior_variance[: k * d].view(k, d), phi)
        return f, torch.diag_embed(f_var + self.posterior_variance[-k:])

    @torch.no_grad()
    def __call__(self, x):
        if self.fast_variance:
            f_mu, f_var = self.functional_variance_fast(x)
        else:
            Js, f_mu = self.last_layer_jacobians(x)
            f_var = self.functional_variance(Js)
        kappa = 1 / torch.sqrt(1 + math.pi / 8 * f_var.diagonal(dim1=1, dim2=2))
        return torch.softmax(kappa * f_mu, -1)


@expected("large_result", fix="part|smaller", thread="aleximmer/Laplace#138", memory=1000)
def predict_with_uncertainty(fixed=False, n_classes=400):
    """`last_layer_jacobians` writes out the Jacobian phi ⊗ I of the last layer: batch x classes x (features*classes + classes) numbers,
    nearly all zero, only to get a variance for each class. Cured by: the variance is computed directly from `phi` and the variances of the
    weights (einsum), without the Jacobian.
    """
    model = FeatureExtractor(256, 128, n_classes).cuda()
    la = DiagLLLaplace(model, fast_variance=fixed)
    la.fit([(torch.randn(128, 256), torch.randint(0, n_classes, (128,))) for _ in range(10)])
    confidences = []
    for _ in range(5):
        probabilities = la(torch.randn(8, 256).cuda())
        confidences.append(probabilities.max(-1).values.mean().item())
    return {"batches": len(confidences)}


# A neural field with proposal sampling: training on random rays, evaluation of whole images in chunks of rays.


class RaySamples:
    def __init__(self, origins, directions, bins):
        self.origins, self.directions = origins, directions
        self.starts, self.ends = bins[:, :-1].contiguous(), bins[:, 1:].contiguous()
        self.deltas = self.ends - self.starts

    def get_positions(self):
        middle = (self.starts + self.ends) / 2
        return self.origins[:, None] + self.directions[:, None] * middle[..., None]

    def get_weights(self, densities):
        delta_density = self.deltas * densities
        transmittance = torch.exp(-torch.cumsum(torch.cat([torch.zeros_like(densities[:, :1]), delta_density[:, :-1]], 1), 1))
        return (1 - torch.exp(-delta_density)) * transmittance


class DensityField(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(3, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def density_fn(self, positions):
        return F.softplus(self.mlp(positions)).squeeze(-1)


def pdf_sample(ray_samples, weights, num_samples):
    bins = torch.cat([ray_samples.starts, ray_samples.ends[:, -1:]], 1)
    cdf = torch.cumsum(weights / weights.sum(1, keepdim=True), 1)
    u = torch.linspace(0, 1, num_samples + 1, device=bins.device).expand(len(bins), -1).contiguous()
    indices = torch.searchsorted(cdf.detach(), u).clamp(0, bins.shape[1] - 1)
    return RaySamples(ray_samples.origins, ray_samples.directions, bins.gather(1, indices))


class NerfactoModel(nn.Module):
    def __init__(
        self, num_proposal_samples=(256, 96), num_nerf_samples=48, eval_num_rays_per_chunk=4096, samples_in_training_only=False
    ):
        super().__init__()
        self.proposal_networks = nn.ModuleList([DensityField() for _ in num_proposal_samples])
        self.num_samples = [*num_proposal_samples, num_nerf_samples]
        self.density_field = DensityField(32)
        self.rgb_net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3), nn.Sigmoid())
        self.eval_num_rays_per_chunk, self.samples_in_training_only = eval_num_rays_per_chunk, samples_in_training_only

    def get_outputs(self, origins, directions):
        bins = torch.linspace(0.05, 1000, self.num_samples[0] + 1, device=origins.device).expand(len(origins), -1)
        ray_samples = RaySamples(origins, directions, bins)
        weights_list, ray_samples_list = [], []
        for network, num_samples in zip(self.proposal_networks, self.num_samples[1:]):
            weights = ray_samples.get_weights(network.density_fn(ray_samples.get_positions()))
            weights_list.append(weights)
            ray_samples_list.append(ray_samples)
            ray_samples = pdf_sample(ray_samples, weights, num_samples)
        positions = ray_samples.get_positions()
        weights = ray_samples.get_weights(self.density_field.density_fn(positions))
        weights_list.append(weights)
        ray_samples_list.append(ray_samples)
        rgb = self.rgb_net(torch.cat([positions, directions[:, None].expand_as(positions)], -1))
        depth = (weights * (ray_samples.starts + ray_samples.ends) / 2).sum(1)
        outputs = {"rgb": (weights[..., None] * rgb).sum(1), "accumulation": weights.sum(1), "depth": depth}
        if self.training or not self.samples_in_training_only:
            outputs["weights_list"] = weights_list
            outputs["ray_samples_list"] = ray_samples_list
        return outputs

    def get_loss(self, outputs, image):
        target = outputs["weights_list"][-1].detach().mean(1, keepdim=True)
        interlevel_loss = sum(
            (w.mean(1, keepdim=True) - target).clamp(min=0).square().mean() for w in outputs["weights_list"][:-1]
        )
        return F.mse_loss(outputs["rgb"], image) + interlevel_loss

    @torch.no_grad()
    def get_outputs_for_camera_ray_bundle(self, origins, directions):
        outputs_lists = {}
        for i in range(0, len(origins), self.eval_num_rays_per_chunk):
            chunk = slice(i, i + self.eval_num_rays_per_chunk)
            for output_name, output in self.get_outputs(origins[chunk], directions[chunk]).items():
                outputs_lists.setdefault(output_name, []).append(output)
        return {name: torch.cat(chunks) for name, chunks in outputs_lists.items() if torch.is_tensor(chunks[0])}


@expected("kept_tensors", fix=r"\.cpu\(\)|\bdel\b|clear|None", thread="nerfstudio-project/nerfstudio#766", memory=1000)
def train_nerfacto(fixed=False):
    """`get_outputs` puts `weights_list` and `ray_samples_list` (weights and bins of 400 samples per ray) into the outputs in evaluation
    too, where nothing uses them; `get_outputs_for_camera_ray_bundle` keeps every output of every chunk in `outputs_lists`, so the sample
    info of the whole image piles up on the GPU. Cured by: the sample info is only stored in the outputs when training.
    """
    model = NerfactoModel(samples_in_training_only=fixed).cuda()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(5):
        outputs = model.get_outputs(torch.randn(1024, 3).cuda(), F.normalize(torch.randn(1024, 3)).cuda())
        loss = model.get_loss(outputs, torch.rand(1024, 3).cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    del outputs, loss
    model.eval()
    height, width = 360, 480
    origins, directions = torch.zeros(height * width, 3).cuda(), F.normalize(torch.randn(height * width, 3)).cuda()
    image = model.get_outputs_for_camera_ray_bundle(origins, directions)["rgb"].view(height, width, 3)
    return {"psnr": (-10 * torch.log10(F.mse_loss(image, torch.rand_like(image)))).item()}
