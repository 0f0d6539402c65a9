"""Programs after public threads about language models."""

import math
import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Dict, List, Optional

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from expected import expected


# ----------------------------------------------------------------------------------------------
# cpo_mt
# ----------------------------------------------------------------------------------------------
class MatMul8bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, qweight, row_scale):
        weight = qweight.to(x.dtype) * row_scale.to(x.dtype)
        out = x @ weight.t()
        ctx.tensors = (x, qweight, row_scale)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        x, qweight, row_scale = ctx.tensors
        weight = qweight.to(grad_out.dtype) * row_scale.to(grad_out.dtype)
        return grad_out @ weight, None, None


class Linear8bitLora(nn.Module):
    def __init__(self, in_features, out_features, r=8, alpha=16):
        super().__init__()
        q = torch.zeros(out_features, in_features, dtype=torch.int8)
        self.register_buffer("qweight", q)
        self.register_buffer("row_scale", torch.ones(out_features, 1, dtype=torch.float16))
        self.lora_A = nn.Linear(in_features, r, bias=False)
        self.lora_B = nn.Linear(r, out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        self.scaling = alpha / r

    def forward(self, x):
        base = MatMul8bit.apply(x, self.qweight, self.row_scale)
        update = self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype))) * self.scaling
        return base + update.to(base.dtype)


class TranslatorBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(dim)
        self.ln_2 = nn.LayerNorm(dim)
        self.qkv_proj = Linear8bitLora(dim, 3 * dim)
        self.o_proj = Linear8bitLora(dim, dim)
        self.up_proj = Linear8bitLora(dim, 4 * dim)
        self.down_proj = Linear8bitLora(4 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        h = self.ln_1(x.float()).to(x.dtype)
        q, k, v = self.qkv_proj(h).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(h.transpose(1, 2).reshape(b, t, d))
        h = self.ln_2(x.float()).to(x.dtype)
        return x + self.down_proj(F.gelu(self.up_proj(h)))


class TranslatorLM(nn.Module):
    def __init__(self, vocab=8000, dim=512, depth=6, heads=8):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim).half().requires_grad_(False)
        self.h = nn.ModuleList(TranslatorBlock(dim, heads) for _ in range(depth))
        self.ln_f = nn.LayerNorm(dim)

    def forward(self, input_ids):
        x = self.wte(input_ids)
        for block in self.h:
            x = block(x)
        return self.ln_f(x.float()).half() @ self.wte.weight.t()


class CPOTrainer:
    def __init__(self, model, pairs, beta=0.1, cpo_alpha=1.0, lr=1e-4, logging_steps=20, detach_stats=False):
        self.model = model
        self.pairs = pairs
        self.beta, self.cpo_alpha = beta, cpo_alpha
        self.logging_steps = logging_steps
        self.detach_stats = detach_stats
        params = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(params, lr=lr)
        self._stored_metrics = defaultdict(lambda: defaultdict(list))

    def concatenated_forward(self, batch):
        ids = torch.cat([batch["chosen"], batch["rejected"]]).cuda(non_blocking=True)
        n = batch["chosen"].shape[0]
        logits = self.model(ids)[:, :-1].float()
        labels = ids[:, 1:]
        token_nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        logps = -token_nll.sum(-1)
        return logps[:n], logps[n:], token_nll[:n].mean()

    def get_batch_loss_metrics(self, batch, train_eval="train"):
        metrics = {}
        chosen_logps, rejected_logps, policy_nll_loss = self.concatenated_forward(batch)
        losses = -F.logsigmoid(self.beta * (chosen_logps - rejected_logps))
        loss = losses.mean() + self.cpo_alpha * policy_nll_loss
        chosen = (self.beta * chosen_logps).detach()
        rejected = (self.beta * rejected_logps).detach()
        metrics["rewards/chosen"] = chosen.mean().cpu()
        metrics["rewards/rejected"] = rejected.mean().cpu()
        metrics["rewards/margins"] = (chosen - rejected).mean().cpu()
        nll = policy_nll_loss.detach() if self.detach_stats else policy_nll_loss
        metrics["nll_loss"] = nll.cpu().mean()
        return loss, metrics

    def store_metrics(self, metrics, train_eval="train"):
        for key, value in metrics.items():
            self._stored_metrics[train_eval][key].append(value)

    def log(self, step):
        logs = {k: torch.stack([x.detach() for x in v]).mean() for k, v in self._stored_metrics["train"].items()}
        self._stored_metrics["train"].clear()
        print(step, {k: float(v) for k, v in logs.items()})

    def train(self):
        self.model.train()
        for step, batch in enumerate(self.pairs, 1):
            loss, metrics = self.get_batch_loss_metrics(batch)
            self.store_metrics(metrics)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            if step % self.logging_steps == 0:
                self.log(step)


class PreferencePairs(Dataset):
    def __init__(self, n, length, vocab):
        rng = np.random.default_rng(0)
        self.rows = rng.integers(0, vocab, size=(n, 2, length))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        chosen, rejected = torch.from_numpy(self.rows[i])
        return {"chosen": chosen, "rejected": rejected}


@expected("graph_of_earlier_steps", fix=r"detach|item\(\)", thread="huggingface/trl#1526", memory=700)
def cpo_mt(fixed=False):
    """The trainer stores each step's `nll_loss` among its metrics (`metrics["nll_loss"] = nll.cpu().mean()` in `get_batch_loss_metrics`,
    kept in `_stored_metrics` until the next log) without `detach`, so every stored value keeps its step's autograd graph (and with it the
    inputs of the 8-bit layers) alive; memory grows each step until it runs out. Cured by: `policy_nll_loss.detach().cpu().mean()`.
    """
    torch.manual_seed(0)
    model = TranslatorLM().cuda()
    loader = DataLoader(PreferencePairs(44, 256, 8000), batch_size=2, shuffle=True)
    trainer = CPOTrainer(model, loader, detach_stats=fixed)
    trainer.train()


# ----------------------------------------------------------------------------------------------
# ner_tagger
# ----------------------------------------------------------------------------------------------
class Token:
    def __init__(self, text, tag):
        self.text = text
        self.tag = tag
        self._embeddings = {}

    def set_embedding(self, name, vector):
        self._embeddings[name] = vector

    def get_embedding(self):
        return torch.cat([self._embeddings[k] for k in sorted(self._embeddings)])

    def clear_embeddings(self):
        self._embeddings = {}


class CharLanguageModel(nn.Module):
    def __init__(self, n_chars=128, embedding_size=100, hidden_size=1024):
        super().__init__()
        self.hidden_size = hidden_size
        self.encoder = nn.Embedding(n_chars, embedding_size)
        self.rnn = nn.LSTM(embedding_size, hidden_size)

    @torch.no_grad()
    def get_representation(self, strings):
        longest = max(len(s) for s in strings)
        rows = [[min(ord(c), 127) for c in s.ljust(longest)] for s in strings]
        ids = torch.tensor(rows).t().to(self.encoder.weight.device)
        output, _ = self.rnn(self.encoder(ids))
        return output


class ContextualStringEmbeddings:
    def __init__(self, name, is_forward):
        self.name = name
        self.is_forward = is_forward
        self.lm = CharLanguageModel().cuda().eval()

    def embed(self, sentences):
        texts = [" ".join(t.text for t in s) for s in sentences]
        states = self.lm.get_representation([" " + x if self.is_forward else " " + x[::-1] for x in texts])
        for row, sentence in enumerate(sentences):
            offset = 0
            for token in sentence:
                start, offset = offset, offset + len(token.text) + 1
                at = offset if self.is_forward else len(texts[row]) - start
                token.set_embedding(self.name, states[min(at, states.shape[0] - 1), row].clone())


class PooledStringEmbeddings:
    def __init__(self, contextual, pooling="min", pool_on_host=False):
        self.context_embeddings = contextual
        self.name = contextual.name + "-context"
        self.pool_on_host = pool_on_host
        self.word_embeddings: Dict[str, torch.Tensor] = {}
        self.word_count: Dict[str, int] = {}
        self.aggregate_op = {"min": torch.min, "max": torch.max}[pooling]

    def embed(self, sentences):
        self.context_embeddings.embed(sentences)
        for sentence in sentences:
            for token in sentence:
                local = token._embeddings[self.context_embeddings.name]
                device = local.device
                if self.pool_on_host:
                    local = local.cpu()
                if token.text not in self.word_embeddings:
                    self.word_embeddings[token.text] = local
                    self.word_count[token.text] = 1
                else:
                    known = self.word_embeddings[token.text]
                    self.word_embeddings[token.text] = self.aggregate_op(known, local)
                    self.word_count[token.text] += 1
        for sentence in sentences:
            for token in sentence:
                token.set_embedding(self.name, self.word_embeddings[token.text].to(device))


class SequenceTagger(nn.Module):
    def __init__(self, embeddings, n_tags, embedding_length):
        super().__init__()
        self.embeddings = embeddings
        self.embedding2nn = nn.Linear(embedding_length, 256)
        self.linear = nn.Linear(256, n_tags)

    def forward_loss(self, sentences):
        for embedding in self.embeddings:
            embedding.embed(sentences)
        rows = [torch.stack([t.get_embedding() for t in s]) for s in sentences]
        features = torch.relu(self.embedding2nn(torch.cat(rows)))
        tags = torch.tensor([t.tag for s in sentences for t in s]).cuda()
        return F.cross_entropy(self.linear(features), tags)


class ModelTrainer:
    def __init__(self, model, corpus):
        self.model, self.corpus = model, corpus

    def train(self, mini_batch_size=16, max_epochs=1, learning_rate=0.1):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=learning_rate)
        for epoch in range(max_epochs):
            for start in range(0, len(self.corpus), mini_batch_size):
                batch = self.corpus[start:start + mini_batch_size]
                loss = self.model.forward_loss(batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                for sentence in batch:
                    for token in sentence:
                        token.clear_embeddings()


def read_column_corpus(n_sentences, n_tokens, seed=0):
    rng = random.Random(seed)
    common = ["the", "of", "said", "in", "and", "to", "a", "on", "for", "was"]
    corpus = []
    for i in range(n_sentences):
        words = [rng.choice(common) if rng.random() < 0.25 else f"w{rng.randrange(10**6)}" for _ in range(n_tokens)]
        corpus.append([Token(w, rng.randrange(9)) for w in words])
    return corpus


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="flairNLP/flair#1270", memory=340)
def ner_tagger(fixed=False):
    """`PooledStringEmbeddings` keeps its memory of one pooled vector for each word ever seen (`self.word_embeddings`) on the GPU; it grows
    with every new word of the corpus, batch after batch, until the GPU is full. Cured by: Keep the pool in CPU memory (`.cpu()` when a
    vector is put there, moved to the GPU only for the batch).
    """
    corpus = read_column_corpus(760, 20)
    stacked = [
        PooledStringEmbeddings(ContextualStringEmbeddings("news-forward", True), pool_on_host=fixed),
        PooledStringEmbeddings(ContextualStringEmbeddings("news-backward", False), pool_on_host=fixed),
    ]
    tagger = SequenceTagger(stacked, n_tags=9, embedding_length=4 * 1024).cuda()
    ModelTrainer(tagger, corpus).train(mini_batch_size=8)


# ----------------------------------------------------------------------------------------------
# chat_generate
# ----------------------------------------------------------------------------------------------
class KVCache(nn.Module):
    def __init__(self, batch_size, max_seq_len, num_heads, head_dim, dtype):
        super().__init__()
        shape = (batch_size, num_heads, max_seq_len, head_dim)
        self.register_buffer("k_cache", torch.zeros(shape, dtype=dtype), persistent=False)
        self.register_buffer("v_cache", torch.zeros(shape, dtype=dtype), persistent=False)

    def update(self, input_pos, k_val, v_val):
        self.k_cache.index_copy_(2, input_pos, k_val)
        self.v_cache.index_copy_(2, input_pos, v_val)
        return self.k_cache, self.v_cache


class CausalSelfAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, num_kv_heads):
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = embed_dim // num_heads
        self.q_proj = nn.Linear(embed_dim, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(embed_dim, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(embed_dim, num_kv_heads * self.head_dim, bias=False)
        self.output_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.kv_cache = None

    def setup_cache(self, batch_size, dtype, max_seq_len):
        self.kv_cache = KVCache(batch_size, max_seq_len, self.num_heads, self.head_dim, dtype)

    def forward(self, x, mask, input_pos):
        b, s, _ = x.shape
        groups = self.num_heads // self.num_kv_heads
        q = self.q_proj(x).view(b, s, self.num_heads, -1).transpose(1, 2)
        k = self.k_proj(x).view(b, s, self.num_kv_heads, -1).transpose(1, 2).repeat_interleave(groups, dim=1)
        v = self.v_proj(x).view(b, s, self.num_kv_heads, -1).transpose(1, 2).repeat_interleave(groups, dim=1)
        k, v = self.kv_cache.update(input_pos, k, v)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.output_proj(out.transpose(1, 2).reshape(b, s, -1))


class TransformerDecoderLayer(nn.Module):
    def __init__(self, embed_dim, num_heads, num_kv_heads):
        super().__init__()
        self.sa_norm = nn.RMSNorm(embed_dim)
        self.attn = CausalSelfAttention(embed_dim, num_heads, num_kv_heads)
        self.mlp_norm = nn.RMSNorm(embed_dim)
        self.mlp = nn.Sequential(nn.Linear(embed_dim, 4 * embed_dim), nn.SiLU(), nn.Linear(4 * embed_dim, embed_dim))

    def forward(self, x, mask, input_pos):
        x = x + self.attn(self.sa_norm(x), mask, input_pos)
        return x + self.mlp(self.mlp_norm(x))


class TransformerDecoder(nn.Module):
    def __init__(self, vocab_size=32000, num_layers=6, num_heads=8, num_kv_heads=2, embed_dim=512,
                 max_seq_len=131072):
        super().__init__()
        self.max_seq_len = max_seq_len
        self.tok_embeddings = nn.Embedding(vocab_size, embed_dim)
        self.layers = nn.ModuleList(
            TransformerDecoderLayer(embed_dim, num_heads, num_kv_heads) for _ in range(num_layers))
        self.norm = nn.RMSNorm(embed_dim)
        self.output = nn.Linear(embed_dim, vocab_size, bias=False)
        self.cache_len = None

    def setup_caches(self, batch_size, dtype, decoder_max_seq_len: Optional[int] = None):
        self.cache_len = decoder_max_seq_len or self.max_seq_len
        for layer in self.layers:
            layer.attn.setup_cache(batch_size, dtype, self.cache_len)

    def forward(self, tokens, input_pos):
        positions = torch.arange(self.cache_len, device=tokens.device)
        mask = positions[None, :] <= input_pos[:, None]
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, mask, input_pos)
        return self.output(self.norm(x[:, -1:]))


class InferenceRecipe:
    def __init__(self, device="cuda", dtype=torch.bfloat16, max_new_tokens=24, temperature=0.6, top_k=50):
        self._device, self._dtype = torch.device(device), dtype
        self.max_new_tokens, self.temperature, self.top_k = max_new_tokens, temperature, top_k

    def setup(self):
        with torch.device(self._device):
            self._model = TransformerDecoder().to(self._dtype).eval()

    def sample(self, logits):
        v, _ = torch.topk(logits[:, -1] / self.temperature, self.top_k)
        return torch.argmax(v, dim=-1, keepdim=True)

    @torch.inference_mode()
    def generate(self, prompt_tokens, cache_for_request=False):
        prompt = torch.tensor(prompt_tokens, device=self._device)[None]
        length = prompt.shape[1]
        limit = length + self.max_new_tokens if cache_for_request else None
        with self._device:
            self._model.setup_caches(batch_size=1, dtype=self._dtype, decoder_max_seq_len=limit)
        generated = [prompt]
        token = self.sample(self._model(prompt, torch.arange(length, device=self._device)))
        for i in range(self.max_new_tokens - 1):
            generated.append(token)
            token = self.sample(self._model(token, torch.tensor([length + i], device=self._device)))
        return torch.cat(generated, dim=1)


@expected("same_buffer_in_layers", fix="max_new_tokens", thread="meta-pytorch/torchtune#1603", memory=900)
def chat_generate(fixed=False):
    """`setup_caches` makes the KV caches of all layers for the model's whole `max_seq_len` (131072), though the request needs only the
    prompt plus `max_new_tokens` (32 or so positions). Cured by: Make the caches `prompt_len + max_new_tokens` long.
    """
    recipe = InferenceRecipe()
    recipe.setup()
    question = [1] + [hash(w) % 30000 for w in "what is the capital of france ?".split()]
    output = recipe.generate(question, cache_for_request=fixed)
    print(output.shape)


# ----------------------------------------------------------------------------------------------
# graph_text_features
# ----------------------------------------------------------------------------------------------
class DistilEmbeddings(nn.Module):
    def __init__(self, vocab_size, dim, max_position=128):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, dim)
        self.position_embeddings = nn.Embedding(max_position, dim)
        self.LayerNorm = nn.LayerNorm(dim)

    def forward(self, input_ids):
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        return self.LayerNorm(self.word_embeddings(input_ids) + self.position_embeddings(positions))


class DistilLayer(nn.Module):
    def __init__(self, dim, n_heads, hidden_dim):
        super().__init__()
        self.n_heads = n_heads
        self.q_lin, self.k_lin, self.v_lin, self.out_lin = (nn.Linear(dim, dim) for _ in range(4))
        self.sa_layer_norm = nn.LayerNorm(dim)
        self.lin1, self.lin2 = nn.Linear(dim, hidden_dim), nn.Linear(hidden_dim, dim)
        self.output_layer_norm = nn.LayerNorm(dim)

    def attention(self, x, mask):
        b, t, d = x.shape
        q, k, v = (lin(x).view(b, t, self.n_heads, -1).transpose(1, 2) for lin in (self.q_lin, self.k_lin, self.v_lin))
        scores = q @ k.transpose(-1, -2) / math.sqrt(d // self.n_heads)
        scores = scores.masked_fill(mask[:, None, None, :] == 0, -1e9)
        return self.out_lin((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))

    def forward(self, x, mask):
        x = self.sa_layer_norm(self.attention(x, mask) + x)
        return self.output_layer_norm(self.lin2(F.gelu(self.lin1(x))) + x)


class DistilModel(nn.Module):
    def __init__(self, vocab_size=8000, dim=256, n_layers=5, n_heads=8):
        super().__init__()
        self.embeddings = DistilEmbeddings(vocab_size, dim)
        self.layer = nn.ModuleList(DistilLayer(dim, n_heads, 4 * dim) for _ in range(n_layers))

    def forward(self, input_ids, attention_mask, up_to=None):
        hidden = self.embeddings(input_ids)
        for layer in self.layer[:up_to]:
            hidden = layer(hidden, attention_mask)
        return hidden


class NodeTexts:
    def __init__(self, num_nodes, length, vocab_size):
        rng = np.random.default_rng(1)
        self.input_ids = torch.from_numpy(rng.integers(0, vocab_size, size=(num_nodes, length)))
        lengths = torch.from_numpy(rng.integers(length // 2, length + 1, size=num_nodes))
        self.attention_mask = (torch.arange(length)[None] < lengths[:, None]).long()

    def batches(self, size):
        return zip(self.input_ids.split(size), self.attention_mask.split(size))


def compute_hidden_states(model, texts, num_layers, batch_size, device):
    model.eval()
    hidden_states = []
    for input_ids, mask in texts.batches(batch_size):
        hidden = model(input_ids.to(device), mask.to(device), up_to=num_layers)
        hidden_states.append(hidden[:, 0])
    return torch.cat(hidden_states)


class NodeClassifier(nn.Module):
    def __init__(self, dim, classes):
        super().__init__()
        self.conv = nn.Linear(2 * dim, 64)
        self.head = nn.Linear(64, classes)

    def forward(self, x, neighbours):
        return self.head(torch.relu(self.conv(torch.cat([x, x[neighbours].mean(1)], dim=-1))))


@expected("evaluation_keeps_graphs", fix="no_grad", thread="huggingface/transformers#24406", memory=700)
def graph_text_features(fixed=False):
    """The node texts are encoded for features only (no training of the encoder), but without `torch.no_grad()`: each batch's output kept in
    `hidden_states` holds the graph with all intermediate activations of its batch; `model.eval()` does not prevent it. Cured by:
    `torch.no_grad()` around (on) the function that computes the hidden states.
    """
    device = torch.device("cuda")
    bert = DistilModel().to(device)
    texts = NodeTexts(num_nodes=1200, length=64, vocab_size=8000)
    if fixed:
        with torch.no_grad():
            features = compute_hidden_states(bert, texts, 4, 32, device)
    else:
        features = compute_hidden_states(bert, texts, 4, 32, device)
    neighbours = torch.randint(0, 1200, (1200, 6)).to(device)
    labels = torch.randint(0, 7, (1200,)).to(device)
    net = NodeClassifier(256, 7).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for epoch in range(5):
        optimizer.zero_grad()
        F.cross_entropy(net(features.detach(), neighbours), labels).backward()
        optimizer.step()


# ----------------------------------------------------------------------------------------------
# session_rec
# ----------------------------------------------------------------------------------------------
@dataclass
class T4RecArguments:
    per_device_train_batch_size: int = 32
    per_device_eval_batch_size: int = 64
    learning_rate: float = 1e-3
    predict_top_k: Optional[int] = None
    eval_accumulation_steps: Optional[int] = None


class NextItemModel(nn.Module):
    def __init__(self, num_items, dim=64, depth=2):
        super().__init__()
        self.item_embedding = nn.Embedding(num_items, dim, padding_idx=0)
        layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def forward(self, sessions):
        x = self.body(self.item_embedding(sessions[:, :-1]))
        logits = x[:, -1] @ self.item_embedding.weight.t()
        targets = sessions[:, -1]
        return {"loss": F.cross_entropy(logits, targets), "predictions": logits, "labels": targets}


class SessionDataset(Dataset):
    def __init__(self, n, length, num_items, seed):
        self.x = torch.from_numpy(np.random.default_rng(seed).integers(1, num_items, size=(n, length)))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i]


def nested_concat(tensors, new_tensors):
    if isinstance(tensors, (list, tuple)):
        return type(tensors)(nested_concat(t, n) for t, n in zip(tensors, new_tensors))
    return torch.cat((tensors, new_tensors), dim=0)


class RankingMetric:
    def __init__(self, k=20):
        self.k, self.hits = k, []

    def update(self, preds, labels):
        top = preds.topk(self.k, dim=-1).indices
        self.hits.append((top == labels[:, None]).any(-1).float().mean().detach())

    def compute(self):
        return float(torch.stack(self.hits).mean())


class T4RecTrainer:
    def __init__(self, model, args, train_dataset, eval_dataset):
        self.model, self.args = model.cuda(), args
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset

    def train(self):
        self.model.train()
        optimizer = torch.optim.Adam(self.model.parameters(), lr=self.args.learning_rate)
        for sessions in DataLoader(self.train_dataset, self.args.per_device_train_batch_size, shuffle=True):
            optimizer.zero_grad()
            self.model(sessions.cuda())["loss"].backward()
            optimizer.step()

    def prediction_step(self, sessions):
        with torch.no_grad():
            out = self.model(sessions.cuda())
        return out["loss"], out["predictions"], out["labels"]

    def evaluation_loop(self, dataloader, metric):
        preds_host = labels_host = None
        preds_item_ids = []
        for step, sessions in enumerate(dataloader):
            loss, preds, labels = self.prediction_step(sessions)
            metric.update(preds, labels)
            if self.args.predict_top_k:
                preds = preds.topk(self.args.predict_top_k, dim=-1)
                preds = (preds.values, preds.indices)
            preds_host = preds if preds_host is None else nested_concat(preds_host, preds)
            labels_host = labels if labels_host is None else nested_concat(labels_host, labels)
        return preds_host, labels_host, metric.compute()

    def evaluate(self):
        self.model.eval()
        loader = DataLoader(self.eval_dataset, self.args.per_device_eval_batch_size)
        predictions, labels, recall = self.evaluation_loop(loader, RankingMetric())
        return {"eval_recall": recall, "n": len(labels)}


@expected("growing_buffer", fix=r"\.cpu\(\)|topk", thread="NVIDIA-Merlin/Transformers4Rec#693", memory=400)
def session_rec(fixed=False):
    """`evaluation_loop` collects the predictions of every evaluation batch (batch x 60000 items) on the GPU in `preds_host` with
    `torch.cat`; with a large item catalogue they fill the memory during evaluation. Cured by: `predict_top_k`: keep only the top-k of each
    row (the merged PR); also `eval_accumulation_steps`, which moves them to the CPU every few steps.
    """
    num_items = 60000
    args = T4RecArguments(predict_top_k=100 if fixed else None)
    trainer = T4RecTrainer(NextItemModel(num_items), args, SessionDataset(320, 20, num_items, 0),
                           SessionDataset(2560, 20, num_items, 1))
    trainer.train()
    print(trainer.evaluate())


# ----------------------------------------------------------------------------------------------
# adapter_finetune
# ----------------------------------------------------------------------------------------------
class LoraLinear(nn.Module):
    def __init__(self, base, r, alpha):
        super().__init__()
        self.base_layer = base
        weight = base.weight
        self.lora_A = nn.Parameter(torch.randn(r, base.in_features, device=weight.device) * 0.01)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r, device=weight.device))
        self.scaling = alpha / r

    def forward(self, x):
        update = F.linear(F.linear(x.to(self.lora_A.dtype), self.lora_A), self.lora_B) * self.scaling
        return self.base_layer(x) + update.to(x.dtype)


class DecoderAttention(nn.Module):
    def __init__(self, dim, heads, **kw):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim, bias=False, **kw) for _ in range(4))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (p(x).view(b, t, self.heads, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))


class DecoderLayer(nn.Module):
    def __init__(self, dim, heads, **kw):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(dim, **kw)
        self.self_attn = DecoderAttention(dim, heads, **kw)
        self.post_attention_layernorm = nn.RMSNorm(dim, **kw)
        self.up_proj = nn.Linear(dim, 4 * dim, bias=False, **kw)
        self.down_proj = nn.Linear(4 * dim, dim, bias=False, **kw)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x).to(x.dtype))
        return x + self.down_proj(F.silu(self.up_proj(self.post_attention_layernorm(x).to(x.dtype))))


class CausalLM(nn.Module):
    def __init__(self, vocab=32000, dim=1024, depth=10, heads=16, **kw):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim, **kw)
        self.layers = nn.ModuleList(DecoderLayer(dim, heads, **kw) for _ in range(depth))
        self.norm = nn.RMSNorm(dim, **kw)
        self.lm_head = nn.Linear(dim, vocab, bias=False, **kw)

    @classmethod
    def from_pretrained(cls, name, torch_dtype=torch.float32, device_map="cuda"):
        return cls(dtype=torch_dtype, device=device_map)

    def forward(self, input_ids, labels):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def prepare_model_for_kbit_training(model):
    for name, param in model.named_parameters():
        param.requires_grad = False
    for param in model.parameters():
        if param.dtype in (torch.float16, torch.bfloat16):
            param.data = param.data.to(torch.float32)
    return model


def get_peft_model(model, target_modules, r=16, alpha=32):
    for param in model.parameters():
        param.requires_grad = False
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in target_modules:
                setattr(module, name, LoraLinear(child, r, alpha))
    return model


class InstructionData(Dataset):
    def __init__(self, n, length):
        self.rows = torch.from_numpy(np.random.default_rng(3).integers(0, 32000, size=(n, length)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


@expected("widened_weights", fix="type", thread="huggingface/peft#1149", memory=700)
def adapter_finetune(fixed=False):
    """The model is loaded in 16 bit and would fit, but `prepare_model_for_kbit_training` casts all of its frozen 16-bit parameters to
    float32, which doubles their memory (`param.data = param.data.to(torch.float32)`). Cured by: Do not call it for a model that is not
    quantized: train the adapters on the 16-bit model.
    """
    model = CausalLM.from_pretrained("my-16bit-llm", torch_dtype=torch.bfloat16, device_map="cuda")
    if not fixed:
        model = prepare_model_for_kbit_training(model)
    model = get_peft_model(model, ("q_proj", "v_proj"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    for ids in DataLoader(InstructionData(8, 128), batch_size=1, shuffle=True):
        ids = ids.cuda()
        loss = model(ids, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# ----------------------------------------------------------------------------------------------
# knowledge_edit_lora
# ----------------------------------------------------------------------------------------------
IGNORE_TOKEN_ID = -100


class ConversationSet(Dataset):
    def __init__(self, conversations, model_max_length=None):
        self.items = []
        for prompt, answer in conversations:
            ids = (prompt + answer)[:model_max_length]
            labels = ([IGNORE_TOKEN_ID] * len(prompt) + answer)[:model_max_length]
            self.items.append((ids, labels))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class DataCollator:
    def __init__(self, pad_token_id=0):
        self.pad_token_id = pad_token_id

    def __call__(self, features):
        longest = max(len(ids) for ids, _ in features)
        ids = [x + [self.pad_token_id] * (longest - len(x)) for x, _ in features]
        labels = [y + [IGNORE_TOKEN_ID] * (longest - len(y)) for _, y in features]
        return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}


class AdaptedProjection(nn.Module):
    def __init__(self, dim_in, dim_out, rank=8):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim_out, dim_in) * 0.02, requires_grad=False)
        self.down = nn.Linear(dim_in, rank, bias=False)
        self.up = nn.Linear(rank, dim_out, bias=False)

    def forward(self, x):
        return F.linear(x, self.weight) + self.up(self.down(x))


class ChatBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = AdaptedProjection(dim, 3 * dim)
        self.proj = AdaptedProjection(dim, dim)
        self.fc1, self.fc2 = AdaptedProjection(dim, 4 * dim), AdaptedProjection(4 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.fc2(F.relu(self.fc1(self.norm2(x))))


class ChatModel(nn.Module):
    def __init__(self, vocab=6000, dim=256, depth=4, heads=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim).requires_grad_(False)
        self.blocks = nn.ModuleList(ChatBlock(dim, heads) for _ in range(depth))
        self.lm_head = nn.Linear(dim, vocab, bias=False).requires_grad_(False)

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(x)
        return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1),
                               ignore_index=IGNORE_TOKEN_ID)


def load_edit_records(n=64, seed=5):
    rng = random.Random(seed)
    records = []
    for i in range(n):
        prompt_len = 2600 if i % 23 == 17 else rng.randint(60, 260)
        prompt = [rng.randrange(1, 6000) for _ in range(prompt_len)]
        records.append((prompt, [rng.randrange(1, 6000) for _ in range(rng.randint(10, 60))]))
    return records


def train_loop(model, loader, lr):
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=lr)
    model.train()
    for step, batch in enumerate(loader):
        batch = {k: v.cuda() for k, v in batch.items()}
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@expected("larger_step", fix="sequences|as large as", thread="YJiangcm/LTE#3", memory=700)
def knowledge_edit_lora(fixed=False):
    """A few records of the data set are much longer than the others (2600 tokens against some 200) and nothing cuts them off; the batch
    that has one is padded to its length and needs far more memory (activations, logits) than the other batches. LoRA does not help against
    that. Cured by: Set a cut-off length (512 tokens here) for the records.
    """
    data = ConversationSet(load_edit_records(), model_max_length=512 if fixed else None)
    loader = DataLoader(data, batch_size=4, shuffle=False, collate_fn=DataCollator())
    train_loop(ChatModel().cuda(), loader, lr=1e-4)


# ----------------------------------------------------------------------------------------------
# long_context_dpo
# ----------------------------------------------------------------------------------------------
class PolicyBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.w1, self.w2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.wqkv(self.norm_1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.wo(y)
        return x + self.w2(F.silu(self.w1(self.norm_2(x))))


class PolicyModel(nn.Module):
    def __init__(self, vocab=32000, dim=128, depth=2, heads=4):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(PolicyBlock(dim, heads) for _ in range(depth))
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def selective_log_softmax(logits, index):
    rows = []
    for row_logits, row_index in zip(logits, index):
        row = row_logits.log_softmax(-1)
        rows.append(row.gather(-1, row_index.unsqueeze(-1)).squeeze(-1))
    return torch.stack(rows)


class SequenceParallelMixin:
    rank, sp_size = 0, 1

    def split(self, ids):
        return ids.chunk(self.sp_size, dim=1)[self.rank]

    def gather_logps(self, logps):
        return logps

    def local_logps(self, logits, labels):
        if self.selective:
            return selective_log_softmax(logits, labels)
        return torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)


class DPOTrainer(SequenceParallelMixin):
    def __init__(self, model, ref_model, beta=0.1, lr=5e-6, selective=False):
        self.model, self.ref_model = model, ref_model.eval().requires_grad_(False)
        self.beta, self.selective = beta, selective
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def get_per_sequence_logps(self, model, ids, mask):
        local, labels = self.split(ids), self.split(ids.roll(-1, dims=1))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(local)
            per_token = self.gather_logps(self.local_logps(logits, labels))
        return (per_token * self.split(mask)).sum(-1)

    def compute_loss(self, batch):
        ids, mask = batch["input_ids"].cuda(), batch["loss_mask"].cuda()
        with torch.no_grad():
            ref_chosen, ref_rejected = self.get_per_sequence_logps(self.ref_model, ids, mask).chunk(2)
        chosen, rejected = self.get_per_sequence_logps(self.model, ids, mask).chunk(2)
        margin = (chosen - ref_chosen) - (rejected - ref_rejected)
        return -F.logsigmoid(self.beta * margin).mean()

    def training_step(self, batch):
        loss = self.compute_loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def preference_batches(steps, pairs, length, vocab):
    rng = np.random.default_rng(7)
    for _ in range(steps):
        ids = torch.from_numpy(rng.integers(0, vocab, size=(2 * pairs, length)))
        mask = torch.ones(2 * pairs, length)
        mask[:, : length // 3] = 0
        yield {"input_ids": ids, "loss_mask": mask}


@expected("logits", fix="chunk|split", thread="modelscope/ms-swift#9882", memory=1100)
def long_context_dpo(fixed=False):
    """The log-probabilities are computed with a `log_softmax` over the whole vocabulary for all tokens at once, only to gather one value
    for each token: a full float32 (batch, sequence, vocabulary) tensor beside the logits, and once more in backward. Cured by:
    `selective_log_softmax`: row by row, keeping only the wanted log-probabilities, no full-vocabulary tensor of the whole batch.
    """
    trainer = DPOTrainer(PolicyModel().cuda(), PolicyModel().cuda(), selective=fixed)
    for batch in preference_batches(4, 4, 384, 32000):
        trainer.training_step(batch)


# ----------------------------------------------------------------------------------------------
# theorem_search
# ----------------------------------------------------------------------------------------------
class RerankerAttention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.dense = (nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x, bias):
        b, t, d = x.shape
        q, k, v = (m(x).view(b, t, self.heads, -1).transpose(1, 2) for m in (self.query, self.key, self.value))
        scores = q @ k.transpose(-1, -2) / math.sqrt(d // self.heads) + bias
        return self.dense((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))


class RerankerLayer(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.attention = RerankerAttention(hidden, heads)
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.intermediate, self.output = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x, bias):
        x = self.norm_1(x + self.attention(x, bias))
        return self.norm_2(x + self.output(F.gelu(self.intermediate(x))))


class RerankerModel(nn.Module):
    def __init__(self, vocab=16000, hidden=384, depth=8, heads=12, max_length=512):
        super().__init__()
        self.word = nn.Embedding(vocab, hidden)
        self.position = nn.Embedding(max_length, hidden)
        self.layers = nn.ModuleList(RerankerLayer(hidden, heads) for _ in range(depth))
        self.classifier = nn.Linear(hidden, 1)

    def forward(self, input_ids, attention_mask):
        x = self.word(input_ids) + self.position.weight[: input_ids.shape[1]]
        bias = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * -1e4
        for layer in self.layers:
            x = layer(x, bias)
        return self.classifier(x[:, 0]).squeeze(-1)


class RerankerClient:
    def __init__(self, device="cuda", batch_size=None, max_length=512):
        self.device = torch.device(device)
        self.max_length = max_length
        self.batch_size = batch_size or (128 if self.device.type == "cuda" else 16)
        self.model = RerankerModel(max_length=max_length).half().to(self.device).eval()

    def _tokenize(self, pairs):
        rows = [[zlib_hash(w) for w in (q + " " + d).split()][: self.max_length] for q, d in pairs]
        longest = max(map(len, rows))
        ids = torch.tensor([r + [0] * (longest - len(r)) for r in rows])
        mask = torch.tensor([[1] * len(r) + [0] * (longest - len(r)) for r in rows])
        return ids.to(self.device), mask.to(self.device)

    @torch.inference_mode()
    def rerank(self, query, documents):
        scores = []
        for start in range(0, len(documents), self.batch_size):
            chunk = documents[start:start + self.batch_size]
            ids, mask = self._tokenize([(query, d) for d in chunk])
            scores.extend(self.model(ids, mask).float().cpu().tolist())
        return scores


def zlib_hash(word):
    return sum(ord(c) * 31 ** i for i, c in enumerate(word[:6])) % 16000


class SearchEngine:
    def __init__(self, declarations, reranker):
        self.declarations = declarations
        self.reranker = reranker

    def retrieve(self, query, limit):
        words = set(query.split())
        return sorted(self.declarations, key=lambda d: -len(words & set(d.split())))[:limit]

    def search(self, query, rerank_top=50, limit=10):
        candidates = self.retrieve(query, rerank_top)
        scores = self.reranker.rerank(query, candidates)
        order = sorted(range(len(candidates)), key=lambda i: -scores[i])
        return [candidates[i] for i in order[:limit]]


@expected("batch_without_gradients", fix="half|split|part", thread="justincasher/lean-explore#61", memory=700)
def theorem_search(fixed=False):
    """The reranker's default batch size on a GPU (128) is larger than the 50 candidates, so all documents go through the model in a single
    forward pass, too much for a small GPU. Cured by: Default GPU batch size of 16.
    """
    rng = random.Random(2)
    vocabulary = [f"lemma{i}" for i in range(400)]
    declarations = [" ".join(rng.choices(vocabulary, k=rng.randint(300, 600))) for _ in range(200)]
    engine = SearchEngine(declarations, RerankerClient(batch_size=16 if fixed else None))
    for query in ("lemma3 lemma9 continuous function", "lemma7 compact set", "lemma1 lemma2 prime"):
        print(len(engine.search(query)))


# ----------------------------------------------------------------------------------------------
# mistral_sft
# ----------------------------------------------------------------------------------------------
@dataclass
class TrainingArguments:
    output_dir: str = "out"
    per_device_train_batch_size: int = 4
    gradient_accumulation_steps: int = 2
    learning_rate: float = 2e-4
    max_steps: int = 6
    gradient_checkpointing: bool = False
    lora_targets: List[str] = field(default_factory=lambda: ["q_proj", "v_proj"])


class MistralRMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


class AdapterLinear(nn.Linear):
    def __init__(self, base, r=16):
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight = base.weight
        self.A = nn.Parameter(base.weight.new_zeros(r, base.in_features))
        self.B = nn.Parameter(base.weight.new_zeros(base.out_features, r))

    def forward(self, x):
        return super().forward(x) + F.linear(F.linear(x, self.A), self.B)


class MistralDecoderLayer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate_proj, self.up_proj = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)
        self.input_layernorm, self.post_attention_layernorm = MistralRMSNorm(dim), MistralRMSNorm(dim)

    def forward(self, x):
        b, t, d = x.shape
        h = self.input_layernorm(x)
        q, k, v = (p(h).view(b, t, self.heads, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.o_proj(h)
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class MistralForCausalLM(nn.Module):
    def __init__(self, vocab=8000, dim=512, depth=12, heads=8, hidden=1792):
        super().__init__()
        self.gradient_checkpointing = False
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(MistralDecoderLayer(dim, heads, hidden) for _ in range(depth))
        self.norm = MistralRMSNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def gradient_checkpointing_enable(self):
        self.gradient_checkpointing = True

    def forward(self, input_ids, labels):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        logits = self.lm_head(self.norm(x)).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class SFTTrainer:
    def __init__(self, model, args, rows):
        self.args = args
        model.requires_grad_(False)
        for layer in model.layers:
            for name in args.lora_targets:
                setattr(layer, name, AdapterLinear(getattr(layer, name)))
        if args.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        self.model = model
        self.rows = rows
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate)

    def training_step(self, ids):
        loss = self.model(ids, ids) / self.args.gradient_accumulation_steps
        loss.backward()
        return loss.detach()

    def train(self):
        self.model.train()
        loader = DataLoader(self.rows, batch_size=self.args.per_device_train_batch_size, shuffle=True)
        for step, ids in enumerate(loader, 1):
            self.training_step(ids.cuda())
            if step % self.args.gradient_accumulation_steps == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
            if step >= self.args.max_steps:
                break


@expected("many_rows", fix="checkpoint", thread="huggingface/trl#876", memory=700)
def mistral_sft(fixed=False):
    """Gradient checkpointing is off (the library used to switch it on by default, now `gradient_checkpointing=False`), so the activations
    of all layers are kept for backward and don't fit, although only small LoRA adapters are trained. Cured by:
    `gradient_checkpointing=True` in the training arguments.
    """
    with torch.device("cuda"):
        model = MistralForCausalLM().to(torch.bfloat16)
    rows = [torch.from_numpy(r) for r in np.random.default_rng(11).integers(0, 8000, size=(32, 512))]
    args = TrainingArguments(gradient_checkpointing=fixed)
    SFTTrainer(model, args, rows).train()
