"""Programs after public threads of ordinary users: a grid search, beams, tables, a recommender, metrics, a benchmark, forecasts, export."""
import dataclasses
import gc
import io
import itertools

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

from expected import expected


# A grid search over models of a knowledge graph: a training job for each setting.

class EntityEmbedder(nn.Module):
    def __init__(self, size, dim, dropout):
        super().__init__()
        self.table, self.dropout = nn.Embedding(size, dim), nn.Dropout(dropout)

    def forward(self, index):
        return self.dropout(self.table(index))


class DistMult(nn.Module):
    def __init__(self, dim, dropout, entities=40_000, relations=400):
        super().__init__()
        self.entities, self.relations = EntityEmbedder(entities, dim, dropout), EntityEmbedder(relations, dim, dropout)

    def score(self, s, p, o):
        return (self.entities(s) * self.relations(p) * self.entities(o)).sum(-1)


class TripleEvaluationJob:
    def __init__(self, parent_job, data):
        self.parent_job, self.model = parent_job, parent_job.model
        self.loader = DataLoader(data, batch_size=256)

    @torch.no_grad()
    def run(self):
        self.model.eval()
        hits = count = 0
        for s, p, o, n in self.loader:
            s, p, o, n = s.cuda(), p.cuda(), o.cuda(), n.cuda()
            hits += (self.model.score(s, p, o) > self.model.score(s, p, n)).float().sum().item()
            count += len(s)
        self.model.train()
        return hits / count


class TripleTrainingJob:
    def __init__(self, config, train, valid):
        self.config = config
        self.model = DistMult(config["dim"], config["dropout"]).cuda()
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=config["lr"])
        self.loader = DataLoader(train, batch_size=512, shuffle=True)
        self.valid_job = TripleEvaluationJob(self, valid)

    def run(self):
        for s, p, o, n in self.loader:
            s, p, o, n = s.cuda(), p.cuda(), o.cuda(), n.cuda()
            loss = F.softplus(self.model.score(s, p, n) - self.model.score(s, p, o)).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return self.valid_job.run()


def run_train_job(config, train, valid, fixed):
    job = TripleTrainingJob(config, train, valid)
    result = {"config": config, "metric": job.run()}
    if fixed:
        del job
        gc.collect()
    return result


@expected("reference_cycle", fix=r"gc\.collect|weakref", thread="uma-pi1/kge#187", memory=560)
def search_grid_of_embeddings(fixed=False):
    """A training job has its evaluation job, and that has the training job as `parent_job`: a cycle, so that model, gradients and optimizer
    of each finished job stay until Python's garbage collector comes by. Cured by: `del job; gc.collect()` after each.
    """
    def triples(count):
        return TensorDataset(*[torch.randint(0, high, (count,)) for high in (40_000, 400, 40_000, 40_000)])

    train, valid = triples(2048), triples(512)
    grid = [dict(zip(("dim", "dropout", "lr"), values)) for values in itertools.product((256, 320), (0.0, 0.2), (0.1, 0.5))]
    results = [run_train_job(config, train, valid, fixed) for config in grid]
    return max(result["metric"] for result in results)


# A small language model writes by beam search.

class BeamBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.ln1, self.ln2 = heads, nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, past=None):
        B, T, C = x.shape
        q, k, v = self.qkv(self.ln1(x)).chunk(3, dim=-1)
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in (q, k, v))
        if past is not None:
            k = torch.cat((past[0], k), dim=2)
            v = torch.cat((past[1], v), dim=2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        return x + self.ff(self.ln2(x)), (k, v)


class BeamLM(nn.Module):
    def __init__(self, dim=512, heads=8, layers=8, vocab=8000, length=512):
        super().__init__()
        self.vocab, self.wte, self.wpe = vocab, nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(BeamBlock(dim, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(dim)

    def forward(self, ids, past=None):
        offset = 0 if past is None else past[0][0].size(2)
        x = self.wte(ids) + self.wpe(torch.arange(offset, offset + ids.size(1), device=ids.device))
        present = []
        for i, block in enumerate(self.blocks):
            x, kv = block(x, None if past is None else past[i])
            present.append(kv)
        return F.linear(self.ln_f(x), self.wte.weight), present

    def generate(self, input_ids, max_steps=40, beam=4):
        batch = input_ids.size(0)
        logits, past = self(input_ids)
        scores, tokens = F.log_softmax(logits[:, -1], dim=-1).topk(beam, dim=-1)
        past = [(k.repeat_interleave(beam, 0), v.repeat_interleave(beam, 0)) for k, v in past]
        sequences = tokens.unsqueeze(-1)
        for _ in range(max_steps - 1):
            logits, past = self(sequences[:, :, -1].reshape(-1, 1), past)
            step = F.log_softmax(logits[:, -1], dim=-1).view(batch, beam, -1)
            scores, best = (scores.unsqueeze(-1) + step).view(batch, -1).topk(beam, dim=-1)
            parent, token = (best // self.vocab).clamp(0, beam - 1), (best % self.vocab).clamp(0, self.vocab - 1)
            rows = (torch.arange(batch, device=best.device).unsqueeze(1) * beam + parent).view(-1)
            past = [(k.index_select(0, rows), v.index_select(0, rows)) for k, v in past]
            chosen = sequences.gather(1, parent.unsqueeze(-1).expand_as(sequences))
            sequences = torch.cat((chosen, token.unsqueeze(-1)), dim=-1)
        return sequences, scores


@expected("evaluation_keeps_graphs", fix="no_grad", thread="allenai/OLMo#164", memory=700)
def search_beams(fixed=False):
    """`generate` has no `torch.no_grad()`: the key-value cache and the scores of each token go on with the graph of the one before, and the
    activations of all tokens stay. Cured by: `@torch.no_grad()` on `generate`.
    """
    model = BeamLM().cuda().eval()
    generate = torch.no_grad()(model.generate) if fixed else model.generate
    for prompts in torch.randint(0, 8000, (8, 64)).split(4):
        sequences, _ = generate(prompts.cuda())
    return sequences.shape


# A classifier of tables: the rows of training are the context, those of the test are queries.

class TableLayer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.ln1, self.ln2 = heads, nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.kv, self.o = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def split(self, t):
        return t.view(t.size(0), self.heads, -1).transpose(0, 1).unsqueeze(0)

    def forward(self, x, n_context):
        h = self.ln1(x)
        k, v = self.kv(h[:n_context]).chunk(2, dim=-1)
        att = F.scaled_dot_product_attention(self.split(self.q(h)), self.split(k), self.split(v))
        x = x + self.o(att[0].transpose(0, 1).reshape(x.shape))
        return x + self.mlp(self.ln2(x))


class TableTransformer(nn.Module):
    def __init__(self, n_features, n_classes, dim=256, layers=4, heads=8):
        super().__init__()
        self.x_enc, self.y_enc = nn.Linear(n_features, dim), nn.Embedding(n_classes, dim)
        self.layers = nn.ModuleList(TableLayer(dim, heads) for _ in range(layers))
        self.head = nn.Linear(dim, n_classes)

    def forward(self, x_train, y_train, x_test):
        n = x_train.size(0)
        x = self.x_enc(torch.cat((x_train, x_test)))
        x = torch.cat((x[:n] + self.y_enc(y_train), x[n:]))
        for layer in self.layers:
            x = layer(x, n)
        return self.head(x[n:])


class InContextClassifier:
    def fit(self, X, y):
        self.X_, self.y_, self.classes_ = torch.from_numpy(X), torch.from_numpy(y), np.unique(y)
        self.model_ = TableTransformer(X.shape[1], len(self.classes_)).cuda().eval()
        rng = np.random.default_rng(0)
        self.perms_ = [rng.permutation(X.shape[1]) for _ in range(2)]
        return self

    @torch.inference_mode()
    def predict_proba(self, X):
        X, total = torch.from_numpy(X), 0
        for perm in self.perms_:
            logits = self.model_(self.X_[:, perm].cuda(), self.y_.cuda(), X[:, perm].cuda())
            total = total + F.softmax(logits / 0.9, dim=-1)
        return (total / len(self.perms_)).cpu().numpy()

    def predict(self, X):
        return self.classes_[self.predict_proba(X).argmax(1) % len(self.classes_)]


@expected("batch_without_gradients", fix="split|part", thread="PriorLabs/TabPFN#774", memory=800)
def predict_table(fixed=False):
    """`predict` is given the whole test set, and all its rows go through the model in one call. Cured by: the test set in batches."""
    rng = np.random.default_rng(0)
    X_train, y_train = rng.normal(size=(1000, 20)).astype("float32"), rng.integers(0, 5, 1000)
    X_test = rng.normal(size=(100_000, 20)).astype("float32")
    clf = InContextClassifier().fit(X_train, y_train)
    first = clf.predict(X_test[:1000])
    if fixed:
        pred = np.concatenate([clf.predict(X_test[i:i + 10_000]) for i in range(0, len(X_test), 10_000)])
    else:
        pred = clf.predict(X_test)
    return float((pred[:1000] == first).mean())


# A recommender learns from logged sessions, and its policy is evaluated after each epoch.

class LoggedSessions(Dataset):
    def __init__(self, count, history=20, width=128):
        self.count, self.states = count, torch.randn(256, history, width)

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return {"state": self.states[i % 256], "next_state": self.states[(i + 1) % 256], "action": torch.tensor(i % 64),
                "reward": torch.tensor(0.5), "propensity": torch.tensor(0.3)}


@dataclasses.dataclass
class EvalPage:
    state: torch.Tensor
    next_state: torch.Tensor
    action: torch.Tensor
    reward: torch.Tensor
    propensity: torch.Tensor

    @classmethod
    def stack(cls, pages):
        return cls(**{f.name: torch.cat([getattr(p, f.name) for p in pages]) for f in dataclasses.fields(cls)})


class SessionQNetwork(nn.Module):
    def __init__(self, width=128, hidden=128, actions=64):
        super().__init__()
        self.rnn, self.head = nn.GRU(width, hidden, batch_first=True), nn.Linear(hidden, actions)

    def forward(self, state):
        return self.head(self.rnn(state)[1][-1])


class SessionTrainer:
    def __init__(self, fixed):
        self.q, self.reward_net = SessionQNetwork().cuda(), SessionQNetwork().cuda()
        self.opt = torch.optim.Adam([*self.q.parameters(), *self.reward_net.parameters()], lr=1e-3)
        self.fixed, self.eval_pages = fixed, []

    def to_device(self, batch):
        return {key: value.to("cuda", non_blocking=True) for key, value in batch.items()}

    def training_step(self, batch):
        batch = self.to_device(batch)
        a = batch["action"].unsqueeze(1)
        with torch.no_grad():
            nxt = self.q(batch["next_state"]).max(1).values
        td = F.smooth_l1_loss(self.q(batch["state"]).gather(1, a).squeeze(1), batch["reward"] + 0.9 * nxt)
        rl = F.mse_loss(self.reward_net(batch["state"]).gather(1, a).squeeze(1), batch["reward"])
        self.opt.zero_grad()
        (td + rl).backward()
        self.opt.step()

    def validation_step(self, batch):
        page = EvalPage(**self.to_device(batch))
        self.eval_pages.append(self.estimate(page) if self.fixed else page)

    @torch.no_grad()
    def estimate(self, page):
        policy, reward, a = F.softmax(self.q(page.state), dim=1), self.reward_net(page.state), page.action.unsqueeze(1)
        weight = policy.gather(1, a).squeeze(1) / page.propensity
        return (policy * reward).sum(1) + weight * (page.reward - reward.gather(1, a).squeeze(1))

    def validation_epoch_end(self):
        if self.fixed:
            values = self.eval_pages
        else:
            page = EvalPage.stack(self.eval_pages)
            fields = [getattr(page, f.name).split(512) for f in dataclasses.fields(page)]
            values = [self.estimate(EvalPage(*part)) for part in zip(*fields)]
        self.eval_pages = []
        return torch.cat(values).mean().item()


@expected("joined_results", fix=r"\.cpu\(\)|only what is used", thread="facebookresearch/ReAgent#460", memory=420)
def evaluate_logged_policy(fixed=False):
    """`validation_step` keeps the states of each batch on the GPU, in `eval_pages`, and at the end of the epoch `EvalPage.stack` makes one
    copy more of them all. Cured by: what the epoch's end needs computed batch by batch, and only those numbers kept.
    """
    trainer = SessionTrainer(fixed)
    train = DataLoader(LoggedSessions(2048), batch_size=256, shuffle=True)
    valid = DataLoader(LoggedSessions(8192), batch_size=512)
    for _ in range(2):
        for batch in train:
            trainer.training_step(batch)
        for batch in valid:
            trainer.validation_step(batch)
        value = trainer.validation_epoch_end()
    return value


# A language model is fine-tuned, and its accuracy is computed after each epoch.

class TokenBlocks(Dataset):
    def __init__(self, count, length=128, vocab=8192):
        self.ids = torch.randint(0, vocab, (count, length))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        labels = self.ids[i].clone()
        labels[:8] = -100
        return {"input_ids": self.ids[i], "labels": labels}


def compute_token_accuracy(predictions, labels):
    predictions = predictions if predictions.dim() == 2 else predictions.argmax(dim=-1)
    predictions, target = predictions[:, :-1], labels[:, 1:]
    mask = target != -100
    return ((predictions == target) & mask).sum().item() / max(int(mask.sum()), 1)


class TokenTrainer:
    def __init__(self, model, train_dataset, eval_dataset, preprocess_logits=None, batch_size=4):
        self.model, self.preprocess_logits = model.cuda(), preprocess_logits
        self.train_loader = DataLoader(train_dataset, batch_size=batch_size, shuffle=True)
        self.eval_loader = DataLoader(eval_dataset, batch_size=batch_size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-5)

    def prediction_step(self, batch):
        inputs = {key: value.cuda() for key, value in batch.items()}
        with torch.no_grad():
            out = self.model(**inputs)
        return out.loss, out.logits, inputs["labels"]

    def evaluate(self):
        self.model.eval()
        losses, all_preds, all_labels = [], None, None
        for batch in self.eval_loader:
            loss, logits, labels = self.prediction_step(batch)
            losses.append(loss.item())
            if self.preprocess_logits is not None:
                logits = self.preprocess_logits(logits)
            all_preds = logits if all_preds is None else torch.cat((all_preds, logits), dim=0)
            all_labels = labels if all_labels is None else torch.cat((all_labels, labels), dim=0)
        self.model.train()
        return sum(losses) / len(losses), compute_token_accuracy(all_preds, all_labels)

    def train(self, epochs):
        for _ in range(epochs):
            for batch in self.train_loader:
                loss = self.model(**{key: value.cuda() for key, value in batch.items()}).loss
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
            metrics = self.evaluate()
        return metrics


@expected("growing_buffer", fix=r"\.cpu\(\)|argmax|only what is used",
          thread="discuss.huggingface.co/t/cuda-out-of-memory-when-using-trainer-with-compute-metrics/2941", memory=700)
def measure_token_accuracy(fixed=False):
    """`evaluate` joins the logits of all batches on the GPU, batch by batch, though the metric only needs the best token of each position.
    Cured by: `argmax` of each batch's logits before they are joined.
    """
    config = GPT2Config(vocab_size=8192, n_positions=128, n_embd=128, n_layer=2, n_head=4)
    best = (lambda logits: logits.argmax(dim=-1)) if fixed else None
    return TokenTrainer(GPT2LMHeadModel(config), TokenBlocks(16), TokenBlocks(64), preprocess_logits=best).train(epochs=2)


# A benchmark of classifiers of texts: one after the other is fitted and tested.

class TextClassifier:
    """fit and predict, as in scikit-learn."""

    def __init__(self, hidden=384, layers=6, batch_size=8, lr=2e-5):
        self.hidden, self.layers, self.batch_size, self.lr = hidden, layers, batch_size, lr

    def fit(self, X, y):
        config = BertConfig(vocab_size=4000, hidden_size=self.hidden, num_hidden_layers=self.layers, num_attention_heads=6,
                            intermediate_size=4 * self.hidden, num_labels=3)
        self.model = BertForSequenceClassification(config).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.lr)
        self.model.train()
        for ids, labels in DataLoader(TensorDataset(X, y), batch_size=self.batch_size, shuffle=True):
            out = self.model(input_ids=ids.cuda(), labels=labels.cuda())
            self.optimizer.zero_grad()
            out.loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        return self

    @torch.no_grad()
    def predict(self, X):
        self.model.eval()
        return torch.cat([self.model(input_ids=ids.cuda()).logits.argmax(1).cpu() for ids in X.split(16)])


@expected("several_models", fix=r"\bdel\b", thread="charles9n/bert-sklearn#10", memory=560)
def compare_text_classifiers(fixed=False):
    """`m1` still has its model, its gradients and its optimizer on the GPU while `m2` is fitted. Cured by: `del m1` before."""
    X, y = torch.randint(0, 4000, (48, 64)), torch.randint(0, 3, (48,))
    m1 = TextClassifier()
    m1.fit(X, y)
    accuracies = [(m1.predict(X) == y).float().mean().item()]
    if fixed:
        del m1
    m2 = TextClassifier(lr=5e-5)
    m2.fit(X, y)
    accuracies.append((m2.predict(X) == y).float().mean().item())
    return accuracies


# A forecaster learns from a few windows of many series, and is validated on all of them.

class PatchTransformer(nn.Module):
    def __init__(self, channels, input_size, h, patch=16, dim=128, layers=2, heads=4):
        super().__init__()
        self.patch, self.embed = patch, nn.Linear(channels * patch, dim)
        self.pos = nn.Parameter(torch.zeros(input_size // patch, dim))
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(dim * (input_size // patch), h)

    def forward(self, insample):
        B, C, L = insample.shape
        x = insample.reshape(B, C, L // self.patch, self.patch).permute(0, 2, 1, 3).reshape(B, L // self.patch, -1)
        return self.head(self.encoder(self.embed(x) + self.pos).flatten(1))


class WindowsForecaster(nn.Module):
    def __init__(self, input_size=128, h=16, channels=4, windows_batch_size=128, inference_windows_batch_size=None):
        super().__init__()
        self.input_size, self.h, self.windows_batch_size = input_size, h, windows_batch_size
        self.inference_windows_batch_size = inference_windows_batch_size
        self.net = PatchTransformer(channels, input_size, h)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)

    def create_windows(self, batch):
        return batch.unfold(-1, self.input_size + self.h, 1).permute(0, 2, 1, 3).flatten(0, 1)

    def normalize(self, windows):
        past = windows[:, :1, :self.input_size]
        mean, std = past.mean(-1, keepdim=True), past.std(-1, keepdim=True) + 1e-5
        insample = torch.cat(((windows[:, :1] - mean) / std, windows[:, 1:]), dim=1)
        return insample[:, :, :self.input_size], insample[:, 0, self.input_size:]

    def training_step(self, batch):
        windows = self.create_windows(batch)
        pick = torch.randint(0, windows.size(0), (self.windows_batch_size,))
        insample, outsample = self.normalize(windows[pick].cuda())
        loss = F.l1_loss(self.net(insample), outsample)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        self.optimizer.step()

    @torch.no_grad()
    def validation_step(self, batch):
        windows = self.create_windows(batch)
        if self.inference_windows_batch_size is None:
            insample, outsample = self.normalize(windows.cuda())
            output = self.net(insample)
            return F.l1_loss(output, outsample).item()
        total = 0.0
        for part in windows.split(self.inference_windows_batch_size):
            insample, outsample = self.normalize(part.cuda())
            total += F.l1_loss(self.net(insample), outsample).item() * len(part)
        return total / len(windows)


@expected("batch_without_gradients", fix="split|part|as large as", thread="Nixtla/neuralforecast#597", memory=430)
def forecast_by_windows(fixed=False):
    """In training 128 windows are picked of all, and in validation all windows of the series of a batch go through the model in one call.
    Cured by: a limit for the windows of a call there, too.
    """
    train = DataLoader(torch.randn(32, 4, 600), batch_size=16, shuffle=True)
    valid = DataLoader(torch.randn(32, 4, 600), batch_size=16)
    model = WindowsForecaster(inference_windows_batch_size=512 if fixed else None).cuda()
    for _ in range(2):
        model.train()
        for batch in train:
            model.training_step(batch)
        model.eval()
        loss = sum(model.validation_step(batch) for batch in valid) / len(valid)
    return loss


# A trained checkpoint is turned into a traced file.

class ExportWrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, return_dict=True).logits


class RecipeRunner:
    """As the training script uses it."""

    def __init__(self, model, recipe, device):
        self.device, self.recipe = device, recipe
        self.model = model.to(self.device)

    @torch.no_grad()
    def apply_recipe(self):
        for name, p in self.model.named_parameters():
            if p.dim() == 2 and "fc" in name:
                p.mul_((p.abs() > p.abs().mean() * self.recipe["sparsity"]).to(p.dtype))


@expected("weights_do_not_fit", fix=r"\bcpu\b|\bhost\b", thread="neuralmagic/sparseml#1586", memory=220)
def export_language_model(fixed=False):
    """The runner puts the model on the GPU, as for training, though it is only traced and written to a file. Cured by: the model stays on
    the CPU for the export. Another type of its weights would make another file.
    """
    config = OPTConfig(vocab_size=8000, hidden_size=512, ffn_dim=2048, num_hidden_layers=12, num_attention_heads=8,
                       max_position_embeddings=256, word_embed_proj_dim=512, use_cache=False)
    model = OPTForCausalLM(config)
    runner = RecipeRunner(model, {"sparsity": 0.5}, "cpu" if fixed else "cuda")
    runner.apply_recipe()
    runner.model.eval()
    ids = torch.randint(2, 8000, (1, 128))
    inputs = ids.to(runner.device), torch.ones_like(ids).to(runner.device)
    with torch.no_grad():
        traced = torch.jit.trace(ExportWrapper(runner.model), inputs, check_trace=False)
    written = io.BytesIO()
    torch.jit.save(traced, written)
    return len(written.getvalue())
