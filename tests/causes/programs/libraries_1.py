"""Programs after issues of libraries whose fixes were merged."""

import copy
import glob
import math
import os
import shutil
import tempfile

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected

DEVICE = "cuda"


# ----------------------------------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, causal=True):
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        x = x + self.proj(a.transpose(1, 2).reshape(b, n, d))
        return x + self.mlp(self.norm2(x))


class ModelOutput:
    def __init__(self, logits, loss=None):
        self.logits = logits
        self.loss = loss


class CausalLM(nn.Module):
    def __init__(self, vocab, dim=192, layers=2, heads=4, max_len=512, tie=True):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(max_len, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        if tie:
            self.lm_head.weight = self.embed.weight

    def forward(self, input_ids):
        h = self.embed(input_ids) + self.pos.weight[: input_ids.shape[1]]
        for block in self.blocks:
            h = block(h)
        return ModelOutput(self.lm_head(self.norm(h)))


# ----------------------------------------------------------------------------------------------
class GroupPolicyTrainer:
    """Group-relative policy optimization with a frozen reference."""

    def __init__(self, model, ref_model, lr, group_size, micro_batch, beta, token_scorer):
        self.model = model.to(DEVICE)
        self.ref_model = ref_model.to(DEVICE).eval().requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.group_size = group_size
        self.micro_batch = micro_batch
        self.beta = beta
        self.token_scorer = token_scorer

    def get_per_token_logps(self, model, input_ids, keep):
        logits = model(input_ids).logits
        logits = logits[:, :-1, :][:, -keep:]
        return self.token_scorer(logits, input_ids[:, -keep:])

    def score_completions(self, prompts, completions, rewards):
        ids = torch.cat([prompts, completions], dim=1).to(DEVICE)
        keep = completions.shape[1]
        with torch.no_grad():
            old_logps = self.get_per_token_logps(self.model, ids, keep)
            ref_logps = self.get_per_token_logps(self.ref_model, ids, keep)
        groups = rewards.view(-1, self.group_size)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        return {"ids": ids, "keep": keep, "old": old_logps, "ref": ref_logps,
                "adv": advantages.view(-1, 1).to(DEVICE)}

    def compute_loss(self, inputs, rows):
        logps = self.get_per_token_logps(self.model, inputs["ids"][rows], inputs["keep"])
        ratio = torch.exp(logps - inputs["old"][rows])
        gap = inputs["ref"][rows] - logps
        kl = torch.exp(gap) - gap - 1
        return -(ratio * inputs["adv"][rows] - self.beta * kl).mean()

    def train(self, batches):
        for prompts, completions, rewards in batches:
            inputs = self.score_completions(prompts, completions, rewards)
            torch.cuda.empty_cache()
            n = inputs["ids"].shape[0]
            for start in range(0, n, self.micro_batch):
                loss = self.compute_loss(inputs, slice(start, start + self.micro_batch))
                (loss * self.micro_batch / n).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def token_logps(logits, index):
    return logits.log_softmax(dim=-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)


def selected_token_logps(logits, index):
    picked = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    norm = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    return picked - norm


@expected("logits", fix="chunk|split", thread="huggingface/trl#2799", memory=640, held_back=True)
def grpo_scoring(fixed=False):
    """To get one log-probability for each token, the trainer takes `log_softmax` of the whole logits (batch x length x vocabulary) and then
    gathers one entry of each row; that makes a second tensor as large as the logits only to throw nearly all of it away. Cured by: A
    selective log-softmax: gather the logits of the chosen tokens and subtract the `logsumexp` computed row by row, so that no second batch
    x length x vocabulary tensor is made.
    """
    torch.manual_seed(0)
    vocab = 32000
    policy = CausalLM(vocab)
    trainer = GroupPolicyTrainer(policy, copy.deepcopy(policy), lr=1e-6, group_size=8, micro_batch=2, beta=0.04,
                                 token_scorer=selected_token_logps if fixed else token_logps)
    batches = []
    for _ in range(3):
        prompts = torch.randint(0, vocab, (2, 32)).repeat_interleave(8, 0)
        completions = torch.randint(0, vocab, (16, 112))
        batches.append((prompts, completions, torch.rand(16)))
    trainer.train(batches)


# ----------------------------------------------------------------------------------------------
class HashTokenizer:
    def __init__(self, size, max_len):
        self.size = size
        self.max_len = max_len

    def __call__(self, texts):
        rows = [[hash(w) % self.size for w in t.split()][: self.max_len] for t in texts]
        width = max(len(r) for r in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        for i, r in enumerate(rows):
            ids[i, : len(r)] = torch.tensor(r)
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}


class SentenceEncoder(nn.Module):
    def __init__(self, vocab=8000, dim=256, out_dim=2048, layers=2, revised=False):
        super().__init__()
        self.tokenizer = HashTokenizer(vocab, 24)
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(layers))
        self.dense = nn.Linear(dim, out_dim)
        self.revised = revised

    def forward(self, features):
        h = self.embed(features["input_ids"])
        for block in self.blocks:
            h = block(h, causal=False)
        mask = features["attention_mask"].unsqueeze(-1).float()
        pooled = (h * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        return {"sentence_embedding": torch.tanh(self.dense(pooled))}

    def encode(self, sentences, batch_size=256, convert_to_numpy=True):
        self.eval()
        order = np.argsort([-len(s) for s in sentences])
        ordered = [sentences[i] for i in order]
        all_embeddings = []
        for start in range(0, len(ordered), batch_size):
            features = self.tokenizer(ordered[start: start + batch_size])
            features = {k: v.to(DEVICE) for k, v in features.items()}
            with torch.no_grad():
                embeddings = self.forward(features)["sentence_embedding"]
                embeddings = embeddings.detach()
                if self.revised and convert_to_numpy:
                    embeddings = embeddings.cpu()
            all_embeddings.extend(embeddings)
        all_embeddings = [all_embeddings[i] for i in np.argsort(order)]
        if convert_to_numpy:
            return np.stack([e.cpu().numpy() for e in all_embeddings])
        return torch.stack(all_embeddings)


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="huggingface/sentence-transformers#525", memory=300, held_back=True)
def embed_sentences(fixed=False):
    """`encode` collects the sentence embeddings of all batches in a list while they are still on the GPU, and moves them to numpy only at
    the end, so GPU memory grows with the number of sentences. Cured by: Detach the batch's embeddings and move them to the CPU at once
    (`convert_to_numpy`) before they go into the list.
    """
    rng = np.random.default_rng(0)
    words = ["w%d" % i for i in range(500)]
    corpus = [" ".join(words[j] for j in rng.integers(0, 500, size=rng.integers(5, 14))) for _ in range(36000)]
    model = SentenceEncoder(revised=fixed).to(DEVICE)
    vectors = model.encode(corpus)
    return vectors.shape


# ----------------------------------------------------------------------------------------------
class Metric(nn.Module):
    def reset(self):
        raise NotImplementedError

    def update(self, preds, target):
        raise NotImplementedError

    def compute(self):
        raise NotImplementedError

    def forward(self, preds, target):
        self.update(preds, target)
        return self.compute()


def stat_scores(preds, target, num_classes):
    mapping = target.to(torch.long) * num_classes + preds.to(torch.long)
    bins = torch.bincount(mapping, minlength=num_classes ** 2)
    table = bins.reshape(num_classes, num_classes)
    tp = table.diag()
    fp = table.sum(0) - tp
    fn = table.sum(1) - tp
    tn = table.sum() - (fp + fn + tp)
    return tp, fp, tn, fn


def micro_stat_scores(preds, target, num_classes):
    tp = (preds == target).sum()
    fp = (preds != target).sum()
    fn = (preds != target).sum()
    tn = num_classes * preds.numel() - (fp + fn + tp)
    return tp, fp, tn, fn


class MulticlassAccuracy(Metric):
    def __init__(self, num_classes, average="micro", revised=False):
        super().__init__()
        self.num_classes = num_classes
        self.average = average
        self.revised = revised
        self.reset()

    def reset(self):
        self.tp = self.seen = 0

    def update(self, preds, target):
        preds = preds.argmax(dim=1) if preds.ndim > target.ndim else preds
        preds, target = preds.flatten(), target.flatten()
        if self.revised and self.average == "micro":
            tp, fp, tn, fn = micro_stat_scores(preds, target, self.num_classes)
        else:
            tp, fp, tn, fn = stat_scores(preds, target, self.num_classes)
        if self.average == "micro":
            tp, fn = tp.sum(), fn.sum()
        self.tp = self.tp + tp
        self.seen = self.seen + tp + fn

    def compute(self):
        return (self.tp / self.seen).mean()


class MaskedLanguageModule(nn.Module):
    def __init__(self, vocab, revised):
        super().__init__()
        self.lm = CausalLM(vocab, dim=128, layers=2)
        self.train_acc = MulticlassAccuracy(vocab, average="micro", revised=revised)
        self.logged = {}

    def training_step(self, batch):
        ids, labels, masked = batch["input_ids"], batch["labels"], batch["positions"]
        logits = self.lm(ids).logits
        rows = torch.arange(ids.shape[0], device=ids.device).unsqueeze(1)
        picked = logits[rows, masked].flatten(0, 1)
        target = labels.gather(1, masked).flatten()
        loss = F.cross_entropy(picked, target)
        self.logged["train/acc"] = self.train_acc(picked.detach(), target)
        return loss


class Fitter:
    def __init__(self, epochs):
        self.epochs = epochs

    def fit(self, module, loader):
        module.to(DEVICE)
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-4)
        for _ in range(self.epochs):
            for batch in loader:
                batch = {k: v.to(DEVICE) for k, v in batch.items()}
                loss = module.training_step(batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            module.train_acc.reset()


@expected("counts_of_pairs", fix="micro", thread="Lightning-AI/torchmetrics#1279", memory=700, held_back=True)
def mlm_pretraining(fixed=False):
    """The multiclass accuracy metric with micro average goes through a confusion matrix of vocabulary x vocabulary int64 counts (`bincount`
    with `minlength=num_classes**2`), which alone is larger than the GPU; for micro accuracy it isn't needed. Cured by: Compute micro
    accuracy from `preds == target` directly, without the num_classes squared matrix.
    """
    vocab = 10000
    loader = []
    for _ in range(4):
        labels = torch.randint(5, vocab, (8, 128))
        positions = torch.stack([torch.randperm(128)[:20] for _ in range(8)])
        loader.append({"input_ids": labels.scatter(1, positions, 4), "labels": labels, "positions": positions})
    Fitter(epochs=2).fit(MaskedLanguageModule(vocab, revised=fixed), loader)


# ----------------------------------------------------------------------------------------------
class NMTEncoder(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.LSTM(dim, dim, num_layers=2, batch_first=True)

    def forward(self, src):
        return self.rnn(self.embed(src))


class NMTDecoder(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.LSTM(dim, dim, num_layers=2, batch_first=True)
        self.mix = nn.Linear(2 * dim, dim)

    def forward(self, tgt, memory, state):
        out, state = self.rnn(self.embed(tgt), state)
        attn = torch.softmax(out @ memory.transpose(1, 2), dim=-1)
        return torch.tanh(self.mix(torch.cat([out, attn @ memory], dim=-1))), state


class NMTModel(nn.Module):
    def __init__(self, opt):
        super().__init__()
        self.encoder = NMTEncoder(opt["vocab"], opt["dim"])
        self.decoder = NMTDecoder(opt["vocab"], opt["dim"])
        self.generator = nn.Sequential(nn.Linear(opt["dim"], opt["vocab"]), nn.LogSoftmax(dim=-1))


class EnsembleModel(nn.Module):
    def __init__(self, models):
        super().__init__()
        self.models = nn.ModuleList(models)

    def encode(self, src):
        return [m.encoder(src) for m in self.models]

    def step(self, tokens, memories, states):
        scores, new_states = [], []
        for m, memory, state in zip(self.models, memories, states):
            out, state = m.decoder(tokens, memory, state)
            scores.append(m.generator(out.squeeze(1)))
            new_states.append(state)
        return torch.stack(scores).mean(0), new_states


def load_test_model(path):
    checkpoint = torch.load(path, map_location="cpu")
    model = NMTModel(checkpoint["opt"])
    model.load_state_dict(checkpoint["model"])
    return model.to(DEVICE).eval()


class Translator:
    def __init__(self, model_paths, beam_size, max_length):
        self.model = EnsembleModel([load_test_model(p) for p in model_paths])
        self.beam_size = beam_size
        self.max_length = max_length

    def translate_batch(self, src):
        k, b = self.beam_size, src.shape[0]
        encoded = self.model.encode(src)
        memories = [m.repeat_interleave(k, 0) for m, _ in encoded]
        states = [tuple(s.repeat_interleave(k, 1).contiguous() for s in st) for _, st in encoded]
        tokens = torch.full((b * k, 1), 2, device=DEVICE)
        total = torch.zeros(b * k, 1, device=DEVICE)
        history = [tokens]
        for _ in range(self.max_length):
            logp, states = self.model.step(tokens, memories, states)
            vocab = logp.shape[-1]
            total, best = (logp + total).view(b, -1).topk(k, dim=-1)
            tokens = (best % vocab).view(-1, 1)
            total = total.view(-1, 1)
            history.append(tokens)
        return torch.cat(history, 1)

    def translate(self, shards):
        with torch.no_grad():
            return [self.translate_batch(batch.to(DEVICE)).cpu() for shard in shards for batch in shard]


def save_training_run(folder, opt, steps):
    model = NMTModel(opt)
    for step in steps:
        path = os.path.join(folder, "enzh_step_%d.pt" % step)
        torch.save({"opt": opt, "model": model.state_dict()}, path)


@expected("several_models", fix=r"\.cpu\(\)|\bdel\b", thread="OpenNMT/OpenNMT-py#1852", memory=470, held_back=True)
def translate_file(fixed=False):
    """The `-model` pattern matches all saved checkpoints, so the translator loads every checkpoint onto the GPU as an ensemble (and runs
    each of them) although a single model was meant. Cured by: Give one checkpoint, the last, instead of the wildcard.
    """
    folder = tempfile.mkdtemp()
    try:
        save_training_run(folder, {"vocab": 16000, "dim": 256}, range(1000, 6000, 1000))
        pattern = "enzh_step_5000.pt" if fixed else "enzh*.pt"
        translator = Translator(sorted(glob.glob(os.path.join(folder, pattern))), beam_size=5, max_length=30)
        shards = [[torch.randint(4, 16000, (32, 40)) for _ in range(4)] for _ in range(2)]
        translator.translate(shards)
    finally:
        shutil.rmtree(folder)


# ----------------------------------------------------------------------------------------------
class InstructionData:
    def __init__(self, vocab, batches, batch_size, seq_len):
        self.items = [torch.randint(0, vocab, (batch_size, seq_len)) for _ in range(batches)]

    def __iter__(self):
        for ids in self.items:
            labels = ids.clone()
            labels[:, :40] = -100
            yield {"input_ids": ids, "labels": labels}


def sum_loss(shift_logits, labels):
    shift_labels = labels[..., 1:].contiguous()
    criterion = nn.CrossEntropyLoss(reduction="sum", ignore_index=-100)
    return criterion(shift_logits.view(-1, shift_logits.shape[-1]), shift_labels.view(-1).to(shift_logits.device))


@expected("outputs_of_earlier_step", fix=r"\bdel\b", thread="allenai/open-instruct#777", memory=700, held_back=True)
def finetune_lm(fixed=False):
    """The names `outputs`, `logits` and `shift_logits` keep the big vocabulary-size tensors of an iteration alive through its backward pass
    and into the next iteration, although they are not needed after the loss. Cured by: `del` these references as soon as the loss has been
    computed.
    """
    vocab = 16000
    model = CausalLM(vocab, dim=384, layers=2, heads=6, tie=False).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, foreach=False)
    data = InstructionData(vocab, batches=5, batch_size=4, seq_len=256)
    total_tokens = 0
    for epoch in range(2):
        for batch in data:
            total_tokens += int((batch["labels"] != -100).sum())
            print("epoch", epoch, "tokens", total_tokens)
            outputs = model(batch["input_ids"].to(DEVICE))
            logits = outputs.logits
            shift_logits = logits[..., :-1, :].contiguous()
            loss = sum_loss(shift_logits, batch["labels"])
            if fixed:
                del outputs, logits, shift_logits
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return total_tokens


# ----------------------------------------------------------------------------------------------
class VisionPolicy(nn.Module):
    def __init__(self, actions):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(4, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU(),
                                  nn.Flatten(), nn.Linear(32 * 9 * 9, 256), nn.ReLU())
        self.pi = nn.Linear(256, actions)
        self.vf = nn.Linear(256, 1)

    def forward(self, obs):
        h = self.body(obs)
        return self.pi(h), self.vf(h).squeeze(-1)


class SampleBatch(dict):
    @property
    def count(self):
        return self["actions"].shape[0]

    def rows(self, index):
        return SampleBatch({k: v[index] for k, v in self.items()})


def convert_to_torch_tensor(batch, device):
    def convert(item):
        tensor = torch.from_numpy(item) if isinstance(item, np.ndarray) else item
        tensor = tensor.to(device)
        return tensor.float() / 255.0 if tensor.dtype == torch.uint8 else tensor
    return SampleBatch({k: convert(v) for k, v in batch.items()})


class TorchPolicyLearner:
    def __init__(self, policy, minibatch_size, num_sgd_iter, revised):
        self.policy = policy.to(DEVICE)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=5e-5)
        self.minibatch_size = minibatch_size
        self.num_sgd_iter = num_sgd_iter
        self.revised = revised
        self.buffer = None

    def load_batch_into_buffer(self, batch):
        self.buffer = batch if self.revised else convert_to_torch_tensor(batch, DEVICE)
        return self.buffer.count

    def loss(self, mb):
        logits, values = self.policy(mb["obs"])
        logp = torch.log_softmax(logits, -1).gather(1, mb["actions"].unsqueeze(1)).squeeze(1)
        ratio = torch.exp(logp - mb["action_logp"])
        clipped = torch.clamp(ratio, 0.7, 1.3)
        surrogate = torch.min(ratio * mb["advantages"], clipped * mb["advantages"]).mean()
        return 0.5 * F.mse_loss(values, mb["value_targets"]) - surrogate

    def learn_on_loaded_batch(self, offset):
        mb = self.buffer.rows(slice(offset, offset + self.minibatch_size))
        if self.revised:
            mb = convert_to_torch_tensor(mb, DEVICE)
        self.optimizer.zero_grad()
        self.loss(mb).backward()
        self.optimizer.step()


def train_one_step(learner, train_batch):
    count = learner.load_batch_into_buffer(train_batch)
    for _ in range(learner.num_sgd_iter):
        for offset in np.random.permutation(np.arange(0, count, learner.minibatch_size)):
            learner.learn_on_loaded_batch(int(offset))


@expected("large_cast", fix="part|split", thread="ray-project/ray#34189", memory=300, held_back=True)
def ppo_learner(fixed=False):
    """The learner pushes the whole train batch (all observations, also converted to float) to the GPU before the SGD loop and then cuts
    minibatches out of it there, so the train batch size has to fit on the GPU. Cured by: Leave the train batch in CPU memory and move only
    the current minibatch to the GPU.
    """
    n = 2560
    learner = TorchPolicyLearner(VisionPolicy(6), minibatch_size=128, num_sgd_iter=2, revised=fixed)
    for _ in range(2):
        batch = SampleBatch(obs=np.zeros((n, 4, 84, 84), np.uint8), actions=np.random.randint(0, 6, n),
                            action_logp=np.random.randn(n).astype(np.float32),
                            advantages=np.random.randn(n).astype(np.float32),
                            value_targets=np.random.randn(n).astype(np.float32))
        train_one_step(learner, batch)


# ----------------------------------------------------------------------------------------------
def ssim_index(preds, target, window=11, c1=1e-4, c2=9e-4):
    ch = preds.shape[1]
    kernel = torch.full((ch, 1, window, window), 1.0 / window ** 2, device=preds.device)
    stacked = torch.cat([preds, target, preds * preds, target * target, preds * target])
    mu_p, mu_t, pp, tt, pt = F.conv2d(stacked, kernel, groups=ch).chunk(5)
    num = (2 * mu_p * mu_t + c1) * (2 * (pt - mu_p * mu_t) + c2)
    den = (mu_p ** 2 + mu_t ** 2 + c1) * (pp - mu_p ** 2 + tt - mu_t ** 2 + c2)
    return (num / den).mean()


class SSIM(Metric):
    def __init__(self):
        super().__init__()
        self.reset()

    def reset(self):
        self.preds, self.target = [], []

    def update(self, preds, target):
        self.preds.append(preds)
        self.target.append(target)

    def compute(self):
        return ssim_index(torch.cat(self.preds), torch.cat(self.target))

    def forward(self, preds, target):
        self.update(preds, target)
        return ssim_index(preds, target)


class RadianceField(nn.Module):
    def __init__(self, revised):
        super().__init__()
        self.encoding = nn.Embedding(2 ** 16, 16)
        self.mlp = nn.Sequential(nn.Linear(22, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
        self.ssim = ssim_index if revised else SSIM()
        self.samples = 8

    def forward(self, rays):
        o, d = rays[:, None, :3], rays[:, None, 3:]
        t = torch.linspace(0.1, 1.0, self.samples, device=rays.device).view(1, -1, 1)
        xyz = o + t * d
        cells = (xyz.abs().sum(-1) * 1000).long() % 65536
        feats = torch.cat([self.encoding(cells * 0), xyz, d.expand_as(xyz)], -1)
        rgb, sigma = self.mlp(feats).split([3, 1], dim=-1)
        weights = torch.softmax(F.softplus(sigma), dim=1)
        return (weights * torch.sigmoid(rgb)).sum(1)

    @torch.no_grad()
    def get_outputs_for_camera(self, rays, chunk):
        return torch.cat([self.forward(rays[i: i + chunk]) for i in range(0, rays.shape[0], chunk)])

    def get_image_metrics(self, image, rays, shape):
        h, w = shape
        rgb = self.get_outputs_for_camera(rays, 16384).view(h, w, 3)
        a, b = image.permute(2, 0, 1)[None], rgb.permute(2, 0, 1)[None]
        mse = F.mse_loss(a, b)
        return {"psnr": -10 * torch.log10(mse), "ssim": self.ssim(b, a)}


class FieldTrainer:
    def __init__(self, model, steps, eval_every, resolution):
        self.model = model.to(DEVICE)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        self.steps, self.eval_every, self.resolution = steps, eval_every, resolution

    def train_iteration(self):
        rays = torch.rand(1024, 6, device=DEVICE)
        loss = F.mse_loss(self.model(rays), torch.rand(1024, 3, device=DEVICE))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def eval_iteration(self):
        h, w = self.resolution
        image = torch.rand(h, w, 3, device=DEVICE)
        rays = torch.rand(h * w, 6, device=DEVICE)
        metrics = self.model.get_image_metrics(image, rays, (h, w))
        return {k: float(v) for k, v in metrics.items()}

    def train(self):
        for step in range(1, self.steps + 1):
            self.train_iteration()
            if step % self.eval_every == 0:
                self.eval_iteration()


@expected("kept_tensors", fix=r"\.cpu\(\)|reset", thread="nerfstudio-project/nerfstudio#81", memory=400, held_back=True)
def train_radiance_field(fixed=False):
    """The SSIM metric object (module) appends prediction and target image of every call to its state and nothing resets it (outside
    Lightning), so each evaluated image stays on the GPU. Cured by: Use the functional SSIM, which keeps no state.
    """
    FieldTrainer(RadianceField(revised=fixed), steps=600, eval_every=10, resolution=(600, 600)).train()


# ----------------------------------------------------------------------------------------------
class EdgeGraph:
    def __init__(self, nodes, edges, relations, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.num_nodes = nodes
        etypes = torch.randint(0, relations, (edges,), generator=g).sort().values
        self.per_relation = torch.bincount(etypes, minlength=relations).tolist()
        self.src = torch.randint(0, nodes, (edges,), generator=g).to(DEVICE)
        self.dst = torch.randint(0, nodes, (edges,), generator=g).to(DEVICE)
        self.etypes = etypes.to(DEVICE)


class RelGraphConv(nn.Module):
    def __init__(self, in_feat, out_feat, relations, bases, revised=False):
        super().__init__()
        self.bases = nn.Parameter(torch.randn(bases, in_feat, out_feat) * 0.1)
        self.w_comp = nn.Parameter(torch.randn(relations, bases) * 0.1)
        self.loop = nn.Linear(in_feat, out_feat)
        self.revised = revised

    def relation_weights(self):
        b, i, o = self.bases.shape
        return (self.w_comp @ self.bases.view(b, -1)).view(-1, i, o)

    def messages(self, g, h):
        weight = self.relation_weights()
        if self.revised:
            parts = h[g.src].split(g.per_relation)
            return torch.cat([part @ weight[r] for r, part in enumerate(parts)])
        w = weight.index_select(0, g.etypes)
        return torch.bmm(h[g.src].unsqueeze(1), w).squeeze(1)

    def forward(self, g, h):
        msg = self.messages(g, h)
        out = torch.zeros(g.num_nodes, msg.shape[1], device=h.device).index_add(0, g.dst, msg)
        return out + self.loop(h)


class EntityClassifier(nn.Module):
    def __init__(self, nodes, dim, classes, relations, revised):
        super().__init__()
        self.embed = nn.Embedding(nodes, dim)
        self.conv1 = RelGraphConv(dim, dim, relations, 8, revised)
        self.conv2 = RelGraphConv(dim, classes, relations, 8, revised)

    def forward(self, g):
        return self.conv2(g, torch.relu(self.conv1(g, self.embed.weight)))


@expected("enlarged", fix="split|part|sparse", thread="dmlc/dgl#1631", memory=700, held_back=True)
def relational_gcn(fixed=False):
    """The relational graph convolution puts the relation's weight matrix on each edge (`weight.index_select(0, etypes)`, edges x in x out)
    before the batched multiplication; with many edges this copy of weights is far larger than weights or features. Cured by: Low-memory
    variant: multiply the messages by the relation's weight, relation by relation, rather than copying the weight to each edge.
    """
    graph = EdgeGraph(nodes=8000, edges=60000, relations=40)
    model = EntityClassifier(8000, 64, 12, 40, revised=fixed).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    train_idx = torch.randperm(8000)[:1000].to(DEVICE)
    labels = torch.randint(0, 12, (8000,)).to(DEVICE)
    for _ in range(5):
        logits = model(graph)
        loss = F.cross_entropy(logits[train_idx], labels[train_idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ----------------------------------------------------------------------------------------------
class Launcher:
    """Keeps what belongs to a run and writes and reads its state."""

    def __init__(self, load_options):
        self.models, self.optimizers, self.custom_objects = [], [], []
        self.load_options = load_options

    def prepare(self, model, optimizer):
        self.models.append(model)
        self.optimizers.append(optimizer)
        return model, optimizer

    def register_for_checkpointing(self, obj):
        self.custom_objects.append(obj)

    def save_state(self, folder):
        for i, m in enumerate(self.models):
            torch.save(m.state_dict(), os.path.join(folder, "model_%d.bin" % i))
        for i, o in enumerate(self.optimizers):
            torch.save(o.state_dict(), os.path.join(folder, "optimizer_%d.bin" % i))
        for i, c in enumerate(self.custom_objects):
            torch.save(c.state_dict(), os.path.join(folder, "custom_checkpoint_%d.pkl" % i))

    def load_custom_state(self, obj, path):
        obj.load_state_dict(torch.load(path, **self.load_options))

    def load_state(self, folder):
        for i, m in enumerate(self.models):
            m.load_state_dict(torch.load(os.path.join(folder, "model_%d.bin" % i), map_location="cpu"))
        for i, o in enumerate(self.optimizers):
            o.load_state_dict(torch.load(os.path.join(folder, "optimizer_%d.bin" % i), map_location="cpu"))
        for i, c in enumerate(self.custom_objects):
            self.load_custom_state(c, os.path.join(folder, "custom_checkpoint_%d.pkl" % i))


class FeatureBank:
    def __init__(self, size, dim, temperature=0.07):
        self.features = torch.randn(size, dim, device=DEVICE)
        self.features.div_(self.features.norm(dim=1, keepdim=True))
        self.temperature = temperature
        self.size = size

    def state_dict(self):
        return {"features": self.features, "temperature": self.temperature}

    def load_state_dict(self, state):
        self.features.copy_(state["features"])
        self.temperature = state["temperature"]

    def logits(self, z, index):
        negatives = torch.randint(0, self.size, (1024,), device=DEVICE)
        positive = (z * self.features[index]).sum(1, keepdim=True)
        return torch.cat([positive, z @ self.features[negatives].t()], 1) / self.temperature

    @torch.no_grad()
    def store(self, z, index):
        self.features.index_copy_(0, index, z)


def build_encoder(dim):
    return nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(),
                         nn.Linear(512, dim)).to(DEVICE)


def contrastive_run(folder, resume, steps, load_options):
    launcher = Launcher(load_options)
    model = build_encoder(128)
    model, optimizer = launcher.prepare(model, torch.optim.Adam(model.parameters(), lr=3e-4))
    bank = FeatureBank(500000, 128)
    launcher.register_for_checkpointing(bank)
    if resume:
        launcher.load_state(folder)
    for _ in range(steps):
        images, index = torch.randn(32, 3, 64, 64).to(DEVICE), torch.randint(0, bank.size, (32,)).to(DEVICE)
        z = F.normalize(model(images), dim=1)
        loss = F.cross_entropy(bank.logits(z, index), torch.zeros(32, dtype=torch.long, device=DEVICE))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bank.store(z.detach(), index)
    launcher.save_state(folder)


@expected("loaded_onto_gpu", fix="map_location", thread="huggingface/accelerate#1156", memory=500, held_back=True)
def resume_contrastive(fixed=False):
    """When a run is resumed, the registered custom object's checkpoint is read with `torch.load` without `map_location`, so its tensors
    (the feature bank) are first materialized on the GPU a second time, beside the one already there. Cured by: `torch.load(...,
    map_location="cpu")` for custom states.
    """
    folder = tempfile.mkdtemp()
    options = {"map_location": "cpu"} if fixed else {}
    try:
        contrastive_run(folder, resume=False, steps=3, load_options=options)
        contrastive_run(folder, resume=True, steps=3, load_options=options)
    finally:
        shutil.rmtree(folder)


# ----------------------------------------------------------------------------------------------
class GatedConv(nn.Module):
    def __init__(self, dim, width, causal):
        super().__init__()
        self.pad = (width - 1, 0) if causal else (width // 2, width // 2)
        self.conv = nn.Conv1d(dim, 2 * dim, width)

    def forward(self, x):
        return (F.glu(self.conv(F.pad(x, self.pad)), dim=1) + x) * math.sqrt(0.5)


class ConvTranslator(nn.Module):
    def __init__(self, vocab, dim=128, layers=3):
        super().__init__()
        self.src_embed = nn.Embedding(vocab, dim)
        self.tgt_embed = nn.Embedding(vocab, dim)
        self.encoder = nn.ModuleList(GatedConv(dim, 3, False) for _ in range(layers))
        self.decoder = nn.ModuleList(GatedConv(dim, 3, True) for _ in range(layers))
        self.generator = nn.Linear(dim, vocab)

    def forward(self, src, tgt):
        memory = self.src_embed(src).transpose(1, 2)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.tgt_embed(tgt).transpose(1, 2)
        for layer in self.decoder:
            x = layer(x)
            attn = torch.softmax(x.transpose(1, 2) @ memory, dim=-1)
            x = x + (attn @ memory.transpose(1, 2)).transpose(1, 2)
        return x.transpose(1, 2)


class LossCompute:
    def __init__(self, generator):
        self.generator = generator
        self.criterion = nn.NLLLoss(reduction="sum", ignore_index=1)

    def __call__(self, output, target):
        scores = self.generator(output.reshape(-1, output.shape[-1]))
        return self.criterion(torch.log_softmax(scores, dim=-1), target.reshape(-1))


class ParallelText:
    def __init__(self, vocab, sentences, length, batch_size):
        self.vocab, self.sentences, self.length, self.batch_size = vocab, sentences, length, batch_size

    def __iter__(self):
        for start in range(0, self.sentences, self.batch_size):
            size = min(self.batch_size, self.sentences - start)
            yield (torch.randint(4, self.vocab, (size, self.length)), torch.randint(4, self.vocab, (size, self.length + 1)))


class NMTTrainer:
    def __init__(self, model, opt):
        self.model = model.to(DEVICE)
        self.loss = LossCompute(model.generator)
        self.optim = torch.optim.SGD(model.parameters(), lr=0.25)
        self.opt = opt

    def step(self, batch):
        src, tgt = (t.to(DEVICE) for t in batch)
        return self.loss(self.model(src, tgt[:, :-1]), tgt[:, 1:])

    def train(self, train_iter, valid_iter):
        self.model.train()
        for i, batch in enumerate(train_iter, 1):
            self.optim.zero_grad()
            loss = self.step(batch)
            loss.div(batch[0].shape[0]).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.opt["max_grad_norm"])
            self.optim.step()
            if i % self.opt["valid_steps"] == 0:
                self.validate(valid_iter)

    def validate(self, valid_iter):
        self.model.eval()
        total = 0.0
        with torch.no_grad():
            for batch in valid_iter:
                total += self.step(batch).item()
        self.model.train()
        return total


@expected("larger_step", fix="as large as|part|split", thread="OpenNMT/OpenNMT-py#1089", memory=600, held_back=True)
def train_conv_translator(fixed=False):
    """Training with its small batch fits; validation uses its own batch size (`valid_batch_size`, default 32, much larger than the training
    batch), so that the validation's vocabulary-size scores don't fit. Cured by: Lower `valid_batch_size`.
    """
    opt = {"batch_size": 4, "valid_batch_size": 32, "valid_steps": 10, "max_grad_norm": 0.1, "vocab": 12000}
    if fixed:
        opt["valid_batch_size"] = 4
    trainer = NMTTrainer(ConvTranslator(opt["vocab"]), opt)
    trainer.train(ParallelText(opt["vocab"], 80, 250, opt["batch_size"]),
                  ParallelText(opt["vocab"], 64, 250, opt["valid_batch_size"]))
