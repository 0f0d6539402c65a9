"""Programs after public threads about scientific and tabular libraries, reinforcement learning, and audio."""
import gc
import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from expected import expected
from programs.root_causes import no_grad_if


# Tabular data: a network learns to restore hidden columns before it's trained on the target.

class RandomObfuscator(nn.Module):
    def __init__(self, pretraining_ratio):
        super().__init__()
        self.pretraining_ratio = pretraining_ratio

    def forward(self, x):
        obfuscated_vars = torch.bernoulli(self.pretraining_ratio * torch.ones_like(x))
        return (1 - obfuscated_vars) * x, obfuscated_vars


class TabNetPretraining(nn.Module):
    def __init__(self, input_dim, n_d, n_steps=3):
        super().__init__()
        self.embedder, self.masker = nn.Linear(input_dim, input_dim), RandomObfuscator(0.5)
        self.attentions = nn.ModuleList(nn.Linear(n_d, input_dim) for _ in range(n_steps))
        self.transformers = nn.ModuleList(nn.Sequential(nn.Linear(input_dim, n_d), nn.ReLU()) for _ in range(n_steps))
        self.initial, self.decoder = nn.Linear(input_dim, n_d), nn.Linear(n_d, input_dim)

    def forward(self, x):
        embedded_x = self.embedder(x)
        masked_x, obf_vars = self.masker(embedded_x) if self.training else (embedded_x, torch.ones_like(embedded_x))
        att, res = self.initial(masked_x), 0
        for attention, transformer in zip(self.attentions, self.transformers):
            att = transformer(torch.softmax(attention(att), -1) * masked_x)
            res = res + att
        return self.decoder(res), embedded_x, obf_vars


class TabNetPretrainer:
    def __init__(self, input_dim, as_numpy):
        self.network, self.as_numpy = TabNetPretraining(input_dim, 64).cuda(), as_numpy
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=2e-2)

    def unsupervised_loss(self, y_pred, embedded_x, obf_vars):
        errors = (y_pred - embedded_x) * obf_vars
        return (errors ** 2).sum(1).mean()

    def train_epoch(self, loader):
        self.network.train()
        for (X,) in loader:
            loss = self.unsupervised_loss(*self.network(X.cuda()))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def predict_batch(self, X):
        with torch.no_grad():
            outputs = self.network(X.cuda())
        return [o.cpu().numpy() for o in outputs] if self.as_numpy else outputs

    def predict_epoch(self, loader):
        self.network.eval()
        list_output, list_embedded_x, list_obfuscation = [], [], []
        for (X,) in loader:
            output, embedded_x, obf_vars = self.predict_batch(X)
            list_output.append(output)
            list_embedded_x.append(embedded_x)
            list_obfuscation.append(obf_vars)
        stack = np.vstack if self.as_numpy else torch.vstack
        return float(self.unsupervised_loss(stack(list_output), stack(list_embedded_x), stack(list_obfuscation)))


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="dreamquark-ai/tabnet#341", memory=500, held_back=True)
def pretrain_tabular(fixed=False):
    """`predict_epoch` keeps the three outputs of every validation batch (output, embedded_x, obf_vars) on the GPU in `list_output`,
    `list_embedded_x` and `list_obfuscation`, to stack and score them at the end; so the memory grows with the size of the validation set.
    Cured by: convert each batch's outputs to numpy on the CPU before they are collected, and compute the loss in numpy.
    """
    X_train, X_valid = torch.rand(8192, 400), torch.rand(4096 * 22, 400)
    pretrainer = TabNetPretrainer(400, as_numpy=fixed)
    pretrainer.train_epoch(DataLoader(TensorDataset(X_train), batch_size=1024))
    return pretrainer.predict_epoch(DataLoader(TensorDataset(X_valid), batch_size=4096))


# Live transcription: tokens are decoded while the speaker goes on, as far as the attention says that they were heard.

class MultiHeadAttention(nn.Module):
    def __init__(self, n_state, n_head):
        super().__init__()
        self.n_head = n_head
        self.query, self.key, self.value = (nn.Linear(n_state, n_state) for _ in range(3))
        self.out = nn.Linear(n_state, n_state)

    def split(self, x):
        return x.view(*x.shape[:2], self.n_head, -1).transpose(1, 2)

    def forward(self, x, xa=None, kv_cache=None):
        q = self.split(self.query(x))
        if xa is not None:
            if self not in kv_cache:
                kv_cache[self] = self.split(self.key(xa)), self.split(self.value(xa))
            k, v = kv_cache[self]
        else:
            k, v = self.split(self.key(x)), self.split(self.value(x))
            if self in kv_cache:
                k, v = torch.cat((kv_cache[self][0], k), 2), torch.cat((kv_cache[self][1], v), 2)
            kv_cache[self] = k, v
        qk = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        return self.out((qk @ v).transpose(1, 2).flatten(2)), qk


class ResidualAttentionBlock(nn.Module):
    def __init__(self, n_state, n_head):
        super().__init__()
        self.attn, self.cross_attn = MultiHeadAttention(n_state, n_head), MultiHeadAttention(n_state, n_head)
        self.mlp = nn.Sequential(nn.Linear(n_state, 4 * n_state), nn.GELU(), nn.Linear(4 * n_state, n_state))
        self.ln = nn.LayerNorm(n_state)

    def forward(self, x, xa, kv_cache):
        x = x + self.attn(x, kv_cache=kv_cache)[0]
        cross, cross_qk = self.cross_attn(x, xa, kv_cache)
        x = x + cross
        return x + self.mlp(self.ln(x)), cross_qk


class TextDecoder(nn.Module):
    def __init__(self, n_vocab=8000, n_state=512, n_head=16, n_layer=8):
        super().__init__()
        self.token_embedding = nn.Embedding(n_vocab, n_state)
        self.blocks = nn.ModuleList(ResidualAttentionBlock(n_state, n_head) for _ in range(n_layer))

    def forward(self, tokens, xa, kv_cache):
        x, cross_qks = self.token_embedding(tokens), []
        for block in self.blocks:
            x, cross_qk = block(x, xa, kv_cache)
            cross_qks.append(cross_qk)
        return x[:, -1] @ self.token_embedding.weight.T, cross_qks


class AlignAtt:
    def __init__(self, decoder, tokens_per_segment, attn_window):
        self.decoder, self.beam_size = decoder, 5
        self.tokens_per_segment, self.attn_window = tokens_per_segment, attn_window

    def attended_frame(self, accumulated_cross_attns):
        last = torch.stack([qk[:, :, -1].mean((0, 1)) for qk in accumulated_cross_attns[-1]])
        return last.mean(0).argmax()

    @torch.no_grad()
    def infer(self, encoder_feature):
        xa, kv_cache = encoder_feature.expand(self.beam_size, -1, -1), {}
        tokens = torch.zeros(self.beam_size, 1, dtype=torch.long, device="cuda")
        accumulated_cross_attns, frames, hypothesis = [], [], []
        for _ in range(self.tokens_per_segment):
            logits, cross_qks = self.decoder(tokens, xa, kv_cache)
            accumulated_cross_attns.append(cross_qks)
            if self.attn_window:
                accumulated_cross_attns = accumulated_cross_attns[-self.attn_window:]
            frames.append(self.attended_frame(accumulated_cross_attns).cpu())
            tokens = torch.zeros_like(logits.argmax(-1, keepdim=True))
            hypothesis.append(tokens[0].cpu())
        return hypothesis, frames


@expected("kept_tensors", fix=r"\.cpu\(\)|\bdel\b", thread="QuentinFuxa/WhisperLiveKit#283", memory=1000, held_back=True)
def transcribe_live(fixed=False):
    """In `AlignAtt.infer` the cross-attention matrices of all layers and beams (`cross_qks`, 1500 frames wide) of every decoded token are
    appended to `accumulated_cross_attns` and never dropped, though only the last entry is needed; with the budget of 440 tokens they fill
    the GPU. Cured by: only a bounded window of the last cross-attention tensors is kept, and a smaller token budget.
    """
    decoder = TextDecoder().cuda().eval()
    online = AlignAtt(decoder, tokens_per_segment=200 if fixed else 440, attn_window=16 if fixed else None)
    return online.infer(torch.randn(1, 1500, 512).cuda())


# Bayesian optimisation: in each iteration a new Gaussian process is fitted to the points that were observed so far.

class RBFKernel(nn.Module):
    def __init__(self):
        super().__init__()
        self.raw_lengthscale = nn.Parameter(torch.zeros(1))

    def forward(self, x1, x2):
        lengthscale = F.softplus(self.raw_lengthscale)
        return torch.cdist(x1 / lengthscale, x2 / lengthscale).pow(2).mul(-0.5).exp()


class ExactPredictionStrategy:
    def __init__(self, model, train_covar):
        self.model, self.train_covar = model, train_covar
        self.covar_cache = torch.linalg.cholesky(train_covar)
        self.mean_cache = torch.cholesky_solve(model.train_targets, self.covar_cache)

    def exact_prediction(self, test_train_covar):
        mean = test_train_covar @ self.mean_cache
        solved = torch.cholesky_solve(test_train_covar.T, self.covar_cache)
        return mean.squeeze(-1), (1 - (test_train_covar * solved.T).sum(-1)).clamp_min(1e-6)


class SingleTaskGP(nn.Module):
    def __init__(self, train_X, train_Y):
        super().__init__()
        self.train_inputs, self.train_targets = train_X, train_Y
        self.covar_module, self.raw_noise = RBFKernel(), nn.Parameter(torch.zeros(1))
        self.prediction_strategy = None

    def forward(self, x):
        noise = F.softplus(self.raw_noise)
        return self.covar_module(x, x) + noise * torch.eye(len(x), device=x.device)

    def posterior(self, test_X):
        if self.prediction_strategy is None:
            self.prediction_strategy = ExactPredictionStrategy(self, self(self.train_inputs))
        return self.prediction_strategy.exact_prediction(self.covar_module(test_X, self.train_inputs))


class ExpectedImprovement(nn.Module):
    def __init__(self, model, best_f):
        super().__init__()
        self.model, self.best_f = model, best_f

    def forward(self, X):
        mean, variance = self.model.posterior(X)
        sigma = variance.sqrt()
        u = (mean - self.best_f) / sigma
        return sigma * (torch.exp(-0.5 * u * u) / math.sqrt(2 * math.pi) + u * torch.special.ndtr(u))


def propose_candidate(train_X, train_Y):
    gp = SingleTaskGP(train_X, train_Y).cuda()
    with torch.no_grad():
        test_X = torch.rand(256, 2).cuda()
        acq_val = ExpectedImprovement(gp, best_f=1.0)(test_X)
        return acq_val.argmax().item()


@expected("reference_cycle", fix=r"gc\.collect", thread="meta-pytorch/botorch#1585", memory=1000, held_back=True)
def optimise_black_box(fixed=False):
    """Each iteration's `SingleTaskGP` is discarded, but it and its `prediction_strategy` refer to each other (`self.model` in
    `ExactPredictionStrategy`), so the N x N matrices `train_covar` and `covar_cache` of the old models stay on the GPU until Python's cycle
    collector happens to run, which it doesn't in time. Cured by: `gc.collect()` after each iteration.
    """
    candidates = []
    for _ in range(25):
        train_X = torch.rand(3000, 2).cuda()
        train_Y = torch.sin(train_X).sum(1, keepdim=True)
        candidates.append(propose_candidate(train_X, train_Y))
        if fixed:
            gc.collect()
    return candidates


# Reinforcement learning of a language model: answers are generated, then the policy is trained with them.

class PolicyBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Linear(4 * dim, dim))
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x, cache=None, position=0):
        q, k, v = self.qkv(self.norm1(x)).split(self.dim, -1)
        if cache is not None:
            cache[0, :, position:position + x.shape[1]], cache[1, :, position:position + x.shape[1]] = k, v
            k, v = cache[0, :, :position + x.shape[1]], cache[1, :, :position + x.shape[1]]
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=cache is None))
        return x + self.mlp(self.norm2(x))


class PolicyModel(nn.Module):
    def __init__(self, vocab_size=16000, dim=512, layers=8):
        super().__init__()
        self.embed_tokens, self.lm_head = nn.Embedding(vocab_size, dim), nn.Linear(dim, vocab_size, False)
        self.layers = nn.ModuleList(PolicyBlock(dim) for _ in range(layers))

    def forward(self, tokens, kv_cache=None, position=0):
        x = self.embed_tokens(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, None if kv_cache is None else kv_cache[i], position)
        return self.lm_head(x)


class PolicyWorker:
    def __init__(self, tidy):
        self.model, self.tidy = PolicyModel().cuda(), tidy
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, foreach=False)

    def move_optimizer_to_device(self, device):
        for state in self.optimizer.state.values():
            for name, value in state.items():
                state[name] = value.to(device)

    def train(self, tokens, advantages):
        self.move_optimizer_to_device("cuda")
        self.model.train()
        self.optimizer.zero_grad()
        for micro_tokens, micro_advantages in zip(tokens.split(4), advantages.split(4)):
            logprobs = self.model(micro_tokens)[:, :-1].log_softmax(-1)
            taken = logprobs.gather(-1, micro_tokens[:, 1:, None]).squeeze(-1)
            (-(micro_advantages[:, None] * taken).mean()).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=False)
        self.optimizer.step()
        if self.tidy:
            self.optimizer.zero_grad()

    @torch.no_grad()
    def generate(self, prompts, max_new_tokens=6):
        self.move_optimizer_to_device("cpu")
        self.model.eval()
        kv_cache = torch.empty(8, 2, 64, 300, 512, device="cuda")
        tokens, step_input, position = prompts, prompts, 0
        for _ in range(max_new_tokens):
            logits = self.model(step_input, kv_cache[:, :, :len(prompts)], position)[:, -1]
            position += step_input.shape[1]
            step_input = torch.zeros_like(logits.argmax(-1, keepdim=True))
            tokens = torch.cat((tokens, step_input), 1)
        del kv_cache
        torch.cuda.empty_cache()
        return tokens


@expected("gradients_kept", fix="zero_grad", thread="NVIDIA-NeMo/RL#1147", memory=1000, held_back=True)
def grpo_train(fixed=False):
    """After `train` the gradients of the policy (as large as the model) stay in `.grad` since `zero_grad` is only called at the start of
    the next `train`; so during `generate` of the second step there is no room for the `kv_cache`. Cured by: release the gradients
    (`zero_grad`) at the end of training, before the rollouts.
    """
    policy = PolicyWorker(tidy=fixed)
    for _ in range(3):
        prompts = torch.randint(0, 16000, (8, 26)).cuda()
        tokens = policy.generate(prompts)
        rewards = torch.rand(8).cuda()
        policy.train(tokens, rewards - rewards.mean())


# Time series: a forecaster is trained with a soft alignment to the true future.

class SoftDTW(nn.Module):
    def __init__(self, gamma, expand_dot_product):
        super().__init__()
        self.gamma = gamma
        self.dist_func = self.pairwise_l2_squared if expand_dot_product else self.euclidean_dist_func

    @staticmethod
    def euclidean_dist_func(x, y):
        n, m, d = x.size(1), y.size(1), x.size(2)
        x = x.unsqueeze(2).expand(-1, n, m, d)
        y = y.unsqueeze(1).expand(-1, n, m, d)
        return torch.pow(x - y, 2).sum(3)

    @staticmethod
    def pairwise_l2_squared(x, y):
        x_norm, y_norm = (x ** 2).sum(-1).unsqueeze(-1), (y ** 2).sum(-1).unsqueeze(-2)
        return (x_norm + y_norm - 2 * torch.bmm(x, y.transpose(1, 2))).clamp_min(0)

    def softmin(self, *paths):
        return -self.gamma * torch.logsumexp(torch.stack(paths) / -self.gamma, 0)

    def forward(self, X, Y):
        D_xy = self.dist_func(X, Y)
        b, n, m = D_xy.shape
        before_last = torch.full((b, n + 1), 1e8, device=X.device)
        last = before_last.clone()
        before_last[:, 0] = 0
        rows = torch.arange(n, device=X.device)
        for p in range(n + m - 1):
            columns = (p - rows).clamp(0, m - 1)
            cost = D_xy[:, rows, columns]
            r = cost + self.softmin(before_last[:, :-1], last[:, :-1], last[:, 1:])
            before_last, last = last, F.pad(r, (1, 0), value=1e8)
        return last[:, -1]


class Forecaster(nn.Module):
    def __init__(self, channels, hidden):
        super().__init__()
        self.encoder, self.decoder = nn.GRU(channels, hidden, batch_first=True), nn.Linear(hidden, channels)

    def forward(self, past):
        return self.decoder(self.encoder(past)[0])


@expected("all_pairs", fix="split|chunk|@", thread="Maghoumi/pytorch-softdtw-cuda#23", memory=1000, held_back=True)
def train_forecaster(fixed=False):
    """`SoftDTW.euclidean_dist_func` expands both series and computes `x - y` as a tensor of batch x n x m x d (512 MiB, and again for the
    square) only to sum over d; a batch of n x m distances is all that's needed. Cured by: squared distances by norms and a batched matrix
    product (x² + y² - 2xy), without the broadcast.
    """
    model, criterion = Forecaster(64, 128).cuda(), SoftDTW(0.1, expand_dot_product=fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(2):
        past, future = torch.randn(2, 32, 256, 64).cuda().unbind(0)
        loss = criterion(model(past), future).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Speech emotion: features of a pretrained model are written for a corpus of recorded conversations.

class ConvFeatureExtractionModel(nn.Module):
    def __init__(self, dim):
        super().__init__()
        kernels = [(10, 5), (3, 2), (3, 2), (3, 2), (3, 2), (2, 2), (2, 2)]
        self.conv_layers = nn.ModuleList(nn.Sequential(nn.Conv1d(1 if i == 0 else dim, dim, k, stride, bias=False), nn.GELU())
                                         for i, (k, stride) in enumerate(kernels))

    def forward(self, x):
        x = x.unsqueeze(1)
        for conv in self.conv_layers:
            x = conv(x)
        return x.transpose(1, 2)


class AltBlock(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.norm1, self.norm2 = num_heads, nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attn = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        attn = attn.softmax(dim=-1)
        x = x + self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))
        return x + self.mlp(self.norm2(x))


class Data2VecMultiModel(nn.Module):
    def __init__(self, conv_dim=128, dim=384, depth=6):
        super().__init__()
        self.local_encoder, self.project_features = ConvFeatureExtractionModel(conv_dim), nn.Linear(conv_dim, dim)
        self.blocks = nn.ModuleList(AltBlock(dim, 8) for _ in range(depth))

    @torch.no_grad()
    def extract_features(self, source):
        x = self.project_features(self.local_encoder(source))
        for block in self.blocks:
            x = block(x)
        return x


def iemocap_session(seconds, turns):
    wav = torch.randn(seconds * 16000)
    length = len(wav) // turns
    return {"dialog": wav, "sentences": [wav[i * length:(i + 1) * length] for i in range(turns)]}


@expected("all_pairs", fix="split|chunk|scaled_dot", thread="ddlBoJack/emotion2vec#7", memory=1000, held_back=True)
def extract_emotion_features(fixed=False):
    """The recording of a whole conversation (`session["dialog"]`, 95 seconds and more) is put through the model at once instead of the
    single utterances, so the attention matrix (frames x frames x heads) is enormous. Cured by: feed the utterances one by one rather than
    the dialogue.
    """
    model = Data2VecMultiModel().cuda().eval()
    sessions = [iemocap_session(seconds, turns=20) for seconds in (95, 110)]
    features = []
    for session in sessions:
        for wav in session["sentences"] if fixed else [session["dialog"]]:
            source = F.layer_norm(wav.cuda(), wav.shape).view(1, -1)
            features.append(model.extract_features(source).squeeze(0).mean(0).cpu())
    return features


# Inverse problems: an image is restored by turns of a gradient step and a learned denoiser.

class DRUNet(nn.Module):
    def __init__(self, channels=32):
        super().__init__()
        self.m_head, self.m_tail = nn.Conv2d(3, channels, 3, 1, 1, bias=False), nn.Conv2d(channels, 2, 3, 1, 1, bias=False)
        self.m_body = nn.ModuleList(nn.Sequential(nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.ReLU(),
                                                  nn.Conv2d(channels, channels, 3, 1, 1, bias=False)) for _ in range(4))

    def forward(self, x, sigma):
        h = self.m_head(torch.cat((x, torch.full_like(x[:, :1], sigma)), 1))
        for res_block in self.m_body:
            h = h + res_block(h)
        return self.m_tail(h)


class RandomPhaseRetrieval:
    def __init__(self, shape):
        self.diagonals = torch.exp(2j * math.pi * torch.rand(2, *shape)).cuda()

    def B(self, x):
        return torch.fft.fft2(self.diagonals[1] * torch.fft.fft2(self.diagonals[0] * x, norm="ortho"), norm="ortho")

    def B_adjoint(self, y):
        return self.diagonals[0].conj() * torch.fft.ifft2(self.diagonals[1].conj() * torch.fft.ifft2(y, norm="ortho"), norm="ortho")

    def A(self, x):
        return self.B(x).abs() ** 2

    def A_vjp(self, x, v):
        return 2 * self.B_adjoint(self.B(x) * v)


class PGDIteration(nn.Module):
    def __init__(self, denoiser):
        super().__init__()
        self.denoiser = denoiser

    def forward(self, x, y, physics, stepsize, sigma):
        z = x - stepsize * physics.A_vjp(x, physics.A(x) - y)
        denoised = self.denoiser(torch.cat((z.real, z.imag), 1), sigma)
        return torch.complex(denoised[:, :1], denoised[:, 1:])


class BaseOptim(nn.Module):
    def __init__(self, iterator, max_iter, unfold):
        super().__init__()
        self.iterator, self.max_iter, self.unfold = iterator, max_iter, unfold

    def forward(self, y, physics):
        with no_grad_if(not self.unfold):
            x = physics.B_adjoint(y.sqrt())
            for _ in range(self.max_iter):
                x = self.iterator(x, y, physics, stepsize=0.1, sigma=0.05)
        return x


@expected("evaluation_keeps_graphs", fix="no_grad", thread="deepinv/deepinv#301", memory=1000, held_back=True)
def retrieve_phase(fixed=False):
    """`BaseOptim.forward` runs the plug-and-play iterations with gradients enabled though nothing is trained; since each `x` comes from the
    last one through the denoiser, the autograd graph of all iterations is kept. Cured by: `torch.no_grad()` around the iterations in
    `BaseOptim.forward` (not in the unfolded one).
    """
    physics = RandomPhaseRetrieval((1, 1, 256, 256))
    x_phase = torch.exp(1j * torch.rand(1, 1, 256, 256).cuda())
    y = physics.A(x_phase)
    model = BaseOptim(PGDIteration(DRUNet().cuda().eval()), max_iter=60, unfold=not fixed)
    x_est = model(y, physics)
    return x_est.detach().abs().cpu()


# Simulation-based inference: the parameters of a noisy signal are estimated from many simulated ones.

def process_simulations(theta, x, data_device):
    theta, x = theta.to(data_device), x.to(data_device)
    is_valid = torch.ones(len(x), dtype=torch.bool)
    return theta, x, is_valid


class EmbeddingNet(nn.Module):
    def __init__(self, features=24):
        super().__init__()
        self.convs = nn.Sequential(nn.Conv1d(1, 8, 16, 8), nn.ReLU(), nn.Conv1d(8, 8, 16, 8), nn.ReLU(), nn.AdaptiveAvgPool1d(16))
        self.fc = nn.Linear(128, features)

    def forward(self, x):
        return self.fc(self.convs(x.unsqueeze(1)).flatten(1))


class MixtureDensityEstimator(nn.Module):
    def __init__(self, embedding_net, theta_dim, features=24, components=5):
        super().__init__()
        self.embedding_net, self.shape = embedding_net, (components, theta_dim)
        self.net = nn.Sequential(nn.Linear(features, 40), nn.Tanh(), nn.Linear(40, components * (1 + 2 * theta_dim)))

    def log_prob(self, theta, context):
        k, d = self.shape
        logits, means, log_scales = self.net(self.embedding_net(context)).split((k, k * d, k * d), -1)
        means, log_scales = means.view(-1, k, d), log_scales.view(-1, k, d)
        z = (theta.unsqueeze(1) - means) * torch.exp(-log_scales)
        return torch.logsumexp(logits.log_softmax(-1) - (0.5 * z ** 2 + log_scales).sum(-1), -1)


class SNPE_C:
    def __init__(self, embedding_net, theta_dim, device, data_device):
        self._device, self._data_device = device, data_device
        self._neural_net = MixtureDensityEstimator(embedding_net, theta_dim).to(device)
        self._theta_roundwise, self._x_roundwise = [], []

    def append_simulations(self, theta, x):
        theta, x, is_valid = process_simulations(theta, x, self._data_device)
        self._theta_roundwise.append(theta)
        self._x_roundwise.append(x)
        return self

    def train(self, training_batch_size=200, validation_fraction=0.1):
        dataset = TensorDataset(self._theta_roundwise[0], self._x_roundwise[0])
        permuted = torch.randperm(len(dataset))
        train_indices = permuted[:int((1 - validation_fraction) * len(dataset))]
        loader = DataLoader(dataset, training_batch_size, sampler=SubsetRandomSampler(train_indices), drop_last=True)
        optimizer = torch.optim.Adam(self._neural_net.parameters(), lr=5e-4)
        for theta_batch, x_batch in loader:
            optimizer.zero_grad()
            loss = -self._neural_net.log_prob(theta_batch.to(self._device), context=x_batch.to(self._device)).mean()
            loss.backward()
            optimizer.step()
        return self._neural_net


def simulator(theta, samples):
    return torch.rand(1, samples).repeat(len(theta), 1)


@expected("data_on_gpu", fix="DataLoader", thread="sbi-dev/sbi#678", memory=500, held_back=True)
def infer_signal(fixed=False):
    """`append_simulations` (in `process_simulations`) moves the whole set of simulations `theta`, `x` (450 MiB) to the training device,
    though `train` takes batches of 200 from a DataLoader; the data set is larger than the GPU. Cured by: data stay on the CPU and only the
    batches are moved to the device in the training loop.
    """
    theta = torch.rand(3600, 4)
    x = simulator(theta, samples=32768)
    inference = SNPE_C(EmbeddingNet(), theta_dim=4, device="cuda", data_device="cpu" if fixed else "cuda")
    density_estimator = inference.append_simulations(theta, x).train()
    return density_estimator


# A latent function as a sparse Gaussian process inside a larger probabilistic model.

class ScaleRBFKernel(nn.Module):
    def __init__(self):
        super().__init__()
        self.raw_lengthscale, self.raw_outputscale = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x1, x2, diag=False):
        outputscale = F.softplus(self.raw_outputscale)
        if diag:
            return outputscale.expand(len(x1))
        x1, x2 = (x / F.softplus(self.raw_lengthscale) for x in (x1, x2))
        sq_dist = x1.pow(2).sum(-1, keepdim=True) + x2.pow(2).sum(-1) - 2 * x1 @ x2.T
        return outputscale * sq_dist.mul(-0.5).exp()


class FunctionDist:
    def __init__(self, mean, covar=None, variance=None):
        self.mean, self.covar = mean, covar
        self.variance = covar.diagonal() if variance is None else variance
        self.stddev = self.variance.clamp_min(1e-9).sqrt()


class VariationalStrategy(nn.Module):
    def __init__(self, covar_module, inducing_points, only_diagonal):
        super().__init__()
        m = len(inducing_points)
        self.covar_module, self.only_diagonal = covar_module, only_diagonal
        self.inducing_points = nn.Parameter(inducing_points)
        self.variational_mean, self.chol_variational_covar = nn.Parameter(torch.zeros(m)), nn.Parameter(torch.eye(m))

    def forward(self, x, jitter=1e-4):
        z = self.inducing_points
        L = torch.linalg.cholesky(self.covar_module(z, z) + 1e-2 * torch.eye(len(z), device=z.device))
        interp_term = torch.linalg.solve_triangular(L, self.covar_module(z, x), upper=False)
        predictive_mean = interp_term.T @ self.variational_mean
        middle_term = self.chol_variational_covar @ self.chol_variational_covar.T - torch.eye(len(z), device=z.device)
        if self.only_diagonal:
            variance = self.covar_module(x, x, diag=True) + jitter + (interp_term * (middle_term @ interp_term)).sum(0)
            return FunctionDist(predictive_mean, variance=variance)
        data_data_covar = self.covar_module(x, x)
        data_data_covar.diagonal().add_(jitter)
        return FunctionDist(predictive_mean, data_data_covar + interp_term.T @ middle_term @ interp_term)


class PVGPRegressionModel(nn.Module):
    def __init__(self, num_inducing, only_diagonal):
        super().__init__()
        self.strategy = VariationalStrategy(ScaleRBFKernel(), torch.linspace(0, 1, num_inducing)[:, None], only_diagonal)

    def guide(self, x):
        function_dist = self.strategy(x)
        return function_dist.mean + function_dist.stddev * torch.randn_like(function_dist.mean)

    def model(self, function_samples, y):
        rate = F.softplus(function_samples)
        return (rate - y * rate.log()).sum()

    def kl(self):
        m, S = self.strategy.variational_mean, self.strategy.chol_variational_covar
        return 0.5 * (m.square().sum() + S.square().sum() - 2 * S.diagonal().abs().log().sum())


@expected("all_pairs", fix="diag", thread="cornellius-gp/gpytorch#1951", memory=1000, held_back=True)
def infer_latent_function(fixed=False):
    """`VariationalStrategy.forward` evaluates the full N x N covariance of all 10000 training points (`data_data_covar`, only to add the
    jitter and more), though `guide` only uses the mean and the `stddev`, that is the diagonal; the memory grows with the square of the
    data. Cured by: compute only the diagonal (variances) of the covariance for the inputs.
    """
    train_x, train_y = torch.rand(10000, 1).cuda(), torch.poisson(torch.rand(10000)).cuda()
    gp = PVGPRegressionModel(100, only_diagonal=fixed).cuda()
    optimizer = torch.optim.Adam(gp.parameters(), lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        loss = gp.model(gp.guide(train_x), train_y) + gp.kl()
        loss.backward()
        optimizer.step()


# A pole is balanced by what the camera sees, in many environments at once on the GPU.

class CartpoleCameraEnv:
    def __init__(self, num_envs, frames=2, size=72):
        self.num_envs, self.observation_shape = num_envs, (3 * frames, size, size)
        self.frame_stack = torch.zeros(num_envs, *self.observation_shape, device="cuda")

    def render(self):
        return torch.rand(self.num_envs, 3, *self.observation_shape[1:], device="cuda")

    def step(self, actions):
        self.frame_stack = torch.cat((self.frame_stack[:, 3:], self.render()), 1)
        return self.frame_stack, actions.square().sum(-1).neg(), torch.zeros(self.num_envs, device="cuda")


class CameraPolicy(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.cnn = nn.Sequential(nn.Conv2d(channels, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
                                 nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.mu, self.value = nn.Linear(1024, 1), nn.Linear(1024, 1)

    def forward(self, obs):
        features = self.cnn(obs)
        return self.mu(features), self.value(features).squeeze(-1)


def swap_and_flatten01(tensor):
    return tensor.transpose(0, 1).reshape(tensor.shape[0] * tensor.shape[1], *tensor.shape[2:])


class ExperienceBuffer:
    def __init__(self, horizon_length, num_envs, observation_shape):
        shapes = {"obses": observation_shape, "actions": (1,), "rewards": (), "values": (), "dones": ()}
        self.tensor_dict = {k: torch.zeros(horizon_length, num_envs, *s, device="cuda") for k, s in shapes.items()}

    def update_data(self, name, index, value):
        self.tensor_dict[name][index] = value

    def get_transformed_list(self, transform_op):
        return {name: transform_op(value) for name, value in self.tensor_dict.items()}


class A2CAgent:
    def __init__(self, env, horizon_length, minibatch_size=256):
        self.env, self.horizon_length, self.minibatch_size = env, horizon_length, minibatch_size
        self.model = CameraPolicy(env.observation_shape[0]).cuda()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.experience_buffer = ExperienceBuffer(horizon_length, env.num_envs, env.observation_shape)

    @torch.no_grad()
    def play_steps(self):
        obs = self.env.frame_stack
        for n in range(self.horizon_length):
            mu, values = self.model(obs)
            actions = mu + torch.randn_like(mu)
            next_obs, rewards, dones = self.env.step(actions)
            for name, value in dict(obses=obs, actions=actions, rewards=rewards, values=values, dones=dones).items():
                self.experience_buffer.update_data(name, n, value)
            obs = next_obs
        return self.experience_buffer.get_transformed_list(swap_and_flatten01)

    def train_epoch(self):
        batch = self.play_steps()
        for start in range(0, len(batch["obses"]), self.minibatch_size):
            part = {k: v[start:start + self.minibatch_size] for k, v in batch.items()}
            mu, values = self.model(part["obses"])
            advantages = part["rewards"] - part["values"]
            loss = (advantages[:, None] * (part["actions"] - mu).square()).mean() + (values - part["rewards"]).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


@expected("large_result", fix="part|half", thread="isaac-sim/IsaacLab#7147", memory=1000, held_back=True)
def train_cartpole_camera(fixed=False):
    """The rollout of 64 steps x 64 environments of two-frame camera images is held whole on the GPU in the `ExperienceBuffer` as floats
    (about 490 MiB), and `swap_and_flatten01` makes a second copy of all of it before training. `horizon_length` is too long for camera
    observations. Cured by: rollout horizon halved from 64 to 32.
    """
    agent = A2CAgent(CartpoleCameraEnv(num_envs=64), horizon_length=32 if fixed else 64)
    for _ in range(2):
        agent.train_epoch()


# Granular physics: a learned simulator of particles runs backwards to find the velocities from which they started.

def build_mlp(input_size, hidden_size, output_size):
    return nn.Sequential(nn.Linear(input_size, hidden_size), nn.ReLU(), nn.Linear(hidden_size, hidden_size), nn.ReLU(),
                         nn.Linear(hidden_size, output_size))


class InteractionNetwork(nn.Module):
    def __init__(self, latent_dim):
        super().__init__()
        self.edge_fn, self.node_fn = build_mlp(3 * latent_dim, latent_dim, latent_dim), build_mlp(2 * latent_dim, latent_dim, latent_dim)

    def forward(self, x, senders, receivers, edge_features):
        messages = self.edge_fn(torch.cat((x[receivers], x[senders], edge_features), -1))
        aggregated = torch.zeros_like(x).index_add(0, receivers, messages)
        return x + self.node_fn(torch.cat((x, aggregated), -1)), edge_features + messages


class LearnedSimulator(nn.Module):
    def __init__(self, latent_dim=64, message_passing_steps=3, neighbors=8):
        super().__init__()
        self.neighbors = neighbors
        self.node_encoder, self.edge_encoder = build_mlp(4, latent_dim, latent_dim), build_mlp(3, latent_dim, latent_dim)
        self.gnn_stacks = nn.ModuleList(InteractionNetwork(latent_dim) for _ in range(message_passing_steps))
        self.node_decoder = build_mlp(latent_dim, latent_dim, 2)

    @torch.no_grad()
    def compute_graph_connectivity(self, positions):
        receivers = torch.arange(len(positions), device=positions.device).repeat_interleave(self.neighbors)
        return torch.cdist(positions, positions).topk(self.neighbors, largest=False).indices.flatten(), receivers

    def predict_positions(self, current_positions, velocities):
        senders, receivers = self.compute_graph_connectivity(current_positions)
        displacements = current_positions[senders] - current_positions[receivers]
        x = self.node_encoder(torch.cat((current_positions, velocities), -1))
        edges = self.edge_encoder(torch.cat((displacements, displacements.norm(dim=-1, keepdim=True)), -1))
        for gnn in self.gnn_stacks:
            x, edges = gnn(x, senders, receivers, edges)
        new_velocities = velocities + self.node_decoder(x)
        return current_positions + new_velocities, new_velocities


def rollout_with_grad(simulator, positions, velocities, nsteps, use_checkpoint):
    predictions = []
    for _ in range(nsteps):
        if use_checkpoint:
            positions, velocities = checkpoint(simulator.predict_positions, positions, velocities, use_reentrant=False)
        else:
            positions, velocities = simulator.predict_positions(positions, velocities)
        predictions.append(positions)
    return torch.stack(predictions)


@expected("several_forward_passes", fix="checkpoint", thread="geoelements/gns#46", memory=1000, held_back=True)
def find_initial_velocity(fixed=False):
    """`rollout_with_grad` keeps the activations of the graph network of all 120 simulated steps for one backward through the whole rollout
    to `initial_velocity`; memory grows with each step of the rollout. Cured by: gradient checkpointing of each step of the rollout.
    """
    simulator = LearnedSimulator().cuda().eval().requires_grad_(False)
    initial_positions, target = torch.rand(1000, 2).cuda(), torch.rand(1000, 2).cuda()
    initial_velocity = torch.zeros(1000, 2, device="cuda", requires_grad=True)
    optimizer = torch.optim.Adam([initial_velocity], lr=0.01)
    for _ in range(2):
        rollout = rollout_with_grad(simulator, initial_positions, initial_velocity, nsteps=120, use_checkpoint=fixed)
        loss = (rollout[-1] - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
