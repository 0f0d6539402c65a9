"""Computes the mean embedding of each protein with a language model of proteins."""
import torch
from transformers import EsmConfig, EsmModel

from expected import expected


@torch.no_grad()
def embed(model, batch):
    batch = batch.cuda()
    output = model(input_ids=batch, attention_mask=torch.ones_like(batch))
    return output.last_hidden_state.mean(dim=1).cpu()


@expected("results_of_each_layer", fix="output_hidden_states=False", thread="Biohub/esm#173", memory=3072)
def hidden(fixed=False):
    config = EsmConfig(vocab_size=33, pad_token_id=1, mask_token_id=32, hidden_size=640, num_hidden_layers=30,
                       num_attention_heads=20, intermediate_size=2560, position_embedding_type="rotary",
                       output_hidden_states=not fixed)
    model = EsmModel(config, add_pooling_layer=False).cuda().eval()
    # cut to 510 residues + cls/eos
    proteins = torch.randint(4, 24, (320, 512))
    features = []
    for batch in proteins.split(64):
        features.append(embed(model, batch))
    return torch.cat(features)
