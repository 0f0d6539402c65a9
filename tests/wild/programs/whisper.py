"""Whisper-small by Seq2SeqTrainer."""
import sys

import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, WhisperConfig, WhisperForConditionalGeneration

batch = int(sys.argv[1])
model = WhisperForConditionalGeneration(WhisperConfig(d_model=768, encoder_layers=12, decoder_layers=12, encoder_ffn_dim=3072,
                                                      decoder_ffn_dim=3072, encoder_attention_heads=12,
                                                      decoder_attention_heads=12))
rows = [{"input_features": torch.randn(80, 3000), "labels": torch.randint(50000, (64,))} for _ in range(2 * batch)]
arguments = Seq2SeqTrainingArguments("out", per_device_train_batch_size=batch, max_steps=2, report_to=[], save_strategy="no",
                                     disable_tqdm=True)
Seq2SeqTrainer(model, arguments, train_dataset=rows).train()
