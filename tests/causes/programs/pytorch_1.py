"""Programs after public threads about general use of PyTorch: engines, meta learning, tuning, data sets, checkpoints."""

import os
import tempfile
from collections import defaultdict
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from expected import expected

# Engines with events: a segmentation network is evaluated over a loader.


class Events:
    STARTED = "started"
    ITERATION_STARTED = "iteration_started"
    ITERATION_COMPLETED = "iteration_completed"
    COMPLETED = "completed"


class Engine:
    def __init__(self, process_function):
        self._process_function = process_function
        self._event_handlers = defaultdict(list)
        self.state = SimpleNamespace(iteration=0, epoch=0, batch=None, output=None, metrics={})

    def on(self, event_name):
        def decorator(handler):
            self._event_handlers[event_name].append(handler)
            return handler

        return decorator

    def _fire_event(self, event_name):
        for handler in self._event_handlers[event_name]:
            handler(self)

    def _run_once_on_dataset(self, data):
        for batch in data:
            self.state.batch = batch
            self.state.iteration += 1
            self._fire_event(Events.ITERATION_STARTED)
            self.state.output = self._process_function(self, batch)
            self._fire_event(Events.ITERATION_COMPLETED)

    def run(self, data, max_epochs=1):
        self._fire_event(Events.STARTED)
        for self.state.epoch in range(max_epochs):
            self._run_once_on_dataset(data)
        self._fire_event(Events.COMPLETED)
        return self.state


class ConfusionMatrix:
    def __init__(self, num_classes):
        self.num_classes = num_classes

    def reset(self, engine):
        self.confusion_matrix = torch.zeros(self.num_classes, self.num_classes, dtype=torch.long, device="cuda")

    def iteration_completed(self, engine):
        y_pred, y = engine.state.output
        indices = self.num_classes * y.flatten() + y_pred.argmax(1).flatten()
        counts = torch.zeros(self.num_classes**2, dtype=torch.long, device="cuda")
        counts.scatter_add_(0, indices, torch.ones_like(indices))
        self.confusion_matrix += counts.view_as(self.confusion_matrix)

    def completed(self, engine):
        engine.state.metrics["cm"] = self.confusion_matrix.cpu()

    def attach(self, engine):
        engine.on(Events.STARTED)(self.reset)
        engine.on(Events.ITERATION_COMPLETED)(self.iteration_completed)
        engine.on(Events.COMPLETED)(self.completed)


class SegmentationModel(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 32, 3, 4, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU())
        self.head = nn.Conv2d(64, num_classes, 1)

    def forward(self, x):
        return F.interpolate(self.head(self.backbone(x)), x.shape[-2:], mode="bilinear", align_corners=False)


@expected("kept_tensors", fix=r"None|\bdel\b", thread="pytorch/ignite#476", memory=1000)
def evaluate_segmentation(fixed=False, num_classes=50, size=640):
    """The engine keeps the last iteration's `(y_pred, y)` in `engine.state.output` while `update_fn` computes the next one, so the old
    class probabilities (312 MiB) lie in memory beside the new logits and probabilities. Cured by: Set `engine.state.output = None` at
    ITERATION_STARTED, before the next batch is processed.
    """
    model = SegmentationModel(num_classes).cuda().eval()

    def update_fn(engine, batch):
        with torch.no_grad():
            x, y = (t.cuda(non_blocking=True) for t in batch)
            y_pred = model(x).softmax(1)
        return y_pred, y

    evaluator = Engine(update_fn)
    ConfusionMatrix(num_classes).attach(evaluator)

    if fixed:

        @evaluator.on(Events.ITERATION_STARTED)
        def clear_state_output(engine):
            engine.state.output = None

    data = [(torch.rand(4, 3, size, size), torch.randint(0, num_classes, (4, size, size))) for _ in range(3)]
    state = evaluator.run(data, max_epochs=2)
    return state.metrics["cm"]


# Few-shot learning: a classifier is adapted to each task in many steps, then evaluated on the task's other images.


def clone_module(module):
    clone = module.__new__(type(module))
    clone.__dict__ = module.__dict__.copy()
    clone._parameters = {k: None if p is None else p.clone() for k, p in module._parameters.items()}
    clone._buffers = {k: None if b is None else b.clone() for k, b in module._buffers.items()}
    clone._modules = {k: clone_module(m) for k, m in module._modules.items()}
    return clone


def update_module(module, updates):
    for k, p in module._parameters.items():
        if p is not None:
            module._parameters[k] = p + updates[p]
    for child in module._modules.values():
        update_module(child, updates)


class MAML(nn.Module):
    def __init__(self, model, lr, first_order=False):
        super().__init__()
        self.module, self.lr, self.first_order = model, lr, first_order

    def forward(self, *args):
        return self.module(*args)

    def clone(self):
        return MAML(clone_module(self.module), self.lr, self.first_order)

    def adapt(self, loss, first_order=None):
        first_order = self.first_order if first_order is None else first_order
        params = [p for m in self.module.modules() for p in m._parameters.values() if p is not None]
        grads = torch.autograd.grad(loss, params, retain_graph=not first_order, create_graph=not first_order)
        update_module(self.module, {p: -self.lr * g for p, g in zip(params, grads)})


def conv_block(in_channels, out_channels):
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, padding=1), nn.GroupNorm(8, out_channels), nn.ReLU(), nn.MaxPool2d(2)
    )


def fast_adapt(batch, learner, loss, adaptation_steps):
    adaptation_data, adaptation_labels, evaluation_data, evaluation_labels = (t.cuda() for t in batch)
    for step in range(adaptation_steps):
        adaptation_error = loss(learner(adaptation_data), adaptation_labels)
        learner.adapt(adaptation_error)
    predictions = learner(evaluation_data)
    return loss(predictions, evaluation_labels)


@expected("create_graph", fix="create_graph=False|detach", thread="learnables/learn2learn#393", memory=1000)
def meta_train_many_steps(fixed=False, ways=5, shots=5, adaptation_steps=25, meta_batch_size=2):
    """Each `learner.adapt()` takes its gradient with `create_graph=True` (second-order MAML), so the forward and backward of every one of
    the 25 adaptation steps stay in memory until `evaluation_error.backward()`; it doesn't fit with that many steps. Cured by:
    `first_order=True` in `MAML`/`adapt`, since one need not back-propagate through the adaptation (or fewer adaptation steps).
    """
    model = nn.Sequential(
        conv_block(3, 32), conv_block(32, 32), conv_block(32, 32), conv_block(32, 32), nn.Flatten(), nn.Linear(32 * 25, ways)
    ).cuda()
    maml = MAML(model, lr=0.01, first_order=fixed)
    opt = torch.optim.Adam(maml.parameters(), 3e-3)
    loss = nn.CrossEntropyLoss()
    labels = torch.arange(ways).repeat(shots)
    for iteration in range(1):
        opt.zero_grad()
        for task in range(meta_batch_size):
            learner = maml.clone()
            batch = torch.randn(ways * shots, 3, 84, 84), labels, torch.randn(ways * shots, 3, 84, 84), labels
            evaluation_error = fast_adapt(batch, learner, loss, adaptation_steps)
            evaluation_error.backward()
        opt.step()


# A trainer that first looks for the largest batch size and then trains.


class TextClassifier(nn.Module):
    def __init__(self, vocab=60000, dim=768, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.encoder = nn.Sequential(*[nn.Sequential(nn.Linear(dim, dim), nn.GELU()) for _ in range(layers)])
        self.classifier = nn.Linear(dim, 2)
        self.batch_size = 2

    def training_step(self, batch):
        tokens, labels = batch
        return F.cross_entropy(self.classifier(self.encoder(self.embedding(tokens)).mean(1)), labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-5)

    def train_dataloader(self):
        for _ in range(6):
            yield torch.randint(0, 60000, (self.batch_size, 64)), torch.randint(0, 2, (self.batch_size,))


class LightningOptimizer:
    def __init__(self, optimizer):
        self._optimizer = optimizer

    @property
    def lr(self):
        return self._optimizer.param_groups[0]["lr"]


class Trainer:
    def __init__(self, max_steps, callbacks=()):
        self.max_steps, self.callbacks = max_steps, list(callbacks)
        self.optimizers, self._lightning_optimizers = [], None
        self.logged = []

    @property
    def lightning_optimizers(self):
        if self._lightning_optimizers is None:
            self._lightning_optimizers = {i: LightningOptimizer(opt) for i, opt in enumerate(self.optimizers)}
        return self._lightning_optimizers

    def fit(self, model):
        self.optimizers = [model.configure_optimizers()]
        for step, batch in zip(range(self.max_steps), model.train_dataloader()):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
                model.training_step([t.cuda() for t in batch]).backward()
                optimizer.step()
        self.logged.append({i: opt.lr for i, opt in self.lightning_optimizers.items()})


class BatchSizeScaler:
    def __init__(self, steps_per_trial=2, max_trials=5, reset_optimizers=False):
        self.steps_per_trial, self.max_trials, self.reset_optimizers = steps_per_trial, max_trials, reset_optimizers

    def scale_batch_size(self, trainer, model):
        dumped = {"max_steps": trainer.max_steps, "callbacks": trainer.callbacks, "optimizers": trainer.optimizers}
        state_dict = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
        trainer.max_steps, trainer.callbacks = self.steps_per_trial, []
        for _ in range(self.max_trials):
            trainer.optimizers, trainer._lightning_optimizers = [], None
            try:
                trainer.fit(model)
            except torch.OutOfMemoryError:
                model.batch_size //= 2
                break
            model.batch_size *= 2
        model.load_state_dict(state_dict)
        for name, value in dumped.items():
            setattr(trainer, name, value)
        if self.reset_optimizers:
            trainer._lightning_optimizers = None


@expected("earlier_optimizer", fix="_lightning_optimizers", thread="Lightning-AI/pytorch-lightning#6570", memory=1200)
def tune_and_fit(fixed=False):
    """After the batch size finder, `trainer._lightning_optimizers` still refers to the AdamW of its last trial, so that optimizer's state
    (two values for each weight, about 350 MiB) stays on the GPU beside the state of the new AdamW of `trainer.fit`. Cured by: Reset
    `trainer._lightning_optimizers` when the finder restores the trainer.
    """
    model = TextClassifier().cuda()
    trainer = Trainer(max_steps=6)
    BatchSizeScaler(reset_optimizers=fixed).scale_batch_size(trainer, model)
    trainer.fit(model)
    return trainer.logged


# Antibody evolution: how selection acts on each site of a parent sequence, learned from pairs of parents and children.


class DNSMDataset(torch.utils.data.Dataset):
    def __init__(self, n_pairs, max_len):
        super().__init__()
        self.aa_parents_idxs = torch.randint(0, 20, (n_pairs, max_len))
        self.aa_subs_indicators = (torch.rand(n_pairs, max_len) < 0.05).float()
        self.masks = torch.ones(n_pairs, max_len, dtype=torch.bool)
        self.log_neutral_aa_probs = torch.rand(n_pairs, max_len, 20)
        self.branch_lengths = torch.rand(n_pairs)

    def __len__(self):
        return len(self.aa_parents_idxs)

    def __getitem__(self, idx):
        return (
            self.aa_parents_idxs[idx],
            self.aa_subs_indicators[idx],
            self.masks[idx],
            self.log_neutral_aa_probs[idx],
            self.branch_lengths[idx],
        )

    def to(self, device):
        for name in ("aa_parents_idxs", "aa_subs_indicators", "masks", "log_neutral_aa_probs", "branch_lengths"):
            setattr(self, name, getattr(self, name).to(device))


class TransformerBinarySelectionModel(nn.Module):
    def __init__(self, d_model=128, nhead=8, layers=3):
        super().__init__()
        self.amino_acid_embedding = nn.Embedding(20, d_model)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(d_model, nhead, 4 * d_model, dropout=0.1, batch_first=True) for _ in range(layers)
        )
        self.linear = nn.Linear(d_model, 1)

    def forward(self, idxs):
        x = self.amino_acid_embedding(idxs)
        for block in self.blocks:
            x = block(x)
        return F.logsigmoid(self.linear(x).squeeze(-1))


class DNSMBurrito:
    def __init__(self, train_dataset, val_dataset, model, device, dataset_device, batch_size=48):
        self.model, self.device, self.batch_size = model.to(device), device, batch_size
        self.train_dataset, self.val_dataset = train_dataset, val_dataset
        for dataset in (train_dataset, val_dataset):
            dataset.to(dataset_device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def batches(self, dataset, limit):
        for start in torch.randperm(len(dataset) - self.batch_size)[:limit].tolist():
            yield [t.to(self.device) for t in dataset[start : start + self.batch_size]]

    def loss_of_batch(self, batch):
        idxs, subs, masks, log_neutral_aa_probs, branch_lengths = batch
        log_selection = self.model(idxs)
        neutral_sub = (1 - log_neutral_aa_probs.gather(-1, idxs[..., None]).squeeze(-1)).clamp(1e-4, 1 - 1e-4)
        predictions = (neutral_sub * branch_lengths[:, None] * log_selection.exp()).clamp(1e-4, 1 - 1e-4)
        return (F.binary_cross_entropy(predictions, subs, reduction="none") * masks).mean()

    def train(self, epochs, batches_per_epoch=5):
        for _ in range(epochs):
            self.model.train()
            for batch in self.batches(self.train_dataset, batches_per_epoch):
                self.optimizer.zero_grad()
                self.loss_of_batch(batch).backward()
                self.optimizer.step()
            self.model.eval()
            with torch.no_grad():
                for batch in self.batches(self.val_dataset, 2):
                    self.loss_of_batch(batch)

    def optimize_branch_lengths(self):
        for dataset in (self.train_dataset, self.val_dataset):
            dataset.branch_lengths = (dataset.branch_lengths.cpu() * 0.9).to(dataset.branch_lengths.device)


@expected("data_on_gpu", fix=r"on the host|\.cpu\(\)|DataLoader|part", thread="matsengrp/netam#119", memory=600)
def train_dnsm(fixed=False, n_pairs=26000, max_len=140):
    """`DNSMBurrito` moves the whole training and validation datasets to the GPU (`dataset.to(device)`), about 400 MiB of which
    `log_neutral_aa_probs` is the largest part, so there is no room left for the training step, although only a batch of 48 is needed at a
    time. Cured by: Datasets stay on the CPU, and only the batches are moved to the GPU.
    """
    train_dataset, val_dataset = DNSMDataset(n_pairs, max_len), DNSMDataset(n_pairs // 4, max_len)
    burrito = DNSMBurrito(
        train_dataset, val_dataset, TransformerBinarySelectionModel(), "cuda", dataset_device="cpu" if fixed else "cuda"
    )
    burrito.train(epochs=1)
    burrito.optimize_branch_lengths()
    burrito.train(epochs=1)


# Reinforcement learning: the training continues from a checkpoint of the algorithm and its optimizer.


class SacAlgorithm(nn.Module):
    def __init__(self, observation_dim=1024, hidden=3100, action_dim=16):
        super().__init__()
        self._actor_network = nn.Sequential(
            nn.Linear(observation_dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, action_dim)
        )
        self._critic_networks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(observation_dim + action_dim, hidden),
                nn.ReLU(),
                nn.Linear(hidden, hidden),
                nn.ReLU(),
                nn.Linear(hidden, 1),
            )
            for _ in range(2)
        )

    def train_step(self, observation, target):
        action = self._actor_network(observation).tanh()
        q_values = [critic(torch.cat((observation, action), -1)).squeeze(-1) for critic in self._critic_networks]
        return sum(F.mse_loss(q, target) for q in q_values) - q_values[0].mean()


class Checkpointer:
    def __init__(self, ckpt_dir, map_location=None, **kwargs):
        self._ckpt_dir, self._map_location, self._modules = ckpt_dir, map_location, kwargs

    def save(self, global_step):
        state = {name: module.state_dict() for name, module in self._modules.items()}
        torch.save({"global_step": global_step, **state}, os.path.join(self._ckpt_dir, "ckpt-latest"))

    def load(self):
        checkpoint = torch.load(os.path.join(self._ckpt_dir, "ckpt-latest"), map_location=self._map_location)
        for name, module in self._modules.items():
            module.load_state_dict(checkpoint[name])
        return checkpoint["global_step"]


def train_iter(algorithm, optimizer, steps, batch_size=256):
    for _ in range(steps):
        loss = algorithm.train_step(torch.randn(batch_size, 1024).cuda(), torch.randn(batch_size).cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()


@expected("loaded_onto_gpu", fix="map_location", thread="HorizonRobotics/alf#1532", memory=720)
def continue_training(fixed=False):
    """`Checkpointer.load` calls `torch.load` without `map_location`, so the whole checkpoint (the algorithm and the optimizer's momentum)
    is loaded onto the GPU, where the running algorithm and its optimizer's state already are. Cured by: `map_location="cpu"` in
    `torch.load`.
    """
    with tempfile.TemporaryDirectory() as root_dir:
        algorithm = SacAlgorithm().cuda()
        optimizer = torch.optim.SGD(algorithm.parameters(), lr=3e-4, momentum=0.9, foreach=False)
        checkpointer = Checkpointer(root_dir, "cpu" if fixed else None, algorithm=algorithm, optimizer=optimizer)
        train_iter(algorithm, optimizer, steps=3)
        checkpointer.save(global_step=3)
        train_iter(algorithm, optimizer, steps=2)
        global_step = checkpointer.load()
        train_iter(algorithm, optimizer, steps=2)
    return global_step


# Attribution: how much each unit of a layer conducts, integrated along the path from a baseline to the input.


class ConvClassifier(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.fc = nn.Linear(32 * 16, classes)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.fc(F.adaptive_avg_pool2d(x, 4).flatten(1))


def compute_layer_gradients_and_eval(forward_fn, layer, inputs, target):
    saved = []
    handle = layer.register_forward_hook(lambda module, args, output: saved.append(output))
    with torch.enable_grad():
        output = forward_fn(inputs)[:, target]
        handle.remove()
        grads = torch.autograd.grad(torch.unbind(output), saved[0])
    return grads[0], saved[0]


class LayerConductance:
    def __init__(self, forward_func, layer, detach_batches=False):
        self.forward_func, self.layer, self.detach_batches = forward_func, layer, detach_batches

    def attribute(self, inputs, baselines, target, n_steps=50, internal_batch_size=None):
        num_examples = inputs.shape[0]
        if internal_batch_size is None:
            return self._attribute(inputs, baselines, target, torch.linspace(0, 1, n_steps + 1).tolist())
        return self._batch_attribution(num_examples, inputs, baselines, target, n_steps, internal_batch_size)

    def _batch_attribution(self, num_examples, inputs, baselines, target, n_steps, internal_batch_size):
        step_count = max(1, internal_batch_size // num_examples)
        alphas = torch.linspace(0, 1, n_steps + 1).tolist()
        total_attr = None
        for i in range(0, n_steps, step_count):
            current_attr = self._attribute(inputs, baselines, target, alphas[i : i + step_count + 1])
            if self.detach_batches:
                current_attr = current_attr.detach()
            total_attr = current_attr if total_attr is None else total_attr + current_attr
        return total_attr

    def _attribute(self, inputs, baselines, target, alphas):
        num_examples = inputs.shape[0]
        scaled_features = torch.cat([baselines + alpha * (inputs - baselines) for alpha in alphas]).requires_grad_()
        layer_gradients, layer_evals = compute_layer_gradients_and_eval(self.forward_func, self.layer, scaled_features, target)
        grad_diffs = layer_evals[num_examples:] - layer_evals[:-num_examples]
        steps = layer_gradients[:-num_examples] * grad_diffs
        return steps.view(-1, num_examples, *steps.shape[1:]).sum(0)


# Ended by signal 11 when it was written: the recorder walked a node that the engine had dropped.
@expected("graph_of_earlier_steps", fix="detach", thread="meta-pytorch/captum#633", memory=1000)
def explain_layer(fixed=False, n_steps=600, internal_batch_size=20):
    model = ConvClassifier().cuda().eval()
    images = torch.rand(2, 3, 96, 96).cuda()
    lc = LayerConductance(model, model.conv2, detach_batches=fixed)
    attributions = lc.attribute(
        images, torch.zeros_like(images), target=3, n_steps=n_steps, internal_batch_size=internal_batch_size
    )
    return attributions.detach().cpu()
