"""Programs after questions of many people about memory of the GPU, whose causes the answers confirmed."""

import contextlib
import math
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from expected import expected

DEVICE = "cuda"


# ---------------------------------------------------------------- translate_corpus

class SentenceDataset:
    def __init__(self, sentences, batch_size):
        self.sentences = sorted(sentences, key=len, reverse=True)
        self.batch_size = batch_size

    def __len__(self):
        return math.ceil(len(self.sentences) / self.batch_size)

    def __getitem__(self, index):
        chunk = self.sentences[index * self.batch_size:(index + 1) * self.batch_size]
        width = max(len(s) for s in chunk)
        src = torch.zeros(width, len(chunk), dtype=torch.long)
        for column, sentence in enumerate(chunk):
            src[:len(sentence), column] = torch.as_tensor(sentence)
        return src.to(DEVICE)


class NMTEncoder(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.lut = nn.Embedding(vocab, dim)
        self.fwd = nn.LSTMCell(dim, dim)

    def forward(self, src):
        emb = self.lut(src)
        h = emb.new_zeros(src.size(1), emb.size(-1))
        c = torch.zeros_like(h)
        context = []
        for step in emb:
            h, c = self.fwd(step, (h, c))
            context.append(h)
        return (h, c), torch.stack(context, 1)


class NMTDecoder(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.lut = nn.Embedding(vocab, dim)
        self.cell = nn.LSTMCell(2 * dim, dim)
        self.mix = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, word, feed, state, context):
        h, c = self.cell(torch.cat([self.lut(word), feed], 1), state)
        weights = torch.softmax(torch.bmm(context, h.unsqueeze(2)).squeeze(2), 1)
        read = torch.bmm(weights.unsqueeze(1), context).squeeze(1)
        return torch.tanh(self.mix(torch.cat([read, h], 1))), (h, c)


class Translator:
    def __init__(self, vocab, dim, beam, max_len):
        self.encoder = NMTEncoder(vocab, dim).to(DEVICE).eval()
        self.decoder = NMTDecoder(vocab, dim).to(DEVICE).eval()
        self.generator = nn.Sequential(nn.Linear(dim, vocab), nn.LogSoftmax(dim=-1)).to(DEVICE).eval()
        self.vocab, self.beam, self.max_len = vocab, beam, max_len

    def advance(self, scores, log_probs):
        total = scores.unsqueeze(-1) + log_probs.view(*scores.shape, -1)
        best, flat = total.flatten(1).topk(self.beam, dim=1)
        return best, flat // self.vocab, flat % self.vocab

    def translate_batch(self, src):
        batch = src.size(1)
        state, context = self.encoder(src)
        state = tuple(s.repeat_interleave(self.beam, 0) for s in state)
        context = context.repeat_interleave(self.beam, 0)
        feed = torch.zeros_like(state[0])
        word = torch.full((batch * self.beam,), 2, device=DEVICE)
        scores = torch.zeros(batch, self.beam, device=DEVICE)
        offset = torch.arange(batch, device=DEVICE).unsqueeze(1) * self.beam
        words = []
        for _ in range(self.max_len):
            feed, state = self.decoder(word, feed, state, context)
            scores, parent, token = self.advance(scores, self.generator(feed))
            rows = (parent + offset).view(-1)
            feed = feed.index_select(0, rows)
            state = tuple(s.index_select(0, rows) for s in state)
            word = token.view(-1)
            words.append(token[:, 0])
        return torch.stack(words, 1).cpu()


@expected("evaluation_keeps_graphs", fix="no_grad", thread="pytorch/examples#105", memory=700, held_back=True)
def translate_corpus(fixed=False):
    """Translating (beam decoding) builds the autograd graph although nothing is ever backpropagated, so the intermediate results of every
    decoding step (above all the log-softmax over the vocabulary) stay alive until the batch is done, and translation cannot be run with the
    batch size that training could. Cured by: Input made volatile (today: decode under `torch.no_grad()`).
    """
    rng = random.Random(3)
    sentences = [[rng.randrange(4, 20000) for _ in range(rng.randint(8, 40))] for _ in range(48)]
    data = SentenceDataset(sentences, batch_size=16)
    translator = Translator(vocab=20000, dim=256, beam=5, max_len=100)
    hypotheses = []
    with torch.no_grad() if fixed else contextlib.nullcontext():
        for i in range(len(data)):
            hypotheses.extend(translator.translate_batch(data[i]).tolist())
    print(len(hypotheses), "sentences translated")


# ---------------------------------------------------------------- sample_text

class CharRNN(nn.Module):
    def __init__(self, n_chars, hidden_size, n_layers):
        super().__init__()
        self.hidden_size, self.n_layers = hidden_size, n_layers
        self.encoder = nn.Embedding(n_chars, hidden_size)
        self.gru = nn.GRU(hidden_size, hidden_size, n_layers)
        self.decoder = nn.Linear(hidden_size, n_chars)

    def forward(self, chars, hidden):
        output, hidden = self.gru(self.encoder(chars.view(1, -1)), hidden)
        return self.decoder(output.squeeze(0)), hidden

    def init_hidden(self, batch_size):
        return torch.zeros(self.n_layers, batch_size, self.hidden_size, device=DEVICE)


class TextSampler:
    alphabet = " abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,;:!?'-\n"

    def __init__(self, model):
        self.model = model

    def encode(self, text, copies):
        ids = torch.tensor([self.alphabet.index(c) for c in text], device=DEVICE)
        return ids.unsqueeze(1).expand(-1, copies)

    def pick(self, logits, temperature):
        noise = -torch.log(-torch.log(torch.rand_like(logits)))
        return torch.argmax(logits / temperature + noise, dim=-1)

    def generate(self, prime, copies, length, temperature=0.8):
        self.model.eval()
        hidden = self.model.init_hidden(copies)
        primer = self.encode(prime, copies)
        for chars in primer[:-1]:
            _, hidden = self.model(chars, hidden)
        current = primer[-1]
        written = []
        for _ in range(length):
            logits, hidden = self.model(current, hidden)
            current = self.pick(logits, temperature)
            written.append(current)
        return torch.stack(written).t()


def train_char_rnn(model, steps, chunk_len, batch_size):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        chunk = torch.randint(0, 63, (chunk_len + 1, batch_size)).to(DEVICE)
        hidden = model.init_hidden(batch_size)
        loss = 0
        for c in range(chunk_len):
            logits, hidden = model(chunk[c], hidden)
            loss = loss + F.cross_entropy(logits, chunk[c + 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@expected("evaluation_keeps_graphs", fix="no_grad", thread="spro/practical-pytorch#28", memory=700, held_back=True)
def sample_text(fixed=False):
    """While generating a long text the hidden state is passed from step to step with gradients recorded, so the graph of all characters
    generated so far is kept and memory grows with each generated character. Cured by: Volatile variables at generation (today:
    `torch.no_grad()`), then any length can be generated.
    """
    model = CharRNN(n_chars=63, hidden_size=768, n_layers=2).to(DEVICE)
    train_char_rnn(model, steps=3, chunk_len=40, batch_size=32)
    sampler = TextSampler(model)
    with torch.no_grad() if fixed else contextlib.nullcontext():
        texts = sampler.generate("ROMEO:", copies=128, length=700)
    print(texts.shape)


# ---------------------------------------------------------------- solve_heat

class TanhNet(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        sizes = [2] + [width] * depth
        self.hidden = nn.ModuleList([nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])])
        self.out = nn.Linear(width, 1)

    def forward(self, points):
        for layer in self.hidden:
            points = torch.tanh(layer(points))
        return self.out(points)


class HeatProblem:
    def __init__(self, alpha=0.4):
        self.alpha = alpha

    def sample(self, n):
        return torch.rand(n, 2, device=DEVICE)

    def second(self, first, points):
        return torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)[0][:, 0]

    def residual(self, net, points):
        points.requires_grad_(True)
        u = net(points)
        first = torch.autograd.grad(u.sum(), points, create_graph=True)[0]
        return first[:, 1] - self.alpha * self.second(first, points)

    def candidate_error(self, net, points):
        points.requires_grad_(True)
        u = net(points)
        u.backward(torch.ones_like(u), create_graph=True)
        first = points.grad
        return (first[:, 1] - self.alpha * self.second(first, points)).abs()


class AdaptiveSolver:
    def __init__(self, net, problem, n_points, n_candidates, error):
        self.net, self.problem, self.error = net, problem, error
        self.n_points, self.n_candidates = n_points, n_candidates
        self.optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        self.points = problem.sample(n_points)

    def fit(self, steps):
        for _ in range(steps):
            self.optimizer.zero_grad()
            inside = self.problem.residual(self.net, self.points.clone().detach()).pow(2).mean()
            start = self.problem.sample(500) * torch.tensor([1.0, 0.0], device=DEVICE)
            wave = torch.sin(math.pi * start[:, :1])
            loss = inside + (self.net(start) - wave).pow(2).mean()
            loss.backward()
            self.optimizer.step()

    def resample(self):
        candidates = self.problem.sample(self.n_candidates)
        errors = self.error(self.net, candidates).detach()
        worst = errors.topk(self.n_points // 2).indices
        fresh = self.problem.sample(self.n_points - len(worst))
        self.points = torch.cat([candidates.detach()[worst], fresh])

    def solve(self, rounds):
        for _ in range(rounds):
            self.fit(steps=4)
            self.resample()


@expected("create_graph", fix=r"autograd\.grad", thread="pytorch/pytorch#7343", memory=1200, held_back=True)
def solve_heat(fixed=False):
    """The derivative at the candidate points is taken with `u.backward(..., create_graph=True)`: that leaves a reference cycle (points ->
    their .grad -> graph -> points), so the whole graph of each resampling is never freed, although no Python variable holds it, and one
    more is added with every resampling. Cured by: Use `torch.autograd.grad(..., create_graph=True)` in place of
    `.backward(create_graph=True)` (or reset .grad to None).
    """
    net = TanhNet(width=128, depth=5).to(DEVICE)
    problem = HeatProblem()
    error = (lambda n, p: problem.residual(n, p).abs()) if fixed else problem.candidate_error
    solver = AdaptiveSolver(net, problem, n_points=4000, n_candidates=20000, error=error)
    solver.solve(rounds=30)
    print("solved with", len(solver.points), "points")


# ---------------------------------------------------------------- score_corpus

class TokenMixer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.conv = nn.Conv1d(dim, dim, 5, padding=4)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        mixed = self.conv(self.norm(x).transpose(1, 2))[..., :x.size(1)]
        return x + self.proj(F.gelu(mixed.transpose(1, 2)))


class ConvLanguageModel(nn.Module):
    def __init__(self, vocab, dim, depth):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.Sequential(*[TokenMixer(dim) for _ in range(depth)])
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        return self.head(self.layers(self.embed(tokens)))


def normalize(scores):
    return F.softmax(scores, dim=-1)


def normalize_rows(scores):
    scores.sub_(scores.amax(-1, keepdim=True))
    torch.exp(scores, out=scores)
    scores.div_(scores.sum(-1, keepdim=True))
    return scores


class CorpusScorer:
    def __init__(self, model, to_probabilities):
        self.model, self.to_probabilities = model.eval(), to_probabilities

    @torch.no_grad()
    def score(self, document):
        tokens = torch.as_tensor(document, device=DEVICE).unsqueeze(0)
        probabilities = self.to_probabilities(self.model(tokens))
        chosen = probabilities[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
        entropy_rows = probabilities.amax(-1)
        return chosen.mean().item(), entropy_rows.mean().item()


@expected("logits", fix="split|part|topk", thread="stackoverflow.com/q/53732209", memory=700, held_back=True)
def score_corpus(fixed=False):
    """The output of the language model (positions x large vocabulary) takes more than half of the memory, and softmax makes a second tensor
    of the same size beside it. Cured by: Softmax computed in place (exp with out=, divide in place), so that no second copy is needed.
    """
    vocab = 30000
    rng = np.random.default_rng(5)
    documents = [rng.integers(0, vocab, size=n) for n in (400, 900, 1500, 3200, 700)]
    model = ConvLanguageModel(vocab, dim=256, depth=3).to(DEVICE)
    scorer = CorpusScorer(model, normalize_rows if fixed else normalize)
    for number, document in enumerate(documents):
        print(number, scorer.score(document))


# ---------------------------------------------------------------- learn_to_optimize

class DigitNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(28 * 28, 32)
        self.linear2 = nn.Linear(32, 10)

    def forward(self, images):
        return self.linear2(F.relu(self.linear1(images.flatten(1))))


class FlatModel:
    def __init__(self, model):
        self.model = model

    def get_flat_params(self):
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])

    def get_flat_grads(self):
        return torch.cat([p.grad.reshape(-1) for p in self.model.parameters()])

    def functional_loss(self, flat, images, labels):
        sizes = [p.numel() for p in self.model.parameters()]
        names = [n for n, _ in self.model.named_parameters()]
        shapes = [p.shape for p in self.model.parameters()]
        parts = {n: c.view(s) for n, c, s in zip(names, flat.reshape(-1).split(sizes), shapes)}
        return F.cross_entropy(torch.func.functional_call(self.model, parts, (images,)), labels)


class MetaOptimizer(nn.Module):
    def __init__(self, hidden, row_gates):
        super().__init__()
        self.row_gates = row_gates
        self.expand = nn.Linear(3, hidden)
        self.cell = nn.LSTMCell(hidden, hidden)
        self.forget_gate = nn.Linear(hidden, 1)
        self.input_gate = nn.Linear(hidden, 1)
        self.state = None

    def start(self):
        self.state = None

    def forward(self, flat_params, flat_grads, loss):
        features = torch.stack([flat_params.detach(), flat_grads, loss.detach().expand_as(flat_grads)], 1)
        x = torch.tanh(self.expand(features))
        self.state = self.cell(x, self.state)
        keep = torch.sigmoid(self.forget_gate(self.state[0]) + 4.0)
        rate = torch.sigmoid(self.input_gate(self.state[0]) - 4.0)
        if self.row_gates:
            keep, rate = torch.t(keep), torch.t(rate)
        return keep * flat_params - rate * flat_grads


def meta_epoch(meta, optimizer, batches, truncated):
    learner = DigitNet().to(DEVICE)
    flat_model = FlatModel(learner)
    flat = flat_model.get_flat_params()
    meta.start()
    for begin in range(0, len(batches), truncated):
        total = 0
        for images, labels in batches[begin:begin + truncated]:
            learner.zero_grad()
            loss = F.cross_entropy(learner(images), labels)
            loss.backward()
            flat = meta(flat.reshape(-1), flat_model.get_flat_grads(), loss)
            total = total + flat_model.functional_loss(flat, images, labels)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        flat = flat.detach()
        meta.state = tuple(s.detach() for s in meta.state)


@expected("all_pairs", fix="squeeze|chunk|split", thread="ikostrikov/pytorch-meta-optimizer#2", memory=700, held_back=True)
def learn_to_optimize(fixed=False):
    """The gates f and i have the shape (N, 1) and are multiplied with the flat parameters of shape (N,): this broadcasts to an N x N matrix
    (25450 x 25450, 2.4 GiB) where N numbers were meant. Cured by: Gates transposed / flattened so that the shapes agree, result viewed as
    (N,).
    """
    batches = [(torch.randn(32, 1, 28, 28).to(DEVICE), torch.randint(0, 10, (32,)).to(DEVICE)) for _ in range(8)]
    meta = MetaOptimizer(hidden=10, row_gates=fixed).to(DEVICE)
    optimizer = torch.optim.Adam(meta.parameters(), lr=1e-3)
    for _ in range(3):
        meta_epoch(meta, optimizer, batches, truncated=4)
    print("meta training done")


# ---------------------------------------------------------------- class_incremental

class ClassImages:
    def __init__(self, label, count, size=32):
        self.label = label
        self.images = torch.randint(0, 255, (count, 3, size, size), dtype=torch.uint8)

    def __len__(self):
        return len(self.images)

    def batches(self, batch_size):
        for part in self.images.split(batch_size):
            yield part.float() / 255, torch.full((len(part),), self.label)


class BasicBlock(nn.Module):
    def __init__(self, planes_in, planes, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(planes_in, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.short = nn.Conv2d(planes_in, planes, 1, stride, bias=False)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.short(x))


class IcarlNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.feature_extractor = nn.Sequential(
            nn.Conv2d(3, 16, 3, 1, 1), BasicBlock(16, 32, 1), BasicBlock(32, 64, 2), BasicBlock(64, 64, 2),
            nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(64, classes)

    def forward(self, x):
        return self.classifier(self.feature_extractor(x))


class IcarlStrategy:
    def __init__(self, model, memory_size, train_mb_size, eval_mb_size):
        self.model, self.memory_size = model, memory_size
        self.train_mb_size, self.eval_mb_size = train_mb_size, eval_mb_size
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.exemplars = {}

    def train_experience(self, datasets):
        self.model.train()
        for dataset in datasets:
            for images, labels in dataset.batches(self.train_mb_size):
                loss = F.cross_entropy(self.model(images.to(DEVICE)), labels.to(DEVICE))
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
        self.construct_exemplar_sets(datasets)

    @torch.no_grad()
    def class_features(self, dataset):
        rows = [self.model.feature_extractor(images.to(DEVICE))
                for images, _ in dataset.batches(self.eval_mb_size or len(dataset))]
        return F.normalize(torch.cat(rows), dim=1)

    def construct_exemplar_sets(self, datasets):
        self.model.eval()
        per_class = self.memory_size // (len(self.exemplars) + len(datasets))
        for dataset in datasets:
            features = self.class_features(dataset)
            distance = (features - features.mean(0, keepdim=True)).norm(dim=1)
            order = torch.argsort(distance)[:per_class].cpu().clamp(0, len(dataset) - 1)
            self.exemplars[dataset.label] = dataset.images[order]


@expected("batch_without_gradients", fix="split|part", thread="ContinualAI/avalanche#1075", memory=700, held_back=True)
def class_incremental(fixed=False):
    """For choosing the exemplars all images of a class are put in one batch (batch_size=len(dataset)) and sent through the feature
    extractor at once; with many images a class this does not fit. Cured by: Features computed in small mini-batches (eval batch size) and
    concatenated.
    """
    strategy = IcarlStrategy(IcarlNet(10).to(DEVICE), memory_size=400, train_mb_size=64,
                             eval_mb_size=128 if fixed else None)
    for experience in range(2):
        strategy.train_experience([ClassImages(2 * experience + k, 3000) for k in range(2)])
        print("experience", experience, sorted(strategy.exemplars))


# ---------------------------------------------------------------- train_textcat

class Doc:
    def __init__(self, sentences, category):
        self.sentences, self.category = sentences, category

    def __len__(self):
        return sum(len(s) for s in self.sentences)


def make_doc(rng, n_words, vocab):
    sentences = []
    while n_words > 0:
        size = min(n_words, rng.randint(8, 48))
        sentences.append([rng.randrange(1, vocab) for _ in range(size)])
        n_words -= size
    return Doc(sentences, rng.randrange(4))


class WordPieceLayer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.merge = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x, mask):
        n, t, d = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(d // self.heads)
        attended = torch.softmax(scores.masked_fill(mask[:, None, None], -1e4), -1) @ v
        x = self.norm1(x + self.merge(attended.transpose(1, 2).reshape(n, t, d)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class TransformerTok2Vec(nn.Module):
    def __init__(self, vocab, dim, depth):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=0)
        self.layers = nn.ModuleList([WordPieceLayer(dim, 4) for _ in range(depth)])

    def forward(self, doc):
        rows = [torch.tensor(s) for s in doc.sentences]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(DEVICE)
        x, mask = self.embed(ids), ids.eq(0)
        for layer in self.layers:
            x = layer(x, mask)
        return x.masked_fill(mask.unsqueeze(-1), 0).sum((0, 1)) / len(doc)


class TextCategorizer:
    def __init__(self, vocab, words_per_batch):
        self.words_per_batch = words_per_batch
        self.tok2vec = TransformerTok2Vec(vocab, 256, 4).to(DEVICE)
        self.output = nn.Linear(256, 4).to(DEVICE)
        params = list(self.tok2vec.parameters()) + list(self.output.parameters())
        self.optimizer = torch.optim.Adam(params, lr=2e-5)

    def batch_by_words(self, docs):
        batch, words = [], 0
        for doc in docs:
            if batch and words + len(doc) > self.words_per_batch:
                yield batch
                batch, words = [], 0
            batch.append(doc)
            words += len(doc)
        if batch:
            yield batch

    def update(self, docs):
        self.optimizer.zero_grad()
        for batch in self.batch_by_words(docs):
            vectors = torch.stack([self.tok2vec(doc) for doc in batch])
            target = torch.tensor([doc.category for doc in batch], device=DEVICE)
            (F.cross_entropy(self.output(vectors), target) * len(batch) / len(docs)).backward()
        self.optimizer.step()


@expected("larger_step", fix="as large as|sequences", thread="explosion/spacy-transformers#48", memory=700, held_back=True)
def train_textcat(fixed=False):
    """Batch size 1 does not help: one document is extremely long (tens of times the others), and a document is never divided, so all of its
    tokens go through the transformer in one update. Cured by: The longest documents pruned from the data.
    """
    rng = random.Random(11)
    lengths = [rng.randint(40, 600) for _ in range(40)]
    lengths[27] = 14000
    docs = [make_doc(rng, n, 8000) for n in lengths]
    if fixed:
        docs = [doc for doc in docs if len(doc) <= 2000]
    textcat = TextCategorizer(8000, words_per_batch=1)
    for doc in docs:
        textcat.update([doc])
    print("updates:", len(docs))


# ---------------------------------------------------------------- train_food

class FoodNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        stages, previous = [], 3
        for width in (24, 48, 96):
            stages += [nn.Conv2d(previous, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
            previous = width
        self.features = nn.Sequential(*stages)
        self.classifier = nn.Linear(96, classes)

    def forward(self, images):
        return self.classifier(self.features(images).mean((2, 3)))


class FoodLoader:
    def __init__(self, batches, batch_size):
        self.n, self.batch_size = batches, batch_size

    def __len__(self):
        return self.n

    def __iter__(self):
        for _ in range(self.n):
            yield torch.rand(self.batch_size, 3, 96, 96), torch.randint(0, 20, (self.batch_size,))


class FoodExperiment:
    def __init__(self, model, train_loader, val_loader, val_context):
        self.model, self.train_loader, self.val_loader = model, train_loader, val_loader
        self.val_context = val_context
        self.loss_function = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
        self.history = []

    def train_epoch(self):
        self.model.train()
        for images, labels in self.train_loader:
            self.optimizer.zero_grad()
            loss = self.loss_function(self.model(images.to(DEVICE)), labels.to(DEVICE))
            loss.backward()
            self.optimizer.step()

    def evaluate(self):
        self.model.eval()
        total_loss, correct, seen = 0, 0, 0
        with self.val_context():
            for images, labels in self.val_loader:
                images, labels = images.to(DEVICE), labels.to(DEVICE)
                output = self.model(images)
                total_loss += self.loss_function(output, labels)
                correct += (output.argmax(1) == labels).sum()
                seen += len(labels)
        return float(total_loss) / len(self.val_loader), int(correct) / seen

    def run(self, epochs):
        for epoch in range(epochs):
            self.train_epoch()
            self.history.append(self.evaluate())
            print(epoch, self.history[-1])


@expected("evaluation_keeps_graphs", fix="no_grad", thread="pytorch/pytorch#5210", memory=700, held_back=True)
def train_food(fixed=False):
    """The validation loop runs without volatile/no_grad and adds up the loss, so the graphs of all validation batches are kept (as if one
    wanted to backpropagate through the entire validation set). Cured by: Validation inputs volatile (today: `torch.no_grad()` around
    evaluation).
    """
    experiment = FoodExperiment(FoodNet(20).to(DEVICE), FoodLoader(12, 16), FoodLoader(40, 16),
                                torch.no_grad if fixed else contextlib.nullcontext)
    experiment.run(epochs=2)


# ---------------------------------------------------------------- segment_volumes

class ResidualUnit(nn.Module):
    def __init__(self, c_in, c_out):
        super().__init__()
        self.conv1 = nn.Conv3d(c_in, c_out, 3, padding=1)
        self.norm1 = nn.InstanceNorm3d(c_out, affine=True)
        self.conv2 = nn.Conv3d(c_out, c_out, 3, padding=1)
        self.norm2 = nn.InstanceNorm3d(c_out, affine=True)
        self.short = nn.Conv3d(c_in, c_out, 1)

    def forward(self, x):
        y = F.leaky_relu(self.norm1(self.conv1(x)), 0.01)
        y = self.norm2(self.conv2(y))
        return F.leaky_relu(y + self.short(x), 0.01)


class VolumeSegmenter(nn.Module):
    def __init__(self, widths, classes, unit_runner):
        super().__init__()
        self.unit_runner = unit_runner
        self.down = nn.ModuleList([ResidualUnit(a, b) for a, b in zip((1,) + widths, widths)])
        back = widths[::-1]
        self.up = nn.ModuleList([ResidualUnit(a + b, b) for a, b in zip(back, back[1:])])
        self.head = nn.Conv3d(widths[0], classes, 1)

    def forward(self, x):
        skips = []
        for i, unit in enumerate(self.down):
            x = self.unit_runner(unit, x)
            if i + 1 < len(self.down):
                skips.append(x)
                x = F.max_pool3d(x, 2)
        for unit in self.up:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = self.unit_runner(unit, torch.cat([x, skips.pop()], 1))
        return self.head(x)


class SegmentationTrainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def dice_loss(self, logits, target):
        probs = torch.softmax(logits, 1)[:, 1]
        overlap = (probs * target).sum()
        return 1 - 2 * overlap / (probs.sum() + target.sum() + 1.0)

    def training_step(self, volume, target):
        logits = self.model(volume.to(DEVICE))
        loss = self.dice_loss(logits, target.to(DEVICE))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def fit(self, steps, shape):
        for _ in range(steps):
            self.training_step(torch.rand(1, 1, *shape), torch.randint(0, 2, (1, *shape)).float())


def call_unit(unit, x):
    return unit(x)


def call_unit_lean(unit, x):
    return checkpoint(unit, x, use_reentrant=False)


@expected("large_images", fix="checkpoint", thread="discuss.pytorch.org/t/167734", memory=1550, held_back=True)
def segment_volumes(fixed=False):
    """The network has few parameters but large 3-D inputs: the memory goes to the activations kept for backward, not to parameters,
    gradients or optimizer (sharding these does not help). Cured by: Activation checkpointing of the blocks.
    """
    model = VolumeSegmenter((16, 32, 64), classes=2, unit_runner=call_unit_lean if fixed else call_unit).to(DEVICE)
    print("parameters:", sum(p.numel() for p in model.parameters()))
    SegmentationTrainer(model).fit(steps=3, shape=(96, 96, 128))
    print("trained")


# ---------------------------------------------------------------- eval_pretrained

class MultiScaleGraphConv(nn.Module):
    def __init__(self, scales, c_in, c_out, joints):
        super().__init__()
        self.scales = scales
        self.register_buffer("adjacency", torch.rand(scales * joints, joints))
        self.mlp = nn.Sequential(nn.Conv2d(scales * c_in, c_out, 1), nn.BatchNorm2d(c_out), nn.ReLU(inplace=True))

    def forward(self, x):
        n, c, t, v = x.shape
        support = torch.einsum("vu,nctu->nctv", self.adjacency, x)
        support = support.view(n, c, t, self.scales, v).permute(0, 3, 1, 2, 4).reshape(n, self.scales * c, t, v)
        return self.mlp(support)


class MultiScaleTemporalConv(nn.Module):
    def __init__(self, channels, stride):
        super().__init__()
        branch = channels // 4
        self.branches = nn.ModuleList([nn.Sequential(
            nn.Conv2d(channels, branch, 1), nn.BatchNorm2d(branch), nn.ReLU(inplace=True),
            nn.Conv2d(branch, branch, (3, 1), (stride, 1), (d, 0), (d, 1))) for d in (1, 2, 3, 4)])

    def forward(self, x):
        return F.relu(torch.cat([branch(x) for branch in self.branches], 1))


class SkeletonModel(nn.Module):
    def __init__(self, classes, joints=25, scales=4):
        super().__init__()
        widths, strides = (3, 64, 96, 128), (1, 2, 2)
        blocks = []
        for a, b, stride in zip(widths, widths[1:], strides):
            blocks += [MultiScaleGraphConv(scales, a, b, joints), MultiScaleTemporalConv(b, stride)]
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, x):
        n, c, t, v, m = x.shape
        x = self.blocks(x.permute(0, 4, 1, 2, 3).reshape(n * m, c, t, v))
        return self.fc(x.mean((2, 3)).view(n, m, -1).mean(1))


class Processor:
    def __init__(self, test_batch_size, samples):
        self.test_batch_size, self.samples = test_batch_size, samples
        self.model = SkeletonModel(classes=60).to(DEVICE)

    def test_batches(self):
        for begin in range(0, self.samples, self.test_batch_size):
            size = min(self.test_batch_size, self.samples - begin)
            yield torch.rand(size, 3, 150, 25, 2), torch.randint(0, 60, (size,))

    def eval(self):
        self.model.eval()
        scores, losses = [], []
        with torch.no_grad():
            for data, label in self.test_batches():
                output = self.model(data.to(DEVICE))
                losses.append(F.cross_entropy(output, label.to(DEVICE)).item())
                scores.append(output.cpu().numpy())
        return np.concatenate(scores), float(np.mean(losses))


@expected("batch_without_gradients", fix="split|part", thread="kenziyuliu/MS-G3D#38", memory=700, held_back=True)
def eval_pretrained(fixed=False):
    """Evaluating a pretrained model with too large a test batch: the activations of one forward pass do not fit. Cured by: Smaller test
    batch (`--test-batch-size 16`).
    """
    processor = Processor(test_batch_size=16 if fixed else 64, samples=160)
    scores, loss = processor.eval()
    print(scores.shape, loss)
