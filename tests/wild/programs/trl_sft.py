"""Supervised fine-tuning by trl."""
import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

batch = int(sys.argv[1])
model = LlamaForCausalLM(LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=12, num_attention_heads=16,
                                     vocab_size=32000)).to(torch.bfloat16)
rows = Dataset.from_dict({"input_ids": [torch.randint(32000, (512,)).tolist() for _ in range(2 * batch)]})

tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, "a")), pad_token="a", eos_token="b")
arguments = SFTConfig("out", per_device_train_batch_size=batch, max_steps=2, report_to=[], save_strategy="no", disable_tqdm=True,
                      max_length=512, gradient_checkpointing=False, bf16=False, fp16=False)
SFTTrainer(model, args=arguments, train_dataset=rows, processing_class=tokenizer).train()
