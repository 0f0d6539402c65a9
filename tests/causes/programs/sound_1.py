"""Programs after public threads about time series, speech, music and robots."""

import contextlib
import random

import torch
from torch import nn
from torch.nn import functional as F

from expected import expected

# Forecasts of many time series with a temporal fusion transformer: the raw outputs of a validation set are wanted.


class GatedResidualNetwork(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.fc1, self.fc2, self.gate, self.norm = (
            nn.Linear(size, size),
            nn.Linear(size, size),
            nn.Linear(size, 2 * size),
            nn.LayerNorm(size),
        )

    def forward(self, x):
        return self.norm(x + F.glu(self.gate(self.fc2(F.elu(self.fc1(x)))), dim=-1))


class TemporalFusionTransformer(nn.Module):
    def __init__(self, n_reals=20, hidden_size=64, heads=4, n_quantiles=7):
        super().__init__()
        self.heads = heads
        self.variable_weights, self.input_proj = nn.Linear(n_reals, n_reals), nn.Linear(n_reals, hidden_size)
        self.lstm_encoder = nn.LSTM(hidden_size, hidden_size, batch_first=True)
        self.q_layer, self.k_layer, self.v_layer = (nn.Linear(hidden_size, hidden_size) for _ in range(3))
        self.grn, self.output_layer = GatedResidualNetwork(hidden_size), nn.Linear(hidden_size, n_quantiles)

    def forward(self, x):
        encoder_cont, decoder_cont = x["encoder_cont"], x["decoder_cont"]
        weights = torch.softmax(self.variable_weights(encoder_cont), -1)
        inputs = torch.cat((self.input_proj(encoder_cont * weights), self.input_proj(decoder_cont)), 1)
        hidden, _ = self.lstm_encoder(inputs)
        decoder = hidden[:, encoder_cont.shape[1] :]
        q, k, v = (
            layer(t).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, t in ((self.q_layer, decoder), (self.k_layer, hidden), (self.v_layer, hidden))
        )
        attention = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1)
        attended = (attention @ v).transpose(1, 2).flatten(2)
        return {
            "prediction": self.output_layer(self.grn(attended + decoder)),
            "attention": attention.transpose(1, 2),
            "encoder_variables": weights.unsqueeze(-2),
            "decoder_lengths": x["decoder_lengths"],
        }


def series_dataloader(n_batches, batch_size=256, encoder_length=168, prediction_length=24, n_reals=20):
    for _ in range(n_batches):
        yield {
            "encoder_cont": torch.randn(batch_size, encoder_length, n_reals),
            "decoder_cont": torch.randn(batch_size, prediction_length, n_reals),
            "decoder_lengths": torch.full((batch_size,), prediction_length),
        }


def concat_dicts(outputs):
    return {name: torch.cat([out[name] for out in outputs]) for name in outputs[0]}


def predict(model, dataloader, return_x=False, device=None):
    model.eval()
    output, x_list = [], []
    with torch.no_grad():
        for x in dataloader:
            x = {name: value.to("cuda") for name, value in x.items()}
            out = model(x)
            if device is not None:
                out = {name: value.detach().to(device) for name, value in out.items()}
                x = {name: value.to(device) for name, value in x.items()}
            output.append(out)
            if return_x:
                x_list.append(x)
    output = concat_dicts(output)
    return (output, concat_dicts(x_list)) if return_x else output


@expected("kept_tensors", fix=r"\.cpu\(\)|\bdel\b|clear|None", thread="sktime/pytorch-forecasting#322", memory=600)
def predict_validation_set(fixed=False):
    """`predict` appends the dictionary `out` of every batch (and `x`, with `return_x=True`) to the lists `output` and `x_list` while they
    still lie on the GPU, so the whole validation set's raw outputs (mostly attention) and inputs pile up there until the end. Cured by:
    Moving the outputs to the CPU in the loop of `predict` (a `device` argument).
    """
    tft = TemporalFusionTransformer().cuda()
    raw_predictions, x = predict(tft, series_dataloader(20), return_x=True, device="cpu" if fixed else None)
    return {"series": len(raw_predictions["prediction"]), "inputs": len(x["encoder_cont"])}


# A server that speaks texts with cloned voices: what is computed from a reference recording is kept for the next request.


class CAMPPlus(nn.Module):
    def __init__(self, feat_dim=80, m_channels=16, embedding_size=192):
        super().__init__()

        def block(c_in, c_out):
            return nn.Sequential(nn.Conv2d(c_in, c_out, 3, 1, 1), nn.BatchNorm2d(c_out), nn.ReLU())

        self.head = nn.Sequential(
            block(1, m_channels), block(m_channels, m_channels), nn.Conv2d(m_channels, m_channels, 3, (2, 1), 1), nn.ReLU()
        )
        self.tdnn = nn.Sequential(
            nn.Conv1d(m_channels * feat_dim // 2, 128, 5, 2, 2),
            nn.BatchNorm1d(128),
            nn.ReLU(),
            nn.Conv1d(128, 256, 3, padding=1),
            nn.ReLU(),
        )
        self.dense = nn.Linear(512, embedding_size)

    def forward(self, fbank):
        x = self.tdnn(self.head(fbank.unsqueeze(1)).flatten(1, 2))
        return self.dense(torch.cat((x.mean(-1), x.std(-1)), 1))


class ChatterboxTTS:
    def __init__(self, device="cuda"):
        self.device = device
        self.speaker_encoder = CAMPPlus().to(device).eval()
        self.emotion_proj = nn.Linear(1, 192).to(device)
        self.t3 = nn.GRU(192, 512, batch_first=True).to(device).eval()
        self.s3gen = (
            nn.Sequential(nn.Conv1d(512, 128, 7, padding=3), nn.ELU(), nn.ConvTranspose1d(128, 1, 960, 480)).to(device).eval()
        )
        self.conds = None

    def prepare_conditionals(self, ref_wav, exaggeration=0.5):
        frames = ref_wav.to(self.device).unfold(0, 400, 160)
        fbank = torch.fft.rfft(frames).abs()[:, :80].clamp(min=1e-5).log().t().unsqueeze(0)
        embedding = self.speaker_encoder(fbank)
        emotion = self.emotion_proj(torch.full((1, 1), exaggeration, device=self.device))
        self.conds = {"embedding": embedding, "emotion_adv": emotion, "prompt_feat": fbank[..., :500]}

    def generate(self, text):
        with torch.inference_mode():
            speaker = self.conds["embedding"] + self.conds["emotion_adv"]
            tokens = speaker.unsqueeze(1).expand(1, 4 * len(text), -1)
            wav = self.s3gen(self.t3(tokens)[0].transpose(1, 2))
        return wav.squeeze(0).detach().cpu()


class Engine:
    def __init__(self, guard):
        self.model, self.guard, self._conds_cache = ChatterboxTTS(), guard, {}

    def synthesize(self, text, voice, ref_wav, exaggeration):
        key = (voice, exaggeration)
        with self.guard():
            if key in self._conds_cache:
                self.model.conds = self._conds_cache[key]
            else:
                self.model.prepare_conditionals(ref_wav, exaggeration)
                self._conds_cache[key] = self.model.conds
            return self.model.generate(text)


@expected("evaluation_keeps_graphs", fix="no_grad|inference_mode", thread="devnen/Chatterbox-TTS-Server#166", memory=1000)
def serve_voices(fixed=False, voices=48):
    """`prepare_conditionals` runs the speaker encoder with gradients on, so every entry put into `_conds_cache` has an `embedding` that
    drags the encoder's whole autograd graph along. Each new voice keeps its activations on the GPU for the life of the server. Cured by:
    `torch.inference_mode()` around the generate call (with the preparation).
    """
    engine = Engine(torch.inference_mode if fixed else contextlib.nullcontext)
    requests = random.Random(3)
    recordings = {f"voice{i}.wav": torch.randn(16000 * 10) for i in range(voices)}
    for voice, ref_wav in recordings.items():
        text = "Thank you for waiting, your call is important to us."[: requests.randint(20, 50)]
        for exaggeration in (0.5, 0.5):
            wav = engine.synthesize(text, voice, ref_wav, exaggeration)
    return {"samples": wav.shape[-1]}


# Music from a description: a language model over the codes of a neural codec, with classifier-free guidance.


class ConditioningAttributes:
    def __init__(self, text):
        self.text = text


class T5Conditioner(nn.Module):
    def __init__(self, output_dim, max_length=16):
        super().__init__()
        self.max_length, self.embed = max_length, nn.Embedding(512, output_dim)
        self.layer = nn.TransformerEncoderLayer(output_dim, 4, 2 * output_dim, batch_first=True)

    def forward(self, conditions):
        words = [
            [hash(word) % 511 + 1 for word in (c.text["description"] or "").split()][: self.max_length] for c in conditions
        ]
        tokens = torch.tensor([w + [0] * (self.max_length - len(w)) for w in words])
        return self.layer(self.embed(tokens.to(self.embed.weight.device)))


class StreamingTransformerLayer(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.in_proj, self.out_proj = num_heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.cross_attention = nn.MultiheadAttention(dim, num_heads, batch_first=True)
        self.norm1, self.norm2, self.ff = (
            nn.LayerNorm(dim),
            nn.LayerNorm(dim),
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)),
        )

    def forward(self, x, cross_src, streaming_state):
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.in_proj(self.norm1(x)).chunk(3, -1))
        if self in streaming_state:
            past_k, past_v = streaming_state[self]
            k, v = torch.cat((past_k, k), 2), torch.cat((past_v, v), 2)
        streaming_state[self] = k, v
        x = x + self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.cross_attention(x, cross_src, cross_src, need_weights=False)[0]
        return x + self.ff(self.norm2(x))


class LMModel(nn.Module):
    def __init__(self, n_q=4, card=1024, dim=192, num_layers=3):
        super().__init__()
        self.n_q, self.card, self.condition_provider = n_q, card, T5Conditioner(dim)
        self.emb = nn.ModuleList(nn.Embedding(card + 1, dim) for _ in range(n_q))
        self.layers = nn.ModuleList(StreamingTransformerLayer(dim, 4) for _ in range(num_layers))
        self.linears = nn.ModuleList(nn.Linear(dim, card) for _ in range(n_q))

    def generate(self, conditions, max_gen_len, cfg_coef=3.0):
        null_conditions = [ConditioningAttributes({"description": None}) for _ in conditions]
        cross_src = self.condition_provider(conditions + null_conditions)
        gen_sequence = torch.full((len(conditions), self.n_q, max_gen_len + 1), self.card, device=cross_src.device)
        streaming_state = {}
        for offset in range(max_gen_len):
            sequence = gen_sequence[..., offset : offset + 1].repeat(2, 1, 1)
            x = sum(emb(sequence[:, i]) for i, emb in enumerate(self.emb))
            for layer in self.layers:
                x = layer(x, cross_src, streaming_state)
            cond_logits, uncond_logits = torch.stack([linear(x) for linear in self.linears], 1).chunk(2)
            logits = uncond_logits + (cond_logits - uncond_logits) * cfg_coef
            gen_sequence[..., offset + 1] = logits[:, :, 0].topk(250).indices[..., 0]
        return gen_sequence[..., 1:]


class EncodecModel(nn.Module):
    def __init__(self, n_q=4, card=1024, dimension=128, n_filters=24, ratios=(8, 5, 4, 4)):
        super().__init__()
        self.codebooks = nn.ModuleList(nn.Embedding(card, dimension) for _ in range(n_q))
        mult, layers = 2 ** len(ratios), [nn.Conv1d(dimension, n_filters * 2 ** len(ratios), 7, padding=3)]
        for ratio in ratios:
            layers += [nn.ELU(), nn.ConvTranspose1d(mult * n_filters, mult * n_filters // 2, 2 * ratio, ratio, ratio // 2)]
            mult //= 2
        self.decoder = nn.Sequential(*layers, nn.ELU(), nn.Conv1d(n_filters, 1, 7, padding=3))

    def decode(self, codes):
        return self.decoder(sum(book(codes[:, i].clamp(0, 1023)) for i, book in enumerate(self.codebooks)).transpose(1, 2))


class MusicGen:
    def __init__(self, frame_rate=50):
        self.frame_rate, self.duration = frame_rate, 8
        self.compression_model, self.lm = EncodecModel().cuda().eval(), LMModel().cuda().eval()

    def set_generation_params(self, duration):
        self.duration = duration

    @torch.no_grad()
    def generate(self, descriptions):
        attributes = [ConditioningAttributes(text={"description": description}) for description in descriptions]
        tokens = self.lm.generate(attributes, max_gen_len=int(self.duration * self.frame_rate))
        return self.compression_model.decode(tokens)


@expected("batch_without_gradients", fix="split|part", thread="facebookresearch/audiocraft#47", memory=1000)
def write_jingle(fixed=False):
    """`model.generate(prompt)` is given a string where `generate` wants a list of descriptions, so every character of `prompt` becomes a
    description of its own and 52 pieces of music are generated and decoded at once. Cured by: A list with the one prompt:
    `generate([prompt])`.
    """
    model = MusicGen()
    model.set_generation_params(duration=4)
    prompt = "80s pop track with bassy drums and a warm synth lead"
    wav = model.generate([prompt] if fixed else prompt)
    saved = []
    for idx, one_wav in enumerate(wav):
        saved.append(one_wav.cpu().shape[-1])
    return {"files": len(saved)}


# Time series in a table: a recurrent encoder and decoder are trained on the series of all rows before the predictor is.


class TimeSeriesRnnEncoder:
    def __init__(self, encoded_vector_size=192, ts_n_dims=1, train_iters=1, slices_at_start=True):
        self.train_iters, self.encoded_vector_size, self.slices_at_start = train_iters, encoded_vector_size, slices_at_start
        self._encoder = nn.GRU(ts_n_dims, encoded_vector_size, batch_first=True).cuda()
        self._decoder = nn.GRUCell(ts_n_dims, encoded_vector_size).cuda()
        self._out = nn.Linear(encoded_vector_size, ts_n_dims).cuda()

    def parameters(self):
        return [p for module in (self._encoder, self._decoder, self._out) for p in module.parameters()]

    def _get_batch(self, source, start, end):
        end = min(end, len(source))
        rows = source[start:end] if self.slices_at_start else source[:end]
        return torch.tensor([[float(value) for value in row.split()] for row in rows]).unsqueeze(-1).cuda()

    def _reconstruct(self, data):
        _, hidden = self._encoder(data)
        hidden, outputs = hidden[0], []
        next_value = torch.zeros_like(data[:, 0])
        for _ in range(data.shape[1]):
            hidden = self._decoder(next_value, hidden)
            next_value = self._out(hidden)
            outputs.append(next_value)
        return torch.stack(outputs, 1)

    def prepare_encoder(self, priming_data, batch_size=64):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        for _ in range(self.train_iters):
            total_loss, data_idx = 0.0, 0
            while data_idx < len(priming_data):
                batch = self._get_batch(priming_data, data_idx, data_idx + batch_size)
                optimizer.zero_grad()
                loss = F.mse_loss(self._reconstruct(batch), batch)
                loss.backward()
                optimizer.step()
                total_loss += loss.item()
                data_idx += batch_size
        return total_loss


@expected("growing_steps", fix="start:end|as large", thread="mindsdb/lightwood#386", memory=1000)
def encode_sales(fixed=False, rows=1920, timesteps=60):
    """`_get_batch` slices `source[:end]` and ignores `start`, so every batch also has all the rows before it: the batches of
    `prepare_encoder` grow by 64 rows at each step until the training step doesn't fit any more. Cured by: The slice begins at `start`.
    """
    sales = random.Random(5)
    priming_data = [" ".join(f"{sales.random():.3f}" for _ in range(timesteps)) for _ in range(rows)]
    encoder = TimeSeriesRnnEncoder(slices_at_start=fixed)
    return {"error": encoder.prepare_encoder(priming_data)}


# Grasping with QT-Opt: the best action of a Q-function is searched with the cross-entropy method.


class QNet(nn.Module):
    def __init__(self, ob_dim, ac_dim, h1=800, h2=400):
        super().__init__()
        self.fc1, self.fc2, self.output_layer = nn.Linear(ob_dim + ac_dim, h1), nn.Linear(h1, h2), nn.Linear(h2, 1)

    def forward(self, ob, ac):
        h = F.relu(self.fc1(torch.cat((ob, ac), -1)))
        return self.output_layer(F.relu(self.fc2(h)))


class CEMDeterministicSAVfunc:
    def __init__(self, net, ac_dim, num_sampling=64, num_best_sampling=6, num_iter=2, save_memory=False):
        self.net, self.ac_dim, self.save_memory = net, ac_dim, save_memory
        self.num_sampling, self.num_best_sampling, self.num_iter = num_sampling, num_best_sampling, num_iter

    def _cem(self, obs):
        batch_size = len(obs)
        mean, std = torch.zeros(batch_size, 1, self.ac_dim, device=obs.device), torch.ones(
            batch_size, 1, self.ac_dim, device=obs.device
        )
        repeated = obs.unsqueeze(1).expand(-1, self.num_sampling, -1).reshape(batch_size * self.num_sampling, -1)
        for _ in range(self.num_iter):
            acs = mean + std * torch.randn(batch_size, self.num_sampling, self.ac_dim, device=obs.device)
            qvals = self.net(repeated, acs.flatten(0, 1)).view(batch_size, self.num_sampling)
            best = qvals.topk(self.num_best_sampling, 1).indices.unsqueeze(-1).expand(-1, -1, self.ac_dim)
            elite = acs.gather(1, best)
            mean, std = elite.mean(1, keepdim=True), elite.std(1, keepdim=True) + 1e-3
        return qvals.max(1, keepdim=True).values, mean.squeeze(1)

    def max(self, obs):
        if self.save_memory:
            values, actions = zip(*(self._cem(ob.unsqueeze(0)) for ob in obs))
            return torch.cat(values), torch.cat(actions)
        return self._cem(obs)


class ReplayTraj:
    def __init__(self, ob_dim, ac_dim, size=6000):
        self.data = {
            "obs": torch.randn(size, ob_dim),
            "acs": torch.randn(size, ac_dim),
            "rews": torch.rand(size, 1),
            "dones": torch.zeros(size, 1),
        }
        self.data["next_obs"] = self.data["obs"].roll(-1, 0)

    def random_batch(self, batch_size):
        index = torch.randint(0, len(self.data["obs"]), (batch_size,))
        return {name: column[index].cuda() for name, column in self.data.items()}


@expected("batch_without_gradients", fix="split|part", thread="DeepX-inc/machina#221", memory=1000)
def train_qtopt(fixed=False, epochs=2, batch_size=640, gamma=0.95, tau=0.995):
    """`_cem` repeats all observations of the batch `num_sampling` times and runs the Q-network on `batch_size * num_sampling` (640 x 256)
    rows in one go, so the target's hidden layers need 256 times the memory of the batch. Cured by: `save_memory` option: `_cem` in a loop,
    for one observation after the other.
    """
    ob_dim, ac_dim = 240, 7
    qf_net, targ_net = QNet(ob_dim, ac_dim).cuda(), QNet(ob_dim, ac_dim).cuda()
    targ_net.load_state_dict(qf_net.state_dict())
    targ_qf = CEMDeterministicSAVfunc(targ_net, ac_dim, num_sampling=256, save_memory=fixed)
    optim_qf = torch.optim.Adam(qf_net.parameters(), 3e-4)
    traj, losses = ReplayTraj(ob_dim, ac_dim), []
    for _ in range(epochs):
        batch = traj.random_batch(batch_size)
        with torch.no_grad():
            next_qs, _ = targ_qf.max(batch["next_obs"])
            targ = batch["rews"] + gamma * (1 - batch["dones"]) * next_qs
        qf_bellman_loss = F.mse_loss(qf_net(batch["obs"], batch["acs"]), targ)
        optim_qf.zero_grad()
        qf_bellman_loss.backward()
        optim_qf.step()
        for q, targ_q in zip(qf_net.parameters(), targ_net.parameters()):
            targ_q.detach().mul_(tau).add_(q.detach(), alpha=1 - tau)
        losses.append(qf_bellman_loss.item())
    return {"steps": len(losses)}
