"""Small programs that run out of memory as public threads describe it, a few for each root cause."""
import gc
import io

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from expected import expected
from loops import Block, elementwise_net, mib_tensor, rows


def batch(mib):
    return torch.randn(rows(mib), 4096, device="cuda")


def no_grad_if(fixed):
    return torch.set_grad_enabled(not fixed)


def train_epoch(model, steps=4, mib=8):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(batch(mib)).square().mean()
        loss.backward()
        optimizer.step()


# Evaluation that keeps graphs.

@expected("evaluation_keeps_graphs", fix="no_grad", thread="leftthomas/SRGAN#43", quick=True)
def validation_sums_losses(fixed=False):
    model = elementwise_net()

    def validate():
        model.eval()
        total = 0
        with no_grad_if(fixed):
            for _ in range(30):
                total = total + model(batch(8)).square().mean()
        return total / 30

    train_epoch(model)
    validate()


@expected("evaluation_keeps_graphs", fix="no_grad", thread="hszhao/semseg#60", memory=1070, held_back=True)
def validation_larger_batch(fixed=False):
    model = elementwise_net(8)

    def run_validation():
        model.eval()
        with no_grad_if(fixed):
            return model(batch(60)).argmax(1)

    train_epoch(model)
    run_validation()


@expected("evaluation_keeps_graphs", fix="no_grad", thread="pytorch/pytorch#4932")
def evaluation_keeps_outputs(fixed=False):
    model = elementwise_net()

    def evaluate():
        outputs = []
        with no_grad_if(fixed):
            for _ in range(24):
                outputs.append(model(batch(8)))
        return torch.cat(outputs) if fixed else outputs

    train_epoch(model)
    evaluate()


@expected("evaluation_keeps_graphs", fix="no_grad", thread="pytorch/pytorch#4050")
def inference_holds_last_result(fixed=False):
    model = elementwise_net(6)
    result = None
    with no_grad_if(fixed):
        for _ in range(6):
            result = model(batch(36))
    return result.shape


@expected("evaluation_keeps_graphs", fix="no_grad", thread="pytorch/pytorch#16417", held_back=True)
def features_to_host_with_graph(fixed=False):
    model = elementwise_net()
    features = []
    with no_grad_if(fixed):
        for _ in range(40):
            features.append(model(batch(8)).cpu())
    return len(features)


@expected("evaluation_keeps_graphs", fix="no_grad", thread="sgrvinod/a-PyTorch-Tutorial-to-Image-Captioning#57")
def test_after_epoch_with_metric(fixed=False):
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1),
                          nn.BatchNorm2d(16), nn.ReLU()).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 256, 256, device="cuda")).mean().backward()
        optimizer.step()
    model.eval()
    psnr = []
    with no_grad_if(fixed):
        for _ in range(40):
            psnr.append(model(torch.randn(2, 3, 256, 256, device="cuda")).square().mean())
    return len(psnr)


# Graphs and outputs of earlier iterations.

@expected("outputs_of_earlier_step", fix=r"\bdel\b", thread="pytorch/pytorch#4050", memory=1200)
def outputs_of_last_iteration(fixed=False):
    model = elementwise_net(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        x = batch(40)
        out = model(x)
        scores = torch.softmax(out.detach().repeat(1, 6), -1)
        loss = out.square().mean() + scores.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if fixed:
            del scores


@expected("recurrent_state", fix="detach", thread="pytorch/pytorch#2198", quick=True)
def lstm_state_not_detached(fixed=False):
    model = nn.LSTM(512, 512).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = None
    for _ in range(40):
        out, state = model(torch.randn(64, 32, 512, device="cuda"), state)
        optimizer.zero_grad()
        out.square().mean().backward(retain_graph=not fixed)
        if fixed:
            state = tuple(s.detach() for s in state)


@expected("recurrent_state", fix="detach", thread="pytorch/pytorch#1536", held_back=True)
def gru_cell_over_episode(fixed=False):
    cell, policy = nn.GRUCell(512, 512).cuda(), nn.Linear(512, 4).cuda()
    optimizer = torch.optim.SGD([*cell.parameters(), *policy.parameters()], 0.1)
    hidden = torch.zeros(2048, 512, device="cuda")
    for _ in range(60):
        hidden = cell(torch.randn(2048, 512, device="cuda"), hidden)
        optimizer.zero_grad()
        policy(hidden).square().mean().backward(retain_graph=not fixed)
        if fixed:
            hidden = hidden.detach()


@expected("create_graph", fix=r"autograd\.grad", thread="pytorch/pytorch#4661")
def backward_create_graph(fixed=False):
    for _ in range(60):
        model = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1024)).cuda()
        loss = model(torch.randn(64, 1024, device="cuda")).square().mean()
        if fixed:
            torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        else:
            loss.backward(create_graph=True)


@expected("create_graph", fix=r"detach|autograd\.grad|create_graph", memory=1600, held_back=True)
def maml_inner_loop(fixed=False):
    weight = torch.randn(4096, 4096, device="cuda", requires_grad=True)
    fast = weight
    for _ in range(20):
        loss = torch.tanh(torch.randn(1024, 4096, device="cuda") @ fast).square().mean()
        step, = torch.autograd.grad(loss, fast, create_graph=not fixed)
        fast = fast - 0.1 * step if not fixed else (fast - 0.1 * step).detach().requires_grad_()
    fast.square().mean().backward()


@expected("graph_of_earlier_steps", fix=r"\.item\(\)|detach", held_back=True)
def penalty_history(fixed=False):
    critic = elementwise_net(2)
    optimizer = torch.optim.SGD(critic.parameters(), 0.1)
    history = []
    for _ in range(40):
        x = batch(4).requires_grad_()
        score = critic(x).square().mean()
        slope, = torch.autograd.grad(score, x, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        optimizer.zero_grad()
        penalty.backward(retain_graph=True)
        optimizer.step()
        history.append(penalty.item() if fixed else penalty)


@expected("several_forward_passes", fix=r"backward\(\)")
def several_forwards_one_backward(fixed=False):
    model = elementwise_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.zero_grad()
    total = 0
    for _ in range(24):
        loss = model(batch(8)).square().mean() / 24
        if fixed:
            loss.backward()
        else:
            total = total + loss
    if not fixed:
        total.backward()
    optimizer.step()


@expected("evaluation_keeps_graphs", fix="no_grad", held_back=True)
def dropout_samples(fixed=False):
    model = nn.Sequential(*[nn.Sequential(Block(), nn.Dropout(0.3)) for _ in range(3)]).cuda()
    x = batch(8)
    with no_grad_if(fixed):
        samples = torch.stack([model(x) for _ in range(24)])
    return samples.var(0).shape


# Buffers that are meant to grow, and lists.

class CachedAttention(nn.Module):
    def __init__(self, width=512, heads=8):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, past):
        batch_size, length, width = x.shape
        q, k, v = (t.view(batch_size, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(batch_size, length, width)), (k, v)


@expected("key_value_cache", fix="max_new_tokens|shorter|offload|StaticCache|window")
def key_value_cache(fixed=False):
    layers = nn.ModuleList(CachedAttention() for _ in range(4)).cuda()
    past = [None] * 4
    with torch.no_grad():
        x = torch.randn(32, 1, 512, device="cuda")
        for _ in range(60 if fixed else 2500):
            for i, layer in enumerate(layers):
                x, past[i] = layer(x, past[i])


@expected("key_value_cache", fix="max_new_tokens|shorter|offload|quantized|StaticCache", held_back=True)
def generate_with_transformers(fixed=False):
    import transformers
    config = transformers.GPT2Config(n_layer=4, n_embd=512, n_head=8, n_positions=2048)
    model = transformers.GPT2LMHeadModel(config).cuda().eval()
    ids = torch.zeros(64, 8, dtype=torch.long, device="cuda")
    with torch.no_grad():
        past = None
        for _ in range(20 if fixed else 900):
            result = model(ids, past_key_values=past, use_cache=True)
            past, ids = result.past_key_values, result.logits[:, -1:].argmax(-1)


@expected("growing_buffer", fix=r"\.cpu\(\)", thread="huggingface/transformers#7232")
def predictions_on_the_gpu(fixed=False):
    model = elementwise_net(2)
    predictions = None
    with torch.no_grad():
        for _ in range(80):
            out = model(batch(8))
            out = out.cpu() if fixed else out
            predictions = out if predictions is None else torch.cat([predictions, out])


@expected("kept_tensors", fix=r"\.item\(\)|\.cpu\(\)", memory=620)
def history_list(fixed=False):
    model = elementwise_net(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    history = []
    for _ in range(60):
        out = model(batch(8))
        optimizer.zero_grad()
        out.square().mean().backward()
        optimizer.step()
        history.append(out.detach().mean().item() if fixed else out.detach() * 2)


@expected("kept_tensors", fix=r"\.cpu\(\)|item\(\)", held_back=True)
def replay_buffer_on_the_gpu(fixed=False):
    replay, model = [], elementwise_net(1)
    for _ in range(80):
        state = batch(12)
        with torch.no_grad():
            action = model(state).mean(1)
        replay.append((state.cpu(), action.cpu()) if fixed else (state, action))


@expected("data_on_gpu", fix=r"on the host|DataLoader|\.cpu\(\)|pin_memory", thread="pytorch/pytorch#16417")
def data_set_on_the_gpu(fixed=False):
    data = torch.randn(rows(900), 4096)
    data = data if fixed else data.cuda()
    train = elementwise_net(4)
    for part in data.split(rows(24)):
        train(part.cuda()).square().mean().backward()


# Files.

def saved(model):
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "extra": [torch.zeros_like(p) for p in model.parameters()]}, file)
    file.seek(0)
    return file


def wide_net(width=3072, layers=6):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


@expected("loaded_onto_gpu", fix="map_location", thread="huggingface/pytorch-image-models#72")
def resume_from_checkpoint(fixed=False):
    model = wide_net().cuda()
    state = torch.load(saved(model), map_location="cpu" if fixed else None)
    model.load_state_dict(state["model"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(64, 3072, device="cuda")).square().mean().backward()
        optimizer.step()


@expected("loaded_onto_gpu", fix="map_location", thread="pytorch/pytorch#7415", memory=1200, held_back=True)
def load_pretrained_twice(fixed=False):
    file = saved(wide_net().cuda())
    gc.collect()
    weights = torch.load(file, map_location="cpu" if fixed else "cuda")
    model = wide_net().cuda()
    model.load_state_dict(weights["model"])
    model(torch.randn(6000, 3072, device="cuda")).square().mean().backward()


# Views.

@expected("small_view", fix=r"\.clone\(\)", thread="pytorch/pytorch#33101", memory=800, quick=True)
def small_view_of_large_tensor(fixed=False):
    first = []
    model = elementwise_net(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(40):
        out = model(batch(16))
        optimizer.zero_grad()
        out.square().mean().backward()
        optimizer.step()
        row = (out.detach() * 2)[0]
        first.append(row.clone() if fixed else row)


@expected("small_view", fix=r"\.clone\(\)", thread="pytorch/pytorch#50432", held_back=True)
def last_token_of_each_batch(fixed=False):
    model, bank = elementwise_net(1), []
    with torch.no_grad():
        for _ in range(60):
            hidden = model(batch(20)).view(-1, 64, 4096)
            bank.append(hidden[:, -1].clone() if fixed else hidden[:, -1])


# Checkpointing.

@expected("one_checkpoint", fix="checkpoint", thread="pytorch/pytorch#147449", memory=600)
def one_checkpoint_around_all(fixed=False):
    model = elementwise_net(16)
    x = batch(16).requires_grad_()
    if fixed:
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=False)
    else:
        x = checkpoint(model, x, use_reentrant=False)
    x.square().mean().backward()


@expected("one_checkpoint", fix="checkpoint", thread="pytorch/pytorch#78731", memory=600, held_back=True)
def one_segment(fixed=False):
    model = elementwise_net(16)
    x = batch(16).requires_grad_()
    checkpoint_sequential(model, 8 if fixed else 1, x, use_reentrant=False).square().mean().backward()


# Autocast.

@expected("autocast_cache", fix="cache_enabled=False", thread="ecmwf/anemoi-core#134", memory=900)
def autocast_around_generation(fixed=False):
    model = wide_net(3072, 16).cuda()
    with torch.no_grad(), torch.autocast("cuda", torch.float16, cache_enabled=not fixed):
        x = torch.randn(8, 3072, device="cuda")
        for _ in range(10):
            x = model(x)


@expected("autocast_cache", fix="cache_enabled=False", held_back=True)
def autocast_in_sampler(fixed=False):
    encoder, decoder = wide_net(3072, 8).cuda(), wide_net(3072, 9).cuda()
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=not fixed):
        for _ in range(4):
            with torch.no_grad():
                decoder(encoder(torch.randn(8, 3072, device="cuda")))


# Attention.

class ScoresAttention(nn.Module):
    def __init__(self, fixed, width=256, heads=8):
        super().__init__()
        self.fixed, self.heads = fixed, heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch_size, length, width = x.shape
        q, k, v = (t.view(batch_size, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.fixed:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = (q @ k.transpose(-2, -1) * 0.2).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch_size, length, width))


@expected("attention_scores", fix="scaled_dot_product_attention|SDPA")
def attention_by_hand(fixed=False):
    model = nn.Sequential(*[ScoresAttention(fixed) for _ in range(4)]).cuda()
    model(torch.randn(2, 2048, 256, device="cuda")).square().mean().backward()


@expected("attention_scores", fix="need_weights=False|SDPA")
def multihead_attention_weights(fixed=False):
    layers = nn.ModuleList(nn.MultiheadAttention(256, 8, batch_first=True) for _ in range(4)).cuda()
    x = torch.randn(2, 2048, 256, device="cuda")
    for layer in layers:
        x = x + layer(x, x, x, need_weights=not fixed)[0]
    x.square().mean().backward()


@expected("attention_scores", fix="scaled_dot_product_attention|SDPA", memory=2048, held_back=True)
def attention_by_einsum(fixed=False):
    q = nn.Linear(64, 64).cuda()
    x = torch.randn(1, 8, 8192, 64, device="cuda")
    query = q(x)
    if fixed:
        y = F.scaled_dot_product_attention(query, x, x)
    else:
        y = torch.einsum("bhqk,bhkd->bhqd", torch.softmax(torch.einsum("bhqd,bhkd->bhqk", query, x), -1), x)
    y.square().mean().backward()


# Results of n² and n³.

@expected("all_pairs", fix="split|chunk", thread="pytorch/pytorch#57720")
def all_distances(fixed=False):
    a, b = torch.randn(40000, 64, device="cuda"), torch.randn(20000, 64, device="cuda")
    nearest = [torch.cdist(part, b).argmin(1) for part in a.split(1000)] if fixed else [torch.cdist(a, b).argmin(1)]
    return torch.cat(nearest).shape


@expected("all_pairs", fix="split|chunk|cdist", thread="hcw-00/PatchCore_anomaly_detection#19", held_back=True)
def differences_by_broadcast(fixed=False):
    x = torch.randn(3000, 128, device="cuda")
    if fixed:
        return torch.cdist(x, x).shape
    return (x.unsqueeze(1) - x.unsqueeze(0)).square().sum(-1).shape


@expected("all_pairs", fix="split|chunk", thread="OML-Team/open-metric-learning#283")
def similarity_of_all_pairs(fixed=False):
    features = F.normalize(torch.randn(32768, 128, device="cuda"), dim=1)
    if fixed:
        return torch.cat([(part @ features.T).topk(5).indices for part in features.split(1024)]).shape
    return (features @ features.T).topk(5).indices.shape


@expected("full_matrices", fix="full_matrices=False", thread="pytorch/pytorch#61949")
def svd_with_full_matrices(fixed=False):
    gradient = torch.randn(30000, 256, device="cuda")
    return torch.linalg.svd(gradient.T, full_matrices=not fixed)[2].shape


@expected("one_hot", fix="cross_entropy|gather|uint8|bool")
def one_hot_masks(fixed=False):
    logits = torch.randn(4, 21, 512, 512, device="cuda", requires_grad=True)
    labels = torch.zeros(4, 512, 512, dtype=torch.long, device="cuda")
    if fixed:
        return F.cross_entropy(logits, labels).backward()
    target = F.one_hot(labels, 150)
    return (logits.softmax(1) * target.permute(0, 3, 1, 2)[:, :21]).sum().backward()


# Logits.

class Language(nn.Module):
    def __init__(self, words=64000, width=256):
        super().__init__()
        self.embedding, self.body = nn.Embedding(words, width), nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids):
        return self.body(self.embedding(ids))


def chunked(head, hidden, labels):
    one = lambda x, y: F.cross_entropy(head(x).float(), y, reduction="sum")
    return sum(checkpoint(one, x, y, use_reentrant=False) for x, y in zip(hidden.chunk(8), labels.chunk(8))) / len(labels)


@expected("logits", fix="chunk|liger", thread="linkedin/Liger-Kernel#241")
def logits_in_float32(fixed=False):
    model = Language().cuda().bfloat16()
    ids = torch.zeros(1, 2560, dtype=torch.long, device="cuda")
    hidden = model(ids).flatten(0, 1)
    loss = chunked(model.head, hidden, ids.flatten()) if fixed else F.cross_entropy(model.head(hidden).float(), ids.flatten())
    loss.backward()


@expected("logits", fix="chunk|liger", thread="NVIDIA-NeMo/Automodel#3907", held_back=True)
def shifted_logits(fixed=False):
    model = Language().cuda()
    ids = torch.zeros(2, 1024, dtype=torch.long, device="cuda")
    hidden = model(ids)
    if fixed:
        loss = chunked(model.head, hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    else:
        loss = F.cross_entropy(model.head(hidden)[:, :-1].contiguous().flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()


# Models.

@expected("several_models", fix=r"\bdel\b", memory=1400)
def folds_keep_models(fixed=False):
    models = []
    for _ in range(6):
        model = wide_net(2048, 6).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(16, 2048, device="cuda")).square().mean().backward()
            optimizer.step()
        if not fixed:
            models.append((model, optimizer))
        del model, optimizer


@expected("several_models", fix=r"\bdel\b|bfloat16|half|host|\.cpu\(\)", memory=900, held_back=True)
def policy_and_reference(fixed=False):
    policy = wide_net(3072, 8).cuda()
    reference = wide_net(3072, 8)
    reference = reference.bfloat16().cpu() if fixed else reference.cuda()
    x = torch.randn(64, 3072, device="cuda")
    if not fixed:
        with torch.no_grad():
            reference(x)
    policy(x).square().mean().backward()


# Gradients and optimizers.

@expected("dense_embedding_gradients", fix="sparse=True", thread="pytorch/pytorch#41128", memory=800)
def large_embedding(fixed=False):
    table = nn.Embedding(400000, 256, sparse=fixed).cuda()
    optimizer = torch.optim.SGD(table.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        table(torch.zeros(4096, dtype=torch.long, device="cuda")).square().mean().backward()
        optimizer.step()


@expected("dense_embedding_gradients", fix="sparse=True", memory=800, held_back=True)
def recommender_tables(fixed=False):
    tables = nn.ModuleList(nn.EmbeddingBag(100000, 128, mode="sum", sparse=fixed) for _ in range(4)).cuda()
    optimizer = torch.optim.SparseAdam(tables.parameters()) if fixed else torch.optim.Adam(tables.parameters())
    ids, starts = torch.zeros(2048, dtype=torch.long, device="cuda"), torch.arange(0, 2048, 4, device="cuda")
    for _ in range(2):
        optimizer.zero_grad()
        sum(table(ids, starts).square().mean() for table in tables).backward()
        optimizer.step()


@expected("optimizer_temporaries", fix="foreach=False|fused=True", thread="pytorch/pytorch#97712", memory=1000)
def foreach_temporaries(fixed=False):
    model = wide_net(3072, 5).cuda()
    optimizer = torch.optim.Adam(model.parameters(), foreach=not fixed)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(16, 3072, device="cuda")).square().mean().backward()
        optimizer.step()


@expected("dense_gradient_of_sparse", fix="requires_grad|detach", thread="pytorch/pytorch#41128")
def sparse_operand(fixed=False):
    n = 20000
    indices = torch.stack([torch.arange(n), torch.arange(n)])
    adjacency = torch.sparse_coo_tensor(indices, torch.ones(n), (n, n)).cuda().requires_grad_(not fixed)
    x = torch.randn(n, 16, device="cuda", requires_grad=True)
    torch.sparse.mm(adjacency, x).square().mean().backward()


@expected("float64", fix=r"float\(\)|float32", memory=860, held_back=True)
def double_precision(fixed=False):
    model = elementwise_net(4)
    model = model if fixed else model.double()
    for _ in range(2):
        model(batch(32) if fixed else batch(32).double()).square().mean().backward()


# CUDA graphs.

@expected("private_pools", fix="pool=", thread="NVIDIA-NeMo/Automodel#2943", memory=600)
def graphs_without_shared_pool(fixed=False):
    model = elementwise_net(2)
    pool = torch.cuda.graph_pool_handle() if fixed else None
    graphs = []
    with torch.no_grad():
        for mib in (24, 22, 20, 18, 16, 14, 12, 10):
            static = batch(mib)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                for _ in range(2):
                    model(static)
            graphs.append((graph, static))


# Caught OOMs.

@expected("caught_traceback", fix="outside|after the except|del ", thread="pytorch/pytorch#27600", memory=960)
def retry_inside_except(fixed=False):
    def work(mib):
        held = mib_tensor(mib)
        more = [mib_tensor(60) for _ in range(8)]
        return len(more), held

    failed = None
    try:
        work(400)
    except torch.OutOfMemoryError as error:
        failed = None if fixed else error
        if not fixed:
            work(300)
    if failed is None:
        work(300)


@expected("caught_traceback", fix="outside|after the except|del ", thread="pytorch/pytorch#36874", held_back=True)
def smaller_batch_in_handler(fixed=False):
    model = elementwise_net(4)

    def step(mib):
        model(batch(mib)).square().mean().backward()

    retry = False
    try:
        step(72)
    except torch.OutOfMemoryError:
        retry = True
        if not fixed:
            step(36)
    if retry and fixed:
        step(36)


@expected("batch_without_gradients", fix="split|slicing|chunk|batch", held_back=True)
def decode_all_at_once(fixed=False):
    decoder = nn.Sequential(*[nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(64, 64, 3, padding=1), nn.SiLU())
                              for _ in range(3)]).cuda()
    latents = torch.randn(16, 64, 64, 64, device="cuda")
    with torch.no_grad():
        images = [decoder(part).cpu() for part in latents.split(1)] if fixed else decoder(latents)
    return len(images)
