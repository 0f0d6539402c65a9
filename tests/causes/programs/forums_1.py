"""Programs after threads of users on forums and question sites."""
import gc

import numpy as np
import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from expected import expected


# A surrogate for a one-dimensional flow is fitted to the residual of Burgers' equation.

class Surrogate(nn.Module):
    def __init__(self, width=96, depth=4):
        super().__init__()
        layers = [nn.Linear(2, width), nn.Tanh()]
        for _ in range(depth - 1):
            layers += [nn.Linear(width, width), nn.Tanh()]
        self.net = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, x, t):
        return self.net(torch.cat([x, t], 1))


def residual(model, x, t, viscosity=0.01):
    x, t = x.requires_grad_(), t.requires_grad_()
    u = model(x, t)
    ones = torch.ones_like(u)
    u_t, u_x = torch.autograd.grad(u, (t, x), ones, create_graph=True)
    u_xx, = torch.autograd.grad(u_x, x, ones, create_graph=True)
    return u_t + u * u_x - viscosity * u_xx


def initial_loss(model, x):
    t = torch.zeros_like(x)
    return F.mse_loss(model(x, t), -torch.sin(np.pi * x))


def validate(model, points):
    x, t = points[:, :1].clone(), points[:, 1:].clone()
    return residual(model, x, t).pow(2).mean() + initial_loss(model, x.detach())


def train(model, loader, val_points, epochs, device, fixed):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    history = {"train": [], "val": []}
    for epoch in range(epochs):
        running = 0.0
        for points, in loader:
            points = points.to(device)
            x, t = points[:, :1].clone(), points[:, 1:].clone()
            loss = residual(model, x, t).pow(2).mean() + 10 * initial_loss(model, x.detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.item()
        val_loss = validate(model, val_points)
        history["train"].append(running / len(loader))
        history["val"].append(val_loss.item() if fixed else val_loss)
    return history


@expected("graph_of_earlier_steps", fix=r"detach|item\(\)", thread="pytorch/pytorch#64586", memory=500)
def train_flow_surrogate(fixed=False):
    """`train` appends the loss tensors of `validate` to `history` without `.item()`; each of them keeps the whole graph of its epoch, that
    of `torch.autograd.grad(..., create_graph=True)` in `residual` included, so memory grows by one graph an epoch. Cured by: append
    `val_loss.item()`.
    """
    device = torch.device("cuda")
    model = Surrogate().to(device)
    loader = DataLoader(TensorDataset(torch.rand(8000, 2)), batch_size=2000, shuffle=True)
    val_points = torch.rand(5000, 2, device=device)
    history = train(model, loader, val_points, 60, device, fixed)
    return {"epochs": len(history["val"])}


# Decoding with latent attention: the up-projection of the keys is absorbed into the query.

class LatentAttention(nn.Module):
    def __init__(self, hidden, num_heads, d_nope, d_rope, rank, fixed):
        super().__init__()
        self.num_heads, self.d_nope, self.d_rope, self.fixed = num_heads, d_nope, d_rope, fixed
        self.q_proj = nn.Linear(hidden, num_heads * (d_nope + d_rope), bias=False)
        self.kv_down = nn.Linear(hidden, rank + d_rope, bias=False)
        self.w_uk = nn.Parameter(torch.randn(num_heads, d_nope, rank) * 0.02)
        self.w_uv = nn.Parameter(torch.randn(num_heads, rank, d_nope) * 0.02)
        self.o_proj = nn.Linear(num_heads * d_nope, hidden, bias=False)
        self.scale = (d_nope + d_rope) ** -0.5

    def absorb(self, q_nope, weight):
        if self.fixed:
            return torch.einsum("nhd,hdr->nhr", q_nope, weight)
        return torch.matmul(q_nope.unsqueeze(2), weight.unsqueeze(0)).squeeze(2)

    def forward(self, x, cache):
        tokens = x.shape[0]
        q = self.q_proj(x).view(tokens, self.num_heads, self.d_nope + self.d_rope)
        q_nope, q_rope = q.split([self.d_nope, self.d_rope], -1)
        new = self.kv_down(x).unsqueeze(1)
        cache = torch.cat([cache, new], 1)
        latent, k_rope = cache.split([cache.shape[-1] - self.d_rope, self.d_rope], -1)
        q_latent = self.absorb(q_nope, self.w_uk)
        scores = torch.bmm(q_latent, latent.transpose(1, 2)) + torch.bmm(q_rope, k_rope.transpose(1, 2))
        context = torch.bmm((scores * self.scale).softmax(-1), latent)
        return self.o_proj(self.absorb(context, self.w_uv).flatten(1)), cache


class DecoderLayer(nn.Module):
    def __init__(self, hidden, fixed):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = LatentAttention(hidden, 16, 64, 32, 256, fixed)
        self.mlp = nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.SiLU(), nn.Linear(2 * hidden, hidden))

    def forward(self, x, cache):
        attended, cache = self.attention(self.norm1(x), cache)
        x = x + attended
        return x + self.mlp(self.norm2(x)), cache


@expected("large_intermediate", fix="transpose|part|chunk", thread="pytorch/pytorch#149302", memory=600)
@torch.inference_mode()
def decode_latent_attention(fixed=False):
    """`torch.matmul(q_nope, self.w_uk)` in `LatentAttention.absorb` multiplies (tokens, heads, 1, d) by (1, heads, d, rank): the batch
    dimensions are broadcast by copying `w_uk` once per token before the batched product. Cured by: `torch.einsum` over the
    three-dimensional tensors, which does not expand the weight.
    """
    device, hidden, num_seqs = torch.device("cuda"), 1024, 2048
    embed = nn.Embedding(8000, hidden).to(device, torch.bfloat16)
    layers = nn.ModuleList(DecoderLayer(hidden, fixed) for _ in range(4)).to(device, torch.bfloat16)
    lm_head = nn.Linear(hidden, 8000, bias=False).to(device, torch.bfloat16)
    caches = [torch.randn(num_seqs, 8, 256 + 32, device=device, dtype=torch.bfloat16) for _ in layers]
    token = torch.zeros(num_seqs, dtype=torch.long, device=device)
    for step in range(4):
        x = embed(token)
        for number, layer in enumerate(layers):
            x, caches[number] = layer(x, caches[number])
        token = lm_head(x).argmax(-1)
    return step


# The loss of a segmentation network on the validation pictures, without training it.

class DoubleConv(nn.Sequential):
    def __init__(self, cin, cout):
        super().__init__(nn.Conv2d(cin, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
                         nn.Conv2d(cout, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self, cin=3, classes=1, width=24):
        super().__init__()
        self.down1, self.down2 = DoubleConv(cin, width), DoubleConv(width, 2 * width)
        self.middle = DoubleConv(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.conv2 = DoubleConv(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.conv1 = DoubleConv(2 * width, width)
        self.out = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        x = self.conv2(torch.cat([b, self.up2(c)], 1))
        x = self.conv1(torch.cat([a, self.up1(x)], 1))
        return self.out(x)


class Scans(Dataset):
    def __init__(self, number, size):
        self.number, self.image, self.mask = number, torch.rand(3, size, size), torch.randint(0, 2, (1, size, size)).float()

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        return self.image, self.mask


def score(model, loader, device, fixed):
    criterion = nn.BCEWithLogitsLoss()
    model.eval()
    losses = []
    for images, masks in loader:
        images, masks = images.to(device), masks.to(device)
        output = model(images)
        loss = criterion(output, masks)
        losses.append(float(loss))
        if fixed:
            del output, loss
    return sum(losses) / len(losses)


@expected("evaluation_keeps_graphs", fix=r"no_grad|\bdel\b", thread="discuss.pytorch.org/t/2735", memory=1000)
def score_validation_masks(fixed=False):
    """`score` makes forward passes with gradients on and never calls backward; `output` and `loss` of one iteration still refer to its
    graph while the next forward pass builds another, so two graphs lie in memory at a time. Cured by: `del output, loss` at the end of each
    iteration.
    """
    device = torch.device("cuda")
    model = UNet().to(device)
    loader = DataLoader(Scans(24, 256), batch_size=6)
    return {"loss": score(model, loader, device, fixed)}


# A T5 is fine-tuned for summaries; the trainer evaluates with ROUGE.

def nested_concat(tensors, new_tensors):
    if isinstance(tensors, tuple):
        return tuple(nested_concat(t, n) for t, n in zip(tensors, new_tensors))
    return torch.cat((tensors, new_tensors), 0)


class SummarizationTrainer:
    def __init__(self, model, train_dataset, eval_dataset, batch_size, compute_metrics, preprocess_logits_for_metrics=None):
        self.model, self.compute_metrics = model.cuda(), compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.train_loader = DataLoader(train_dataset, batch_size=batch_size, shuffle=True)
        self.eval_loader = DataLoader(eval_dataset, batch_size=batch_size)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def train(self):
        self.model.train()
        for input_ids, labels in self.train_loader:
            loss = self.model(input_ids=input_ids.cuda(), labels=labels.cuda()).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @torch.no_grad()
    def prediction_step(self, input_ids, labels):
        outputs = self.model(input_ids=input_ids, labels=labels, use_cache=False)
        return outputs.loss.mean().detach(), outputs.logits.detach(), labels

    def evaluation_loop(self):
        self.model.eval()
        losses, preds_host, labels_host = [], None, None
        for input_ids, labels in self.eval_loader:
            loss, logits, labels = self.prediction_step(input_ids.cuda(), labels.cuda())
            losses.append(loss.item())
            if self.preprocess_logits_for_metrics is not None:
                logits, labels = self.preprocess_logits_for_metrics(logits, labels)
            preds_host = logits if preds_host is None else nested_concat(preds_host, logits)
            labels_host = labels if labels_host is None else nested_concat(labels_host, labels)
        metrics = self.compute_metrics(preds_host.cpu().numpy(), labels_host.cpu().numpy())
        return {"eval_loss": sum(losses) / len(losses), **metrics}


def rouge(predictions, labels):
    ids = predictions.argmax(-1) if predictions.ndim == 3 else predictions
    return {"R1": float((ids == labels).mean())}


@expected("growing_buffer", fix=r"\.cpu\(\)", thread="discuss.huggingface.co/t/2941", memory=400)
def finetune_summarizer(fixed=False):
    """`SummarizationTrainer.evaluation_loop` concatenates the logits of the whole evaluation set (batch x length x vocabulary) in
    `preds_host` on the GPU, for `compute_metrics`, which needs the token ids only. Cured by: `preprocess_logits_for_metrics` that takes the
    argmax of each batch before it is stored.
    """
    from transformers import T5Config, T5ForConditionalGeneration
    config = T5Config(vocab_size=12000, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4, decoder_start_token_id=0)
    articles, summaries = torch.randint(2, 12000, (240, 128)), torch.randint(2, 12000, (240, 48))
    dataset = TensorDataset(articles, summaries)

    def preprocess_logits_for_metrics(logits, labels):
        return torch.argmax(logits, dim=-1), labels

    trainer = SummarizationTrainer(T5ForConditionalGeneration(config), torch.utils.data.Subset(dataset, range(32)), dataset, 8, rouge,
                                   preprocess_logits_for_metrics if fixed else None)
    trainer.train()
    return trainer.evaluation_loop()


# A trained network marks what stands out in a folder of photos, one photo at a time.

class ResidualUnit(nn.Module):
    def __init__(self, cin, cout, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride=stride, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(cout), nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, padding=1, bias=False)
        self.skip = nn.Conv2d(cin, cout, 1, stride=stride, bias=False)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.skip(x))


class SaliencyNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stage1 = nn.Sequential(ResidualUnit(3, 32), ResidualUnit(32, 32))
        self.stage2 = nn.Sequential(ResidualUnit(32, 64, 2), ResidualUnit(64, 64))
        self.stage3 = nn.Sequential(ResidualUnit(64, 128, 2), ResidualUnit(128, 128))
        self.head = nn.Conv2d(32 + 64 + 128, 1, 1)

    def forward(self, x):
        a = self.stage1(x)
        b = self.stage2(a)
        c = self.stage3(b)
        size = x.shape[-2:]
        b, c = (F.interpolate(f, size=size, mode="bilinear", align_corners=False) for f in (b, c))
        return torch.sigmoid(self.head(torch.cat([a, b, c], 1)))


def load_image(rng):
    image = rng.integers(0, 256, (300, 300, 3), dtype=np.uint8)
    return torch.from_numpy(image).permute(2, 0, 1).float().div(255).unsqueeze(0)


def run_inference(net, names):
    rng, masks = np.random.default_rng(0), {}
    for name in names:
        image = load_image(rng).cuda()
        masks[name] = net(image)
    return masks


@expected("evaluation_keeps_graphs", fix="no_grad", thread="stackoverflow.com/questions/55322434", memory=550)
def predict_photo_masks(fixed=False):
    """`run_inference` calls the trained network without `torch.no_grad()`; the kept `masks` hold the graph with all intermediate results of
    every image, though no backward follows. Cured by: `with torch.no_grad():` around the inference.
    """
    net = SaliencyNet().cuda()
    net.eval()
    names = [f"IMG_{number:04d}.jpg" for number in range(40)]
    if fixed:
        with torch.no_grad():
            masks = run_inference(net, names)
    else:
        masks = run_inference(net, names)
    return {name: list(mask.cpu().shape) for name, mask in masks.items()}


# Pictures are carried over into several styles; the solver samples all styles now and then.

class ConditionalInstanceNorm(nn.Module):
    def __init__(self, channels, domains):
        super().__init__()
        self.norm = nn.InstanceNorm2d(channels)
        self.gamma, self.beta = nn.Linear(domains, channels), nn.Linear(domains, channels)

    def forward(self, x, c):
        return self.norm(x) * (1 + self.gamma(c)[:, :, None, None]) + self.beta(c)[:, :, None, None]


class ResBlock(nn.Module):
    def __init__(self, channels, domains):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm1, self.norm2 = (ConditionalInstanceNorm(channels, domains) for _ in range(2))

    def forward(self, x, c):
        y = F.relu(self.norm1(self.conv1(x), c))
        return x + self.norm2(self.conv2(y), c)


class Generator(nn.Module):
    def __init__(self, domains, width=24):
        super().__init__()
        self.enter = nn.Conv2d(3, width, 7, padding=3)
        self.down = nn.Conv2d(width, 2 * width, 4, stride=2, padding=1)
        self.blocks = nn.ModuleList(ResBlock(2 * width, domains) for _ in range(4))
        self.up = nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1)
        self.leave = nn.Conv2d(width, 3, 7, padding=3)

    def forward(self, x, c):
        x = F.relu(self.down(F.relu(self.enter(x))))
        for block in self.blocks:
            x = block(x, c)
        code = x.mean((2, 3))
        return torch.tanh(self.leave(F.relu(self.up(x)))), code


class Discriminator(nn.Module):
    def __init__(self, domains, width=24):
        super().__init__()
        self.main = nn.Sequential(nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.01), nn.Conv2d(width, 2 * width, 4, 2, 1), nn.LeakyReLU(0.01),
                                  nn.Conv2d(2 * width, 4 * width, 4, 2, 1), nn.LeakyReLU(0.01))
        self.src, self.cls = nn.Conv2d(4 * width, 1, 3, 1, 1), nn.Linear(4 * width, domains)

    def forward(self, x):
        h = self.main(x)
        return self.src(h), self.cls(h.mean((2, 3)))


class Solver:
    def __init__(self, domains, fixed):
        self.domains, self.fixed = domains, fixed
        self.G, self.D = Generator(domains).cuda(), Discriminator(domains).cuda()
        self.g_optimizer = torch.optim.Adam(self.G.parameters(), 1e-4, (0.5, 0.999))
        self.d_optimizer = torch.optim.Adam(self.D.parameters(), 1e-4, (0.5, 0.999))

    def label(self, number, batch):
        return F.one_hot(torch.full((batch,), number), self.domains).float().cuda()

    def train_step(self, real_x, label_org, label_trg):
        target_c = F.one_hot(label_trg, self.domains).float().cuda()
        src, cls = self.D(real_x)
        fake_src, _ = self.D(self.G(real_x, target_c)[0].detach())
        d_loss = fake_src.mean() - src.mean() + F.cross_entropy(cls, label_org.cuda())
        self.d_optimizer.zero_grad()
        d_loss.backward()
        self.d_optimizer.step()
        x_fake, _ = self.G(real_x, target_c)
        src, cls = self.D(x_fake)
        g_loss = F.cross_entropy(cls, label_trg.cuda()) - src.mean() + 10 * (real_x - x_fake).abs().mean()
        self.g_optimizer.zero_grad()
        g_loss.backward()
        self.g_optimizer.step()

    def sample(self, real_x):
        x_fake_list = [real_x]
        for number in range(self.domains):
            target_c = self.label(number, len(real_x))
            fake = self.G(real_x, target_c)[0]
            x_fake_list.append(fake.detach() if self.fixed else fake)
        return torch.cat(x_fake_list, 3).data.cpu()


@expected("evaluation_keeps_graphs", fix="no_grad|detach", thread="jianshu.com/p/f1bd4ff84926", memory=700)
def train_style_transfer_gan(fixed=False):
    """`Solver.sample` collects `self.G(real_x, target_c)[0]` for all target domains in `x_fake_list` with their graphs attached; the
    generator's activations of all domains stay in memory until the pictures are joined. Cured by: `.detach()` on each output of the
    generator in `sample`.
    """
    solver, rng = Solver(8, fixed), torch.Generator().manual_seed(3)
    fixed_x = torch.rand(8, 3, 128, 128, generator=rng).cuda()
    for step in range(8):
        real_x = torch.rand(8, 3, 128, 128, generator=rng).cuda()
        label_org, label_trg = torch.randint(0, 8, (2, 8), generator=rng)
        solver.train_step(real_x, label_org, label_trg)
        if (step + 1) % 4 == 0:
            pictures = solver.sample(fixed_x)
    return {"width": pictures.shape[3]}


# Several masked language models are compared by the perplexity they give to a list of sentences.

class WordTokenizer:
    mask_token_id, cls_token_id, sep_token_id = 103, 101, 102

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def encode(self, sentence):
        ids = [1000 + sum(map(ord, word)) * 37 % (self.vocab_size - 1000) for word in sentence.split()]
        return torch.tensor([[self.cls_token_id, *ids, self.sep_token_id]])


def load_checkpoint(name):
    from transformers import BertConfig, BertForMaskedLM
    vocab_size = {"bert-base-uncased": 30522, "bert-base-cased": 28996, "legal-bert": 30522}[name]
    config = BertConfig(vocab_size=vocab_size, hidden_size=768, num_hidden_layers=4, num_attention_heads=12, intermediate_size=3072)
    return WordTokenizer(config.vocab_size), BertForMaskedLM(config)


def perplexity(model, tokenizer, sentence):
    tensor_input = tokenizer.encode(sentence)
    repeat_input = tensor_input.repeat(tensor_input.size(-1) - 2, 1)
    mask = torch.ones(tensor_input.size(-1) - 1).diag(1)[:-2]
    masked_input = repeat_input.masked_fill(mask == 1, tokenizer.mask_token_id)
    labels = repeat_input.masked_fill(masked_input != tokenizer.mask_token_id, -100)
    with torch.inference_mode():
        loss = model(masked_input.cuda(), labels=labels.cuda()).loss
    return float(np.exp(loss.item()))


@expected("several_models", fix=r"\bdel\b", thread="stackoverflow.com/questions/70508960", memory=500)
def compare_language_models(fixed=False):
    """`model` in `compare_language_models` still refers to the language model that has been scored while the next one is loaded onto the
    GPU; so the weights of two models lie there at once. Cured by: `model.cpu()`, `del model`, `gc.collect()`, `torch.cuda.empty_cache()`
    after each model.
    """
    sentences = ["London is the capital of Great Britain .", "He sold the old house last spring .",
                 "The weather changes within an hour .", "Nobody had told them that the shop was closed ."]
    scores = {}
    for name in ("bert-base-uncased", "bert-base-cased", "legal-bert"):
        tokenizer, checkpoint = load_checkpoint(name)
        model = checkpoint.to("cuda")
        model.eval()
        scores[name] = [perplexity(model, tokenizer, sentence) for sentence in sentences]
        if fixed:
            model.cpu()
            del model, checkpoint
            gc.collect()
            torch.cuda.empty_cache()
    return scores


# A sequence-to-sequence agent learns from the logs of a help channel.

class UbuntuTeacher:
    def __init__(self, num_examples, vocab, seed=11):
        rng = np.random.default_rng(seed)
        self.examples = []
        for number in range(num_examples):
            history, answer = int(rng.gamma(4, 18)) + 8, int(rng.gamma(3, 5)) + 2
            if number % 97 == 60:
                history, answer = 2600, 700
            self.examples.append({"text": rng.integers(4, vocab, history).tolist(), "labels": rng.integers(4, vocab, answer).tolist()})

    def batches(self, batchsize):
        for start in range(0, len(self.examples), batchsize):
            yield self.examples[start:start + batchsize]


class Seq2seq(nn.Module):
    def __init__(self, vocab, esz, hsz):
        super().__init__()
        self.lt = nn.Embedding(vocab, esz, padding_idx=0)
        self.encoder, self.decoder = nn.GRU(esz, hsz, 1, batch_first=True), nn.GRU(esz, hsz, 1, batch_first=True)
        self.attn, self.combine = nn.Linear(hsz, hsz, bias=False), nn.Linear(2 * hsz, esz)
        self.out = nn.Linear(esz, vocab)

    def forward(self, xs, ys):
        enc_out, hidden = self.encoder(self.lt(xs))
        dec_out, _ = self.decoder(self.lt(ys), hidden)
        weights = torch.bmm(self.attn(dec_out), enc_out.transpose(1, 2)).softmax(2)
        mixed = torch.tanh(self.combine(torch.cat([dec_out, torch.bmm(weights, enc_out)], 2)))
        return self.out(mixed)


class Seq2seqAgent:
    START = 1

    def __init__(self, opt):
        self.truncate = opt["truncate"]
        self.model = Seq2seq(opt["vocab"], opt["embeddingsize"], opt["hiddensize"]).cuda()
        self.criterion = nn.CrossEntropyLoss(ignore_index=0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=opt["learningrate"])

    def vectorize(self, observations):
        texts, labels = [obs["text"] for obs in observations], [obs["labels"] for obs in observations]
        if self.truncate > 0:
            texts, labels = [text[-self.truncate:] for text in texts], [label[:self.truncate] for label in labels]
        xs, ys = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long), torch.zeros(len(labels), max(map(len, labels)), dtype=torch.long)
        for row, (text, label) in enumerate(zip(texts, labels)):
            xs[row, :len(text)], ys[row, :len(label)] = torch.tensor(text), torch.tensor(label)
        return xs.cuda(), ys.cuda()

    def batch_act(self, observations):
        xs, ys = self.vectorize(observations)
        starts = torch.full((len(ys), 1), self.START, device=ys.device)
        scores = self.model(xs, torch.cat([starts, ys[:, :-1]], 1))
        loss = self.criterion(scores.view(-1, scores.shape[-1]), ys.view(-1))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


@expected("larger_step", fix="cut|part", thread="facebookresearch/ParlAI#407", memory=700)
def train_dialogue_agent(fixed=False):
    """A few of the dialogues have a history or an answer many times longer than the rest; `Seq2seqAgent.vectorize` pads a batch to its
    longest example without truncating, so the batch with such a dialogue does not fit. Cured by: the `truncate` option of the agent:
    history and answer are cut to that many tokens.
    """
    opt = {"vocab": 12000, "embeddingsize": 128, "hiddensize": 256, "learningrate": 0.5, "truncate": 150 if fixed else -1}
    teacher, agent = UbuntuTeacher(320, opt["vocab"]), Seq2seqAgent(opt)
    losses = [agent.batch_act(observations) for observations in teacher.batches(8)]
    return {"exs": len(losses)}


# Cats and dogs: a pretrained network turns each photo into a vector for a classifier.

def make_embedding():
    model = torchvision.models.resnet18(weights=None)
    embedding = nn.Sequential(*list(model.children())[:-1], nn.Flatten())
    embedding.cuda()
    embedding.train(False)
    return embedding


def read_photo(rng, size=192):
    height, width = rng.integers(200, 260, 2)
    photo = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    top, left = (height - size) // 2, (width - size) // 2
    return photo[top:top + size, left:left + size].astype(np.float32) / 255


@expected("evaluation_keeps_graphs", fix="no_grad|detach", thread="yandexdataschool/Practical_DL#43", memory=500)
def embed_pet_photos(fixed=False):
    """`X` collects the GPU tensors `features` of every photo, with the graph of the embedding network attached, as no gradient is switched
    off. Cured by: turn `features` into a numpy array before appending.
    """
    rng, embedding = np.random.default_rng(1), make_embedding()
    mean, std = np.array([0.485, 0.456, 0.406], np.float32), np.array([0.229, 0.224, 0.225], np.float32)
    X, Y = [], []
    for number in range(80):
        is_cat = number % 2
        img = (read_photo(rng) - mean) / std
        input_tensor = torch.tensor(img.transpose(2, 0, 1)[None], dtype=torch.float32).cuda()
        features = embedding(input_tensor)
        if fixed:
            features = features.data.cpu().numpy()
        X.append(features)
        Y.append(is_cat)
    if not fixed:
        X = [features.data.cpu().numpy() for features in X]
    return {"rows": len(np.concatenate(X)), "cats": sum(Y)}


# The long descriptions of products are embedded, one document after the other.

class Sentence:
    def __init__(self, text):
        self.tokens = text.split()
        self._embeddings = {}

    def set_embedding(self, name, vector):
        self._embeddings[name] = vector

    def get_embedding(self):
        return torch.cat([self._embeddings[name] for name in sorted(self._embeddings)])

    def to(self, device):
        for name, vector in self._embeddings.items():
            self._embeddings[name] = vector.to(device)

    def clear_embeddings(self):
        self._embeddings = {}


class TransformerDocumentEmbeddings(nn.Module):
    def __init__(self, name, fine_tune=True):
        super().__init__()
        from transformers import BertConfig, BertModel
        self.name, self.fine_tune = name, fine_tune
        self.model = BertModel(BertConfig(vocab_size=10000, hidden_size=192, num_hidden_layers=4, num_attention_heads=6, intermediate_size=768))
        self.model.cuda()
        self.model.train(fine_tune)

    def _ids(self, sentence):
        ids = [110 + sum(map(ord, token)) * 31 % 9800 for token in sentence.tokens]
        return torch.tensor([[101, *ids, 102]]).cuda()

    def embed(self, sentence):
        with torch.set_grad_enabled(self.fine_tune):
            hidden = self.model(self._ids(sentence)).last_hidden_state
            sentence.set_embedding(self.name, hidden[0, 0])


def read_descriptions(number):
    rng, words = np.random.default_rng(5), "steel frame with soft cotton cover easy to clean fits most beds and sofas colour may vary".split()
    return [" ".join(rng.choice(words, int(rng.integers(120, 330)))) for _ in range(number)]


@expected("evaluation_keeps_graphs", fix="no_grad|detach", thread="flairNLP/flair#1638", memory=500)
def embed_descriptions(fixed=False):
    """The embedding is computed with gradients (`fine_tune` is on by default) and written into rows of `X` on the GPU; through these
    assignments `X` keeps the transformer's graph of every sentence, and `clear_embeddings` does not free it. Cured by: `fine_tune=False`,
    `sentence.to("cpu")`, `X` on the CPU.
    """
    long_desc = read_descriptions(80)
    if fixed:
        embeddings, X = TransformerDocumentEmbeddings("bert-base-uncased", fine_tune=False), torch.empty(len(long_desc), 192)
    else:
        embeddings, X = TransformerDocumentEmbeddings("bert-base-uncased"), torch.empty(len(long_desc), 192).cuda()
    i = 0
    for text in long_desc:
        if len(text.split(" ")) < 300:
            sentence = Sentence(text)
            embeddings.embed(sentence)
            if fixed:
                sentence.to("cpu")
            X[i] = sentence.get_embedding()
            sentence.clear_embeddings()
            i += 1
    return {"documents": i}


# Topics of headlines: every headline is embedded by MiniLM, then the vectors are clustered.

class HeadlineDataset(Dataset):
    def __init__(self, number, max_length=128):
        rng = np.random.default_rng(2)
        self.lengths = rng.integers(8, 40, number)
        self.ids = rng.integers(1000, 9000, (number, max_length))

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        mask = (np.arange(self.ids.shape[1]) < self.lengths[index]).astype(np.int64)
        return {"input_ids": torch.from_numpy(self.ids[index] * mask), "attention_mask": torch.from_numpy(mask)}


def mean_pooling(token_embeddings, attention_mask):
    mask = attention_mask.unsqueeze(-1).float()
    return (token_embeddings * mask).sum(1) / mask.sum(1).clamp(min=1e-9)


def create_embeddings(model_gpu, dataset, batch_size, fixed):
    dataloader = DataLoader(dataset, batch_size=batch_size)
    model_o_ls, masks, pooled = [], [], []
    with torch.no_grad():
        for data in dataloader:
            attention_mask = data["attention_mask"].cuda()
            model_obj = model_gpu(input_ids=data["input_ids"].cuda(), attention_mask=attention_mask)
            if fixed:
                pooled.append(mean_pooling(model_obj.last_hidden_state, attention_mask))
            else:
                model_o_ls.append(model_obj.last_hidden_state)
                masks.append(attention_mask)
        if not fixed:
            pooled = [mean_pooling(output, mask) for output, mask in zip(model_o_ls, masks)]
    return torch.cat(pooled)


def cluster(vectors, number, rounds=3):
    centres = vectors[:number].clone()
    for _ in range(rounds):
        nearest = (vectors @ centres.T).argmax(1)
        weights = F.one_hot(nearest.cpu() % number, number).float().to(vectors.device)
        centres = F.normalize(weights.T @ vectors, dim=1)
    return nearest


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="rapidsai/rapids-examples#41", memory=500)
def extract_topic_embeddings(fixed=False):
    """`create_embeddings` keeps `model_obj.last_hidden_state` of every batch (batch x 128 tokens x 384) on the GPU in `model_o_ls` and
    pools at the end; that is 128 times what the embeddings need. Cured by: mean pooling of each batch in the loop, only the pooled
    embeddings are kept.
    """
    from transformers import BertConfig, BertModel
    config = BertConfig(vocab_size=10000, hidden_size=384, num_hidden_layers=3, num_attention_heads=12, intermediate_size=1536)
    model_gpu = BertModel(config).cuda().eval()
    embeddings = create_embeddings(model_gpu, HeadlineDataset(3200), 64, fixed)
    topics = cluster(F.normalize(embeddings, dim=1), 20)
    return {"headlines": len(topics)}


# Captions for pictures: a CNN encodes the picture, an LSTM writes.

class EncoderCNN(nn.Module):
    def __init__(self, embed_size, fixed):
        super().__init__()
        resnet = torchvision.models.resnet18(weights=None)
        self.resnet = nn.Sequential(*list(resnet.children())[:-1])
        self.linear = nn.Linear(resnet.fc.in_features, embed_size)
        self.bn = nn.BatchNorm1d(embed_size, momentum=0.01)
        self.fixed = fixed

    def forward(self, images):
        if self.fixed:
            with torch.no_grad():
                features = self.resnet(images)
        else:
            features = self.resnet(images)
        features = features.view(features.size(0), -1)
        return self.bn(self.linear(features))


class DecoderRNN(nn.Module):
    def __init__(self, embed_size, hidden_size, vocab_size):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, embed_size)
        self.lstm = nn.LSTM(embed_size, hidden_size, batch_first=True)
        self.linear = nn.Linear(hidden_size, vocab_size)

    def forward(self, features, captions, lengths):
        embeddings = torch.cat((features.unsqueeze(1), self.embed(captions)), 1)
        packed = nn.utils.rnn.pack_padded_sequence(embeddings, lengths, batch_first=True)
        hiddens, _ = self.lstm(packed)
        return self.linear(hiddens[0])


class CocoCaptions(Dataset):
    def __init__(self, number, vocab_size):
        self.rng, self.vocab_size = np.random.default_rng(4), vocab_size
        self.lengths = self.rng.integers(8, 16, number)
        self.picture = torch.rand(3, 224, 224)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return self.picture, torch.from_numpy(self.rng.integers(4, self.vocab_size, self.lengths[index]))


def collate_fn(data):
    data.sort(key=lambda pair: len(pair[1]), reverse=True)
    images, captions = zip(*data)
    lengths = [len(caption) for caption in captions]
    targets = torch.zeros(len(captions), max(lengths), dtype=torch.long)
    for row, caption in enumerate(captions):
        targets[row, :len(caption)] = caption
    return torch.stack(images), targets, lengths


@expected("graph_without_use", fix="no_grad", thread="yunjey/pytorch-tutorial#35", memory=650)
def train_captioner(fixed=False):
    """`EncoderCNN.forward` runs the pretrained `self.resnet`, which is not trained, with gradients recorded; all its activations are kept
    for a backward pass whose results the optimizer does not use. Cured by: take the features out of the graph (the network runs without
    gradients).
    """
    vocab_size = 5000
    data_loader = DataLoader(CocoCaptions(160, vocab_size), batch_size=32, collate_fn=collate_fn)
    encoder, decoder = EncoderCNN(256, fixed).cuda(), DecoderRNN(256, 512, vocab_size).cuda()
    criterion = nn.CrossEntropyLoss()
    params = list(decoder.parameters()) + list(encoder.linear.parameters()) + list(encoder.bn.parameters())
    optimizer = torch.optim.Adam(params, lr=1e-3)
    for images, captions, lengths in data_loader:
        images, captions = images.cuda(), captions.cuda()
        targets = nn.utils.rnn.pack_padded_sequence(captions, lengths, batch_first=True)[0]
        decoder.zero_grad()
        encoder.zero_grad()
        features = encoder(images)
        outputs = decoder(features, captions, lengths)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
    return {"loss": loss.item()}


# Super-resolution: a recursive residual network restores the luminance of enlarged photos.

class DRRN(nn.Module):
    def __init__(self, recursions=9, channels=128):
        super().__init__()
        self.recursions = recursions
        self.input = nn.Conv2d(1, channels, 3, padding=1, bias=False)
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.output = nn.Conv2d(channels, 1, 3, padding=1, bias=False)

    def forward(self, x):
        inputs = self.input(F.relu(x))
        out = inputs
        for _ in range(self.recursions):
            out = self.conv2(F.relu(self.conv1(F.relu(out)))) + inputs
        return self.output(F.relu(out)) + x


def train_drrn(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for _ in range(steps):
        data, label = torch.rand(2, 16, 1, 31, 31).cuda()
        loss = F.mse_loss(model(data), label, reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()


def load_set(sizes, scale):
    for height, width in sizes:
        photo = torch.rand(1, 1, height // scale, width // scale)
        yield F.interpolate(photo, size=(height, width), mode="bicubic", align_corners=False)


def psnr(prediction, truth, border):
    difference = (prediction - truth)[..., border:-border, border:-border]
    return float(-10 * torch.log10(difference.pow(2).mean() + 1e-10))


def eval_sr(model, im_l, patch=None):
    model.eval()
    with torch.no_grad():
        if patch is None:
            return model(im_l.cuda()).cpu()
        im_h = torch.empty_like(im_l)
        for top in range(0, im_l.shape[2], patch):
            for left in range(0, im_l.shape[3], patch):
                piece = im_l[:, :, top:top + patch, left:left + patch]
                im_h[:, :, top:top + patch, left:left + patch] = model(piece.cuda()).cpu()
        return im_h


@expected("batch_without_gradients", fix="tiles|part|split", thread="jt827859032/DRRN-pytorch#4", memory=700)
def super_resolve_photos(fixed=False):
    """`eval_sr` puts the whole photo through DRRN, which keeps the full resolution in all its recursions and was trained on 31 x 31
    patches; the 128-channel feature maps of a large photo do not fit. Cured by: cut the photo into patches of a proper size, feed them
    separately and join the results.
    """
    model = DRRN().cuda()
    train_drrn(model, 4)
    sizes, scale, scores = [(256, 256), (276, 276), (576, 720), (500, 480), (768, 1024)], 3, []
    for im_l in load_set(sizes, scale):
        im_h = eval_sr(model, im_l, patch=256 if fixed else None)
        scores.append(psnr(im_h, im_l, scale))
    return {"images": len(scores)}


# Online learning: a network whose layers are weighted by hedging learns from a stream.

class ONN:
    def __init__(self, features_size, max_num_hidden_layers, qtd_neuron_per_hidden_layer, n_classes, batch_size, b=0.99, n=0.01, s=0.2,
                 fixed=False):
        self.layers, self.n_classes, self.batch_size = max_num_hidden_layers, n_classes, batch_size
        self.fixed, self.device = fixed, torch.device("cuda")
        self.b, self.n, self.s = (torch.tensor(value, device=self.device) for value in (b, n, s))
        sizes = [features_size] + [qtd_neuron_per_hidden_layer] * max_num_hidden_layers
        self.hidden_layers = nn.ModuleList(nn.Linear(i, o) for i, o in zip(sizes, sizes[1:])).to(self.device)
        self.output_layers = nn.ModuleList(nn.Linear(o, n_classes) for o in sizes[1:]).to(self.device)
        self.alpha = torch.full((self.layers,), 1 / (self.layers + 1), device=self.device)

    def forward(self, X):
        x, outputs = torch.from_numpy(X).float().to(self.device), []
        for hidden, output in zip(self.hidden_layers, self.output_layers):
            x = F.relu(hidden(x))
            outputs.append(output(x))
        return outputs

    def zero_grad(self):
        for module in (self.hidden_layers, self.output_layers):
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad.data.zero_()

    def update_weights(self, X, Y):
        Y = torch.from_numpy(Y).long().to(self.device)
        losses_per_layer = [F.cross_entropy(out, Y) for out in self.forward(X)]
        w, b = [], []
        for i, loss in enumerate(losses_per_layer):
            loss.backward(retain_graph=True)
            with torch.set_grad_enabled(not self.fixed):
                output = self.output_layers[i]
                output.weight.data -= self.n * self.alpha[i] * output.weight.grad.data
                output.bias.data -= self.n * self.alpha[i] * output.bias.grad.data
                w.append(self.alpha[i] * self.hidden_layers[i].weight.grad.data)
                b.append(self.alpha[i] * self.hidden_layers[i].bias.grad.data)
            self.zero_grad()
        with torch.set_grad_enabled(not self.fixed):
            for i in range(1, self.layers):
                self.hidden_layers[i].weight.data -= self.n * torch.stack(w[i:]).sum(0)
                self.hidden_layers[i].bias.data -= self.n * torch.stack(b[i:]).sum(0)
            alpha = [self.alpha[i] * torch.pow(self.b, losses_per_layer[i]) for i in range(self.layers)]
            alpha = torch.stack([torch.maximum(a, self.s / self.layers) for a in alpha])
            self.alpha = alpha / alpha.sum()

    def partial_fit(self, X_data, Y_data):
        self.update_weights(X_data, Y_data)

    def predict(self, X_data):
        with torch.no_grad():
            outputs = torch.stack(self.forward(X_data))
            return (self.alpha.detach().view(-1, 1, 1) * outputs).sum(0).argmax(1).cpu().numpy()


@expected("graph_of_earlier_steps", fix="detach|no_grad", thread="alison-carrera/onn#4", memory=400)
def train_online_network(fixed=False):
    """`ONN.update_weights` makes its manual update with gradients enabled: the new `self.alpha` is computed from the losses
    (`torch.pow(self.b, losses_per_layer[i])`) and from the old `self.alpha`, so it refers to the graphs of all samples of the data stream
    so far (kept whole by `retain_graph=True`). Cured by: `torch.no_grad()` around the manual update.
    """
    rng, batch_size = np.random.default_rng(9), 256
    onn = ONN(features_size=64, max_num_hidden_layers=6, qtd_neuron_per_hidden_layer=512, n_classes=10, batch_size=batch_size,
              fixed=fixed)
    seen = 0
    for step in range(150):
        X = rng.standard_normal((batch_size, 64)).astype(np.float32)
        onn.partial_fit(X, rng.integers(0, 10, batch_size))
        seen += batch_size
    return {"seen": seen, "predicted": len(onn.predict(X))}
