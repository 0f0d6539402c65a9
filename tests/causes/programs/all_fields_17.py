"""Programs after public threads about speech, graphs, molecules, physics, interpretability and training frameworks."""

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

from expected import expected
from programs.root_causes import no_grad_if

# A training framework: long sequences are cut into pieces in time, and each piece gets its own update.


class CoolSystem(nn.Module):
    def __init__(self, in_features=512, hidden=128, out_features=64):
        super().__init__()
        self.lstm = nn.LSTM(in_features, hidden, batch_first=True)
        self.decoder = nn.Linear(hidden, out_features)

    def training_step(self, batch, batch_idx, hiddens):
        x, y = batch
        out, hiddens = self.lstm(x, hiddens)
        loss = F.mse_loss(self.decoder(out), y)
        return {"loss": loss, "hiddens": hiddens}

    def tbptt_split_batch(self, batch, split_size):
        time_dim = batch[0].shape[1]
        return [[x[:, t : t + split_size] for x in batch] for t in range(0, time_dim, split_size)]


class TrainLoop:
    def __init__(self, model, truncated_bptt_steps, copy_batch):
        self.model, self.truncated_bptt_steps, self.copy_batch = model, truncated_bptt_steps, copy_batch
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        self.tqdm_metrics = {}

    def transfer_batch_to_gpu(self, batch):
        if isinstance(batch, torch.Tensor):
            return batch.cuda()
        if isinstance(batch, list):
            for i, x in enumerate(batch):
                batch[i] = self.transfer_batch_to_gpu(x)
        return batch

    def training_forward(self, batch, batch_idx, hiddens):
        if self.copy_batch:
            batch = copy.copy(batch)
        batch = self.transfer_batch_to_gpu(batch)
        return self.model.training_step(batch, batch_idx, hiddens)

    def run_training_batch(self, batch, batch_idx):
        hiddens = None
        splits = self.model.tbptt_split_batch(batch, self.truncated_bptt_steps)
        for split_idx, split_batch in enumerate(splits):
            output = self.training_forward(split_batch, batch_idx, hiddens)
            hiddens = tuple(h.detach() for h in output["hiddens"])
            self.optimizer.zero_grad()
            output["loss"].backward()
            self.optimizer.step()
            self.tqdm_metrics["loss"] = output["loss"].item()


@expected("kept_tensors", fix=r"\.cpu\(\)|\bdel\b|clear|None", thread="Lightning-AI/pytorch-lightning#532", memory=500, held_back=True)
def fit_long_sequences(fixed=False):
    """`transfer_batch_to_gpu` puts the GPU tensors back into the list it was given, so the list `splits` in `run_training_batch` keeps
    every piece of the sequence on the GPU after its `training_step` is done; it grows with each split until the batch is over. Cured by:
    hand `training_step` a copy of the split (`copy.copy(batch)`).
    """
    trainer = TrainLoop(CoolSystem().cuda(), truncated_bptt_steps=200, copy_batch=fixed)
    train_dataloader = [[torch.randn(32, 8000, 512), torch.randn(32, 8000, 64)]]
    for batch_idx, batch in enumerate(train_dataloader):
        trainer.run_training_batch(batch, batch_idx)
    return trainer.tqdm_metrics["loss"]


# Surrogates of partial differential equations: a network steps a fluid forward in time.


class FluidBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, padding_mode="circular")
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return x + self.conv2(F.gelu(self.conv1(x)))


class CustomMSELoss(nn.Module):
    def forward(self, preds, targets):
        loss = F.mse_loss(preds, targets, reduction="none")
        return loss.mean((3, 4)).sum((1, 2)).mean()


class PDEModel(nn.Module):
    def __init__(self, time_history=4, n_scalar=1, n_vector=1, hidden=16, detach=False):
        super().__init__()
        self.n_scalar, self.detach = n_scalar, detach
        self.fields = n_scalar + 2 * n_vector
        self.lift = nn.Conv2d(time_history * self.fields, hidden, 1)
        self.blocks = nn.Sequential(FluidBlock(hidden), FluidBlock(hidden))
        self.project = nn.Conv2d(hidden, 4 * self.fields, 1)
        self.train_criterion = CustomMSELoss()

    def forward(self, x):
        b, t, c, h, w = x.shape
        return self.project(self.blocks(self.lift(x.flatten(1, 2)))).view(b, 4, self.fields, h, w)

    def train_step(self, batch):
        x, y = batch
        pred = self(x)
        loss = self.train_criterion(pred, y)
        return loss, pred, y

    def training_step(self, batch, batch_idx):
        loss, preds, targets = self.train_step(batch)
        scalar_loss = self.train_criterion(preds[:, :, : self.n_scalar], targets[:, :, : self.n_scalar])
        vector_loss = self.train_criterion(preds[:, :, self.n_scalar :], targets[:, :, self.n_scalar :])
        if self.detach:
            scalar_loss, vector_loss = scalar_loss.detach(), vector_loss.detach()
        return {"loss": loss, "scalar_loss": scalar_loss, "vector_loss": vector_loss}

    def training_epoch_end(self, outputs):
        return [torch.stack([o[key] for o in outputs]).mean().item() for key in outputs[0]]


@expected("graph_of_earlier_steps", fix=r"detach|item\(\)", thread="pdearena/pdearena#4", memory=1000, held_back=True)
def train_navier_stokes(fixed=False):
    """`training_step` returns `scalar_loss` and `vector_loss` with their graphs, which nobody runs backward; the epoch's list `outputs`
    keeps them, and with them each step's prediction and target. Cured by: detach the two losses before returning them.
    """
    model = PDEModel(detach=fixed).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    trajectories = [(torch.randn(8, 4, 3, 128, 128), torch.randn(8, 4, 3, 128, 128)) for _ in range(4)]
    outputs = []
    for batch_idx in range(80):
        batch = [field.cuda() for field in trajectories[batch_idx % 4]]
        step_output = model.training_step(batch, batch_idx)
        optimizer.zero_grad()
        step_output["loss"].backward()
        optimizer.step()
        step_output["loss"] = step_output["loss"].detach()
        outputs.append(step_output)
    return model.training_epoch_end(outputs)


# Who speaks when: the speech is cut into segments of several lengths, and all segments are compared with each other.


def cos_similarity_batch(emb_a, emb_b, eps=3.5e-4):
    a = emb_a / (emb_a.norm(dim=1, keepdim=True) + eps)
    b = emb_b / (emb_b.norm(dim=1, keepdim=True) + eps)
    return a @ b.t()


def get_cosine_affinity(emb):
    sim = cos_similarity_batch(emb, emb)
    return sim.fill_diagonal_(1)


def get_scale_mapping(timestamps_in_scales):
    base = timestamps_in_scales[-1].mean(1)
    return [(scale.mean(1)[:, None] - base[None, :]).abs().argmin(0) for scale in timestamps_in_scales]


def get_multiscale_affinity(embeddings_in_scales, timestamps_in_scales, multiscale_weights, accumulate):
    mappings = get_scale_mapping(timestamps_in_scales)
    base_count = len(timestamps_in_scales[-1])
    if accumulate:
        fused_sim = torch.zeros(base_count, base_count, device="cuda")
    else:
        score_mat_list = []
    for scale_idx, emb in enumerate(embeddings_in_scales):
        score_mat = get_cosine_affinity(emb.cuda())
        mapping = mappings[scale_idx].cuda()
        repeated = score_mat.index_select(0, mapping).index_select(1, mapping)
        if accumulate:
            fused_sim += multiscale_weights[scale_idx] * repeated
        else:
            score_mat_list.append(repeated)
    if not accumulate:
        stacked = torch.stack(score_mat_list)
        fused_sim = torch.matmul(stacked.permute(1, 2, 0), multiscale_weights)
    return fused_sim


class SpectralSpeakers:
    def __init__(self, max_num_speakers=8, sparse_search=10):
        self.max_num_speakers, self.sparse_search = max_num_speakers, sparse_search

    def forward(self, affinity):
        values, _ = affinity.topk(self.sparse_search, dim=1)
        degree = values.sum(1)
        return degree.cpu()


@expected("joined_results", fix=r"empty|part|\.cpu\(\)", thread="NVIDIA-NeMo/Speech#5876", memory=1000, held_back=True)
def diarize_meeting(fixed=False):
    """`get_multiscale_affinity` keeps one full N x N matrix per scale in `score_mat_list`, then stacks them all into another big tensor
    only to take the weighted sum. Cured by: add each weighted matrix to one running N x N tensor instead of list, stack and matmul.
    """
    window_lengths = [1.5, 1.25, 1.0, 0.75, 0.5]
    duration = 1200.0
    timestamps, embeddings = [], []
    for window in window_lengths:
        starts = torch.arange(0, duration, window / 2)
        timestamps.append(torch.stack((starts, starts + window), 1))
        embeddings.append(torch.randn(len(starts), 192))
    weights = torch.ones(len(window_lengths), device="cuda") / len(window_lengths)
    affinity = get_multiscale_affinity(embeddings, timestamps, weights, accumulate=fixed)
    return SpectralSpeakers().forward(affinity)


# Gaussian processes with inducing points, fitted in batches until a moving average of the objective stands still.


class MaternCovariance(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x1, x2, lengthscale):
        distance = torch.cdist(x1 / lengthscale, x2 / lengthscale)
        ctx.covariance = torch.exp(-distance)
        ctx.distance = distance
        ctx.lengthscale = lengthscale
        return ctx.covariance.clone()

    @staticmethod
    def backward(ctx, grad_output):
        grad = (grad_output * ctx.covariance * ctx.distance).sum() / ctx.lengthscale
        return None, None, grad.view_as(ctx.lengthscale)


class SingleTaskVariationalGP(nn.Module):
    def __init__(self, inducing_points):
        super().__init__()
        m = len(inducing_points)
        self.register_buffer("inducing_points", inducing_points)
        self.raw_lengthscale = nn.Parameter(torch.zeros(1))
        self.variational_mean = nn.Parameter(torch.zeros(m, 1))
        self.chol_variational_covar = nn.Parameter(torch.ones(m))
        self.raw_noise = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        covar_xz = MaternCovariance.apply(x, self.inducing_points, F.softplus(self.raw_lengthscale))
        mean = covar_xz @ self.variational_mean
        variance = F.softplus(self.raw_noise) + (covar_xz @ self.chol_variational_covar.unsqueeze(-1)) ** 2
        return mean, variance


class VariationalELBO(nn.Module):
    def __init__(self, model, num_data):
        super().__init__()
        self.model, self.num_data = model, num_data

    def forward(self, output, target):
        mean, variance = output
        log_likelihood = -0.5 * ((target - mean) ** 2 / variance + variance.log()).mean()
        kl_divergence = (self.model.variational_mean**2).sum() + (self.model.chol_variational_covar**2).sum()
        return log_likelihood - kl_divergence / self.num_data


class ExpMAStoppingCriterion:
    def __init__(self, maxiter, n_window=10, eta=1.0):
        self.maxiter, self.n_window, self.iter = maxiter, n_window, 0
        self._prev_fvals = None
        self.weights = torch.exp(torch.linspace(-eta, 0, n_window)).cuda()

    def evaluate(self, fvals):
        self.iter += 1
        if self._prev_fvals is None:
            self._prev_fvals = fvals.unsqueeze(0)
        else:
            self._prev_fvals = torch.cat([self._prev_fvals[-self.n_window :], fvals.unsqueeze(0)])
        recent = self._prev_fvals[-self.n_window :]
        self.moving_average = (recent * self.weights[-len(recent) :]).sum() / self.weights[-len(recent) :].sum()
        return self.iter >= self.maxiter


def get_loss_closure_with_grads(mll, batches):
    def closure():
        train_x, train_y = next(batches)
        mll.zero_grad()
        loss = -mll(mll.model(train_x), train_y)
        loss.backward()
        return loss

    return closure


def torch_minimize(closure, parameters, stopping_criterion, detach):
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    while True:
        fval = closure()
        optimizer.step()
        if stopping_criterion.evaluate(fval.detach() if detach else fval):
            return stopping_criterion.moving_average.item()


@expected("graph_of_earlier_steps", fix=r"detach|item\(\)", thread="meta-pytorch/botorch#2526", memory=1000, held_back=True)
def fit_gp_with_dataloader(fixed=False, batch_size=4096):
    """`torch_minimize` gives `fval` to the stopping criterion without detaching it; `ExpMAStoppingCriterion._prev_fvals` (concatenated each
    time) holds the graphs of all previous iterations, with the kernel matrices of their batches. Cured by: `fval.detach()` before
    `stopping_criterion.evaluate`.
    """
    train_x = torch.linspace(0, 1, 100000).unsqueeze(-1).cuda()
    train_y = torch.sin(train_x * 4 * math.pi)
    model = SingleTaskVariationalGP(train_x[torch.randint(0, len(train_x), (1024,)).cuda()]).cuda()
    mll = VariationalELBO(model, num_data=len(train_x))

    def loader():
        while True:
            for idx in torch.randperm(len(train_x)).split(batch_size):
                idx = idx.cuda()
                yield train_x[idx], train_y[idx]

    closure = get_loss_closure_with_grads(mll, loader())
    return torch_minimize(closure, list(mll.parameters()), ExpMAStoppingCriterion(maxiter=150), detach=fixed)


# Reinforcement learning from pictures of a game: the values and probabilities of a played episode are computed first,
# then the actor and the critic learn from pieces of it.


class StateNet(nn.Module):
    def __init__(self, out_features):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, 1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Linear(64 * 7 * 7, out_features)

    def forward(self, states):
        return self.head(self.encoder(states))


class PPO:
    def __init__(self, n_actions=6, gamma=0.99, rollout_batch_size=None):
        self.actor, self.critic = StateNet(n_actions).cuda(), StateNet(1).cuda()
        self.gamma, self.rollout_batch_size = gamma, rollout_batch_size
        self.optimizer = torch.optim.Adam([*self.actor.parameters(), *self.critic.parameters()], lr=3e-4)

    def _to_tensor(self, array):
        return array.cuda()

    def _rollout_statistics(self, states, actions):
        states, actions = self._to_tensor(states), self._to_tensor(actions)
        values = self.critic(states).squeeze(-1)
        log_pis = self.actor(states).log_softmax(-1).gather(1, actions.unsqueeze(1)).squeeze(1)
        return values.cpu(), log_pis.cpu()

    @torch.no_grad()
    def get_rollout(self, states, actions, rewards):
        trajectory_len = len(rewards)
        step = self.rollout_batch_size or trajectory_len
        parts = [self._rollout_statistics(states[i : i + step], actions[i : i + step]) for i in range(0, trajectory_len, step)]
        values, log_pis = (torch.cat(part) for part in zip(*parts))
        returns = torch.zeros(trajectory_len)
        running = 0.0
        for t in reversed(range(trajectory_len)):
            running = float(rewards[t]) + self.gamma * running
            returns[t] = running
        return {"return": returns, "advantage": returns - values, "action_logprob": log_pis}

    def train_on_rollout(self, states, actions, rollout, batch_size=64):
        for idx in torch.randperm(len(actions)).split(batch_size)[:8]:
            batch, chosen = self._to_tensor(states[idx]), self._to_tensor(actions[idx])
            log_pis = self.actor(batch).log_softmax(-1).gather(1, chosen.unsqueeze(1)).squeeze(1)
            ratio = (log_pis - self._to_tensor(rollout["action_logprob"][idx])).exp()
            policy_loss = -(ratio * self._to_tensor(rollout["advantage"][idx])).mean()
            value_loss = F.mse_loss(self.critic(batch).squeeze(-1), self._to_tensor(rollout["return"][idx]))
            self.optimizer.zero_grad()
            (policy_loss + value_loss).backward()
            self.optimizer.step()


@expected("batch_without_gradients", fix="split|half|part", thread="catalyst-team/catalyst#211", memory=700, held_back=True)
def train_ppo_on_frames(fixed=False, episode_len=3000):
    """`get_rollout` puts the whole episode on the GPU and runs critic and actor over all its states in one forward pass, only to compute
    values and log probabilities. Cured by: `rollout_batch_size`: compute the rollout statistics in small batches of states.
    """
    algorithm = PPO(rollout_batch_size=128 if fixed else None)
    states, actions = torch.rand(episode_len, 4, 84, 84), torch.randint(0, 6, (episode_len,))
    rollout = algorithm.get_rollout(states, actions, torch.rand(episode_len))
    algorithm.train_on_rollout(states, actions, rollout)


# A vocoder: the spectrogram is brought to the rate of the samples for every layer, then a kernel makes the samples.


class NVWaveNet:
    def __init__(self, n_residual, n_layers):
        self.dilate_weights = torch.randn(n_layers, 2 * n_residual, n_residual).cuda()
        self.res_weights = torch.randn(n_layers, n_residual, n_residual).cuda()
        self.embed_out = torch.randn(256, n_residual).cuda()
        self.hidden = torch.zeros(n_residual, 1).cuda()

    def infer(self, cond_input):
        samples = []
        for block in cond_input.split(4096, dim=0):
            h = self.hidden.expand(-1, len(block))
            for layer in range(block.shape[1]):
                gate, filt = (self.dilate_weights[layer] @ h + block[:, layer].t()).chunk(2)
                h = h + self.res_weights[layer] @ (torch.tanh(gate) * torch.sigmoid(filt))
            samples.append((self.embed_out @ h).argmax(0))
            self.hidden = h[:, -1:]
        return torch.cat(samples)


class WaveNet(nn.Module):
    def __init__(self, n_residual=32, n_layers=16, n_cond_channels=80, hop_length=256):
        super().__init__()
        self.n_residual, self.n_layers, self.hop_length = n_residual, n_layers, hop_length
        self.upsample = nn.ConvTranspose1d(n_cond_channels, n_cond_channels, 4 * hop_length, hop_length)
        self.cond_layers = nn.Conv1d(n_cond_channels, 2 * n_residual * n_layers, 1, bias=False)

    def get_cond_input(self, features):
        cond_input = self.upsample(features)
        cond_input = cond_input[:, :, : features.shape[2] * self.hop_length]
        cond_input = self.cond_layers(cond_input)
        cond_input = cond_input.view(self.n_layers, 2 * self.n_residual, -1)
        return cond_input.permute(2, 0, 1).contiguous()


@expected("large_result", fix="part|smaller", thread="NVIDIA/nv-wavenet#42", memory=1000, held_back=True)
def vocode_sentences(fixed=False, seconds=6, chunk=80):
    """`get_cond_input` makes the conditioning for all samples and all layers of the whole utterance in one giant tensor (and a permuted
    copy), so a few seconds of audio are too much. Cured by: split the mel spectrogram into chunks of 80 frames and infer chunk by chunk.
    """
    model = WaveNet().cuda().eval()
    audio = []
    for mel in [torch.randn(1, 80, seconds * 86) for _ in range(2)]:
        kernel = NVWaveNet(model.n_residual, model.n_layers)
        with torch.no_grad():
            mel_parts = mel.split(chunk, dim=2) if fixed else [mel]
            samples = [kernel.infer(model.get_cond_input(part.cuda())).cpu() for part in mel_parts]
        audio.append(torch.cat(samples))
    return audio


# Explanations of a classifier: features are switched off at random, and a linear model is fitted to the outputs.


class ResidualUnit(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x):
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(out)) + x)


def make_classifier(channels=32, classes=10):
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        ResidualUnit(channels),
        ResidualUnit(channels),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, classes),
    )


class KernelShap:
    def __init__(self, forward_func, probe_without_grad):
        self.forward_func, self.probe_without_grad = forward_func, probe_without_grad

    def _run_forward(self, inputs, target):
        return self.forward_func(inputs).gather(1, target.unsqueeze(1)).squeeze(1)

    def _perturb(self, inputs, baselines, feature_mask, kept):
        mask = kept[:, feature_mask].unsqueeze(1)
        return inputs * mask + baselines * (1 - mask)

    def _fit(self, samples, outputs):
        design = torch.stack(samples).flatten(0, 1)
        gram = design.t() @ design
        return gram @ (design.t() @ torch.cat(outputs).unsqueeze(1))

    def attribute(self, inputs, baselines, target, feature_mask, n_samples):
        with no_grad_if(self.probe_without_grad):
            expected = self._run_forward(inputs, target)
        if expected.shape[0] != inputs.shape[0]:
            raise ValueError("the forward function must return one output for each example")
        num_features = int(feature_mask.max()) + 1
        interpretable, outputs = [], []
        with torch.no_grad():
            for _ in range(n_samples):
                kept = torch.randint(0, 2, (len(inputs), num_features), dtype=torch.float).cuda()
                perturbed = self._perturb(inputs, baselines, feature_mask.cuda(), kept)
                outputs.append(self._run_forward(perturbed, target))
                interpretable.append(kept)
            coefficients = self._fit(interpretable, outputs)
        return coefficients.squeeze(1), expected.sum().item()


@expected("evaluation_keeps_graphs", fix="no_grad", thread="meta-pytorch/captum#1899", memory=1000, held_back=True)
def explain_predictions(fixed=False):
    """The first probing forward pass in `KernelShap.attribute` is outside `no_grad`, and `expected` lives until the end of the method, so
    the whole graph of that pass stays in memory while the perturbed inputs are evaluated. Cured by: run the probe under `torch.no_grad`
    too.
    """
    model = make_classifier().cuda().eval()
    explainer = KernelShap(model, probe_without_grad=fixed)
    rows = torch.arange(64).div(8, rounding_mode="floor")
    feature_mask = rows[:, None] * 8 + rows[None, :]
    written = []
    for _ in range(3):
        inputs = torch.rand(146, 3, 64, 64).cuda()
        target = torch.randint(0, 10, (146,)).cuda()
        coefficients, _ = explainer.attribute(inputs, torch.zeros_like(inputs), target, feature_mask, n_samples=6)
        written.append(coefficients.cpu())
    return written


# Metric learning: a contrastive loss over the pairs of a batch.


def get_all_pairs_indices(labels):
    matches = labels.unsqueeze(1) == labels.unsqueeze(0)
    diffs = ~matches
    matches.fill_diagonal_(False)
    a1, p = torch.where(matches)
    a2, n = torch.where(diffs)
    return a1, p, a2, n


class NTXentLoss(nn.Module):
    def __init__(self, temperature):
        super().__init__()
        self.temperature = temperature

    def forward(self, embeddings, labels, indices_tuple=None):
        if indices_tuple is None:
            indices_tuple = get_all_pairs_indices(labels)
        a1, p, a2, n = (index.to(embeddings.device) for index in indices_tuple)
        embeddings = F.normalize(embeddings)
        mat = embeddings @ embeddings.t()
        return self._compute_loss(mat[a1, p], mat[a2, n], a1, a2)

    def _compute_loss(self, pos_pairs, neg_pairs, a1, a2):
        pos_pairs = pos_pairs.unsqueeze(1) / self.temperature
        neg_pairs = neg_pairs / self.temperature
        n_per_p = (a2.unsqueeze(0) == a1.unsqueeze(1)).float()
        neg_pairs = neg_pairs * n_per_p
        max_val = torch.max(pos_pairs, neg_pairs.max(dim=1, keepdim=True)[0]).detach()
        numerator = torch.exp(pos_pairs - max_val).squeeze(1)
        denominator = (torch.exp(neg_pairs - max_val) * n_per_p).sum(dim=1) + numerator
        return -torch.log(numerator / denominator + 1e-20).mean()


@expected("all_pairs", fix="split|chunk", thread="KevinMusgrave/pytorch-metric-learning#203", memory=1000, held_back=True)
def train_contrastive(fixed=False, group=128):
    """All samples of the group share label 0, so the loss makes thousands of positive pairs and tens of thousands of negative pairs and
    compares every positive with every negative pair: `n_per_p` in `_compute_loss` is (number of positive pairs) x (number of negative
    pairs). Cured by: pass `indices_tuple` with only the pairs that are wanted.
    """
    trunk = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128)).cuda()
    optimizer = torch.optim.Adam(trunk.parameters(), lr=1e-4)
    nxt_loss = NTXentLoss(temperature=0.5)
    labels = torch.cat([torch.zeros(group), torch.arange(1, group + 1)]).long()
    anchors = torch.arange(group)
    indices_tuple = (anchors, anchors.roll(1), anchors, anchors + group) if fixed else None
    for _ in range(5):
        pos_pair, neg_pair = torch.rand(group, 784), torch.rand(group, 784)
        embeddings = trunk(torch.cat([pos_pair, neg_pair]).cuda())
        point_loss = nxt_loss(embeddings, labels, indices_tuple)
        optimizer.zero_grad()
        point_loss.backward()
        optimizer.step()


# Molecules: energies of atoms from their distances, and forces as derivatives of the energy.


class CFConv(nn.Module):
    def __init__(self, n_atom_basis, n_filters, n_gaussians):
        super().__init__()
        self.filter_network = nn.Sequential(nn.Linear(n_gaussians, n_filters), nn.Softplus(), nn.Linear(n_filters, n_filters))
        self.in2f, self.f2out = nn.Linear(n_atom_basis, n_filters, bias=False), nn.Linear(n_filters, n_atom_basis)

    def forward(self, x, f_ij):
        w = self.filter_network(f_ij)
        y = (self.in2f(x).unsqueeze(1) * w).sum(2)
        return F.softplus(self.f2out(y))


class SchNet(nn.Module):
    def __init__(self, n_atom_basis=64, n_filters=64, n_gaussians=25, n_interactions=2, cutoff=5.0):
        super().__init__()
        self.embedding = nn.Embedding(100, n_atom_basis)
        self.register_buffer("offsets", torch.linspace(0, cutoff, n_gaussians))
        self.interactions = nn.ModuleList(CFConv(n_atom_basis, n_filters, n_gaussians) for _ in range(n_interactions))

    def forward(self, inputs):
        positions = inputs["_positions"]
        r_ij = ((positions.unsqueeze(2) - positions.unsqueeze(1)) ** 2).sum(-1).add(1e-6).sqrt()
        f_ij = torch.exp(-10 * (r_ij.unsqueeze(-1) - self.offsets) ** 2)
        x = self.embedding(inputs["_atomic_numbers"])
        for interaction in self.interactions:
            x = x + interaction(x, f_ij)
        return x


class AtomisticModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.representation, self.out_net = SchNet(), nn.Sequential(nn.Linear(64, 32), nn.Softplus(), nn.Linear(32, 1))

    def forward(self, inputs):
        inputs["_positions"].requires_grad_()
        energy = self.out_net(self.representation(inputs)).sum(1)
        forces = -torch.autograd.grad(energy, inputs["_positions"], torch.ones_like(energy), create_graph=True)[0]
        return {"energy": energy, "forces": forces}


class MeanAbsoluteError:
    def __init__(self, target):
        self.target, self.l1loss, self.n_entries = target, 0.0, 0

    def add_batch(self, batch, result):
        diff = batch[self.target] - result[self.target]
        self.l1loss += diff.view(-1).abs().sum().detach().cpu().item()
        self.n_entries += diff.numel()


class AtomisticTrainer:
    def __init__(self, model, train_loader, validation_loader, detach_results):
        self._model, self.train_loader, self.validation_loader = model, train_loader, validation_loader
        self.detach_results = detach_results
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        self.metrics = [MeanAbsoluteError("energy"), MeanAbsoluteError("forces")]

    def loss_fn(self, batch, result):
        return F.mse_loss(result["energy"], batch["energy"]) + F.mse_loss(result["forces"], batch["forces"])

    def _train_epoch(self):
        self._model.train()
        for train_batch in self.train_loader:
            train_batch = {k: v.cuda() for k, v in train_batch.items()}
            self.optimizer.zero_grad()
            loss = self.loss_fn(train_batch, self._model(train_batch))
            loss.backward()
            self.optimizer.step()

    def _validate(self):
        self._model.eval()
        val_loss = 0.0
        for val_batch in self.validation_loader:
            val_batch = {k: v.cuda() for k, v in val_batch.items()}
            val_result = self._model(val_batch)
            if self.detach_results:
                val_result = {k: v.detach() for k, v in val_result.items()}
            val_loss += self.loss_fn(val_batch, val_result).data.cpu().item()
            for metric in self.metrics:
                metric.add_batch(val_batch, val_result)
        return val_loss / len(self.validation_loader)

    def train(self, n_epochs):
        for _ in range(n_epochs):
            self._train_epoch()
            self._validate()


@expected("outputs_of_earlier_step", fix=r"\bdel\b|detach", thread="atomistic-machine-learning/schnetpack#250", memory=1000, held_back=True)
def train_force_field(fixed=False, batch_size=58, atoms=48):
    """In `_validate` nothing runs backward and `val_result` still holds the graph (forces need `create_graph`), so the graph of the last
    validation batch is alive while that of the next one is built: validation needs more than training on the same batch size. Cured by:
    detach the validation results (PR 254).
    """
    def loader(batches):
        return [
            {
                "_positions": torch.randn(batch_size, atoms, 3),
                "_atomic_numbers": torch.randint(1, 10, (batch_size, atoms)),
                "energy": torch.randn(batch_size, 1),
                "forces": torch.randn(batch_size, atoms, 3),
            }
            for _ in range(batches)
        ]

    AtomisticTrainer(AtomisticModel().cuda(), loader(4), loader(3), detach_results=fixed).train(n_epochs=2)


# Interpretability: which few features of a sparse autoencoder tell the classes apart?


class StandardSAE(nn.Module):
    def __init__(self, d_in, d_sae):
        super().__init__()
        self.W_enc, self.b_enc = nn.Parameter(torch.randn(d_in, d_sae) / d_in**0.5), nn.Parameter(torch.zeros(d_sae))
        self.W_dec, self.b_dec = nn.Parameter(torch.randn(d_sae, d_in) / d_sae**0.5), nn.Parameter(torch.zeros(d_in))

    @torch.no_grad()
    def encode(self, x):
        return torch.relu((x - self.b_dec) @ self.W_enc + self.b_enc)


def train_sparse_multi_probe(features_of, n_train, labels, d_sae, num_probes, batch_size=512, epochs=2, l1=0.01):
    probe = nn.Linear(d_sae, num_probes).cuda()
    optimizer = torch.optim.Adam(probe.parameters(), lr=0.01)
    for _ in range(epochs):
        for idx in torch.randperm(n_train).split(batch_size):
            idx = idx.cuda()
            loss = F.binary_cross_entropy_with_logits(probe(features_of(idx)), labels[idx]) + l1 * probe.weight.abs().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return probe.weight.detach()


def train_k_sparse_probes(sae, train_activations, labels, ks, encode_batchwise):
    if encode_batchwise:

        def features_of(idx):
            return sae.encode(train_activations[idx])

    else:
        train_k_x = sae.encode(train_activations)

        def features_of(idx):
            return train_k_x[idx]

    sparse_weight = train_sparse_multi_probe(features_of, len(labels), labels, sae.W_enc.shape[1], labels.shape[1])
    probes = {}
    for k in ks:
        feature_ids = sparse_weight.abs().topk(k, dim=1).indices
        probes[k] = feature_ids.cpu()
    return probes


@expected("large_result", fix="part|split|chunk", thread="adamkarvonen/SAEBench#42", memory=1000, held_back=True)
def probe_first_letters(fixed=False, words=9000, letters=26):
    """`train_k_sparse_probes` expands all activations at once into the very wide feature space of the autoencoder (`train_k_x`, words x
    d_sae) and keeps that, although the probe only needs a batch at a time. Cured by: encode the activations per batch while training the
    probe.
    """
    sae = StandardSAE(d_in=256, d_sae=16384).cuda()
    activations = torch.randn(words, 256).cuda()
    labels = torch.randint(0, 2, (words, letters)).float().cuda()
    probes = train_k_sparse_probes(sae, activations, labels, ks=(1, 2, 5), encode_batchwise=fixed)
    return [(k, feature_ids.shape) for k, feature_ids in probes.items()]


# Averaged weights: after training, the statistics of the normalization layers are computed anew for the averaged model.


class AveragedModel(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.module, self.n_averaged = copy.deepcopy(model), 0

    def forward(self, *args):
        return self.module(*args)

    @torch.no_grad()
    def update_parameters(self, model):
        for p_swa, p_model in zip(self.module.parameters(), model.parameters()):
            p_swa += (p_model - p_swa) / (self.n_averaged + 1)
        self.n_averaged += 1


def update_bn(loader, model, without_grad):
    momenta = {}
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.reset_running_stats()
            momenta[module] = module.momentum
    was_training = model.training
    model.train()
    for module in momenta:
        module.momentum = None
    with no_grad_if(without_grad):
        for images, _ in loader:
            model(images.cuda())
    for module, momentum in momenta.items():
        module.momentum = momentum
    model.train(was_training)


@torch.no_grad()
def evaluate_averaged(model, loader):
    model.eval()
    return sum((model(images.cuda()).argmax(1) == labels.cuda()).sum().item() for images, labels in loader)


@expected("graph_without_use", fix="no_grad|detach", thread="pytorch/pytorch#52055", memory=1000, held_back=True)
def train_with_swa(fixed=False):
    """`update_bn` runs the averaged model forward with gradients enabled, so it stores all activations of the (large) batches for a
    backward pass which never comes. Cured by: `torch.no_grad()` in `update_bn`.
    """
    model = make_classifier().cuda()
    swa_model = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_loader = [(torch.rand(32, 3, 64, 64), torch.randint(0, 10, (32,))) for _ in range(6)]
    eval_loader = [(torch.rand(200, 3, 64, 64), torch.randint(0, 10, (200,))) for _ in range(2)]
    for _ in range(2):
        for images, labels in train_loader:
            loss = F.cross_entropy(model(images.cuda()), labels.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        swa_model.update_parameters(model)
    update_bn(eval_loader, swa_model, without_grad=fixed)
    return evaluate_averaged(swa_model, eval_loader)


# Spiking neurons: each has a potential which the inputs of the time steps charge.


class ATan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.save_for_backward(x)
        ctx.alpha = alpha
        return (x >= 0).to(x)

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return ctx.alpha / 2 / (1 + (math.pi / 2 * ctx.alpha * x) ** 2) * grad_output, None


class LIFNode(nn.Module):
    def __init__(self, tau=2.0, v_threshold=1.0, v_reset=0.0):
        super().__init__()
        self.tau, self.v_threshold, self.v_reset = tau, v_threshold, v_reset
        self.reset()

    def reset(self):
        self.v = self.v_reset

    def forward(self, x):
        self.v = self.v + (x - (self.v - self.v_reset)) / self.tau
        spike = ATan.apply(self.v - self.v_threshold, 2.0)
        self.v = (1 - spike) * self.v + spike * self.v_reset
        return spike


class CIFARSpikingNet(nn.Module):
    def __init__(self, channels=32, T=4):
        super().__init__()
        self.T = T
        self.conv = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            LIFNode(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            LIFNode(),
            nn.AvgPool2d(4),
            nn.Flatten(),
        )
        self.fc = nn.Sequential(nn.Linear(channels * 64, 100), LIFNode())

    def forward(self, x):
        out_spikes_counter = self.fc(self.conv(x))
        for _ in range(1, self.T):
            out_spikes_counter = out_spikes_counter + self.fc(self.conv(x))
        return out_spikes_counter / self.T


def reset_net(net):
    for module in net.modules():
        if hasattr(module, "reset"):
            module.reset()


def batch_accuracy(net, img, label):
    out_fr = net(img.cuda())
    return (out_fr.argmax(1) == label.cuda()).float().sum().item()


@expected("recurrent_state", fix="detach|reset", thread="fangwei123456/spikingjelly#310", memory=500, held_back=True)
def check_accuracy(fixed=False):
    """The neurons keep their potential `v` (with its graph) from one batch to the next, because `reset_net` is never called; the graph
    through `v` of all batches so far stays in memory and grows. Cured by: call `functional.reset_net(net)` after each batch.
    """
    net = CIFARSpikingNet().cuda().eval()
    test_data_loader = [(torch.rand(5, 3, 32, 32), torch.randint(0, 100, (5,))) for _ in range(40)]
    test_acc = test_samples = 0
    for img, label in test_data_loader:
        test_acc += batch_accuracy(net, img, label)
        test_samples += len(label)
        if fixed:
            reset_net(net)
    return test_acc / test_samples


# New molecules, written letter by letter by a recurrent network with a stack.


class StackAugmentedRNN(nn.Module):
    def __init__(self, input_size, hidden_size, output_size, stack_width, stack_depth):
        super().__init__()
        self.hidden_size, self.stack_width, self.stack_depth = hidden_size, stack_width, stack_depth
        self.stack_controls_layer = nn.Linear(hidden_size, 3)
        self.stack_input_layer = nn.Linear(hidden_size, stack_width)
        self.encoder = nn.Embedding(input_size, hidden_size)
        self.gru = nn.GRUCell(hidden_size + stack_width, hidden_size)
        self.decoder = nn.Linear(hidden_size, output_size)

    def stack_augmentation(self, input_val, prev_stack, controls):
        controls = controls.view(-1, 3, 1, 1)
        zeros_at_the_bottom = torch.zeros(prev_stack.shape[0], 1, self.stack_width, device=prev_stack.device)
        a_push, a_pop, a_no_op = controls[:, 0], controls[:, 1], controls[:, 2]
        stack_down = torch.cat((prev_stack[:, 1:], zeros_at_the_bottom), dim=1)
        stack_up = torch.cat((input_val, prev_stack[:, :-1]), dim=1)
        return a_no_op * prev_stack + a_push * stack_up + a_pop * stack_down

    def forward(self, inp, hidden, stack):
        inp = self.encoder(inp)
        stack_controls = F.softmax(self.stack_controls_layer(hidden), dim=1)
        stack_input = torch.tanh(self.stack_input_layer(hidden)).unsqueeze(1)
        stack = self.stack_augmentation(stack_input, stack, stack_controls)
        hidden = self.gru(torch.cat((inp, stack[:, 0]), 1), hidden)
        return self.decoder(hidden), hidden, stack

    def train_step(self, inp, target, optimizer):
        hidden = torch.zeros(1, self.hidden_size, device=inp.device)
        stack = torch.zeros(1, self.stack_depth, self.stack_width, device=inp.device)
        optimizer.zero_grad()
        loss = 0
        for c in range(len(inp)):
            output, hidden, stack = self(inp[c : c + 1], hidden, stack)
            loss = loss + F.cross_entropy(output, target[c : c + 1])
        loss.backward()
        optimizer.step()
        return loss.item() / len(inp)


@expected("unrolled_sequence", fix="shorter|sequence|detach|truncat", thread="isayev/ReLeaSE#4", memory=1000, held_back=True)
def transfer_learning(fixed=False, n_iterations=6, alphabet=45):
    """The generator is too big for the card: the stack is `stack_depth` x `stack_width` (200 x 1500) and every letter of the molecule makes
    new versions of it which are kept for the backward pass, along with a hidden size of 1500. Cured by: smaller `hidden_size`,
    `stack_width`, `stack_depth`.
    """
    sizes = (
        dict(hidden_size=500, stack_width=500, stack_depth=100)
        if fixed
        else dict(hidden_size=1500, stack_width=1500, stack_depth=200)
    )
    my_generator = StackAugmentedRNN(alphabet, output_size=alphabet, **sizes).cuda()
    optimizer = torch.optim.Adadelta(my_generator.parameters(), lr=0.001)
    losses = []
    for i in range(n_iterations):
        smiles = torch.randint(0, alphabet, (60 + 12 * i,)).cuda()
        losses.append(my_generator.train_step(smiles[:-1], smiles[1:], optimizer))
    return losses


# A singing voice: convolutions whose taps are one pitch period apart.


def pd_indexing(x, d, dilation, index_future):
    B, C, T = x.size()
    batch_index = torch.arange(0, B, dtype=torch.long, device=x.device).reshape(B, 1, 1)
    ch_index = torch.arange(0, C, dtype=torch.long, device=x.device).reshape(1, C, 1)
    dilations = torch.clamp((d * dilation).long(), min=1)

    idx_base = torch.arange(0, T, dtype=torch.long, device=x.device).reshape(1, 1, T)
    idx_past = (idx_base - dilations).abs() % T
    idx_past = (batch_index, ch_index, idx_past)

    idx_next = (T - 1 - (T - 1 - idx_base - dilations).abs()).abs() % T
    if index_future:
        idx_next = (batch_index, ch_index, idx_next)
    return x[idx_past], x[idx_next]


class AdaptiveBlock(nn.Module):
    def __init__(self, channels, dilations, index_future):
        super().__init__()
        self.dilations, self.index_future = dilations, index_future
        self.convs_past = nn.ModuleList(nn.Conv1d(channels, channels, 1) for _ in dilations)
        self.convs_now = nn.ModuleList(nn.Conv1d(channels, channels, 1) for _ in dilations)
        self.convs_next = nn.ModuleList(nn.Conv1d(channels, channels, 1) for _ in dilations)

    def forward(self, x, d):
        for past, now, following, dilation in zip(self.convs_past, self.convs_now, self.convs_next, self.dilations):
            xt = F.leaky_relu(x, 0.1)
            x_past, x_next = pd_indexing(xt, d, dilation, self.index_future)
            x = x + past(x_past) + now(xt) + following(x_next)
        return x


class SiFiGANGenerator(nn.Module):
    def __init__(self, in_channels=43, channels=256, upsample_scales=(5, 4), index_future=True):
        super().__init__()
        self.input_conv = nn.Conv1d(in_channels, channels, 7, padding=3)
        self.upsamples, self.blocks = nn.ModuleList(), nn.ModuleList()
        for scale in upsample_scales:
            self.upsamples.append(nn.ConvTranspose1d(channels, channels // 2, scale, scale))
            self.blocks.append(AdaptiveBlock(channels // 2, (1, 2), index_future))
            channels //= 2
        self.output_conv = nn.Conv1d(channels, 1, 7, padding=3)

    def forward(self, c, dfs):
        c = self.input_conv(c)
        for upsample, block, d in zip(self.upsamples, self.blocks, dfs):
            c = block(upsample(F.leaky_relu(c, 0.1)), d)
        return torch.tanh(self.output_conv(F.leaky_relu(c, 0.1)))


@expected("enlarged", fix="split|part|chunk", thread="chomeyama/SiFiGAN#7", memory=1000, held_back=True)
def train_singing_vocoder(fixed=False, batch_size=16, frames=70):
    """`pd_indexing` lacks the line which makes the tuple (batch, channel, time) of the future index, so `x[idx_next]` indexes the batch
    dimension with a B x 1 x T index and makes a tensor B x 1 x T x C x T. (The thread only shows that a line was missing in `pd_indexing`;
    that it is this one is read off the file as it is elsewhere.). Cured by: add the missing line.
    """
    generator = SiFiGANGenerator(index_future=fixed).cuda()
    optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4)
    for _ in range(3):
        c, y = torch.randn(batch_size, 43, frames).cuda(), torch.randn(batch_size, 1, frames * 20).cuda()
        dfs = [torch.rand(batch_size, 1, frames * rate).cuda() * 4 + 1 for rate in (5, 20)]
        loss = F.l1_loss(generator(c, dfs), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
