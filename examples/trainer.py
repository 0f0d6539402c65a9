"""Fine-tunes GPT-2 with transformers.Trainer.

    oomdiag run --device rtx3060 -- python trainer.py --batch-size 8

The texts are random tokens and the weights are fresh, so that nothing is downloaded. Memory does not depend on them.
"""
import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=2)
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()


class RandomTexts(Dataset):
    def __len__(self):
        return args.batch_size * args.steps

    def __getitem__(self, index):
        tokens = torch.randint(50257, (1024,))
        return {"input_ids": tokens, "labels": tokens}


with tempfile.TemporaryDirectory() as folder:
    Trainer(
        model=GPT2LMHeadModel(GPT2Config(use_cache=False)),
        args=TrainingArguments(folder, per_device_train_batch_size=args.batch_size, max_steps=args.steps, report_to=[], save_strategy="no"),
        train_dataset=RandomTexts(),
    ).train()
