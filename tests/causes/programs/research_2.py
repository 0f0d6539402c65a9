"""Programs after public threads of single researchers and small teams."""
import contextlib
import gc
from itertools import product

import torch
from torch import nn
from torch.nn import functional as F

from expected import expected

# Adversarial examples: a whole test set is attacked once, and the attacked images are kept for other models.

class GradientSignAttack:
    def __init__(self, predict, eps=8 / 255, clip_min=0., clip_max=1., detach_result=False):
        self.predict, self.eps, self.detach_result = predict, eps, detach_result
        self.clip_min, self.clip_max = clip_min, clip_max
        self.loss_fn = nn.CrossEntropyLoss(reduction="sum")

    def perturb(self, x, y):
        xadv = x.requires_grad_()
        loss = self.loss_fn(self.predict(xadv), y)
        loss.backward()
        grad_sign = xadv.grad.detach().sign()
        xadv = xadv + self.eps * grad_sign
        xadv = torch.clamp(xadv, self.clip_min, self.clip_max)
        return xadv.detach() if self.detach_result else xadv

class SmallResNet(nn.Module):
    def __init__(self, num_classes=100, width=16):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 7, 4, 3), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(width, width, 3, 1, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 1, 1))
        self.head = nn.Linear(width, num_classes)

    def forward(self, x):
        x = self.stem(x)
        x = F.relu(x + self.block(x))
        return self.head(x.mean((2, 3)))

@expected("graph_of_earlier_steps", fix="detach", thread="BorealisAI/advertorch#68", memory=1000, held_back=True)
def attack_test_set(fixed=False, batch_size=32, batches=16):
    """`GradientSignAttack.perturb` returns `xadv` still attached to its autograd graph. Every attacked batch kept in `advs` therefore also
    keeps the original images, their `.grad` and the values saved for the clamp, about four times what the images themselves need. Cured by:
    `detach()` of the result before it is returned.
    """
    model = SmallResNet().cuda().eval()
    for p in model.parameters():
        p.requires_grad_(False)
    adversary = GradientSignAttack(model, detach_result=fixed)
    advs, labels = [], []
    for _ in range(batches):
        cln_data, true_label = torch.rand(batch_size, 3, 224, 224), torch.randint(0, 100, (batch_size,))
        cln_data, true_label = cln_data.cuda(), true_label.cuda()
        advs.append(adversary.perturb(cln_data, true_label))
        labels.append(true_label)
    other = SmallResNet(width=24).cuda().eval()
    hits = 0
    with torch.no_grad():
        for adv, label in zip(advs, labels):
            hits += (other(adv).argmax(1) == label).sum().item()
    return hits

# Subtitles: a recording is transcribed, the words are aligned to the sound, and the speakers are told apart.

class TransformerStack(nn.Module):
    def __init__(self, n_state, n_head, n_layer):
        super().__init__()
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(n_state, n_head, n_state * 4, batch_first=True) for _ in range(n_layer))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

class SpeechRecognizer(nn.Module):
    def __init__(self, n_mels=80, n_state=768, n_layer=14, n_vocab=8000):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(n_mels, n_state, 3, padding=1), nn.Conv1d(n_state, n_state, 3, 2, 1)
        self.encoder, self.proj = TransformerStack(n_state, 12, n_layer), nn.Linear(n_state, n_vocab)

    def transcribe(self, mel):
        x = F.gelu(self.conv2(F.gelu(self.conv1(mel)))).transpose(1, 2)
        return self.proj(self.encoder(x)[:, ::25]).argmax(-1).cpu()

class CharacterAligner(nn.Module):
    def __init__(self, n_state=768, n_layer=12, n_chars=32):
        super().__init__()
        self.feature_extractor = nn.Conv1d(1, n_state, 400, 320)
        self.encoder, self.lm_head = TransformerStack(n_state, 12, n_layer), nn.Linear(n_state, n_chars)

    def align(self, waveform):
        features = self.feature_extractor(waveform).transpose(1, 2)
        return self.lm_head(self.encoder(features)).log_softmax(-1).cpu()

def load_model(kind, device="cuda"):
    return {"asr": SpeechRecognizer, "align": CharacterAligner}[kind]().to(device).eval()

@expected("several_models", fix=r"\bdel\b", thread="m-bain/whisperX#89", memory=1000, held_back=True)
@torch.no_grad()
def subtitle_cli(fixed=False, seconds=240):
    """The speech recognizer `model` stays on the GPU although it has done its work after the transcription, while `align_model` is
    (already) loaded beside it; the two models together do not fit. Cured by: load one after the other; `del model`, `gc.collect()`,
    `empty_cache()` after transcription (model flushing).
    """
    mel = torch.randn(seconds // 30, 80, 3000)
    audio = torch.randn(seconds // 30, 1, 30 * 16000)
    model = load_model("asr")
    if not fixed:
        align_model = load_model("align")
    segments = [model.transcribe(window.unsqueeze(0).cuda()) for window in mel]
    if fixed:
        del model
        gc.collect()
        torch.cuda.empty_cache()
        align_model = load_model("align")
    results = []
    for segment, window in zip(segments, audio):
        emission = align_model.align(window.unsqueeze(0).cuda())
        results.append((segment, emission))
    return results

# Curvature of a language model: the Gauss-Newton matrix is multiplied with a vector, to find its largest eigenvalues.

class TinyLM(nn.Module):
    def __init__(self, vocab=32000, d_model=128, n_layer=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, d_model)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(d_model), nn.Linear(d_model, 512), nn.GELU(), nn.Linear(512, d_model)) for _ in range(n_layer))
        self.unembed = nn.Linear(d_model, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.unembed(x)

def ce_loss(output, tokens):
    return F.cross_entropy(output[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

def ce_hvp(output, u):
    n = output.shape[0] * (output.shape[1] - 1)
    p = output.softmax(-1)
    u = u.mul_(p)
    u.sub_(p.mul_(u.sum(-1, keepdim=True)))
    u[:, -1] = 0
    return u.div_(n)

class GaussNewtonOperator:
    def __init__(self, model, batches, loss_hvp):
        self.model, self.batches, self.loss_hvp = model, batches, loss_hvp
        self.params = dict(model.named_parameters())

    def split(self, v):
        parts = v.split([p.numel() for p in self.params.values()])
        return {n: part.view_as(p) for (n, p), part in zip(self.params.items(), parts)}

    def matvec_autograd(self, v, tokens):
        def call(params):
            return torch.func.functional_call(self.model, params, (tokens,))
        output, jvp_out = torch.func.jvp(call, (self.params,), (self.split(v),))
        leaf = output.detach().requires_grad_(True)
        grad_loss, = torch.autograd.grad(ce_loss(leaf, tokens), leaf, create_graph=True)
        h_jvp, = torch.autograd.grad(grad_loss, leaf, grad_outputs=jvp_out)
        _, vjp_fn = torch.func.vjp(call, self.params)
        return torch.cat([g.reshape(-1) for g in vjp_fn(h_jvp)[0].values()])

    def matvec_analytical(self, v, tokens, eps=5e-3):
        direction = self.split(v)
        with torch.no_grad():
            for n, p in self.params.items():
                p.add_(direction[n], alpha=eps)
            jvp_out = self.model(tokens)
            for n, p in self.params.items():
                p.sub_(direction[n], alpha=2 * eps)
            jvp_out.sub_(self.model(tokens)).div_(2 * eps)
            for n, p in self.params.items():
                p.add_(direction[n], alpha=eps)
        logits = self.model(tokens)
        h_jvp = ce_hvp(logits.detach(), jvp_out)
        grads = torch.autograd.grad(logits, list(self.params.values()), grad_outputs=h_jvp)
        return torch.cat([g.reshape(-1) for g in grads])

    def matvec(self, v):
        total = torch.zeros_like(v)
        for tokens in self.batches:
            step = self.matvec_analytical if self.loss_hvp == "analytical" else self.matvec_autograd
            total.add_(step(v, tokens.cuda()))
        return total / len(self.batches)

@expected("second_derivatives", fix="chunk", thread="noahgolmant/pytorch-hessian-eigenthings#46", memory=1000, held_back=True)
def largest_eigenvalue(fixed=False, batch=4, seq=192):
    """`matvec_autograd` gets the loss-Hessian product by double backward (`create_graph=True`) through the cross entropy and runs the model
    twice more by `jvp` and `vjp`: many copies of the (batch, seq, vocabulary) logits are alive at the same time. Cured by: analytical
    Hessian product of the cross entropy and finite-difference JVP without graph, one single backward.
    """
    model = TinyLM().cuda()
    batches = [torch.randint(0, 32000, (batch, seq)) for _ in range(2)]
    operator = GaussNewtonOperator(model, batches, "analytical" if fixed else "autograd")
    v = torch.randn(sum(p.numel() for p in model.parameters()), device="cuda")
    for _ in range(2):
        v = operator.matvec(v / v.norm())
    return v.norm().item()

# Voice conversion: text and sound of many speakers are aligned, in batches of whole utterances.

class TextMelReader(torch.utils.data.Dataset):
    def __init__(self, lengths, n_mels=80, max_frames=None):
        self.lengths = [n for n in lengths if max_frames is None or n <= max_frames]
        self.n_mels = n_mels

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        frames = self.lengths[index]
        return torch.randn(self.n_mels, frames), torch.randint(0, 41, (frames // 8,))

def text_mel_collate(batch):
    max_frames = max(mel.shape[1] for mel, _ in batch)
    max_text = max(len(text) for _, text in batch)
    mel_padded = torch.zeros(len(batch), batch[0][0].shape[0], max_frames)
    text_padded = torch.zeros(len(batch), max_text, dtype=torch.long)
    for i, (mel, text) in enumerate(batch):
        mel_padded[i, :, :mel.shape[1]], text_padded[i, :len(text)] = mel, text
    return mel_padded, text_padded

class ConversionModel(nn.Module):
    def __init__(self, n_mels=80, dim=256):
        super().__init__()
        self.phonemes = nn.Embedding(41, dim)
        self.text_encoder = nn.Conv1d(dim, dim, 5, padding=2)
        self.mel_encoder = nn.Sequential(nn.Conv1d(n_mels, dim, 5, padding=2), nn.ReLU(), nn.Conv1d(dim, dim, 5, padding=2), nn.ReLU())
        self.query, self.memory, self.energy = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, 1)
        self.decoder = nn.Sequential(nn.Conv1d(2 * dim, 512, 5, padding=2), nn.Tanh(), nn.Conv1d(512, 512, 5, padding=2), nn.Tanh(), nn.Conv1d(512, n_mels, 5, padding=2))

    def forward(self, mel, text):
        memory = self.text_encoder(self.phonemes(text).transpose(1, 2)).transpose(1, 2)
        query = self.mel_encoder(mel).transpose(1, 2)
        scores = (self.query(query) @ self.memory(memory).transpose(1, 2)) / 16
        context = scores.softmax(-1) @ memory
        return self.decoder(torch.cat((query, context), -1).transpose(1, 2))

@expected("larger_step", fix="cut|part", thread="jxzhanggg/nonparaSeq2seqVC_code#3", memory=1000, held_back=True)
def pretrain_speakers(fixed=False, batch_size=16):
    """One utterance of the training set is far longer (4600 frames) than the others, and `text_mel_collate` pads the whole batch of 16 to
    it, so that one batch needs several times as much as the others. Cured by: utterances of more than 1000 frames are skipped in the
    reader.
    """
    lengths = [300 + 37 * (i % 17) for i in range(192)]
    lengths[101] = 4600
    train_set = TextMelReader(lengths, max_frames=1000 if fixed else None)
    loader = torch.utils.data.DataLoader(train_set, batch_size, collate_fn=text_mel_collate, drop_last=True)
    model = ConversionModel().cuda()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for mel, text in loader:
        mel, text = mel.cuda(), text.cuda()
        loss = F.l1_loss(model(mel, text), mel)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()

# Talking heads: a portrait is animated from landmarks; embedder, generator and discriminator learn together.

def down(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, 2, 1), nn.InstanceNorm2d(o, affine=True), nn.ReLU())

def up(i, o):
    return nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(i, o, 3, 1, 1), nn.InstanceNorm2d(o, affine=True), nn.ReLU())

class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(down(6, 32), down(32, 64), down(64, 128), down(128, 256))

    def forward(self, x, y):
        return self.net(torch.cat((x, y), 1)).sum((2, 3))

class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(down(3, 32), down(32, 64), down(64, 128))
        self.style = nn.Linear(256, 128)
        self.decode = nn.Sequential(up(128, 64), up(64, 32), up(32, 16), nn.Conv2d(16, 3, 3, 1, 1), nn.Sigmoid())

    def forward(self, y, e):
        return self.decode(self.encode(y) * self.style(e)[:, :, None, None])

class Discriminator(nn.Module):
    def __init__(self, videos):
        super().__init__()
        self.net = nn.Sequential(down(6, 32), down(32, 64), down(64, 128), down(128, 256))
        self.W = nn.Embedding(videos, 256)

    def forward(self, x, y, i):
        return (self.net(torch.cat((x, y), 1)).sum((2, 3)) * self.W(i)).sum(1)

@expected("retained_graph", fix="detach", thread="grey-eye/talking-heads#7", memory=900, held_back=True)
def meta_train(fixed=False, batch_size=8, K=2, size=224):
    """`backward(retain_graph=True)` keeps the whole graph of the first pass (embedder, generator, discriminator) while the discriminator is
    optimized again, and this second pass goes again with gradients through the generator (`G(y_t, e_hat)` isn't detached), although only D
    is to learn from it. Cured by: no `retain_graph`, `G(...).detach()` for the second discriminator step.
    """
    E, G, D = Embedder().cuda(), Generator().cuda(), Discriminator(500).cuda()
    optimizer_E_G = torch.optim.Adam([*E.parameters(), *G.parameters()], 5e-5)
    optimizer_D = torch.optim.Adam(D.parameters(), 2e-4)
    for _ in range(3):
        i, video = torch.randint(0, 500, (batch_size,)).cuda(), torch.rand(batch_size, K + 1, 2, 3, size, size).cuda()
        x_t, y_t = video[:, -1, 0], video[:, -1, 1]
        frames = video[:, :-1].flatten(0, 1)
        e_hat = E(frames[:, 0], frames[:, 1]).view(batch_size, K, -1).mean(1)
        x_hat = G(y_t, e_hat)
        r_x_hat, r_x = D(x_hat, y_t, i), D(x_t, y_t, i)
        loss_E_G = F.l1_loss(x_hat, x_t) - r_x_hat.mean() + F.l1_loss(e_hat, D.W(i))
        loss_D = F.relu(1 + r_x_hat).mean() + F.relu(1 - r_x).mean()
        optimizer_E_G.zero_grad()
        optimizer_D.zero_grad()
        (loss_E_G + loss_D).backward(retain_graph=not fixed)

        x_hat = G(y_t, e_hat).detach() if fixed else G(y_t, e_hat)
        r_x_hat, r_x = D(x_hat, y_t, i), D(x_t, y_t, i)
        loss_D = F.relu(1 + r_x_hat).mean() + F.relu(1 - r_x).mean()
        loss_D.backward()
        optimizer_E_G.step()
        optimizer_D.step()
    return loss_E_G.item(), loss_D.item()

# Image quality without a reference: patches of a photo are compared with sentences about quality, scene and distortion.

class ResidualAttentionBlock(nn.Module):
    def __init__(self, d_model, n_head):
        super().__init__()
        self.n_head = n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.c_fc, self.c_proj = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)

    def forward(self, x):
        n, length, d = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(n, length, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
        attn = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attn.transpose(1, 2).reshape(n, length, d))
        hidden = self.c_fc(self.ln_2(x))
        return x + self.c_proj(hidden * torch.sigmoid(1.702 * hidden))

class VisionLanguageModel(nn.Module):
    def __init__(self, width=384, layers=4, embed_dim=256):
        super().__init__()
        self.token_embedding = nn.Embedding(49408, width)
        self.text = nn.Sequential(*(ResidualAttentionBlock(width, 6) for _ in range(layers)))
        self.patchify = nn.Conv2d(3, width, 32, 32)
        self.visual = nn.Sequential(*(ResidualAttentionBlock(width, 6) for _ in range(layers)))
        self.text_projection, self.visual_projection = nn.Linear(width, embed_dim), nn.Linear(width, embed_dim)

    def encode_text(self, tokens):
        return self.text_projection(self.text(self.token_embedding(tokens))[:, -1])

    def encode_image(self, x):
        return self.visual_projection(self.visual(self.patchify(x).flatten(2).transpose(1, 2)).mean(1))

QUALITYS = ("bad", "poor", "fair", "good", "perfect")
SCENES = ("animal", "cityscape", "human", "indoor", "landscape", "night", "plant", "still life", "other")
DISTS = ("jpeg", "jpeg2000", "noise", "blur", "color", "contrast", "overexposure", "underexposure", "spatial", "quantization", "other")

class LanguageQuality(nn.Module):
    def __init__(self, stored_text_features=None, num_patch=15):
        super().__init__()
        self.clip_model, self.num_patch = VisionLanguageModel(), num_patch
        self.stored_text_features = stored_text_features
        self.joint_texts = torch.stack([torch.randint(0, 49408, (77,)) for _ in product(QUALITYS, SCENES, DISTS)])

    def text_features(self, x):
        if self.stored_text_features is not None:
            return self.stored_text_features.to(x)
        features = self.clip_model.encode_text(self.joint_texts.to(x.device))
        return features / features.norm(dim=1, keepdim=True)

    def forward(self, x):
        bs = x.shape[0]
        patches = x.unfold(2, 224, 32).unfold(3, 224, 32).permute(2, 3, 0, 1, 4, 5).flatten(0, 1)
        sel = torch.linspace(0, len(patches) - 1, self.num_patch).long()
        patches = patches[sel.to(x.device)].transpose(0, 1).flatten(0, 1)
        text_features = self.text_features(x)
        image_features = self.clip_model.encode_image(patches)
        image_features = image_features / image_features.norm(dim=1, keepdim=True)
        logits = (100 * image_features @ text_features.t()).view(bs, self.num_patch, -1).mean(1).softmax(1)
        quality = logits.view(bs, len(QUALITYS), -1).sum(-1)
        return quality @ torch.arange(1., 6., device=x.device)

@expected("batch_without_gradients", fix="split|part", thread="chaofengc/IQA-PyTorch#166", memory=1000, held_back=True)
@torch.no_grad()
def score_photos(fixed=False):
    """Every call of the metric sends all 495 sentences (quality x scene x distortion, `joint_texts`) at once through the text encoder,
    though they never change; that needs far more than the photo itself. Cured by: text features calculated once and loaded from a cached
    file.
    """
    stored = F.normalize(torch.randn(len(QUALITYS) * len(SCENES) * len(DISTS), 256)) if fixed else None
    metric = LanguageQuality(stored).cuda().eval()
    scores = []
    for _ in range(5):
        photo = torch.rand(1, 3, 480, 640).cuda()
        scores.append(metric(photo).item())
    return scores

# Text to speech: tokens of speech are drawn one by one, and a diffusion decoder makes a spectrogram of them.

class SpeechTokens(nn.Module):
    def __init__(self, dim=256, vocab=8194):
        super().__init__()
        self.embedding, self.gpt, self.mel_head = nn.Embedding(vocab, dim), nn.GRU(dim, dim, batch_first=True), nn.Linear(dim, vocab)

    def inference_speech(self, text_inputs, max_length):
        x, state = self.gpt(self.embedding(text_inputs))
        codes = []
        for _ in range(max_length):
            code = self.mel_head(x[:, -1]).argmax(-1).clamp(0, 8193)
            codes.append(code)
            x, state = self.gpt(self.embedding(code.unsqueeze(1)), state)
        return torch.stack(codes, 1)

class DiffusionDecoder(nn.Module):
    def __init__(self, in_channels=100, dim=256, layers=3):
        super().__init__()
        self.code_embedding, self.time_embed = nn.Embedding(8194, dim), nn.Linear(1, dim)
        self.inp_block = nn.Conv1d(in_channels, dim, 3, padding=1)
        self.layers = nn.ModuleList(nn.Sequential(nn.GroupNorm(8, dim), nn.SiLU(), nn.Conv1d(dim, dim, 3, padding=1)) for _ in range(layers))
        self.out = nn.Conv1d(dim, in_channels, 3, padding=1)

    def forward(self, x, t, codes):
        aligned = F.interpolate(self.code_embedding(codes).transpose(1, 2), x.shape[-1])
        h = self.inp_block(x) + aligned + self.time_embed(t.view(1, 1)).unsqueeze(-1)
        for layer in self.layers:
            h = h + layer(h)
        return self.out(h)

class SpacedDiffuser:
    def __init__(self, steps):
        self.betas = torch.linspace(1e-4, 0.02, steps)
        self.alphas_cumprod = torch.cumprod(1 - self.betas, 0)

    def p_sample_loop(self, model, shape, codes):
        img = torch.randn(shape, device="cuda")
        for i in reversed(range(len(self.betas))):
            eps = model(img, torch.tensor(float(i), device="cuda"), codes)
            beta, bar = self.betas[i].item(), self.alphas_cumprod[i].item()
            img = (img - beta / (1 - bar) ** 0.5 * eps) / (1 - beta) ** 0.5
            if i > 0:
                img = img + beta ** 0.5 * torch.randn_like(img)
        return img

class TextToSpeech:
    def __init__(self):
        self.autoregressive, self.diffusion = SpeechTokens().cuda().eval(), DiffusionDecoder().cuda().eval()

    def tts(self, text_tokens, diffusion_iterations, num_candidates=2):
        codes = self.autoregressive.inference_speech(text_tokens.repeat(num_candidates, 1), max_length=120)
        mels = []
        for candidate in codes:
            diffuser = SpacedDiffuser(diffusion_iterations)
            mel = diffuser.p_sample_loop(self.diffusion, (1, 100, 4 * 24 * len(candidate) // 2), candidate.unsqueeze(0))
            mels.append(mel.detach().cpu())
        return mels

@expected("evaluation_keeps_graphs", fix="no_grad", thread="neonbjb/tortoise-tts#36", memory=1000, held_back=True)
def read_aloud(fixed=False):
    """Speech is made without `torch.no_grad()`: `p_sample_loop` feeds `img` of each diffusion step into the next one, so the graph with the
    activations of all steps is kept (the token sampling as well). Cured by: inference without gradients (`torch.no_grad`).
    """
    speaker = TextToSpeech()
    text = torch.randint(0, 255, (1, 60)).cuda()
    with torch.no_grad() if fixed else contextlib.nullcontext():
        return speaker.tts(text, diffusion_iterations=40)

# Video inpainting: something is removed from a clip, with the help of neighbouring and of reference frames.

class InpaintGenerator(nn.Module):
    def __init__(self, channel=32):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, channel, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(channel, 2 * channel, 3, 2, 1), nn.LeakyReLU(0.2))
        self.mix = nn.Conv2d(4 * channel, 2 * channel, 1)
        self.decoder = nn.Sequential(nn.Conv2d(2 * channel, 16, 3, 1, 1), nn.LeakyReLU(0.2), nn.Upsample(scale_factor=4), nn.Conv2d(16, 3, 3, 1, 1), nn.Tanh())

    def forward(self, masked_frames, num_local_frames):
        features = self.encoder(masked_frames)
        local = features[:num_local_frames]
        reference = features.mean(0, keepdim=True).expand_as(local)
        return self.decoder(self.mix(torch.cat((local, reference), 1)))

def get_ref_index(neighbor_ids, length, ref_length=10):
    return [i for i in range(0, length, ref_length) if i not in neighbor_ids]

def inpaint(model, frames, masks, comp_frames, offset, neighbor_stride=5):
    imgs = (frames.float() / 127.5 - 1).to("cuda")
    masks = masks.float().to("cuda")
    video_length = len(imgs)
    for f in range(0, video_length, neighbor_stride):
        neighbor_ids = list(range(max(0, f - neighbor_stride), min(video_length, f + neighbor_stride + 1)))
        ref_ids = get_ref_index(neighbor_ids, video_length)
        selected_imgs, selected_masks = imgs[neighbor_ids + ref_ids], masks[neighbor_ids + ref_ids]
        pred_imgs = model(selected_imgs * (1 - selected_masks), len(neighbor_ids))
        pred_imgs = (pred_imgs + 1).mul(127.5).clamp(0, 255).byte().cpu()
        for i, idx in enumerate(neighbor_ids):
            comp_frames[offset + idx] = pred_imgs[i]

@expected("data_on_gpu", fix="DataLoader|part|cpu", thread="MCG-NKU/E2FGVI#29", memory=860, held_back=True)
@torch.no_grad()
def remove_object(fixed=False, video_length=180, h=360, w=640):
    """The whole clip (`imgs` and `masks` of all 180 frames, as float) is put on the GPU before the loop though only a window is needed at a
    time, and the reference frames grow with the clip length too. Cured by: the frames are given to the inference in batches (a multiple of
    neighbor_stride).
    """
    model = InpaintGenerator().cuda().eval()
    frames = torch.randint(0, 256, (video_length, 3, h, w), dtype=torch.uint8)
    masks = torch.zeros(video_length, 1, h, w, dtype=torch.uint8)
    masks[:, :, 100:200, 200:300] = 1
    comp_frames = [None] * video_length
    batch = 45 if fixed else video_length
    for start in range(0, video_length, batch):
        inpaint(model, frames[start:start + batch], masks[start:start + batch], comp_frames, start)
    return comp_frames

# Coarse-grained proteins: many copies of a molecule are moved by the forces of a learned energy.

class PairEnergy(nn.Module):
    def __init__(self, n_beads, n_rbf=24, hidden=48):
        super().__init__()
        self.register_buffer("pairs", torch.triu_indices(n_beads, n_beads, 1))
        self.register_buffer("centers", torch.linspace(0, 12, n_rbf))
        self.mlp = nn.Sequential(nn.Linear(n_rbf, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, pos):
        i, j = self.pairs
        distance = (pos[:, i] - pos[:, j]).norm(dim=-1, keepdim=True)
        return self.mlp(torch.exp(-(distance - self.centers) ** 2)).sum((1, 2))

class GradientsOut(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, pos):
        pos.requires_grad_(True)
        energy = self.model(pos)
        forces = -torch.autograd.grad(energy.sum(), pos, create_graph=True)[0]
        return energy, forces

class LangevinSimulation:
    def __init__(self, model, initial_pos, detach_forces, dt=0.004, friction=1.0, save_interval=10):
        self.model, self.pos, self.detach_forces = model, initial_pos, detach_forces
        self.vel = torch.zeros_like(initial_pos)
        self.dt, self.vscale, self.save_interval = dt, 1 - friction * dt, save_interval
        if detach_forces:
            for p in model.parameters():
                p.requires_grad_(False)

    def calculate_potential_and_forces(self):
        energy, forces = self.model(self.pos)
        if self.detach_forces:
            forces = forces.detach()
        return energy.detach(), forces

    def timestep(self, forces):
        v = self.vel + forces * self.dt
        x = self.pos + v * self.dt / 2
        v = v * self.vscale + 0.05 * torch.randn_like(v)
        self.vel, self.pos = v, x + v * self.dt / 2

    def simulate(self, n_timesteps):
        coords, potentials = [], []
        for t in range(n_timesteps):
            potential, forces = self.calculate_potential_and_forces()
            self.timestep(forces)
            if (t + 1) % self.save_interval == 0:
                coords.append(self.pos.detach().cpu())
                potentials.append(potential.cpu())
        return torch.stack(coords), torch.stack(potentials)

@expected("create_graph", fix="detach", thread="ClementiGroup/mlcg#17", memory=1000, held_back=True)
def simulate_protein(fixed=False, copies=32, n_beads=36):
    """The forces of `GradientsOut` come out with a graph (`create_graph=True`) and are integrated into `vel` and `pos` without detach, so
    the graph of all time steps of the simulation is kept and memory grows with each step. Cured by: forces detached in
    `calculate_potential_and_forces`, no gradients for the model's parameters.
    """
    model = GradientsOut(PairEnergy(n_beads)).cuda()
    initial_pos = 8 * torch.rand(copies, n_beads, 3).cuda()
    simulation = LangevinSimulation(model, initial_pos, detach_forces=fixed)
    return simulation.simulate(60)

# Metric learning: photos of products are found again among all the others by their embeddings.

class EmbeddingNet(nn.Module):
    def __init__(self, sz_embedding=256):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 32, 7, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.embedding = nn.Linear(32, sz_embedding)

    def forward(self, x):
        return F.normalize(self.embedding(self.features(x)), dim=1)

@torch.no_grad()
def predict_batchwise(model, dataloader):
    embeddings, labels = [], []
    for images, target in dataloader:
        embeddings.append(model(images.cuda()).cpu())
        labels.append(target)
    return torch.cat(embeddings), torch.cat(labels)

def evaluate_cos_products(X, T, rows, K=1000):
    Y, xs = [], []
    for x in X:
        xs.append(x)
        if len(xs) == rows:
            cos_sim = F.linear(torch.stack(xs), X)
            Y.append(cos_sim.topk(1 + K)[1][:, 1:].cpu())
            xs = []
    if xs:
        cos_sim = F.linear(torch.stack(xs), X)
        Y.append(cos_sim.topk(1 + K)[1][:, 1:].cpu())
    Y = T[torch.cat(Y).clamp(0, len(T) - 1)]
    return [(Y[:, :k] == T.unsqueeze(1)).any(1).float().mean().item() for k in (1, 10, 100, 1000)]

@expected("all_pairs", fix="split|chunk", thread="sung-yeon-kim/Proxy-Anchor-CVPR2020#14", memory=1000, held_back=True)
def recall_of_products(fixed=False, products=26000):
    """`evaluate_cos_products` multiplies 10000 query embeddings at once with all 26000 ones: the similarity matrix `cos_sim` alone has 1
    GB. Cured by: smaller constant (1000 rows at a time).
    """
    model = EmbeddingNet().cuda().eval()
    loader = ((torch.rand(200, 3, 32, 32), torch.randint(0, 4000, (200,))) for _ in range(products // 200))
    X, T = predict_batchwise(model, loader)
    return evaluate_cos_products(X.cuda(), T, rows=1000 if fixed else 10000)
