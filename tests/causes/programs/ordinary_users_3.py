"""Programs after public threads of ordinary users: validation, logging, metrics, RNNs, GANs, data, fine-tuning, services, custom losses."""
import gc
import types

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from expected import expected


# Action recognition: every video is tested as several clips, each cut at several places.

class ResBlock3D(nn.Module):
    def __init__(self, dim_in, dim_out, stride):
        super().__init__()
        self.a = nn.Conv3d(dim_in, dim_out, (1, 3, 3), stride=(1, stride, stride), padding=(0, 1, 1), bias=False)
        self.a_bn = nn.BatchNorm3d(dim_out)
        self.b = nn.Conv3d(dim_out, dim_out, (1, 3, 3), padding=(0, 1, 1), bias=False)
        self.b_bn = nn.BatchNorm3d(dim_out)
        self.branch1 = nn.Conv3d(dim_in, dim_out, 1, stride=(1, stride, stride), bias=False)

    def forward(self, x):
        out = F.relu(self.a_bn(self.a(x)))
        return F.relu(self.b_bn(self.b(out)) + self.branch1(x))


class SlowFast(nn.Module):
    def __init__(self, num_classes, alpha=4, width=48):
        super().__init__()
        self.alpha = alpha
        self.slow = nn.Sequential(ResBlock3D(3, width, 2), ResBlock3D(width, width, 1), ResBlock3D(width, 2 * width, 2), ResBlock3D(2 * width, 2 * width, 1))
        self.fast = nn.Sequential(ResBlock3D(3, 8, 2), ResBlock3D(8, 8, 1), ResBlock3D(8, 16, 2))
        self.head = nn.Linear(2 * width + 16, num_classes)

    def forward(self, inputs):
        slow, fast = self.slow(inputs[0]), self.fast(inputs[1])
        return self.head(torch.cat([slow.mean((2, 3, 4)), fast.mean((2, 3, 4))], 1)).softmax(1)


class TestMeter:
    def __init__(self, num_videos, num_clips, num_cls):
        self.num_clips = num_clips
        self.video_preds = torch.zeros(num_videos, num_cls)

    def update_stats(self, preds, clip_ids):
        for pred, clip_id in zip(preds, clip_ids):
            self.video_preds[int(clip_id) // self.num_clips] += pred


class Kinetics(Dataset):
    def __init__(self, num_videos, num_clips, num_frames, crop):
        self.num_clips, self.num_videos = num_clips, num_videos
        self.frames = torch.rand(3, num_frames, crop, crop)

    def __len__(self):
        return self.num_videos * self.num_clips

    def __getitem__(self, index):
        return self.frames[:, ::4], self.frames, index


def perform_test(test_loader, model, test_meter):
    model.eval()
    for slow, fast, clip_ids in test_loader:
        inputs = [slow.cuda(non_blocking=True), fast.cuda(non_blocking=True)]
        preds = model(inputs)
        test_meter.update_stats(preds.detach().cpu(), clip_ids)
    return test_meter


@expected("evaluation_keeps_graphs", fix="no_grad", thread="facebookresearch/SlowFast#109", memory=1000)
def test_action_recognition(fixed=False):
    """`perform_test` calls `model(inputs)` without `torch.no_grad()` (only `model.eval()`), so testing keeps the activations of every layer
    for a backward pass that never comes; one can only test with very few views per video. Cured by: The test loop runs under
    `torch.no_grad()`.
    """
    num_ensemble_views, num_spatial_crops = 4, 3
    num_clips = num_ensemble_views * num_spatial_crops
    test_loader = DataLoader(Kinetics(3, num_clips, 32, 128), batch_size=num_clips)
    model, test_meter = SlowFast(400).cuda(), TestMeter(3, num_clips, 400)
    if fixed:
        with torch.no_grad():
            perform_test(test_loader, model, test_meter)
    else:
        perform_test(test_loader, model, test_meter)
    return test_meter.video_preds.argmax(1)


# A graph network learns the energy of Ising configurations on a lattice.

class Data:
    def __init__(self, **fields):
        self.__dict__.update(fields)

    def to(self, device):
        for key, value in self.__dict__.items():
            setattr(self, key, value.to(device))
        return self


class SerializedDataLoader:
    def __init__(self, atoms_per_dimension, device):
        grid = np.stack(np.meshgrid(*[np.arange(atoms_per_dimension)] * 3, indexing="ij"), -1).reshape(-1, 3)
        distance = np.abs(grid[:, None] - grid[None])
        distance = np.minimum(distance, atoms_per_dimension - distance)
        near = (distance ** 2).sum(-1) <= 6
        np.fill_diagonal(near, False)
        self.edge_index = torch.from_numpy(np.stack(near.nonzero()))
        self.pos, self.device = torch.from_numpy(grid).float(), device

    def load_serialized_data(self, num_configurations):
        dataset = []
        row, col = self.edge_index
        edge_attr = self.pos[row] - self.pos[col]
        for _ in range(num_configurations):
            spin = torch.randint(0, 2, (len(self.pos), 1)).float() * 2 - 1
            dataset.append(Data(x=spin, pos=self.pos, edge_index=self.edge_index, edge_attr=edge_attr, y=spin.sum()))
        if self.device is not None:
            for data in dataset:
                data.to(self.device)
        return dataset


class GraphConvStack(nn.Module):
    def __init__(self, hidden_dim):
        super().__init__()
        self.hidden_dim = hidden_dim
        self.embed, self.edges = nn.Linear(1, hidden_dim), nn.Linear(3, hidden_dim)
        self.convs = nn.ModuleList(nn.Linear(hidden_dim, hidden_dim) for _ in range(3))
        self.head = nn.Linear(hidden_dim, 1)

    def forward(self, data):
        x, (row, col) = self.embed(data.x), data.edge_index
        for conv in self.convs:
            message = x[col] * self.edges(data.edge_attr)
            x = F.relu(conv(torch.zeros_like(x).index_add(0, row, message)) + x)
        return self.head(x).sum()


@expected("data_on_gpu", fix="DataLoader|on the host", thread="ORNL/HydraGNN#88", memory=600)
def train_ising(fixed=False):
    """`load_serialized_data` moves every graph of the dataset to the GPU (`data.to(self.device)`) while loading, and the whole dataset is
    too large for the GPU. Cured by: The dataset stays on the CPU; each sample/batch is moved to the GPU in the training step.
    """
    device = torch.device("cuda")
    loader = SerializedDataLoader(6, None if fixed else device)
    dataset = loader.load_serialized_data(2500)
    model = GraphConvStack(16).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(60):
        data = dataset[step]
        if fixed:
            data = Data(**data.__dict__).to(device)
        optimizer.zero_grad()
        loss = (model(data) - data.y) ** 2
        loss.backward()
        optimizer.step()
    return float(loss)


# Sentence embeddings are trained with large batches: embed, get the gradients of the embeddings, embed again.

class SentenceEncoder(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.words = nn.EmbeddingBag(vocab, dim)
        self.dense = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, dim))

    def forward(self, input_ids):
        return self.dense(self.words(input_ids))


def cos_sim(a, b):
    return F.normalize(a, dim=1) @ F.normalize(b, dim=1).T


class CachedMultipleNegativesRankingLoss:
    def __init__(self, model, mini_batch_size, scale=20.0, backward_per_mini_batch=True):
        self.model, self.mini_batch_size, self.scale = model, mini_batch_size, scale
        self.backward_per_mini_batch = backward_per_mini_batch

    def embed_minibatches(self, input_ids):
        return torch.cat([self.model(ids) for ids in input_ids.split(self.mini_batch_size)])

    def calculate_loss(self, reps):
        anchors, candidates = reps
        labels = torch.arange(len(anchors), device=anchors.device)
        losses = []
        for begin in range(0, len(anchors), self.mini_batch_size):
            end = begin + self.mini_batch_size
            scores = cos_sim(anchors[begin:end], candidates) * self.scale
            loss_mbatch = F.cross_entropy(scores, labels[begin:end]) * len(scores) / len(anchors)
            if self.backward_per_mini_batch:
                loss_mbatch.backward()
                loss_mbatch = loss_mbatch.detach()
            losses.append(loss_mbatch)
        return sum(losses)

    def step(self, sentence_features):
        with torch.no_grad():
            reps = [self.embed_minibatches(ids) for ids in sentence_features]
        reps = [rep.requires_grad_() for rep in reps]
        loss = self.calculate_loss(reps)
        if not self.backward_per_mini_batch:
            loss.backward()
        for ids, rep in zip(sentence_features, reps):
            for mb_ids, grad in zip(ids.split(self.mini_batch_size), rep.grad.split(self.mini_batch_size)):
                self.model(mb_ids).backward(grad)
        return loss.item()


@expected("several_forward_passes", fix=r"backward\(\)", thread="huggingface/sentence-transformers#3107", memory=600)
def finetune_sentence_encoder(fixed=False):
    """In `CachedMultipleNegativesRankingLoss.calculate_loss` the `loss.backward()` was moved out of the mini-batch loop: the losses of all
    mini-batches are collected and backward is called once at the end, so one big graph with the scores (and normalised candidates) of all
    mini-batches is kept, which defeats the mini-batches. Cured by: `loss_mbatch.backward()` inside the loop, and only the detached loss is
    kept.
    """
    model = SentenceEncoder(20000, 384).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train_loss = CachedMultipleNegativesRankingLoss(model, 256, backward_per_mini_batch=fixed)
    for _ in range(3):
        sentence_features = [torch.randint(0, 20000, (8192, 24)).cuda() for _ in range(2)]
        optimizer.zero_grad()
        loss = train_loss.step(sentence_features)
        optimizer.step()
    return loss


# Word embeddings from a character language model.

class LanguageModel(nn.Module):
    def __init__(self, n_characters=275, embedding_size=100, hidden_size=512):
        super().__init__()
        self.encoder = nn.Embedding(n_characters, embedding_size)
        self.rnn = nn.LSTM(embedding_size, hidden_size)
        self.decoder = nn.Linear(hidden_size, n_characters)
        self.hidden_size = hidden_size

    def forward(self, chars, hidden):
        output, hidden = self.rnn(self.encoder(chars), hidden)
        decoded = self.decoder(output.flatten(0, 1)).view(*output.shape[:2], -1)
        return decoded, output, hidden

    def get_representation(self, strings, chars_per_chunk=None):
        longest = max(map(len, strings))
        padded = [string + " " * (longest - len(string)) for string in strings]
        batch = torch.tensor([[ord(char) % 275 for char in string] for string in padded]).T.cuda()
        hidden = tuple(torch.zeros(1, len(strings), self.hidden_size, device="cuda") for _ in range(2))
        output_parts = []
        for chunk in batch.split(chars_per_chunk or longest):
            _, output, hidden = self.forward(chunk, hidden)
            output_parts.append(output)
        return torch.cat(output_parts)


class FlairEmbeddings:
    def __init__(self, chars_per_chunk):
        self.lm, self.chars_per_chunk = LanguageModel().cuda().eval(), chars_per_chunk

    @torch.no_grad()
    def embed(self, sentences):
        states = self.lm.get_representation(sentences, self.chars_per_chunk)
        embeddings = []
        for i, sentence in enumerate(sentences):
            ends = torch.tensor([at for at, char in enumerate(sentence) if char == " "], device="cuda")
            embeddings.append(states[ends, i].cpu())
        return embeddings


@expected("batch_without_gradients", fix="split|part", thread="flairNLP/flair#387", memory=700)
def embed_corpus(fixed=False):
    """`LanguageModel.get_representation` pads the batch to its longest string (one very long paragraph among short sentences) and puts the
    full sequence x batch through the LSTM (and decoder) at once. Cured by: The sequence is cut into chunks (`chars_per_chunk=512`) that go
    through the LSTM one after the other, each starting from the last hidden state.
    """
    embeddings = FlairEmbeddings(chars_per_chunk=512 if fixed else None)
    sentences = ["the court of appeal finds that the claim is late "] * 127 + ["whereas the parties have agreed upon terms " * 70]
    words = 0
    for begin in range(0, len(sentences), 32):
        words += sum(map(len, embeddings.embed(sentences[begin:begin + 32])))
    return words


# A demo page for an image model.

class UNetBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = nn.GroupNorm(32, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return x + self.conv2(F.silu(self.conv1(self.norm(x))))


class StableModel(nn.Module):
    def __init__(self, channels=640, blocks=12):
        super().__init__()
        self.conv_in = nn.Conv2d(4, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(UNetBlock(channels) for _ in range(blocks)))
        self.conv_out = nn.Conv2d(channels, 4, 3, padding=1)

    @torch.inference_mode()
    def generate(self, steps):
        latents = torch.randn(1, 4, 32, 32, device="cuda")
        for _ in range(steps):
            latents = latents - 0.1 * self.conv_out(self.blocks(self.conv_in(latents)))
        return latents.cpu()


def load_stable_model():
    return StableModel().cuda().eval()


class Session:
    def __init__(self, script):
        self.script, self.main_module, self.resources = script, None, {}

    def cache_resource(self, function):
        def cached():
            if function.__name__ not in self.resources:
                self.resources[function.__name__] = function()
            return self.resources[function.__name__]
        return cached

    def rerun(self, **widgets):
        module = types.ModuleType("__main__")
        module.widgets = widgets
        self.script(self, module)
        self.main_module = module


@expected("several_models", fix=r"\bdel\b|None", thread="streamlit/streamlit#5998", memory=600)
def serve_image_demo(fixed=False):
    """The page's script runs again at every click and calls `load_stable_model()` again; while the new model is loaded the one of the
    former run is still there, so two instances of the model are on the GPU. Cured by: The load function is decorated with
    `st.cache_resource` (the model is loaded once and reused).
    """
    def page(st, this):
        load = st.cache_resource(load_stable_model) if fixed else load_stable_model
        this.model = load()
        if this.widgets.get("submit"):
            this.image = this.model.generate(this.widgets["steps"])

    session = Session(page)
    session.rerun()
    for steps in (4, 8):
        session.rerun(submit=True, steps=steps)
    return session.main_module.image.shape


# A few encoders for signals are compared.

class SignalEncoder(nn.Module):
    def __init__(self, pooling, window, width):
        super().__init__()
        self.register_buffer("basis", torch.randn(window, width))
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(6)))
        self.head = nn.Linear(width, 10)
        if pooling == "mean":
            self.pool = self.mean_pool
        else:
            self.pool = self.max_pool

    def mean_pool(self, x):
        return x.mean(1)

    def max_pool(self, x):
        return x.amax(1)

    def forward(self, signal):
        return self.head(self.pool(self.layers(signal @ self.basis)))


def train_encoder(pooling, window, signals, labels):
    encoder = SignalEncoder(pooling, window, 1536).cuda()
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.01)
    order = np.random.permutation(len(labels)).tolist()
    examples = [(index, labels[index]) for index in order]
    correct = 0
    for begin in range(0, 1024, 64):
        batch = examples[begin:begin + 64]
        x = torch.stack([signals[index % len(signals), :, :window] for index, _ in batch]).cuda()
        y = torch.tensor([label for _, label in batch]).cuda()
        optimizer.zero_grad()
        logits = encoder(x)
        F.cross_entropy(logits, y).backward()
        optimizer.step()
        correct += (logits.argmax(1) == y).sum().item()
    return correct / 1024


@expected("reference_cycle", fix=r"gc\.collect", thread="pytorch/pytorch#128211", memory=600)
def compare_encoders(fixed=False):
    """`SignalEncoder.__init__` stores a bound method of itself (`self.pool = self.mean_pool`), a reference cycle: each encoder stays on the
    GPU after it's gone out of use, until Python's garbage collector happens to run, so the models of the former trials pile up. Cured by:
    `gc.collect()` after each trial (or not storing the bound method on self).
    """
    signals, labels = torch.randn(256, 8, 512), np.random.randint(0, 10, 20000).tolist()
    accuracy = {}
    for pooling in ("mean", "max"):
        for window in (64, 128, 256, 512):
            accuracy[pooling, window] = train_encoder(pooling, window, signals, labels)
            if fixed:
                gc.collect()
            torch.cuda.empty_cache()
    return max(accuracy, key=accuracy.get)


# A language model is trained on batches of varying length; a batch that doesn't fit is replaced by a dummy batch.

class FeedForwardLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Trainer:
    def __init__(self, dim, vocab, dummy_batch, recover_later):
        self.model = nn.Sequential(nn.Embedding(vocab, dim), *(FeedForwardLayer(dim) for _ in range(8)), nn.Linear(dim, vocab)).cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.dummy_batch, self.recover_later, self.oom_batches = dummy_batch, recover_later, 0

    def forward_backward(self, sample):
        tokens = sample.cuda()
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return loss.item()

    def handle_ooms(self):
        self.oom_batches += 1
        self.optimizer.zero_grad()
        torch.cuda.empty_cache()
        return self.forward_backward(self.dummy_batch)

    def train_step(self, sample):
        self.optimizer.zero_grad()
        ran_out = False
        try:
            loss = self.forward_backward(sample)
        except RuntimeError as e:
            if "out of memory" not in str(e):
                raise
            print(f"| WARNING: {str(e)[:60]}, skipping batch")
            if self.recover_later:
                ran_out = True
            else:
                loss = self.handle_ooms()
        if ran_out:
            loss = self.handle_ooms()
        self.optimizer.step()
        return loss


@expected("caught_traceback", fix="except", thread="pytorch/pytorch#18853", memory=800)
def train_language_model(fixed=False):
    """`train_step` recovers from the out-of-memory error inside the `except` block: the exception object `e` (its traceback's frames) still
    holds the tensors of the failed batch, so `empty_cache()` frees nothing and the dummy batch runs out of memory as well. Cured by: The
    recovery (`handle_ooms`) is done after the except block, when the exception is gone.
    """
    lengths = [256, 192, 320, 256, 1400, 256, 320]
    batches = [torch.randint(0, 4000, (8, length)) for length in lengths]
    trainer = Trainer(384, 4000, batches[0], recover_later=fixed)
    losses = [trainer.train_step(batch) for batch in batches]
    return losses[-1], trainer.oom_batches


# A vision-language model is tuned while its image tower keeps its weights.

class Block(nn.Module):
    def __init__(self, dim, heads, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.qkv, self.proj = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class VisionTower(nn.Module):
    def __init__(self, dim=384, depth=10):
        super().__init__()
        self.patch_embed = nn.Linear(14 * 14 * 3, dim)
        self.blocks = nn.Sequential(*(Block(dim, 6, False) for _ in range(depth)))

    def forward(self, patches):
        return self.blocks(self.patch_embed(patches))


class VisionLanguageModel(nn.Module):
    def __init__(self, vocab=4000, dim=512):
        super().__init__()
        self.visual, self.aligner = VisionTower(), nn.Linear(384 * 16, dim)
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.layers, self.lm_head = nn.Sequential(*(Block(dim, 8, True) for _ in range(2))), nn.Linear(dim, vocab)

    def enable_input_require_grads(self):
        def make_inputs_require_grads(module, inputs, output):
            output.requires_grad_(True)
        for embedding in (self.visual.patch_embed, self.embed_tokens):
            embedding.register_forward_hook(make_inputs_require_grads)

    def forward(self, patches, input_ids):
        image_features = self.visual(patches)
        image_tokens = self.aligner(image_features.unflatten(1, (-1, 16)).flatten(2))
        hidden = torch.cat([image_tokens, self.embed_tokens(input_ids)], 1)
        return self.lm_head(self.layers(hidden)[:, image_tokens.shape[1]:])


def skip_autograd_when_frozen(tower):
    forward = tower.forward

    def wrapped(patches):
        frozen = not any(p.requires_grad for p in tower.parameters()) and not patches.requires_grad
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            return forward(patches).detach() if frozen else forward(patches)
    tower.forward = wrapped


@expected("graph_without_use", fix="no_grad", thread="modelscope/ms-swift#10214", memory=800)
def finetune_vision_language(fixed=False):
    """The vision tower is frozen, but `enable_input_require_grads()` hooks its `patch_embed` too and makes its output require grad, so
    autograd records the whole frozen tower and keeps its activations for backward. Cured by: The forward of a fully frozen vision tower
    runs without autograd (grad disabled if no parameter and no input needs gradients).
    """
    model = VisionLanguageModel().cuda()
    model.visual.requires_grad_(False)
    model.enable_input_require_grads()
    if fixed:
        skip_autograd_when_frozen(model.visual)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    for _ in range(3):
        patches, input_ids = torch.rand(4, 1024, 14 * 14 * 3).cuda(), torch.randint(0, 4000, (4, 65)).cuda()
        logits = model(patches, input_ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), input_ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


# Text-guided image generation in a notebook, several batches in a row.

class Denoiser(nn.Module):
    def __init__(self, channels=128):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(4, channels, 3, padding=1), *(UNetBlock(channels) for _ in range(4)), nn.Conv2d(channels, 4, 3, padding=1))

    def forward(self, x):
        return self.layers(x)


class FirstStageDecoder(nn.Module):
    def __init__(self, channels=64):
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(4, channels, 3, padding=1), UNetBlock(channels))
        self.outer = nn.Sequential(UNetBlock(channels), UNetBlock(channels), nn.Conv2d(channels, 3, 3, padding=1))

    def forward(self, latents):
        return self.outer(F.interpolate(self.inner(latents), scale_factor=4.0))


def cond_fn(x, decoder, text_features):
    x = x.detach().requires_grad_()
    image = decoder(x)
    features = F.adaptive_avg_pool2d(image, 8).flatten(1)
    return torch.autograd.grad(F.cosine_similarity(features, text_features).sum(), x)[0]


def do_run(denoiser, decoder, text_features, n_batches, saved, steps=3):
    for n in range(n_batches):
        latents = torch.randn(2, 4, 64, 64, device="cuda")
        for _ in range(steps):
            with torch.no_grad():
                eps = denoiser(latents)
            latents = latents - 0.1 * eps + 0.01 * cond_fn(latents, decoder, text_features)
        x_samples = decoder(latents)
        x_samples = ((x_samples + 1) / 2).clamp(0, 1)
        for image in x_samples.detach().cpu():
            saved.append((image.permute(1, 2, 0).numpy() * 255).astype(np.uint8))


@expected("evaluation_keeps_graphs", fix="no_grad|detach", thread="multimodalart/majesty-diffusion#13", memory=700)
def generate_images(fixed=False):
    """The loop over the batches is inside `do_run()`, so local variables of the former batch (`x_samples` with its decoder graph) are still
    alive while the next batch is made; the first image succeeds, the second batch runs out of memory. Cured by: The for loop over batches
    was put around `do_run()`, so that its locals are freed after each batch.
    """
    denoiser, decoder = Denoiser().cuda().eval(), FirstStageDecoder().cuda().eval()
    text_features, how_many_batches, saved = torch.randn(2, 192, device="cuda"), 3, []
    if fixed:
        for _ in range(how_many_batches):
            do_run(denoiser, decoder, text_features, 1, saved)
    else:
        do_run(denoiser, decoder, text_features, how_many_batches, saved)
    return len(saved)


# A GAN that grows: small images in large batches first, then larger images in smaller batches.

class GrowingGenerator(nn.Module):
    def __init__(self, nz=128, ch=48):
        super().__init__()
        self.ch, self.first, self.blocks, self.to_rgb = ch, nn.Linear(nz, ch * 16), nn.ModuleList(), nn.Conv2d(ch, 3, 1)

    def grow_network(self):
        self.blocks.append(nn.Sequential(nn.Conv2d(self.ch, self.ch, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(self.ch, self.ch, 3, padding=1), nn.LeakyReLU(0.2)).cuda())

    def forward(self, z):
        x = self.first(z).view(len(z), self.ch, 4, 4)
        for block in self.blocks:
            x = block(F.interpolate(x, scale_factor=2.0))
        return self.to_rgb(x)


class GrowingDiscriminator(nn.Module):
    def __init__(self, ch=48):
        super().__init__()
        self.ch, self.from_rgb, self.blocks, self.last = ch, nn.Conv2d(3, ch, 1), nn.ModuleList(), nn.Linear(ch * 16, 1)

    def grow_network(self):
        self.blocks.insert(0, nn.Sequential(nn.Conv2d(self.ch, self.ch, 3, padding=1), nn.LeakyReLU(0.2), nn.AvgPool2d(2)).cuda())

    def forward(self, x):
        x = self.from_rgb(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x.flatten(1))


class GANTrainer:
    batchsizes = {4: 64, 8: 64, 16: 32, 32: 16, 64: 8, 128: 4, 256: 2}

    def __init__(self, nz=128):
        self.nz, self.resl = nz, 4
        self.G, self.D, self.grid = GrowingGenerator(nz).cuda(), GrowingDiscriminator().cuda(), None
        self.z_test = torch.randn(self.batchsizes[self.resl], nz, device="cuda")
        self.renew_everything()

    def renew_everything(self):
        self.batchsize = self.batchsizes[self.resl]
        self.opt_g = torch.optim.Adam(self.G.parameters(), lr=1e-3, betas=(0.0, 0.99))
        self.opt_d = torch.optim.Adam(self.D.parameters(), lr=1e-3, betas=(0.0, 0.99))

    def grow(self, resize_z_test):
        self.resl *= 2
        self.G.grow_network()
        self.D.grow_network()
        self.renew_everything()
        if resize_z_test:
            self.z_test = torch.randn(self.batchsize, self.nz, device="cuda")

    def train_iteration(self):
        real = torch.rand(self.batchsize, 3, self.resl, self.resl).cuda()
        fake = self.G(torch.randn(self.batchsize, self.nz, device="cuda"))
        self.opt_d.zero_grad()
        ((self.D(real) - 1) ** 2 + self.D(fake.detach()) ** 2).mean().backward()
        self.opt_d.step()
        self.opt_g.zero_grad()
        ((self.D(fake) - 1) ** 2).mean().backward()
        self.opt_g.step()

    def save_image_grid(self):
        with torch.no_grad():
            self.grid = self.G(self.z_test).cpu()


@expected("batch_without_gradients", fix="split|part", thread="nashory/pggan-pytorch#16", memory=1000)
def train_growing_gan(fixed=False):
    """`z_test`, the fixed noise for the sample images, keeps the batch size of the initial resolution (64) while the network grows; at high
    resolutions generating the samples takes far more memory than the (smaller) training batch. Cured by: `z_test` is made anew with the
    batch size of the present resolution when the network grows.
    """
    trainer = GANTrainer()
    while True:
        for _ in range(4):
            trainer.train_iteration()
        trainer.save_image_grid()
        if trainer.resl == 256:
            return trainer.grid.shape
        trainer.grow(resize_z_test=fixed)


# Self-supervised training that also reports the accuracy of nearest neighbours.

class WeightedKNNClassifier:
    def __init__(self, k=20):
        self.k = k
        self.reset()

    def reset(self):
        self.train_features, self.train_targets, self.test_features, self.test_targets = [], [], [], []

    def update(self, train_features=None, train_targets=None, test_features=None, test_targets=None):
        if train_features is not None:
            self.train_features.append(train_features.detach())
            self.train_targets.append(train_targets.detach())
        if test_features is not None:
            self.test_features.append(test_features.detach())
            self.test_targets.append(test_targets.detach())

    def compute(self):
        train, targets = F.normalize(torch.cat(self.train_features)), torch.cat(self.train_targets)
        hits = []
        for test, truth in zip(self.test_features, self.test_targets):
            nearest = (F.normalize(test) @ train.T).topk(self.k).indices.clamp(0, len(targets) - 1)
            hits.append((targets[nearest].mode(1).values == truth).float().mean())
        self.reset()
        return torch.stack(hits).mean().item()


class BaseMethod(nn.Module):
    def __init__(self, features_dim, knn_eval):
        super().__init__()
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 512), nn.ReLU(), nn.Linear(512, features_dim))
        self.projector = nn.Linear(features_dim, 128)
        self.knn = WeightedKNNClassifier() if knn_eval else None

    def training_step(self, views, targets):
        feats = [self.backbone(view) for view in views]
        if self.knn is not None:
            self.knn.update(train_features=torch.cat(feats), train_targets=targets.repeat(len(feats)))
        z1, z2 = (F.normalize(self.projector(f)) for f in feats)
        return F.cross_entropy(z1 @ z2.T / 0.2, torch.arange(len(z1), device=z1.device))

    @torch.no_grad()
    def validation_step(self, images, targets):
        feats = self.backbone(images)
        if self.knn is not None:
            self.knn.update(test_features=feats, test_targets=targets)


@expected("kept_tensors", fix=r"\.cpu\(\)|\bdel\b|clear|None", thread="vturrisi/solo-learn#186", memory=800)
def pretrain_backbone(fixed=False):
    """With `knn_eval` on, every training step appends the features of its batch to `self.knn.train_features`, on the GPU, until the end of
    the epoch; the memory keeps rising during training. Cured by: The kNN evaluation is off (`knn_eval=False`, made the default).
    """
    model = BaseMethod(2048, knn_eval=not fixed).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    images, targets = torch.rand(256, 3, 32, 32), torch.randint(0, 100, (256,))
    for epoch in range(2):
        for step in range(195):
            views = [(images + 0.1 * shift).cuda() for shift in range(2)]
            loss = model.training_step(views, targets.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for step in range(8):
            model.validation_step(images.cuda(), targets.cuda())
        if model.knn is not None:
            print("knn accuracy", model.knn.compute())
    return loss.item()


# Metric learning.

def get_all_pairs_indices(labels, ref_labels, offset):
    matches = labels[:, None] == ref_labels[None]
    differs = ~matches
    rows = torch.arange(len(labels))
    matches[rows, rows + offset] = False
    return *(index.cuda() for index in matches.nonzero(as_tuple=True)), *(index.cuda() for index in differs.nonzero(as_tuple=True))


class NTXentLoss:
    def __init__(self, temperature=0.07):
        self.temperature = temperature

    def __call__(self, embeddings, labels, ref_emb=None, ref_labels=None, offset=0):
        if ref_emb is None:
            ref_emb, ref_labels = embeddings, labels
        a1, p, a2, n = get_all_pairs_indices(labels, ref_labels, offset)
        mat = F.normalize(embeddings) @ F.normalize(ref_emb).T
        pos_pairs = mat[a1, p].unsqueeze(1) / self.temperature
        neg_pairs = mat[a2, n] / self.temperature
        n_per_p = (a2.unsqueeze(0) == a1.unsqueeze(1)).to(mat.dtype)
        neg_pairs = neg_pairs * n_per_p
        neg_pairs = neg_pairs.masked_fill(n_per_p < 0.5, torch.finfo(mat.dtype).min)
        max_val = torch.max(pos_pairs, neg_pairs.max(1, keepdim=True)[0]).detach()
        numerator = torch.exp(pos_pairs - max_val).squeeze(1)
        denominator = torch.exp(neg_pairs - max_val).sum(1) + numerator
        return -torch.log(numerator / denominator + 1e-8).mean()


@expected("all_pairs", fix="split|chunk|part", thread="KevinMusgrave/pytorch-metric-learning#547", memory=700)
def train_metric_learning(fixed=False):
    """`NTXentLoss` compares every positive pair with every negative pair of the batch (`n_per_p`, `neg_pairs`: number of positive pairs x
    number of negative pairs); with few classes in a batch of 120 that's thousands x ten thousand entries, several times. Cured by: Loop
    over the batch: a few anchors at a time against the whole batch as `ref_emb`.
    """
    model = nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 32)).cuda()
    optimizer, loss_fn = torch.optim.Adam(model.parameters(), lr=1e-4), NTXentLoss()
    for _ in range(4):
        x, labels = torch.randn(120, 512).cuda(), torch.arange(120)[torch.randperm(120)] % 4
        embeddings = model(x)
        if fixed:
            losses = []
            for begin in range(0, len(labels), 15):
                anchors, anchor_labels = embeddings[begin:begin + 15], labels[begin:begin + 15]
                losses.append(loss_fn(anchors, anchor_labels, embeddings, labels, begin))
            loss = torch.stack(losses).mean()
        else:
            loss = loss_fn(embeddings, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()
