"""Programs after public threads about plain training and evaluation loops."""

import copy
import math
import random
from collections import deque

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from expected import expected


# ------------------------------------------------------------------ fashion LeNet

def batch_norm(X, gamma, beta, moving_mean, moving_var, eps, momentum, plain):
    if not torch.is_grad_enabled():
        X_hat = (X - moving_mean) / torch.sqrt(moving_var + eps)
    else:
        dims = (0,) if X.dim() == 2 else (0, 2, 3)
        mean = X.mean(dim=dims, keepdim=True)
        var = ((X - mean) ** 2).mean(dim=dims, keepdim=True)
        X_hat = (X - mean) / torch.sqrt(var + eps)
        moving_mean = momentum * moving_mean + (1.0 - momentum) * mean
        moving_var = momentum * moving_var + (1.0 - momentum) * var
    Y = gamma * X_hat + beta
    if plain:
        return Y, moving_mean.data, moving_var.data
    return Y, moving_mean, moving_var


class ScratchBatchNorm(nn.Module):
    def __init__(self, num_features, num_dims, plain):
        super().__init__()
        shape = (1, num_features) if num_dims == 2 else (1, num_features, 1, 1)
        self.gamma = nn.Parameter(torch.ones(shape))
        self.beta = nn.Parameter(torch.zeros(shape))
        self.moving_mean = torch.zeros(shape)
        self.moving_var = torch.ones(shape)
        self.plain = plain

    def forward(self, X):
        if self.moving_mean.device != X.device:
            self.moving_mean = self.moving_mean.to(X.device)
            self.moving_var = self.moving_var.to(X.device)
        Y, self.moving_mean, self.moving_var = batch_norm(
            X, self.gamma, self.beta, self.moving_mean, self.moving_var, 1e-5, 0.9, self.plain)
        return Y


class Accumulator:
    def __init__(self, n):
        self.data = [0.0] * n

    def add(self, *args):
        self.data = [a + float(b) for a, b in zip(self.data, args)]

    def __getitem__(self, i):
        return self.data[i]


def count_correct(y_hat, y):
    return (y_hat.argmax(dim=1) == y).sum().item()


def evaluate_accuracy_gpu(net, data_iter, device):
    net.eval()
    metric = Accumulator(2)
    for X, y in data_iter:
        X, y = X.to(device), y.to(device)
        metric.add(count_correct(net(X), y), y.numel())
    return metric[0] / metric[1]


def train_ch6(net, train_iter, test_iter, num_epochs, lr, device):
    net.to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    loss_fn = nn.CrossEntropyLoss()
    for epoch in range(num_epochs):
        metric = Accumulator(3)
        net.train()
        for X, y in train_iter:
            X, y = X.to(device), y.to(device)
            optimizer.zero_grad()
            y_hat = net(X)
            loss = loss_fn(y_hat, y)
            loss.backward()
            optimizer.step()
            metric.add(loss.item() * X.shape[0], count_correct(y_hat, y), X.shape[0])
        test_acc = evaluate_accuracy_gpu(net, test_iter, device)
        print(f"epoch {epoch + 1}: loss {metric[0] / metric[2]:.3f}, test acc {test_acc:.3f}")


@expected("evaluation_keeps_graphs", fix="no_grad|detach", thread="d2l-ai/d2l-en#1342", memory=400)
def lenet_batchnorm_scratch(fixed=False):
    """The hand-written batch norm layer stores its updated `moving_mean` and `moving_var` with their gradient history, so the layer's
    running statistics keep every batch `X` (all activations of the forward passes that ran with gradients on, here those of the accuracy
    evaluation) alive, and memory accumulates over batches and epochs. Cured by: Return/store `moving_mean.data` and `moving_var.data` (cut
    the history).
    """
    device = torch.device("cuda")
    net = nn.Sequential(
        nn.Conv2d(1, 6, kernel_size=5), ScratchBatchNorm(6, 4, fixed), nn.Sigmoid(),
        nn.MaxPool2d(2, 2),
        nn.Conv2d(6, 16, kernel_size=5), ScratchBatchNorm(16, 4, fixed), nn.Sigmoid(),
        nn.MaxPool2d(2, 2), nn.Flatten(),
        nn.Linear(256, 120), ScratchBatchNorm(120, 2, fixed), nn.Sigmoid(),
        nn.Linear(120, 84), ScratchBatchNorm(84, 2, fixed), nn.Sigmoid(),
        nn.Linear(84, 10))
    data = TensorDataset(torch.rand(256 * 12, 1, 28, 28), torch.randint(0, 10, (256 * 12,)))
    train_iter = DataLoader(data, batch_size=256, shuffle=True)
    test_iter = DataLoader(data, batch_size=256)
    train_ch6(net, train_iter, test_iter, num_epochs=8, lr=1.0, device=device)


# ------------------------------------------------------------------ sklearn-style net

class PointNetClassifier(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.feat = nn.Sequential(
            nn.Conv1d(3, 64, 1), nn.BatchNorm1d(64), nn.ReLU(),
            nn.Conv1d(64, 128, 1), nn.BatchNorm1d(128), nn.ReLU(),
            nn.Conv1d(128, 512, 1), nn.BatchNorm1d(512), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Dropout(0.3),
                                  nn.Linear(256, num_classes))

    def forward(self, X):
        return F.log_softmax(self.head(self.feat(X).max(dim=2)[0]), dim=-1)


class Callback:
    def on_epoch_begin(self, net):
        pass

    def on_batch_end(self, net, training, y=None, y_pred=None, loss=None):
        pass

    def on_epoch_end(self, net):
        pass


class EpochScoring(Callback):
    def __init__(self, name, scoring):
        self.name, self.scoring = name, scoring

    def on_epoch_begin(self, net):
        self.y_trues, self.y_preds = [], []

    def on_batch_end(self, net, training, y=None, y_pred=None, loss=None):
        if not training:
            self.y_trues.append(y)
            self.y_preds.append(y_pred)

    def on_epoch_end(self, net):
        net.history[-1][self.name] = self.scoring(torch.cat(self.y_trues), torch.cat(self.y_preds))
        self.on_epoch_begin(net)


class BatchLoss(Callback):
    def on_batch_end(self, net, training, y=None, y_pred=None, loss=None):
        key = "train_losses" if training else "valid_losses"
        net.history[-1].setdefault(key, []).append(loss.item())


def accuracy_score(y_true, y_pred):
    return float((y_pred.detach().cpu().argmax(1) == y_true).float().mean())


class NeuralNet:
    def __init__(self, module, criterion, lr=0.01, batch_size=32, max_epochs=2, inference=False):
        self.module = module().cuda()
        self.criterion = criterion()
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=lr, momentum=0.9)
        self.batch_size, self.max_epochs, self.inference = batch_size, max_epochs, inference
        self.callbacks = [BatchLoss(), EpochScoring("valid_acc", accuracy_score)]
        self.history = []

    def notify(self, event, **kwargs):
        for cb in self.callbacks:
            getattr(cb, event)(self, **kwargs)

    def infer(self, X):
        return self.module(X.cuda())

    def get_loss(self, y_pred, y):
        return self.criterion(y_pred, y.cuda())

    def train_step(self, X, y):
        self.module.train()
        self.optimizer.zero_grad()
        y_pred = self.infer(X)
        loss = self.get_loss(y_pred, y)
        loss.backward()
        self.optimizer.step()
        return {"loss": loss, "y_pred": y_pred}

    def _validate(self, X, y):
        y_pred = self.infer(X)
        return {"loss": self.get_loss(y_pred, y), "y_pred": y_pred}

    def validation_step(self, X, y):
        self.module.eval()
        if self.inference:
            with torch.no_grad():
                return self._validate(X, y)
        return self._validate(X, y)

    def fit(self, ds_train, ds_valid):
        for _ in range(self.max_epochs):
            self.history.append({})
            self.notify("on_epoch_begin")
            for X, y in DataLoader(ds_train, batch_size=self.batch_size, shuffle=True):
                self.notify("on_batch_end", training=True, y=y, **self.train_step(X, y))
            for X, y in DataLoader(ds_valid, batch_size=self.batch_size):
                self.notify("on_batch_end", training=False, y=y, **self.validation_step(X, y))
            self.notify("on_epoch_end")
        return self


def _clouds(n, points):
    return TensorDataset(torch.randn(n, 3, points), torch.randint(0, 10, (n,)))


@expected("evaluation_keeps_graphs", fix="no_grad", thread="skorch-dev/skorch#218", memory=400)
def pointnet_net_fit(fixed=False):
    """`validation_step` runs the module without `torch.no_grad()`, so each validation batch's `y_pred` (cached by the scoring callback
    until the epoch ends) keeps that batch's autograd graph: GPU memory rises after each validation batch until nothing is left. Training
    itself is fine. Cured by: Wrap the contents of `validation_step` in `torch.no_grad()`.
    """
    net = NeuralNet(PointNetClassifier, nn.NLLLoss, inference=fixed)
    net.fit(_clouds(320, 256), _clouds(640, 256))
    print(net.history[-1]["valid_acc"])


# ------------------------------------------------------------------ learner prediction

class ConvBlock(nn.Sequential):
    def __init__(self, ni, nf):
        super().__init__(nn.Conv2d(ni, nf, 3, padding=1), nn.BatchNorm2d(nf), nn.ReLU(inplace=True))


class SmallUnet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.enc1, self.enc2 = ConvBlock(3, 16), ConvBlock(16, 32)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.dec = ConvBlock(32, 16)
        self.out = nn.Conv2d(16, classes, 1)

    def forward(self, x):
        a = self.enc1(x)
        b = self.enc2(F.max_pool2d(a, 2))
        return self.out(self.dec(torch.cat([self.up(b), a], 1)))


class MaskDataset(Dataset):
    def __init__(self, n, size, classes):
        self.n = n
        self.img = torch.rand(3, size, size)
        self.mask = torch.randint(0, classes, (size, size))

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return self.img, self.mask


class GpuLoader:
    def __init__(self, dl):
        self.dl = dl

    def __iter__(self):
        for x, y in self.dl:
            yield x.cuda(), y.cuda()


def to_np(v):
    return v.detach().cpu().numpy()


def predict_with_targs_(m, dl):
    m.eval()
    res = []
    with torch.no_grad():
        for x, y in dl:
            res.append([m(x), y])
    return zip(*res)


def predict_with_targs(m, dl):
    preda, targa = predict_with_targs_(m, dl)
    return to_np(torch.cat(preda)), to_np(torch.cat(targa))


def predict_with_targs_np(m, dl):
    m.eval()
    res = []
    with torch.no_grad():
        for x, y in dl:
            res.append([to_np(m(x)), to_np(y)])
    preda, targa = zip(*res)
    return np.concatenate(preda), np.concatenate(targa)


class Learner:
    def __init__(self, model, val_dl, test_dl, per_batch):
        self.model = model.cuda()
        self.val_dl, self.test_dl, self.per_batch = val_dl, test_dl, per_batch

    def predict_with_targs(self, is_test=False):
        dl = GpuLoader(self.test_dl if is_test else self.val_dl)
        fn = predict_with_targs_np if self.per_batch else predict_with_targs
        return fn(self.model, dl)


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="fastai/fastai#483", memory=300)
def segmentation_predict_with_targs(fixed=False):
    """`predict_with_targs` collects the predictions (and targets) of all batches of the large test set on the GPU and converts to numpy
    only once, for the concatenated final result. Cured by: Call `to_np()` for every batch, so that the collected predictions lie in host
    memory.
    """
    classes = 12
    val_dl = DataLoader(MaskDataset(32, 128, classes), batch_size=16)
    test_dl = DataLoader(MaskDataset(480, 128, classes), batch_size=16)
    learn = Learner(SmallUnet(classes), val_dl, test_dl, per_batch=fixed)
    probs, targs = learn.predict_with_targs()
    print("valid", probs.shape)
    probs, targs = learn.predict_with_targs(is_test=True)
    print("test", probs.shape, targs.shape)


# ------------------------------------------------------------------ sequence tagger

class Token:
    def __init__(self, text, tag):
        self.text, self.tag = text, tag
        self.embeddings = {}

    def set_embedding(self, name, vector):
        self.embeddings[name] = vector

    def get_embedding(self):
        return torch.cat([self.embeddings[k] for k in sorted(self.embeddings)])

    def clear_embeddings(self):
        self.embeddings = {}


class Sentence:
    def __init__(self, words, tags):
        self.tokens = [Token(w, t) for w, t in zip(words, tags)]


class CharLMEmbeddings(nn.Module):
    name = "a-news-forward"

    def __init__(self, hidden):
        super().__init__()
        self.encoder = nn.Embedding(128, 100)
        self.rnn = nn.LSTM(100, hidden)

    def embed(self, sentences):
        texts = [" ".join(t.text for t in s.tokens) + " " for s in sentences]
        longest = max(len(t) for t in texts)
        ids = torch.tensor([[ord(c) for c in t.ljust(longest)] for t in texts]).t().cuda()
        with torch.no_grad():
            states, _ = self.rnn(self.encoder(ids))
        for i, sentence in enumerate(sentences):
            offset = -1
            for token in sentence.tokens:
                offset += len(token.text) + 1
                token.set_embedding(self.name, states[offset, i, :].clone())


class PooledEmbeddings(nn.Module):
    name = "b-pooled"

    def __init__(self, context_embeddings, host):
        super().__init__()
        self.context_embeddings = context_embeddings
        self.word_embeddings = {}
        self.host = host

    def embed(self, sentences):
        self.context_embeddings.embed(sentences)
        for sentence in sentences:
            for token in sentence.tokens:
                local = token.embeddings[self.context_embeddings.name]
                if self.host:
                    local = local.cpu()
                if token.text not in self.word_embeddings:
                    self.word_embeddings[token.text] = local
                else:
                    self.word_embeddings[token.text] = torch.min(
                        self.word_embeddings[token.text], local)
                token.set_embedding(self.name, self.word_embeddings[token.text].cuda())


class SequenceTagger(nn.Module):
    def __init__(self, embeddings, dim, tags):
        super().__init__()
        self.embeddings = embeddings
        self.reproject = nn.Linear(dim, 256)
        self.rnn = nn.LSTM(256, 128, bidirectional=True, batch_first=True)
        self.linear = nn.Linear(256, tags)

    def forward_loss(self, batch):
        self.embeddings.embed(batch)
        x = torch.stack([torch.stack([t.get_embedding() for t in s.tokens]) for s in batch])
        gold = torch.tensor([[t.tag for t in s.tokens] for s in batch]).cuda()
        out, _ = self.rnn(self.reproject(x))
        return F.cross_entropy(self.linear(out).flatten(0, 1), gold.flatten())


class ModelTrainer:
    def __init__(self, model, corpus):
        self.model, self.corpus = model, corpus

    def train(self, max_epochs, mini_batch_size, learning_rate):
        params = [p for n, p in self.model.named_parameters() if not n.startswith("embeddings")]
        optimizer = torch.optim.SGD(params, lr=learning_rate)
        for epoch in range(max_epochs):
            for start in range(0, len(self.corpus), mini_batch_size):
                batch = self.corpus[start:start + mini_batch_size]
                loss = self.model.forward_loss(batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                for sentence in batch:
                    for token in sentence.tokens:
                        token.clear_embeddings()


@expected("fragmentation", fix=r"\.cpu\(\)", thread="flairNLP/flair#1270", memory=450)
def ner_pooled_embeddings(fixed=False):
    """The pooled embeddings remember one vector for each distinct word ever seen (`word_embeddings`), and this memory is kept on CUDA; it
    grows with the vocabulary during training until the GPU is full. Cured by: Keep the embedding memory in regular (CPU) memory: `.cpu()`
    when a vector is stored.
    """
    rng = random.Random(1)
    words = [f"w{i}" for i in range(100000)]
    corpus = [Sentence(rng.choices(words, k=16), [rng.randrange(9) for _ in range(16)])
              for _ in range(2200)]
    lm = CharLMEmbeddings(2048)
    tagger = SequenceTagger(PooledEmbeddings(lm, fixed), 4096, 9).cuda()
    ModelTrainer(tagger, corpus).train(max_epochs=1, mini_batch_size=8, learning_rate=0.1)
    print(len(tagger.embeddings.word_embeddings))


# ------------------------------------------------------------------ recurrent VAE

class MotionEncoder(nn.Module):
    def __init__(self, num_features, hidden):
        super().__init__()
        self.rnn = nn.GRU(num_features, hidden, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x):
        _, h = self.rnn(x)
        return h.permute(1, 0, 2).flatten(1)


class MotionLambda(nn.Module):
    def __init__(self, zdims, hidden):
        super().__init__()
        self.mean = nn.Linear(hidden * 4, zdims)
        self.logvar = nn.Linear(hidden * 4, zdims)

    def forward(self, h):
        mu, logvar = self.mean(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return z, mu, logvar


class MotionDecoder(nn.Module):
    def __init__(self, steps, zdims, hidden, num_features):
        super().__init__()
        self.steps = steps
        self.rnn = nn.GRU(zdims, hidden, num_layers=2, batch_first=True)
        self.out = nn.Linear(hidden, num_features)

    def forward(self, z):
        seq, _ = self.rnn(z.unsqueeze(1).repeat(1, self.steps, 1))
        return self.out(seq)


class RNNVAE(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        f, h, z = cfg["num_features"], cfg["hidden_size"], cfg["zdims"]
        self.encoder = MotionEncoder(f, h)
        self.lmbda = MotionLambda(z, h)
        self.decoder = MotionDecoder(cfg["time_window"], z, h, f)
        self.decoder_future = MotionDecoder(cfg["prediction_steps"], z, h, f)

    def forward(self, x):
        z, mu, logvar = self.lmbda(self.encoder(x))
        return self.decoder(z), self.decoder_future(z), z, mu, logvar


class SequenceDataset(Dataset):
    def __init__(self, frames, cfg):
        self.X = np.random.randn(frames, cfg["num_features"]).astype(np.float32)
        self.window = cfg["time_window"] + cfg["prediction_steps"]

    def __len__(self):
        return len(self.X) - self.window

    def __getitem__(self, i):
        start = np.random.randint(0, len(self))
        return torch.from_numpy(self.X[start:start + self.window])


def train_vae_epoch(loader, model, optimizer, cfg, kl_weight):
    model.train()
    total = 0.0
    for data in loader:
        data = data.cuda()
        past, future = data[:, :cfg["time_window"]], data[:, cfg["time_window"]:]
        noisy = past + 0.1 * torch.randn_like(past)
        recon, pred, z, mu, logvar = model(noisy)
        rec_loss = F.mse_loss(recon, past, reduction="sum")
        fut_loss = F.mse_loss(pred, future, reduction="sum")
        kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        loss = rec_loss + fut_loss + kl_weight * kl
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5)
        optimizer.step()
        total += loss.item()
    return total / len(loader)


@expected("capacity", fix="half the batch|accumulation", thread="LINCellularNeuroscience/VAME#45", memory=900)
def motion_rnn_vae_train(fixed=False):
    """The recurrent VAE's training step with the configured batch size (256) simply needs more than the small graphics card has: too large
    a batch. Cured by: Halve `batch_size` in the config (128).
    """
    cfg = dict(num_features=24, hidden_size=256, zdims=30, time_window=60, prediction_steps=30,
               batch_size=128 if fixed else 256, max_epochs=2)
    loader = DataLoader(SequenceDataset(1200, cfg), batch_size=cfg["batch_size"], drop_last=True)
    model = RNNVAE(cfg).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, amsgrad=True)
    for epoch in range(cfg["max_epochs"]):
        print(epoch, train_vae_epoch(loader, model, optimizer, cfg, min(1.0, epoch / 4)))


# ------------------------------------------------------------------ real image denoising

class NoiseEstimator(nn.Module):
    def __init__(self, features=64, layers=5):
        super().__init__()
        mods = [nn.Conv2d(3, features, 3, padding=1), nn.ReLU(inplace=True)]
        for _ in range(layers - 2):
            mods += [nn.Conv2d(features, features, 3, padding=1), nn.BatchNorm2d(features),
                     nn.ReLU(inplace=True)]
        mods += [nn.Conv2d(features, 6, 3, padding=1)]
        self.body = nn.Sequential(*mods)

    def forward(self, x):
        return self.body(x)


class ConditionedDnCNN(nn.Module):
    def __init__(self, features=64, layers=12):
        super().__init__()
        mods = [nn.Conv2d(9, features, 3, padding=1), nn.ReLU(inplace=True)]
        for _ in range(layers - 2):
            mods += [nn.Conv2d(features, features, 3, padding=1), nn.BatchNorm2d(features),
                     nn.ReLU(inplace=True)]
        mods += [nn.Conv2d(features, 3, 3, padding=1)]
        self.dncnn = nn.Sequential(*mods)

    def forward(self, x, maps):
        return self.dncnn(torch.cat([x, maps], 1))


class DenoiseTester:
    def __init__(self, opt):
        self.opt = opt
        self.est_net = NoiseEstimator().cuda().eval()
        self.model = ConditionedDnCNN().cuda().eval()

    def read(self, name):
        h, w = self.opt["sizes"][name]
        img = np.random.RandomState(0).randint(0, 256, (h, w, 3), dtype=np.uint8)
        return torch.from_numpy(img.transpose(2, 0, 1)).unsqueeze(0)

    @torch.no_grad()
    def denoise(self, img):
        noisy = img.cuda().float() / 255
        maps = self.est_net(noisy).clamp(0, 1)
        residual = self.model(noisy, maps)
        return (noisy - residual).clamp(0, 1).cpu()

    def denoise_by_crops(self, img, wbin):
        _, c, h, w = img.shape
        out = torch.zeros(1, c, h, w)
        for i in range(0, h, wbin):
            for j in range(0, w, wbin):
                out[:, :, i:i + wbin, j:j + wbin] = self.denoise(img[:, :, i:i + wbin, j:j + wbin])
        return out

    def run(self):
        results = {}
        for name in self.opt["sizes"]:
            img = self.read(name)
            crop = self.opt["wbin"]
            results[name] = self.denoise_by_crops(img, crop) if crop else self.denoise(img)
            print(name, tuple(results[name].shape))
        return results


@expected("batch_without_gradients", fix="tiles|split", thread="yzhouas/PD-Denoising-pytorch#2", memory=700)
def real_image_denoise(fixed=False):
    """The test script sends the whole large image through the full-resolution denoising network at once; activations (64 channels at full
    resolution) of a large image do not fit. Small images (about 300 px) work. Cured by: Crop the large image into smaller patches, denoise
    each, and put them together again.
    """
    opt = dict(sizes={"stamp.png": (300, 300), "bench.png": (480, 640), "harbour.png": (1400, 2000)},
               wbin=512 if fixed else 0)
    DenoiseTester(opt).run()


# ------------------------------------------------------------------ Atari DQN

class PongLikeEnv:
    def __init__(self):
        self.base = np.random.RandomState(0).randint(0, 256, (1, 84, 84), dtype=np.uint8)
        self.t = 0

    def _obs(self):
        return np.roll(self.base, self.t % 84, axis=2)

    def reset(self):
        self.t = 0
        return self._obs()

    def step(self, action):
        self.t += 1
        return self._obs(), float(self.t % 7 == 0), self.t % 800 == 0


class State:
    def __init__(self, observation, reward=0.0, done=False):
        self.observation, self.reward, self.done = observation, reward, done

    @classmethod
    def from_gym(cls, obs, reward=0.0, done=False, device="cpu", dtype=torch.float32):
        return cls(torch.from_numpy(np.ascontiguousarray(obs)).to(device).to(dtype), reward, done)


class AtariEnvironment:
    def __init__(self, env, device, dtype=None):
        self.env, self.device = env, device
        self.kw = {} if dtype is None else {"dtype": dtype}

    def reset(self):
        return State.from_gym(self.env.reset(), device=self.device, **self.kw)

    def step(self, action):
        obs, reward, done = self.env.step(action)
        return State.from_gym(obs, reward, done, device=self.device, **self.kw)


class FrameStackBody:
    def __init__(self, size=4):
        self.frames = deque(maxlen=size)

    def process(self, state, first):
        if first:
            self.frames.extend([state.observation] * self.frames.maxlen)
        else:
            self.frames.append(state.observation)
        return State(list(self.frames), state.reward, state.done)


class ExperienceReplayBuffer:
    def __init__(self, capacity):
        self.buffer = deque(maxlen=capacity)

    def store(self, state, action, next_state):
        self.buffer.append((state, action, next_state))

    def sample(self, n):
        picks = random.sample(self.buffer, n)
        cat = lambda frames: torch.stack([torch.cat(f) for f in frames]).float() / 255
        s = cat([p[0].observation for p in picks])
        s2 = cat([p[2].observation for p in picks])
        a = torch.tensor([p[1] for p in picks]).cuda()
        r = torch.tensor([p[2].reward for p in picks]).cuda()
        return s, a, r, s2


def nature_dqn(actions):
    return nn.Sequential(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
                         nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(),
                         nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, actions))


class DQNAgent:
    def __init__(self, replay, actions=6):
        self.q, self.replay, self.actions = nature_dqn(actions).cuda(), replay, actions
        self.target = copy.deepcopy(self.q)
        self.optimizer = torch.optim.Adam(self.q.parameters(), lr=1e-4)
        self.state = self.action = None
        self.frames = 0

    def act(self, state):
        if self.state is not None:
            self.replay.store(self.state, self.action, state)
        self.frames += 1
        if self.frames > 1000 and self.frames % 128 == 0:
            self.learn()
        self.state, self.action = state, self.choose(state)
        return self.action

    def choose(self, state):
        if random.random() < 0.97:
            return random.randrange(self.actions)
        with torch.no_grad():
            return int(self.q(torch.cat(state.observation).unsqueeze(0).float() / 255).argmax())

    def learn(self):
        s, a, r, s2 = self.replay.sample(32)
        with torch.no_grad():
            goal = r + 0.99 * self.target(s2).max(1)[0]
        value = self.q(s).gather(1, a.clamp(0, self.actions - 1).unsqueeze(1)).squeeze(1)
        loss = F.smooth_l1_loss(value, goal)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


@expected("kept_tensors", fix=r"\.cpu\(\)|uint8", thread="cpnota/autonomous-learning-library#172", memory=270)
def atari_dqn_run(fixed=False):
    """`State.from_gym` is not given the observation's dtype and so makes float (32 bit) frames; the replay buffer on the GPU then holds 4
    times the memory of the uint8 frames of Atari and does not fit the card. Cured by: Pass `dtype` (uint8) to `State.from_gym()`.
    """
    random.seed(0)
    env = AtariEnvironment(PongLikeEnv(), "cuda", torch.uint8 if fixed else None)
    agent, body = DQNAgent(ExperienceReplayBuffer(5000)), FrameStackBody()
    state, first = env.reset(), True
    for _ in range(5200):
        action = agent.act(body.process(state, first))
        first = state.done
        state = env.reset() if state.done else env.step(action)
    print(len(agent.replay.buffer))


# ------------------------------------------------------------------ distillation

class NormalizationAdapter(nn.Module):
    def __init__(self, mean_original, std_original, mean_required, std_required):
        super().__init__()
        as_param = lambda v: nn.Parameter(torch.tensor(v).view(1, 3, 1, 1))
        self.additive = as_param([(a - b) / c for a, b, c in
                                  zip(mean_original, mean_required, std_original)])
        self.multiplier = as_param([a / b for a, b in zip(std_original, std_required)])

    def forward(self, x):
        return (x + self.additive) * self.multiplier


class ResidualUnit(nn.Module):
    def __init__(self, ch, width):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(ch, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, ch, 3, padding=1, bias=False), nn.BatchNorm2d(ch)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(y)))


class ResidualClassifier(nn.Module):
    def __init__(self, ch, width, units, classes=100):
        super().__init__()
        self.stem = nn.Conv2d(3, ch, 7, stride=4, padding=3)
        self.units = nn.Sequential(*[ResidualUnit(ch, width) for _ in range(units)])
        self.fc = nn.Linear(ch, classes)

    def forward(self, x):
        return self.fc(self.units(self.stem(x)).mean((2, 3)))


class KDModule(nn.Module):
    def __init__(self, student, teacher, teacher_input_adapter, freeze_adapter):
        super().__init__()
        self.student, self.teacher = student, teacher
        self.teacher_input_adapter = teacher_input_adapter
        self._freeze(self.teacher)
        if freeze_adapter:
            self._freeze(self.teacher_input_adapter)

    @staticmethod
    def _freeze(module):
        for p in module.parameters():
            p.requires_grad = False
        module.eval()

    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x):
        return self.student(x), self.teacher(self.teacher_input_adapter(x))


class KDLogitsLoss(nn.Module):
    def __init__(self, coeff=0.7, temperature=4.0):
        super().__init__()
        self.coeff, self.t = coeff, temperature

    def forward(self, outputs, target):
        student, teacher = outputs
        soft = F.kl_div(F.log_softmax(student / self.t, 1), F.softmax(teacher.detach() / self.t, 1),
                        reduction="batchmean") * self.t ** 2
        return self.coeff * soft + (1 - self.coeff) * F.cross_entropy(student, target)


class KDTrainer:
    def __init__(self, net, loader):
        self.net, self.loader = net.cuda(), loader
        self.criterion = KDLogitsLoss()
        self.optimizer = torch.optim.SGD(self.net.student.parameters(), lr=0.1, momentum=0.9)

    def train_epoch(self):
        self.net.train()
        for images, target in self.loader:
            outputs = self.net(images.cuda())
            loss = self.criterion(outputs, target.cuda())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def fit(self, epochs):
        for epoch in range(epochs):
            self.train_epoch()


@expected("graph_without_use", fix="requires_grad|no_grad", thread="Deci-AI/super-gradients#340", memory=600)
def distill_student_classifier(fixed=False):
    """Knowledge distillation: the teacher is frozen, but its input adaptor (now outside the teacher module) has parameters with
    `requires_grad=True`, so the entire teacher forward is recorded for backward and its activations are kept. Cured by: Freeze the teacher
    input adaptor too (`requires_grad=False`).
    """
    adapter = NormalizationAdapter([0.485, 0.456, 0.406], [0.229, 0.224, 0.225],
                                   [0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
    net = KDModule(ResidualClassifier(32, 32, 4), ResidualClassifier(96, 192, 10), adapter, fixed)
    data = TensorDataset(torch.rand(64, 3, 160, 160), torch.randint(0, 100, (64,)))
    KDTrainer(net, DataLoader(data, batch_size=16, shuffle=True)).fit(epochs=3)


# ------------------------------------------------------------------ RNN transducer

class Cut:
    def __init__(self, duration, tokens):
        self.duration, self.tokens = duration, tokens


def load_cuts(n, every):
    rng = random.Random(7)
    cuts = []
    for i in range(n):
        duration = rng.uniform(2.0, 8.0)
        count = int(duration * 4)
        if i % every == every - 5:
            count *= 16
        cuts.append(Cut(duration, [rng.randrange(1, 500) for _ in range(count)]))
    return cuts


class DurationBatcher:
    def __init__(self, cuts, max_duration):
        self.cuts, self.max_duration = cuts, max_duration

    def __iter__(self):
        batch, longest = [], 0.0
        for cut in self.cuts:
            longest = max(longest, cut.duration)
            if batch and longest * (len(batch) + 1) > self.max_duration:
                yield self.collate(batch)
                batch, longest = [], cut.duration
            batch.append(cut)
        if batch:
            yield self.collate(batch)

    def collate(self, batch):
        frames = int(max(c.duration for c in batch) * 100)
        y = torch.zeros(len(batch), max(len(c.tokens) for c in batch), dtype=torch.long)
        for i, c in enumerate(batch):
            y[i, :len(c.tokens)] = torch.tensor(c.tokens)
        return torch.randn(len(batch), frames, 40), y


class SpeechEncoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.sub = nn.Conv1d(40, dim, 5, stride=4)
        self.rnn = nn.LSTM(dim, dim, num_layers=2, batch_first=True)

    def forward(self, x):
        return self.rnn(self.sub(x.transpose(1, 2)).transpose(1, 2))[0]


class TokenPredictor(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.rnn = nn.LSTM(dim, dim, batch_first=True)

    def forward(self, y):
        return self.rnn(self.embedding(F.pad(y, (1, 0))))[0]


class Joiner(nn.Module):
    def __init__(self, dim, vocab):
        super().__init__()
        self.output_linear = nn.Linear(dim, vocab)

    def forward(self, enc, dec):
        return self.output_linear(torch.tanh(enc.unsqueeze(2) + dec.unsqueeze(1)))


class Transducer(nn.Module):
    def __init__(self, vocab=500, dim=256):
        super().__init__()
        self.encoder, self.decoder = SpeechEncoder(dim), TokenPredictor(vocab, dim)
        self.joiner = Joiner(dim, vocab)

    def forward(self, x, y):
        logits = self.joiner(self.encoder(x), self.decoder(y))
        blank = logits.logsumexp(-1) - logits[..., 0]
        index = y.clamp(0, 499)[:, None, :, None].expand(-1, logits.size(1), -1, 1)
        label = logits[:, :, :-1].gather(3, index)
        return blank.mean() - label.mean()


def train_transducer_epoch(model, optimizer, batches):
    for step, (x, y) in enumerate(batches):
        loss = model(x.cuda(), y.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(step, tuple(x.shape), tuple(y.shape), loss.item())


@expected("larger_step", fix="sequences|as large as", thread="k2-fsa/icefall#521", memory=800)
def rnnt_asr_epoch(fixed=False):
    """Batches are limited by audio duration only; some utterances in the data have a far too long text, and the joiner's output of size
    (batch, frames, text length, vocabulary) for the batch with such a text suddenly becomes huge, in the middle of the epoch. Cured by: Fix
    the data: remove the utterances whose text is too long.
    """
    cuts = load_cuts(240, every=160)
    if fixed:
        cuts = [c for c in cuts if len(c.tokens) <= c.duration * 25]
    model = Transducer().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    train_transducer_epoch(model, optimizer, DurationBatcher(cuts, max_duration=24))


# ------------------------------------------------------------------ component histograms

class LinearComponents(nn.Module):
    def __init__(self, d_in, d_out, C):
        super().__init__()
        self.V = nn.Parameter(torch.randn(d_in, C) / math.sqrt(d_in))
        self.U = nn.Parameter(torch.randn(C, d_out) / math.sqrt(C))

    def forward(self, x, mask):
        return ((x @ self.V) * mask) @ self.U


class Gate(nn.Module):
    def __init__(self, d_in, C):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(d_in, 64), nn.GELU(), nn.Linear(64, C))

    def forward(self, x):
        return torch.sigmoid(self.mlp(x)).clamp(0.0, 1.0)


class ComponentModel(nn.Module):
    def __init__(self, vocab=1000, d_model=256, layers=6, C=400):
        super().__init__()
        self.embed = nn.Embedding(vocab, d_model)
        self.components = nn.ModuleDict({f"layer{i}": LinearComponents(d_model, d_model, C)
                                         for i in range(layers)})
        self.gates = nn.ModuleDict({k: Gate(d_model, C) for k in self.components})
        self.unembed = nn.Linear(d_model, vocab)

    def forward(self, ids):
        x, ci = self.embed(ids), {}
        for name, module in self.components.items():
            ci[name] = self.gates[name](x)
            x = x + F.relu(module(x, ci[name]))
        return self.unembed(x), ci


class FaithfulnessMetric:
    def __init__(self):
        self.total, self.n = 0.0, 0

    def watch_batch(self, logits, ids, ci):
        self.total += F.cross_entropy(logits.flatten(0, 1), ids.flatten()).item()
        self.n += 1

    def compute(self):
        return {"eval/ce": self.total / self.n}


class ActivationDensity:
    def __init__(self):
        self.counts, self.n = {}, 0

    def watch_batch(self, logits, ids, ci):
        self.n += ids.numel()
        for name, values in ci.items():
            alive = (values > 0.1).sum(dim=(0, 1))
            self.counts[name] = self.counts.get(name, 0) + alive

    def compute(self):
        return {f"eval/density/{k}": (v / self.n).mean().item() for k, v in self.counts.items()}


class CIHistograms:
    def __init__(self, n_batches_accum=None):
        self.n_batches_accum = n_batches_accum
        self.batches_seen = 0
        self.values = {}

    def watch_batch(self, logits, ids, ci):
        if self.n_batches_accum is not None:
            if self.batches_seen >= self.n_batches_accum:
                return
            ci = {k: v.detach().cpu() for k, v in ci.items()}
        self.batches_seen += 1
        for name, values in ci.items():
            self.values.setdefault(name, []).append(values)

    def compute(self):
        merged = {k: torch.cat([v.flatten(0, -2) for v in vs]) for k, vs in self.values.items()}
        return {f"figures/ci_{k}": np.histogram(v.cpu().numpy(), bins=20)[0]
                for k, v in merged.items()}


def evaluate_components(model, batches, metrics, n_eval_steps):
    with torch.no_grad():
        for _ in range(n_eval_steps):
            ids = next(batches).cuda()
            logits, ci = model(ids)
            for metric in metrics:
                metric.watch_batch(logits, ids, ci)
    out = {}
    for metric in metrics:
        out.update(metric.compute())
    return out


def token_batches(batch_size, seq_len):
    while True:
        yield torch.randint(0, 1000, (batch_size, seq_len))


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="goodfire-ai/spd#100", memory=450)
def component_histogram_eval(fixed=False):
    """The histogram metric accumulates the causal-importance tensors of all evaluation steps on the GPU (then concatenates all of them) to
    plot one histogram. Cured by: Accumulate them on the CPU, and only those of the first `n_batches_accum` batches.
    """
    model = ComponentModel().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train, held_out = token_batches(8, 128), token_batches(8, 128)
    for step in range(20):
        ids = next(train).cuda()
        logits, ci = model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss = loss + 1e-3 * sum(v.mean() for v in ci.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    metrics = [FaithfulnessMetric(), ActivationDensity(), CIHistograms(4 if fixed else None)]
    results = evaluate_components(model, held_out, metrics, n_eval_steps=40)
    print(sorted(results)[:3])
