"""Programs after public threads from all fields."""
import gc
import random

import torch
from torch import nn
from torch.nn import functional as F

from expected import expected
from programs.root_causes import no_grad_if


# Satellite images: a trainer that predicts land cover for a whole loader.

class ModuleTrainer:
    def __init__(self, model, predict_to_cpu=False):
        self.model, self.predict_to_cpu = model, predict_to_cpu

    def predict_loader(self, loader):
        self.model.train(mode=False)
        prediction_list = []
        with torch.no_grad():
            for input_batch in loader:
                pred_batch = self.model(input_batch.cuda())
                if self.predict_to_cpu:
                    pred_batch = pred_batch.cpu()
                prediction_list.append(pred_batch)
        return torch.cat(prediction_list, 0)


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="nitrain/nitrain#27", memory=900)
def predict_land_cover(fixed=False):
    """`predict_loader` collects the predictions of all batches in `prediction_list` on the GPU (and would join them there with
    `torch.cat`), so the class maps of the whole loader have to fit on the card. Cured by: moving each `pred_batch` to the CPU before it is
    kept.
    """
    tiles = [torch.randn(8, 4, 256, 256) for _ in range(3)]
    network = nn.Sequential(nn.Conv2d(4, 24, 5, 2, 2), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(),
                            nn.ConvTranspose2d(24, 12, 2, 2), nn.Softmax(1)).cuda()
    trainer = ModuleTrainer(network, predict_to_cpu=fixed)
    cover = trainer.predict_loader(tiles[i % 3] for i in range(40))
    return cover.mean((2, 3)).cpu()


# Text classification: the same classifier is trained anew for each fold.

class WarmupSchedule:
    def __init__(self, optimizer, warmup_steps):
        self.optimizer, self.warmup_steps, self.steps_done = optimizer, warmup_steps, 0
        self.base_lrs = [group["lr"] for group in optimizer.param_groups]
        optimizer.step = self.with_counter(optimizer.step)

    def with_counter(self, step):
        def counted_step(*args, **kwargs):
            self.steps_done += 1
            return step(*args, **kwargs)
        return counted_step

    def step(self):
        scale = min(1.0, self.steps_done / self.warmup_steps)
        for group, lr in zip(self.optimizer.param_groups, self.base_lrs):
            group["lr"] = lr * scale


class Classifier(nn.Module):
    def __init__(self, vocab_size=21128, hidden_size=512, labels_num=3):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        layer = nn.TransformerEncoderLayer(hidden_size, 8, 4 * hidden_size, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.output_layer = nn.Linear(hidden_size, labels_num)

    def forward(self, src, tgt):
        return F.cross_entropy(self.output_layer(self.encoder(self.embedding(src)).mean(1)), tgt)


def train_fold(model, optimizer, scheduler, batches=4):
    model.train()
    for _ in range(batches):
        loss = model(torch.randint(0, 21128, (8, 64)).cuda(), torch.randint(0, 3, (8,)).cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()


def evaluate_fold(model):
    model.eval()
    with torch.no_grad():
        return model(torch.randint(0, 21128, (8, 64)).cuda(), torch.randint(0, 3, (8,)).cuda()).item()


@expected("reference_cycle", fix=r"gc\.collect", thread="dbiir/UER-py#167", memory=1200)
def run_classifier_cv(fixed=False, folds_num=6):
    """The classifier, its optimizer and its schedule of one fold are still there when the next fold builds its own: the schedule's wrapper
    in `optimizer.step` and the optimizer hold each other, so the weights, gradients and Adam states of every fold so far stay on the GPU
    and `empty_cache` cannot help. Cured by: `del model, scheduler, optimizer` and `gc.collect()` before `empty_cache()` at the end of each
    fold.
    """
    results = []
    for _ in range(folds_num):
        model = Classifier().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
        scheduler = WarmupSchedule(optimizer, warmup_steps=2)
        train_fold(model, optimizer, scheduler)
        results.append(evaluate_fold(model))
        if fixed:
            del model, scheduler, optimizer
            gc.collect()
        torch.cuda.empty_cache()
    return results


# Graphs of source code, whose edges have types.

class GatedGraphConv(nn.Module):
    def __init__(self, out_feats, n_steps, n_etypes):
        super().__init__()
        self.out_feats, self.n_steps = out_feats, n_steps
        self.edge_embed = nn.Embedding(n_etypes, out_feats * out_feats)
        self.gru = nn.GRUCell(out_feats, out_feats)

    def send(self, feat, edges):
        etypes = torch.cat([torch.full_like(src, etype) for etype, (src, _) in enumerate(edges)])
        src, dst = (torch.cat(ends) for ends in zip(*edges))
        weight = self.edge_embed(etypes).view(-1, self.out_feats, self.out_feats)
        message = torch.bmm(weight, feat[src].unsqueeze(-1)).squeeze(-1)
        return torch.zeros_like(feat).index_add(0, dst, message)

    def forward(self, feat, edges):
        for _ in range(self.n_steps):
            feat = self.gru(self.send(feat, edges), feat)
        return feat


class GatedGraphLinears(GatedGraphConv):
    def __init__(self, out_feats, n_steps, n_etypes):
        super().__init__(out_feats, n_steps, n_etypes)
        self.edge_embed = nn.ModuleList(nn.Linear(out_feats, out_feats, bias=False) for _ in range(n_etypes))

    def send(self, feat, edges):
        received = torch.zeros_like(feat)
        for linear, (src, dst) in zip(self.edge_embed, edges):
            received = received.index_add(0, dst, linear(feat)[src])
        return received


@expected("enlarged", fix="one for each row of the table", thread="dmlc/dgl#852", memory=1600)
def format_source_code(fixed=False, nodes=6000, hidden=64):
    """The graph layer looks up a full weight matrix for each edge (`edge_embed(etypes)` viewed as edges x 64 x 64) in every message step,
    though there is only one matrix for each of the six edge types. Cured by: one `Linear` for each edge type in place of a matrix for each
    edge.
    """
    edges_of_type = (11900, 11900, 23000, 17000, 4200, 9000)
    edges = [torch.randint(0, nodes, (2, count)).cuda().unbind(0) for count in edges_of_type]
    encoder = (GatedGraphLinears if fixed else GatedGraphConv)(hidden, n_steps=4, n_etypes=len(edges)).cuda()
    embed, decide = nn.Embedding(300, hidden).cuda(), nn.Linear(hidden, 12).cuda()
    optimizer = torch.optim.Adam([*encoder.parameters(), *embed.parameters(), *decide.parameters()], 1e-3)
    kinds, spaces = torch.randint(0, 300, (nodes,)).cuda(), torch.randint(0, 12, (nodes,)).cuda()
    for _ in range(5):
        loss = F.cross_entropy(decide(encoder(embed(kinds), edges)), spaces)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Speech recognition: batches hold so many seconds of speech.

class BucketingSampler:
    def __init__(self, cuts, max_duration, num_buckets, strict=False):
        self.max_duration, self.strict = max_duration, strict
        cuts, size = sorted(cuts), -(-len(cuts) // num_buckets)
        self.buckets = [cuts[start:start + size] for start in range(0, len(cuts), size)]

    def exceeded(self, batch):
        total = max(batch) * len(batch) if self.strict else sum(batch)
        return total > self.max_duration

    def __iter__(self):
        rng = random.Random(17)
        for bucket in self.buckets:
            cuts, batch = rng.sample(bucket, len(bucket)), []
            for duration in cuts:
                if batch and self.exceeded([*batch, duration]):
                    yield batch
                    batch = []
                batch.append(duration)
            if batch:
                yield batch


def collate_features(durations, frames_per_second=100, num_mel_bins=80):
    features = [torch.randn(int(seconds * frames_per_second), num_mel_bins) for seconds in durations]
    return nn.utils.rnn.pad_sequence(features, batch_first=True)


class AcousticModel(nn.Module):
    def __init__(self, num_mel_bins=80, dim=256, tokens=500):
        super().__init__()
        self.subsample = nn.Conv1d(num_mel_bins, dim, 5, 2, 2)
        self.layers = nn.ModuleList(nn.Conv1d(dim, dim, 9, padding=4) for _ in range(4))
        self.ctc_output = nn.Linear(dim, tokens)

    def forward(self, features):
        x = F.silu(self.subsample(features.transpose(1, 2)))
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return self.ctc_output(x.transpose(1, 2)).log_softmax(-1)


@expected("larger_step", fix="parts|half|batch", thread="lhotse-speech/lhotse#640", memory=1000)
def train_on_cuts(fixed=False):
    """The sampler limits the sum of the durations in a batch, but the batch is padded to its longest cut, so in the last bucket, where a
    few cuts are many times longer than the others, the padded batch is several times `max_duration`. Cured by: applying `max_duration` to
    the longest duration times the number of cuts.
    """
    durations = random.Random(5)
    cuts = [durations.uniform(1.5, 9) for _ in range(600)] + [24, 31, 38, 47]
    sampler = BucketingSampler(cuts, max_duration=400, num_buckets=12, strict=fixed)
    model = AcousticModel().cuda()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for batch in sampler:
        loss = -model(collate_features(batch).cuda())[..., 0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# An agent that dreams: it plays episodes in between to fill its buffer.

class RSSM(nn.Module):
    def __init__(self, embedded_size, action_size, stochastic_size=30, deterministic_size=200):
        super().__init__()
        self.sizes = stochastic_size, deterministic_size
        self.recurrent = nn.GRUCell(stochastic_size + action_size, deterministic_size)
        self.representation = nn.Sequential(nn.Linear(embedded_size + deterministic_size, 200), nn.ELU(),
                                            nn.Linear(200, 2 * stochastic_size))

    def recurrent_model_input_init(self, batch_size):
        return tuple(torch.zeros(batch_size, size, device="cuda") for size in self.sizes)

    def recurrent_model(self, posterior, action, deterministic):
        return self.recurrent(torch.cat([posterior, action], 1), deterministic)

    def representation_model(self, embedded_observation, deterministic):
        mean, std = self.representation(torch.cat([embedded_observation, deterministic], 1)).chunk(2, 1)
        return mean + F.softplus(std) * torch.randn_like(mean)


class Dreamer:
    def __init__(self, envs, action_size=3, channels=32):
        self.envs, self.action_size, self.buffer = envs, action_size, []
        self.encoder = nn.Sequential(
            nn.Conv2d(3, channels, 4, 2), nn.ReLU(), nn.Conv2d(channels, 2 * channels, 4, 2), nn.ReLU(),
            nn.Conv2d(2 * channels, 4 * channels, 4, 2), nn.ReLU(), nn.Flatten()).cuda()
        self.rssm = RSSM(4 * channels * 6 * 6, action_size).cuda()
        self.actor = nn.Sequential(nn.Linear(230, 400), nn.ELU(), nn.Linear(400, action_size), nn.Tanh()).cuda()

    def environment_interaction(self, max_steps):
        posterior, deterministic = self.rssm.recurrent_model_input_init(self.envs)
        action = torch.zeros(self.envs, self.action_size, device="cuda")
        observation = torch.rand(self.envs, 3, 64, 64)
        for _ in range(max_steps):
            embedded_observation = self.encoder(observation.cuda())
            deterministic = self.rssm.recurrent_model(posterior, action, deterministic)
            posterior = self.rssm.representation_model(embedded_observation, deterministic)
            action = self.actor(torch.cat([posterior, deterministic], 1)).detach()
            next_observation = torch.rand(self.envs, 3, 64, 64)
            self.buffer.append((observation, action.cpu().numpy(), next_observation))
            observation = next_observation


@expected("evaluation_keeps_graphs", fix="no_grad", thread="kc-ml2/SimpleDreamer#7", memory=800)
def play_car_racing(fixed=False):
    """`environment_interaction` plays the episode with gradients, and `posterior` and `deterministic` go from step to step, so the graph of
    encoder and RSSM of all steps of the episode is kept although nobody calls backward. Cured by: `@torch.no_grad()` on
    `environment_interaction`.
    """
    dreamer = Dreamer(envs=48)
    for _ in range(2):
        with no_grad_if(fixed):
            dreamer.environment_interaction(max_steps=60)
    return len(dreamer.buffer)


# An image explorer: embeddings of a data set, with as large a batch as the card allows.

class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x):
        identity = x
        return F.relu(self.conv2(F.relu(self.conv1(x))) + identity)


class EmbeddingsExtractor:
    def __init__(self):
        self.model = nn.Sequential(nn.Conv2d(3, 32, 7, 2, 3), nn.ReLU(), Residual(32), nn.Conv2d(32, 64, 3, 2, 1),
                                   Residual(64), nn.AdaptiveAvgPool2d(1), nn.Flatten()).cuda().eval()

    @torch.no_grad()
    def extract(self, images, batch_size):
        features = []
        for batch in images.split(batch_size):
            batch = batch.cuda()
            features.append(self.model(batch).cpu())
        return torch.cat(features)

    def __call__(self, images, batch_size):
        try:
            return self.extract(images, batch_size)
        except torch.cuda.OutOfMemoryError:
            if batch_size == 1:
                raise
            gc.collect()
            torch.cuda.empty_cache()
            return self(images, batch_size // 2)


class PatientEmbeddingsExtractor(EmbeddingsExtractor):
    def __call__(self, images, batch_size):
        while True:
            try:
                return self.extract(images, batch_size)
            except torch.cuda.OutOfMemoryError:
                if batch_size == 1:
                    raise
            gc.collect()
            torch.cuda.empty_cache()
            batch_size //= 2


@expected("caught_traceback", fix="after the except", thread="Kitware/nrtk-explorer#87", memory=1000)
def embed_images(fixed=False):
    """The retry with a smaller batch runs inside the `except` block: the caught error's traceback still holds the frames of the failed
    forward pass with its batch and activations, so `gc.collect()` and `empty_cache()` free nothing and every smaller batch fails as well.
    Cured by: freeing and trying again after the exception context is left.
    """
    images = torch.rand(64, 3, 384, 384)
    extractor = (PatientEmbeddingsExtractor if fixed else EmbeddingsExtractor)()
    return extractor(images, batch_size=64).shape


# Poisoned training images: moved towards a target in feature space, and back towards how they looked.

def forward_step(model, img, target_features, lr, in_place):
    img = img.detach_() if in_place else img.detach()
    img.requires_grad_()
    loss = torch.linalg.norm(model(img) - target_features)
    gradient = torch.autograd.grad(loss, [img])[0]
    return img - lr * gradient


def backward_step(img, base_img, lr, beta):
    perturbed_img = (img + lr * beta * base_img) / (1 + beta * lr)
    return torch.clamp(perturbed_img, 0, 1)


@expected("graph_of_earlier_steps", fix=r"old_image\.detach", thread="LostOxygen/poison_froggo#1", memory=1000)
def create_perturbed_dataset(fixed=False, attack_iters=60, num_m=4, lr=0.01, beta=0.25):
    """`forward_step` detaches only its own copy of `img`; `backward_step` mixes in `old_image` that still has its graph, so the graph of
    each perturbed image hangs on that of the one before and the whole attack's chain (and the objectives of `last_m_objs` with it) stays.
    Cured by: detaching the old image itself, in place (`img.detach_()`), at each iteration.
    """
    model = nn.Sequential(nn.Conv2d(3, 16, 7, 4, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
                          nn.AdaptiveAvgPool2d(1), nn.Flatten()).cuda().eval()
    base_image, target_image = torch.rand(20, 3, 299, 299).cuda(), torch.rand(20, 3, 299, 299).cuda()
    target_feat_rep = model(target_image).detach()
    old_image, last_m_objs = base_image.clone(), []
    for _ in range(attack_iters):
        new_image = forward_step(model, old_image, target_feat_rep, lr, in_place=fixed)
        new_image = backward_step(new_image, old_image, lr, beta)
        new_feat_rep = model(new_image).detach()
        new_obj = torch.linalg.norm(new_feat_rep - target_feat_rep) + beta * torch.linalg.norm(new_image - base_image)
        last_m_objs = [*last_m_objs, new_obj][-num_m:]
        old_image = new_image
    return old_image.detach().cpu(), sum(last_m_objs).item() / num_m


# A language model that is scored while it is trained.

def accuracy(predictions, labels):
    if predictions.ndim == 3:
        predictions = predictions.argmax(-1)
    return (predictions[:, :-1] == labels[:, 1:]).float().mean().item()


class Trainer:
    def __init__(self, model, compute_metrics, preprocess_logits_for_metrics=None):
        self.model, self.compute_metrics = model, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics

    def evaluation_loop(self, dataloader):
        self.model.eval()
        preds_host = labels_host = None
        for input_ids in dataloader:
            labels = input_ids.cuda()
            with torch.no_grad():
                logits = self.model(labels)
            if self.preprocess_logits_for_metrics is not None:
                logits = self.preprocess_logits_for_metrics(logits, labels)
            preds_host = logits if preds_host is None else torch.cat([preds_host, logits])
            labels_host = labels if labels_host is None else torch.cat([labels_host, labels])
        return self.compute_metrics(preds_host.cpu(), labels_host.cpu())


class CausalLM(nn.Module):
    def __init__(self, vocab_size=32000, hidden_size=256):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        layer = nn.TransformerEncoderLayer(hidden_size, 4, 4 * hidden_size, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, input_ids):
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1], device=input_ids.device)
        return self.lm_head(self.layers(self.embed_tokens(input_ids), mask=mask, is_causal=True))


# The report says where they are joined; that their argmax would do, it cannot know.
@expected("growing_buffer", fix=r"\.cpu\(\)|argmax", thread="huggingface/transformers#15466", memory=1000)
def evaluate_language_model(fixed=False):
    """The evaluation loop gathers the full logits (batch x tokens x 32000) of all batches on the GPU in `preds_host`, joined anew with each
    batch, though the metric needs only the best token. Cured by: `preprocess_logits_for_metrics` that reduces the logits to their `argmax`
    before they are gathered.
    """
    preprocess = (lambda logits, labels: logits.argmax(-1)) if fixed else None
    trainer = Trainer(CausalLM().cuda(), accuracy, preprocess_logits_for_metrics=preprocess)
    return trainer.evaluation_loop(torch.randint(0, 32000, (4, 128)) for _ in range(16))


# Forecasts of one sensor that was read once a minute, with thirteen other readings.

class BaseWindows(nn.Module):
    def __init__(self, input_size, horizon, channels, windows_batch_size):
        super().__init__()
        self.input_size, self.horizon, self.windows_batch_size = input_size, horizon, windows_batch_size
        self.stack = nn.Sequential(nn.Flatten(), nn.Linear(input_size * channels, 256), nn.ReLU(),
                                   nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, horizon))

    def create_windows(self, temporal):
        windows = temporal.unfold(-1, self.input_size + self.horizon, 1)
        windows = windows.permute(0, 2, 3, 1).contiguous().flatten(0, 1)
        w_idxs = torch.randint(len(windows), (self.windows_batch_size,), device=windows.device)
        return windows[w_idxs]

    def training_step(self, temporal):
        windows = self.create_windows(temporal)
        insample_y, outsample_y = windows[:, :self.input_size], windows[:, self.input_size:, 0]
        return F.l1_loss(self.stack(insample_y), outsample_y)


@expected("large_result", fix="part", thread="Nixtla/neuralforecast#783", memory=800)
def fit_forecaster(fixed=False, rows=120_000, channels=14):
    """`create_windows` makes all overlapping windows of the one long series (each row is copied 120 times) before it samples the few
    hundred windows that the step uses, so memory follows the length of the series and a smaller batch does not help. Cured by: splitting
    the long series into many series (several `unique_id`s).
    """
    readings = torch.randn(channels, rows)
    dataset = readings.split(5000, dim=1) if fixed else [readings]
    model = BaseWindows(input_size=96, horizon=24, channels=channels, windows_batch_size=512).cuda()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for step in range(24):
        loss = model.training_step(dataset[step % len(dataset)][None].cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Faces that move to speech, frame after frame.

class FaceFormer(nn.Module):
    def __init__(self, vertice_dim=15069, feature_dim=512, subjects=8):
        super().__init__()
        self.audio_feature_map = nn.Linear(768, feature_dim)
        self.vertice_map = nn.Linear(vertice_dim, feature_dim)
        self.obj_vector = nn.Linear(subjects, feature_dim, bias=False)
        layer = nn.TransformerDecoderLayer(feature_dim, 4, 2 * feature_dim, batch_first=True)
        self.transformer_decoder = nn.TransformerDecoder(layer, 2)
        self.vertice_map_r = nn.Linear(feature_dim, vertice_dim)

    def predict(self, audio, one_hot):
        hidden_states = self.audio_feature_map(audio)
        style_emb = self.obj_vector(one_hot).unsqueeze(1)
        vertice_emb = style_emb
        for frame in range(audio.shape[1]):
            vertice_out = self.transformer_decoder(vertice_emb, hidden_states)
            vertice_out = self.vertice_map_r(vertice_out)
            new_output = self.vertice_map(vertice_out[:, -1:]) + style_emb
            vertice_emb = torch.cat([vertice_emb, new_output], 1)
        return vertice_out


@expected("evaluation_keeps_graphs", fix="no_grad", thread="EvelynFan/FaceFormer#2", memory=1000)
def animate_faces(fixed=False, frames=50):
    """Inference runs with gradients: each frame is predicted from all frames so far, and `vertice_emb` links them, so the activations of
    the decoder for every frame (each over the whole sequence so far) stay until the end. Cured by: `with torch.no_grad()` around the
    prediction.
    """
    model = FaceFormer().cuda().eval()
    audio, one_hot = torch.randn(1, frames, 768).expand(8, -1, -1).cuda(), torch.eye(8).cuda()
    with no_grad_if(fixed):
        vertices = model.predict(audio, one_hot)
    return vertices.detach().cpu().numpy().shape


# A diffusion model, from which images are drawn at every milestone of its training.

class DiffusionTrainer:
    def __init__(self, image_size, num_samples, free_samples):
        self.image_size, self.num_samples, self.free_samples = image_size, num_samples, free_samples
        channels = (32, 32, 32)
        self.model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.SiLU(),
                                   *(nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.SiLU()) for c in channels),
                                   nn.Conv2d(32, 3, 3, padding=1)).cuda()
        self.optimizer = torch.optim.Adam(self.model.parameters(), 8e-5)
        self.results = []

    @torch.no_grad()
    def sample(self, batch_size, timesteps=4):
        images = torch.randn(batch_size, 3, self.image_size, self.image_size, device="cuda")
        for _ in range(timesteps):
            images = images - 0.1 * self.model(images)
        return images

    def save_image(self, images):
        self.results.append(images[:, :, ::8, ::8].clamp(-1, 1).cpu())

    def train(self, steps, batch_size, milestone):
        for step in range(1, steps + 1):
            images = torch.randn(batch_size, 3, self.image_size, self.image_size).cuda()
            noise = torch.randn_like(images)
            loss = F.mse_loss(self.model(images + noise), noise)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if step % milestone == 0:
                all_images_list = [self.sample(4) for _ in range(self.num_samples // 4)]
                all_images = torch.cat(all_images_list, dim=0)
                self.save_image(all_images)
                if self.free_samples:
                    del all_images_list, all_images


# They are made between two steps, and so are those of the step that fails: only "kept by" names their list.
@expected("outputs_of_earlier_step", fix=r"\bdel\b", thread="lucidrains/denoising-diffusion-pytorch#75", memory=820)
def train_diffusion(fixed=False):
    """After a milestone the sampled images stay on the GPU in the loop's variables `all_images_list` and `all_images` though they are saved
    already, so the next training steps have that much less room. Cured by: deleting the samples once they are saved.
    """
    trainer = DiffusionTrainer(image_size=256, num_samples=144, free_samples=fixed)
    trainer.train(steps=9, batch_size=6, milestone=3)


# A radiance field that shows a whole image while it is trained.

class RaySamples:
    def __init__(self, starts, ends):
        self.starts, self.ends = starts, ends

    def positions(self, origins, directions):
        return origins[:, None] + directions[:, None] * (self.starts + self.ends) / 2


class NerfactoModel(nn.Module):
    def __init__(self, eval_num_rays_per_chunk=8192, lists_in_eval=True):
        super().__init__()
        self.eval_num_rays_per_chunk, self.lists_in_eval = eval_num_rays_per_chunk, lists_in_eval
        self.proposal_networks = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1)) for _ in range(2))
        self.field = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 4))

    def sample_rays(self, rays, count):
        bins = torch.linspace(0.05, 4, count + 1, device=rays.device).expand(len(rays), -1)[..., None]
        bins = bins + 0.01 * torch.rand_like(bins)
        return RaySamples(bins[:, :-1].contiguous(), bins[:, 1:].contiguous())

    def get_outputs(self, ray_bundle):
        origins, directions = ray_bundle.split(3, dim=1)
        weights_list, ray_samples_list = [], []
        for network, count in zip(self.proposal_networks, (256, 96)):
            ray_samples = self.sample_rays(ray_bundle, count)
            weights_list.append(network(ray_samples.positions(origins, directions)).softmax(1))
            ray_samples_list.append(ray_samples)
        ray_samples = self.sample_rays(ray_bundle, 48)
        color, density = self.field(ray_samples.positions(origins, directions)).split([3, 1], dim=-1)
        weights = density.softmax(1)
        outputs = {"rgb": (weights * color.sigmoid()).sum(1), "depth": (weights * ray_samples.starts).sum(1)}
        if self.training or self.lists_in_eval:
            outputs["weights_list"] = [*weights_list, weights]
            outputs["ray_samples_list"] = [*ray_samples_list, ray_samples]
        return outputs

    @torch.no_grad()
    def get_outputs_for_camera(self, ray_bundle):
        outputs_lists = {}
        for chunk in ray_bundle.split(self.eval_num_rays_per_chunk):
            for name, output in self.get_outputs(chunk.cuda()).items():
                outputs_lists.setdefault(name, []).append(output)
        return {name: torch.cat(outputs) for name, outputs in outputs_lists.items() if torch.is_tensor(outputs[0])}


@expected("kept_tensors", fix=r"only what is used|\.cpu\(\)", thread="nerfstudio-project/nerfstudio#1748", memory=1000)
def show_camera(fixed=False, height=480, width=640):
    """While a whole image is rendered chunk by chunk, `outputs_lists` also collects the `weights_list` and `ray_samples_list` of each
    chunk, which hold every sample of every ray on the GPU and which nobody uses outside training. Cured by: leaving these lists out of the
    outputs unless the model trains.
    """
    model = NerfactoModel(lists_in_eval=not fixed).cuda()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(3):
        outputs = model.get_outputs(torch.randn(1024, 6).cuda())
        interlevel = sum(weights.square().mean() for weights in outputs["weights_list"])
        loss = F.mse_loss(outputs["rgb"], torch.rand(1024, 3).cuda()) + 0.01 * interlevel
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    image = model.get_outputs_for_camera(torch.randn(height * width, 6))
    return image["rgb"].view(height, width, 3).cpu()
