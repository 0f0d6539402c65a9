"""Asks a language model about documents and has it validate each of its answers by requirements."""
import dataclasses
import uuid

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from expected import expected


@dataclasses.dataclass
class ModelOutput:
    text_ids: list
    meta: dict
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)


class LocalBackend:
    def __init__(self, fixed=False):
        self.fixed = fixed
        cfg = LlamaConfig(vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=16,
                          num_attention_heads=16, num_key_value_heads=16, max_position_embeddings=4096,
                          bos_token_id=None, eos_token_id=None, pad_token_id=0)
        with torch.device("cuda"):
            self.model = LlamaForCausalLM(cfg).half().eval()

    def generate(self, ids, max_new_tokens):
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens,
                                  min_new_tokens=max_new_tokens, do_sample=False, use_cache=True,
                                  output_scores=True, return_dict_in_generate=True)
        new = out.sequences[0, ids.shape[1]:].tolist()
        return ModelOutput(new, {"hf_output": None if self.fixed else out, "prompt_len": ids.shape[1]})


class Requirement:
    def __init__(self, description):
        self.description = description

    def prompt(self, answer, length):
        body = torch.randint(1, 32000, (1, length))
        return torch.cat([body, torch.tensor([answer])], 1).cuda()


class Session:
    def __init__(self, backend):
        self.backend = backend
        self.history = []

    def validate(self, answer, requirements):
        verdicts = []
        for req in requirements:
            out = self.backend.generate(req.prompt(answer.text_ids, 700), max_new_tokens=3)
            verdicts.append(out)
        answer.meta["validation"] = verdicts
        return all(v.text_ids[0] == 1 for v in verdicts)

    def instruct(self, prompt, requirements, budget=2):
        for _ in range(budget):
            answer = self.backend.generate(prompt, max_new_tokens=12)
            self.history.append(answer)
            if self.validate(answer, requirements):
                break
        return answer


def documents(n):
    for i in range(n):
        yield torch.randint(1, 32000, (1, 1200 + 40 * (i % 7)))


@expected("kept_tensors", fix=r"past_key_values|\bdel\b|sequences", thread="generative-computing/mellea#544", memory=3000)
def instruct_backend(fixed=False):
    """Each answer and each verdict keeps the whole result of `generate` in `meta["hf_output"]`, with its KV cache and scores, and the
    history keeps all of them. Cured by: Keep the ids only, and drop the KV cache and the scores.
    """
    session = Session(LocalBackend(fixed))
    reqs = [Requirement("is polite"), Requirement("has no names"), Requirement("is short")]
    for doc in documents(10):
        answer = session.instruct(doc.cuda(), reqs)
    return len(answer.text_ids)
