"""Programs after public threads of everyday users of PyTorch: training scripts, notebooks, feature extraction, evaluation, small libraries."""
import copy
import os
import tempfile
import types
import warnings

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset

from expected import expected


# Image classification on 32x32 pictures, stopped and continued on another day.

def cifar_loader(batch_size, batches):
    images = torch.rand(batch_size * batches, 3, 32, 32)
    labels = torch.randint(0, 10, (batch_size * batches,))
    return DataLoader(list(zip(images, labels)), batch_size=batch_size, shuffle=True)


def build_net():
    from torchvision.models import wide_resnet50_2
    return wide_resnet50_2(num_classes=10)


def train_epoch(net, trainloader, criterion, optimizer):
    net.train()
    train_loss = 0.0
    for inputs, targets in trainloader:
        inputs, targets = inputs.cuda(), targets.cuda()
        optimizer.zero_grad()
        loss = criterion(net(inputs), targets)
        loss.backward()
        optimizer.step()
        train_loss += loss.item()
    return train_loss / len(trainloader)


def first_day(path):
    net = build_net().cuda()
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    train_epoch(net, cifar_loader(2, 1), nn.CrossEntropyLoss(), optimizer)
    torch.save({"state": net.state_dict(), "acc": 10.0, "epoch": 1}, path)


@expected("loaded_onto_gpu", fix="map_location", thread="discuss.pytorch.org/t/117775", memory=800)
def train_cifar(fixed=False):
    """The training is continued from a saved state: `torch.load` brings the tensors of `checkpoint` back onto the GPU they were saved from,
    and `checkpoint` stays alive beside `net` for the whole training, so that the weights lie on the GPU twice. Cured by: Load with
    `map_location="cpu"`, `del checkpoint` after `load_state_dict`, and empty the cache.
    """
    folder = tempfile.mkdtemp(prefix="checkpoint-")
    path = os.path.join(folder, "ckpt.t7")
    first_day(path)
    torch.cuda.empty_cache()

    net = build_net().cuda()
    if fixed:
        checkpoint = torch.load(path, map_location=torch.device("cpu"))
    else:
        checkpoint = torch.load(path)
    net.load_state_dict(checkpoint["state"])
    best_acc, start_epoch = checkpoint["acc"], checkpoint["epoch"]
    if fixed:
        del checkpoint
        torch.cuda.empty_cache()
    os.remove(path)
    os.rmdir(folder)
    trainloader = cifar_loader(4, 3)
    optimizer = optim.SGD(net.parameters(), lr=0.01)
    history = []
    for epoch in range(start_epoch, start_epoch + 2):
        history.append(train_epoch(net, trainloader, nn.CrossEntropyLoss(), optimizer))
    return {"acc": best_acc, "epochs": len(history)}


# Self-supervised training, with a nearest-neighbour classifier to watch the features on the way.

class WeightedKNNClassifier:
    def __init__(self, num_classes, k=20, num_chunks=100, max_distance_matrix_size=None, epsilon=1e-5):
        self.num_classes, self.k, self.num_chunks, self.epsilon = num_classes, k, num_chunks, epsilon
        self.max_distance_matrix_size = max_distance_matrix_size
        self.reset()

    def reset(self):
        self.train_features, self.train_targets, self.test_features, self.test_targets = [], [], [], []

    def update(self, train_features=None, train_targets=None, test_features=None, test_targets=None):
        if train_features is not None:
            self.train_features.append(train_features)
            self.train_targets.append(train_targets)
        if test_features is not None:
            self.test_features.append(test_features)
            self.test_targets.append(test_targets)

    @torch.no_grad()
    def compute(self):
        train_features, train_targets = torch.cat(self.train_features), torch.cat(self.train_targets)
        test_features, test_targets = torch.cat(self.test_features), torch.cat(self.test_targets)
        num_train_images, num_test_images = len(train_targets), len(test_targets)
        if self.max_distance_matrix_size is None:
            chunk_size = max(1, num_test_images // self.num_chunks)
        else:
            chunk_size = max(1, self.max_distance_matrix_size // num_train_images)
        k, top1 = min(self.k, num_train_images), []
        for idx in range(0, num_test_images, chunk_size):
            features, targets = test_features[idx:idx + chunk_size], test_targets[idx:idx + chunk_size]
            similarity = 1 / (torch.cdist(features, train_features) + self.epsilon)
            distances, indices = similarity.topk(k, largest=True, sorted=True)
            candidates = train_targets.view(1, -1).expand(len(targets), -1)
            retrieved_neighbors = candidates.gather(1, indices)
            one_hot = torch.zeros(len(targets) * k, self.num_classes, device=features.device).scatter_(1, retrieved_neighbors.view(-1, 1), 1)
            probs = (one_hot.view(len(targets), k, -1) * distances.unsqueeze(-1)).sum(1)
            top1.append((probs.argmax(1) == targets).float().mean())
        self.reset()
        return torch.stack(top1).mean().cpu()


class SimSiam(nn.Module):
    def __init__(self, features_dim=64):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, features_dim, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.projector = nn.Sequential(nn.Linear(features_dim, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64))
        self.predictor = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))

    def forward(self, x):
        feats = self.backbone(x)
        z = self.projector(feats)
        return feats, z, self.predictor(z)


def simsiam_loss(p, z):
    return -F.cosine_similarity(p, z.detach()).mean()


def small_images(number, batch_size):
    images, targets = torch.rand(batch_size, 3, 16, 16), torch.randint(0, 100, (batch_size,))
    for _ in range(0, number, batch_size):
        yield images, targets


@expected("all_pairs", fix="split|chunk", thread="vturrisi/solo-learn#159", memory=600)
def pretrain_and_probe(fixed=False):
    """The nearest-neighbour evaluation (`WeightedKNNClassifier.compute`) cuts the test features into a fixed number of chunks
    (`num_chunks=100`); the matrix of distances of a chunk to all the collected `train_features` thus grows with both sets, and for a large
    data set one chunk's matrix (and its copies in the similarity) is too large. Cured by: Choose `chunk_size` by a largest size of the
    distance matrix (`max_distance_matrix_size=5e6` elements).
    """
    num_train, num_test = 120_000, 20_000
    model = SimSiam().cuda()
    knn = WeightedKNNClassifier(100, max_distance_matrix_size=int(5e6) if fixed else None)
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for images, targets in small_images(num_train, 2000):
        images, targets = images.cuda(), targets.cuda()
        feats1, z1, p1 = model(images)
        feats2, z2, p2 = model(images.flip(3))
        loss = (simsiam_loss(p1, z2) + simsiam_loss(p2, z1)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        knn.update(train_features=torch.cat([feats1, feats2]).detach(), train_targets=targets.repeat(2))
    model.eval()
    with torch.no_grad():
        for images, targets in small_images(num_test, 2000):
            feats, _, _ = model(images.cuda())
            knn.update(test_features=feats.detach(), test_targets=targets.cuda())
    knn.compute()
    return {"images": num_train}


# Machine-learned particle flow: from tracks and clusters to particles.

def ffn(input_dim, output_dim, width):
    return nn.Sequential(nn.Linear(input_dim, width), nn.ELU(), nn.LayerNorm(width), nn.Linear(width, output_dim))


class SelfAttentionLayer(nn.Module):
    def __init__(self, embedding_dim, num_heads, width):
        super().__init__()
        self.mha = nn.MultiheadAttention(embedding_dim, num_heads, batch_first=True)
        self.norm0, self.norm1 = nn.LayerNorm(embedding_dim), nn.LayerNorm(embedding_dim)
        self.seq = nn.Sequential(nn.Linear(embedding_dim, width), nn.ELU(), nn.Linear(width, embedding_dim), nn.ELU())

    def forward(self, x, mask):
        x = self.norm0(x + self.mha(x, x, x, need_weights=False)[0])
        x = self.norm1(x + self.seq(x))
        return x * mask.unsqueeze(-1)


class MLPF(nn.Module):
    def __init__(self, input_dim=34, num_classes=8, embedding_dim=128, width=128, num_convs=3):
        super().__init__()
        self.nn0 = ffn(input_dim, embedding_dim, width)
        self.conv_id = nn.ModuleList(SelfAttentionLayer(embedding_dim, 2, width) for _ in range(num_convs))
        self.conv_reg = nn.ModuleList(SelfAttentionLayer(embedding_dim, 2, width) for _ in range(num_convs))
        decoding_dim = input_dim + num_convs * embedding_dim
        self.nn_id = ffn(decoding_dim, num_classes, width)
        self.nn_momentum = ffn(decoding_dim + num_classes, 5, width)
        self.nn_charge = ffn(decoding_dim + num_classes, 3, width)

    def forward(self, x_features, mask):
        embedding = self.nn0(x_features)
        embeddings_id, embeddings_reg = [embedding], [embedding]
        for conv_id, conv_reg in zip(self.conv_id, self.conv_reg):
            embeddings_id.append(conv_id(embeddings_id[-1], mask))
            embeddings_reg.append(conv_reg(embeddings_reg[-1], mask))
        preds_id = self.nn_id(torch.cat([x_features] + embeddings_id[1:], -1))
        embedding_reg = torch.cat([x_features] + embeddings_reg[1:] + [preds_id], -1)
        return {"cls_id_onehot": preds_id, "momentum": self.nn_momentum(embedding_reg) + x_features[..., 1:6],
                "charge": self.nn_charge(embedding_reg)}


class Events(Dataset):
    def __init__(self, num_events, num_elements):
        self.num_events, self.num_elements = num_events, num_elements

    def __len__(self):
        return self.num_events

    def __getitem__(self, index):
        n = self.num_elements
        mask = torch.arange(n) < n - 40 * (index % 5)
        return {"X": torch.randn(n, 34), "mask": mask, "cls_id": torch.randint(0, 8, (n,)), "momentum": torch.randn(n, 5),
                "charge": torch.randint(0, 3, (n,))}


def mlpf_loss(y, ypred):
    msk_true_particle = (y["cls_id"] != 0).float().unsqueeze(-1)
    npart = y["cls_id"].numel()
    log_p = F.log_softmax(ypred["cls_id_onehot"], -1)
    log_pt = log_p.gather(-1, y["cls_id"].unsqueeze(-1)).squeeze(-1)
    loss = {"Classification": (-(1 - log_pt.exp()) ** 2 * log_pt).sum() / npart,
            "Regression": F.huber_loss(ypred["momentum"] * msk_true_particle, y["momentum"] * msk_true_particle),
            "Charge": F.cross_entropy(ypred["charge"].transpose(1, 2), y["charge"])}
    loss["Total"] = loss["Classification"] + loss["Regression"] + loss["Charge"]
    return loss


def train_and_valid(model, optimizer, data_loader, is_train, fixed):
    model.train(is_train)
    epoch_loss = {}
    for batch in data_loader:
        batch = {key: value.cuda(non_blocking=True) for key, value in batch.items()}
        if is_train or not fixed:
            ypred = model(batch["X"], batch["mask"])
        else:
            with torch.no_grad():
                ypred = model(batch["X"], batch["mask"])
        if is_train:
            loss = mlpf_loss(batch, ypred)
            for param in model.parameters():
                param.grad = None
            loss["Total"].backward()
            optimizer.step()
        else:
            with torch.no_grad():
                loss = mlpf_loss(batch, ypred)
        for key in loss:
            epoch_loss[key] = epoch_loss.get(key, 0.0) + loss[key].detach()
    return {key: value.cpu().item() / len(data_loader) for key, value in epoch_loss.items()}


@expected("evaluation_keeps_graphs", fix="no_grad", thread="jpata/particleflow#290", memory=600)
def train_mlpf(fixed=False):
    """In the validation pass of `train_and_valid` the forward `model(batch.X, batch.mask)` runs with gradients on (only the loss is under
    `no_grad`), so it keeps the activations of the forward for a backward that never comes, and with the `ypred` of the previous batch still
    bound two such graphs are on the GPU. Cured by: Forward under `torch.no_grad()` when not training.
    """
    train_loader = DataLoader(Events(16, 1500), batch_size=4, shuffle=True)
    valid_loader = DataLoader(Events(8, 1500), batch_size=4)
    model = MLPF().cuda()
    optimizer = optim.AdamW(model.parameters(), lr=1e-4)
    losses = {"train": [], "valid": []}
    for _ in range(2):
        losses["train"].append(train_and_valid(model, optimizer, train_loader, True, fixed)["Total"])
        losses["valid"].append(train_and_valid(model, optimizer, valid_loader, False, fixed)["Total"])
    return {"epochs": len(losses["valid"])}


# Binding affinity of a ligand from the pose in the protein, one complex at a time.

class CFConv(nn.Module):
    def __init__(self, hidden, num_gaussians):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(num_gaussians, hidden), nn.Softplus(), nn.Linear(hidden, hidden))
        self.lin1, self.lin2 = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden)

    def forward(self, h, edge_index, edge_attr):
        messages = self.lin1(h)[edge_index[0]] * self.mlp(edge_attr)
        return self.lin2(torch.zeros_like(h).index_add(0, edge_index[1], messages))


class SchNet(nn.Module):
    def __init__(self, hidden=64, num_gaussians=32, num_interactions=3, cutoff=10.0):
        super().__init__()
        self.embedding = nn.Embedding(100, hidden)
        self.register_buffer("offset", torch.linspace(0, cutoff, num_gaussians))
        self.interactions = nn.ModuleList(CFConv(hidden, num_gaussians) for _ in range(num_interactions))
        self.head = nn.Sequential(nn.Linear(hidden, hidden // 2), nn.Softplus(), nn.Linear(hidden // 2, 1))

    def forward(self, z, pos, edge_index):
        distance = (pos[edge_index[0]] - pos[edge_index[1]]).norm(dim=-1)
        edge_attr = torch.exp(-10 * (distance[:, None] - self.offset) ** 2)
        h = self.embedding(z)
        for interaction in self.interactions:
            h = h + interaction(h, edge_index, edge_attr)
        return self.head(h).sum()


class MSELoss(nn.Module):
    def forward(self, pred, target, in_range, uncertainty):
        squared = (pred - target) ** 2
        return (squared * (1 - in_range * 0.5) / (1 + uncertainty)).reshape(())


def make_poses(number, atoms):
    rng = np.random.default_rng(0)
    poses = []
    for index in range(number):
        n = atoms + int(rng.integers(0, 40))
        pos = rng.normal(size=(n, 3)).astype(np.float32) * 6
        near = np.linalg.norm(pos[:, None] - pos[None], axis=-1) < 10
        np.fill_diagonal(near, False)
        poses.append((f"cpd-{index}", {"z": torch.from_numpy(rng.integers(1, 17, n)), "pos": torch.from_numpy(pos),
                      "edge_index": torch.from_numpy(np.stack(near.nonzero())), "pIC50": float(rng.normal(5)), "pIC50_range": 0.0, "pIC50_stderr": 0.1}))
    return poses


class Trainer:
    def __init__(self, model, ds_train, batch_size, n_epochs, device="cuda"):
        self.model, self.ds_train, self.batch_size, self.n_epochs, self.device = model.to(device), ds_train, batch_size, n_epochs, device
        self.optimizer, self.loss_func = optim.Adam(model.parameters(), lr=1e-4), MSELoss()
        self.loss_dict = {}

    def predict(self, pose):
        return self.model(pose["z"].to(self.device), pose["pos"].to(self.device), pose["edge_index"].to(self.device))

    def train(self, fixed):
        for epoch_idx in range(self.n_epochs):
            batch_counter, batch_loss = 0, None
            self.optimizer.zero_grad()
            for compound_id, pose in self.ds_train:
                target, in_range, uncertainty = (torch.tensor([[pose[key]]], device=self.device)
                                                 for key in ("pIC50", "pIC50_range", "pIC50_stderr"))
                pred = self.predict(pose).reshape(target.shape)
                loss = self.loss_func(pred, target, in_range, uncertainty)
                if fixed:
                    loss.backward()
                else:
                    batch_loss = loss if batch_loss is None else batch_loss + loss
                self.loss_dict.setdefault(compound_id, []).append((pred.item(), loss.item()))
                batch_counter += 1
                if batch_counter == self.batch_size:
                    if not fixed:
                        batch_loss.backward()
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    batch_counter, batch_loss = 0, None


@expected("several_forward_passes", fix=r"loss\.backward", thread="asapdiscovery/asapdiscovery#722", memory=350)
def train_affinity(fixed=False):
    """`batch_loss` sums the losses of all complexes of a batch, and `backward` is called once at the end of the batch; until then the
    graphs (activations) of all the `batch_size` separate forward passes are kept. Cured by: Call `loss.backward()` after each prediction
    and let the gradients add up; `optimizer.step()` after `batch_size` predictions.
    """
    trainer = Trainer(SchNet(), make_poses(40, 100), batch_size=20, n_epochs=2)
    trainer.train(fixed)
    return {"compounds": len(trainer.loss_dict)}


# Active learning: which pictures of the pool is the network least sure of?

class MCDropoutVGG(nn.Module):
    def __init__(self, num_classes, widths=(32, 64, 128, 256)):
        super().__init__()
        layers, channels = [], 3
        for width in widths:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            channels = width
        self.features, self.pool = nn.Sequential(*layers), nn.AdaptiveAvgPool2d(4)
        self.fc1, self.fc2 = nn.Linear(16 * channels, 512), nn.Linear(512, num_classes)

    def forward(self, x):
        x = self.pool(self.features(x)).flatten(1)
        x = F.dropout(x, 0.5, training=True)
        return self.fc2(F.dropout(F.relu(self.fc1(x)), 0.5, training=True))


class ModelWrapper:
    def __init__(self, model, criterion, replicate_in_memory=True):
        self.model, self.criterion, self.replicate_in_memory = model, criterion, replicate_in_memory

    def train_on_dataset(self, dataset, optimizer, batch_size, epoch):
        self.model.train()
        for _ in range(epoch):
            for data, target in DataLoader(dataset, batch_size, shuffle=True):
                optimizer.zero_grad()
                loss = self.criterion(self.model(data.cuda()), target.cuda())
                loss.backward()
                optimizer.step()

    def predict_on_batch(self, data, iterations):
        with torch.no_grad():
            data = data.cuda()
            if not self.replicate_in_memory:
                return torch.stack([self.model(data) for _ in range(iterations)], -1)
            input_shape = data.size()
            batch_size = input_shape[0]
            data = torch.stack([data] * iterations)
            data = data.view(batch_size * iterations, *input_shape[1:])
            out = self.model(data)
            return out.view(iterations, batch_size, -1).permute(1, 2, 0)

    def predict_on_dataset(self, dataset, batch_size, iterations):
        self.model.eval()
        return np.vstack([self.predict_on_batch(data, iterations).cpu().numpy() for data, _ in DataLoader(dataset, batch_size)])


def bald(predictions):
    probabilities = np.exp(predictions - predictions.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    mean = probabilities.mean(-1)
    return -(mean * np.log(mean + 1e-9)).sum(1) + (probabilities * np.log(probabilities + 1e-9)).sum(1).mean(-1)


@expected("batch_without_gradients", fix="part", thread="baal-org/baal#6", memory=800)
def label_uncertainty(fixed=False):
    """`predict_on_batch` replicates the batch `iterations` times (`torch.stack([data] * iterations)`) and sends all copies through the
    model in one forward, so that the need is `iterations` times that of the same batch size in training. Cured by:
    `replicate_in_memory=False`: the Monte-Carlo passes run one after another, and only their outputs are stacked.
    """
    labelled = list(zip(torch.rand(48, 3, 128, 128), torch.randint(0, 10, (48,))))
    pool = list(zip(torch.rand(32, 3, 128, 128), torch.zeros(32)))
    model = MCDropoutVGG(10).cuda()
    wrapper = ModelWrapper(model, nn.CrossEntropyLoss(), replicate_in_memory=not fixed)
    optimizer = optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    wrapper.train_on_dataset(labelled, optimizer, batch_size=16, epoch=1)
    uncertainty = bald(wrapper.predict_on_dataset(pool, batch_size=16, iterations=20))
    return {"ranked": len(np.argsort(uncertainty))}


# A parser of postal addresses.

class Encoder(nn.Module):
    def __init__(self, input_size, hidden_size, num_layers=1):
        super().__init__()
        self.lstm = nn.LSTM(input_size, hidden_size, num_layers=num_layers, batch_first=True)

    def forward(self, to_predict, lengths_tensor):
        packed = nn.utils.rnn.pack_padded_sequence(to_predict, lengths_tensor.cpu(), batch_first=True, enforce_sorted=False)
        _, hidden = self.lstm(packed)
        return hidden


class Decoder(nn.Module):
    def __init__(self, input_size, hidden_size, output_size, num_layers=1):
        super().__init__()
        self.lstm = nn.LSTM(input_size, hidden_size, num_layers=num_layers)
        self.linear, self.softmax = nn.Linear(hidden_size, output_size), nn.LogSoftmax(dim=1)

    def forward(self, to_predict, hidden):
        output, hidden = self.lstm(to_predict.float(), hidden)
        return self.softmax(self.linear(output[0])), hidden


class Seq2Seq(nn.Module):
    def __init__(self, hidden_size=512, tags=9):
        super().__init__()
        self.encoder, self.decoder, self.tags = Encoder(300, hidden_size), Decoder(1, hidden_size, tags), tags

    def forward(self, to_predict, lengths_tensor):
        batch_size, max_length = to_predict.shape[:2]
        decoder_hidden = self.encoder(to_predict, lengths_tensor)
        decoder_input = to_predict.new_full((1, batch_size, 1), -1)
        prediction_sequence = to_predict.new_zeros(max_length + 1, batch_size, self.tags)
        for idx in range(max_length + 1):
            decoder_output, decoder_hidden = self.decoder(decoder_input.view(1, batch_size, 1), decoder_hidden)
            prediction_sequence[idx] = decoder_output
            _, decoder_input = decoder_output.topk(1)
        return prediction_sequence


class FastTextVectorizer:
    def __init__(self, words):
        self.vectors = {word: torch.randn(300) for word in words}

    def __call__(self, addresses):
        return [torch.stack([self.vectors[word] for word in address.split()]) for address in addresses]


def fasttext_data_padding(vectors):
    lengths = torch.tensor([len(vector) for vector in vectors])
    return nn.utils.rnn.pad_sequence(vectors, batch_first=True), lengths


class AddressParser:
    def __init__(self, vectorizer, device="cuda"):
        self.device, self.vectorizer, self.model = device, vectorizer, Seq2Seq().to(device).eval()

    def _predict_pipeline(self, data):
        return fasttext_data_padding(self.vectorizer(data))

    def __call__(self, addresses_to_parse, batch_size=None):
        lower_cased = [address.lower() for address in addresses_to_parse]
        if batch_size is None:
            padded_address = self._predict_pipeline(lower_cased)
            predictions = self.model(*(part.to(self.device) for part in padded_address))
            tags = predictions.max(2)[1].transpose(0, 1).cpu().numpy().tolist()
        else:
            tags = []
            for x in DataLoader(lower_cased, collate_fn=self._predict_pipeline, batch_size=batch_size):
                predictions = self.model(*(part.to(self.device) for part in x))
                tags.extend(predictions.max(2)[1].transpose(0, 1).cpu().numpy().tolist())
        return [list(zip(address.split(), tag)) for address, tag in zip(addresses_to_parse, tags)]


@expected("batch_without_gradients", fix="part|half the batch", thread="GRAAL-Research/deepparse#84", memory=500)
def parse_addresses(fixed=False):
    """`AddressParser.__call__` vectorizes and pads all the addresses it is given and passes them through the network as one single batch;
    the memory grows with the number of addresses. Cured by: Feed the addresses by a `DataLoader` in batches of 32 and collect the tags on
    the CPU.
    """
    words = "rue des lilas ouest quebec city avenue du mont royal est montreal canada apartment unit boulevard saint laurent nord".split()
    words += [str(number) for number in range(100, 200)]
    rng = np.random.default_rng(3)
    addresses = [" ".join(rng.choice(words, rng.integers(6, 16))).title() for _ in range(2500)]
    parser = AddressParser(FastTextVectorizer(words))
    parsed = parser(addresses, batch_size=32 if fixed else None)
    return {"parsed": len(parsed)}


# Self-supervised speech features for the prediction of quality scores.

def build_hubert():
    from transformers import HubertConfig, HubertModel
    config = HubertConfig(hidden_size=256, num_hidden_layers=6, num_attention_heads=4, intermediate_size=1024, conv_dim=(128,) * 7,
                          num_conv_pos_embeddings=32, num_conv_pos_embedding_groups=4, apply_spec_augment=False)
    return HubertModel(config)


def read_wav(seconds):
    t = np.arange(int(16000 * seconds), dtype=np.float32) / 16000
    return np.sin(2 * np.pi * 220 * t).astype(np.float32)


def extract_ssl_feat(filepath, model, list_new, dirname, fixed):
    name, seconds, score = filepath
    cached_path = os.path.join(dirname, name[:-4] + ".npy")
    audio_data = read_wav(seconds)
    end2end_channel_1 = torch.from_numpy(audio_data.reshape(1, -1)).to("cuda:0")
    if fixed:
        with torch.no_grad():
            features_1 = model(end2end_channel_1).last_hidden_state
    else:
        features_1 = model(end2end_channel_1).last_hidden_state
    causal_1 = features_1.detach().to("cpu").numpy()
    np.save(cached_path, causal_1[:, ::50])
    list_new.append(f"{score},{cached_path}")
    return list_new


def train_data_generator(file_list, model, fixed):
    list_new = []
    with tempfile.TemporaryDirectory(prefix="hubert-") as dirname:
        for filepath in file_list:
            list_new = extract_ssl_feat(filepath, model, list_new, dirname, fixed)
    return list_new


@expected("evaluation_keeps_graphs", fix="no_grad", thread="dhimasryan/MOSA-Net-Cross-Domain#2", memory=520)
def extract_ssl_features(fixed=False):
    """The features are extracted with gradients on: `model(...)` is in eval mode but not under `no_grad`, so all the activations of the
    HuBERT forward of a whole recording are kept, and a long recording does not fit. Cured by: Wrap the forward in `with torch.no_grad()`.
    """
    model = build_hubert()
    model.eval()
    model = model.to(torch.device("cuda:0"))
    train_list = [(f"sys{index:03d}-utt.wav", seconds, 3.0 + index % 2) for index, seconds in enumerate([4, 6.5, 5, 9, 12, 7, 40, 5])]
    return {"files": len(train_data_generator(train_list, model, fixed))}


# Harmonization of brain scans: three orientations are decoded by slices and then fused in 3D.

class UNetSlice(nn.Module):
    def __init__(self, in_ch, out_ch, width=16):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(in_ch, width, 3, padding=1), nn.InstanceNorm2d(width), nn.LeakyReLU())
        self.up = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.LeakyReLU(), nn.Conv2d(width, out_ch, 1))

    def forward(self, x):
        return self.up(self.down(x))


class FusionNet(nn.Module):
    def __init__(self, in_ch=3, out_ch=1):
        super().__init__()
        self.conv1 = nn.Sequential(nn.Conv3d(in_ch, 8, 3, 1, 1), nn.InstanceNorm3d(8), nn.LeakyReLU(),
                                   nn.Conv3d(8, 16, 3, 1, 1), nn.InstanceNorm3d(16), nn.LeakyReLU())
        self.conv2 = nn.Sequential(nn.Conv3d(in_ch + 16, 16, 3, 1, 1), nn.LeakyReLU(), nn.Conv3d(16, out_ch, 3, 1, 1), nn.ReLU())

    def forward(self, x):
        return self.conv2(torch.cat([x, self.conv1(x)], dim=1))


class HACA3:
    def __init__(self, beta_dim=5, theta_dim=2, device="cuda"):
        self.device, self.theta_dim = device, theta_dim
        self.beta_encoder = UNetSlice(1, beta_dim).to(device)
        self.theta_encoder = nn.Sequential(nn.Conv2d(1, 16, 8, 8), nn.LeakyReLU(), nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, theta_dim, 1)).to(device)
        self.decoder = UNetSlice(beta_dim + theta_dim, 1).to(device)
        self.fusion_net = FusionNet(in_ch=3, out_ch=1)

    def harmonize(self, source_image, target_theta, num_batches=8):
        rec_image = []
        with torch.set_grad_enabled(False):
            for net in (self.beta_encoder, self.decoder):
                net.eval()
            for batch in source_image.unsqueeze(1).chunk(num_batches):
                batch = batch.to(self.device)
                mask = (batch > 1e-6) * 1.0
                beta = self.beta_encoder(batch).softmax(1)
                theta = target_theta.view(1, self.theta_dim, 1, 1).expand(len(batch), -1, *batch.shape[2:])
                rec_image.append((self.decoder(torch.cat([beta, theta], 1)) * mask).cpu())
        return torch.cat(rec_image).squeeze(1).numpy()

    def combine_images(self, images, norm_val):
        fusion_net = self.fusion_net.to(self.device)
        fusion_net.eval()
        with torch.autocast("cuda"):
            image = torch.cat([torch.from_numpy(im)[None, None] for im in images], dim=1).to(self.device)
            image_fusion = fusion_net(image).squeeze().detach().cpu().numpy()
        return image_fusion * norm_val


@expected("evaluation_keeps_graphs", fix="no_grad", thread="lianruizuo/haca3#10", memory=1010)
def harmonize_subject(fixed=False):
    """The fusion of the harmonized orientations (`combine_images`) runs the 3D `FusionNet` over the whole volume with autograd enabled
    (`detach` comes only after the forward), so that the activations of all its layers are kept. Cured by: Decorate `combine_images` with
    `@torch.inference_mode()`.
    """
    size = 144
    haca3 = HACA3()
    combine_images = torch.inference_mode()(haca3.combine_images) if fixed else haca3.combine_images
    volume = torch.rand(size, size, size)
    with torch.no_grad():
        target_theta = haca3.theta_encoder(torch.rand(4, 1, size, size).cuda()).mean(0)
    orientations = []
    for axes in ((0, 1, 2), (1, 0, 2), (2, 0, 1)):
        reconstructed = haca3.harmonize(volume.permute(*axes).contiguous(), target_theta)
        orientations.append(np.ascontiguousarray(reconstructed.transpose(np.argsort(axes))))
    fused = combine_images(orientations, norm_val=1000.0)
    return {"voxels": int(fused.size)}


# Removal of JPEG artifacts from photos.

def conv(in_channels, out_channels):
    return nn.Conv2d(in_channels, out_channels, 3, padding=1)


class ResBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.res = nn.Sequential(conv(channels, channels), nn.ReLU(inplace=True), conv(channels, channels))

    def forward(self, x):
        return x + self.res(x)


class QFAttention(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.res = nn.Sequential(conv(channels, channels), nn.ReLU(inplace=True), conv(channels, channels))

    def forward(self, x, gamma, beta):
        return x + gamma[..., None, None] * self.res(x) + beta[..., None, None]


class FBCNN(nn.Module):
    def __init__(self, in_nc=3, out_nc=3, nc=(32, 64, 128), nb=2):
        super().__init__()
        self.nb = nb
        self.m_head, self.m_tail = conv(in_nc, nc[0]), conv(nc[0], out_nc)
        self.m_down1 = nn.Sequential(*[ResBlock(nc[0]) for _ in range(nb)], nn.Conv2d(nc[0], nc[1], 2, 2))
        self.m_down2 = nn.Sequential(*[ResBlock(nc[1]) for _ in range(nb)], nn.Conv2d(nc[1], nc[2], 2, 2))
        self.m_body_encoder = nn.Sequential(*[ResBlock(nc[2]) for _ in range(nb)])
        self.qf_pred = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(nc[2], 128), nn.ReLU(), nn.Linear(128, 1), nn.Sigmoid())
        self.qf_embed = nn.Sequential(nn.Linear(1, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.m_up2 = nn.ModuleList([nn.ConvTranspose2d(nc[2], nc[1], 2, 2), *[QFAttention(nc[1]) for _ in range(nb)]])
        self.m_up1 = nn.ModuleList([nn.ConvTranspose2d(nc[1], nc[0], 2, 2), *[QFAttention(nc[0]) for _ in range(nb)]])
        self.to_gamma = nn.ModuleList([nn.Linear(128, nc[1]), nn.Linear(128, nc[0])])
        self.to_beta = nn.ModuleList([nn.Linear(128, nc[1]), nn.Linear(128, nc[0])])

    def forward(self, x, qf_input=None):
        h, w = x.size()[-2:]
        x = F.pad(x, (0, -w % 8, 0, -h % 8), mode="replicate")
        x1 = self.m_head(x)
        x2 = self.m_down1(x1)
        x = self.m_down2(x2)
        x = self.m_body_encoder(x)
        qf = self.qf_pred(x)
        embedding = self.qf_embed(qf if qf_input is None else qf_input)
        x = self.m_up2[0](x)
        for i in range(self.nb):
            x = self.m_up2[i + 1](x, self.to_gamma[0](embedding).sigmoid(), self.to_beta[0](embedding).tanh())
        x = x + x2
        x = self.m_up1[0](x)
        for i in range(self.nb):
            x = self.m_up1[i + 1](x, self.to_gamma[1](embedding).sigmoid(), self.to_beta[1](embedding).tanh())
        x = self.m_tail(x + x1)
        return x[..., :h, :w], qf


def test_split(model, img_L, qf_input, size, border=16):
    h, w = img_L.shape[-2:]
    img_E = torch.zeros_like(img_L)
    for top in range(0, h, size):
        for left in range(0, w, size):
            up, front = max(0, top - border), max(0, left - border)
            tile, qf = model(img_L[..., up:top + size + border, front:left + size + border], qf_input)
            part = tile[..., top - up:top - up + size, left - front:left - front + size]
            img_E[..., top:top + size, left:left + size] = part
    return img_E, qf


@expected("batch_without_gradients", fix="tiles|512", thread="jiaxi-jiang/FBCNN#4", memory=700)
def restore_jpegs(fixed=False):
    """A whole photo of several megapixels goes through the network at once; the full-resolution feature maps of 64 channels (and the skips
    `x1`, `x2`) are proportional to the number of pixels. Cured by: Split the large image into smaller ones, restore each, and put the
    result together.
    """
    device = torch.device("cuda")
    model = FBCNN().eval()
    for _, v in model.named_parameters():
        v.requires_grad = False
    model = model.to(device)
    photos = [np.random.default_rng(n).integers(0, 256, (h, w, 3), dtype=np.uint8) for n, (h, w) in enumerate([(240, 320), (480, 640), (1400, 2100)])]
    restored = []
    for photo in photos:
        img_L = torch.from_numpy(photo).permute(2, 0, 1).float().div(255).unsqueeze(0).to(device)
        for qf in (None, 10, 50):
            qf_input = None if qf is None else torch.tensor([[1 - qf / 100]], device=device)
            img_E, _ = test_split(model, img_L, qf_input, 512) if fixed else model(img_L, qf_input)
            restored.append(img_E.squeeze(0).clamp(0, 1).mul(255).round().byte().permute(1, 2, 0).cpu().numpy())
    return {"images": len(restored)}


# Visual place recognition: a query, a picture of the same place, and pictures of other places.

class NetVLAD(nn.Module):
    def __init__(self, num_clusters=64, dim=128):
        super().__init__()
        self.num_clusters, self.dim = num_clusters, dim
        self.conv = nn.Conv2d(dim, num_clusters, kernel_size=1, bias=False)
        self.centroids = nn.Parameter(torch.rand(num_clusters, dim))

    def forward(self, x):
        n, c = x.shape[:2]
        x = F.normalize(x, p=2, dim=1)
        soft_assign = F.softmax(self.conv(x).view(n, self.num_clusters, -1), dim=1)
        x_flatten = x.view(n, c, -1)
        vlad = torch.zeros(n, self.num_clusters, c, dtype=x.dtype, device=x.device)
        for k in range(self.num_clusters):
            residual = x_flatten.unsqueeze(1) - self.centroids[k].view(1, 1, c, 1)
            residual *= soft_assign[:, k:k + 1, :].unsqueeze(2)
            vlad[:, k:k + 1, :] = residual.sum(dim=-1)
        vlad = F.normalize(vlad, p=2, dim=2).view(n, -1)
        return F.normalize(vlad, p=2, dim=1)


class PlaceNet(nn.Module):
    def __init__(self, num_clusters, dim=32):
        super().__init__()
        self.encoder = nn.Sequential(conv(3, 16), nn.ReLU(), nn.MaxPool2d(2), conv(16, 32), nn.ReLU(), nn.MaxPool2d(2), conv(32, dim))
        self.pool = NetVLAD(num_clusters, dim)

    def forward(self, x):
        return self.pool(self.encoder(x))


def places_loader(tuples, neg_samples, size):
    for _ in range(tuples):
        yield torch.rand(1, 3, size, size), torch.rand(1, 3, size, size), torch.rand(neg_samples, 3, size, size)


@expected("unrolled_sequence", fix="fewer turns", thread="Nanne/pytorch-NetVlad#77", memory=600)
def train_place_recognition(fixed=False):
    """`num_clusters` is 1024 instead of 64: the NetVLAD layer computes for every cluster a residual of all local descriptors (images x
    channels x positions), and autograd keeps one of them for each cluster, so the pooling needs 1024 times a feature map although its
    output is small. Cured by: Use the default of 64 clusters.
    """
    num_clusters = 64 if fixed else 1024
    neg_samples, margin = 4, 0.1
    model = PlaceNet(num_clusters).cuda()
    optimizer = optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, weight_decay=0.001)
    criterion = nn.TripletMarginLoss(margin=margin ** 0.5, p=2, reduction="sum")
    epoch_loss = 0.0
    for query, positives, negatives in places_loader(3, neg_samples, 128):
        images = torch.cat([query, positives, negatives]).cuda()
        vlad_q, vlad_p, vlad_n = model(images).split([1, 1, neg_samples])
        optimizer.zero_grad()
        loss = 0
        for n in range(neg_samples):
            loss = loss + criterion(vlad_q, vlad_p, vlad_n[n:n + 1])
        (loss / neg_samples).backward()
        optimizer.step()
        epoch_loss += loss.item()
    return {"clusters": num_clusters}


# Sentence vectors of a corpus from a pretrained encoder.

class SequenceEncoder(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embedding = nn.Embedding(args.vocab_size, args.emb_size, padding_idx=0)
        self.positions = nn.Embedding(args.seq_length, args.emb_size)
        layer = nn.TransformerEncoderLayer(args.emb_size, args.heads_num, args.feedforward_size, batch_first=True)
        self.encoder, self.pooling = nn.TransformerEncoder(layer, args.layers_num, enable_nested_tensor=False), args.pooling
        self.eval()

    def forward(self, src, seg):
        emb = self.embedding(src) + self.positions(torch.arange(src.size(1), device=src.device))
        output = self.encoder(emb)
        if self.pooling == "mean":
            return output.mean(dim=1)
        if self.pooling == "max":
            return output.max(dim=1)[0]
        return output[:, 0, :]


def batch_loader(batch_size, src, seg):
    instances_num = src.size(0)
    for i in range(0, instances_num, batch_size):
        yield src[i:i + batch_size], seg[i:i + batch_size]


def read_dataset(args, sentences):
    rng = np.random.default_rng(1)
    src, seg = np.zeros((sentences, args.seq_length), np.int64), np.zeros((sentences, args.seq_length), np.int64)
    for row in range(sentences):
        length = rng.integers(10, args.seq_length)
        src[row, :length], seg[row, :length] = rng.integers(1, args.vocab_size, length), 1
    return torch.from_numpy(src), torch.from_numpy(seg)


@expected("evaluation_keeps_graphs", fix="no_grad|detach", thread="dbiir/UER-py#113", memory=700)
def extract_features(fixed=False):
    """`feature_vectors.append(output.cpu())` keeps the graph: the copy on the CPU still refers through autograd to the forward on the GPU,
    so the activations of all the batches stay on the GPU until the end. Cured by: Append `output.cpu().detach()`.
    """
    args = types.SimpleNamespace(vocab_size=8000, emb_size=256, heads_num=4, feedforward_size=1024, layers_num=4, seq_length=64, pooling="first", batch_size=32)
    device = torch.device("cuda")
    model = SequenceEncoder(args).to(device)
    src, seg = read_dataset(args, 800)
    feature_vectors = []
    for src_batch, seg_batch in batch_loader(args.batch_size, src, seg):
        src_batch, seg_batch = src_batch.to(device), seg_batch.to(device)
        output = model(src_batch, seg_batch)
        if fixed:
            feature_vectors.append(output.cpu().detach())
        else:
            feature_vectors.append(output.cpu())
    feature_vectors = torch.cat(feature_vectors, 0)
    return {"sentences": len(feature_vectors)}


# A notebook: the head of a fetus in ultrasound pictures is to be segmented.

class SegNet(nn.Module):
    def __init__(self, params):
        super().__init__()
        c_in, f = params["input_shape"][0], params["initial_filters"]
        self.convs = nn.ModuleList([conv(c_in, f), conv(f, 2 * f), conv(2 * f, 4 * f), conv(4 * f, 8 * f)])
        self.upsample = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.conv_ups = nn.ModuleList([conv(8 * f, 4 * f), conv(4 * f, 2 * f), conv(2 * f, f)])
        self.conv_out = conv(f, params["num_outputs"])

    def forward(self, x):
        for layer in self.convs[:-1]:
            x = F.max_pool2d(F.relu(layer(x)), 2, 2)
        x = F.relu(self.convs[-1](x))
        for layer in self.conv_ups:
            x = F.relu(layer(self.upsample(x)))
        return self.conv_out(x)


def dice_loss(pred, target, smooth=1e-5):
    intersection = (pred * target).sum(dim=(2, 3))
    union = pred.sum(dim=(2, 3)) + target.sum(dim=(2, 3))
    dice = 2.0 * (intersection + smooth) / (union + smooth)
    return (1.0 - dice).sum(), dice.sum()


def loss_func(pred, target):
    bce = F.binary_cross_entropy_with_logits(pred, target, reduction="sum")
    dlv, _ = dice_loss(torch.sigmoid(pred), target)
    return bce + dlv


def metrics_batch(output, target):
    pred = torch.sigmoid(output)
    _, metric_b = dice_loss(pred, target)
    return metric_b


def loss_batch(output, target, opt=None, fixed=False):
    loss = loss_func(output, target)
    if fixed:
        with torch.no_grad():
            metric_b = metrics_batch(output, target)
    else:
        metric_b = metrics_batch(output, target)
    if opt is not None:
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss.item(), metric_b


def loss_epoch(model, dataset_dl, opt=None, fixed=False):
    running_loss, running_metric = 0.0, 0.0
    len_data = len(dataset_dl.dataset)
    for xb, yb in dataset_dl:
        xb, yb = xb.cuda(), yb.cuda()
        loss_b, metric_b = loss_batch(model(xb), yb, opt, fixed)
        running_loss += loss_b
        running_metric += metric_b
    return running_loss / len_data, running_metric / len_data


@expected("graph_of_earlier_steps", fix="detach|item", thread="PacktPublishing/PyTorch-Computer-Vision-Cookbook#11", memory=520)
def train_segmenter(fixed=False):
    """`loss_batch` computes the dice metric `metric_b` with gradients on, and it is added to `running_metric` and the epoch's value to
    `metric_history`; no backward ever runs through it, so of every batch of all epochs the sigmoid and the tensors of the dice product stay
    on the GPU. Cured by: Compute `pred` and `metric_b` under `torch.no_grad()`.
    """
    h, w = 160, 224
    images, masks = torch.rand(240, 1, h, w), (torch.rand(240, 1, h, w) > 0.5).float()
    train_dl = DataLoader(list(zip(images[:200], masks[:200])), batch_size=16, shuffle=True)
    val_dl = DataLoader(list(zip(images[200:], masks[200:])), batch_size=16)
    model = SegNet({"input_shape": (1, h, w), "initial_filters": 8, "num_outputs": 1}).cuda()
    opt = optim.Adam(model.parameters(), lr=3e-4)
    loss_history, metric_history = {"train": [], "val": []}, {"train": [], "val": []}
    best_loss, best_model_wts = float("inf"), copy.deepcopy(model.state_dict())
    for epoch in range(8):
        model.train()
        train_loss, train_metric = loss_epoch(model, train_dl, opt, fixed)
        loss_history["train"].append(train_loss)
        metric_history["train"].append(train_metric)
        model.eval()
        with torch.no_grad():
            val_loss, val_metric = loss_epoch(model, val_dl, fixed=fixed)
        loss_history["val"].append(val_loss)
        metric_history["val"].append(val_metric)
        if val_loss < best_loss:
            best_loss, best_model_wts = val_loss, copy.deepcopy(model.state_dict())
    model.load_state_dict(best_model_wts)
    return {"epochs": len(metric_history["train"])}


# Features of untrimmed videos from an inflated 3D network.

class Unit3D(nn.Module):
    def __init__(self, in_channels, out_channels, kernel=1, stride=1):
        super().__init__()
        self.conv3d = nn.Conv3d(in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=False)
        self.bn = nn.BatchNorm3d(out_channels, eps=0.001, momentum=0.01)

    def forward(self, x):
        return F.relu(self.bn(self.conv3d(x)))


class InceptionModule(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.b0 = Unit3D(in_channels, out_channels[0])
        self.b1 = nn.Sequential(Unit3D(in_channels, out_channels[1]), Unit3D(out_channels[1], out_channels[2], 3))
        self.b2 = nn.Sequential(Unit3D(in_channels, out_channels[3]), Unit3D(out_channels[3], out_channels[4], 3))
        self.b3 = nn.Sequential(nn.MaxPool3d(3, 1, 1), Unit3D(in_channels, out_channels[5]))

    def forward(self, x):
        return torch.cat([self.b0(x), self.b1(x), self.b2(x), self.b3(x)], dim=1)


class InceptionI3d(nn.Module):
    def __init__(self, in_channels=3):
        super().__init__()
        self.stem = nn.Sequential(Unit3D(in_channels, 32, 7, (2, 2, 2)), nn.MaxPool3d((1, 3, 3), (1, 2, 2), (0, 1, 1)), Unit3D(32, 32), Unit3D(32, 64, 3),
                                  nn.MaxPool3d((1, 3, 3), (1, 2, 2), (0, 1, 1)))
        self.mixed_3 = nn.Sequential(InceptionModule(64, [32, 48, 64, 8, 16, 16]), InceptionModule(128, [64, 64, 96, 16, 48, 32]))
        self.mixed_4 = nn.Sequential(nn.MaxPool3d(3, 2, 1), InceptionModule(240, [96, 48, 104, 8, 24, 32]))
        self.avg_pool = nn.AdaptiveAvgPool3d((None, 1, 1))

    def extract_features(self, x):
        return self.avg_pool(self.mixed_4(self.mixed_3(self.stem(x))))


def load_rgb_frames(frames, size):
    return torch.rand(1, 3, 1, size, size).expand(1, 3, frames, size, size)


def run(i3d, videos, chunk):
    done = {}
    for name, frames in videos:
        inputs = load_rgb_frames(frames, 112)
        features = []
        for start in range(0, frames, chunk):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ip = torch.autograd.Variable(inputs[:, :, start:start + chunk].cuda(), volatile=True)
            features.append(i3d.extract_features(ip).squeeze(0).permute(1, 2, 3, 0).data.cpu().numpy())
        done[name] = np.concatenate(features, axis=0)
    return done


@expected("evaluation_keeps_graphs", fix="no_grad", thread="piergiaj/pytorch-i3d#2", memory=650)
def extract_rgb(fixed=False):
    """The script was written for PyTorch 0.3: `Variable(..., volatile=True)` has no effect any more, so the 3D network records a graph in
    feature extraction and keeps the activations of all layers for a long chunk of frames. Cured by: Run the extraction under `with
    torch.no_grad()` instead of `volatile=True` (the thread's author went back to the old version of PyTorch, which had that effect).
    """
    i3d = InceptionI3d()
    i3d.cuda()
    i3d.train(False)
    videos = [("v_001", 60), ("v_002", 90), ("v_003", 1000), ("v_004", 120)]
    if fixed:
        with torch.no_grad():
            done = run(i3d, videos, 400)
    else:
        done = run(i3d, videos, 400)
    return {"videos": len(done)}


# Depth from single pictures, written as a module for a small trainer.

class DepthModule(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.encoder = nn.Sequential(conv(3, width), nn.ReLU(), nn.MaxPool2d(2), conv(width, 2 * width), nn.ReLU())
        self.decoder = nn.Sequential(conv(2 * width, width), nn.ReLU(), nn.Upsample(scale_factor=2), conv(width, 1), nn.Softplus())

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, batch_idx):
        image, depth = batch
        depth_hat = self(image)
        loss = F.l1_loss(depth_hat, depth)
        return {"loss": loss, "log": {"train_loss": loss}, "depth_hat": depth_hat}

    def configure_optimizers(self):
        return optim.Adam(self.parameters(), lr=1e-3)


def recursive_detach(in_dict):
    out_dict = {}
    for k, v in in_dict.items():
        if isinstance(v, dict):
            out_dict[k] = recursive_detach(v)
        else:
            out_dict[k] = v.detach() if isinstance(v, torch.Tensor) else v
    return out_dict


class LoopTrainer:
    def __init__(self, max_epochs, fixed):
        self.max_epochs, self.fixed, self.logged = max_epochs, fixed, []

    def is_overriden(self, name, model):
        return hasattr(model, name)

    def run_training_batch(self, model, batch, batch_idx):
        batch = [tensor.cuda() for tensor in batch]

        def optimizer_closure():
            output_dict = model.training_step(batch, batch_idx)
            output_dict["loss"].backward()
            return output_dict["loss"], output_dict

        loss, batch_output = optimizer_closure()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), batch_output

    def run_training_epoch(self, model, train_dataloader):
        outputs = []
        for batch_idx, batch in enumerate(train_dataloader):
            batch_result, batch_output = self.run_training_batch(model, batch, batch_idx)
            if not self.fixed or self.is_overriden("training_epoch_end", model):
                outputs.append(recursive_detach(batch_output))
            self.logged.append(batch_result)
        if self.is_overriden("training_epoch_end", model):
            model.training_epoch_end(outputs)

    def fit(self, model, train_dataloader):
        model.cuda()
        self.optimizer = model.configure_optimizers()
        for _ in range(self.max_epochs):
            model.train()
            self.run_training_epoch(model, train_dataloader)


class Rooms(Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, index):
        return torch.full((3, 320, 416), (index % 7) / 7), torch.full((1, 320, 416), 1.0 + index % 5)


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="Lightning-AI/pytorch-lightning#1510", memory=420)
def fit_depth(fixed=False):
    """`run_training_epoch` appends the output of every training step to `outputs` (detached, but still on the GPU) although the model has
    no `training_epoch_end`; what `training_step` returns besides the loss (the predicted depth maps) stays on the GPU till the end of the
    epoch. Cured by: Only track the outputs when the model implements `training_epoch_end`.
    """
    trainer = LoopTrainer(1, fixed)
    trainer.fit(DepthModule(), DataLoader(Rooms(), batch_size=4, shuffle=True))
    return {"steps": len(trainer.logged)}
