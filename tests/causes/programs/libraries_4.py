"""Programs after public threads: trainers, evaluators, metrics and models of widely used libraries, as people ran them."""
import copy
import gc
import math
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from expected import expected


# Bayesian optimization: a Gaussian process whose length scales were sampled, and the acquisition at random candidates.

class MaternKernel:
    def __init__(self, inv_length_sq, outputscale):
        self.lengthscale = inv_length_sq.rsqrt().unsqueeze(-2)
        self.outputscale = outputscale[:, None, None]

    def __call__(self, x1, x2):
        distance = torch.cdist(x1 / self.lengthscale, x2 / self.lengthscale) * math.sqrt(5)
        return self.outputscale * (1 + distance + distance.square() / 3) * torch.exp(-distance)


class ExactPredictionStrategy:
    def __init__(self, kernel, train_X, train_Y, noise, contract):
        train_covar = kernel(train_X, train_X)
        train_covar.diagonal(dim1=-2, dim2=-1).add_(noise[:, None])
        root = torch.linalg.cholesky(train_covar)
        self.mean_cache = torch.cholesky_solve(train_Y.expand(len(noise), -1, -1), root)
        self.covar_cache = torch.cholesky_inverse(root)
        self.contract = contract

    def exact_predictive_mean(self, test_train_covar):
        return (test_train_covar * self.mean_cache.transpose(-1, -2)).sum(-1)

    def exact_predictive_covar(self, test_test_covar, test_train_covar):
        if self.contract == "einsum":
            correction = torch.einsum("bsqn,snm->bsqm", test_train_covar, self.covar_cache)
        else:
            correction = test_train_covar.matmul(self.covar_cache)
        return test_test_covar - correction.matmul(test_train_covar.transpose(-1, -2))


class SaasFullyBayesianSingleTaskGP:
    def __init__(self, train_X, train_Y, contract="matmul"):
        self.train_X, self.train_Y, self.contract = train_X, train_Y, contract

    def load_mcmc_samples(self, mcmc_samples):
        self.kernel = MaternKernel(mcmc_samples["inv_length_sq"], mcmc_samples["outputscale"])
        self.prediction_strategy = ExactPredictionStrategy(
            self.kernel, self.train_X, self.train_Y, mcmc_samples["noise"], self.contract)

    def posterior(self, X):
        X = X.unsqueeze(-3)
        test_train_covar = self.kernel(X, self.train_X)
        mean = self.prediction_strategy.exact_predictive_mean(test_train_covar)
        covar = self.prediction_strategy.exact_predictive_covar(self.kernel(X, X), test_train_covar)
        return mean, covar.diagonal(dim1=-2, dim2=-1)


def upper_confidence_bound(model, X, beta=0.2):
    mean, variance = model.posterior(X)
    return (mean + (beta * variance.clamp_min(1e-9)).sqrt()).mean(1).squeeze(-1)


@expected("large_intermediate", fix="@|einsum|part", thread="meta-pytorch/botorch#2310", memory=1000, held_back=True)
def saas_candidates(fixed=False):
    """In `ExactPredictionStrategy.exact_predictive_covar`, `test_train_covar.matmul(self.covar_cache)` multiplies [64, 16, 1, 400] by [16,
    400, 400]; because both have batch dimensions, matmul really copies `covar_cache` once for each of the 64 candidates (64 x 16 x 400 x
    400 doubles), although q is only 1. Cured by: the contraction done without broadcasting the cache (einsum).
    """
    tkwargs = {"device": "cuda", "dtype": torch.double}
    n_train, d, num_samples, raw_samples = 400, 10, 16, 64
    train_X = torch.rand(n_train, d, **tkwargs)
    gp = SaasFullyBayesianSingleTaskGP(train_X, torch.sin(train_X[:, :1]), "einsum" if fixed else "matmul")
    gp.load_mcmc_samples({"inv_length_sq": torch.rand(num_samples, d, **tkwargs), "outputscale": torch.rand(num_samples, **tkwargs),
                          "noise": torch.rand(num_samples, **tkwargs)})
    with torch.no_grad():
        values = upper_confidence_bound(gp, torch.rand(raw_samples, 1, d, **tkwargs))
    return values.topk(4).indices.tolist()


# Reinforcement learning from feedback: PPO on a language model with a value head and a reference model.

class CausalLMWithValueHead(nn.Module):
    def __init__(self, vocab_size=32000, n_embd=256):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.h = nn.ModuleList(nn.TransformerEncoderLayer(n_embd, 4, 4 * n_embd, 0, batch_first=True) for _ in range(2))
        self.v_head = nn.Linear(n_embd, 1)

    def forward(self, input_ids):
        hidden_states = self.wte(input_ids)
        for block in self.h:
            hidden_states = block(hidden_states)
        return F.linear(hidden_states, self.wte.weight), self.v_head(hidden_states).squeeze(-1)


def logprobs_from_logits(logits, labels):
    return F.log_softmax(logits, -1).gather(2, labels.unsqueeze(-1)).squeeze(-1)


def entropy_from_logits(logits):
    pd = F.softmax(logits, -1)
    return torch.logsumexp(logits, -1) - (pd * logits).sum(-1)


class PPOTrainer:
    def __init__(self, model, ref_model, forward_batch_size=4, slim=False):
        self.model, self.ref_model, self.slim = model, ref_model, slim
        self.forward_batch_size = forward_batch_size
        self.optimizer = torch.optim.Adam(model.parameters(), 1e-5)

    def batched_forward_pass(self, model, queries, responses, return_logits=True):
        all_logprobs, all_logits, all_values = [], [], []
        for i in range(0, len(queries), self.forward_batch_size):
            input_ids = torch.cat((queries[i:i + self.forward_batch_size], responses[i:i + self.forward_batch_size]), 1)
            logits, values = model(input_ids)
            if return_logits:
                all_logits.append(logits)
            all_values.append(values)
            all_logprobs.append(logprobs_from_logits(logits[:, :-1], input_ids[:, 1:]))
        return torch.cat(all_logprobs), torch.cat(all_logits)[:, :-1] if return_logits else None, torch.cat(all_values)[:, :-1]

    def train_minibatch(self, old_logprobs, values, logprobs, logits, vpreds, rewards):
        ratio = torch.exp(logprobs - old_logprobs)
        pg_loss = -(rewards * ratio.clamp(0.8, 1.2)).mean()
        loss = pg_loss + 0.1 * (vpreds - rewards).square().mean()
        entropy = entropy_from_logits(logits.detach()).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return entropy

    def step(self, queries, responses, scores):
        with torch.no_grad():
            all_logprobs, _, values = self.batched_forward_pass(self.model, queries, responses, not self.slim)
            ref_logprobs, _, _ = self.batched_forward_pass(self.ref_model, queries, responses, not self.slim)
        rewards = scores[:, None] - 0.2 * (all_logprobs - ref_logprobs)
        for i in range(0, len(queries), self.forward_batch_size):
            part = slice(i, i + self.forward_batch_size)
            logprobs, logits, vpreds = self.batched_forward_pass(self.model, queries[part], responses[part])
            entropy = self.train_minibatch(all_logprobs[part], values[part], logprobs, logits, vpreds, rewards[part])
        return entropy.item()


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="huggingface/trl#234", memory=1000, held_back=True)
def gpt2_sentiment(fixed=False):
    """`PPOTrainer.batched_forward_pass` keeps the full `logits` (batch x tokens x vocabulary) of every small batch in `all_logits` for the
    whole batch of 128, although `step` throws them away and needs only logprobs and values. Cured by: `return_logits=False` where the
    logits are not needed, they are then not stored.
    """
    model, ref_model = CausalLMWithValueHead().cuda(), CausalLMWithValueHead().cuda()
    ppo_trainer = PPOTrainer(model, ref_model, slim=fixed)
    query_tensors, response_tensors = torch.randint(0, 32000, (2, 128, 32)).cuda()
    return ppo_trainer.step(query_tensors, response_tensors, torch.rand(128).cuda())


# Speech: the transducer's loss as a function of its own, measured on logits of the joint network.

def rnnt_gpu(acts, labels, act_lens, label_lens, costs, grads, blank_label):
    denom = torch.stack([torch.logsumexp(acts[:, t], -1) for t in range(acts.shape[1])], 1)
    alphas = torch.zeros_like(denom)
    for u in range(1, denom.shape[2]):
        alphas[:, :, u] = torch.logaddexp(alphas[:, :, u - 1] - denom[:, :, u - 1], acts[:, :, u, blank_label] - denom[:, :, u])
    torch.softmax(acts, -1, out=grads)
    costs.copy_(-alphas[:, -1, -1])


class _RNNTLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, acts, labels, act_lens, label_lens, blank, through_saved):
        grads = torch.zeros_like(acts)
        costs = torch.zeros(acts.shape[0], device=acts.device)
        rnnt_gpu(acts, labels, act_lens, label_lens, costs, grads, blank)
        ctx.through_saved = through_saved
        if through_saved:
            ctx.save_for_backward(grads)
        else:
            ctx.grads = grads
        return costs

    @staticmethod
    def backward(ctx, grad_output):
        grads = ctx.saved_tensors[0] if ctx.through_saved else ctx.grads
        return grads.mul_(grad_output.view(-1, 1, 1, 1)), None, None, None, None, None


class RNNTLoss(nn.Module):
    def __init__(self, blank=0, through_saved=False):
        super().__init__()
        self.blank, self.through_saved = blank, through_saved

    def forward(self, acts, labels, act_lens, label_lens):
        return _RNNTLoss.apply(acts, labels, act_lens, label_lens, self.blank, self.through_saved)


@expected("copied_gradient", fix="save_for_backward", thread="NVIDIA-NeMo/Speech#11144", memory=1000, held_back=True)
def transducer_memory(fixed=False):
    """`_RNNTLoss.forward` puts the gradient tensor directly on `ctx` (`ctx.grads = grads`); as ctx still refers to it in backward, autograd
    has to copy it into `logits.grad`, so three tensors of the size of the logits exist rather than two. Cured by:
    `ctx.save_for_backward(grads)` and `ctx.saved_tensors`.
    """
    loss = RNNTLoss(blank=511, through_saved=fixed)
    for batch_size, frames, target_length in ((8, 120, 40), (16, 120, 40), (32, 120, 40)):
        logits = torch.rand(batch_size, frames, target_length + 1, 512, device="cuda", requires_grad=True)
        encoder_lengths = torch.full((batch_size,), frames, device="cuda")
        label_lengths = torch.full((batch_size,), target_length, device="cuda")
        targets = torch.randint(0, 511, (batch_size, target_length), device="cuda")
        loss(logits, targets, encoder_lengths, label_lengths).sum().backward()
        print(batch_size, "peak", torch.cuda.max_memory_allocated() / 2 ** 30)
        del logits


# Medical images: a bundle that segments a whole body into 104 structures, and its evaluation.

class SegResNet(nn.Module):
    def __init__(self, init_filters=8, out_channels=105):
        super().__init__()
        self.conv_init = nn.Conv3d(1, init_filters, 3, padding=1)
        self.down = nn.Sequential(nn.Conv3d(init_filters, 2 * init_filters, 3, 2, 1), nn.GroupNorm(4, 2 * init_filters), nn.ReLU())
        self.up = nn.Sequential(nn.Conv3d(2 * init_filters, init_filters, 1), nn.Upsample(scale_factor=2, mode="trilinear"))
        self.conv_final = nn.Conv3d(init_filters, out_channels, 1)

    def forward(self, x):
        x = self.conv_init(x)
        return self.conv_final(x + self.up(self.down(x)))


def one_hot(labels, num_classes):
    return torch.zeros(labels.shape[0], num_classes, *labels.shape[2:], device=labels.device).scatter_(1, labels, 1)


class Activationsd:
    def __call__(self, d):
        d["pred"] = torch.softmax(d["pred"], 1)
        return d


class Invertd:
    def __call__(self, d):
        d["pred"] = F.interpolate(d["pred"], d["image_meta"]["spatial_shape"], mode="trilinear")
        d["label"] = d["label_original"].to(d["pred"].device)
        return d


class AsDiscreted:
    def __init__(self, to_onehot=None):
        self.to_onehot = to_onehot

    def __call__(self, d):
        d["pred"] = d["pred"].argmax(1, keepdim=True)
        for key in ("pred", "label") if self.to_onehot else ():
            d[key] = one_hot(d[key], self.to_onehot)
        return d


class MeanDice:
    def __init__(self, num_classes=105, indexed=False):
        self.num_classes, self.indexed, self.scores = num_classes, indexed, []

    def update(self, y_pred, y):
        for c in range(1, self.num_classes):
            y_pred_c, y_c = ((t[:, 0] == c).float() if self.indexed else t[:, c] for t in (y_pred, y))
            self.scores.append(2 * (y_pred_c * y_c).mean() / (y_pred_c.mean() + y_c.mean() + 1e-6))

    def aggregate(self):
        return torch.stack(self.scores).mean().item()


@expected("large_result", fix="fewer|smaller", thread="Project-MONAI/model-zoo#417", memory=1000, held_back=True)
def evaluate_wholebody(fixed=False):
    """The evaluation's post-processing works on all 105 channels: `Invertd` interpolates the 105-channel softmax to the original, large
    grid and `AsDiscreted(to_onehot=105)` makes 105-channel one-hot float volumes of `pred` and `label` too. Cured by: evaluation like the
    validation: no inversion to the original grid, class indices (argmax) with no one-hot, Dice counted per class.
    """
    network = SegResNet().cuda().eval()
    postprocessing = [Activationsd(), AsDiscreted()] if fixed else [Activationsd(), Invertd(), AsDiscreted(to_onehot=105)]
    val_mean_dice = MeanDice(indexed=fixed)
    for _ in range(2):
        d = {"image": torch.randn(1, 1, 72, 72, 64).cuda(), "label": torch.randint(0, 105, (1, 1, 72, 72, 64)).cuda(),
             "label_original": torch.randint(0, 105, (1, 1, 112, 112, 96)), "image_meta": {"spatial_shape": (112, 112, 96)}}
        with torch.no_grad():
            d["pred"] = network(d["image"])
            for transform in postprocessing:
                d = transform(d)
            val_mean_dice.update(d["pred"], d["label"])
    return val_mean_dice.aggregate()


# Several models one after another, with a small helper that prepares what a training loop needs.

class AcceleratedOptimizer:
    def __init__(self, optimizer, scaler=None):
        self.optimizer, self.scaler = optimizer, scaler

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        self.optimizer.step()


class Accelerator:
    def __init__(self, device="cuda"):
        self.device = torch.device(device)
        self._optimizers = []

    def prepare(self, *args):
        result = []
        for obj in args:
            if isinstance(obj, nn.Module):
                obj = obj.to(self.device)
            elif isinstance(obj, torch.optim.Optimizer):
                obj = AcceleratedOptimizer(obj)
                self._optimizers.append(obj)
            result.append(obj)
        return tuple(result)

    def backward(self, loss):
        loss.backward()

    def free_memory(self):
        self._optimizers = []
        gc.collect()
        torch.cuda.empty_cache()


class SequenceClassifier(nn.Module):
    def __init__(self, hidden_size=512, num_labels=2):
        super().__init__()
        self.word_embeddings = nn.Embedding(4000, hidden_size)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(hidden_size, 8, 1024, 0.1, batch_first=True), 2)
        self.classifier = nn.Linear(hidden_size, num_labels)

    def forward(self, input_ids, labels):
        return F.cross_entropy(self.classifier(self.encoder(self.word_embeddings(input_ids)).mean(1)), labels)


def training_function(accelerator, learning_rate, seed):
    torch.manual_seed(seed)
    model = SequenceClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(2):
        input_ids, labels = torch.randint(0, 4000, (16, 64)).cuda(), torch.randint(0, 2, (16,)).cuda()
        optimizer.zero_grad()
        loss = model(input_ids, labels)
        accelerator.backward(loss)
        optimizer.step()
    return loss.item()


@expected("kept_tensors", fix=r"clear\(\)", thread="huggingface/accelerate#84", memory=1000, held_back=True)
def glue_seeds(fixed=False):
    """One `Accelerator` is reused for all 15 trainings and `prepare` appends each optimizer to `accelerator._optimizers`, so the optimizers
    of all former trainings, with their models' parameters, gradients and Adam states, stay on the GPU. Cured by:
    `accelerator.free_memory()` between trainings (clears the list).
    """
    accelerator = Accelerator()
    results = []
    for learning_rate in (1e-5, 2e-5, 5e-5):
        for seed in range(5):
            results.append((learning_rate, seed, training_function(accelerator, learning_rate, seed)))
            if fixed:
                accelerator.free_memory()
    return results


# A module with steps and hooks, and the trainer that calls them.

class LightningModule(nn.Module):
    def log(self, name, value):
        self.trainer.callback_metrics[name] = value.detach()

    def training_epoch_end(self, outputs):
        pass


class Trainer:
    def __init__(self, max_epochs):
        self.max_epochs, self.callback_metrics = max_epochs, {}

    @staticmethod
    def is_overridden(method_name, instance):
        return getattr(type(instance), method_name) is not getattr(LightningModule, method_name)

    def advance(self, batch, batch_idx):
        batch = batch.to("cuda", non_blocking=True)
        output = self.model.training_step(batch, batch_idx)
        output = output if isinstance(output, dict) else {"loss": output}
        self.optimizer.zero_grad()
        output["loss"].backward()
        self.optimizer.step()
        return {name: value.detach() for name, value in output.items()}

    def fit(self, model, train_dataloader):
        self.model, model.trainer = model.cuda(), self
        self.optimizer = model.configure_optimizers()
        for _ in range(self.max_epochs):
            epoch_outputs = []
            for batch_idx, batch in enumerate(train_dataloader):
                batch_output = self.advance(batch, batch_idx)
                if self.is_overridden("training_epoch_end", model):
                    epoch_outputs.append(batch_output)
            model.training_epoch_end(epoch_outputs)


class LitAutoEncoder(LightningModule):
    def __init__(self, features=12000):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(features, 64), nn.Linear(64, features)

    def training_step(self, batch, batch_idx):
        x_hat = self.decoder(F.relu(self.encoder(batch)))
        loss = F.mse_loss(x_hat, batch)
        self.log("train_loss", loss)
        return {"loss": loss, "x": batch, "x_hat": x_hat}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


class LitAutoEncoderWithSummary(LitAutoEncoder):
    def training_epoch_end(self, outputs):
        print("epoch loss", torch.stack([out["loss"] for out in outputs]).mean().item())


@expected("kept_tensors", fix=r"\.cpu\(\)|detach", thread="Lightning-AI/pytorch-lightning#15514", memory=1000, held_back=True)
def fit_autoencoder(fixed=False):
    """`training_step` returns `x` and `x_hat` in its output dict, and since the module overrides `training_epoch_end`, `Trainer.fit`
    collects the outputs of every batch of the epoch in `epoch_outputs` on the GPU, though only the loss is used. Cured by:
    `training_epoch_end` not implemented (then outputs aren't collected) / not returning the large tensors.
    """
    model = LitAutoEncoder() if fixed else LitAutoEncoderWithSummary()
    data = torch.randn(256, 12000)
    trainer = Trainer(max_epochs=1)
    trainer.fit(model, (data for _ in range(48)))
    return trainer.callback_metrics["train_loss"].item()


# Speech synthesis with the voice of a recording.

class LogMelFbank(nn.Module):
    def __init__(self, n_fft=1024, hop_length=256, n_mels=80):
        super().__init__()
        self.n_fft, self.hop_length = n_fft, hop_length
        self.register_buffer("window", torch.hann_window(n_fft))
        self.register_buffer("melmat", torch.rand(n_fft // 2 + 1, n_mels))

    def forward(self, speech):
        amplitude = torch.stft(speech, self.n_fft, self.hop_length, window=self.window, return_complex=True).abs()
        return (amplitude.transpose(1, 2) @ self.melmat).clamp_min(1e-10).log10()


class ReferenceEncoder(nn.Module):
    def __init__(self, conv_chans=(32, 32, 64, 64), gru_units=128):
        super().__init__()
        convs, in_chans = [], 1
        for chans in conv_chans:
            convs += [nn.Conv2d(in_chans, chans, 3, 2, 1, bias=False), nn.BatchNorm2d(chans), nn.ReLU()]
            in_chans = chans
        self.convs = nn.Sequential(*convs)
        self.out = nn.Linear(in_chans * 5, gru_units)

    def forward(self, feats):
        hs = self.convs(feats.unsqueeze(1))
        return torch.tanh(self.out(hs.transpose(1, 2).flatten(2))).mean(1)


class MultiSpeakerTTS(nn.Module):
    def __init__(self, idim=80, adim=256, odim=80):
        super().__init__()
        self.feats_extract = LogMelFbank()
        self.gst = ReferenceEncoder(gru_units=adim)
        self.embed = nn.Embedding(idim, adim)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(adim, 4, 1024, batch_first=True), 3)
        self.feat_out = nn.Linear(adim, odim)

    @torch.no_grad()
    def inference(self, text, speech):
        style_embs = self.gst(self.feats_extract(speech.unsqueeze(0)))
        hs = self.encoder(self.embed(text).unsqueeze(0)) + style_embs.unsqueeze(1)
        return self.feat_out(hs.repeat_interleave(8, 1))


def read_reference(seconds, fs=24000):
    return torch.randn(seconds * fs)


@expected("larger_step", fix="cut|part", thread="espnet/espnet#2575", memory=1000, held_back=True)
def tts_demo(fixed=False):
    """The reference recording for the second speaker (`p226`) is 20 minutes long, so the spectrogram in `LogMelFbank` / the convolutions of
    `ReferenceEncoder` get enormous; the first, with 6 seconds, was fine. Cured by: a short reference waveform.
    """
    text2speech = MultiSpeakerTTS().cuda().eval()
    references = {"p225": read_reference(6), "p226": read_reference(8 if fixed else 20 * 60)}
    feats_gen = {}
    for spk, speech in references.items():
        text = torch.randint(0, 80, (60,)).cuda()
        feats_gen[spk] = text2speech.inference(text, speech.cuda()).cpu()
    return len(feats_gen)


# One base model and many low-rank adapters, each of which is tried.

class LoraLinear(nn.Module):
    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A, self.lora_B, self.active_adapter = nn.ModuleDict(), nn.ModuleDict(), None

    def update_layer(self, adapter_name, r):
        device = self.base_layer.weight.device
        self.lora_A[adapter_name] = nn.Linear(self.base_layer.in_features, r, bias=False, device=device)
        self.lora_B[adapter_name] = nn.Linear(r, self.base_layer.out_features, bias=False, device=device)

    def forward(self, x):
        result = self.base_layer(x)
        if self.active_adapter in self.lora_A:
            result = result + self.lora_B[self.active_adapter](self.lora_A[self.active_adapter](x))
        return result


class DecoderLayer(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (proj(x).unflatten(-1, (8, -1)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return x + self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class PeftModel(nn.Module):
    def __init__(self, base_model):
        super().__init__()
        self.base_model = base_model
        for layer in base_model:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                setattr(layer, name, LoraLinear(getattr(layer, name)))

    def lora_layers(self):
        return [module for module in self.modules() if isinstance(module, LoraLinear)]

    def load_adapter(self, adapter_name, r=64):
        for layer in self.lora_layers():
            layer.update_layer(adapter_name, r)
        self.set_adapter(adapter_name)

    def set_adapter(self, adapter_name):
        for layer in self.lora_layers():
            layer.active_adapter = adapter_name

    def delete_adapter(self, adapter_name):
        for layer in self.lora_layers():
            del layer.lora_A[adapter_name], layer.lora_B[adapter_name]

    def forward(self, hidden_states):
        return self.base_model(hidden_states)


@torch.no_grad()
def evaluate(peft_model, eval_batches=2):
    return sum(peft_model(torch.randn(4, 128, 1024, device="cuda")).square().mean().item() for _ in range(eval_batches))


@expected("kept_tensors", fix=r"\bdel\b", thread="huggingface/peft#738", memory=1000, held_back=True)
def compare_adapters(fixed=False):
    """Each `peft_model.load_adapter(adapter_id)` adds another pair of LoRA layers to `lora_A` / `lora_B` of every `LoraLinear`, and the
    adapters that were already evaluated are never removed. Cured by: `delete_adapter(adapter_id)` after use.
    """
    base_model = nn.Sequential(*[DecoderLayer(1024) for _ in range(10)]).cuda()
    peft_model = PeftModel(base_model).eval()
    adapter_ids = [f"run-{seed}" for seed in range(48)]
    scores = {}
    for adapter_id in adapter_ids:
        peft_model.load_adapter(adapter_id)
        scores[adapter_id] = evaluate(peft_model)
        if fixed:
            peft_model.delete_adapter(adapter_id)
    return scores


# Fine-tuning of a diffusion model, of which only the text encoder is to learn.

class CrossAttnBlock(nn.Module):
    def __init__(self, channels, cross_attention_dim):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, channels), nn.GroupNorm(8, channels)
        self.conv1, self.conv2 = nn.Conv2d(channels, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)
        self.to_q = nn.Linear(channels, channels)
        self.to_kv = nn.Linear(cross_attention_dim, 2 * channels)

    def forward(self, hidden_states, encoder_hidden_states):
        h = self.conv1(F.silu(self.norm1(hidden_states)))
        h = hidden_states + self.conv2(F.silu(self.norm2(h)))
        q = self.to_q(h.flatten(2).transpose(1, 2))
        k, v = self.to_kv(encoder_hidden_states).chunk(2, -1)
        attention = torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, -1) @ v
        return h + attention.transpose(1, 2).reshape(h.shape)


class UNet2DConditionModel(nn.Module):
    def __init__(self, channels=64, cross_attention_dim=128, num_blocks=16):
        super().__init__()
        self.gradient_checkpointing = False
        self.conv_in, self.conv_out = nn.Conv2d(4, channels, 3, padding=1), nn.Conv2d(channels, 4, 3, padding=1)
        self.blocks = nn.ModuleList(CrossAttnBlock(channels, cross_attention_dim) for _ in range(num_blocks))

    def enable_gradient_checkpointing(self):
        self.gradient_checkpointing = True

    def forward(self, sample, encoder_hidden_states):
        sample = self.conv_in(sample)
        for block in self.blocks:
            if self.training and self.gradient_checkpointing:
                sample = checkpoint(block, sample, encoder_hidden_states, use_reentrant=False)
            else:
                sample = block(sample, encoder_hidden_states)
        return self.conv_out(sample)


class EveryDreamTrainer:
    def __init__(self, disable_unet_training, gradient_checkpointing, unet_keeps_mode=False):
        self.unet = UNet2DConditionModel().cuda()
        self.text_encoder = nn.Sequential(nn.Embedding(5000, 128), nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)).cuda()
        if gradient_checkpointing:
            self.unet.enable_gradient_checkpointing()
        self.unet.requires_grad_(not disable_unet_training)
        self.unet.train(unet_keeps_mode or not disable_unet_training)
        self.text_encoder.train()
        self.optimizer = torch.optim.AdamW(self.text_encoder.parameters(), 1e-6)

    def get_model_prediction_and_target(self, latents, tokens):
        noise = torch.randn_like(latents)
        encoder_hidden_states = self.text_encoder(tokens)
        return self.unet(latents + noise, encoder_hidden_states), noise

    def train_step(self, latents, tokens):
        model_pred, target = self.get_model_prediction_and_target(latents, tokens)
        loss = F.mse_loss(model_pred, target)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


@expected("checkpoints_without_effect", fix=r"train\(\)", thread="victorchall/EveryDream2trainer#246", memory=1000, held_back=True)
def train_text_encoder(fixed=False):
    """With UNet training disabled the `unet` is put in eval mode, and the UNet checkpoints its blocks only `if self.training`; so gradient
    checkpointing is silently off, and since gradients flow through the frozen UNet to the text encoder, all its activations are stored.
    Cured by: unet in train() mode when gradient checkpointing is enabled.
    """
    trainer = EveryDreamTrainer(disable_unet_training=True, gradient_checkpointing=True, unet_keeps_mode=fixed)
    losses = []
    for step in range(3):
        losses.append(trainer.train_step(torch.randn(8, 4, 64, 64).cuda(), torch.randint(0, 5000, (8, 77)).cuda()))
    return losses


# A training with averaged weights, as an algorithm that the trainer runs at its events.

class StableDiffusionLike(nn.Module):
    def __init__(self):
        super().__init__()
        self.text_encoder = nn.Sequential(nn.Embedding(30000, 768), *[nn.Linear(768, 768) for _ in range(28)])
        self.unet = nn.Sequential(*[m for _ in range(26) for m in (nn.Linear(1024, 1024), nn.SiLU())])
        self.to_context = nn.Linear(768, 1024)
        self.text_encoder.requires_grad_(False)

    def forward(self, batch):
        latents, tokens = batch
        with torch.no_grad():
            context = self.text_encoder(tokens).mean(1)
        return F.mse_loss(self.unet(latents + self.to_context(context)), latents)


class EMAModels:
    def __init__(self, model, smoothing):
        self.smoothing = smoothing
        self.ema_model, self.training_model = copy.deepcopy(model), copy.deepcopy(model)

    @torch.no_grad()
    def update(self, model):
        for ema_param, param in zip(self.ema_model.parameters(), model.parameters()):
            ema_param.lerp_(param, 1 - self.smoothing)

    @contextmanager
    def averaged(self, model):
        self.training_model.load_state_dict(model.state_dict())
        model.load_state_dict(self.ema_model.state_dict())
        yield model
        model.load_state_dict(self.training_model.state_dict())


class EMAParameters:
    def __init__(self, model, smoothing):
        self.smoothing = smoothing
        self.named_parameters_dict = {name: param.detach().clone() for name, param in model.named_parameters() if param.requires_grad}

    @torch.no_grad()
    def update(self, model):
        for name, param in model.named_parameters():
            if name in self.named_parameters_dict:
                self.named_parameters_dict[name].lerp_(param, 1 - self.smoothing)

    @torch.no_grad()
    def swap_params(self, model):
        for name, param in model.named_parameters():
            if name in self.named_parameters_dict:
                param.data, self.named_parameters_dict[name] = self.named_parameters_dict[name], param.data

    @contextmanager
    def averaged(self, model):
        self.swap_params(model)
        yield model
        self.swap_params(model)


@expected("several_models", fix=r"cpu\(\)", thread="mosaicml/composer#1941", memory=1000, held_back=True)
def diffusion_with_ema(fixed=False):
    """`EMAModels` keeps two more complete deep copies of the model on the GPU, `ema_model` and `training_model` (the latter only for
    swapping at evaluation), including the frozen `text_encoder`. Cured by: one averaged copy of only the trainable parameters, swapped in
    place.
    """
    model = StableDiffusionLike().cuda()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.01, momentum=0.9)
    ema = (EMAParameters if fixed else EMAModels)(model, smoothing=0.99)
    new_batch = lambda: (torch.randn(16, 1024).cuda(), torch.randint(0, 30000, (16, 77)).cuda())
    for epoch in range(2):
        for _ in range(5):
            loss = model(new_batch())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(model)
        with ema.averaged(model), torch.no_grad():
            eval_loss = model(new_batch())
    return eval_loss.item()
