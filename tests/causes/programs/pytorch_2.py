"""Programs after public threads about general use of PyTorch: optimizers, meta learning, scoring, attribution, reporting, functions of one's own, losses."""

import gc
import weakref
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.checkpoint import checkpoint

from expected import expected

# Variational online Gauss-Newton: a Bayesian network whose optimizer has a mean and a precision for every weight.


class BNN(nn.Module):
    def __init__(self, input_size, hidden_sizes, output_size):
        super().__init__()
        sizes = [input_size, *hidden_sizes, output_size]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in zip(sizes, sizes[1:]))

    def forward(self, x):
        activations, linear_combs = [], []
        for i, layer in enumerate(self.layers):
            activations.append(x)
            z = layer(x)
            linear_combs.append(z)
            x = torch.tanh(z) if i < len(self.layers) - 1 else z
        return x, activations, linear_combs


def individual_gradients(activations, linear_grad):
    grad, ggn = [], []
    for a, g in zip(activations, linear_grad):
        grad.append(g.t() @ a)
        ggn.append((g**2).t() @ (a**2))
    return grad, ggn


class VOGN(torch.optim.Optimizer):
    def __init__(
        self, params, train_set_size, detach=False, lr=1e-3, beta=0.99, prior_prec=1.0, prec_init=10.0, num_samples=2
    ):
        super().__init__(params, dict(lr=lr))
        self.train_set_size, self.lr, self.beta, self.num_samples, self.detach = train_set_size, lr, beta, num_samples, detach
        self.prior_prec = prior_prec
        p = parameters_to_vector(self.param_groups[0]["params"]).detach()
        self.state["mu"], self.state["Precision"] = p.clone(), torch.full_like(p, prec_init)

    def step(self, closure):
        parameters = self.param_groups[0]["params"]
        mu, precision = self.state["mu"], self.state["Precision"]
        mu_grad_hat = ggn_hat = 0
        for _ in range(self.num_samples):
            raw_noise = torch.randn_like(mu)
            p = torch.addcdiv(mu, raw_noise, precision.sqrt())
            vector_to_parameters(p, parameters)
            loss, grad, ggn, m = closure()
            grad_vec, ggn_vec = parameters_to_vector(grad).div(m), parameters_to_vector(ggn).div(m)
            if self.detach:
                grad_vec, ggn_vec = grad_vec.detach(), ggn_vec.detach()
            mu_grad_hat, ggn_hat = mu_grad_hat + grad_vec, ggn_hat + ggn_vec
        scale = self.train_set_size / self.num_samples
        precision = precision * self.beta + (ggn_hat * scale + self.prior_prec) * (1 - self.beta)
        self.state["Precision"] = precision
        self.state["mu"] = torch.addcdiv(mu, mu_grad_hat * scale + self.prior_prec * mu, precision, value=-self.lr)
        return loss


@expected("graph_of_earlier_steps", fix=r"detach|item\(\)", thread="emtiyaz/vadam#2", memory=1000, held_back=True)
def train_vogn(fixed=False, epochs=3):
    """The gradients and GGN that the closure returns to `VOGN.step` still have a graph (they are made from the activations), so the
    optimizer's `mu` and `Precision` carry the graph of every step so far and memory grows with each step. Cured by: `.detach()` on
    `grad_vec` and `ggn` in the optimizer's step.
    """
    model = BNN(784, [800, 800], 10).cuda()
    optimizer = VOGN(model.parameters(), train_set_size=60000, detach=fixed)
    train_loader = [(torch.randn(256, 784), torch.randint(0, 10, (256,))) for _ in range(20)]
    for epoch in range(epochs):
        running = 0.0
        for x, y in train_loader:
            x, y = x.cuda(), y.cuda()

            def closure():
                logits, activations, linear_combs = model(x)
                loss = F.cross_entropy(logits, y, reduction="sum")
                linear_grad = torch.autograd.grad(loss, linear_combs)
                grad, ggn = individual_gradients(activations, linear_grad)
                return loss.detach(), grad, ggn, len(x)

            running += optimizer.step(closure).item()
    return running


# Gradient-based meta learning: a stateless copy of the network is made for every task, whose weights are replaced step by step.


def monkeypatch(module):
    params_box = [dict(module.named_parameters())]

    class MonkeyPatched(nn.Module):
        @property
        def fast_params(self):
            return params_box[-1]

        def update_params(self, fast_params):
            params_box.append(fast_params)

        def parameters(self, time=-1):
            return list(params_box[time].values())

        def forward(self, *args):
            return torch.func.functional_call(module, self.fast_params, args)

    return MonkeyPatched()


class DifferentiableSGD:
    def __init__(self, fmodel, lr):
        self.fmodel, self.lr = fmodel, lr

    def step(self, loss):
        grads = torch.autograd.grad(loss, self.fmodel.parameters(), create_graph=True)
        self.fmodel.update_params({name: p - self.lr * g for (name, p), g in zip(self.fmodel.fast_params.items(), grads)})


@contextmanager
def innerloop_ctx(network, lr):
    fmodel = monkeypatch(network)
    yield fmodel, DifferentiableSGD(fmodel, lr)


class ResidualBlock(nn.Module):
    def __init__(self, in_planes, planes):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(in_planes, planes, 3, padding=1), nn.GroupNorm(4, planes)
        self.conv2, self.norm2 = nn.Conv2d(planes, planes, 3, padding=1), nn.GroupNorm(4, planes)
        self.shortcut = nn.Conv2d(in_planes, planes, 1)

    def forward(self, x):
        out = F.leaky_relu(self.norm1(self.conv1(x)), 0.1)
        out = self.norm2(self.conv2(out)) + self.shortcut(x)
        return F.max_pool2d(F.leaky_relu(out, 0.1), 2)


class GBML:
    def __init__(self, num_way=5, n_inner=5, inner_lr=1e-2):
        self.network = nn.Sequential(
            ResidualBlock(3, 64),
            ResidualBlock(64, 128),
            ResidualBlock(128, 256),
            ResidualBlock(256, 512),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(512, num_way),
        ).cuda()
        self.outer_optimizer = torch.optim.Adam(self.network.parameters(), 1e-3)
        self.n_inner, self.inner_lr = n_inner, inner_lr

    def outer_loop(self, batch):
        loss_log = 0.0
        self.outer_optimizer.zero_grad()
        for train_input, train_target, test_input, test_target in batch:
            with innerloop_ctx(self.network, self.inner_lr) as (fmodel, diffopt):
                for step in range(self.n_inner):
                    diffopt.step(F.cross_entropy(fmodel(train_input), train_target))
                outer_loss = F.cross_entropy(fmodel(test_input), test_target)
                outer_grad = torch.autograd.grad(outer_loss, fmodel.parameters(time=0))
                for p, g in zip(self.network.parameters(), outer_grad):
                    p.grad = g if p.grad is None else p.grad + g
                loss_log += outer_loss.item()
        self.outer_optimizer.step()
        return loss_log / len(batch)


@expected("reference_cycle", fix=r"gc\.collect", thread="sungyubkim/GBML#1", memory=800, held_back=True)
def gbml_train(fixed=False, num_batches=14, batch_size=1, num_way=5, num_shot=1):
    """The stateless copy that `monkeypatch` makes for each task is an instance of a class that is defined inside the function, and that
    class (a reference cycle in itself, as every class is) refers (through the methods' closure, `params_box`) to the fast weights of all
    inner steps; so what a task used is freed only when Python's garbage collector runs, and memory grows from one `outer_loop` to the next.
    Cured by: `gc.collect()` after each `outer_loop`.
    """
    model = GBML(num_way)
    target = torch.arange(num_way).repeat(num_shot).cuda()
    for batch_idx in range(num_batches):
        batch = [
            (
                torch.randn(num_way * num_shot, 3, 32, 32).cuda(),
                target,
                torch.randn(num_way * num_shot, 3, 32, 32).cuda(),
                target,
            )
            for _ in range(batch_size)
        ]
        model.outer_loop(batch)
        if fixed:
            gc.collect()


# A scikit-learn compatible network for labels of many kinds at once, with scores that are computed at the end of each epoch.


class EpochScoring:
    def __init__(self, scoring, name):
        self.scoring, self.name = scoring, name

    def on_epoch_begin(self, net):
        self.y_trues_, self.y_preds_ = [], []

    def on_batch_end(self, net, y, y_pred, training):
        if not training:
            self.y_trues_.append(y)
            self.y_preds_.append(y_pred)

    def on_epoch_end(self, net):
        scores = [self.scoring(y_pred, y.to(y_pred.device)) for y_pred, y in zip(self.y_preds_, self.y_trues_)]
        net.history[-1][self.name] = sum(scores) / len(scores)
        self.y_trues_, self.y_preds_ = [], []


class NeuralNet:
    def __init__(self, module, criterion, lr, callbacks, device="cuda"):
        self.module_, self.criterion_, self.callbacks_, self.device = module.to(device), criterion, callbacks, device
        self.optimizer_ = torch.optim.SGD(self.module_.parameters(), lr)
        self.history = []

    def notify(self, method_name, **kwargs):
        for callback in self.callbacks_:
            getattr(callback, method_name)(self, **kwargs)

    def infer(self, Xi):
        return self.module_(Xi.to(self.device))

    def train_step(self, Xi, yi):
        self.module_.train()
        self.optimizer_.zero_grad()
        y_pred = self.infer(Xi)
        loss = self.criterion_(y_pred, yi.to(self.device))
        loss.backward()
        self.optimizer_.step()
        return {"loss": loss.detach(), "y_pred": y_pred.detach()}

    def validation_step(self, Xi, yi):
        self.module_.eval()
        with torch.no_grad():
            y_pred = self.infer(Xi)
            loss = self.criterion_(y_pred, yi.to(self.device))
        return {"loss": loss, "y_pred": y_pred}

    def run_single_epoch(self, dataset, training, step_fn):
        losses = []
        for Xi, yi in dataset:
            step = step_fn(Xi, yi)
            losses.append(step["loss"].item())
            self.notify("on_batch_end", y=yi, y_pred=step["y_pred"], training=training)
        self.history[-1]["train_loss" if training else "valid_loss"] = sum(losses) / len(losses)

    def fit(self, dataset_train, dataset_valid, epochs):
        for _ in range(epochs):
            self.history.append({})
            self.notify("on_epoch_begin")
            self.run_single_epoch(dataset_train, True, self.train_step)
            self.run_single_epoch(dataset_valid, False, self.validation_step)
            self.notify("on_epoch_end")
        return self


class NeuralNetOffload(NeuralNet):
    def validation_step(self, Xi, yi):
        step = super().validation_step(Xi, yi)
        return {**step, "y_pred": step["y_pred"].cpu()}


def recall_at_one(y_pred, y):
    return y.gather(1, y_pred.argmax(1, keepdim=True)).float().mean().item()


@expected("kept_tensors", fix=r"\.cpu\(\)|\bdel\b|clear|None", thread="skorch-dev/skorch#509", memory=1000, held_back=True)
def fit_multilabel(fixed=False, n_targets=80000, batch_size=64):
    """The callback `EpochScoring` keeps `y_pred` of all validation batches of the epoch on the GPU (`self.y_preds_`), 20 MiB each as there
    are so many targets, until it scores them at the end of the epoch. Cured by: `y_pred` goes to the CPU in `validation_step` (or no
    caching in `EpochScoring`).
    """
    module = nn.Sequential(nn.Linear(300, 64), nn.ReLU(), nn.Linear(64, n_targets))
    cls = NeuralNetOffload if fixed else NeuralNet
    net = cls(module, nn.BCEWithLogitsLoss(), lr=0.1, callbacks=[EpochScoring(recall_at_one, "valid_recall")])
    y = torch.zeros(batch_size, n_targets, dtype=torch.bool)
    y[:, ::500] = True
    y = y.float()
    train = [(torch.randn(batch_size, 300), y) for _ in range(4)]
    valid = [(torch.randn(batch_size, 300), y) for _ in range(44)]
    net.fit(train, valid, epochs=1)
    return net.history


# Relations in a language model: the map from a subject to an object is approximated by its Jacobian at some samples.


class DecoderLayer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attention = (q @ k.transpose(-1, -2) / (d // self.heads) ** 0.5).softmax(-1)
        x = x + self.out((attention @ v).transpose(1, 2).reshape(b, n, d))
        return x + self.mlp(self.ln_2(x))


class LanguageModel(nn.Module):
    def __init__(self, vocab=5000, dim=256, layers=6, heads=8):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.h = nn.ModuleList(DecoderLayer(dim, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(dim)


class Order1ApproxOutput(NamedTuple):
    h: torch.Tensor
    z: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    metadata: dict


def order_1_approx(mt, prompt_ids, h_index, h_layer, z_layer, detach):
    x = mt.wte(prompt_ids)
    for layer in mt.h[:h_layer]:
        x = layer(x)
    h = x[0, h_index]

    def compute_z_from_h(h):
        states = torch.cat((x[:, :h_index], h[None, None], x[:, h_index + 1 :]), 1)
        for layer in mt.h[h_layer:z_layer]:
            states = layer(states)
        return mt.ln_f(states)[0, -1]

    z = compute_z_from_h(h)
    weight = torch.stack([torch.autograd.grad(z[i], h, retain_graph=True)[0] for i in range(0, len(z), 8)])
    jh = weight @ h
    bias = z[::8] - jh
    if detach:
        h, z, weight, bias, jh = (t.detach().clone() for t in (h, z, weight, bias, jh))
    return Order1ApproxOutput(h=h, z=z, weight=weight, bias=bias, metadata={"Jh": jh})


class JacobianIclMeanEstimator:
    def __init__(self, mt, h_layer, z_layer, detach):
        self.mt, self.h_layer, self.z_layer, self.detach = mt, h_layer, z_layer, detach

    def __call__(self, train_samples):
        approxes = []
        for prompt_ids, h_index in train_samples:
            approxes.append(order_1_approx(self.mt, prompt_ids, h_index, self.h_layer, self.z_layer, self.detach))
        weight = torch.stack([approx.weight for approx in approxes]).mean(0)
        bias = torch.stack([approx.bias for approx in approxes]).mean(0)
        return weight.detach(), bias.detach(), {"Jh": [approx.metadata["Jh"].detach().norm().item() for approx in approxes]}


@expected("graph_of_earlier_steps", fix=r"detach|item\(\)", thread="evandez/relations#20", memory=1000, held_back=True)
def sweep_relations(fixed=False, n_samples=18):
    """`order_1_approx` returns `h`, `z`, `bias` and `Jh` still attached to the graph of the language model, and the estimator keeps those
    of all samples in `approxes`, so the activations of all samples' forward passes stay in memory. Cured by: `.detach().clone()` of what
    `order_1_approx` returns, `Jh` in `metadata` too.
    """
    mt = LanguageModel().cuda().eval()
    operators = []
    for h_layer in (2, 3):
        estimator = JacobianIclMeanEstimator(mt, h_layer, 6, detach=fixed)
        train_samples = [(torch.randint(0, 5000, (1, 380)).cuda(), 20 + i) for i in range(n_samples)]
        operators.append(estimator(train_samples))
    return operators


# Relevance propagation: rules are hooked into the layers of a network while a composite is active.


class Hook:
    def __init__(self, weak):
        self.weak = weak
        self.stored_tensors, self.handles = {}, []

    def pre_forward(self, module, inputs):
        self.stored_tensors["input"] = inputs[0]

    def post_forward(self, module, inputs, output):
        hook_ref = weakref.ref(self) if self.weak else (lambda: self)

        def wrapper(grad_input, grad_output):
            return hook_ref().backward(module, grad_input, grad_output)

        self.stored_tensors["output"] = output
        output.grad_fn.register_hook(wrapper)

    def backward(self, module, grad_input, grad_output):
        inputs = self.stored_tensors["input"].detach()
        scale = grad_output[0].abs().mean() / (inputs.abs().mean() + 1e-6)
        return tuple(None if g is None else g * scale if g.shape == inputs.shape else g for g in grad_input)

    def register(self, module):
        self.handles += [module.register_forward_pre_hook(self.pre_forward), module.register_forward_hook(self.post_forward)]

    def remove(self):
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        if self.weak:
            self.stored_tensors.clear()


class EpsilonPlus:
    def __init__(self, weak_references=False):
        self.weak_references = weak_references
        self.hooks = []

    @contextmanager
    def context(self, model):
        for module in model.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                hook = Hook(self.weak_references)
                hook.register(module)
                self.hooks.append(hook)
        yield model
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()


def vgg_features(*widths):
    layers, channels = [], 3
    for width in widths:
        layers += [
            nn.Conv2d(channels, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
        channels = width
    return nn.Sequential(*layers)


@expected("reference_cycle", fix=r"gc\.collect|weakref", thread="chr5tphr/zennit#13", memory=1000, held_back=True)
def propagate_relevance(fixed=False, images=24):
    """Each `Hook` keeps the layer's input and output in `stored_tensors`, and the backward function it registered on `output.grad_fn`
    refers to the hook (a reference cycle), so after the context is left the activations of each image stay in memory. Cured by: Clear the
    stored tensors when the hooks are removed, and let the backward wrapper hold only a weak reference to the hook.
    """
    model = (
        nn.Sequential(
            vgg_features(64, 128, 256),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(4096, 512),
            nn.ReLU(),
            nn.Linear(512, 100),
        )
        .cuda()
        .eval()
    )
    eye = torch.eye(100, device="cuda")
    heatmaps = []
    for i in range(images):
        data = torch.randn(1, 3, 224, 224).cuda().requires_grad_()
        composite = EpsilonPlus(weak_references=fixed)
        with composite.context(model) as modified:
            pred = modified(data)
            torch.autograd.backward((pred,), (eye[[i]],))
        heatmaps.append(data.grad.sum(1).detach().cpu().numpy())
    return heatmaps


# Values are reported from within the model and averaged over an interval by the trainer's log.


class Reporter:
    current = None

    def __init__(self, copy):
        self.copy, self.observation = copy, {}

    def __enter__(self):
        Reporter.current, self.observation = self, {}
        return self

    def __exit__(self, *_):
        Reporter.current = None

    def report(self, values):
        self.observation.update({name: self.copy(value) for name, value in values.items()})


def report(values):
    Reporter.current.report(values)


class DictSummary:
    def __init__(self):
        self._x, self._n = {}, 0

    def add(self, observation):
        for name, value in observation.items():
            self._x[name] = self._x[name] + value if name in self._x else value
        self._n += 1

    def compute_mean(self):
        return {name: (x / self._n).item() for name, x in self._x.items()}


class ExtensionsManager:
    def __init__(self, reporter, log_interval):
        self.reporter, self.log_interval, self.iteration = reporter, log_interval, 0
        self.summary, self.log = DictSummary(), []

    @contextmanager
    def run_iteration(self):
        with self.reporter:
            yield
        self.iteration += 1
        self.summary.add(self.reporter.observation)
        if self.iteration % self.log_interval == 0:
            self.log.append(self.summary.compute_mean())
            self.summary = DictSummary()


class Denoiser(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 3, 3, padding=1),
        )

    def forward(self, noisy, clean):
        restored = noisy - self.body(noisy)
        loss = F.l1_loss(restored, clean)
        psnr = -10 * torch.log10((restored.clamp(0, 1) - clean).square().mean())
        report({"loss": loss, "psnr": psnr})
        return loss


@expected("graph_of_earlier_steps", fix=r"detach|item\(\)", thread="pfnet/pytorch-pfn-extras#49", memory=1000, held_back=True)
def train_denoiser(fixed=False, iterations=40, log_interval=40):
    """`Reporter.report` copies values with `clone()`, which keeps their graph; the `DictSummary` of the log adds up `psnr` (and `loss`)
    over 40 iterations, so the tensors that the graph of `psnr` saved (it's never back-propagated) stay for all iterations since the last
    log entry. Cured by: `detach()` instead of `clone()` in the reporter.
    """
    model = Denoiser().cuda()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    manager = ExtensionsManager(Reporter(torch.Tensor.detach if fixed else torch.clone), log_interval)
    clean = torch.rand(32, 3, 192, 192)
    for _ in range(iterations):
        with manager.run_iteration():
            optimizer.zero_grad()
            loss = model((clean + 0.1 * torch.randn(1, 3, 192, 192)).cuda(), clean.cuda())
            loss.backward()
            optimizer.step()
    return manager.log


# Checkpointed stages of a network, within which the cheap part keeps its tensors instead of computing them again.


def keep_activations(pack):
    return torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)


class MixerStage(nn.Module):
    def __init__(self, dim, pack):
        super().__init__()
        self.pack = pack
        self.ln1, self.ln2, self.ln3 = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        h = F.relu(self.ln1(x))
        with keep_activations(self.pack):
            h = F.relu(self.ln2(h))
        return x + self.ln3(h)


class Mixer(nn.Module):
    def __init__(self, dim=256, depth=3, classes=100, pack=lambda x: x):
        super().__init__()
        self.stem = nn.Linear(48, dim)
        self.stages = nn.ModuleList(MixerStage(dim, pack) for _ in range(depth))
        self.head = nn.Linear(dim, classes)

    def forward(self, patches):
        x = self.stem(patches)
        for stage in self.stages:
            x = checkpoint(stage, x, use_reentrant=False)
        return self.head(x.mean(1))


@expected("reference_cycle", fix=r"detach|gc\.collect", thread="pytorch/pytorch#115255", memory=1000, held_back=True)
def train_mixer(fixed=False, steps=30, batch_size=32, patches=196):
    """The pack hook `lambda x: x` in `saved_tensors_hooks` keeps the output of `relu` with its `grad_fn`, which owns it (a cycle that
    nothing can free), when the checkpointed stage is computed again for the backward; so what each recomputation saved there stays forever
    and memory grows at every step. Cured by: The pack hook returns `x.detach()`.
    """
    model = Mixer(pack=(lambda x: x.detach()) if fixed else (lambda x: x)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for step in range(steps):
        images = torch.randn(batch_size, patches, 48).cuda()
        labels = torch.randint(0, 100, (batch_size,)).cuda()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()


# Submanifold convolutions with a function of their own: handwriting is classified from the points that are inked.


class InputLayerFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input_features, weight, rules):
        ctx.rules = rules
        ctx.save_for_backward(input_features, weight)
        ctx.output_features = input_features[rules].mean(1) @ weight
        return ctx.output_features

    @staticmethod
    def backward(ctx, grad_output):
        input_features, weight = ctx.saved_tensors
        grad_output = grad_output * (ctx.output_features != 0)
        gathered = input_features[ctx.rules].mean(1)
        grad_input = torch.zeros_like(input_features)
        grad_input.index_add_(0, ctx.rules[:, 0], grad_output @ weight.t())
        return grad_input, gathered.t() @ grad_output, None


class InputLayerFunctionSaved(InputLayerFunction):
    @staticmethod
    def forward(ctx, input_features, weight, rules):
        ctx.rules = rules
        output_features = input_features[rules].mean(1) @ weight
        ctx.save_for_backward(input_features, weight, output_features)
        return output_features

    @staticmethod
    def backward(ctx, grad_output):
        input_features, weight, output_features = ctx.saved_tensors
        grad_output = grad_output * (output_features != 0)
        grad_input = torch.zeros_like(input_features)
        grad_input.index_add_(0, ctx.rules[:, 0], grad_output @ weight.t())
        return grad_input, input_features[ctx.rules].mean(1).t() @ grad_output, None


class SubmanifoldConvolution(nn.Module):
    def __init__(self, n_in, n_out, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(n_in, n_out) * 0.05)

    def forward(self, features, rules):
        return F.relu(self.function.apply(features, self.weight, rules))


class HandwritingNet(nn.Module):
    def __init__(self, function, classes=183):
        super().__init__()
        self.layers = nn.ModuleList(SubmanifoldConvolution(a, b, function) for a, b in ((3, 32), (32, 64), (64, 64)))
        self.linear = nn.Linear(64, classes)

    def forward(self, features, rules, batch_size):
        for layer in self.layers:
            features = layer(features, rules)
        return self.linear(features.view(batch_size, -1, features.shape[-1]).mean(1))


def inked_points(batch_size, points):
    features = torch.randn(batch_size * points, 3).cuda()
    rules = torch.randint(0, batch_size * points, (batch_size * points, 4)).cuda()
    return features, rules, torch.randint(0, 183, (batch_size,)).cuda()


@expected("output_on_ctx", fix="save_for_backward", thread="pytorch/pytorch#5569", memory=1000, held_back=True)
def classify_handwriting(fixed=False, batch_size=64, points=700):
    """`InputLayerFunction.forward` stores its own output as `ctx.output_features` rather than by `save_for_backward`, which makes a
    reference cycle of output and ctx; in the evaluation no backward runs (and gradients are enabled), so the tensors of every test batch
    leak. Cured by: `ctx.save_for_backward` for the output.
    """
    model = HandwritingNet(InputLayerFunctionSaved if fixed else InputLayerFunction).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        features, rules, y = inked_points(batch_size, points)
        optimizer.zero_grad()
        F.cross_entropy(model(features, rules, batch_size), y).backward()
        optimizer.step()
    model.eval()
    correct = 0
    for _ in range(40):
        features, rules, y = inked_points(batch_size, points)
        predictions = model(features, rules, batch_size)
        correct += (predictions.argmax(1) == y).sum().item()
    return correct


# A small generative transformer in a framework with losses of its own.


class ops:
    @staticmethod
    def one_hot(x, num_classes):
        return F.one_hot(x, num_classes).to(torch.float32)

    @staticmethod
    def sparse_categorical_crossentropy(target, output):
        log_prob = F.log_softmax(output, dim=-1)
        target = ops.one_hot(target, output.shape[-1])
        return -torch.sum(target * log_prob, dim=-1)

    @staticmethod
    def native_sparse_categorical_crossentropy(target, output):
        return F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="none").view_as(target)


class TokenAndPositionEmbedding(nn.Module):
    def __init__(self, vocabulary_size, sequence_length, embedding_dim):
        super().__init__()
        self.token_embedding, self.position_embedding = nn.Embedding(vocabulary_size, embedding_dim), nn.Embedding(
            sequence_length, embedding_dim
        )

    def forward(self, x):
        return self.token_embedding(x) + self.position_embedding(torch.arange(x.shape[1], device=x.device))


class MiniGPT(nn.Module):
    def __init__(self, vocabulary_size, sequence_length, embedding_dim=256, layers=2):
        super().__init__()
        self.embedding = TokenAndPositionEmbedding(vocabulary_size, sequence_length, embedding_dim)
        self.decoders = nn.ModuleList(
            nn.TransformerEncoderLayer(embedding_dim, 4, 512, batch_first=True) for _ in range(layers)
        )
        self.dense = nn.Linear(embedding_dim, vocabulary_size)

    def forward(self, x):
        x = self.embedding(x)
        for decoder in self.decoders:
            x = decoder(x)
        return self.dense(x)


class Model:
    def __init__(self, network):
        self.network = network

    def compile(self, optimizer, loss):
        self.optimizer, self.loss = optimizer, loss

    def train_step(self, x, y):
        y_pred = self.network(x)
        loss = self.loss(y, y_pred).mean()
        self.network.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def fit(self, dataset, epochs):
        return [sum(self.train_step(x.cuda(), y.cuda()) for x, y in dataset) / len(dataset) for _ in range(epochs)]


@expected("one_hot", fix="cross_entropy|gather|ind(ex|ices)", thread="keras-team/keras#22169", memory=1200, held_back=True)
def fit_mini_gpt(fixed=False, vocabulary_size=32000, sequence_length=128, batch_size=8):
    """`sparse_categorical_crossentropy` makes a one-hot matrix of the targets (batch x length x 32000 classes, first int64 then float32)
    and multiplies it with the log-probabilities, several tensors of the logits' size where an index would do. Cured by: `F.cross_entropy`
    on the class indices instead of `one_hot` and multiply.
    """
    model = Model(MiniGPT(vocabulary_size, sequence_length).cuda())
    loss = ops.native_sparse_categorical_crossentropy if fixed else ops.sparse_categorical_crossentropy
    model.compile(torch.optim.Adam(model.network.parameters(), 1e-3), loss)
    tokens = torch.randint(0, vocabulary_size, (3, batch_size, sequence_length + 1))
    return model.fit([(t[:, :-1], t[:, 1:]) for t in tokens], epochs=1)


# Keyword spotting: a small residual network on the spectrograms of words, tested at the end.


class SpeechResModel(nn.Module):
    def __init__(self, n_labels=12, n_maps=45, n_layers=4):
        super().__init__()
        self.conv0 = nn.Conv2d(1, n_maps, 3, padding=1, bias=False)
        self.convs = nn.ModuleList(nn.Conv2d(n_maps, n_maps, 3, padding=1, bias=False) for _ in range(n_layers))
        self.bns = nn.ModuleList(nn.BatchNorm2d(n_maps, affine=False) for _ in range(n_layers))
        self.output = nn.Linear(n_maps, n_labels)

    def forward(self, x):
        x = old_x = F.relu(self.conv0(x.unsqueeze(1)))
        for i, (conv, bn) in enumerate(zip(self.convs, self.bns)):
            y = F.relu(conv(x))
            if i % 2:
                y = old_x = y + old_x
            x = bn(y)
        return self.output(x.flatten(2).mean(2))


class SpeechDataset(torch.utils.data.Dataset):
    def __init__(self, size):
        self.audio, self.labels = torch.randn(size, 101, 40), torch.randint(0, 12, (size,))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.audio[index], self.labels[index]


def evaluate(config, model, test_loader):
    model.eval()
    results = []
    for model_in, labels in test_loader:
        with torch.no_grad():
            scores = model(model_in.cuda())
        results.append((scores.argmax(1).cpu() == labels).float().mean().item() * len(labels))
    return sum(results) / len(test_loader.dataset)


@expected("batch_without_gradients", fix="split|part", thread="castorini/honk#106", memory=1000, held_back=True)
def train_keyword_spotter(fixed=False):
    """The test loader has `batch_size=len(test_set)`, so `evaluate` puts the whole test set through the network in one batch. Cured by: A
    small batch size for the test loader, `min(len(test_set), batch_size // 2)`.
    """
    config = {"batch_size": 64, "n_epochs": 1, "lr": 0.1}
    train_set, test_set = SpeechDataset(512), SpeechDataset(600)
    model = SpeechResModel().cuda()
    optimizer = torch.optim.SGD(model.parameters(), config["lr"], nesterov=True, momentum=0.9)
    train_loader = torch.utils.data.DataLoader(train_set, batch_size=config["batch_size"], shuffle=True, drop_last=True)
    test_batch = min(len(test_set), config["batch_size"] // 2) if fixed else len(test_set)
    test_loader = torch.utils.data.DataLoader(test_set, batch_size=test_batch, shuffle=False)
    for epoch in range(config["n_epochs"]):
        model.train()
        for model_in, labels in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(model_in.cuda()), labels.cuda())
            loss.backward()
            optimizer.step()
    return evaluate(config, model, test_loader)
