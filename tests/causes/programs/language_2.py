"""Programs after public threads in which people who train, run or evaluate language models confirmed why they ran out of memory."""

import contextlib
import gc
import os
import random
import tempfile

import torch
from torch import nn
from torch.nn import functional as F

from expected import expected

# Group relative policy optimisation: completions are sampled in groups, scored by a reference model, and learnt in micro batches.


class DecoderLayer(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv_proj, self.o_proj = nn.Linear(hidden_size, 3 * hidden_size, bias=False), nn.Linear(
            hidden_size, hidden_size, bias=False
        )
        self.up_proj, self.down_proj = nn.Linear(hidden_size, 2 * hidden_size, bias=False), nn.Linear(
            2 * hidden_size, hidden_size, bias=False
        )
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)

    def forward(self, hidden_states):
        batch, length, hidden = hidden_states.shape
        qkv = self.qkv_proj(self.input_layernorm(hidden_states)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden_states = hidden_states + self.o_proj(attention.transpose(1, 2).reshape(batch, length, hidden))
        return hidden_states + self.down_proj(F.silu(self.up_proj(self.post_attention_layernorm(hidden_states))))


class TinyQwenForCausalLM(nn.Module):
    def __init__(self, vocab_size=40000, hidden_size=192, layers=2):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(hidden_size, 4) for _ in range(layers))
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids, logits_to_keep):
        hidden_states = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return self.lm_head(hidden_states[:, -logits_to_keep:])


def selective_log_softmax(logits, index):
    selected_logits = torch.gather(logits, -1, index.unsqueeze(-1)).squeeze(-1)
    logsumexp_values = torch.stack([torch.logsumexp(lg, dim=-1) for lg in logits])
    return selected_logits - logsumexp_values


class GRPOTrainer:
    def __init__(self, model, ref_model, num_generations, selective):
        self.model, self.ref_model, self.selective = model, ref_model.eval(), selective
        self.num_generations, self.beta = num_generations, 0.04
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def _get_per_token_logps(self, model, input_ids, logits_to_keep):
        logits = model(input_ids, logits_to_keep + 1)[:, :-1]
        input_ids = input_ids[:, -logits_to_keep:]
        if self.selective:
            return selective_log_softmax(logits, input_ids)
        return torch.gather(logits.log_softmax(-1), -1, input_ids.unsqueeze(-1)).squeeze(-1)

    def _generate_and_score_completions(self, prompts, completion_length):
        prompt_ids = prompts.repeat_interleave(self.num_generations, 0)
        completion_ids = torch.randint(0, 40000, (len(prompt_ids), completion_length), device=prompts.device)
        prompt_completion_ids = torch.cat([prompt_ids, completion_ids], 1)
        with torch.inference_mode():
            ref_per_token_logps = self._get_per_token_logps(self.ref_model, prompt_completion_ids, completion_length)
        rewards = torch.rand(len(prompts), self.num_generations, device=prompts.device)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        return prompt_completion_ids, ref_per_token_logps.clone(), advantages.flatten()

    def compute_loss(self, input_ids, ref_per_token_logps, advantages):
        per_token_logps = self._get_per_token_logps(self.model, input_ids, ref_per_token_logps.shape[1])
        per_token_kl = torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1
        per_token_loss = torch.exp(per_token_logps - per_token_logps.detach()) * advantages.unsqueeze(1)
        return -(per_token_loss - self.beta * per_token_kl).mean()

    def cold_start(self, examples):
        for input_ids in examples:
            logits = self.model(input_ids.cuda(), input_ids.shape[1])
            F.cross_entropy(logits[0, :-1], input_ids[0, 1:].cuda()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)

    def train(self, steps):
        for _ in range(steps):
            prompts = torch.randint(0, 40000, (2, 64)).cuda()
            inputs = self._generate_and_score_completions(prompts, completion_length=192)
            for micro_batch in zip(*(tensor.split(1) for tensor in inputs)):
                self.compute_loss(*micro_batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)


@expected("logits", fix="chunk|split", thread="huggingface/trl#2773", memory=1000)
def train_grpo(fixed=False):
    """`_get_per_token_logps` takes `log_softmax` over the whole vocabulary for every position of the completions, a second tensor as large
    as the logits (16 x 192 x 40000), only to pick one number per position from it. Cured by: gather the logits of the tokens first and
    subtract a `logsumexp` taken row by row (`selective_log_softmax`).
    """
    trainer = GRPOTrainer(TinyQwenForCausalLM().cuda(), TinyQwenForCausalLM().cuda(), num_generations=8, selective=fixed)
    trainer.cold_start(torch.randint(0, 40000, (4, 1, 128)))
    trainer.train(3)


# A tagger of words: the sequence tutorial's BiLSTM with a CRF, moved to the GPU.


class BiLSTM_CRF(nn.Module):
    def __init__(self, vocab_size, tagset_size, embedding_dim, hidden_dim):
        super().__init__()
        self.tagset_size, self.hidden_dim = tagset_size, hidden_dim
        self.word_embeds = nn.Embedding(vocab_size, embedding_dim)
        self.lstm = nn.LSTM(embedding_dim, hidden_dim // 2, num_layers=1, bidirectional=True)
        self.hidden2tag = nn.Linear(hidden_dim, tagset_size)
        self.transitions = nn.Parameter(torch.randn(tagset_size, tagset_size))

    def _get_lstm_features(self, sentence):
        lstm_out, _ = self.lstm(self.word_embeds(sentence))
        return self.hidden2tag(lstm_out)

    def _forward_alg(self, feats):
        forward_var = feats[0]
        for feat in feats[1:]:
            next_tag_var = forward_var.unsqueeze(1) + self.transitions + feat.unsqueeze(2)
            forward_var = torch.logsumexp(next_tag_var, 2)
        return torch.logsumexp(forward_var, 1)

    def _score_sentence(self, feats, tags):
        emissions = feats.gather(2, tags.unsqueeze(2)).squeeze(2).sum(0)
        return emissions + self.transitions[tags[1:], tags[:-1]].sum(0)

    def neg_log_likelihood(self, sentence, tags):
        feats = self._get_lstm_features(sentence)
        return (self._forward_alg(feats) - self._score_sentence(feats, tags)).mean()


def make_data(batches, length, batch_size):
    return [
        (torch.randint(0, 20000, (length, batch_size)), torch.randint(0, 24, (length, batch_size))) for _ in range(batches)
    ]


@expected("evaluation_keeps_graphs", fix="no_grad|inference_mode", thread="pytorch/pytorch#1840", memory=700)
def train_crf_tagger(fixed=False):
    """`sum_log_likelihood += neg_log_likelihood` adds up loss tensors that still carry their graphs, so the activations of every batch that
    went into the sum are kept until the epoch's sum is printed. Cured by: add `neg_log_likelihood.data`.
    """
    model = BiLSTM_CRF(20000, 24, embedding_dim=300, hidden_dim=1024).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=1e-4)
    training_data, dev_data = make_data(6, 40, 24), make_data(90, 40, 24)
    for epoch in range(2):
        for sentence, tags in training_data:
            model.zero_grad()
            model.neg_log_likelihood(sentence.cuda(), tags.cuda()).backward()
            optimizer.step()
        sum_log_likelihood = 0
        for sentence, tags in dev_data:
            neg_log_likelihood = model.neg_log_likelihood(sentence.cuda(), tags.cuda())
            sum_log_likelihood += neg_log_likelihood.data if fixed else neg_log_likelihood
        print("epoch", epoch, (sum_log_likelihood / len(dev_data)).item())


# Translation with convolutions, from words to words.


class Dictionary:
    def __init__(self, threshold=-1):
        self.symbols, self.threshold = ["<Lua heritage>", "<pad>", "</s>", "<unk>"], threshold

    def add_from_counts(self, counts):
        self.symbols += [word for word, count in counts if count >= self.threshold]

    def __len__(self):
        return len(self.symbols)


def build_dictionary(types, threshold):
    dictionary = Dictionary(threshold)
    dictionary.add_from_counts((f"word{rank}", 400_000 // rank) for rank in range(1, types))
    return dictionary


class FConvEncoder(nn.Module):
    def __init__(self, dictionary, embed_dim, layers):
        super().__init__()
        self.embed_tokens = nn.Embedding(len(dictionary), embed_dim, padding_idx=1)
        self.convolutions = nn.ModuleList(nn.Conv1d(embed_dim, 2 * embed_dim, 3, padding=1) for _ in range(layers))

    def forward(self, src_tokens):
        x = self.embed_tokens(src_tokens).transpose(1, 2)
        for conv in self.convolutions:
            x = (x + F.glu(conv(x), 1)) * 0.5**0.5
        return x.transpose(1, 2)


class FConvDecoder(nn.Module):
    def __init__(self, dictionary, embed_dim, layers):
        super().__init__()
        self.embed_tokens = nn.Embedding(len(dictionary), embed_dim, padding_idx=1)
        self.convolutions = nn.ModuleList(nn.Conv1d(embed_dim, 2 * embed_dim, 3) for _ in range(layers))
        self.fc3 = nn.Linear(embed_dim, len(dictionary))
        self.fc3.weight = self.embed_tokens.weight

    def forward(self, prev_output_tokens, encoder_out):
        x = self.embed_tokens(prev_output_tokens)
        for conv in self.convolutions:
            residual = x
            x = F.glu(conv(F.pad(x.transpose(1, 2), (2, 0))), 1).transpose(1, 2)
            x = x + torch.bmm(torch.bmm(x, encoder_out.transpose(1, 2)).softmax(-1), encoder_out)
            x = (x + residual) * 0.5**0.5
        return self.fc3(x)


def cross_entropy_criterion(net_output, target):
    lprobs = F.log_softmax(net_output, dim=-1)
    return F.nll_loss(lprobs.view(-1, lprobs.shape[-1]), target.view(-1), ignore_index=1, reduction="sum")


@expected("logits", fix="chunk|split|vocabulary", thread="facebookresearch/fairseq#50", memory=1000)
def train_translation(fixed=False, types=200_000, max_tokens=480):
    """The dictionaries keep every one of the 200,000 types of the corpus, so the decoder's output and the `log_softmax` of it in the
    criterion are (tokens x 200,000) tensors and the second no longer fits. Cured by: a smaller vocabulary: drop rare words with
    `--thresholdtgt`/`--thresholdsrc` (or BPE).
    """
    src_dict, tgt_dict = (build_dictionary(types, threshold=20 if fixed else -1) for _ in range(2))
    encoder, decoder = FConvEncoder(src_dict, 96, 4).cuda(), FConvDecoder(tgt_dict, 96, 3).cuda()
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.25)
    for sentence_length in (12, 24, 16):
        size = max_tokens // sentence_length, sentence_length
        src_tokens, target = torch.randint(4, len(src_dict), size), torch.randint(4, len(tgt_dict), size)
        net_output = decoder(target.roll(1, 1).cuda(), encoder(src_tokens.cuda()))
        loss = cross_entropy_criterion(net_output, target.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Perplexity of a pruned OPT, whose layers wait on the CPU for their turn.


class OPTDecoderLayer(nn.Module):
    def __init__(self, embed_dim, num_heads, ffn_dim):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(embed_dim, ffn_dim), nn.Linear(ffn_dim, embed_dim)
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(embed_dim), nn.LayerNorm(embed_dim)

    def forward(self, hidden_states):
        x = self.self_attn_layer_norm(hidden_states)
        heads = lambda y: y.view(*y.shape[:2], self.num_heads, -1).transpose(1, 2)
        attn = F.scaled_dot_product_attention(
            heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x)), is_causal=True
        )
        hidden_states = hidden_states + self.out_proj(attn.transpose(1, 2).reshape(hidden_states.shape))
        return hidden_states + self.fc2(F.relu(self.fc1(self.final_layer_norm(hidden_states))))


class OPTForCausalLM(nn.Module):
    def __init__(self, vocab_size=6000, embed_dim=768, num_layers=20):
        super().__init__()
        self.embed_tokens, self.embed_positions = nn.Embedding(vocab_size, embed_dim), nn.Embedding(514, embed_dim)
        self.layers = nn.ModuleList(OPTDecoderLayer(embed_dim, 12, 4 * embed_dim) for _ in range(num_layers))
        self.final_layer_norm, self.lm_head = nn.LayerNorm(embed_dim), nn.Linear(embed_dim, vocab_size, bias=False)


@torch.no_grad()
def evaluate_ppl(model, testloader, dev, offload):
    embed_tokens, embed_positions = model.embed_tokens.to(dev), model.embed_positions.to(dev)
    inps = [embed_tokens(batch.to(dev)) + embed_positions.weight[: batch.shape[1]] for batch in testloader]
    model.embed_tokens.cpu(), model.embed_positions.cpu()
    for i in range(len(model.layers)):
        layer = model.layers[i].to(dev)
        inps = [layer(inp) for inp in inps]
        if offload:
            model.layers[i] = layer.cpu()
    final_layer_norm, lm_head = model.final_layer_norm.to(dev), model.lm_head.to(dev)
    nlls = []
    for inp, batch in zip(inps, testloader):
        shift_logits = lm_head(final_layer_norm(inp))[:, :-1]
        nlls.append(F.cross_entropy(shift_logits.flatten(0, 1), batch[:, 1:].flatten().to(dev)).item())
    return sum(nlls) / len(nlls)


@expected("several_models", fix=r"layer\.cpu", thread="microsoft/TransformerCompression#11", memory=500)
def evaluate_sliced_opt(fixed=False):
    """`evaluate_ppl` moves one layer after another to the GPU for its turn but never moves it back, so the whole model collects in GPU
    memory. Cured by: move each layer back to the CPU when it is done.
    """
    model = OPTForCausalLM().eval()
    testloader = [torch.randint(0, 6000, (1, 512)) for _ in range(8)]
    print("ppl", evaluate_ppl(model, testloader, torch.device("cuda"), offload=fixed))


# Hard negatives for training a sentence encoder.


class SentenceTransformer(nn.Module):
    def __init__(self, vocab_size=10000, dimension=256):
        super().__init__()
        self.embedding_bag = nn.EmbeddingBag(vocab_size, dimension, mode="mean")
        self.dense = nn.Linear(dimension, dimension)

    @torch.no_grad()
    def encode(self, sentences, batch_size=2048):
        all_embeddings = []
        for start_index in range(0, len(sentences), batch_size):
            all_embeddings.append(
                torch.tanh(self.dense(self.embedding_bag(sentences[start_index : start_index + batch_size].cuda())))
            )
        return torch.cat(all_embeddings)

    def similarity(self, embeddings1, embeddings2):
        return F.normalize(embeddings1, dim=-1) @ F.normalize(embeddings2, dim=-1).T


def mine_hard_negatives(anchors, positives, corpus, model, range_max, num_negatives, faiss_batch_size=None):
    query_embeddings, corpus_embeddings = model.encode(anchors), model.encode(torch.cat((positives, corpus)))
    if faiss_batch_size is None:
        scores = model.similarity(query_embeddings, corpus_embeddings)
        positive_scores = scores.diagonal().clone()
        scores, indices = scores.topk(range_max, dim=1)
    else:
        positive_scores, scores_list, indices_list = [], [], []
        for start in range(0, len(query_embeddings), faiss_batch_size):
            chunk_scores = model.similarity(query_embeddings[start : start + faiss_batch_size], corpus_embeddings)
            positive_scores.append(chunk_scores.diagonal(start).clone())
            values, chunk_indices = chunk_scores.topk(range_max, dim=1)
            scores_list.append(values)
            indices_list.append(chunk_indices)
        positive_scores, scores, indices = torch.cat(positive_scores), torch.cat(scores_list), torch.cat(indices_list)
    is_positive = indices == torch.arange(len(anchors), device="cuda").unsqueeze(1)
    scores = scores.masked_fill(is_positive | (scores > positive_scores.unsqueeze(1)), -float("inf"))
    order = scores.topk(num_negatives, dim=1).indices
    return indices.gather(1, order).cpu()


@expected("all_pairs", fix="split|chunk", thread="huggingface/sentence-transformers#3816", memory=1000)
def mine_negatives_for_nq(fixed=False):
    """Without a batch size `mine_hard_negatives` computes the similarity of all queries with the whole corpus at once, one 10,000 x 26,000
    matrix `scores`, of which only the top 50 per row are wanted. Cured by: compute the similarities and the top k for batches of queries.
    """
    model = SentenceTransformer().cuda()
    anchors, positives = torch.randint(0, 10000, (10000, 12)), torch.randint(0, 10000, (10000, 30))
    corpus = torch.randint(0, 10000, (16000, 30))
    negatives = mine_hard_negatives(anchors, positives, corpus, model, 50, 5, faiss_batch_size=1024 if fixed else None)
    return negatives.shape


# An evaluation harness: log-likelihoods for one task after another.


class PythiaLM(nn.Module):
    def __init__(self, vocab_size=16000, hidden_size=192, layers=2):
        super().__init__()
        self.embed_in = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(hidden_size, 4) for _ in range(layers))
        self.embed_out = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, inps):
        hidden_states = self.embed_in(inps)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return self.embed_out(hidden_states)


def find_executable_batch_size(function, starting_batch_size):
    batch_size = starting_batch_size
    while batch_size > 0:
        gc.collect()
        torch.cuda.empty_cache()
        try:
            return function(batch_size)
        except torch.OutOfMemoryError:
            batch_size //= 2
    raise RuntimeError("No executable batch size found, reached zero.")


class HFLM:
    def __init__(self, max_batch_size, reset_batch_sizes):
        self._model = PythiaLM().cuda().eval()
        self.max_batch_size, self.reset_batch_sizes = max_batch_size, reset_batch_sizes
        self.batch_sizes = {}

    def _model_call(self, inps):
        with torch.no_grad():
            return self._model(inps)

    def _detect_batch_size(self, requests, pos):
        max_length = len(requests[pos])

        def forward_batch(batch_size):
            test_batch = torch.ones((batch_size, max_length), device="cuda").long()
            for _ in range(5):
                out = F.log_softmax(self._model_call(test_batch), dim=-1)  # noqa: F841
            return batch_size

        return find_executable_batch_size(forward_batch, self.max_batch_size)

    def _batch_scheduler(self, requests, pos, sched=0):
        if sched not in self.batch_sizes:
            self.batch_sizes[sched] = self._detect_batch_size(requests, pos)
        return self.batch_sizes[sched]

    def _loglikelihood_tokens(self, requests, continuation=4):
        if self.reset_batch_sizes:
            self.batch_sizes = {}
        requests, res, pos = sorted(requests, key=len, reverse=True), [], 0
        while pos < len(requests):
            chunk = requests[pos : pos + self._batch_scheduler(requests, pos)]
            batched_inps = nn.utils.rnn.pad_sequence(chunk, batch_first=True).cuda()
            multi_logits = F.log_softmax(self._model_call(batched_inps), dim=-1)
            for logits, inp in zip(multi_logits, chunk):
                logits = logits[len(inp) - continuation - 1 : len(inp) - 1]
                res.append(logits.gather(1, inp[-continuation:, None].cuda()).sum().item())
            pos += len(chunk)
        return res


@expected("larger_step", fix="as large as in the steps before|split", thread="EleutherAI/lm-evaluation-harness#3654", memory=1000)
def evaluate_tasks(fixed=False):
    """`self.batch_sizes` keeps the batch size that was detected for the first, short task, and `_batch_scheduler` uses these 64 for `mmlu`
    too, whose requests are eight times as long, so that the logits no longer fit. Cured by: empty `self.batch_sizes` before each
    `_loglikelihood_tokens` call, so that it is detected anew.
    """
    lm = HFLM(max_batch_size=64, reset_batch_sizes=fixed)
    for task, shortest, longest in (("arc_easy", 20, 50), ("piqa", 20, 60), ("mmlu", 150, 400)):
        requests = [torch.randint(0, 16000, (shortest + (longest - shortest) * i // 160,)) for i in range(160)]
        lls = lm._loglikelihood_tokens(requests)
        print(task, sum(lls) / len(lls))


# Direct preference optimisation of a GPT that was written from scratch.


class MultiHeadAttention(nn.Module):
    def __init__(self, emb_dim, context_length, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.W_query, self.W_key, self.W_value = (nn.Linear(emb_dim, emb_dim, bias=False) for _ in range(3))
        self.out_proj = nn.Linear(emb_dim, emb_dim)
        self.register_buffer("mask", torch.triu(torch.ones(context_length, context_length), diagonal=1).bool())

    def forward(self, x):
        b, num_tokens, emb_dim = x.shape
        queries, keys, values = (
            W(x).view(b, num_tokens, self.num_heads, -1).transpose(1, 2) for W in (self.W_query, self.W_key, self.W_value)
        )
        attn_scores = (queries @ keys.transpose(2, 3)).masked_fill(self.mask[:num_tokens, :num_tokens], -torch.inf)
        context_vec = torch.softmax(attn_scores / keys.shape[-1] ** 0.5, dim=-1) @ values
        return self.out_proj(context_vec.transpose(1, 2).reshape(b, num_tokens, emb_dim))


class TransformerBlock(nn.Module):
    def __init__(self, emb_dim, context_length, num_heads):
        super().__init__()
        self.att = MultiHeadAttention(emb_dim, context_length, num_heads)
        self.ff = nn.Sequential(nn.Linear(emb_dim, 4 * emb_dim), nn.GELU(), nn.Linear(4 * emb_dim, emb_dim))
        self.norm1, self.norm2 = nn.LayerNorm(emb_dim), nn.LayerNorm(emb_dim)

    def forward(self, x):
        x = x + self.att(self.norm1(x))
        return x + self.ff(self.norm2(x))


class GPTModel(nn.Module):
    def __init__(self, vocab_size=8000, emb_dim=256, context_length=128, n_heads=4, n_layers=4):
        super().__init__()
        self.tok_emb, self.pos_emb = nn.Embedding(vocab_size, emb_dim), nn.Embedding(context_length, emb_dim)
        self.trf_blocks = nn.Sequential(*(TransformerBlock(emb_dim, context_length, n_heads) for _ in range(n_layers)))
        self.final_norm, self.out_head = nn.LayerNorm(emb_dim), nn.Linear(emb_dim, vocab_size, bias=False)

    def forward(self, in_idx):
        x = self.tok_emb(in_idx) + self.pos_emb.weight[: in_idx.shape[1]]
        return self.out_head(self.final_norm(self.trf_blocks(x)))


def compute_logprobs(logits, labels, selection_mask):
    log_probs = F.log_softmax(logits[:, :-1], dim=-1)
    selected = torch.gather(log_probs, -1, labels[:, 1:].unsqueeze(-1)).squeeze(-1) * selection_mask[:, 1:]
    return selected.sum(-1) / selection_mask[:, 1:].sum(-1)


def compute_dpo_loss_batch(batch, policy_model, reference_model, beta, reference_context):
    policy_chosen = compute_logprobs(policy_model(batch["chosen"]), batch["chosen"], batch["chosen_mask"])
    policy_rejected = compute_logprobs(policy_model(batch["rejected"]), batch["rejected"], batch["rejected_mask"])
    with reference_context():
        ref_chosen = compute_logprobs(reference_model(batch["chosen"]), batch["chosen"], batch["chosen_mask"])
        ref_rejected = compute_logprobs(reference_model(batch["rejected"]), batch["rejected"], batch["rejected_mask"])
    logits = (policy_chosen - policy_rejected) - (ref_chosen - ref_rejected)
    return (
        -F.logsigmoid(beta * logits).mean(),
        (policy_chosen - ref_chosen).detach().mean(),
        (policy_rejected - ref_rejected).detach().mean(),
    )


def collate(batch_size, length=128):
    batch = {key: torch.randint(0, 8000, (batch_size, length)).cuda() for key in ("chosen", "rejected")}
    return batch | {f"{key}_mask": torch.ones(batch_size, length).cuda() for key in ("chosen", "rejected")}


@expected("graph_without_use", fix="no_grad|detach", thread="rasbt/LLMs-from-scratch#473", memory=1000)
def train_dpo(fixed=False, batch_size=14):
    """`compute_dpo_loss_batch` runs the frozen `reference_model` with gradients on, so the activations of both its passes are kept for a
    backward pass besides those of the policy, though it is never trained. Cured by: `with torch.no_grad():` around the reference model's
    log probabilities.
    """
    policy_model, reference_model = GPTModel().cuda(), GPTModel().cuda()
    reference_model.load_state_dict(policy_model.state_dict())
    reference_model.eval()
    optimizer = torch.optim.AdamW(policy_model.parameters(), lr=5e-6, weight_decay=0.01)
    reference_context = torch.no_grad if fixed else contextlib.nullcontext
    for global_step in range(6):
        optimizer.zero_grad()
        loss, chosen_rewards, rejected_rewards = compute_dpo_loss_batch(
            collate(batch_size), policy_model, reference_model, 0.1, reference_context
        )
        loss.backward()
        optimizer.step()
        print(global_step, loss.item(), chosen_rewards.item(), rejected_rewards.item())


# Entities and relations in sentences: spans are pooled from a transformer's output and classified.


class SpERT(nn.Module):
    def __init__(self, hidden_size=256, size_embedding=25, entity_types=5, relation_types=6):
        super().__init__()
        self.word_embeddings = nn.Embedding(10000, hidden_size)
        self.bert = nn.ModuleList(DecoderLayer(hidden_size, 4) for _ in range(2))
        self.size_embeddings = nn.Embedding(30, size_embedding)
        self.entity_classifier = nn.Linear(2 * hidden_size + size_embedding, entity_types)
        self.rel_classifier = nn.Linear(3 * hidden_size + 2 * size_embedding, relation_types)

    def _encode(self, encodings):
        h = self.word_embeddings(encodings)
        for layer in self.bert:
            h = layer(h)
        return h

    def _classify_entities(self, h, entity_masks, entity_sizes):
        m = (entity_masks.unsqueeze(-1) == 0).float() * -1e30
        entity_spans_pool = m + h.unsqueeze(1).repeat(1, entity_masks.shape[1], 1, 1)
        entity_spans_pool = entity_spans_pool.max(dim=2)[0]
        sizes = self.size_embeddings(entity_sizes)
        entity_ctx = h[:, :1].repeat(1, entity_spans_pool.shape[1], 1)
        return self.entity_classifier(torch.cat([entity_ctx, entity_spans_pool, sizes], dim=2)), entity_spans_pool, sizes

    def _classify_relations(self, h, entity_spans_pool, sizes, relations):
        pairs = lambda x: x[:, relations].flatten(2)
        rel_ctx = h.mean(1, keepdim=True).expand(-1, len(relations), -1)
        return self.rel_classifier(torch.cat([rel_ctx, pairs(entity_spans_pool), pairs(sizes)], dim=2))

    def forward(self, encodings, entity_masks, entity_sizes, relations, chunk=None):
        h = self._encode(encodings)
        if chunk is None:
            entity_clf, entity_spans_pool, sizes = self._classify_entities(h, entity_masks, entity_sizes)
        else:
            parts = [
                self._classify_entities(h, *part) for part in zip(entity_masks.split(chunk, 1), entity_sizes.split(chunk, 1))
            ]
            entity_clf, entity_spans_pool, sizes = (torch.cat(part, 1) for part in zip(*parts))
        return entity_clf, self._classify_relations(h, entity_spans_pool, sizes, relations)


def span_masks(spans, length, batch_size):
    masks = torch.zeros(len(spans), length)
    for i, (start, end) in enumerate(spans):
        masks[i, start:end] = 1
    sizes = torch.tensor([end - start for start, end in spans])
    return masks.repeat(batch_size, 1, 1).cuda(), sizes.repeat(batch_size, 1).cuda()


def all_spans(length, max_span_size=10):
    return [(start, start + size) for size in range(1, max_span_size + 1) for start in range(length - size + 1)]


@expected("repeated_copies", fix="part|split|chunk", thread="lavis-nlp/spert#22", memory=1000)
def train_and_evaluate_spert(fixed=False, batch_size=8, length=80, neg_entity_count=40):
    """In training only 48 sampled spans are classified per sentence, in evaluation all spans up to ten words (`all_spans`), and
    `_classify_entities` repeats the sentence's token vectors `h` for every span at once (8 x 755 x 80 x 256). Cured by: process the spans
    in chunks.
    """
    model = SpERT().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    relations = torch.combinations(torch.arange(8)).cuda()
    model.train()
    for _ in range(4):
        spans = all_spans(length)
        entity_masks, entity_sizes = span_masks(random.sample(spans, neg_entity_count + 8), length, batch_size)
        entity_clf, rel_clf = model(
            torch.randint(0, 10000, (batch_size, length)).cuda(), entity_masks, entity_sizes, relations
        )
        loss = (
            F.cross_entropy(entity_clf.flatten(0, 1), torch.randint(0, 5, entity_masks.shape[:2]).flatten().cuda())
            + rel_clf.sigmoid().mean()
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        for _ in range(4):
            entity_masks, entity_sizes = span_masks(all_spans(length), length, batch_size)
            outputs = model(
                torch.randint(0, 10000, (batch_size, length)).cuda(),
                entity_masks,
                entity_sizes,
                relations,
                chunk=64 if fixed else None,
            )
            entity_types = outputs[0].argmax(-1).cpu()
    return entity_types.shape


# A serving engine that drafts tokens, at its start: the key-value cache is reserved, then the sampler is warmed up.


class SamplingMetadata:
    def __init__(self, num_logits, vocab_size, device):
        self.temperature = torch.full((num_logits, 1), 0.7, device=device)
        self.logit_bias = torch.zeros(vocab_size, device=device, dtype=torch.bfloat16)
        self.top_k = 32


class Sampler:
    def __init__(self, compute_dtype):
        self.compute_dtype = compute_dtype

    def apply_sampling_params(self, logits, sampling_metadata):
        logits = logits.to(self.compute_dtype)
        logits.div_(sampling_metadata.temperature)
        return logits.add_(sampling_metadata.logit_bias)

    def __call__(self, logits, sampling_metadata):
        logits = self.apply_sampling_params(logits, sampling_metadata)
        values, indices = logits.topk(sampling_metadata.top_k, dim=-1)
        probs = values.softmax(-1, dtype=torch.float32)
        sampled = probs.div_(torch.empty_like(probs).exponential_()).argmax(-1, keepdim=True)
        return indices.gather(1, sampled.clamp(0, sampling_metadata.top_k - 1)).squeeze(1)


class GPUModelRunner:
    def __init__(self, vocab_size=48640, hidden_size=256, num_layers=4, compute_dtype=torch.float32, num_spec_tokens=7):
        self.vocab_size, self.hidden_size, self.num_layers, self.num_spec_tokens = (
            vocab_size,
            hidden_size,
            num_layers,
            num_spec_tokens,
        )
        self.model = nn.Sequential(
            nn.Embedding(vocab_size, hidden_size), *(DecoderLayer(hidden_size, 4) for _ in range(num_layers))
        )
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.model.to("cuda", torch.bfloat16), self.lm_head.to("cuda", torch.bfloat16)
        self.sampler, self.kv_caches = Sampler(compute_dtype), []

    def initialize_kv_cache(self, num_blocks, block_size=16):
        for _ in range(self.num_layers):
            self.kv_caches.append(
                torch.zeros(2, num_blocks, block_size, self.hidden_size, device="cuda", dtype=torch.bfloat16)
            )

    @torch.inference_mode()
    def _dummy_run(self, num_tokens):
        return self.model(torch.zeros(1, num_tokens, dtype=torch.long, device="cuda"))[0]

    @torch.inference_mode()
    def _dummy_sampler_run(self, hidden_states):
        logits = self.lm_head(hidden_states)
        return self.sampler(logits, SamplingMetadata(len(logits), self.vocab_size, logits.device))

    def warm_up(self, max_num_seqs):
        num_logits = max_num_seqs * (1 + self.num_spec_tokens)
        return self._dummy_sampler_run(self._dummy_run(num_logits))


@expected("logits", fix="chunk|split", thread="vllm-project/vllm#48641", memory=1000)
def start_engine(fixed=False):
    """`apply_sampling_params` makes a float32 copy of the bf16 logits before it changes them; with the drafted tokens there are 256 x 8
    rows of 48,640 logits, and beside the reserved key-value cache there is no room for a copy twice as large as the logits. Cured by: no
    copy: the sampling parameters are applied to the bf16 logits themselves.
    """
    runner = GPUModelRunner(compute_dtype=torch.bfloat16 if fixed else torch.float32)
    runner.initialize_kv_cache(num_blocks=6400)
    for max_num_seqs in (1, 16, 256):
        runner.warm_up(max_num_seqs)


# A classifier of texts: after training, the best epoch's weights are taken back.


class BasicClassifier(nn.Module):
    def __init__(self, vocab_size=200_000, embedding_dim=300, hidden_size=256, num_labels=5):
        super().__init__()
        self._text_field_embedder = nn.Embedding(vocab_size, embedding_dim)
        self._seq2vec_encoder = nn.LSTM(embedding_dim, hidden_size, batch_first=True)
        self._classification_layer = nn.Linear(hidden_size, num_labels)

    def forward(self, tokens, label):
        _, (state, _) = self._seq2vec_encoder(self._text_field_embedder(tokens))
        logits = self._classification_layer(state[-1])
        return {"logits": logits, "loss": F.cross_entropy(logits, label)}


class Checkpointer:
    def __init__(self, serialization_dir, load_device):
        self._best_model_state_path, self._load_device = os.path.join(serialization_dir, "best.th"), load_device

    def save_checkpoint(self, model_state, is_best_so_far):
        if is_best_so_far:
            torch.save(model_state, self._best_model_state_path)

    def best_model_state(self):
        return torch.load(self._best_model_state_path, map_location=self._load_device)


class Trainer:
    def __init__(self, model, optimizer, checkpointer, train_data):
        self.model, self.optimizer, self._checkpointer, self._train_data = model, optimizer, checkpointer, train_data

    def _train_epoch(self):
        train_loss = 0.0
        for tokens, label in self._train_data:
            self.optimizer.zero_grad()
            loss = self.model(tokens.cuda(), label.cuda())["loss"]
            loss.backward()
            train_loss += loss.item()
            self.optimizer.step()
        return train_loss / len(self._train_data)

    def train(self, num_epochs, best_epoch):
        for epoch in range(num_epochs):
            print("epoch", epoch, "loss", self._train_epoch())
            self._checkpointer.save_checkpoint(self.model.state_dict(), epoch == best_epoch)
        best_model_state = self._checkpointer.best_model_state()
        self.model.load_state_dict(best_model_state)


@expected("loaded_onto_gpu", fix="map_location", thread="allenai/allennlp#3499", memory=1000)
def train_classifier(fixed=False):
    """At the end of training `best_model_state()` loads `best.th` with `torch.load` back onto the GPU from which it was saved, a second set
    of weights beside the model, its gradients and the optimizer's momentum. Cured by: load it with `map_location` CPU.
    """
    model = BasicClassifier().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_data = [(torch.randint(0, 200_000, (32, 60)), torch.randint(0, 5, (32,))) for _ in range(5)]
    with tempfile.TemporaryDirectory() as serialization_dir:
        checkpointer = Checkpointer(serialization_dir, torch.device("cpu") if fixed else None)
        Trainer(model, optimizer, checkpointer, train_data).train(num_epochs=4, best_epoch=2)
