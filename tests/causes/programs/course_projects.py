"""Programs after public threads of everyday users: course projects, text classification, retrieval, recommenders, time series."""
import math
import re

import numpy as np
import torch
import torchvision
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

from expected import expected


# Traffic speeds of the sensors of a road network are forecast with graph and temporal convolutions.

class TimeBlock(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size=3):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, (1, kernel_size))
        self.conv2 = nn.Conv2d(in_channels, out_channels, (1, kernel_size))
        self.conv3 = nn.Conv2d(in_channels, out_channels, (1, kernel_size))

    def forward(self, X):
        X = X.permute(0, 3, 1, 2)
        gated = self.conv1(X) + torch.sigmoid(self.conv2(X))
        return F.relu(gated + self.conv3(X)).permute(0, 2, 3, 1)


class STGCNBlock(nn.Module):
    def __init__(self, in_channels, spatial_channels, out_channels, num_nodes):
        super().__init__()
        self.temporal1 = TimeBlock(in_channels, out_channels)
        self.Theta1 = nn.Parameter(torch.empty(out_channels, spatial_channels).uniform_(-0.25, 0.25))
        self.temporal2 = TimeBlock(spatial_channels, out_channels)
        self.batch_norm = nn.BatchNorm2d(num_nodes)

    def forward(self, X, A_hat):
        t = self.temporal1(X)
        lfs = torch.einsum("ij,jklm->kilm", A_hat, t.permute(1, 0, 2, 3))
        return self.batch_norm(self.temporal2(F.relu(lfs @ self.Theta1)))


class STGCN(nn.Module):
    def __init__(self, num_nodes, num_features, num_timesteps_input, num_timesteps_output):
        super().__init__()
        self.block1 = STGCNBlock(num_features, 16, 64, num_nodes)
        self.block2 = STGCNBlock(64, 16, 64, num_nodes)
        self.last_temporal = TimeBlock(64, 64)
        self.fully = nn.Linear((num_timesteps_input - 10) * 64, num_timesteps_output)

    def forward(self, A_hat, X):
        out = self.last_temporal(self.block2(self.block1(X, A_hat), A_hat))
        return self.fully(out.reshape(out.shape[0], out.shape[1], -1))


def generate_dataset(X, num_timesteps_input, num_timesteps_output):
    starts = range(X.shape[2] - num_timesteps_input - num_timesteps_output + 1)
    features = [X[:, :, i:i + num_timesteps_input].transpose(0, 2, 1) for i in starts]
    target = [X[:, 0, i + num_timesteps_input:i + num_timesteps_input + num_timesteps_output] for i in starts]
    return torch.from_numpy(np.array(features)), torch.from_numpy(np.array(target))


def get_normalized_adj(A):
    A = A + np.eye(len(A), dtype=np.float32)
    diag = 1 / np.sqrt(A.sum(1))
    return diag[:, None] * A * diag[None]


@expected("batch_without_gradients", fix="split|parts", thread="FelixOpolka/STGCN-PyTorch#12", memory=1000, held_back=True)
def train_traffic_forecast(fixed=False):
    """After each training epoch the whole validation set is passed through the network in one call (`out = net(A_wave, val_input)`), not in
    batches of `batch_size` as in training, so the feature maps of all validation windows exist at once. Cured by: validate in slices of
    `batch_size` of `val_input` and average.
    """
    num_timesteps_input, num_timesteps_output, epochs, batch_size = 12, 3, 2, 50
    device = torch.device("cuda")
    rng = np.random.default_rng(7)
    A = (rng.random((207, 207)) < 0.04).astype(np.float32)
    X = rng.standard_normal((207, 2, 6000), dtype=np.float32)
    split_line1, split_line2 = int(X.shape[2] * 0.6), int(X.shape[2] * 0.8)
    training_input, training_target = generate_dataset(X[:, :, :split_line1], num_timesteps_input, num_timesteps_output)
    val_input, val_target = generate_dataset(X[:, :, split_line1:split_line2], num_timesteps_input, num_timesteps_output)
    A_wave = torch.from_numpy(get_normalized_adj(A)).to(device)
    net = STGCN(A_wave.shape[0], training_input.shape[3], num_timesteps_input, num_timesteps_output).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    loss_criterion = nn.MSELoss()
    validation_losses = []
    for epoch in range(epochs):
        net.train()
        permutation = torch.randperm(training_input.shape[0])
        for i in range(0, training_input.shape[0], batch_size):
            optimizer.zero_grad()
            indices = permutation[i:i + batch_size]
            X_batch, y_batch = training_input[indices].to(device), training_target[indices].to(device)
            loss = loss_criterion(net(A_wave, X_batch), y_batch)
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            net.eval()
            val_input, val_target = val_input.to(device), val_target.to(device)
            if fixed:
                tmp_val_losses = []
                for i in range(0, val_input.shape[0], batch_size):
                    out = net(A_wave, val_input[i:i + batch_size])
                    tmp_val_losses.append(loss_criterion(out, val_target[i:i + batch_size]).item())
                validation_losses.append(sum(tmp_val_losses) / len(tmp_val_losses))
            else:
                out = net(A_wave, val_input)
                validation_losses.append(loss_criterion(out, val_target).item())
            out = None
            val_input, val_target = val_input.to("cpu"), val_target.to("cpu")
    return validation_losses[-1]


# Images are denoised by a network that works on four downsampled images and a map of the noise level.

def downsample(x):
    N, C, W, H = x.size()
    down_features = torch.zeros(N, 4 * C, W // 2, H // 2, device=x.device)
    for idx, (row, column) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        down_features[:, idx:4 * C:4] = x[:, :, row::2, column::2]
    return down_features


def upsample(x):
    N, Cin, Win, Hin = x.size()
    up_feature = torch.zeros((N, Cin // 4, Win * 2, Hin * 2)).type(x.type())
    for idx, (row, column) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        up_feature[:, :, row::2, column::2] = x[:, idx:Cin:4]
    return up_feature


class FFDNet(nn.Module):
    def __init__(self, num_conv_layers=15, downsampled_channels=5, num_feature_maps=64, output_features=4):
        super().__init__()
        layers = [nn.Conv2d(downsampled_channels, num_feature_maps, 3, padding=1, bias=False), nn.ReLU(inplace=True)]
        for _ in range(num_conv_layers - 2):
            layers += [nn.Conv2d(num_feature_maps, num_feature_maps, 3, padding=1, bias=False),
                       nn.BatchNorm2d(num_feature_maps), nn.ReLU(inplace=True)]
        layers.append(nn.Conv2d(num_feature_maps, output_features, 3, padding=1, bias=False))
        self.intermediate_dncnn = nn.Sequential(*layers)

    def forward(self, x, noise_sigma):
        noise_map = noise_sigma.view(x.shape[0], 1, 1, 1).repeat(1, x.shape[1], x.shape[2] // 2, x.shape[3] // 2)
        x_cat = torch.cat((noise_map, downsample(x)), 1)
        return upsample(self.intermediate_dncnn(x_cat))


def image_to_patches(image, patch_size):
    C, W, H = image.shape
    return [image[:, w:w + patch_size, h:h + patch_size] for w in range(0, W - patch_size + 1, patch_size)
            for h in range(0, H - patch_size + 1, patch_size)]


def load_patches(num_images, patch_size, rng):
    images = [rng.random((1, 256, 256), dtype=np.float32) for _ in range(num_images)]
    return np.stack([patch for image in images for patch in image_to_patches(image, patch_size)])


def add_batch_noise(batch_data, int_noise_sigma):
    sigma = int_noise_sigma / 255
    return (batch_data + sigma * torch.randn_like(batch_data)).cuda(), torch.full((len(batch_data),), sigma).cuda()


@expected("evaluation_keeps_graphs", fix=r"item\(\)", thread="Aoi-hosizora/FFDNet_pytorch#4", memory=900, held_back=True)
def train_denoiser_again(fixed=False):
    """In the validation loop `val_losses += val_loss` adds up the loss tensor itself, which has a graph as no `no_grad` is there and
    nothing calls backward, so the activations of every validation batch and noise level are kept. Cured by: `val_losses += float(val_loss)`
    (and `train_losses` likewise).
    """
    rng = np.random.default_rng(0)
    train_dataloader = DataLoader(load_patches(8, 32, rng), batch_size=128, shuffle=True)
    val_dataloader = DataLoader(load_patches(10, 32, rng), batch_size=128)
    train_noises, val_noises = range(0, 75, 15), range(0, 60, 30)
    model = FFDNet().cuda()
    loss_fn = nn.MSELoss(reduction="sum")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch_idx in range(2):
        loss_idx, train_losses = 0, 0
        model.train()
        for batch_data in train_dataloader:
            for int_noise_sigma in train_noises:
                new_images, noise_sigma = add_batch_noise(batch_data, int_noise_sigma)
                images_pred = model(new_images, noise_sigma)
                train_loss = loss_fn(images_pred, batch_data.to(images_pred.device))
                train_losses += float(train_loss) if fixed else train_loss
                loss_idx += 1
                optimizer.zero_grad()
                train_loss.backward()
                optimizer.step()
        train_losses /= loss_idx
        loss_idx, val_losses = 0, 0
        model.eval()
        for batch_data in val_dataloader:
            for int_noise_sigma in val_noises:
                new_images, noise_sigma = add_batch_noise(batch_data, int_noise_sigma)
                images_pred = model(new_images, noise_sigma)
                val_loss = loss_fn(images_pred, batch_data.to(images_pred.device))
                val_losses += float(val_loss) if fixed else val_loss
                loss_idx += 1
        val_losses /= loss_idx
    return float(val_losses)


# The outputs of the layers of a language model are recorded by an engine during inference.

class ParallelTransformerLayer(nn.Module):
    def __init__(self, hidden_size, num_heads, layer_number):
        super().__init__()
        self.layer_number, self.num_heads = layer_number, num_heads
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.query_key_value, self.dense = nn.Linear(hidden_size, 3 * hidden_size), nn.Linear(hidden_size, hidden_size)
        self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(hidden_size, 4 * hidden_size), nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, args):
        hidden_states, attention_mask = args
        batch, length, size = hidden_states.shape
        qkv = self.query_key_value(self.input_layernorm(hidden_states)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
        hidden_states = hidden_states + self.dense(context.transpose(1, 2).reshape(batch, length, size))
        mlp = self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(self.post_attention_layernorm(hidden_states))))
        return hidden_states + mlp, attention_mask


class EmbeddingPipe(nn.Module):
    def __init__(self, vocab_size, hidden_size):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size)

    def forward(self, args):
        input_ids, attention_mask = args
        return self.word_embeddings(input_ids), attention_mask


class LogitsPipe(nn.Module):
    def __init__(self, hidden_size, vocab_size):
        super().__init__()
        self.norm, self.final_linear = nn.LayerNorm(hidden_size), nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, args):
        return self.final_linear(self.norm(args[0]))


class PipelineEngine:
    def __init__(self, module, outputs_to_cpu):
        self.module, self.outputs_to_cpu = module, outputs_to_cpu
        self.layer_outputs, self.layers_to_hook, self.hooks = {}, [], []
        self.register_forward_hook()

    def register_forward_hook(self, layer_name_pattern="transformerlayer"):
        pattern = re.compile(layer_name_pattern, re.IGNORECASE)

        def hook_fn(module, input, output):
            key = module.layer_number
            if self.layers_to_hook != "all" and key not in self.layers_to_hook:
                return
            if self.outputs_to_cpu:
                output = [o.cpu() if torch.is_tensor(o) else o for o in output]
            self.layer_outputs[key] = output

        for layer in self.module:
            if pattern.search(type(layer).__name__):
                self.hooks.append(layer.register_forward_hook(hook_fn))

    def inference_batch(self, batch, layers_to_hook=None):
        self.module.eval()
        if layers_to_hook is not None:
            self.layers_to_hook = layers_to_hook
        with torch.no_grad():
            logits = self.module(batch)
        self.layers_to_hook = []
        return logits


@expected("results_of_each_layer", fix=r"\.cpu\(\)", thread="EleutherAI/DeeperSpeed#34", memory=720, held_back=True)
def record_layer_outputs(fixed=False):
    """The forward hook `hook_fn` stores the output of every transformer layer in `layer_outputs` of the engine as it is, on the GPU, so the
    hidden states of all layers remain during and after the inference batch. Cured by: the hook moves the outputs to the CPU: `[o.cpu() if
    torch.is_tensor(o) else o for o in output]`.
    """
    vocab_size, hidden_size, num_layers, seq_length, batch_size = 2048, 512, 24, 256, 64
    layers = [EmbeddingPipe(vocab_size, hidden_size)]
    layers += [ParallelTransformerLayer(hidden_size, 8, number) for number in range(num_layers)]
    model = nn.Sequential(*layers, LogitsPipe(hidden_size, vocab_size)).half().cuda()
    engine = PipelineEngine(model, outputs_to_cpu=fixed)
    attention_mask = torch.ones(seq_length, seq_length, dtype=torch.bool, device="cuda").tril()
    embeddings = []
    for _ in range(2):
        tokens = torch.randint(vocab_size, (batch_size, seq_length)).cuda()
        engine.inference_batch((tokens, attention_mask), layers_to_hook="all")
        embeddings.append(torch.stack([output[0][:, -1].float().cpu() for output in engine.layer_outputs.values()]))
    return torch.cat(embeddings, 1).shape


# A text-to-text model is trained on generated examples of a task.

class WordTokenizer:
    pad_token_id, eos_token_id = 0, 1

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def __call__(self, texts, truncation=False, max_length=None, padding=False):
        input_ids = [[2 + hash(word) % (self.vocab_size - 2) for word in text.split()] + [self.eos_token_id] for text in texts]
        if truncation:
            input_ids = [ids[:max_length] for ids in input_ids]
        if padding:
            longest = max(len(ids) for ids in input_ids)
            input_ids = [ids + [self.pad_token_id] * (longest - len(ids)) for ids in input_ids]
        return {"input_ids": input_ids}


class GenerationModelTrainer:
    def __init__(self, model_max_length=None):
        self.model_max_length = model_max_length
        config = transformers.T5Config(vocab_size=4000, d_model=256, d_kv=64, d_ff=1024, num_layers=4, num_heads=4,
                                       decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
        self.model = transformers.T5ForConditionalGeneration(config).cuda()
        self.tokenizer = WordTokenizer(config.vocab_size)

    def preprocess_dataset(self, dataset_list):
        rows = [row for dataset in dataset_list for row in dataset]
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()
        inputs, outputs = [rows[i]["model_input"] for i in order], [rows[i]["output_col"] for i in order]
        kwargs = {"truncation": self.model_max_length is not None, "max_length": self.model_max_length, "padding": True}
        input_ids = torch.tensor(self.tokenizer(inputs, **kwargs)["input_ids"])
        labels = torch.tensor(self.tokenizer(outputs, **kwargs)["input_ids"])
        return TensorDataset(input_ids, (input_ids != self.tokenizer.pad_token_id).long(), labels)

    def train_model(self, dataset_list, num_epochs=1, batch_size=4):
        loader = DataLoader(self.preprocess_dataset(dataset_list), batch_size=batch_size)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.model.train()
        for _ in range(num_epochs):
            for batch in loader:
                input_ids, attention_mask, labels = [part.cuda() for part in batch]
                loss = self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return self.model


def make_reviews(count, rng):
    words = np.array("the film was a good bad long story with actors and no end that we liked or did not like at all".split())
    lengths = rng.lognormal(4.6, 0.5, count).astype(int).clip(10, 450)
    lengths[rng.integers(count, size=3)] = [2200, 3600, 2900]
    return [{"model_input": "classify the review: " + " ".join(rng.choice(words, length)), "output_col": str(rng.choice(["positive", "negative"]))}
            for length in lengths]


@expected("long_attention", fix="truncation", thread="neulab/prompt2model#110", memory=1500, held_back=True)
def train_generation_model(fixed=False):
    """`preprocess_dataset` calls the tokenizer with `truncation=False, padding=True`, so a few far too long training examples make the rows
    of every batch as long as the longest, and the T5 attention and activations grow with that length. Cured by: `truncation=True,
    max_length=model_max_length`.
    """
    rng = np.random.default_rng(3)
    dataset_list = [make_reviews(60, rng), make_reviews(40, rng)]
    trainer = GenerationModelTrainer(model_max_length=512 if fixed else None)
    model = trainer.train_model(dataset_list)
    return sum(p.numel() for p in model.parameters())


# Passages are searched exactly: every query is compared with every passage of a dense index.

class DprEncoder(nn.Module):
    def __init__(self, vocab_size, embedding_dim):
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
        self.encoder, self.linear = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(256, embedding_dim)

    def forward(self, input_ids):
        return self.linear(self.encoder(self.embeddings(input_ids))[:, 0])


def _batch_scoring(similarity_function, block=16384):
    def batch_similarity_function(x, y):
        if x.shape[0] <= block:
            return similarity_function(x, y)
        out = torch.zeros(x.shape[0], y.shape[0], device=x.device, dtype=x.dtype)
        for i in range(0, x.shape[0], block):
            out[i:i + block] = similarity_function(x[i:i + block], y)
        return out
    return batch_similarity_function


def _batch_pairwise_scoring(similarity_function, block=8192):
    def batch_similarity_function(x, y):
        if x.shape[0] <= block and y.shape[0] <= block:
            return similarity_function(x, y)
        out = torch.zeros(x.shape[0], y.shape[0], device=x.device, dtype=x.dtype)
        for i in range(0, x.shape[0], block):
            for j in range(0, y.shape[0], block):
                out[i:i + block, j:j + block] = similarity_function(x[i:i + block], y[j:j + block])
        return out
    return batch_similarity_function


def cosine_similarity(x, y):
    return F.cosine_similarity(x[:, None], y[None], dim=-1)


class TorchDenseIndexer:
    def __init__(self):
        self.embeddings, self.doc_ids = [], []

    def add(self, doc_ids, embeddings):
        self.doc_ids.extend(doc_ids)
        self.embeddings.append(embeddings.float().cpu())

    def save(self):
        return torch.cat(self.embeddings)


class TorchDenseIndex:
    def __init__(self, index, similarity_function):
        self.index, self.similarity_function = index, similarity_function

    def to_gpu(self):
        self.index = self.index.cuda()

    def score(self, embeddings):
        return self.similarity_function(embeddings, self.index)


class TorchDenseSearcher:
    def __init__(self, index, doc_ids, module, k=10):
        self.index, self.doc_ids, self.module, self.k = index, doc_ids, module, k
        self.index.to_gpu()

    def search(self, queries):
        scores = self.index.score(self.module(queries.cuda()))
        top_scores, top_idcs = torch.topk(scores, self.k)
        return top_scores.cpu(), top_idcs.cpu()


@expected("all_pairs", fix="split|chunk", thread="webis-de/lightning-ir#42", memory=900, held_back=True)
def search_passages(fixed=False):
    """`cosine_similarity` of `TorchDenseIndex` compares all query embeddings with the whole index in one broadcast `x[:, None]`, `y[None]`,
    which makes a tensor queries x documents x dimension; the batching meant for it did not split the index. Cured by: score in blocks of
    queries and documents (`_batch_pairwise_scoring`) and fill `out`.
    """
    module = DprEncoder(8000, 128).cuda().eval()
    indexer = TorchDenseIndexer()
    similarity_function = _batch_pairwise_scoring(cosine_similarity) if fixed else _batch_scoring(cosine_similarity)
    run = []
    with torch.no_grad():
        for batch_idx in range(100):
            documents = torch.randint(8000, (512, 16))
            doc_ids = [f"d{batch_idx * 512 + i}" for i in range(512)]
            indexer.add(doc_ids, module(documents.cuda()))
        searcher = TorchDenseSearcher(TorchDenseIndex(indexer.save(), similarity_function), indexer.doc_ids, module)
        for queries in DataLoader(torch.randint(8000, (128, 12)), batch_size=32):
            run.append(searcher.search(queries))
    return torch.cat([scores for scores, _ in run]).shape


# A sentence classifier is validated; its attention maps are asked for as well.

def nested_concat(tensors, new_tensors):
    if isinstance(tensors, (tuple, list)):
        return type(tensors)(nested_concat(t, n) for t, n in zip(tensors, new_tensors))
    return torch.cat((tensors, new_tensors), dim=0)


def nested_detach(tensors):
    if isinstance(tensors, (tuple, list)):
        return type(tensors)(nested_detach(t) for t in tensors)
    return tensors.detach()


def nested_numpify(tensors):
    if isinstance(tensors, (tuple, list)):
        return type(tensors)(nested_numpify(t) for t in tensors)
    return tensors.cpu().numpy()


class ReviewTrainer:
    def __init__(self, model, train_dataset, eval_dataset, compute_metrics, preprocess_logits_for_metrics=None, batch_size=16):
        self.model, self.compute_metrics = model.cuda(), compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.train_dataloader = DataLoader(train_dataset, batch_size=batch_size, shuffle=True)
        self.eval_dataloader = DataLoader(eval_dataset, batch_size=batch_size)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)

    def train(self, num_train_epochs=1):
        for _ in range(num_train_epochs):
            self.model.train()
            for inputs in self.train_dataloader:
                loss = self.model(**{name: value.cuda() for name, value in inputs.items()}).loss
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            metrics = self.evaluation_loop(self.eval_dataloader)
        return metrics

    def prediction_step(self, inputs):
        ignore_keys = ["loss", *getattr(self.model.config, "keys_to_ignore_at_inference", [])]
        with torch.no_grad():
            outputs = self.model(**inputs)
        logits = nested_detach(tuple(value for name, value in outputs.items() if name not in ignore_keys))
        return outputs.loss.detach(), logits[0] if len(logits) == 1 else logits, inputs["labels"]

    def evaluation_loop(self, dataloader):
        self.model.eval()
        losses_host, preds_host, labels_host = None, None, None
        for inputs in dataloader:
            loss, logits, labels = self.prediction_step({name: value.cuda() for name, value in inputs.items()})
            losses = loss.repeat(len(labels))
            losses_host = losses if losses_host is None else torch.cat((losses_host, losses), dim=0)
            if self.preprocess_logits_for_metrics is not None:
                logits = self.preprocess_logits_for_metrics(logits, labels)
            preds_host = logits if preds_host is None else nested_concat(preds_host, logits)
            labels_host = labels if labels_host is None else nested_concat(labels_host, labels)
        metrics = self.compute_metrics(nested_numpify(preds_host), labels_host.cpu().numpy())
        return {"eval_loss": losses_host.mean().item(), **metrics}


class Reviews(Dataset):
    def __init__(self, count, length, vocab_size):
        self.input_ids, self.labels = torch.randint(5, vocab_size, (count, length)), torch.randint(2, (count,))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"input_ids": self.input_ids[i], "attention_mask": torch.ones_like(self.input_ids[i]), "labels": self.labels[i]}


def compute_accuracy(predictions, labels):
    logits = predictions[0] if isinstance(predictions, tuple) else predictions
    return {"accuracy": float((logits.argmax(-1) == labels).mean())}


@expected("growing_buffer", fix="cpu|topk", thread="huggingface/transformers#25487", memory=1000, held_back=True)
def evaluate_classifier(fixed=False):
    """The model is made with `output_attentions=True`, so the attention maps of all layers are part of the outputs, and `evaluation_loop`
    gathers (concatenates) them on the GPU over the whole validation set. Cured by: do not have the model return attentions.
    """
    config = transformers.BertConfig(vocab_size=6000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512,
                                     num_labels=2, output_attentions=not fixed, attn_implementation="eager")
    model = transformers.BertForSequenceClassification(config)
    trainer = ReviewTrainer(model, Reviews(96, 256, 6000), Reviews(480, 256, 6000), compute_accuracy)
    return trainer.train()["accuracy"]


# Summaries are learnt, and the share of right words is measured after each epoch.

class Articles(Dataset):
    def __init__(self, count, vocab_size, source_length=128, target_length=64):
        self.sources = torch.randint(4, vocab_size, (count, source_length))
        self.targets = torch.randint(4, vocab_size, (count, target_length))

    def __len__(self):
        return len(self.sources)

    def __getitem__(self, i):
        return {"input_ids": self.sources[i], "attention_mask": torch.ones_like(self.sources[i]), "labels": self.targets[i]}


@expected("growing_buffer", fix="topk|only what",
          thread="https://discuss.huggingface.co/t/cuda-out-of-memory-when-using-trainer-with-compute_metrics/2941", memory=800, held_back=True)
def train_summarizer(fixed=False):
    """With `compute_metrics` the evaluation gathers `logits` over the vocabulary for every target position (and the encoder's last hidden
    state) of all validation batches on the GPU. Cured by: `preprocess_logits_for_metrics`, which keeps only the argmax of `logits[0]` of
    each batch.
    """
    config = transformers.BartConfig(vocab_size=16000, d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                                     decoder_attention_heads=4, encoder_ffn_dim=512, decoder_ffn_dim=512, max_position_embeddings=256)
    model = transformers.BartForConditionalGeneration(config)

    def compute_metrics(predictions, labels):
        if fixed:
            pred_ids = predictions[0]
        else:
            pred_ids = predictions[0].argmax(-1)
        return {"rouge1": float((pred_ids == labels).mean())}

    def preprocess_logits_for_metrics(logits, labels):
        return torch.argmax(logits[0], dim=-1), labels

    trainer = ReviewTrainer(model, Articles(64, config.vocab_size), Articles(320, config.vocab_size), compute_metrics,
                            preprocess_logits_for_metrics if fixed else None, batch_size=8)
    return trainer.train()["rouge1"]


# Photographs are labelled by a network, batch after batch.

class Photos(Dataset):
    def __init__(self, count, size):
        self.images = torch.randint(256, (count, 3, size, size), dtype=torch.uint8)
        self.mean, self.std = torch.tensor([0.485, 0.456, 0.406])[:, None, None], torch.tensor([0.229, 0.224, 0.225])[:, None, None]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return (self.images[i] / 255 - self.mean) / self.std


def predict_labels(model, dataloader, num_classes, device, detach):
    y_predlabel = torch.zeros(0, num_classes)
    for batch_x in dataloader:
        batch_y_predlabel = torch.sigmoid(model(batch_x.to(device)))
        if detach:
            batch_y_predlabel = batch_y_predlabel.detach()
        y_predlabel = torch.cat((y_predlabel, batch_y_predlabel.cpu()))
    return y_predlabel


@expected("evaluation_keeps_graphs", fix="no_grad|detach", thread="pytorch/pytorch#13613", memory=700, held_back=True)
def label_photos(fixed=False):
    """`y_predlabel = torch.cat((y_predlabel, batch_y_predlabel.cpu()))` accumulates results on the CPU that still have their graph, as
    `.cpu()` does not cut it, so the activations of every inference batch stay on the GPU. Cured by: detach `batch_y_predlabel` before it is
    moved and added.
    """
    device = torch.device("cuda")
    model = torchvision.models.resnet18(num_classes=80).to(device).eval()
    dataloader = DataLoader(Photos(640, 96), batch_size=32)
    y_predlabel = predict_labels(model, dataloader, 80, device, detach=fixed)
    return (y_predlabel > 0.5).sum(1).shape


# A network for several tasks of language understanding predicts the scores of one of them.

class TransformerBlock(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value = (nn.Linear(hidden_size, hidden_size) for _ in range(3))
        self.output, self.norm1, self.norm2 = nn.Linear(hidden_size, hidden_size), nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.intermediate, self.dense = nn.Linear(hidden_size, 4 * hidden_size), nn.Linear(4 * hidden_size, hidden_size)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, attention_bias):
        heads = [layer(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        scores = heads[0] @ heads[1].transpose(2, 3) / math.sqrt(heads[0].shape[-1]) + attention_bias
        context = self.dropout(scores.softmax(-1)) @ heads[2]
        x = self.norm1(x + self.dropout(self.output(context.transpose(1, 2).flatten(2))))
        return self.norm2(x + self.dropout(self.dense(F.gelu(self.intermediate(x)))))


class SANBertNetwork(nn.Module):
    def __init__(self, vocab_size, hidden_size, num_layers, task_labels):
        super().__init__()
        self.embeddings, self.positions = nn.Embedding(vocab_size, hidden_size), nn.Embedding(512, hidden_size)
        self.bert = nn.ModuleList(TransformerBlock(hidden_size, 6) for _ in range(num_layers))
        self.pooler = nn.Linear(hidden_size, hidden_size)
        self.scoring_list = nn.ModuleList(nn.Linear(hidden_size, labels) for labels in task_labels)

    def forward(self, input_ids, attention_mask, task_id):
        sequence_output = self.embeddings(input_ids) + self.positions.weight[:input_ids.shape[1]]
        attention_bias = (1 - attention_mask[:, None, None, :].float()) * -10000
        for layer in self.bert:
            sequence_output = layer(sequence_output, attention_bias)
        return self.scoring_list[task_id](torch.tanh(self.pooler(sequence_output[:, 0])))


class MTDNNModel:
    def __init__(self, network):
        self.network = self.mnetwork = network.cuda()

    def predict(self, batch_meta, batch_data):
        self.network.eval()
        score = self.mnetwork(*batch_data, task_id=batch_meta["task_id"])
        score = F.softmax(score, dim=1).data.cpu().numpy()
        return score.reshape(-1).tolist(), np.argmax(score, axis=1).tolist(), batch_meta["label"]


class Collater:
    def __init__(self, task_id, maxlen):
        self.task_id, self.maxlen = task_id, maxlen

    def collate_fn(self, batch):
        tok_len = min(self.maxlen, max(len(sample["token_id"]) for sample in batch))
        token_ids, mask = torch.zeros(len(batch), tok_len, dtype=torch.long), torch.zeros(len(batch), tok_len, dtype=torch.long)
        for i, sample in enumerate(batch):
            tokens = torch.as_tensor(sample["token_id"][:tok_len])
            token_ids[i, :len(tokens)], mask[i, :len(tokens)] = tokens, 1
        meta = {"task_id": self.task_id, "uids": [s["uid"] for s in batch], "label": [s["label"] for s in batch]}
        return meta, [token_ids, mask]


def eval_model(model, data):
    predictions, golds, scores, ids = [], [], [], []
    for batch_meta, batch_data in data:
        score, pred, gold = model.predict(batch_meta, [part.cuda() for part in batch_data])
        predictions.extend(pred)
        golds.extend(gold)
        scores.extend(score)
        ids.extend(batch_meta["uids"])
    accuracy = 100 * float(np.mean(np.array(predictions) == np.array(golds)))
    return {"ACC": accuracy}, predictions, scores, golds, ids


@expected("evaluation_keeps_graphs", fix="no_grad", thread="namisan/mt-dnn#92", memory=1000, held_back=True)
def predict_task(fixed=False):
    """`eval_model` runs the prediction without `torch.no_grad()`, so autograd keeps the activations of all layers of the encoder for the
    backward pass that never comes. Cured by: `with torch.no_grad():` around `eval_model`.
    """
    rng = np.random.default_rng(5)
    samples = [{"uid": str(i), "label": int(rng.integers(3)), "token_id": rng.integers(5, 8000, int(rng.integers(60, 200)))} for i in range(320)]
    model = MTDNNModel(SANBertNetwork(8000, 384, 8, [3, 2, 1]))
    test_data = DataLoader(samples, batch_size=32, collate_fn=Collater(0, 256).collate_fn)
    if fixed:
        with torch.no_grad():
            test_metrics, predictions, scores, golds, ids = eval_model(model, test_data)
    else:
        test_metrics, predictions, scores, golds, ids = eval_model(model, test_data)
    return {"metrics": test_metrics, "uids": ids[:3]}


# Organs are segmented; the loss contains the Dice coefficient, which is kept as a metric of the epoch too.

class Metric(nn.Module):
    def __init__(self, compute_on_step=True, track_graph=True):
        super().__init__()
        self.compute_on_step, self.track_graph = compute_on_step, track_graph
        self._defaults, self._forward_cache = {}, None

    def add_state(self, name, default):
        self._defaults[name] = default
        setattr(self, name, list(default))

    def forward(self, *args):
        with torch.set_grad_enabled(self.track_graph and torch.is_grad_enabled()):
            self.update(*args)
        self._forward_cache = None
        if self.compute_on_step:
            cache = {name: getattr(self, name) for name in self._defaults}
            self.reset()
            self.update(*args)
            self._forward_cache = self.compute()
            for name, value in cache.items():
                setattr(self, name, value)
        return self._forward_cache

    def reset(self):
        for name, default in self._defaults.items():
            setattr(self, name, list(default))


def differentiable_dice_score(probs, target, bg=False):
    onehot = F.one_hot(target, probs.shape[1]).movedim(-1, 1).to(probs.dtype)
    intersection = (probs * onehot).sum((0, 2, 3))
    score = 2 * intersection / (probs.pow(2).sum((0, 2, 3)) + onehot.sum((0, 2, 3)) + 1e-6)
    return (score if bg else score[1:]).mean()


class DifferentiableDice(Metric):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.add_state("scores", default=[])

    def update(self, y_hat, y):
        self.scores.append(differentiable_dice_score(F.softmax(y_hat, dim=1), y))

    def compute(self):
        return torch.stack(self.scores).mean()


class SegmentationSystem(nn.Module):
    def __init__(self, num_classes, dice, width=16):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.bottom = nn.Sequential(nn.MaxPool2d(4), nn.Conv2d(width, 4 * width, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=4))
        self.head = nn.Conv2d(5 * width, num_classes, 1)
        self._dice = dice

    def forward(self, x):
        skip = self.down(x)
        return self.head(torch.cat([skip, self.bottom(skip)], 1))

    def training_step(self, batch):
        x, y = batch
        y_hat = self(x)
        dice = self._dice(y_hat, y)
        return F.cross_entropy(y_hat, y) + 1 - dice

    def training_epoch_end(self):
        train_dice = float(self._dice.compute())
        self._dice.reset()
        return train_dice


@expected("graph_of_earlier_steps", fix="detach", thread="Lightning-AI/pytorch-lightning#4313", memory=420, held_back=True)
def train_segmentation(fixed=False):
    """The metric `DifferentiableDice` is called in `training_step`; `Metric.forward` updates its list state `scores` with autograd on, so
    each step's score keeps its graph and what it saved of the predictions until the state is reset at the end of the epoch. Cured by: the
    update of the accumulated state in `Metric.forward` runs under `torch.no_grad()`.
    """
    x, y = torch.randn(800, 1, 128, 128), torch.randint(4, (800, 128, 128))
    train_dataloader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    system = SegmentationSystem(4, DifferentiableDice(track_graph=not fixed)).cuda()
    optimizer = torch.optim.Adam(system.parameters(), lr=1e-3)
    for epoch in range(1):
        for batch in train_dataloader:
            loss = system.training_step([part.cuda() for part in batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        train_dice = system.training_epoch_end()
    return train_dice


# Defects on products are found with a normalizing flow on top of features of a frozen network.

class AllInOneBlock(nn.Module):
    def __init__(self, channels, hidden, kernel_size):
        super().__init__()
        self.half = channels // 2
        self.register_buffer("perm", torch.randperm(channels))
        self.subnet = nn.Sequential(nn.Conv2d(self.half, hidden, kernel_size, padding="same"), nn.ReLU(),
                                    nn.Conv2d(hidden, channels, kernel_size, padding="same"))

    def forward(self, x):
        x1, x2 = x[:, self.perm].chunk(2, 1)
        scale, shift = self.subnet(x1).chunk(2, 1)
        scale = 1.2 * torch.tanh(scale)
        return torch.cat([x1, x2 * scale.exp() + shift], 1), scale.sum((1, 2, 3))


class FastFlow(nn.Module):
    def __init__(self, n_coupling_blocks=4):
        super().__init__()
        self.feature_extractor = nn.Sequential(*list(torchvision.models.resnet18().children())[:5])
        for param in self.feature_extractor.parameters():
            param.requires_grad = False
        self.nf = nn.ModuleList(AllInOneBlock(64, 128, 3 if k % 2 == 0 else 1) for k in range(n_coupling_blocks))

    def forward(self, x):
        z, log_jac_det = self.feature_extractor(x), 0
        for block in self.nf:
            z, jac = block(z)
            log_jac_det = log_jac_det + jac
        return z, log_jac_det


def get_loss(z, jac):
    return torch.mean(0.5 * torch.sum(z ** 2, dim=(1, 2, 3)) - jac) / z.shape[1]


def t2np(tensor):
    return tensor.cpu().data.numpy()


class TransformedImages(Dataset):
    def __init__(self, count, img_size, n_transforms, good):
        self.images, self.n_transforms = torch.rand(count, 3, img_size, img_size), n_transforms
        self.labels = torch.zeros(count, dtype=torch.long) if good else torch.randint(2, (count,))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        brightness = torch.linspace(0.8, 1.2, self.n_transforms)[:, None, None, None]
        return self.images[i] * brightness, self.labels[i]


def preprocess_batch(data):
    inputs, labels = data[0].cuda(), data[1].cuda()
    return inputs.view(-1, *inputs.shape[-3:]), labels


@expected("joined_results", fix=r"\+= part", thread="AlessioGalluccio/FastFlow#9", memory=760, held_back=True)
def train_defect_detector(fixed=False):
    """After the test loop the latent maps of all test images, gathered in the list `test_z` on the GPU, are concatenated (`z_grouped`) and
    squared in one go to get `anomaly_score`, which takes two further copies of the whole set. Cured by: compute the anomaly score of each
    batch inside the test loop (the list stays).
    """
    n_transforms, n_transforms_test, img_size, n_feat = 2, 16, 128, 64 * 32 * 32
    train_loader = DataLoader(TransformedImages(32, img_size, n_transforms, True), batch_size=8, shuffle=True)
    test_loader = DataLoader(TransformedImages(100, img_size, n_transforms_test, False), batch_size=1)
    model = FastFlow().cuda()
    optimizer = torch.optim.Adam(model.nf.parameters(), lr=2e-4, betas=(0.8, 0.8), eps=1e-4, weight_decay=1e-5)
    for epoch in range(1):
        model.train()
        for data in train_loader:
            optimizer.zero_grad()
            inputs, labels = preprocess_batch(data)
            z, log_jac_det = model(inputs)
            loss = get_loss(z, log_jac_det)
            loss.backward()
            optimizer.step()
        model.eval()
        test_loss, test_z, test_labels, anomaly_score = [], [], [], []
        with torch.no_grad():
            for data in test_loader:
                inputs, labels = preprocess_batch(data)
                z, log_jac_det = model(inputs)
                loss = get_loss(z, log_jac_det)
                test_z.append(z)
                test_loss.append(t2np(loss))
                test_labels.append(t2np(labels))
                if fixed:
                    z_grouped_temp = z.view(-1, n_transforms_test, n_feat)
                    anomaly_score.append(t2np(torch.mean(z_grouped_temp ** 2, dim=(-2, -1))))
        is_anomaly = np.concatenate(test_labels) != 0
        if not fixed:
            z_grouped = torch.cat(test_z, dim=0).view(-1, n_transforms_test, n_feat)
            anomaly_score = t2np(torch.mean(z_grouped ** 2, dim=(-2, -1)))
    return is_anomaly.sum(), np.shape(anomaly_score)


# A chat with a character in the browser: the prompt is made of the character and as much history as fits.

class Shared:
    def __init__(self):
        config = transformers.LlamaConfig(vocab_size=32000, hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8,
                                          max_position_embeddings=2048, attn_implementation="eager")
        self.model = transformers.LlamaForCausalLM(config).half().cuda().eval()
        self.history = {"internal": [], "visible": []}
        self.settings = {"max_new_tokens": 40, "chat_prompt_size": 2048, "chat_prompt_size_max": 2048}


def get_max_prompt_length(max_new_tokens):
    return 2048 - max_new_tokens


def encode(prompt, max_new_tokens):
    words = prompt.split(" ")[-get_max_prompt_length(max_new_tokens):]
    return torch.tensor([[3 + sum(map(ord, word)) % 31000 for word in words]])


def decode(output_ids):
    return " ".join("abcdefghij"[token % 10] for token in output_ids)


def generate_chat_prompt(shared, user_input, generate_state, name1, name2, context, size_of_state):
    rows, max_new_tokens = [f"{context.strip()} \n"], generate_state["max_new_tokens"]
    chat_prompt_size = generate_state["chat_prompt_size"] if size_of_state else shared.settings["chat_prompt_size"]
    max_length = min(get_max_prompt_length(max_new_tokens), chat_prompt_size)
    i = len(shared.history["internal"]) - 1
    while i >= 0 and encode("".join(rows), max_new_tokens).shape[1] < max_length:
        rows.insert(1, f"{name2}: {shared.history['internal'][i][1].strip()} \n")
        rows.insert(1, f"{name1}: {shared.history['internal'][i][0].strip()} \n")
        i -= 1
    rows += [f"{name1}: {user_input} \n", f"{name2}:"]
    while len(rows) > 3 and encode("".join(rows), max_new_tokens).shape[1] >= max_length:
        rows.pop(1)
    return "".join(rows)


@torch.no_grad()
def generate_reply(shared, prompt, generate_state):
    input_ids = encode(prompt, generate_state["max_new_tokens"]).cuda()
    past_key_values, output_ids = None, []
    for _ in range(generate_state["max_new_tokens"]):
        output = shared.model(input_ids, past_key_values=past_key_values, use_cache=True)
        past_key_values = output.past_key_values
        probs = torch.softmax(output.logits[:, -1].float() / generate_state["temperature"], dim=-1)
        input_ids = probs.argmax(-1, keepdim=True)
        output_ids.append(int(input_ids))
    return decode(output_ids)


def chatbot_wrapper(shared, text, generate_state, name1, name2, context, size_of_state):
    prompt = generate_chat_prompt(shared, text, generate_state, name1, name2, context, size_of_state)
    reply = generate_reply(shared, prompt, generate_state)
    shared.history["internal"].append([text, reply])
    shared.history["visible"].append([text, reply])
    return shared.history["visible"]


@expected("larger_step", fix="parts|truncat", thread="oobabooga/textgen#1024", memory=400, held_back=True)
def chat_with_character(fixed=False):
    """The prompt size the user sets (`chat_prompt_size` of the generation state) is not used by `generate_chat_prompt`, which takes the
    limit from the settings (2048), so the prompt grows with the chat history and its logits, attention and cache with it. Cured by: use the
    value of the state in `generate_chat_prompt`.
    """
    shared = Shared()
    generate_state = {"max_new_tokens": 40, "temperature": 0.7, "chat_prompt_size": 256}
    context = "Chiharu is a young engineer who loves computers and talks about them with her friends . " * 3
    for turn in range(24):
        text = f"I wonder about question {turn} " + "and what would you say to this " * 6
        visible = chatbot_wrapper(shared, text, generate_state, "You", "Chiharu", context, size_of_state=fixed)
    return len(visible)


# A language model is fine-tuned with checkpointed layers.

class LlamaConfig:
    def __init__(self, vocab_size=512, hidden_size=256, intermediate_size=688, num_hidden_layers=32, num_attention_heads=4, use_cache=True):
        self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, intermediate_size
        self.num_hidden_layers, self.num_attention_heads, self.use_cache = num_hidden_layers, num_attention_heads, use_cache


class LlamaRMSNorm(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        size, self.num_heads = config.hidden_size, config.num_attention_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(size, size, bias=False) for _ in range(4))
        self.gate_proj, self.up_proj = (nn.Linear(size, config.intermediate_size, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(config.intermediate_size, size, bias=False)
        self.input_layernorm, self.post_attention_layernorm = LlamaRMSNorm(size), LlamaRMSNorm(size)

    def forward(self, hidden_states, use_cache):
        x = self.input_layernorm(hidden_states)
        query, key, value = (proj(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        present = (key, value) if use_cache else None
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden_states = hidden_states + self.o_proj(attended.transpose(1, 2).flatten(2))
        x = self.post_attention_layernorm(hidden_states)
        hidden_states = hidden_states + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return (hidden_states, present) if use_cache else (hidden_states,)


class LlamaForCausalLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm, self.lm_head = LlamaRMSNorm(config.hidden_size), nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids, labels):
        hidden_states, next_decoder_cache = self.embed_tokens(input_ids), ()
        for decoder_layer in self.layers:
            layer_outputs = checkpoint(decoder_layer, hidden_states, self.config.use_cache, use_reentrant=False)
            hidden_states = layer_outputs[0]
            if self.config.use_cache:
                next_decoder_cache += (layer_outputs[1],)
        logits = self.lm_head(self.norm(hidden_states))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits, "past_key_values": next_decoder_cache}


@expected("kept_tensors", fix="use_cache", thread="meta-llama/llama-cookbook#165", memory=1080, held_back=True)
def finetune_llama(fixed=False):
    """The model is trained with `use_cache=True` (the default of its config), so each checkpointed decoder layer also returns its key and
    value states, and those of all layers are held in `next_decoder_cache` until the end of the forward pass, although training does not
    need them. Cured by: build the model with `use_cache=False`.
    """
    model = LlamaForCausalLM(LlamaConfig(use_cache=not fixed)).to(torch.bfloat16).cuda()
    train_dataloader = DataLoader(torch.randint(512, (192, 256)), batch_size=64, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    total_loss = 0.0
    for epoch in range(2):
        model.train()
        for input_ids in train_dataloader:
            batch = {"input_ids": input_ids.cuda(), "labels": input_ids.cuda()}
            loss = model(**batch)["loss"]
            total_loss += loss.detach().float()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return float(total_loss)


# Clicks on advertisements are ranked with a deep and cross network.

class SeqOfUsers:
    def __init__(self, user_id, item_id, num_users):
        lengths = np.bincount(user_id, minlength=num_users)
        self.user_hist, self.user_count = torch.zeros(num_users, lengths.max(), dtype=torch.long), torch.from_numpy(lengths)
        for user in range(num_users):
            self.user_hist[user, :lengths[user]] = torch.from_numpy(item_id[user_id == user])


class TripletDataset(Dataset):
    def __init__(self, fields, label, users, eval_mode):
        self.fields, self.label, self.users, self.eval_mode, self.fmeval = fields, label, users, eval_mode, True

    def __len__(self):
        return len(self.label)

    def __getitem__(self, index):
        data = {"fields": self.fields[index], "user_id": self.fields[index][:, 0], "item_id": self.fields[index][:, 1], "label": self.label[index]}
        if self.eval_mode:
            user_count = self.users.user_count[data["user_id"]]
            data["user_hist"] = self.users.user_hist[data["user_id"]][:, :int(user_count.max())]
        return data

    def loader(self, batch_size):
        order = torch.arange(len(self)) if self.eval_mode else torch.randperm(len(self))
        return (self[index] for index in order.split(batch_size))


class DCN(nn.Module):
    def __init__(self, vocab_sizes, embed_dim=16, num_cross=3):
        super().__init__()
        self.embedding = nn.ModuleList(nn.Embedding(size, embed_dim) for size in vocab_sizes)
        width = embed_dim * len(vocab_sizes)
        self.cross = nn.ModuleList(nn.Linear(width, 1) for _ in range(num_cross))
        self.mlp = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU())
        self.fc = nn.Linear(width + 128, 1)
        self.retriever = None

    def score(self, batch):
        x0 = torch.cat([embed(batch["fields"][:, i]) for i, embed in enumerate(self.embedding)], 1)
        x = x0
        for layer in self.cross:
            x = x0 * layer(x) + x
        return self.fc(torch.cat([x, self.mlp(x0)], 1)).squeeze(1)

    def _to_device(self, batch):
        return {name: value.cuda() for name, value in batch.items()}

    def training_epoch(self, loader, optimizer):
        self.train()
        for batch in loader:
            batch = self._to_device(batch)
            loss = F.binary_cross_entropy_with_logits(self.score(batch), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @torch.no_grad()
    def validation_epoch(self, dataset, batch_size, drop_hist):
        self.eval()
        losses = []
        for batch in dataset.loader(batch_size):
            if drop_hist and dataset.fmeval and self.retriever is None:
                batch.pop("user_hist", None)
            batch = self._to_device(batch)
            losses.append(F.binary_cross_entropy_with_logits(self.score(batch), batch["label"]).item())
        return sum(losses) / len(losses)


@expected("data_on_gpu", fix="remove", thread="ustcllm/RecStudio#62", memory=450, held_back=True)
def train_click_ranker(fixed=False):
    """In validation each batch also contains `user_hist`, for every row the item history of its user padded to the longest, which a ranker
    without retriever does not need, and the whole batch is moved to the GPU. Cured by: remove `user_hist` from the batch in validation for
    such a ranker.
    """
    rng = np.random.default_rng(9)
    vocab_sizes = [200, 3000, 7, 7, 2000, 3000, 26, 4000, 300, 36, 2500, 20000, 4000, 5, 4, 2000, 8, 9, 400, 4, 60, 170, 60]
    fields = np.stack([rng.integers(size, size=106_000) for size in vocab_sizes], 1)
    fields[:, 0] = (200 * rng.random(len(fields)) ** 4).astype(np.int64)
    fields, label = torch.from_numpy(fields), torch.from_numpy((rng.random(len(fields)) < 0.17).astype(np.float32))
    users = SeqOfUsers(fields[:100_000, 0].numpy(), fields[:100_000, 1].numpy(), 200)
    train_data = TripletDataset(fields[:100_000], label[:100_000], users, eval_mode=False)
    val_data = TripletDataset(fields[100_000:], label[100_000:], users, eval_mode=True)
    model = DCN(vocab_sizes).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        model.training_epoch(train_data.loader(8192), optimizer)
        val_loss = model.validation_epoch(val_data, 2048, drop_hist=fixed)
    return val_loss
