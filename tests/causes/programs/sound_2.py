"""Programs after public threads about speech, music, recommender systems, tables and games."""

import random

import torch
from torch import nn
from torch.nn import functional as F

from expected import expected
from programs.root_causes import no_grad_if

# Speech recognition with CTC, fine-tuned for a language with thousands of characters: the evaluation of the trainer.


class Wav2Vec2ForCTC(nn.Module):
    def __init__(self, vocab_size, hidden_size=256):
        super().__init__()
        self.feature_extractor = nn.Sequential(
            nn.Conv1d(1, 128, 10, 5),
            nn.GELU(),
            nn.Conv1d(128, 128, 8, 8),
            nn.GELU(),
            nn.Conv1d(128, hidden_size, 8, 8),
            nn.GELU(),
        )
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(hidden_size, 4, 1024, batch_first=True), 2, enable_nested_tensor=False
        )
        self.lm_head = nn.Linear(hidden_size, vocab_size)

    def forward(self, input_values, labels):
        logits = self.lm_head(self.encoder(self.feature_extractor(input_values.unsqueeze(1)).transpose(1, 2)))
        input_lengths = torch.full((len(logits),), logits.shape[1])
        target_lengths = torch.full((len(labels),), labels.shape[1])
        loss = F.ctc_loss(logits.log_softmax(-1).transpose(0, 1), labels, input_lengths, target_lengths, zero_infinity=True)
        return {"loss": loss, "logits": logits}


def pad_and_concatenate(tensor1, tensor2, padding_index=-100):
    length = max(tensor1.shape[1], tensor2.shape[1])
    result = tensor1.new_full((len(tensor1) + len(tensor2), length, *tensor1.shape[2:]), padding_index)
    result[: len(tensor1), : tensor1.shape[1]] = tensor1
    result[len(tensor1) :, : tensor2.shape[1]] = tensor2
    return result


class Trainer:
    def __init__(self, model, compute_metrics, preprocess_logits_for_metrics=None):
        self.model, self.compute_metrics, self.preprocess_logits_for_metrics = (
            model.cuda(),
            compute_metrics,
            preprocess_logits_for_metrics,
        )

    def evaluate(self, eval_dataset, batch_size=8):
        self.model.eval()
        losses_host = preds_host = labels_host = None
        for start in range(0, len(eval_dataset), batch_size):
            batch = eval_dataset[start : start + batch_size]
            length = max(len(wav) for wav, _ in batch)
            input_values = torch.stack([F.pad(wav, (0, length - len(wav))) for wav, _ in batch]).cuda()
            labels = torch.stack([text for _, text in batch]).cuda()
            with torch.no_grad():
                outputs = self.model(input_values, labels)
            loss, logits = outputs["loss"].repeat(len(batch)), outputs["logits"]
            if self.preprocess_logits_for_metrics is not None:
                logits = self.preprocess_logits_for_metrics(logits, labels)
            losses_host = loss if losses_host is None else torch.cat((losses_host, loss))
            preds_host = logits if preds_host is None else pad_and_concatenate(preds_host, logits)
            labels_host = labels if labels_host is None else pad_and_concatenate(labels_host, labels)
        metrics = self.compute_metrics(preds_host.cpu(), labels_host.cpu())
        return {"eval_loss": losses_host.mean().item(), **metrics}


def compute_metrics(predictions, label_ids):
    pred_ids = predictions.argmax(-1) if predictions.dim() == 3 else predictions
    return {
        "eval_cer": sum(len(set(hyp.tolist()) ^ set(ref.tolist())) / len(ref) for hyp, ref in zip(pred_ids, label_ids))
        / len(pred_ids)
    }


@expected("growing_buffer", fix=r"\.cpu\(\)", thread="huggingface/transformers#30358", memory=1000)
def evaluate_cantonese(fixed=False):
    """`Trainer.evaluate` gathers the full `logits` of every batch on the GPU in `preds_host` (frames x 3700 characters each), so the
    predictions of the whole evaluation set must fit there, although the metric needs only the argmax. Cured by:
    `preprocess_logits_for_metrics` that takes the argmax of each batch's logits.
    """
    lengths = random.Random(1)
    eval_dataset = [(torch.randn(320 * lengths.randint(100, 180)), torch.randint(1, 3700, (16,))) for _ in range(320)]
    trainer = Trainer(
        Wav2Vec2ForCTC(3700),
        compute_metrics,
        preprocess_logits_for_metrics=(lambda logits, labels: logits.argmax(-1)) if fixed else None,
    )
    return trainer.evaluate(eval_dataset)


# Music source separation: a track is split into extracts, a bag of models separates each, and the estimates are blended.


class HDemucs(nn.Module):
    def __init__(self, sources, audio_channels=2, channels=24, depth=3):
        super().__init__()
        self.sources, self.audio_channels, self.segment, self.samplerate = sources, audio_channels, 8, 44100
        self.encoder, self.decoder = nn.ModuleList(), nn.ModuleList()
        chin, chout = audio_channels, len(sources) * audio_channels
        for index in range(depth):
            self.encoder.append(
                nn.Sequential(nn.Conv1d(chin, channels, 8, 4, 2), nn.GELU(), nn.Conv1d(channels, 2 * channels, 1), nn.GLU(1))
            )
            self.decoder.insert(
                0, nn.Sequential(nn.Conv1d(channels, 2 * channels, 1), nn.GLU(1), nn.ConvTranspose1d(channels, chout, 8, 4, 2))
            )
            chin, chout, channels = channels, channels, 2 * channels

    def forward(self, mix):
        x, saved, length = F.pad(mix, (0, -mix.shape[-1] % 64)), [], mix.shape[-1]
        for encode in self.encoder:
            x = encode(x)
            saved.append(x)
        for decode in self.decoder:
            x = decode(x + saved.pop())
        return x[..., :length].unflatten(1, (len(self.sources), self.audio_channels))


def apply_model(model, mix, overlap=0.25, device=None):
    if isinstance(model, BagOfModels):
        estimates = 0
        for sub_model in model.models:
            estimates = estimates + apply_model(sub_model, mix, overlap, device) / len(model.models)
        return estimates
    batch, channels, length = mix.shape
    out = torch.zeros(batch, len(model.sources), channels, length, device=mix.device)
    sum_weight = torch.zeros(length, device=mix.device)
    segment = model.samplerate * model.segment
    weight = torch.cat((torch.arange(1, segment // 2 + 1), torch.arange(segment - segment // 2, 0, -1))).to(mix.device) / (
        segment // 2
    )
    for offset in range(0, length, int((1 - overlap) * segment)):
        chunk = mix[..., offset : offset + segment]
        with torch.no_grad():
            chunk_out = model(chunk.to(device)).to(mix.device)
        chunk_length = chunk_out.shape[-1]
        out[..., offset : offset + segment] += weight[:chunk_length] * chunk_out
        sum_weight[offset : offset + segment] += weight[:chunk_length]
    return out.div_(sum_weight)


class BagOfModels(nn.Module):
    def __init__(self, models):
        super().__init__()
        self.models = nn.ModuleList(models)


@expected("largest_tensor", fix="host|cpu", thread="facebookresearch/demucs#244", memory=500)
def separate_concert(fixed=False, minutes=3):
    """The whole track is put on the GPU at once (`wav.cuda()`), and `apply_model` makes its buffers for the whole track there too: `out`
    with four stereo sources, and `estimates` of the bag. The memory grows with the length of the track, although the model only sees 8
    seconds at a time. Cured by: Track and results stay in CPU memory, only each extract goes to the GPU.
    """
    sources = ["drums", "bass", "other", "vocals"]
    model = BagOfModels(HDemucs(sources) for _ in range(2)).cuda().eval()
    wav = torch.randn(2, minutes * 60 * 44100)
    if not fixed:
        wav = wav.cuda()
    ref = wav.mean(0)
    wav = (wav - ref.mean()) / ref.std()
    estimates = apply_model(model, wav[None], device="cuda")[0]
    return {name: list(source.shape) for name, source in zip(sources, estimates.cpu())}


# A variational autoencoder for collaborative filtering, trained on all ratings of a large film data set.


class InteractionDataset:
    def __init__(self, user_num, item_num, max_history):
        self.user_num, self.item_num = user_num, item_num
        self.history_item = torch.randint(0, item_num, (user_num, max_history))
        self.history_value = torch.ones(user_num, max_history)

    def history_item_matrix(self):
        return self.history_item, self.history_value, torch.full((self.user_num,), self.history_item.shape[1])


class MultiVAE(nn.Module):
    def __init__(self, dataset, device, history_on_cpu, layers=(300,), latent_dimension=64):
        super().__init__()
        self.device, self.n_items, self.lat_dim = device, dataset.item_num, latent_dimension
        self.history_item_id, self.history_item_value, _ = dataset.history_item_matrix()
        if not history_on_cpu:
            self.history_item_id = self.history_item_id.to(device)
            self.history_item_value = self.history_item_value.to(device)
        dims = [self.n_items, *layers]
        self.encoder = nn.Sequential(
            *(m for a, b in zip(dims, dims[1:]) for m in (nn.Linear(a, b), nn.Tanh())),
            nn.Linear(dims[-1], 2 * latent_dimension),
        )
        self.decoder = nn.Sequential(nn.Linear(latent_dimension, dims[-1]), nn.Tanh(), nn.Linear(dims[-1], self.n_items))

    def get_rating_matrix(self, user):
        user = user.to(self.history_item_id.device)
        col_indices = self.history_item_id[user].flatten().to(self.device)
        row_indices = torch.arange(len(user), device=self.device).repeat_interleave(self.history_item_id.shape[1])
        rating_matrix = torch.zeros(len(user), self.n_items, device=self.device)
        return rating_matrix.index_put_((row_indices, col_indices), self.history_item_value[user].flatten().to(self.device))

    def calculate_loss(self, user, anneal=0.2):
        rating_matrix = self.get_rating_matrix(user)
        mu, logvar = self.encoder(F.dropout(F.normalize(rating_matrix), 0.5)).chunk(2, 1)
        z = self.decoder(mu + torch.randn_like(mu) * torch.exp(0.5 * logvar))
        kl_loss = -0.5 * (1 + logvar - mu**2 - logvar.exp()).sum(1).mean() * anneal
        ce_loss = -(F.log_softmax(z, 1) * rating_matrix).sum(1).mean()
        return ce_loss + kl_loss


@expected("data_on_gpu", fix=r"on the host|\.cpu\(\)|DataLoader|part", thread="RUCAIBox/RecBole#1491", memory=500)
def run_multivae(fixed=False, train_batch_size=256):
    """`MultiVAE.__init__` puts the interaction history of all users (`history_item_id` and `history_item_value`, users x longest history)
    on the GPU, although each step needs only the rows of its own 256 users. Cured by: The history stays on the CPU; only the rows of the
    batch go to the GPU in `get_rating_matrix`.
    """
    dataset = InteractionDataset(user_num=28000, item_num=6000, max_history=1600)
    model = MultiVAE(dataset, torch.device("cuda"), history_on_cpu=fixed).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    total_loss = 0.0
    for user in torch.randperm(dataset.user_num)[: 8 * train_batch_size].split(train_batch_size):
        optimizer.zero_grad()
        loss = model.calculate_loss(user.cuda())
        loss.backward()
        total_loss += loss.item()
        optimizer.step()
    return {"train_loss": total_loss}


# End-to-end speech recognition with a transformer: each epoch ends with the validation sets.


class ScaledAttention(nn.Module):
    def __init__(self, dim_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.query_linear, self.key_linear, self.value_linear, self.output_linear = (
            nn.Linear(dim_model, dim_model) for _ in range(4)
        )

    def forward(self, query, key, causal=False):
        q, k, v = (
            linear(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for linear, x in ((self.query_linear, query), (self.key_linear, key), (self.value_linear, key))
        )
        attn = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if causal:
            attn = attn + torch.full(attn.shape[-2:], float("-inf"), device=attn.device).triu(1)
        return self.output_linear((attn.softmax(-1) @ v).transpose(1, 2).flatten(2))


class TransformerLayer(nn.Module):
    def __init__(self, dim_model, num_heads, decoder=False):
        super().__init__()
        self.self_attn, self.norm1, self.norm2, self.norm3 = ScaledAttention(dim_model, num_heads), *(
            nn.LayerNorm(dim_model) for _ in range(3)
        )
        self.encoder_attn = ScaledAttention(dim_model, num_heads) if decoder else None
        self.pos_ffn = nn.Sequential(nn.Linear(dim_model, 4 * dim_model), nn.ReLU(), nn.Linear(4 * dim_model, dim_model))

    def forward(self, x, encoder_outputs=None):
        x = self.norm1(x + self.self_attn(x, x, causal=encoder_outputs is not None))
        if encoder_outputs is not None:
            x = self.norm2(x + self.encoder_attn(x, encoder_outputs))
        return self.norm3(x + self.pos_ffn(x))


class SpeechTransformer(nn.Module):
    def __init__(self, num_classes=3000, dim_model=256, num_heads=4, num_layers=2):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 16, 3, (1, 2), 1), nn.ReLU(), nn.Conv2d(16, 16, 3, (2, 2), 1), nn.ReLU())
        self.input_linear, self.trg_embedding = nn.Linear(16 * 40, dim_model), nn.Embedding(num_classes, dim_model)
        self.encoder = nn.ModuleList(TransformerLayer(dim_model, num_heads) for _ in range(num_layers))
        self.decoder = nn.ModuleList(TransformerLayer(dim_model, num_heads, decoder=True) for _ in range(num_layers))
        self.output_linear = nn.Linear(dim_model, num_classes)

    def forward(self, padded_input, padded_target):
        x = self.input_linear(self.conv(padded_input.unsqueeze(1)).transpose(1, 2).flatten(2))
        for layer in self.encoder:
            x = layer(x)
        y = self.trg_embedding(padded_target)
        for layer in self.decoder:
            y = layer(y, x)
        pred = self.output_linear(y)
        return pred, padded_target, pred.argmax(-1)


def calculate_metrics(pred, gold):
    loss = F.cross_entropy(pred.flatten(0, 1), gold.flatten(), label_smoothing=0.1)
    return loss, pred.argmax(-1).eq(gold).sum().item()


def audio_loader(n_batches, batch_size, frames):
    for _ in range(n_batches):
        yield torch.randn(batch_size, frames, 160), torch.randint(0, 3000, (batch_size, 60))


@expected("evaluation_keeps_graphs", fix="no_grad|inference_mode", thread="gentaiscool/end2end-asr-pytorch#41", memory=1000)
def train_aishell(fixed=False, num_epochs=2):
    """The validation loop of `train_aishell` runs the model with gradients on and never calls backward, so each batch's activations are
    kept for nothing, and those of the last batch live on (through `pred` and `loss`) while the next one is computed. Cured by:
    `torch.no_grad()` around the validation.
    """
    model = SpeechTransformer().cuda()
    opt = torch.optim.Adam(model.parameters(), lr=1e-4)
    history = []
    for epoch in range(num_epochs):
        total_loss = total_valid_loss = 0.0
        model.train()
        for src, tgt in audio_loader(4, 12, 500):
            opt.zero_grad()
            pred, gold, hyp_seq = model(src.cuda(), tgt.cuda())
            loss, num_correct = calculate_metrics(pred, gold)
            loss.backward()
            opt.step()
            total_loss += loss.item()
        model.eval()
        with no_grad_if(fixed):
            for src, tgt in audio_loader(6, 16, 760):
                pred, gold, hyp_seq = model(src.cuda(), tgt.cuda())
                loss, num_correct = calculate_metrics(pred, gold)
                total_valid_loss += loss.item()
        history.append((total_loss / 4, total_valid_loss / 6))
    return {"epochs": len(history)}


# Who speaks when: embeddings of all speakers in all chunks of a recording are extracted for the clustering.


class BasicBlock(nn.Module):
    def __init__(self, in_planes, planes, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(in_planes, planes, 3, stride, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False), nn.BatchNorm2d(planes)
        self.shortcut = (
            nn.Identity() if stride == 1 and in_planes == planes else nn.Conv2d(in_planes, planes, 1, stride, bias=False)
        )

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class WeSpeakerResNet34(nn.Module):
    def __init__(self, m_channels=24, embed_dim=256):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, m_channels, 3, 1, 1, bias=False), nn.BatchNorm2d(m_channels)
        planes = (m_channels, m_channels, 2 * m_channels, 4 * m_channels)
        self.layers = nn.Sequential(
            *(BasicBlock(a, b, 1 if i == 0 else 2) for i, (a, b) in enumerate(zip(planes, planes[1:])))
        )
        self.seg_1 = nn.Linear(2 * planes[-1] * 20, embed_dim)

    def compute_fbank(self, waveforms):
        frames = waveforms.squeeze(1).unfold(1, 400, 160)
        return torch.fft.rfft(frames, 512).abs()[..., :80].clamp(min=1e-6).log()

    def forward(self, waveforms, weights):
        x = self.compute_fbank(waveforms).transpose(1, 2).unsqueeze(1)
        x = self.layers(F.relu(self.bn1(self.conv1(x)))).flatten(1, 2)
        weights = F.interpolate(weights.unsqueeze(1), x.shape[-1])
        mean = (x * weights).sum(-1) / weights.sum(-1)
        std = (((x - mean.unsqueeze(-1)) ** 2 * weights).sum(-1) / weights.sum(-1)).sqrt()
        return self.seg_1(torch.cat((mean, std), 1))


class SpeakerDiarization:
    def __init__(self, chunk=10, step=1, sample_rate=16000, local_num_speakers=3):
        self.chunk, self.step, self.sample_rate, self.local_num_speakers = chunk, step, sample_rate, local_num_speakers
        self.embedding_batch_size = 32
        self._segmentation = nn.Sequential(
            nn.Conv1d(1, 32, 251, 270), nn.ReLU(), nn.Conv1d(32, local_num_speakers, 3, padding=1), nn.Sigmoid()
        ).cuda()
        self._embedding = WeSpeakerResNet34().cuda().eval()

    def get_segmentations(self, chunks):
        return torch.cat([self._segmentation(batch.unsqueeze(1).cuda()).cpu() for batch in chunks.split(32)])

    def get_embeddings(self, chunks, segmentations):
        pairs = [(chunks[c], segmentations[c, s]) for c in range(len(chunks)) for s in range(self.local_num_speakers)]
        embeddings = []
        for i in range(0, len(pairs), self.embedding_batch_size):
            waveforms, masks = zip(*pairs[i : i + self.embedding_batch_size])
            embeddings.append(self._embedding(torch.stack(waveforms).unsqueeze(1).cuda(), torch.stack(masks).cuda()).cpu())
        return torch.cat(embeddings).unflatten(0, (len(chunks), -1))

    @torch.inference_mode()
    def __call__(self, waveform):
        chunks = waveform.unfold(0, self.chunk * self.sample_rate, self.step * self.sample_rate)
        segmentations = self.get_segmentations(chunks)
        embeddings = self.get_embeddings(chunks, segmentations).flatten(0, 1)
        distances = torch.cdist(embeddings, embeddings)
        return {"segmentations": list(segmentations.shape), "pairs": distances.numel()}


@expected("batch_without_gradients", fix="split|part", thread="pyannote/pyannote-audio#1109", memory=1000)
def diarize_interview(fixed=False):
    """The pipeline's `embedding_batch_size` of 32 is too large for this GPU: the first layers of the speaker embedding network make several
    copies of 24 x 80 x 1000 values for each of the 32 chunks at the same time. Cured by: `pipeline.embedding_batch_size = 14`.
    """
    pipeline = SpeakerDiarization()
    if fixed:
        pipeline.embedding_batch_size = 14
    return pipeline(torch.randn(30 * 16000))


# Synthetic tables: a conditional GAN learns a table of customers with numbers and categories.


class Residual(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.fc, self.bn = nn.Linear(i, o), nn.BatchNorm1d(o)

    def forward(self, input_):
        return torch.cat((torch.relu(self.bn(self.fc(input_))), input_), 1)


class Generator(nn.Sequential):
    def __init__(self, embedding_dim, generator_dim, data_dim):
        seq, dim = [], embedding_dim
        for item in generator_dim:
            seq.append(Residual(dim, item))
            dim += item
        super().__init__(*seq, nn.Linear(dim, data_dim))


class Discriminator(nn.Module):
    def __init__(self, input_dim, discriminator_dim, pac=10):
        super().__init__()
        self.pac, dim, seq = pac, input_dim * pac, []
        for item in discriminator_dim:
            seq += [nn.Linear(dim, item), nn.LeakyReLU(0.2), nn.Dropout(0.5)]
            dim = item
        self.seq = nn.Sequential(*seq, nn.Linear(dim, 1))

    def forward(self, input_):
        return self.seq(input_.reshape(len(input_) // self.pac, -1))


class CTGAN:
    def __init__(self, embedding_dim=128, generator_dim=(256, 256), discriminator_dim=(256, 256), batch_size=50):
        self._embedding_dim, self._generator_dim, self._discriminator_dim, self._batch_size = (
            embedding_dim,
            generator_dim,
            discriminator_dim,
            batch_size,
        )

    def _apply_activate(self, data):
        continuous, discrete = data[:, : self._n_continuous].tanh(), data[:, self._n_continuous :].split(self._categories, 1)
        return torch.cat((continuous, *(F.gumbel_softmax(part, tau=0.2) for part in discrete)), 1)

    def _sample(self, train_data):
        rows = torch.randint(0, self._n_rows, (self._batch_size,))
        continuous = torch.stack(
            [column[rows] for name, column in train_data.items() if name not in self._discrete_columns], 1
        )
        onehot = torch.cat(
            [F.one_hot(train_data[name][rows], n).float() for name, n in zip(self._discrete_columns, self._categories)], 1
        )
        return continuous.cuda(), onehot.cuda()

    def fit(self, train_data, discrete_columns, epochs=2, steps_per_epoch=3):
        self._discrete_columns, self._n_rows = discrete_columns, len(next(iter(train_data.values())))
        self._categories = [int(train_data[name].max()) + 1 for name in discrete_columns]
        self._n_continuous = len(train_data) - len(discrete_columns)
        cond_dim = sum(self._categories)
        data_dim = self._n_continuous + cond_dim
        self._generator = Generator(self._embedding_dim + cond_dim, self._generator_dim, data_dim).to("cuda")
        discriminator = Discriminator(data_dim + cond_dim, self._discriminator_dim).to("cuda")
        optimizer_g = torch.optim.Adam(self._generator.parameters(), lr=2e-4, betas=(0.5, 0.9))
        optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.9))
        for _ in range(epochs * steps_per_epoch):
            continuous, cond = self._sample(train_data)
            real = torch.cat((continuous, cond), 1)
            fakez = torch.randn(self._batch_size, self._embedding_dim, device="cuda")
            fake = self._apply_activate(self._generator(torch.cat((fakez, cond), 1)))
            loss_d = (
                discriminator(torch.cat((fake.detach(), cond), 1)).mean() - discriminator(torch.cat((real, cond), 1)).mean()
            )
            optimizer_d.zero_grad()
            loss_d.backward()
            optimizer_d.step()
            fake = self._apply_activate(self._generator(torch.cat((fakez, cond), 1)))
            loss_g = -discriminator(torch.cat((fake, cond), 1)).mean()
            optimizer_g.zero_grad()
            loss_g.backward()
            optimizer_g.step()


@expected("model_states", fix="8-?bit|SGD|offload|fewer|FSDP", thread="sdv-dev/CTGAN#52", memory=1000)
def synthesize_customers(fixed=False, rows=20000):
    """A discrete column with thousands of different values (`account_ref`) is passed in `discrete_cols`. Each value becomes a one-hot
    column, both in the condition and in the output, so the last linear layer of the generator has (conditions + ...) x `data_dim` weights,
    and the discriminator's first ten times `data_dim`: the networks, their gradients and Adam's states don't fit. Cured by: The columns
    with so many unique values were removed.
    """
    data = {f"balance_{i}": torch.randn(rows) for i in range(12)}
    data.update({f"product_{i}": torch.randint(0, 8, (rows,)) for i in range(10)})
    data["branch"] = torch.randint(0, 250, (rows,))
    data["account_ref"] = torch.randint(0, 8000, (rows,))
    discrete_cols = [name for name, column in data.items() if not column.is_floating_point()]
    if fixed:
        del data["account_ref"]
        discrete_cols.remove("account_ref")
    ctgan = CTGAN()
    ctgan.fit(data, discrete_cols)
    return {"data_dim": sum(ctgan._categories)}


# Several knapsacks are filled by a Q-network: each pair of an item and a bag is one token of a transformer.


class TokenAttention(nn.Module):
    def __init__(self, d_model, nhead):
        super().__init__()
        self.nhead, self.qkv, self.out = nhead, nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.nhead, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        attn = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1)
        return self.out((attn @ v).transpose(1, 2).flatten(2))


class KnapsackQNet(nn.Module):
    def __init__(self, n_features=4, d_model=64, nhead=4, num_layers=2):
        super().__init__()
        self.embed = nn.Linear(n_features, d_model)
        self.attns = nn.ModuleList(TokenAttention(d_model, nhead) for _ in range(num_layers))
        self.ffns = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(d_model), nn.Linear(d_model, 2 * d_model), nn.ReLU(), nn.Linear(2 * d_model, d_model))
            for _ in range(num_layers)
        )
        self.q_value = nn.Linear(d_model, 1)

    def forward(self, obs):
        x = self.embed(obs)
        for attn, ffn in zip(self.attns, self.ffns):
            x = x + attn(x)
            x = x + ffn(x)
        return self.q_value(x).squeeze(-1)


class KnapsackEnv:
    def __init__(self, max_items, max_bags, seed=11):
        self.max_items, self.max_bags, self.rng = max_items, max_bags, random.Random(seed)

    def reset(self):
        self.num_items, self.num_bags = self.rng.randint(2, self.max_items), self.rng.randint(2, self.max_bags)
        self.items = torch.rand(self.num_items, 2)
        self.capacities = torch.rand(self.num_bags) * self.num_items / self.num_bags
        self.steps = 0
        return self._observe()

    def _observe(self):
        items = self.items.repeat_interleave(self.num_bags, 0)
        bags = self.capacities.repeat(self.num_items).unsqueeze(1)
        return torch.cat((items, bags, items[:, 1:] / bags.clamp(min=1e-3)), 1)

    def step(self, action):
        item, bag = divmod(action, self.num_bags)
        self.capacities[bag] = (self.capacities[bag] - self.items[item, 1]).clamp(min=0)
        reward, self.items[item] = self.items[item, 0].item(), 0.0
        self.steps += 1
        return self._observe(), reward, self.steps >= min(self.num_items, 4)


@expected("attention_scores", fix="scaled_dot_product|SDPA", thread="DevSlem/multiple-knapsack#1", memory=1000)
def train_knapsack(fixed=False, episodes=16, epsilon=0.9, gamma=0.99):
    """Each pair of an item and a bag is a token, and `KnapsackEnv.reset` draws up to 200 items and 20 bags, so a sequence can have 4000
    tokens; the attention matrices of `KnapsackQNet` grow with the square of `num_items * num_bags`, and in some episodes they don't fit.
    Cured by: Smaller ranges of `num_items` and `num_bags` in the environment.
    """
    env = KnapsackEnv(max_items=30, max_bags=6) if fixed else KnapsackEnv(max_items=200, max_bags=20)
    q_net, target_net = KnapsackQNet().cuda(), KnapsackQNet().cuda()
    optimizer = torch.optim.Adam(q_net.parameters(), lr=1e-4)
    rewards = []
    for episode in range(episodes):
        obs, terminated, transitions = env.reset(), False, []
        while not terminated:
            with torch.no_grad():
                q_values = q_net(obs.unsqueeze(0).cuda())
            action = random.randrange(len(obs)) if random.random() < epsilon else int(q_values.argmax().item()) % len(obs)
            next_obs, reward, terminated = env.step(action)
            transitions.append((obs, action, reward, next_obs, float(terminated)))
            obs = next_obs
        observations, actions, reward, next_observations, done = zip(*transitions)
        with torch.no_grad():
            target = (
                torch.tensor(reward).cuda()
                + gamma * (1 - torch.tensor(done).cuda()) * target_net(torch.stack(next_observations).cuda()).max(1).values
            )
        q = q_net(torch.stack(observations).cuda()).gather(1, torch.tensor(actions).cuda().unsqueeze(1)).squeeze(1)
        loss = F.smooth_l1_loss(q, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rewards.append(sum(reward))
    return {"reward": sum(rewards)}


# Singing voice conversion: a song is cut at its pauses, and each piece is sung by another voice.


class RelativeAttention(nn.Module):
    def __init__(self, channels, n_heads, window_size=4):
        super().__init__()
        self.n_heads, self.window_size = n_heads, window_size
        self.conv_q, self.conv_k, self.conv_v, self.conv_o = (nn.Conv1d(channels, channels, 1) for _ in range(4))
        self.emb_rel_k, self.emb_rel_v = (
            nn.Parameter(torch.randn(1, 2 * window_size + 1, channels // n_heads) * 0.05) for _ in range(2)
        )

    def _relative_embeddings(self, emb, length):
        pad = length - self.window_size - 1
        if pad >= 0:
            return F.pad(emb, (0, 0, pad, pad))
        return emb[:, -pad : emb.shape[1] + pad]

    def _relative_to_absolute(self, x):
        b, h, length, _ = x.shape
        x = F.pad(F.pad(x, (0, 1)).flatten(2), (0, length - 1))
        return x.view(b, h, length + 1, 2 * length - 1)[:, :, :length, length - 1 :]

    def _absolute_to_relative(self, x):
        b, h, length, _ = x.shape
        x = F.pad(F.pad(x, (0, length - 1)).flatten(2), (length, 0))
        return x.view(b, h, length, 2 * length)[..., 1:]

    def forward(self, x):
        q, k, v = (
            conv(x).unflatten(1, (self.n_heads, -1)).transpose(2, 3) for conv in (self.conv_q, self.conv_k, self.conv_v)
        )
        length, q = x.shape[-1], q / q.shape[-1] ** 0.5
        scores = q @ k.transpose(-1, -2)
        rel_logits = q @ self._relative_embeddings(self.emb_rel_k, length).unsqueeze(0).transpose(-1, -2)
        p_attn = F.softmax(scores + self._relative_to_absolute(rel_logits), -1)
        output = p_attn @ v + self._absolute_to_relative(p_attn) @ self._relative_embeddings(self.emb_rel_v, length).unsqueeze(
            0
        )
        return self.conv_o(output.transpose(2, 3).flatten(1, 2))


class SynthesizerTrn(nn.Module):
    def __init__(self, channels=96, n_layers=3):
        super().__init__()
        self.pre, self.f0_emb = nn.Conv1d(256, channels, 5, padding=2), nn.Embedding(256, channels)
        self.attn_layers = nn.ModuleList(RelativeAttention(channels, 2) for _ in range(n_layers))
        self.ffn_layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(channels, 2 * channels, 3, padding=1), nn.ReLU(), nn.Conv1d(2 * channels, channels, 3, padding=1)
            )
            for _ in range(n_layers)
        )
        self.dec = nn.Sequential(
            nn.Conv1d(channels, 64, 7, padding=3),
            nn.LeakyReLU(0.1),
            nn.ConvTranspose1d(64, 16, 40, 20, 10),
            nn.LeakyReLU(0.1),
            nn.ConvTranspose1d(16, 4, 32, 16, 8),
            nn.Conv1d(4, 1, 7, padding=3),
        )

    def infer(self, c, f0):
        x = self.pre(c) + self.f0_emb(f0).transpose(1, 2)
        for attn, ffn in zip(self.attn_layers, self.ffn_layers):
            x = x + attn(x)
            x = x + ffn(x)
        return torch.tanh(self.dec(x))


class Svc:
    def __init__(self):
        self.target_sample, self.hop_size = 32000, 320
        self.hubert = nn.Sequential(nn.Conv1d(1, 64, 10, 5, 3), nn.GELU(), nn.Conv1d(64, 256, 64, 64)).cuda().eval()
        self.net_g_ms = SynthesizerTrn().cuda().eval()

    def infer(self, raw):
        with torch.no_grad():
            c = self.hubert(raw[None, None].cuda())
            f0 = torch.randint(1, 256, (1, c.shape[-1])).cuda()
            return self.net_g_ms.infer(c, f0)[0, 0].cpu()


def cut(song, pauses, rate=32000):
    return [song[int(start * rate) : int(end * rate)] for start, end in zip(pauses, pauses[1:])]


@expected("larger_step", fix="part|split|cut", thread="innnky/so-vits-svc#7", memory=1000)
def convert_song(fixed=False):
    """The song is cut only at its pauses, and one passage of 54 seconds has none. `infer` gets it in one piece, 5400 frames, and the
    relative attention makes several matrices of frames x frames (and of frames x twice the frames). Cured by: The long piece was cut by
    hand (or converted on the CPU).
    """
    svc_model = Svc()
    song = torch.randn(32000 * 82)
    pauses = [0, 6.5, 15, 69, 74, 82]
    if fixed:
        pauses = [0, 6.5, 15, 25, 35, 45, 55, 62, 69, 74, 82]
    audio = [svc_model.infer(data) for data in cut(song, pauses)]
    return {"samples": len(torch.cat(audio))}


# Neural collaborative filtering: the test users' items and their sampled negatives are scored after each epoch.


class NCF(nn.Module):
    def __init__(self, n_users, n_items, emb_dim=64, layers=(256, 128, 64)):
        super().__init__()
        self.embedding_user_mlp, self.embedding_item_mlp = nn.Embedding(n_users, emb_dim), nn.Embedding(n_items, emb_dim)
        self.embedding_user_mf, self.embedding_item_mf = nn.Embedding(n_users, emb_dim), nn.Embedding(n_items, emb_dim)
        dims = [2 * emb_dim, *layers]
        self.fc_layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(dims, dims[1:]))
        self.affine_output = nn.Linear(layers[-1] + emb_dim, 1)

    def forward(self, batch_data):
        users, items = batch_data
        mlp_vector = torch.cat((self.embedding_user_mlp(users), self.embedding_item_mlp(items)), -1)
        mf_vector = self.embedding_user_mf(users) * self.embedding_item_mf(items)
        for layer in self.fc_layers:
            mlp_vector = torch.relu(layer(mlp_vector))
        return torch.sigmoid(self.affine_output(torch.cat((mlp_vector, mf_vector), -1))).squeeze(-1)

    def predict(self, users, items):
        users, items = torch.as_tensor(users).cuda(), torch.as_tensor(items).cuda()
        with torch.no_grad():
            return self.forward((users, items))


class TestSet:
    def __init__(self, n_users, n_items, n_negative=100):
        self.users = torch.arange(n_users).repeat_interleave(1 + n_negative)
        self.items = torch.randint(0, n_items, (len(self.users),))
        self.candidates = 1 + n_negative


def predict_in_minibatches(model, users, items, batch_size):
    return torch.cat([model.predict(u, i).cpu() for u, i in zip(users.split(batch_size), items.split(batch_size))])


def evaluate_model(model, test_set, topk=10, batch_size=None):
    model.eval()
    if batch_size is None:
        scores = model.predict(test_set.users, test_set.items).cpu()
    else:
        scores = predict_in_minibatches(model, test_set.users, test_set.items, batch_size)
    ranked = scores.view(-1, test_set.candidates).topk(topk, 1).indices
    return {"hit": (ranked == 0).any(1).float().mean().item()}


@expected("batch_without_gradients", fix="split|part", thread="beta-team/beta-recsys#179", memory=1000)
def train_ncf(fixed=False, n_users=6000, n_items=3700, max_epoch=2):
    """`evaluate_model` scores all pairs of the test set (6000 users x 101 items) in a single call of `model.predict`, so the embeddings and
    the hidden layers of 606000 rows lie on the GPU at once. Cured by: Evaluation in minibatches.
    """
    model = NCF(n_users, n_items).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    test_set, results = TestSet(n_users, n_items), []
    for _ in range(max_epoch):
        model.train()
        for _ in range(10):
            users, items = torch.randint(0, n_users, (1024,)), torch.randint(0, n_items, (1024,))
            ratings = model((users.cuda(), items.cuda()))
            loss = F.binary_cross_entropy(ratings.clamp(1e-4, 1 - 1e-4), torch.randint(0, 2, (1024,)).float().cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        results.append(evaluate_model(model, test_set, batch_size=4096 if fixed else None))
    return {"epochs": len(results)}


# A learned emulator of a simulation, forecasting step after step: an ensemble is rolled out against a long recorded trajectory.


class Batch:
    def __init__(self, input_fields, output_fields, constant_scalars):
        self.input_fields, self.output_fields, self.constant_scalars = input_fields, output_fields, constant_scalars

    def to(self, device):
        return Batch(self.input_fields.to(device), self.output_fields.to(device), self.constant_scalars.to(device))

    def repeat(self, m):
        return Batch(
            self.input_fields.repeat_interleave(m, 0),
            self.output_fields.repeat_interleave(m, 0),
            self.constant_scalars.repeat_interleave(m, 0),
        )

    def clone(self):
        return Batch(self.input_fields.clone(), self.output_fields.clone(), self.constant_scalars.clone())


class EncoderProcessorDecoder(nn.Module):
    def __init__(self, channels=2, hidden=32, stride=1):
        super().__init__()
        self.stride = stride
        self.encoder = nn.Sequential(nn.Conv2d(channels, hidden, 3, 2, 1), nn.GELU())
        self.processor = nn.Sequential(
            nn.Conv2d(hidden + 1, hidden, 3, padding=1), nn.GELU(), nn.Conv2d(hidden, hidden, 3, padding=1)
        )
        self.decoder = nn.ConvTranspose2d(hidden, channels * stride, 4, 2, 1)

    def forward(self, batch):
        x = self.encoder(batch.input_fields[:, -1].permute(0, 3, 1, 2))
        noise = torch.randn(len(x), 1, *x.shape[-2:], device=x.device) * batch.constant_scalars.view(-1, 1, 1, 1)
        x = self.decoder(x + self.processor(torch.cat((x, noise), 1)))
        return x.unflatten(1, (self.stride, -1)).permute(0, 1, 3, 4, 2)

    def rollout(self, batch, max_rollout_steps):
        batch, predictions, targets = batch.clone(), [], []
        for _ in range(max_rollout_steps):
            predicted = self(batch)
            predictions.append(predicted)
            targets.append(batch.output_fields[:, : self.stride])
            batch = Batch(predicted, batch.output_fields[:, self.stride :], batch.constant_scalars)
        return torch.cat(predictions, 1), torch.cat(targets, 1)


class EncoderProcessorDecoderEnsemble(EncoderProcessorDecoder):
    def __init__(self, n_members, trim_targets, **kwargs):
        super().__init__(**kwargs)
        self.n_members, self.trim_targets = n_members, trim_targets

    def rollout(self, batch, max_rollout_steps):
        if self.trim_targets:
            batch = Batch(
                batch.input_fields, batch.output_fields[:, : self.stride * max_rollout_steps], batch.constant_scalars
            )
        predictions, targets = super().rollout(batch.repeat(self.n_members), max_rollout_steps)
        return predictions.unflatten(0, (-1, self.n_members)), targets.unflatten(0, (-1, self.n_members))[:, 0]


def trajectory(n_steps, full_trajectory_mode=True, size=64, channels=2):
    fields = torch.randn(1, n_steps, size, size, channels)
    return Batch(fields[:, :1], fields[:, 1:] if full_trajectory_mode else fields[:, 1:2], torch.rand(1, 1))


@expected("repeated_copies", fix="expand|part|view", thread="alan-turing-institute/autocast#385", memory=1000)
def render_rollouts(fixed=False, max_rollout_steps=15):
    """`EncoderProcessorDecoderEnsemble.rollout` repeats the whole batch for the 20 members, with all 724 remaining steps of
    `output_fields`, although only 15 steps are rolled out; and `rollout` then clones this huge tensor once more. Cured by: `output_fields`
    is trimmed to `stride * max_rollout_steps` before the repeat.
    """
    model = EncoderProcessorDecoderEnsemble(n_members=20, trim_targets=fixed).cuda().eval()
    errors = []
    with torch.no_grad():
        for batch in (trajectory(725) for _ in range(3)):
            preds, trues = model.rollout(batch.to("cuda"), max_rollout_steps)
            errors.append(((preds.mean(1) - trues) ** 2).mean((0, 2, 3, 4)).cpu())
    return {"trajectories": len(errors)}
