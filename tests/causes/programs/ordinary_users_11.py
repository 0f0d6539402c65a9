"""Programs after public threads of ordinary users: metrics, a checkpoint, padding, several models, a state, recordings, edges, all users."""
import gc
import os
import random
import tempfile

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, Dataset, random_split
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from expected import expected


# A small T5 learns to summarize, and a trainer reports the accuracy of its tokens on the validation set.

class NewsSummaries(Dataset):
    def __init__(self, n, vocab, src_len=256, tgt_len=96, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.src = torch.randint(3, vocab, (n, src_len), generator=g)
        self.tgt = torch.randint(3, vocab, (n, tgt_len), generator=g)
        for i in range(n):
            cut = int(torch.randint(tgt_len // 2, tgt_len, (1,), generator=g))
            self.tgt[i, cut:] = -100

    def __len__(self):
        return len(self.src)

    def __getitem__(self, i):
        return {"input_ids": self.src[i], "attention_mask": torch.ones_like(self.src[i]), "labels": self.tgt[i]}


def nested_concat(acc, new):
    if acc is None:
        return new
    return torch.cat([acc, new], dim=0)


def token_accuracy(preds, label_ids):
    pred_ids = preds.argmax(-1) if preds.dim() == 3 else preds
    keep = label_ids != -100
    hits = ((pred_ids == label_ids) & keep).sum()
    return {"token_acc": float(hits) / max(1, int(keep.sum()))}


def argmax_of_logits(logits, labels):
    return logits.argmax(dim=-1)


class MiniTrainer:
    def __init__(self, model, train_ds, eval_ds, compute_metrics=None, preprocess_logits_for_metrics=None, lr=5e-5, bs=8):
        self.device = torch.device("cuda")
        self.model = model.to(self.device)
        self.train_dl = DataLoader(train_ds, batch_size=bs, shuffle=True)
        self.eval_dl = DataLoader(eval_ds, batch_size=bs)
        self.compute_metrics = compute_metrics
        self.preprocess_logits = preprocess_logits_for_metrics
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.sched = get_linear_schedule_with_warmup(self.opt, 2, len(self.train_dl))

    def _to_device(self, batch):
        return {k: v.to(self.device) for k, v in batch.items()}

    def train(self):
        self.model.train()
        running = 0.0
        for batch in self.train_dl:
            out = self.model(**self._to_device(batch))
            out.loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.opt.step()
            self.sched.step()
            self.opt.zero_grad()
            running += out.loss.item()
        return {"loss": running / len(self.train_dl), **self.evaluate()}

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        preds, labels, losses = None, None, []
        for batch in self.eval_dl:
            batch = self._to_device(batch)
            out = self.model(**batch)
            losses.append(out.loss.item())
            logits = out.logits
            if self.preprocess_logits is not None:
                logits = self.preprocess_logits(logits, batch["labels"])
            preds = nested_concat(preds, logits)
            labels = nested_concat(labels, batch["labels"])
        metrics = {"eval_loss": sum(losses) / len(losses)}
        if self.compute_metrics is not None:
            metrics.update(self.compute_metrics(preds.cpu(), labels.cpu()))
        return metrics


@expected("growing_buffer", fix="argmax|only what is used",
          thread="discuss.huggingface.co/t/cuda-out-of-memory-when-using-trainer-with-compute-metrics/2941/13", memory=4096)
def concat_logits_for_metrics(fixed=False):
    """The evaluation concatenates the logits of all batches on the GPU, [96, 32128] of each sample, where the metrics need one index of each
    position. Cured by: `preprocess_logits_for_metrics`, which leaves of each batch the argmax.
    """
    torch.manual_seed(1)
    cfg = T5Config(vocab_size=32128, d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8, decoder_start_token_id=0, pad_token_id=0)
    train_ds, eval_ds = NewsSummaries(64, cfg.vocab_size, seed=1), NewsSummaries(320, cfg.vocab_size, seed=2)
    trainer = MiniTrainer(T5ForConditionalGeneration(cfg), train_ds, eval_ds, compute_metrics=token_accuracy,
                          preprocess_logits_for_metrics=argmax_of_logits if fixed else None)
    return trainer.train()


# Masked words are learned in sessions, each of which continues from the last checkpoint.

class MaskedSentences(Dataset):
    def __init__(self, n, vocab=30000, maxlen=64):
        self.ids = torch.randint(2, vocab, (n, maxlen), generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        ids = self.ids[i].clone()
        target = ids.clone()
        hide = torch.rand(len(ids)) < 0.15
        ids[hide] = 1
        target[~hide] = -100
        return ids, target


class MaskedWordModel(nn.Module):
    def __init__(self, vocab=30000, maxlen=64, d=768, layers=12, heads=12):
        super().__init__()
        self.tok = nn.Embedding(vocab, d)
        self.pos = nn.Parameter(torch.zeros(1, maxlen, d))
        layer = nn.TransformerEncoderLayer(d, heads, 4 * d, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(d, vocab)

    def forward(self, ids):
        return self.head(self.enc(self.tok(ids) + self.pos))


def train_masked_epoch(model, loader, optimizer, device):
    model.train()
    crit = nn.CrossEntropyLoss()
    total = 0.0
    for ids, target in loader:
        ids, target = ids.to(device), target.to(device)
        optimizer.zero_grad()
        logits = model(ids)
        loss = crit(logits.flatten(0, 1), target.flatten())
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


def run_session(path, sentences, device, fixed, resume=False, save=False):
    model = MaskedWordModel().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    start, best = 0, float("inf")
    if resume and os.path.isfile(path):
        checkpoint = torch.load(path, map_location="cpu") if fixed else torch.load(path)
        model.load_state_dict(checkpoint["state"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        start, best = checkpoint["epoch"] + 1, checkpoint["best"]
        if fixed:
            del checkpoint
            torch.cuda.empty_cache()

    loader = DataLoader(MaskedSentences(sentences), batch_size=8, shuffle=True, drop_last=True)
    best = min(best, train_masked_epoch(model, loader, optimizer, device))
    if save:
        torch.save({"state": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": start, "best": best}, path)
    return best


@expected("loaded_onto_gpu", fix="map_location", thread="discuss.pytorch.org/t/multi-gpu-torch-load-out-of-memory/117775", memory=3072)
def resume_masked_session(fixed=False):
    """`torch.load` puts the checkpoint where it was saved from, on the GPU, and the variable keeps it during the whole session, so that the
    weights are there twice. Cured by: `map_location="cpu"` and `del checkpoint`.
    """
    torch.manual_seed(0)
    device = torch.device("cuda")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "ckpt_mlm.t7")
        run_session(path, 8, device, fixed, save=True)
        gc.collect()
        torch.cuda.empty_cache()
        return run_session(path, 64, device, fixed, resume=True)


# GPT-2 is tuned on a collection of short descriptions of products.

EOS = 50256


class WordTokenizer:
    """Numbers of words, and the padding."""

    def __init__(self, vocab=50257):
        self.vocab, self.pad_token_id = vocab, EOS

    def __call__(self, text, max_length):
        ids = [int(w[1:]) * 7 % (self.vocab - 1) for w in text.split()] + [EOS]
        ids = ids[:max_length]
        fill = max_length - len(ids)
        return {"input_ids": ids + [self.pad_token_id] * fill, "attention_mask": [1] * len(ids) + [0] * fill}


def make_descriptions(n):
    rnd = random.Random(4)
    words = [f"w{i}" for i in range(5000)]
    return [" ".join(rnd.choices(words, k=rnd.randint(15, 80))) for _ in range(n)]


class DescriptionDataset(Dataset):
    def __init__(self, texts, tokenizer, max_length):
        self.input_ids, self.masks = [], []
        for text in texts:
            enc = tokenizer(text, max_length=max_length)
            self.input_ids.append(torch.tensor(enc["input_ids"]))
            self.masks.append(torch.tensor(enc["attention_mask"]))

    def __len__(self):
        return len(self.input_ids)

    def __getitem__(self, i):
        return self.input_ids[i], self.masks[i]


@torch.no_grad()
def validate_descriptions(model, loader, device):
    model.eval()
    losses = []
    for ids, mask in loader:
        ids, mask = ids.to(device), mask.to(device)
        labels = ids.masked_fill(mask == 0, -100)
        losses.append(model(input_ids=ids, attention_mask=mask, labels=labels).loss.item())
    return sum(losses) / len(losses)


@expected("padding", fix="padding", thread="openillumi.com/en/en-fix-gpt2-oom-low-vram", memory=6144)
def tune_on_padded_descriptions(fixed=False):
    """Texts of 15 to 80 words are padded to the 1024 positions that the model can have, and each layer works on the padding as well. Cured
    by: a largest length of 100.
    """
    torch.manual_seed(0)
    device = torch.device("cuda")
    max_length = 100 if fixed else 1024
    data = DescriptionDataset(make_descriptions(48), WordTokenizer(), max_length)
    train_set, val_set = random_split(data, [40, 8])
    train_loader = DataLoader(train_set, batch_size=4, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=4)

    model = GPT2LMHeadModel(GPT2Config(vocab_size=50257, bos_token_id=EOS, eos_token_id=EOS)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, eps=1e-8)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 5, len(train_loader))
    model.train()
    total = 0.0
    for ids, mask in train_loader:
        ids, mask = ids.to(device), mask.to(device)
        labels = ids.masked_fill(mask == 0, -100)
        optimizer.zero_grad()
        outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
        outputs.loss.backward()
        optimizer.step()
        scheduler.step()
        total += outputs.loss.item()
    return total / len(train_loader), validate_descriptions(model, val_loader, device)


# The perplexities that several language models give to the same sentences are compared.

ZOO = {
    "distil": dict(n_layer=6, n_embd=768, n_head=12),
    "small": dict(n_layer=12, n_embd=768, n_head=12),
    "medium": dict(n_layer=24, n_embd=1024, n_head=16),
}


def load_from_zoo(name):
    model = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=50257, n_positions=512, **ZOO[name]))
    model.eval()
    return model


def read_sentences(n=60, seed=11):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(12, 96, (n,), generator=g).tolist()
    return [torch.randint(0, 50257, (length,), generator=g) for length in lengths]


def sentence_nll(model, ids):
    ids = ids.unsqueeze(0).cuda()
    with torch.no_grad():
        logits = model(ids).logits
        nll = F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")
    return nll.item(), ids.numel() - 1


def mean_nll(model, sentences):
    out = []
    for ids in sentences:
        nll, n = sentence_nll(model, ids)
        out.append(nll / n)
    return sum(out) / len(out)


@expected("several_models", fix=r"\bdel\b|= None", thread="openillumi.com/?p=74427", memory=1800)
def compare_models_of_zoo(fixed=False):
    """`empty_cache()` at the end of the loop frees nothing, as `model` is the model of the turn before until the next one is on the GPU.
    Cured by: `model.cpu()`, `del model` and `gc.collect()` before `empty_cache()`.
    """
    torch.manual_seed(0)
    sentences = read_sentences()
    report = {}
    for name in ZOO:
        model = load_from_zoo(name).to("cuda")
        report[name] = mean_nll(model, sentences)
        if fixed:
            model.cpu()
            del model
            gc.collect()
        torch.cuda.empty_cache()
    return min(report, key=report.get)


# Loads are forecast by an LSTM whose state is carried on from window to window.

class WindowsOfLoads(Dataset):
    """Many parallel series, cut in consecutive windows."""

    def __init__(self, series=256, windows=24, length=96, features=8):
        g = torch.Generator().manual_seed(0)
        base = torch.sin(torch.arange(windows * length) / 24.0).view(1, -1, 1)
        noise = torch.randn(series, windows * length, features, generator=g)
        self.data = (base + 0.1 * noise).view(series, windows, length, features).transpose(0, 1).contiguous()

    def __len__(self):
        return len(self.data) - 1

    def __getitem__(self, i):
        return self.data[i], self.data[i + 1][:, :24, 0]


class LoadForecaster(nn.Module):
    def __init__(self, fixed, features=8, hidden=512, layers=2, horizon=24, batch=256):
        super().__init__()
        self.fixed = fixed
        self.flat = nn.Linear(features, 64)
        self.lstm = nn.LSTM(64, hidden, layers, batch_first=True)
        self.out = nn.Sequential(nn.Linear(hidden, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, horizon))
        self.h0 = torch.zeros(layers, batch, hidden, device="cuda")
        self.c0 = torch.zeros(layers, batch, hidden, device="cuda")

    def forward(self, x):
        z = torch.relu(self.flat(x))
        f, state = self.lstm(z, (self.h0, self.c0))
        if self.fixed:
            (self.h0, self.c0) = state[0].detach(), state[1].detach()
        else:
            (self.h0, self.c0) = state
        return self.out(f[:, -1])

    def reset(self):
        self.h0 = torch.zeros_like(self.h0)
        self.c0 = torch.zeros_like(self.c0)


def fit_windows(model, loader, criterion, optimizer):
    model.train()
    model.reset()
    optimizer.zero_grad()
    history = []
    for x, y in loader:
        x, y = x.squeeze(0).cuda(), y.squeeze(0).cuda()
        loss = criterion(model(x), y) / len(loader)
        # without it: "Trying to backward through the graph a second time"
        loss.backward(retain_graph=not model.fixed)
        history.append(loss.item())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return sum(history)


@torch.no_grad()
def validate_windows(model, loader, criterion):
    model.eval()
    model.reset()
    return sum(criterion(model(x.squeeze(0).cuda()), y.squeeze(0).cuda()).item() for x, y in loader) / len(loader)


@expected("graph_of_earlier_steps", fix="detach", thread="e-com-net.com/article/1600156146990088192.htm", memory=2048)
def carry_state_between_windows(fixed=False):
    """The module keeps the state of the LSTM with its graph, and `retain_graph=True` silences the error that says so: the graph of each
    window leads to those of all before it. Cured by: `detach()` of both states, without `retain_graph`.
    """
    torch.manual_seed(0)
    train_loader = DataLoader(WindowsOfLoads(windows=24), batch_size=1)
    val_loader = DataLoader(WindowsOfLoads(windows=5), batch_size=1)
    model = LoadForecaster(fixed).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    best = float("inf")
    for _ in range(2):
        fit_windows(model, train_loader, nn.MSELoss(), optimizer)
        best = min(best, validate_windows(model, val_loader, nn.MSELoss()))
        scheduler.step()
    return best


# Speech is recognized with CTC, from a collected corpus some recordings of which were never cut at pauses.

LETTERS = "_'ABCDEFGHIJKLMNOPQRSTUVWXYZ "


def build_manifest(n=160, seed=5):
    """Pairs of seconds and transcript."""
    rnd = random.Random(seed)
    rows = []
    for i in range(n):
        seconds = rnd.uniform(2.0, 12.0)
        if i % 40 == 37:
            seconds = rnd.uniform(40.0, 46.0)
        chars = max(4, int(seconds * 6))
        rows.append((seconds, "".join(rnd.choice(LETTERS[1:]) for _ in range(chars))))
    return rows


class SpectrogramsOfManifest(Dataset):
    def __init__(self, manifest, bins=161, frames_per_second=100):
        self.manifest, self.bins, self.frames_per_second = manifest, bins, frames_per_second
        self.index = {c: i for i, c in enumerate(LETTERS)}

    def __len__(self):
        return len(self.manifest)

    def __getitem__(self, i):
        seconds, text = self.manifest[i]
        spect = torch.randn(self.bins, int(seconds * self.frames_per_second))
        return spect, torch.tensor([self.index[c] for c in text])


def pad_spectrograms(batch):
    batch.sort(key=lambda s: s[0].size(1), reverse=True)
    bins, longest = batch[0][0].shape
    inputs = torch.zeros(len(batch), 1, bins, longest)
    frames, target_sizes, targets = [], [], []
    for k, (spect, target) in enumerate(batch):
        inputs[k, 0, :, :spect.size(1)] = spect
        frames.append(spect.size(1))
        target_sizes.append(len(target))
        targets.append(target)
    return inputs, torch.tensor(frames), torch.cat(targets), torch.tensor(target_sizes)


class ConvGruRecognizer(nn.Module):
    def __init__(self, hidden=640, layers=4):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 32, (41, 11), stride=(2, 2), padding=(20, 5)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20),
            nn.Conv2d(32, 32, (21, 11), stride=(2, 1), padding=(10, 5)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20))
        self.rnn = nn.GRU(32 * 41, hidden, layers, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(2 * hidden, len(LETTERS))

    def forward(self, x, frames):
        x = self.conv(x)
        b, c, f, t = x.shape
        x = x.view(b, c * f, t).transpose(1, 2)
        lengths = (frames + 1) // 2
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        x, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.fc(x).log_softmax(-1).transpose(0, 1), lengths


@expected("larger_step", fix="cut|longest", thread="SeanNaren/deepspeech.pytorch#206", memory=4096)
def recognize_uncut_recordings(fixed=False):
    """A few recordings of 40 seconds are among those of 2 to 12, and the batch that has one of them is padded to its length. Cured by:
    recordings of more than 15 seconds are left out.
    """
    torch.manual_seed(0)
    manifest = build_manifest()
    if fixed:
        manifest = [row for row in manifest if 1.0 <= row[0] <= 15.0]
    loader = DataLoader(SpectrogramsOfManifest(manifest), batch_size=10, shuffle=True, collate_fn=pad_spectrograms)
    model = ConvGruRecognizer().cuda()
    criterion = nn.CTCLoss(zero_infinity=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-4, momentum=0.9, nesterov=True)
    average = 0.0
    for inputs, frames, targets, sizes in loader:
        out, lengths = model(inputs.cuda(), frames)
        loss = criterion(out, targets.cuda(), lengths, sizes)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 400)
        optimizer.step()
        average += loss.item()
    return average / len(loader)


# Nodes of a large graph are classified by GraphSAGE, with the whole graph in one step.

def make_node_graph(nodes=40000, edges=1_000_000, features=602, classes=41, seed=0):
    g = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(0, nodes, (2, edges), generator=g)
    x = torch.randn(nodes, features, generator=g)
    y = torch.randint(0, classes, (nodes,), generator=g)
    split = torch.rand(nodes, generator=g)
    return x, y, edge_index, split < 0.66, split > 0.9


def mean_adjacency(edge_index, nodes):
    src, dst = edge_index
    degree = torch.bincount(dst, minlength=nodes).clamp(min=1).float()
    adj = torch.sparse_coo_tensor(torch.stack([dst, src]), 1.0 / degree[dst], (nodes, nodes))
    return adj.coalesce().to_sparse_csr()


class MeanSageConv(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.lin_self = nn.Linear(d_in, d_out)
        self.lin_neigh = nn.Linear(d_in, d_out, bias=False)

    def aggregate(self, x, edge_index):
        src, dst = edge_index
        messages = x[src]
        total = torch.zeros_like(x).index_add_(0, dst, messages)
        degree = torch.zeros(x.size(0), device=x.device).index_add_(0, dst, torch.ones_like(dst, dtype=x.dtype))
        return total / degree.clamp(min=1).unsqueeze(1)

    def forward(self, x, graph):
        return self.lin_self(x) + self.lin_neigh(self.aggregate(x, graph))


class SparseMeanSageConv(MeanSageConv):
    def aggregate(self, x, adj):
        return torch.sparse.mm(adj, x)


class SageOfGraph(nn.Module):
    def __init__(self, conv, d_in, hidden, classes, layers=2, dropout=0.5):
        super().__init__()
        dims = [d_in] + [hidden] * (layers - 1) + [classes]
        self.convs = nn.ModuleList(conv(a, b) for a, b in zip(dims[:-1], dims[1:]))
        self.dropout = dropout

    def forward(self, x, graph):
        for i, conv in enumerate(self.convs):
            x = conv(x, graph)
            if i < len(self.convs) - 1:
                x = F.dropout(F.relu(x), self.dropout, self.training)
        return x


@torch.no_grad()
def node_accuracy(model, x, y, graph, mask):
    model.eval()
    pred = model(x, graph).argmax(-1)
    return ((pred == y) & mask).sum().item() / max(1, int(mask.sum().item()))


@expected("enlarged", fix="adjacency|sparse", thread="discuss.dgl.ai/t/how-does-dgl-save-gpu-memory/1059", memory=2048)
def classify_nodes_of_graph(fixed=False):
    """`x[src]` copies the features of a node for each of its edges, 25 times what the nodes have, before they are added up. Cured by: the
    product of a sparse matrix of the edges with the features.
    """
    torch.manual_seed(0)
    device = torch.device("cuda")
    x, y, edge_index, train_mask, val_mask = make_node_graph()
    graph = (mean_adjacency(edge_index, x.size(0)) if fixed else edge_index).to(device)
    x, y = x.to(device), y.to(device)
    train_idx = train_mask.nonzero().squeeze(1).to(device)
    val_mask = val_mask.to(device)

    model = SageOfGraph(SparseMeanSageConv if fixed else MeanSageConv, x.size(1), 256, 41).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    best = 0.0
    for _ in range(5):
        model.train()
        optimizer.zero_grad()
        logits = model(x, graph)
        loss = F.cross_entropy(logits[train_idx], y[train_idx])
        loss.backward()
        optimizer.step()
        best = max(best, node_accuracy(model, x, y, graph, val_mask))
    return best


# Items are recommended by the tower of a user against those of the items, and after each epoch the vectors of all users are computed.

N_USERS, N_ITEMS, N_CITY, N_AGE, N_DEVICE = 1_500_000, 20_000, 400, 90, 30


class TableOfUsers:
    """What is known of every user, and the items of last, on the host."""

    def __init__(self, recent=10, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.side = torch.stack([torch.randint(0, n, (N_USERS,), generator=g) for n in (N_CITY, N_AGE, N_DEVICE)], 1)
        self.recent = torch.randint(0, N_ITEMS, (N_USERS, recent), generator=g)


class ItemsOfUsers(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.users = torch.randint(0, N_USERS, (n,), generator=g)
        self.items = torch.randint(0, N_ITEMS, (n,), generator=g)

    def __len__(self):
        return len(self.users)

    def __getitem__(self, i):
        return self.users[i], self.items[i]


class TowerOfUsers(nn.Module):
    def __init__(self, dim=16, hidden=(128, 64)):
        super().__init__()
        self.user_emb = nn.Embedding(N_USERS, dim)
        self.item_emb = nn.Embedding(N_ITEMS, dim)
        self.side_embs = nn.ModuleList(nn.Embedding(n, dim) for n in (N_CITY, N_AGE, N_DEVICE))
        sizes = [dim * 5, *hidden]
        self.mlp = nn.Sequential(*[m for a, b in zip(sizes[:-1], sizes[1:]) for m in (nn.Linear(a, b), nn.ReLU())])
        self.item_out = nn.Embedding(N_ITEMS, hidden[-1])

    def user_vector(self, users, side, recent):
        parts = [self.user_emb(users), self.item_emb(recent).mean(1)]
        parts += [emb(side[:, k]) for k, emb in enumerate(self.side_embs)]
        return self.mlp(torch.cat(parts, 1))


class ItemRecommender:
    def __init__(self, table, device, fixed):
        self.table, self.device, self.fixed = table, device, fixed
        self.net = TowerOfUsers().to(device)
        self.opt = torch.optim.Adam(self.net.parameters(), lr=1e-3)
        self.user_vectors = None

    def _forward_users(self, users):
        t = self.table
        return self.net.user_vector(users.to(self.device), t.side[users].to(self.device), t.recent[users].to(self.device))

    def train_epoch(self, loader):
        self.net.train()
        total = 0.0
        for users, items in loader:
            items = items.to(self.device)
            scores = self._forward_users(users) @ self.net.item_out(items).T
            loss = F.cross_entropy(scores, torch.arange(len(users), device=self.device))
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            total += loss.item()
        return total / len(loader)

    @torch.no_grad()
    def set_latent_vectors(self):
        self.net.eval()
        users = torch.arange(N_USERS)
        if self.fixed:
            self.user_vectors = torch.cat([self._forward_users(part).cpu() for part in users.split(16384)]).numpy()
        else:
            self.user_vectors = self._forward_users(users).cpu().numpy()
        self.item_vectors = self.net.item_out.weight.cpu().numpy()

    def recall_at(self, users, items, k=50):
        hits = 0
        for u, i in zip(users.tolist(), items.tolist()):
            scores = self.item_vectors @ self.user_vectors[u]
            hits += int(i in np.argpartition(-scores, k)[:k])
        return hits / len(users)


@expected("larger_step", fix="split", thread="massquantity/LibRecommender#74", memory=2048)
def serve_vectors_of_all_users(fixed=False):
    """After training in batches of 1024, the vectors of all 1.5 million users are computed by one forward pass. Cured by: 16384 users at a
    time, each part copied to the host.
    """
    torch.manual_seed(0)
    rec = ItemRecommender(TableOfUsers(), torch.device("cuda"), fixed)
    train, test = ItemsOfUsers(16384, 1), ItemsOfUsers(50, 2)
    loader = DataLoader(train, batch_size=1024, shuffle=True, drop_last=True)
    recall = []
    for _ in range(2):
        rec.train_epoch(loader)
        rec.set_latent_vectors()
        recall.append(rec.recall_at(test.users, test.items))
    return recall
