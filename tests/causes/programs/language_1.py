"""Programs after public threads in which people who train, run or evaluate language models confirmed why they ran out of memory."""

import torch
from torch import nn
from torch.nn import functional as F

from expected import expected

# Sentence embeddings for three thousand documents, computed batch by batch.


class BertLayer(nn.Module):
    def __init__(self, hidden_size, num_attention_heads):
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.query, self.key, self.value = (nn.Linear(hidden_size, hidden_size) for _ in range(3))
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.intermediate, self.output = nn.Linear(hidden_size, 4 * hidden_size), nn.Linear(4 * hidden_size, hidden_size)
        self.norm1, self.norm2 = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)

    def forward(self, hidden_states, attention_mask):
        batch, length, hidden = hidden_states.shape
        heads = lambda x: x.view(batch, length, self.num_attention_heads, -1).transpose(1, 2)
        query, key, value = heads(self.query(hidden_states)), heads(self.key(hidden_states)), heads(self.value(hidden_states))
        scores = query @ key.transpose(-1, -2) / (hidden / self.num_attention_heads) ** 0.5 + attention_mask
        context = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, hidden)
        hidden_states = self.norm1(hidden_states + self.dense(context))
        return self.norm2(hidden_states + self.output(F.gelu(self.intermediate(hidden_states))))


class SimCSE(nn.Module):
    def __init__(self, vocab_size=8000, hidden_size=192, layers=4):
        super().__init__()
        self.word_embeddings, self.position_embeddings = nn.Embedding(vocab_size, hidden_size), nn.Embedding(64, hidden_size)
        self.layer = nn.ModuleList(BertLayer(hidden_size, 6) for _ in range(layers))
        self.pooler = nn.Linear(hidden_size, hidden_size)

    def encode(self, inputs, device):
        input_ids = inputs["source"].to(device)
        attention_mask = (1.0 - inputs["attention_mask"].to(device)[:, None, None, :]) * -1e4
        hidden_states = self.word_embeddings(input_ids) + self.position_embeddings.weight[: input_ids.shape[1]]
        for layer in self.layer:
            hidden_states = layer(hidden_states, attention_mask)
        return torch.tanh(self.pooler(hidden_states[:, 0]))


def convert_to_tensor(corpus, length=16):
    return {"source": torch.randint(0, 8000, (len(corpus), length)), "attention_mask": torch.ones(len(corpus), length)}


@expected("evaluation_keeps_graphs", fix="no_grad|inference_mode", thread="BM-K/Sentence-Embedding-Is-All-You-Need#8", memory=1000)
def embed_documents(fixed=False):
    """The loop appends each `embeddings_batch` to the list `embeddings` as it comes out of `model.encode`, a GPU tensor with its graph
    (nothing turns gradients off), so every batch's activations stay on the GPU until the memory is full. Cured by: append
    `embeddings_batch.cpu().detach().numpy()` instead.
    """
    device = torch.device("cuda")
    model = SimCSE().to(device)
    model.eval()
    docs = [f"document {i}" for i in range(3000)]
    embeddings = []
    for start in range(0, len(docs), 100):
        inputs = convert_to_tensor(docs[start : start + 100])
        embeddings_batch = model.encode(inputs, device)
        if fixed:
            embeddings_batch = embeddings_batch.cpu().detach().numpy()
        embeddings.append(embeddings_batch)
    return len(embeddings)


# A server that answers requests for text with GPT.


class GPTNeoBlock(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.c_attn, self.c_proj = nn.Linear(hidden_size, 3 * hidden_size), nn.Linear(hidden_size, hidden_size)
        self.c_fc, self.mlp_proj = nn.Linear(hidden_size, 4 * hidden_size), nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, hidden_states, layer_past):
        batch, length, hidden = hidden_states.shape
        qkv = self.c_attn(self.ln_1(hidden_states)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        if layer_past is not None:
            key, value = torch.cat((layer_past[0], key), 2), torch.cat((layer_past[1], value), 2)
        weights = query @ key.transpose(-1, -2) / (hidden // self.num_heads) ** 0.5
        mask = torch.ones(length, key.shape[2], dtype=torch.bool, device=key.device).tril(key.shape[2] - length)
        context = weights.masked_fill(~mask, -1e9).softmax(-1) @ value
        hidden_states = hidden_states + self.c_proj(context.transpose(1, 2).reshape(batch, length, hidden))
        return hidden_states + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(hidden_states)))), (key, value)


class GPTNeoForCausalLM(nn.Module):
    def __init__(self, vocab_size=16000, hidden_size=384, num_layers=6):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, hidden_size), nn.Embedding(1024, hidden_size)
        self.h = nn.ModuleList(GPTNeoBlock(hidden_size, 6) for _ in range(num_layers))
        self.ln_f, self.lm_head = nn.LayerNorm(hidden_size), nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, input_ids, past_key_values=None):
        past_key_values = past_key_values or [None] * len(self.h)
        start = 0 if past_key_values[0] is None else past_key_values[0][0].shape[2]
        hidden_states, presents = self.wte(input_ids) + self.wpe.weight[start : start + input_ids.shape[1]], []
        for block, layer_past in zip(self.h, past_key_values):
            hidden_states, present = block(hidden_states, layer_past)
            presents.append(present)
        return self.lm_head(self.ln_f(hidden_states[:, -1:])), presents


class GPTHF:
    def __init__(self, inference_mode):
        self.model, self.inference_mode = GPTNeoForCausalLM().cuda().eval(), inference_mode

    def sample(self, logits, temp, top_k):
        values, indices = (logits[:, -1] / temp).topk(top_k)
        choice = torch.distributions.Categorical(logits=values, validate_args=False).sample()
        return indices.gather(1, choice.clamp(0, top_k - 1).unsqueeze(1))

    def generate(self, args):
        with torch.inference_mode(self.inference_mode):
            output_ids = args["prompt"].cuda().repeat(args["best_of"], 1)
            logits, past = self.model(output_ids)
            for _ in range(args["gen_length"]):
                next_ids = self.sample(logits, args["temp"], args["top_k"]).clamp(0, 15999)
                output_ids = torch.cat((output_ids, next_ids), 1)
                logits, past = self.model(next_ids, past)
            return output_ids.tolist()


@expected("evaluation_keeps_graphs", fix="no_grad|inference_mode", thread="hitomi-team/sukima#5", memory=1000)
def serve_requests(fixed=False):
    """`generate()` runs the model with gradients on, so in a request each generated token's activations, and the keys and values of the
    whole past that its attention used, stay alive through the graph until the request is answered. Cured by: `@torch.inference_mode()` on
    `generate()`.
    """
    gpt = GPTHF(inference_mode=fixed)
    for prompt_length, gen_length in ((60, 8), (160, 120), (90, 40)):
        prompt = torch.randint(0, 16000, (1, prompt_length))
        gpt.generate({"prompt": prompt, "gen_length": gen_length, "best_of": 5, "temp": 0.8, "top_k": 40})


# Ranking texts by how likely a small Gemma finds them.


class GemmaAttention(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(4)
        )

    def forward(self, hidden_states, attention_mask):
        bsz, q_len, hidden = hidden_states.shape
        heads = lambda x: x.view(bsz, q_len, self.num_heads, -1).transpose(1, 2)
        query_states, key_states, value_states = (
            heads(self.q_proj(hidden_states)),
            heads(self.k_proj(hidden_states)),
            heads(self.v_proj(hidden_states)),
        )
        attn_weights = query_states @ key_states.transpose(2, 3) / (hidden // self.num_heads) ** 0.5
        attn_weights = (attn_weights + attention_mask[:, :, :q_len, :q_len]).softmax(-1)
        return self.o_proj((attn_weights @ value_states).transpose(1, 2).reshape(bsz, q_len, hidden))


class GemmaModel(nn.Module):
    def __init__(self, expand_mask, vocab_size=8000, hidden_size=192, layers=3, max_position_embeddings=2048):
        super().__init__()
        self.expand_mask = expand_mask
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.self_attn = nn.ModuleList(GemmaAttention(hidden_size, 4) for _ in range(layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden_size, 768), nn.GELU(), nn.Linear(768, hidden_size)) for _ in range(layers)
        )
        causal_mask = torch.full((max_position_embeddings, max_position_embeddings), fill_value=True)
        self.register_buffer("causal_mask", torch.triu(causal_mask, diagonal=1), persistent=False)

    def _update_causal_mask(self, input_tensor):
        batch_size, dtype = input_tensor.shape[0], input_tensor.dtype
        min_dtype = torch.finfo(dtype).min
        if self.expand_mask:
            causal_mask = self.causal_mask[None, None, :, :].to(dtype) * min_dtype
            return causal_mask.expand(batch_size, 1, -1, -1)
        return self.causal_mask[None, None, :, :].repeat(batch_size, 1, 1, 1).to(dtype) * min_dtype

    def forward(self, input_ids):
        hidden_states = self.embed_tokens(input_ids)
        causal_mask = self._update_causal_mask(hidden_states)
        for self_attn, mlp in zip(self.self_attn, self.mlp):
            hidden_states = hidden_states + self_attn(F.rms_norm(hidden_states, hidden_states.shape[-1:]), causal_mask)
            hidden_states = hidden_states + mlp(F.rms_norm(hidden_states, hidden_states.shape[-1:]))
        return F.rms_norm(hidden_states, hidden_states.shape[-1:])


@torch.no_grad()
def score_texts(model, input_ids):
    logits = F.linear(model(input_ids)[:, :-1], model.embed_tokens.weight)
    return F.cross_entropy(logits.transpose(1, 2), input_ids[:, 1:], reduction="none").mean(1)


@expected("repeated_copies", fix="expand", thread="huggingface/transformers#29413", memory=1000)
def rank_texts(fixed=False):
    """`_update_causal_mask` repeats the full 2048 x 2048 `causal_mask` for each of the 48 texts of the batch and turns the copies into
    floats, though all texts could share one mask (and are only 64 tokens long). Cured by: convert one mask and `.expand()` it over the
    batch instead of `.repeat()`.
    """
    model = GemmaModel(expand_mask=fixed).cuda().eval()
    scores = []
    for input_ids in torch.randint(0, 8000, (4, 48, 64)):
        scores += score_texts(model, input_ids.cuda()).tolist()
    return scores


# Text from a state space model, many samples at a time.


class MambaMixer(nn.Module):
    def __init__(self, d_model, d_state=16, d_conv=4, expand=2):
        super().__init__()
        self.d_inner, self.d_state = expand * d_model, d_state
        self.in_proj, self.out_proj = nn.Linear(d_model, 2 * self.d_inner, bias=False), nn.Linear(
            self.d_inner, d_model, bias=False
        )
        self.conv_weight, self.conv_bias = nn.Parameter(torch.randn(self.d_inner, d_conv)), nn.Parameter(
            torch.zeros(self.d_inner)
        )
        self.x_proj, self.dt_proj = nn.Linear(self.d_inner, 2 * d_state + 1, bias=False), nn.Linear(1, self.d_inner)
        self.A_log, self.D = nn.Parameter(torch.rand(self.d_inner, d_state)), nn.Parameter(torch.ones(self.d_inner))

    def allocate_inference_cache(self, batch_size, device):
        conv_state = torch.zeros(batch_size, self.d_inner, self.conv_weight.shape[1], device=device)
        return conv_state, torch.zeros(batch_size, self.d_inner, self.d_state, device=device)

    def step(self, hidden_states, conv_state, ssm_state):
        x, z = self.in_proj(hidden_states).chunk(2, -1)
        conv_state.copy_(torch.roll(conv_state, -1, dims=-1))
        conv_state[:, :, -1] = x
        x = F.silu((conv_state * self.conv_weight).sum(-1) + self.conv_bias)
        B, C, dt = self.x_proj(x).split((self.d_state, self.d_state, 1), -1)
        dt = F.softplus(self.dt_proj(dt))
        dA = torch.exp(dt.unsqueeze(-1) * -torch.exp(self.A_log))
        ssm_state.copy_(ssm_state * dA + x.unsqueeze(-1) * dt.unsqueeze(-1) * B.unsqueeze(1))
        y = (ssm_state * C.unsqueeze(1)).sum(-1) + self.D * x
        return self.out_proj(y * F.silu(z))


class MambaLMHeadModel(nn.Module):
    def __init__(self, vocab_size=50280, d_model=256, n_layer=3):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.layers, self.norm = nn.ModuleList(MambaMixer(d_model) for _ in range(n_layer)), nn.LayerNorm(d_model)

    def step(self, tokens, key_value_memory_dict):
        hidden_states = self.embedding(tokens)
        for i, layer in enumerate(self.layers):
            hidden_states = hidden_states + layer.step(self.norm(hidden_states), *key_value_memory_dict[i])
        return F.linear(self.norm(hidden_states), self.embedding.weight)


@torch.inference_mode()
def decode(input_ids, model, max_length, top_k=8, output_scores=False, patched=False):
    cache = {i: layer.allocate_inference_cache(len(input_ids), input_ids.device) for i, layer in enumerate(model.layers)}
    for position in range(input_ids.shape[1]):
        logits = model.step(input_ids[:, position], cache)
    scores, sequences = [], [input_ids]
    for _ in range(max_length - input_ids.shape[1]):
        if output_scores or not patched:
            scores.append(logits)
        values, indices = logits.topk(top_k, dim=-1)
        gumbel = -torch.empty_like(values).exponential_().log()
        sampled_tokens = indices.gather(1, (values + gumbel).argmax(-1, keepdim=True).clamp(0, top_k - 1)).clamp(0, 50279)
        sequences.append(sampled_tokens)
        logits = model.step(sampled_tokens[:, 0], cache)
    return {"sequences": torch.cat(sequences, 1), "scores": tuple(scores) if output_scores else None}


@expected("kept_tensors", fix=r"\.cpu\(\)|\bdel\b|clear|None", thread="state-spaces/mamba#610", memory=1000)
def sample_stories(fixed=False):
    """`decode` appends the logits of all 96 samples over the whole vocabulary to the list `scores` for every generated token, even though
    nobody asked for scores (`output_scores=False`). Cured by: append to `scores` only when `output_scores` is set.
    """
    model = MambaLMHeadModel().cuda().eval()
    input_ids = torch.randint(0, 50280, (1, 6)).repeat(96, 1).cuda()
    output = decode(input_ids, model, max_length=86, patched=fixed)
    return output["sequences"].cpu().shape


# Generalised knowledge distillation: rollouts of a student are compared with a teacher's distribution.


class CausalLM(nn.Module):
    def __init__(self, vocab_size, hidden_size, num_layers):
        super().__init__()
        self.embed_tokens, self.embed_positions = nn.Embedding(vocab_size, hidden_size), nn.Embedding(512, hidden_size)
        self.layers = nn.ModuleList(GPTNeoBlock(hidden_size, 4) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden_size)

    def forward(self, input_ids):
        hidden_states = self.embed_tokens(input_ids) + self.embed_positions.weight[: input_ids.shape[1]]
        for layer in self.layers:
            hidden_states, _ = layer(hidden_states, None)
        return F.linear(self.norm(hidden_states), self.embed_tokens.weight)


class GKDTrainer:
    def __init__(self, model, teacher_model, just_in_time, beta=0.5, vocab_size=40000):
        self.model, self.teacher_model, self.just_in_time = model, teacher_model.eval(), just_in_time
        self.beta, self.vocab_size = beta, vocab_size
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def _generate(self, queries, num_generations, length=160):
        rollouts = torch.randint(0, self.vocab_size, (queries * num_generations, length))
        return [{"input_ids": rollout.unsqueeze(0), "labels": rollout.unsqueeze(0).clone()} for rollout in rollouts]

    @torch.no_grad()
    def _compute_teacher_output_local(self, encoded_batch):
        return self.teacher_model(encoded_batch["input_ids"].cuda())

    def _prepare_batch_inputs(self, encoded_batches):
        for encoded_batch in encoded_batches:
            if self.just_in_time:
                encoded_batch["teacher_model_inputs"] = {"input_ids": encoded_batch["input_ids"]}
            else:
                encoded_batch["teacher_output"] = self._compute_teacher_output_local(encoded_batch)
        return encoded_batches

    def generalized_jsd_loss(self, student_logits, teacher_logits):
        student_log_probs, teacher_log_probs = F.log_softmax(student_logits, -1), F.log_softmax(teacher_logits, -1)
        return F.kl_div(student_log_probs, teacher_log_probs, reduction="none", log_target=True).sum(-1).mean() * self.beta

    def forward_step(self, batch):
        teacher_logits = batch.get("teacher_output")
        if teacher_logits is None:
            teacher_logits = self._compute_teacher_output_local(batch["teacher_model_inputs"])
        return self.generalized_jsd_loss(self.model(batch["input_ids"].cuda()), teacher_logits)

    def train(self, cycles, queries, num_generations):
        for _ in range(cycles):
            for batch in self._prepare_batch_inputs(self._generate(queries, num_generations)):
                self.forward_step(batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


@expected("kept_tensors", fix=r"\.cpu\(\)|\bdel\b|clear|None", thread="modelscope/ms-swift#10097", memory=1000)
def distil(fixed=False):
    """Before the first training step of a cycle `_prepare_batch_inputs` computes the teacher's logits over the whole vocabulary for all 48
    rollouts and keeps them in `encoded_batch["teacher_output"]` until the cycle is over, though one rollout is trained on at a time. Cured
    by: compute the teacher's logits in `forward_step`, for the micro batch at hand only.
    """
    student, teacher = CausalLM(40000, 128, 2).cuda(), CausalLM(40000, 192, 4).cuda()
    GKDTrainer(student, teacher, just_in_time=fixed).train(cycles=2, queries=12, num_generations=4)
