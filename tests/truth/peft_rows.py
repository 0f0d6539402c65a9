"""What PEFT's method comparison says that a step of each method keeps, measured again: our own program of a training step.

    oomdiag run --device l40s -- python peft_rows.py ROWS.json UNUSED

Prints a line of JSON per row: what is allocated after a step of training Llama-3.2-3B, in MiB, or why it could not be run. The
published figure is the mean over 5000 steps. Weights and data are not needed for it, but for the length of a batch (LENGTH).
"""
import json
import sys

sys.modules["bitsandbytes"] = None  # which peft imports where it is installed, and which takes the GPU, after which no process may fork

import peft
import peft.optimizers
import torch
import transformers

from each_row import read_rows, run_each

MIB = 1 << 20
BATCH = 4
# Tokens of a padded batch: the mean is not published. This one meets the row lora/rank32, which is therefore not counted; the published runs had
# 209.9 tokens without padding ("train total tokens" of 20000 samples), in batches of like lengths.
LENGTH = 215
STEPS = 3
LONGEST = 300  # seconds for a row
LLAMA = dict(hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24, num_key_value_heads=8, head_dim=128,
             vocab_size=128256, max_position_embeddings=131072, tie_word_embeddings=True, rms_norm_eps=1e-5, bos_token_id=128000,
             eos_token_id=128001, rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
                                                   "high_freq_factor": 4.0, "original_max_position_embeddings": 8192})


def model_of(row):
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**LLAMA), dtype=torch.bfloat16)
    if not row["method"]:
        return model
    config = peft.get_peft_config({"peft_type": row["method"], "task_type": "CAUSAL_LM", **json.loads(row["config"])})
    return peft.get_peft_model(model, config, autocast_adapter_dtype=row["autocast_adapter_dtype"] == "true")


def optimizer_of(row, model):
    if row["optimizer"] == "lora-fa":
        return peft.optimizers.create_lorafa_optimizer(model, r=32, lora_alpha=64, lr=1e-4, weight_decay=0.1)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)


def batch_of(length):
    ids = torch.randint(1000, (BATCH, length)).cuda()
    return {"input_ids": ids, "attention_mask": torch.ones(BATCH, length, dtype=torch.long).cuda()}


def measure(row):
    torch.nn.Linear(1, 1).cuda()
    before = torch.cuda.max_memory_reserved()  # which the published figures leave out
    model = model_of(row)
    optimizer = optimizer_of(row, model)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    # The base model's loss is taken first. Switching adapters off and on again makes all of them require gradients.
    model.eval()
    with torch.inference_mode():
        if row["method"]:
            with model.disable_adapter():
                model(**batch_of(LENGTH))
        else:
            model(**batch_of(LENGTH))
    model.train()
    for step in range(1, STEPS + 1):
        batch = batch_of(LENGTH)
        batch["labels"] = batch["input_ids"].clone()
        optimizer.zero_grad()
        outputs = model(**batch, num_items_in_batch=BATCH * LENGTH)
        loss = outputs.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if row["method"] in ("ADALORA", "ADAMSS"):
            model.base_model.update_and_allocate(step)
        loss.item()
    return {"mib": (torch.cuda.memory_allocated() - before) / MIB, "trainable": trainable}


run_each(read_rows(), measure, LONGEST)
