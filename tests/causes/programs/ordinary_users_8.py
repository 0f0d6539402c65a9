"""Programs after public threads of ordinary users: logged maxima, policies, scores of prompts, speech, relations, weather, a sweep, hooks."""
import io
import math
import queue
import random

import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2Model

from expected import expected


# A language model is trained, and the largest attention logit of each head is watched.

class TokenRows(Dataset):
    def __init__(self, count, length, vocab):
        self.data = torch.randint(0, vocab, (count, length + 1))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return self.data[i, :-1], self.data[i, 1:]


class WatchedAttention(nn.Module):
    """Also has the largest logit of each head so far, for the log."""

    def __init__(self, heads, fixed):
        super().__init__()
        self.heads, self.fixed, self.dropout = heads, fixed, nn.Dropout(0.1)
        self.current_max_attn_logits = None

    def forward(self, q, k, v, mask):
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1))
        scores = scores.masked_fill(mask, -1e4)
        batch_max = (scores.detach() if self.fixed else scores).amax(dim=(0, 2, 3))
        if self.current_max_attn_logits is None:
            self.current_max_attn_logits = batch_max
        else:
            self.current_max_attn_logits = torch.max(self.current_max_attn_logits, batch_max)
        return torch.matmul(self.dropout(F.softmax(scores, dim=-1)), v)


class WatchedBlock(nn.Module):
    def __init__(self, d, heads, fixed):
        super().__init__()
        self.heads, self.core = heads, WatchedAttention(heads, fixed)
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x, mask):
        b, t, d = x.shape
        q, k, v = (z.transpose(1, 2) for z in self.qkv(self.ln1(x)).view(b, t, 3, self.heads, d // self.heads).unbind(2))
        x = x + self.proj(self.core(q, k, v, mask).transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln2(x))


class WatchedGPT(nn.Module):
    def __init__(self, fixed, vocab=4000, d=256, heads=8, layers=6, length=256):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(length, d)
        self.blocks = nn.ModuleList(WatchedBlock(d, heads, fixed) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)
        self.register_buffer("mask", torch.triu(torch.ones(length, length, dtype=torch.bool), 1))

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.ln(x))


@expected("recurrent_state", fix="detach", thread="NVIDIA/Megatron-LM#5067", memory=800)
def watch_largest_logits(fixed=False):
    """`current_max_attn_logits`, a number for the log, is computed with its graph, and each step's maximum goes on with that of the step
    before: the scores of attention of all steps stay. Cured by: the maximum of `scores.detach()`.
    """
    model = WatchedGPT(fixed).cuda().train()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 16)
    largest = []
    for x, y in DataLoader(TokenRows(64, 256, 4000), batch_size=4, shuffle=True):
        logits = model(x.cuda())
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.cuda().view(-1))
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        largest.append(max(block.core.current_max_attn_logits.max().item() for block in model.blocks))
    return largest


# A policy learns from groups of samples, and from the log-probabilities that it gave them before.

class SampleBuffer:
    def __init__(self, count, length, vocab):
        self.samples = [{"tokens": torch.randint(0, vocab, (length,)), "reward": random.random()} for _ in range(count)]

    def micro_batches(self, size):
        for i in range(0, len(self.samples), size):
            yield torch.stack([sample["tokens"] for sample in self.samples[i:i + size]]).cuda()

    def advantages(self):
        r = torch.tensor([sample["reward"] for sample in self.samples]).view(-1, 8)
        return ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-6)).view(-1)


def token_log_probs(logits, tokens, prompt=32):
    logits, target = logits[:, prompt - 1:-1].float(), tokens[:, prompt:]
    return logits.gather(-1, target.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, dim=-1)


def collect_all(logits, tokens):
    return {"logits": logits, "log_probs": token_log_probs(logits, tokens)}


def collect_log_probs(logits, tokens):
    return {"log_probs": token_log_probs(logits, tokens)}


def forward_only(model, buffer, micro, process_fn):
    store = []
    model.eval()
    with torch.no_grad():
        for tokens in buffer.micro_batches(micro):
            logits = model(tokens, use_cache=False).logits
            store.append(process_fn(logits, tokens))
    model.train()
    return store


def clipped_policy_loss(new, old, adv, clip=0.2):
    ratio, adv = (new - old).exp(), adv.unsqueeze(1)
    return -torch.min(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv).mean()


def train_policy_iteration(model, opt, fixed, micro=4, count=64):
    buffer = SampleBuffer(count, 128, 16_000)
    adv = buffer.advantages().cuda()
    outputs = forward_only(model, buffer, micro, collect_log_probs if fixed else collect_all)
    old = torch.cat([output["log_probs"] for output in outputs])
    total = 0.0
    opt.zero_grad(set_to_none=True)
    for k, tokens in enumerate(buffer.micro_batches(micro)):
        part = slice(k * micro, (k + 1) * micro)
        logits = model(tokens, use_cache=False).logits
        loss = clipped_policy_loss(token_log_probs(logits, tokens), old[part], adv[part])
        (loss * micro / count).backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    return total


@expected("kept_tensors", fix="only|part|log", thread="THUDM/slime#1506", memory=780)
def update_policy_of_groups(fixed=False):
    """The pass that is to give the log-probabilities of the old policy collects the logits of all micro-batches beside them, over the whole
    vocabulary, and they stay for the update. Cured by: only the log-probabilities collected.
    """
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=16_000, n_positions=128)).cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-6)
    return [train_policy_iteration(model, opt, fixed) for _ in range(2)]


# A server scores prompts: the log-probability of each token, and the best tokens at its place.

class ScoringEngine:
    vocab = 151_936

    def __init__(self, dtype=torch.float16):
        config = Qwen2Config(vocab_size=self.vocab, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=2,
                             num_key_value_heads=1, max_position_embeddings=1024)
        self.body = Qwen2Model(config).to("cuda", dtype).eval()
        self.lm_head = nn.Linear(128, self.vocab, bias=False)
        self.lm_head.weight = self.body.embed_tokens.weight

    @torch.inference_mode()
    def prefill(self, ids):
        out = self.body(input_ids=ids.cuda(), use_cache=True)
        return out.last_hidden_state, out.past_key_values


class PromptScorer:
    def __init__(self, engine, fixed, top_k=5):
        self.engine, self.fixed, self.top_k = engine, fixed, top_k

    @torch.inference_mode()
    def process(self, hidden, ids):
        rows = hidden[:, :-1].reshape(-1, hidden.size(-1))
        targets = ids[:, 1:].reshape(-1, 1).to(hidden.device)
        logits = self.engine.lm_head(rows)
        if self.fixed:
            norm = torch.logsumexp(logits, dim=-1, keepdim=True)
            token_lp = (logits.gather(-1, targets) - norm).squeeze(-1).float()
            top_val, top_idx = logits.topk(self.top_k, dim=-1)
            top_val = (top_val - norm).float()
        else:
            logprobs = torch.log_softmax(logits.float(), dim=-1)
            token_lp = logprobs.gather(-1, targets).squeeze(-1)
            top_val, top_idx = logprobs.topk(self.top_k, dim=-1)
        return token_lp.cpu(), top_val.cpu(), top_idx.cpu()


class PromptScheduler:
    def __init__(self, engine, scorer, max_batch_tokens):
        self.engine, self.scorer, self.max_batch_tokens, self.waiting = engine, scorer, max_batch_tokens, queue.Queue()

    def next_batch(self):
        requests, used = [], 0
        while not self.waiting.empty():
            number, ids = self.waiting.queue[0]
            if requests and used + ids.numel() > self.max_batch_tokens:
                break
            requests.append(self.waiting.get())
            used += ids.numel()
        return requests

    def step(self):
        requests = self.next_batch()
        if not requests:
            return {}
        ids = torch.stack([ids for _, ids in requests])
        hidden, cache = self.engine.prefill(ids)
        lp, top_val, top_idx = self.scorer.process(hidden, ids)
        return {number: row.sum().item() for (number, _), row in zip(requests, lp.view(len(requests), -1))}


@expected("logits", fix="logsumexp|split|part", thread="sgl-project/sglang#31958", memory=1300)
def score_prompts(fixed=False):
    """Of each token of a prompt a few numbers are needed, and for them `log_softmax` of the logits of all tokens of the batch is made, over
    the whole vocabulary and in float32. Cured by: `logsumexp` of each row, and `gather` and `topk` of the logits as they are.
    """
    engine = ScoringEngine()
    scheduler = PromptScheduler(engine, PromptScorer(engine, fixed), max_batch_tokens=1024)
    for number in range(8):
        scheduler.waiting.put((number, torch.randint(0, engine.vocab, (32,))))
    served = scheduler.step()
    for number in range(8, 16):
        scheduler.waiting.put((number, torch.randint(0, engine.vocab, (256,))))
    while answers := scheduler.step():
        served.update(answers)
    return served


# Speech to text: filter banks, convolutions, a transformer, CTC.

class FilterBanks(Dataset):
    def __init__(self, count, fixed, mels=80, vocab=1000):
        rng = random.Random(3)
        self.mels, self.vocab = mels, vocab
        self.items = [int(min(1800, max(200, rng.gauss(900, 350)))) for _ in range(count)]
        for place in (count // 2, count - 5):  # recordings that nobody has cut
            self.items[place] = rng.randint(14_000, 16_000)
        if fixed:
            self.items = [frames for frames in self.items if frames <= 3000]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return torch.randn(self.items[i], self.mels), torch.randint(1, self.vocab, (self.items[i] // 30,))


def pad_speech(samples):
    feats, labels = zip(*samples)
    return {"feats": nn.utils.rnn.pad_sequence(feats, batch_first=True), "feat_len": torch.tensor([len(x) for x in feats]),
            "labels": nn.utils.rnn.pad_sequence(labels, batch_first=True), "label_len": torch.tensor([len(y) for y in labels])}


class SpeechSubsampling(nn.Module):
    def __init__(self, d, mels=80, channels=16):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, channels, 3, 2, 1), nn.ReLU(), nn.Conv2d(channels, channels, 3, 2, 1), nn.ReLU())
        self.out = nn.Linear(channels * (mels // 4), d)

    def forward(self, x):
        return self.out(self.conv(x.unsqueeze(1)).transpose(1, 2).flatten(2))


class SpeechRecognizer(nn.Module):
    def __init__(self, d=128, layers=4, vocab=1000):
        super().__init__()
        self.sub, self.ctc = SpeechSubsampling(d), nn.Linear(d, vocab)
        layer = nn.TransformerEncoderLayer(d, 4, 4 * d, dropout=0.1, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, feats, lengths):
        x, lengths = self.sub(feats), (lengths + 3) // 4
        pad = torch.arange(x.size(1))[None, :] >= lengths[:, None]
        return self.ctc(self.enc(x, src_key_padding_mask=pad.to(x.device))), lengths


@expected("larger_step", fix="cut|longest|length", thread="facebookresearch/fairseq#1782", memory=1000)
def train_speech_recognizer(fixed=False):
    """Nothing limits the length of a recording, and a batch is padded to its longest one: a few recordings that are many times as long as
    the others make batches as large. Cured by: recordings over a maximum length left out.
    """
    model = SpeechRecognizer().cuda().train()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min((step + 1) / 1000, 1.0))
    total = 0.0
    for batch in DataLoader(FilterBanks(96, fixed), batch_size=8, shuffle=False, collate_fn=pad_speech):
        feats = batch["feats"].cuda()
        logits, lengths = model(feats, batch["feat_len"])
        lp = F.log_softmax(logits, -1).transpose(0, 1)
        loss = F.ctc_loss(lp, batch["labels"].cuda(), lengths, batch["label_len"], zero_infinity=True)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        sched.step()
        total += loss.item()
    return total


# Relations of a knowledge graph: a graph network makes embeddings of the entities, and validation ranks each entity.

class RelationLayer(nn.Module):
    def __init__(self, dim, relations, bases=4):
        super().__init__()
        self.basis, self.coef = nn.Parameter(torch.randn(bases, dim, dim)), nn.Parameter(torch.randn(2 * relations, bases))
        self.root = nn.Linear(dim, dim)

    def forward(self, x, src, rel, dst, norm):
        out = self.root(x)
        for b in range(self.basis.size(0)):
            h = x @ self.basis[b]
            out = out.index_add(0, dst, h[src] * (self.coef[rel, b] * norm).unsqueeze(1))
        return out


class RelationPredictor(nn.Module):
    def __init__(self, entities, relations, dim=100):
        super().__init__()
        self.emb, self.rel, self.drop = nn.Embedding(entities, dim), nn.Parameter(torch.randn(relations, dim)), nn.Dropout(0.2)
        self.conv1, self.conv2 = RelationLayer(dim, relations), RelationLayer(dim, relations)

    def forward(self, graph):
        return self.conv2(self.drop(F.relu(self.conv1(self.emb.weight, *graph))), *graph)

    def score(self, emb, trip):
        return (emb[trip[:, 0]] * self.rel[trip[:, 1]] * emb[trip[:, 2]]).sum(1)


def relation_graph(trip, entities, relations):
    src, dst = torch.cat([trip[:, 0], trip[:, 2]]), torch.cat([trip[:, 2], trip[:, 0]])
    rel = torch.cat([trip[:, 1], trip[:, 1] + relations])
    degree = torch.bincount(dst, minlength=entities).clamp(min=1)
    return [t.cuda() for t in (src, rel, dst, 1.0 / degree[dst].float())]


def perturb_and_rank(emb, w, a, r, target):
    query = (emb[a] * w[r]).transpose(0, 1).unsqueeze(2)
    cand = emb.transpose(0, 1).unsqueeze(1)
    scores = torch.sigmoid(torch.bmm(query, cand).sum(dim=0))
    order = scores.argsort(dim=1, descending=True)
    return (order == target.unsqueeze(1)).nonzero()[:, 1]


def reciprocal_ranks(emb, w, trip):
    s, r, o = trip.unbind(1)
    ranks = torch.cat([perturb_and_rank(emb, w, o, r, s), perturb_and_rank(emb, w, s, r, o)]) + 1
    return (1.0 / ranks.float()).mean().item()


def validate_relations(model, graph, trip, fixed):
    model.eval()
    with torch.no_grad():
        emb = model(graph)
        if fixed:
            parts = trip.split(50)
            mrr = sum(reciprocal_ranks(emb, model.rel, part.cuda()) for part in parts) / len(parts)
        else:
            mrr = reciprocal_ranks(emb, model.rel, trip.cuda())
    model.train()
    return mrr


@expected("all_pairs", fix="split|part|chunk", thread="JinheonBaek/RGCN#10", memory=700)
def train_relation_predictor(fixed=False):
    """Validation ranks the entities for all its triplets at once: the product is for each triplet, each entity and each dimension. Cured by:
    50 triplets at a time.
    """
    entities, relations = 4000, 100
    train, valid = (torch.stack([torch.randint(0, high, (count,)) for high in (entities, relations, entities)], 1) for count in (20_000, 1000))
    model = RelationPredictor(entities, relations).cuda()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    test_graph = relation_graph(train, entities, relations)
    for epoch in range(1, 5):
        pos = train[torch.randperm(len(train))[:10_000]]
        neg = torch.cat([pos[:, :2], torch.randint(0, entities, (len(pos), 1))], 1)
        labels = torch.cat([torch.ones(len(pos)), torch.zeros(len(neg))]).cuda()
        emb = model(relation_graph(pos[:5000], entities, relations))
        loss = F.binary_cross_entropy_with_logits(model.score(emb, torch.cat([pos, neg]).cuda()), labels)
        loss = loss + 0.01 * (emb.pow(2).mean() + model.rel.pow(2).mean())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if epoch % 2 == 0:
            mrr = validate_relations(model, test_graph, valid, fixed)
    return mrr


# An emulator of the weather learns single steps, and a run of a year is scored after each epoch.

WEATHER_NAMES = ["PRESsfc", "TMP850", "UGRD500", "VGRD500", "HGT500", "SPFH850", "TMP2m", "PRATEsfc"]


class WeatherWindows(Dataset):
    """Consecutive snapshots of each variable."""

    def __init__(self, count, steps, lat=90, lon=180):
        self.count, self.shape = count, (steps + 1, lat, lon)

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return {name: torch.randn(self.shape) for name in WEATHER_NAMES}


def pack_variables(tensors, dim):
    return torch.stack([tensors[name] for name in WEATHER_NAMES], dim=dim)


def unpack_variables(tensor, dim):
    return {name: tensor.select(dim, i) for i, name in enumerate(WEATHER_NAMES)}


class VariableNormalizer:
    def __init__(self):
        self.mean, self.std = ({name: torch.tensor(value, device="cuda") for name in WEATHER_NAMES} for value in (0.5, 2.0))

    def normalize(self, d):
        return {k: (v - self.mean[k]) / self.std[k] for k, v in d.items()}

    def denormalize(self, d):
        return {k: v * self.std[k] + self.mean[k] for k, v in d.items()}


class WeatherNet(nn.Module):
    def __init__(self, channels, width=48, depth=4):
        super().__init__()
        self.lift, self.out = nn.Conv2d(channels, width, 1), nn.Conv2d(width, channels, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 5, padding=2, padding_mode="circular"), nn.GELU(), nn.Conv2d(width, width, 1))
            for _ in range(depth))

    def forward(self, x):
        h = self.lift(x)
        for block in self.blocks:
            h = h + block(h)
        return self.out(h)


class WeatherStepper:
    def __init__(self):
        self.net, self.norm, self.loss_fn = WeatherNet(len(WEATHER_NAMES)).cuda(), VariableNormalizer(), nn.MSELoss()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-3)

    def run_on_batch(self, data, n_forward_steps, train):
        data = {k: v.to("cuda") for k, v in data.items()}
        full_norm = pack_variables(self.norm.normalize(data), dim=2)
        state = full_norm[:, 0]
        loss, outputs = torch.zeros((), device="cuda"), []
        with torch.set_grad_enabled(train):
            for step in range(n_forward_steps):
                state = self.net(state)
                loss = loss + self.loss_fn(state, full_norm[:, step + 1])
                outputs.append(state)
        if train:
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        gen_norm = torch.stack([o.detach() for o in outputs], dim=1)
        gen = self.norm.denormalize(unpack_variables(gen_norm, dim=2))
        return loss.detach(), gen, data


class WeatherErrors:
    def __init__(self):
        self.sq, self.n = dict.fromkeys(WEATHER_NAMES, 0.0), 0

    def record(self, gen, target):
        for k in WEATHER_NAMES:
            self.sq[k] += (gen[k] - target[k][:, 1:]).pow(2).mean(dim=(0, 2, 3)).sum().item()
        self.n += gen[WEATHER_NAMES[0]].shape[1]


def run_in_windows(stepper, batch, steps, in_memory, errors):
    last = {}
    for start in range(0, steps, in_memory):
        window = {k: v[:, start:start + in_memory + 1].clone() for k, v in batch.items()}
        for k, v in last.items():
            window[k][:, 0] = v
        _, gen, target = stepper.run_on_batch(window, in_memory, train=False)
        errors.record(gen, target)
        last = {k: v[:, -1].cpu() for k, v in gen.items()}


@expected("data_several_times", fix="window|part|chunk|split", thread="ai2cm/ace#130", memory=960)
def roll_out_year(fixed=False):
    """The run of a year is one call as of a training step: the data of all its days are on the GPU, as they are and normalized, and so are
    the results of all days, in a list, stacked and denormalized. Cured by: 73 days at a time, each part from the last day of the one before.
    """
    train_steps, days = 1, 365
    stepper = WeatherStepper()
    for batch in DataLoader(WeatherWindows(24, train_steps), batch_size=4):
        stepper.run_on_batch(batch, train_steps, train=True)
    errors = WeatherErrors()
    for batch in DataLoader(WeatherWindows(1, days), batch_size=1):
        if fixed:
            run_in_windows(stepper, batch, days, 73, errors)
        else:
            _, gen, target = stepper.run_on_batch(batch, days, train=False)
            errors.record(gen, target)
    return {f"rmse/{k}": (v / errors.n) ** 0.5 for k, v in errors.sq.items()}


# A sweep over networks and learning rates: each setting is trained in turn.

class LabelledNoise(Dataset):
    def __init__(self, count, size=96, classes=40):
        self.count, self.size, self.classes = count, size, classes

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return torch.randn(3, self.size, self.size), i % self.classes


def make_sweep():
    all_models = {}
    for arch, lrs in (("resnet18", [1e-3, 3e-4]), ("resnet34", [1e-3]), ("resnet50", [1e-3])):
        model = getattr(torchvision.models, arch)(weights=None, num_classes=40)
        all_models[arch] = {
            "model": model,
            "optimizer": torch.optim.Adam(model.parameters(), lr=lrs[0], weight_decay=1e-5),
            "lr_array": lrs,
            "train_loader": DataLoader(LabelledNoise(32), batch_size=8, shuffle=True),
            "val_loader": DataLoader(LabelledNoise(16), batch_size=8),
        }
    return all_models


@torch.no_grad()
def evaluate_network(model, loader):
    model.eval()
    correct = seen = 0
    for x, y in loader:
        correct += (model(x.cuda()).argmax(1).cpu() == y).sum().item()
        seen += len(y)
    return correct / seen


def train_network_epoch(model, loader, optimizer, criterion):
    model.train()
    running = 0.0
    for images, labels in loader:
        images, labels = images.cuda(), labels.cuda()
        outputs = model(images).squeeze()
        optimizer.zero_grad()
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        running += loss.item()
    return running / len(loader)


@expected("several_models", fix="all_models",
          thread="discuss.pytorch.org/t/gpu-cached-memory-increase-when-training-different-models-in-a-loop/48998", memory=1000)
def sweep_networks(fixed=False):
    """The dict `all_models` has the models and optimizers of the whole sweep, and what has been trained stays on the GPU through it; nor
    does `torch.cuda.empty_cache()` free any of it. Cured by: each taken out of the dict, and model and optimizer deleted after its training.
    """
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    all_models = make_sweep()
    results = {}
    for model_name in list(all_models):
        training_obj = all_models.pop(model_name) if fixed else all_models[model_name]
        optimizer = training_obj["optimizer"]
        model = training_obj["model"]
        model.to("cuda")
        for lr in training_obj["lr_array"]:
            torch.cuda.empty_cache()
            for group in optimizer.param_groups:
                group["lr"] = lr
            train_network_epoch(model, training_obj["train_loader"], optimizer, criterion)
            results[model_name] = evaluate_network(model, training_obj["val_loader"])
        torch.save(model.state_dict(), io.BytesIO())
        if fixed:
            del model, optimizer, training_obj
    return max(results, key=results.get)


# Which parts of a small transformer explain the difference of two prompts: activations times gradients, by hooks.

def drop_handles(handles):
    for handle in handles:
        handle.remove()
    return []


class HookPoint(nn.Module):
    """An identity that hooks can be attached to."""

    def __init__(self, fixed):
        super().__init__()
        self.fixed, self.name, self.fwd_hooks, self.bwd_hooks = fixed, "", [], []

    def forward(self, x):
        return x

    def add_hook(self, fn, dir="fwd"):
        if dir == "fwd":
            self.fwd_hooks.append(self.register_forward_hook(lambda m, i, o: fn(o, self)))
        else:
            self.bwd_hooks.append(self.register_full_backward_hook(lambda m, gi, go: fn(go[0], self)))

    def remove_hooks(self, dir="both"):
        if dir == "fwd" or dir == "both":
            self.fwd_hooks = drop_handles(self.fwd_hooks)
        elif dir == "bwd" or dir == "both":
            self.bwd_hooks = drop_handles(self.bwd_hooks)
        if self.fixed and dir == "both":
            self.bwd_hooks = drop_handles(self.bwd_hooks)


class HookedBlock(nn.Module):
    def __init__(self, d, heads, fixed):
        super().__init__()
        self.heads, self.ln1, self.ln2 = heads, nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        self.hook_attn_out, self.hook_mlp_out, self.hook_resid_mid = HookPoint(fixed), HookPoint(fixed), HookPoint(fixed)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.ln1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = self.hook_resid_mid(x + self.hook_attn_out(self.o(a)))
        return x + self.hook_mlp_out(self.mlp(self.ln2(x)))


class HookedTransformer(nn.Module):
    def __init__(self, fixed, d=256, heads=8, layers=6, vocab=5000, length=256):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(length, d)
        self.blocks = nn.ModuleList(HookedBlock(d, heads, fixed) for _ in range(layers))
        self.ln, self.unembed = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)
        self.hook_points = [module for module in self.modules() if isinstance(module, HookPoint)]
        for number, hp in enumerate(self.hook_points):
            hp.name = f"block {number // 3}, point {number % 3}"

    def reset_hooks(self):
        for hp in self.hook_points:
            hp.remove_hooks("both")

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.unembed(self.ln(x)[:, -1])


def attribute_pair(model, clean, corrupt, answers, scores):
    clean_cache = {}

    def store(act, hook):
        clean_cache[hook.name] = act.detach()

    for hp in model.hook_points:
        hp.add_hook(store, "fwd")
    with torch.no_grad():
        model(corrupt)
    model.reset_hooks()

    def accumulate(grad, hook):
        delta = clean_cache[hook.name]
        scores[hook.name] = scores.get(hook.name, 0.0) + (delta * grad).sum().item()

    for hp in model.hook_points:
        hp.add_hook(accumulate, "bwd")
    picked = model(clean).gather(1, answers)
    value = (picked[:, 0] - picked[:, 1]).mean()
    value.backward()
    model.zero_grad()
    model.reset_hooks()
    return value.item()


@expected("kept_tensors", fix="remove", thread="Prisma-Multimodal/ViT-Prisma#188", memory=700)
def attribute_components(fixed=False):
    """`remove_hooks("both")` removes the forward hooks alone, for the backward hooks are behind an `elif`: those of each pair stay, and with
    them the activations that they refer to. Cured by: `if` in its place, so that both are removed.
    """
    model, scores = HookedTransformer(fixed).cuda().eval(), {}
    for _ in range(14):
        clean = torch.randint(0, 5000, (8, 256))
        corrupt = clean.clone()
        corrupt[:, 128] = torch.randint(0, 5000, (8,))
        answers = torch.randint(0, 5000, (8, 2))
        attribute_pair(model, clean.cuda(), corrupt.cuda(), answers.cuda(), scores)
    return sorted(scores, key=lambda name: -abs(scores[name]))[:5]
