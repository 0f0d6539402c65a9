"""Programs after public threads about graphs, sound and science."""

import math
import os
import tempfile
import weakref
from collections import OrderedDict, defaultdict
from enum import Enum

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from expected import expected


# ---------------------------------------------------------------- volumes, event-driven engine

class Events(Enum):
    STARTED = "started"
    EPOCH_STARTED = "epoch_started"
    ITERATION_COMPLETED = "iteration_completed"
    EPOCH_COMPLETED = "epoch_completed"
    COMPLETED = "completed"


class EngineState:
    def __init__(self):
        self.epoch = 0
        self.iteration = 0
        self.output = None
        self.metrics = {}


class Engine:
    def __init__(self, process_function, bind=lambda engine: engine):
        self._process_function = process_function
        self._bind = bind
        self._event_handlers = defaultdict(list)
        self.state = EngineState()

    def add_event_handler(self, event, handler, *args):
        self._event_handlers[event].append((handler, (self._bind(self),) + args))

    def fire_event(self, event):
        for handler, args in self._event_handlers[event]:
            first = args[0]() if isinstance(args[0], weakref.ref) else args[0]
            handler(first, *args[1:])

    def run(self, loader, max_epochs):
        self.fire_event(Events.STARTED)
        for self.state.epoch in range(1, max_epochs + 1):
            self.fire_event(Events.EPOCH_STARTED)
            for batch in loader:
                self.state.iteration += 1
                self.state.output = self._process_function(self, batch)
                self.fire_event(Events.ITERATION_COMPLETED)
            self.fire_event(Events.EPOCH_COMPLETED)
        self.fire_event(Events.COMPLETED)
        return self.state


class ProgressBar:
    def __init__(self, every=4):
        self.every = every
        self.lines = []

    def attach(self, engine):
        engine.add_event_handler(Events.ITERATION_COMPLETED, self._update)
        engine.add_event_handler(Events.COMPLETED, self._close, "done")

    def _update(self, engine):
        if engine.state.iteration % self.every == 0:
            self.lines.append(f"[{engine.state.epoch}] it {engine.state.iteration}: {engine.state.output:.3f}")

    def _close(self, engine, word):
        self.lines.append(f"{word} after {engine.state.iteration}")


def create_supervised_trainer(model, optimizer, loss_fn, device, **kwargs):
    def _update(engine, batch):
        model.train()
        optimizer.zero_grad()
        x, y = (t.to(device) for t in batch)
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return Engine(_update, **kwargs)


@expected("reference_cycle", fix=r"gc\.collect|weakref", thread="pytorch/ignite#3438", memory=700)
def ignite_cross_validation(fixed=False):
    """Each run's trainer engine stores itself in the argument tuples of its own event handlers (a circular reference), so after the run
    returns the engine and with it the model, its gradients and the Adam state are not freed (they wait for Python's cyclic garbage
    collector); the second run then runs out of memory. Cured by: The handlers hold a weak reference to the engine (merged PR #3447), so
    that the first run's model and optimizer are freed when it returns.
    """
    device = torch.device("cuda")
    engine_args = {"bind": weakref.ref} if fixed else {}

    def fit_fold(model, fold):
        scans = torch.rand(24, 1, 64, 64, 32)
        labels = torch.round(torch.rand(24, 1))
        loader = DataLoader(TensorDataset(scans, labels), batch_size=6)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        trainer = create_supervised_trainer(model, optimizer, nn.BCEWithLogitsLoss(), device, **engine_args)
        bar = ProgressBar()
        bar.attach(trainer)
        trainer.run(loader, max_epochs=1)
        print(f"fold {fold}", bar.lines[-1])

    for fold in range(4):
        model = nn.Sequential(nn.Flatten(), nn.Linear(64 * 64 * 32, 150), nn.ReLU(), nn.Linear(150, 1))
        model = model.to(device)
        fit_fold(model, fold)
        del model


# ---------------------------------------------------------------- speech brain with a pretrained encoder

class SpeechEncoder(nn.Module):
    def __init__(self, dim=768, layers=8):
        super().__init__()
        self.extractor = nn.ModuleList()
        last = 1
        for kernel, stride in [(10, 5), (3, 2), (3, 2), (3, 2), (3, 2), (2, 2), (2, 2)]:
            self.extractor.append(nn.Conv1d(last, 128, kernel, stride))
            last = 128
        self.project = nn.Linear(128, dim)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 12, 4 * dim, batch_first=True, norm_first=True) for _ in range(layers))

    def forward(self, wavs):
        x = wavs.unsqueeze(1)
        for conv in self.extractor:
            x = F.gelu(conv(x))
        x = self.project(x.transpose(1, 2))
        for block in self.blocks:
            x = block(x)
        return x


class TokenHead(nn.Module):
    def __init__(self, dim=768, tokens=32):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(dim, 256), nn.LeakyReLU(), nn.Linear(256, tokens))

    def forward(self, x):
        return self.layers(x)


def torch_recovery(obj, path, device):
    obj.load_state_dict(torch.load(path, map_location=device), strict=True)


def torch_recovery_host(obj, path, device):
    obj.to("cpu")
    obj.load_state_dict(torch.load(path, map_location="cpu"), strict=True)
    obj.to(device)


class Checkpointer:
    def __init__(self, folder, recover_hook):
        self.folder = folder
        self.recover_hook = recover_hook
        self.recoverables = OrderedDict()

    def add_recoverable(self, name, obj):
        self.recoverables[name] = obj

    def save_checkpoint(self):
        for name, obj in self.recoverables.items():
            torch.save(obj.state_dict(), os.path.join(self.folder, name + ".ckpt"))

    def recover_if_possible(self, device):
        for name, obj in self.recoverables.items():
            path = os.path.join(self.folder, name + ".ckpt")
            if os.path.exists(path):
                self.recover_hook(obj, path, device)


class Brain:
    def __init__(self, modules, opt_class, device, checkpointer):
        self.device = device
        self.modules = nn.ModuleDict(modules).to(device)
        self.opt_class = opt_class
        self.checkpointer = checkpointer

    def on_fit_start(self):
        self.optimizer = self.opt_class(self.modules.parameters())
        self.checkpointer.recover_if_possible(self.device)

    def fit(self, epochs, train_set):
        self.on_fit_start()
        for _ in range(epochs):
            self.modules.train()
            for batch in train_set:
                self.fit_batch(batch)

    def fit_batch(self, batch):
        predictions = self.compute_forward(batch)
        loss = self.compute_objectives(predictions, batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach().cpu()


class ASR(Brain):
    def compute_forward(self, batch):
        wavs, _ = batch
        feats = self.modules["encoder"](wavs.to(self.device))
        return self.modules["head"](feats)

    def compute_objectives(self, predictions, batch):
        _, tokens = batch
        tokens = tokens.to(self.device)
        return F.cross_entropy(predictions[:, : tokens.shape[1]].flatten(0, 1), tokens.flatten())


@expected("loaded_onto_gpu", fix="map_location", thread="speechbrain/speechbrain#1963", memory=500)
def speechbrain_resume(fixed=False):
    """When it starts from a checkpoint, the recovery loads all the parameters of the checkpoint onto the GPU while the randomly initialized
    model (also held by the optimizer) is already there: for a moment the model is there twice. Cured by: The model goes to the CPU and the
    checkpoint is loaded there (map_location cpu), then the model goes back to the GPU.
    """
    device = torch.device("cuda:0")
    modules = {"encoder": SpeechEncoder(), "head": TokenHead()}
    modules["encoder"].requires_grad_(False)
    train_set = [(torch.randn(4, 48000), torch.randint(0, 32, (4, 100))) for _ in range(6)]
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = Checkpointer(folder, torch_recovery_host if fixed else torch_recovery)
        for name, module in modules.items():
            checkpointer.add_recoverable(name, module)
        checkpointer.save_checkpoint()
        brain = ASR(modules, lambda params: torch.optim.Adam(params, lr=1e-4), device, checkpointer)
        brain.fit(2, train_set)


# ---------------------------------------------------------------- learner that tags the frames of a test set

class MelClips(Dataset):
    def __init__(self, n, frames=200, classes=527):
        self.n, self.frames, self.classes = n, frames, classes

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        rng = np.random.default_rng(i)
        return (torch.from_numpy(rng.standard_normal((64, self.frames), dtype=np.float32)),
                torch.from_numpy(rng.integers(0, 2, self.classes).astype(np.float32)))


class FrameTagger(nn.Module):
    def __init__(self, mels=64, width=256, classes=527):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(mels, width, 5, padding=2), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Conv1d(width, width, 5, padding=2), nn.BatchNorm1d(width), nn.ReLU())
        self.head = nn.Conv1d(width, classes, 1)

    def forward(self, x):
        return torch.sigmoid(self.head(self.body(x)))


def to_np(v):
    if isinstance(v, (list, tuple)):
        return [to_np(x) for x in v]
    return v.cpu().numpy() if torch.is_tensor(v) else v


def predict_with_targs(model, loader, device):
    model.eval()
    res = []
    with torch.no_grad():
        for x, y in loader:
            res.append([model(x.to(device)), y.to(device)])
    preds, targs = zip(*res)
    return to_np(torch.cat(preds)), to_np(torch.cat(targs))


def predict_with_targs_np(model, loader, device):
    model.eval()
    res = []
    with torch.no_grad():
        for x, y in loader:
            res.append([to_np(model(x.to(device))), to_np(y.to(device))])
    preds, targs = zip(*res)
    return np.concatenate(preds), np.concatenate(targs)


class Learner:
    def __init__(self, model, train_dl, test_dl, predictor):
        self.device = torch.device("cuda")
        self.model = model.to(self.device)
        self.train_dl, self.test_dl = train_dl, test_dl
        self.predictor = predictor

    def fit(self, lr, epochs):
        opt = torch.optim.SGD(self.model.parameters(), lr, momentum=0.9)
        self.model.train()
        for _ in range(epochs):
            for x, y in self.train_dl:
                clip = self.model(x.to(self.device)).mean(-1)
                loss = F.binary_cross_entropy(clip, y.to(self.device))
                opt.zero_grad()
                loss.backward()
                opt.step()

    def predict(self, is_test=False):
        preds, _ = self.predictor(self.model, self.test_dl if is_test else self.train_dl, self.device)
        return preds


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="fastai/fastai#483", memory=200)
def fastai_test_set(fixed=False):
    """`predict_with_targs` keeps the predictions of every batch of a large test set on the GPU in a list and brings them to the CPU only
    once, at the end, so memory grows with the size of the test set. Cured by: `to_np()` (copy to the CPU) for each batch rather than once
    for the final result.
    """
    learn = Learner(FrameTagger(), DataLoader(MelClips(16), batch_size=4), DataLoader(MelClips(24 * 16), batch_size=16),
                    predict_with_targs_np if fixed else predict_with_targs)
    learn.fit(1e-2, 2)
    probs = learn.predict(is_test=True)
    print(probs.shape)


# ---------------------------------------------------------------- end-to-end ASR training from kaldi-like features

class MultiHeadedAttention(nn.Module):
    def __init__(self, heads, dim, dropout=0.1):
        super().__init__()
        self.h, self.d_k = heads, dim // heads
        self.linear_q, self.linear_k, self.linear_v = (nn.Linear(dim, dim) for _ in range(3))
        self.linear_out = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, query, key, mask):
        b = query.size(0)
        q, k, v = (lin(x).view(b, -1, self.h, self.d_k).transpose(1, 2)
                   for lin, x in ((self.linear_q, query), (self.linear_k, key), (self.linear_v, key)))
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)
        scores = scores.masked_fill(~mask.unsqueeze(1), -1e9)
        attn = self.dropout(torch.softmax(scores, dim=-1))
        return self.linear_out(torch.matmul(attn, v).transpose(1, 2).reshape(b, -1, self.h * self.d_k))


class AsrBlock(nn.Module):
    def __init__(self, dim, heads, cross=False):
        super().__init__()
        self.self_attn = MultiHeadedAttention(heads, dim)
        self.src_attn = MultiHeadedAttention(heads, dim) if cross else None
        self.feed_forward = nn.Sequential(nn.Linear(dim, 4 * dim), nn.ReLU(), nn.Linear(4 * dim, dim))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3))

    def forward(self, x, mask, memory=None, memory_mask=None):
        y = self.norms[0](x)
        x = x + self.self_attn(y, y, mask)
        if self.src_attn is not None:
            x = x + self.src_attn(self.norms[1](x), memory, memory_mask)
        return x + self.feed_forward(self.norms[2](x))


class Conv2dSubsampling(nn.Module):
    def __init__(self, idim, odim, channels=32):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, channels, 3, 2), nn.ReLU(), nn.Conv2d(channels, channels, 3, 2), nn.ReLU())
        self.out = nn.Linear(channels * (((idim - 1) // 2 - 1) // 2), odim)

    def forward(self, x, mask):
        x = self.conv(x.unsqueeze(1))
        b, c, t, f = x.size()
        return self.out(x.transpose(1, 2).reshape(b, t, c * f)), mask[:, :, :-2:2][:, :, :-2:2]


class E2E(nn.Module):
    def __init__(self, idim=80, vocab=52, dim=128, heads=4, elayers=12, dlayers=2):
        super().__init__()
        self.embed = Conv2dSubsampling(idim, dim)
        self.encoders = nn.ModuleList(AsrBlock(dim, heads) for _ in range(elayers))
        self.token_embed = nn.Embedding(vocab, dim)
        self.decoders = nn.ModuleList(AsrBlock(dim, heads, cross=True) for _ in range(dlayers))
        self.output = nn.Linear(dim, vocab)

    def forward(self, xs, ilens, ys):
        mask = (torch.arange(xs.size(1), device=xs.device)[None] < ilens[:, None]).unsqueeze(1)
        h, mask = self.embed(xs, mask)
        for block in self.encoders:
            h = block(h, mask)
        steps = ys.size(1) - 1
        causal = torch.ones(1, steps, steps, dtype=torch.bool, device=xs.device).tril()
        y = self.token_embed(ys[:, :-1])
        for block in self.decoders:
            y = block(y, causal, h, mask)
        return F.cross_entropy(self.output(y).flatten(0, 1), ys[:, 1:].flatten(), ignore_index=-1)


def read_utterances(seed=7, n=40):
    rng = np.random.default_rng(seed)
    frames = [int(f) for f in rng.integers(300, 1500, n)]
    frames[11], frames[29], frames[33] = 6400, 5800, 7100
    return [{"utt": f"spk{i % 5}-{i:04d}", "ilen": f, "olen": max(8, f // 12)} for i, f in enumerate(frames)]


def remove_longshort(data, maxframes=3000, maxchars=400):
    return [u for u in data if u["ilen"] <= maxframes and u["olen"] <= maxchars]


def make_batchset(data, batch_size):
    data = sorted(data, key=lambda u: u["ilen"])
    batches = [data[i:i + batch_size] for i in range(0, len(data), batch_size)]
    order = np.random.default_rng(1).permutation(len(batches))
    return [batches[i] for i in order]


class CustomConverter:
    def __init__(self, device, idim=80, vocab=52):
        self.device, self.idim, self.vocab = device, idim, vocab

    def __call__(self, batch):
        ilens = torch.tensor([u["ilen"] for u in batch])
        xs = torch.zeros(len(batch), int(ilens.max()), self.idim)
        ys = torch.randint(1, self.vocab, (len(batch), max(u["olen"] for u in batch)))
        return xs.to(self.device), ilens.to(self.device), ys.to(self.device)


class CustomUpdater:
    def __init__(self, model, optimizer, converter, grad_clip=5.0):
        self.model, self.optimizer, self.converter, self.grad_clip = model, optimizer, converter, grad_clip

    def update_core(self, batch):
        loss = self.model(*self.converter(batch))
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip)
        self.optimizer.step()


@expected("larger_step", fix="sequences|as large as", thread="espnet/espnet#2798", memory=700)
def espnet_train_asr(fixed=False):
    """A few recordings of the data set are far too long (thousands of frames more than the others); attention over such an utterance needs
    memory quadratic in its length, so the batch with it does not fit, whatever the batch size. Cured by: Utterances of more than 3000
    frames (and 400 characters) are removed.
    """
    device = torch.device("cuda")
    train = read_utterances()
    if fixed:
        train = remove_longshort(train)
    model = E2E().to(device)
    updater = CustomUpdater(model, torch.optim.Adam(model.parameters()), CustomConverter(device))
    for batch in make_batchset(train, batch_size=2):
        updater.update_core(batch)


# ---------------------------------------------------------------- template: module and trainer

class WindowedSeries(Dataset):
    def __init__(self, length=1400, series=64, past=192, horizon=96):
        self.values = torch.randn(length, series)
        self.past, self.horizon = past, horizon

    def __len__(self):
        return 10240

    def __getitem__(self, i):
        start = i % (len(self.values) - self.past - self.horizon)
        mid = start + self.past
        return self.values[start:mid], self.values[mid:mid + self.horizon]


class DenseForecaster(nn.Module):
    def __init__(self, past=192, hidden=256, horizon=96):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(past, hidden), nn.ReLU(), nn.Linear(hidden, horizon))

    def forward(self, x):
        return self.model(x.transpose(1, 2)).transpose(1, 2)


class LitModule(nn.Module):
    def training_step(self, batch, batch_idx):
        raise NotImplementedError

    def training_epoch_end(self, outputs):
        pass


class ForecastLitModule(LitModule):
    def __init__(self, net, lr=1e-3):
        super().__init__()
        self.net, self.lr = net, lr
        self.criterion = nn.L1Loss()

    def step(self, batch):
        x, y = batch
        preds = self.net(x)
        return self.criterion(preds, y), preds, y

    def training_step(self, batch, batch_idx):
        loss, preds, targets = self.step(batch)
        return {"loss": loss, "preds": preds, "targets": targets}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class TemplateLitModule(ForecastLitModule):
    def training_epoch_end(self, outputs):
        pass


def is_overridden(name, module):
    return getattr(type(module), name) is not getattr(LitModule, name)


def detach_all(value):
    if torch.is_tensor(value):
        return value.detach()
    return {k: detach_all(v) for k, v in value.items()}


class TrainingEpochLoop:
    def __init__(self, module, optimizer, device):
        self.module, self.optimizer, self.device = module, optimizer, device
        self.outputs = []

    def advance(self, batch, batch_idx):
        batch = [t.to(self.device) for t in batch]
        result = self.module.training_step(batch, batch_idx)
        self.optimizer.zero_grad()
        result["loss"].backward()
        self.optimizer.step()
        return detach_all(result)

    def run(self, loader):
        keep = is_overridden("training_epoch_end", self.module)
        for batch_idx, batch in enumerate(loader):
            output = self.advance(batch, batch_idx)
            if keep:
                self.outputs.append(output)
        if keep:
            self.module.training_epoch_end(self.outputs)
            self.outputs = []


class LitTrainer:
    def __init__(self, max_epochs, device="cuda"):
        self.max_epochs, self.device = max_epochs, torch.device(device)

    def fit(self, module, loader):
        module.to(self.device).train()
        loop = TrainingEpochLoop(module, module.configure_optimizers(), self.device)
        for _ in range(self.max_epochs):
            loop.run(loader)


@expected("kept_tensors", fix=r"\.cpu\(\)|clear", thread="ashleve/lightning-hydra-template#458", memory=500)
def lightning_template_fit(fixed=False):
    """The module overrides `training_epoch_end`, therefore the trainer keeps what every training step returned (loss, preds and targets, on
    the GPU) until the end of the epoch. Cured by: No override of `training_epoch_end`: the step outputs are not kept.
    """
    cls = ForecastLitModule if fixed else TemplateLitModule
    loader = DataLoader(WindowedSeries(), batch_size=256, shuffle=True, drop_last=True)
    LitTrainer(max_epochs=2).fit(cls(DenseForecaster()), loader)


# ---------------------------------------------------------------- item recommendation by random-walk neighbours

class ItemNeighborSampler:
    def __init__(self, num_items, num_neighbors=3, num_layers=2, seed=0):
        self.num_items, self.num_neighbors, self.num_layers = num_items, num_neighbors, num_layers
        self.rng = np.random.default_rng(seed)

    def item_pairs(self, batch_size):
        return tuple(self.rng.integers(0, self.num_items, batch_size) for _ in range(3))

    def blocks(self, seeds):
        blocks = []
        for _ in range(self.num_layers):
            picked = self.rng.integers(0, self.num_items, (len(seeds), self.num_neighbors))
            src, inverse = np.unique(np.concatenate([seeds, picked.ravel()]), return_inverse=True)
            n = len(seeds)
            blocks.insert(0, (torch.from_numpy(inverse[:n].copy()),
                              torch.from_numpy(inverse[n:].reshape(picked.shape).copy())))
            seeds = src
        return torch.from_numpy(seeds), blocks


class WeightedSAGEConv(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.Q = nn.Linear(dims, dims)
        self.W = nn.Linear(2 * dims, dims)

    def forward(self, h, dst, neigh):
        n = F.relu(self.Q(h))[neigh].mean(1)
        z = F.relu(self.W(torch.cat([n, h[dst]], 1)))
        return z / z.norm(2, 1, keepdim=True).clamp(min=1e-6)


class PinSAGEModel(nn.Module):
    def __init__(self, num_items, dims, layers=2, with_ids=True):
        super().__init__()
        self.item_emb = nn.Embedding(num_items, dims) if with_ids else None
        self.convs = nn.ModuleList(WeightedSAGEConv(dims) for _ in range(layers))
        self.bias = nn.Parameter(torch.zeros(1))

    def represent(self, h, blocks):
        for conv, (dst, neigh) in zip(self.convs, blocks):
            h = conv(h, dst, neigh)
        return h

    def forward(self, h, blocks, heads, tails, negs):
        z = self.represent(h, blocks)
        pos = (z[heads] * z[tails]).sum(-1) + self.bias
        neg = (z[heads] * z[negs]).sum(-1) + self.bias
        return (neg - pos + 1).clamp(min=0).mean()


@expected("dense_embedding_gradients", fix="sparse=True", thread="dmlc/dgl#1671", memory=500)
def dgl_pinsage(fixed=False, num_items=30000, hidden_dims=1024, batches=4):
    """There is a learnable embedding vector of 1024 for every item: the embedding matrix (with its dense gradient and Adam's two states)
    does not fit on the GPU. Cured by: The embedding stays on the CPU with sparse gradients and SparseAdam; only the rows of the batch go to
    the GPU (PR #1676).
    """
    device = torch.device("cuda")
    sampler = ItemNeighborSampler(num_items)
    model = PinSAGEModel(num_items, hidden_dims, with_ids=not fixed).to(device)
    optimizers = [torch.optim.Adam(model.parameters(), lr=3e-5)]
    table = model.item_emb
    if fixed:
        table = nn.Embedding(num_items, hidden_dims, sparse=True)
        optimizers.append(torch.optim.SparseAdam(list(table.parameters()), lr=3e-5))

    for _ in range(batches):
        pairs = sampler.item_pairs(32)
        seeds, inverse = np.unique(np.concatenate(pairs), return_inverse=True)
        heads, tails, negs = (torch.from_numpy(i.copy()).to(device) for i in np.split(inverse, 3))
        ids, blocks = sampler.blocks(seeds)
        blocks = [(dst.to(device), neigh.to(device)) for dst, neigh in blocks]
        h = table(ids.to(table.weight.device)).to(device)
        loss = model(h, blocks, heads, tails, negs)
        for opt in optimizers:
            opt.zero_grad()
        loss.backward()
        for opt in optimizers:
            opt.step()


# ---------------------------------------------------------------- knowledge graph embeddings, own loop

class LpRegularizer(nn.Module):
    def __init__(self, weight=0.1):
        super().__init__()
        self.weight = weight
        self.regularization_term = torch.zeros(1)

    def reset(self, device):
        self.regularization_term = torch.zeros(1, device=device)

    def forward(self, x):
        return x.pow(2).sum(-1).mean()

    def update(self, *tensors):
        if not torch.is_grad_enabled():
            return
        term = sum(self(x) for x in tensors) / len(tensors)
        self.regularization_term = self.regularization_term.to(term.device) + self.weight * term

    def pop_regularization_term(self):
        result = self.regularization_term
        self.reset(result.device)
        return result


class Representation(nn.Module):
    def __init__(self, num, dim):
        super().__init__()
        self.embedding = nn.Embedding(num, dim)
        nn.init.xavier_uniform_(self.embedding.weight)

    def forward(self, indices):
        return self.embedding(indices)


class DistMult(nn.Module):
    def __init__(self, num_entities, num_relations, embedding_dim=256):
        super().__init__()
        self.entities = Representation(num_entities, embedding_dim)
        self.relations = Representation(num_relations, embedding_dim)
        self.regularizer = LpRegularizer()

    def score_hrt(self, hrt):
        h, r, t = self.entities(hrt[:, 0]), self.relations(hrt[:, 1]), self.entities(hrt[:, 2])
        self.regularizer.update(h, r, t)
        return (h * r * t).sum(-1)

    def collect_regularization_term(self):
        return self.regularizer.pop_regularization_term()


class TripleBatches:
    def __init__(self, triples, batch_size, num_entities):
        self.triples, self.batch_size, self.num_entities = triples, batch_size, num_entities

    def __iter__(self):
        order = torch.randperm(len(self.triples))
        for start in range(0, len(order), self.batch_size):
            pos = self.triples[order[start:start + self.batch_size]]
            neg = pos.clone()
            neg[:, 2] = torch.randint(0, self.num_entities, (len(neg),))
            yield pos, neg


@expected("graph_of_earlier_steps", fix=r"detach|item\(\)", thread="pykeen/pykeen#1297", memory=400)
def pykeen_custom_loop(fixed=False):
    """DistMult has a regularizer by default that adds each batch's term to an accumulated tensor; the own training loop never collects it,
    so the term grows forever and its graph holds the buffers (embeddings) of all batches so far. Cured by: Call
    `collect_regularization_term()` each batch and put it into the loss (or no regularizer).
    """
    device = torch.device("cuda")
    entities, relations = 8000, 40
    triples = torch.stack([torch.randint(0, n, (40000,)) for n in (entities, relations, entities)], 1)
    model = DistMult(entities, relations).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.MarginRankingLoss(margin=0.1)
    loader = TripleBatches(triples, 2048, entities)
    for epoch in range(6):
        train_loss, n = 0.0, 0
        for pos, neg in loader:
            pos_scores = model.score_hrt(pos.to(device))
            neg_scores = model.score_hrt(neg.to(device))
            loss = criterion(pos_scores, neg_scores, torch.ones_like(pos_scores))
            if fixed:
                loss = loss + model.collect_regularization_term().squeeze()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            train_loss += loss.detach().item()
            n += 1
        print(f"epoch {epoch}: {train_loss / n:.4f}")


# ---------------------------------------------------------------- attribution for an image classifier

class DenseLayer(nn.Module):
    def __init__(self, inp, growth):
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inp), nn.Conv2d(inp, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x):
        y = self.conv1(F.relu(self.norm1(x)))
        y = self.conv2(F.relu(self.norm2(y)))
        return torch.cat([x, y], 1)


class SmallDenseNet(nn.Module):
    def __init__(self, growth=16, layers=(4, 6), classes=1000):
        super().__init__()
        width = 32
        self.stem = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
                                  nn.MaxPool2d(3, 2, 1))
        stages = []
        for depth in layers:
            for _ in range(depth):
                stages.append(DenseLayer(width, growth))
                width += growth
            stages += [nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)]
            width //= 2
        self.features = nn.Sequential(*stages)
        self.classifier = nn.Linear(width, classes)

    def forward(self, x):
        return self.classifier(F.relu(self.features(self.stem(x))).mean((2, 3)))


def compute_gradients(forward_func, inputs, target):
    with torch.autograd.set_grad_enabled(True):
        selected = forward_func(inputs)[:, target]
        return torch.autograd.grad(torch.unbind(selected), inputs)[0]


def batch_gradients(forward_func, points, target, internal_batch_size):
    pieces = []
    for chunk in points.split(internal_batch_size):
        pieces.append(compute_gradients(forward_func, chunk.detach().requires_grad_(), target))
    return torch.cat(pieces)


class IntegratedGradients:
    def __init__(self, forward_func):
        self.forward_func = forward_func

    @staticmethod
    def gauss_legendre(n):
        nodes, weights = np.polynomial.legendre.leggauss(n)
        return (1 + nodes) / 2, weights / 2

    def attribute(self, inputs, baselines=0.0, target=0, n_steps=50, internal_batch_size=None):
        alphas, weights = self.gauss_legendre(n_steps)
        diff = inputs - baselines
        points = torch.cat([baselines + float(a) * diff for a in alphas]).requires_grad_()
        if internal_batch_size is None:
            grads = compute_gradients(self.forward_func, points, target)
        else:
            grads = batch_gradients(self.forward_func, points, target, internal_batch_size)
        step = torch.tensor(weights, dtype=grads.dtype, device=grads.device).view(-1, 1, 1, 1)
        total = (grads * step).view(n_steps, *inputs.shape).sum(0)
        return total * diff


@expected("many_rows", fix="batch|split|part|accumulation", thread="meta-pytorch/captum#245", memory=700)
def captum_integrated_gradients(fixed=False):
    """Integrated Gradients expands the one input image to a batch of `n_steps` (50) images and evaluates the model and its gradients on all
    at once. Cured by: `internal_batch_size`: the steps are evaluated in small chunks.
    """
    device = torch.device("cuda")
    model = SmallDenseNet().to(device).eval()
    image = torch.rand(1, 3, 224, 224).to(device)
    with torch.no_grad():
        print(model(image).shape)
    ig = IntegratedGradients(model)
    options = {"internal_batch_size": 5} if fixed else {}
    attributions = ig.attribute(image, target=7, n_steps=50, **options)
    print(attributions.shape)


# ---------------------------------------------------------------- molecular dynamics with a SchNet potential

class System:
    def __init__(self, n_atoms=600, density=0.1, seed=3):
        rng = np.random.default_rng(seed)
        self.n_atoms = n_atoms
        self.numbers = rng.choice([1, 6, 7, 8], n_atoms)
        self.positions = rng.uniform(0, (n_atoms / density) ** (1 / 3), (n_atoms, 3)).astype(np.float32)


class SimpleNeighborList:
    def __init__(self, system, cutoff=5.0):
        self.system, self.cutoff = system, cutoff

    def get_neighbors(self):
        n = self.system.n_atoms
        neighbors = np.arange(n)[None].repeat(n, 0)[~np.eye(n, dtype=bool)].reshape(n, n - 1)
        return neighbors, np.ones_like(neighbors, dtype=np.float32)


class NeighborList(SimpleNeighborList):
    def get_neighbors(self):
        pos = self.system.positions
        dist = np.linalg.norm(pos[:, None] - pos[None], axis=-1)
        near = (dist < self.cutoff) & ~np.eye(len(pos), dtype=bool)
        width = int(near.sum(1).max())
        neighbors = np.zeros((len(pos), width), dtype=np.int64)
        mask = np.zeros((len(pos), width), dtype=np.float32)
        for i, row in enumerate(near):
            found = np.nonzero(row)[0]
            neighbors[i, :len(found)], mask[i, :len(found)] = found, 1
        return neighbors, mask


class ShiftedSoftplus(nn.Module):
    def forward(self, x):
        return F.softplus(x) - math.log(2.0)


class CFConv(nn.Module):
    def __init__(self, features, gaussians, cutoff):
        super().__init__()
        self.filter_network = nn.Sequential(nn.Linear(gaussians, features), ShiftedSoftplus(), nn.Linear(features, features))
        self.in2f = nn.Linear(features, features, bias=False)
        self.f2out = nn.Sequential(nn.Linear(features, features), ShiftedSoftplus(), nn.Linear(features, features))
        self.cutoff = cutoff

    def forward(self, x, r, f, neighbors, mask):
        w = self.filter_network(f) * (0.5 * (torch.cos(r * math.pi / self.cutoff) + 1.0)).unsqueeze(-1)
        y = self.in2f(x)[neighbors]
        return self.f2out((y * w * mask.unsqueeze(-1)).sum(1))


class SchNet(nn.Module):
    def __init__(self, features=128, interactions=3, gaussians=25, cutoff=5.0):
        super().__init__()
        self.embedding = nn.Embedding(100, features)
        self.register_buffer("offsets", torch.linspace(0.0, cutoff, gaussians))
        self.interactions = nn.ModuleList(CFConv(features, gaussians, cutoff) for _ in range(interactions))
        self.atomwise = nn.Sequential(nn.Linear(features, features // 2), ShiftedSoftplus(), nn.Linear(features // 2, 1))

    def forward(self, inputs):
        pos, neighbors, mask = inputs["positions"], inputs["neighbors"], inputs["mask"]
        r = (pos[neighbors] - pos.unsqueeze(1)).pow(2).sum(-1).add(1e-9).sqrt()
        f = torch.exp(-10.0 * (r.unsqueeze(-1) - self.offsets).pow(2))
        x = self.embedding(inputs["numbers"])
        for conv in self.interactions:
            x = x + conv(x, r, f, neighbors, mask)
        return self.atomwise(x).sum()


class SchnetCalculator:
    def __init__(self, model, system, neighbor_list, device):
        self.model, self.system, self.neighbor_list, self.device = model, system, neighbor_list, device

    def generate_input(self):
        neighbors, mask = self.neighbor_list.get_neighbors()
        return {"numbers": torch.from_numpy(self.system.numbers).to(self.device),
                "positions": torch.from_numpy(self.system.positions).to(self.device).requires_grad_(),
                "neighbors": torch.from_numpy(neighbors).to(self.device),
                "mask": torch.from_numpy(mask).to(self.device)}

    def calculate(self):
        inputs = self.generate_input()
        energy = self.model(inputs)
        forces = -torch.autograd.grad(energy, inputs["positions"])[0]
        return energy.detach(), forces


@expected("many_rows", fix="split|chunk|cutoff|radius", thread="openmm/NNPOps#14", memory=1200)
def schnet_md(fixed=False):
    """The neighbor list ignores the cutoff and takes every pair of atoms, so that the pair tensors (filters, gathered neighbors) are N x
    (N-1) x features. Cured by: A proper neighbor list that holds only atoms within the cutoff.
    """
    device = torch.device("cuda")
    system = System()
    neighbor_list = NeighborList(system) if fixed else SimpleNeighborList(system)
    calculator = SchnetCalculator(SchNet().to(device), system, neighbor_list, device)
    for _ in range(5):
        energy, forces = calculator.calculate()
    print(forces.shape)


# ---------------------------------------------------------------- multi-task graph benchmark

def aggregate_mean(h, adj, deg):
    return (h * adj).sum(2) / deg


def aggregate_max(h, adj, deg):
    return (h + (adj - 1) * 1e6).max(2)[0]


def aggregate_min(h, adj, deg):
    return (h + (1 - adj) * 1e6).min(2)[0]


def aggregate_std(h, adj, deg):
    mean = aggregate_mean(h, adj, deg)
    square = aggregate_mean(h * h, adj, deg)
    return torch.sqrt(F.relu(square - mean * mean) + 1e-5)


class PNALayer(nn.Module):
    aggregators = (aggregate_mean, aggregate_max, aggregate_min, aggregate_std)

    def __init__(self, dim, avg_log_degree=1.1):
        super().__init__()
        self.avg = avg_log_degree
        self.pretrans = nn.Linear(2 * dim, dim)
        self.posttrans = nn.Linear(13 * dim, dim)

    def forward(self, x, adj):
        b, n, d = x.shape
        pairs = torch.cat([x.unsqueeze(2).expand(b, n, n, d), x.unsqueeze(1).expand(b, n, n, d)], -1)
        h = F.relu(self.pretrans(pairs))
        weight = adj.unsqueeze(-1)
        deg = adj.sum(-1, keepdim=True).clamp(min=1)
        m = torch.cat([agg(h, weight, deg) for agg in self.aggregators], -1)
        scale = torch.log(deg + 1) / self.avg
        return F.relu(self.posttrans(torch.cat([x, m, m * scale, m / scale], -1)))


class PNA(nn.Module):
    def __init__(self, nodes_in=2, dim=16, layers=8, node_tasks=3, graph_tasks=3):
        super().__init__()
        self.fc = nn.Linear(nodes_in, dim)
        self.convs = nn.ModuleList(PNALayer(dim) for _ in range(layers))
        self.gru = nn.GRUCell(dim, dim)
        self.node_out, self.graph_out = nn.Linear(dim, node_tasks), nn.Linear(dim, graph_tasks)

    def forward(self, x, adj):
        x = self.fc(x)
        b, n, d = x.shape
        for conv in self.convs:
            x = self.gru(conv(x, adj).reshape(b * n, d), x.reshape(b * n, d)).view(b, n, d)
        return self.node_out(x), self.graph_out(x.mean(1))


class GraphBatches:
    def __init__(self, sizes, batches, batch_size, device):
        self.sizes, self.batches, self.batch_size, self.device = sizes, batches, batch_size, device

    def __iter__(self):
        for size in self.sizes:
            for _ in range(self.batches):
                adj = (torch.rand(self.batch_size, size, size) < 0.15).float()
                batch = (torch.randn(self.batch_size, size, 2), adj,
                         torch.randn(self.batch_size, size, 3), torch.randn(self.batch_size, 3))
                yield [t.to(self.device) for t in batch]


class MultitaskExperiment:
    def __init__(self, device):
        self.model = PNA().to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3, weight_decay=1e-6)

    def specific_loss(self, batch):
        x, adj, node_labels, graph_labels = batch
        nodes, graphs = self.model(x, adj)
        return F.mse_loss(nodes, node_labels) + F.mse_loss(graphs, graph_labels)

    def train_epoch(self, loader):
        self.model.train()
        for batch in loader:
            self.optimizer.zero_grad()
            self.specific_loss(batch).backward()
            self.optimizer.step()

    def test(self, loader):
        self.model.eval()
        total, count = 0.0, 0
        for batch in loader:
            total += self.specific_loss(batch).item()
            count += 1
        return total / count


@expected("evaluation_keeps_graphs", fix="no_grad", thread="lukecavabarrett/pna#14", memory=500)
def pna_multitask(fixed=False):
    """The test on larger graphs runs the model with autograd on, so the pair tensors of all layers are kept for a backward that never
    comes. Cured by: Autograd disabled (no_grad) during the test.
    """
    device = torch.device("cuda")
    experiment = MultitaskExperiment(device)
    train = GraphBatches(range(15, 25), 1, 16, device)
    large = GraphBatches((40, 60, 80, 100, 120), 1, 16, device)
    for _ in range(2):
        experiment.train_epoch(train)
    if fixed:
        with torch.no_grad():
            print(experiment.test(large))
    else:
        print(experiment.test(large))
