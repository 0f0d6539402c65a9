"""Computes the embeddings of the lines of a text file."""
import torch
from transformers import BertConfig, BertModel

from expected import expected

BATCH_SIZE = 32


@expected("batch_without_gradients", fix="split|part", thread="OpenNMT/CTranslate2#1458", memory=4096)
def ctloop(fixed=False):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # same sizes as all-MiniLM-L6
    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    encoder = BertModel(config).to(device)
    encoder.eval()

    # the tokenized lines
    test_data = torch.randint(1000, config.vocab_size, (6000, 64))
    batches = []
    for i in range(0, len(test_data), BATCH_SIZE):
        batches.append(test_data[i:i + BATCH_SIZE])

    embeddings = []
    with torch.no_grad():
        for batch in batches:
            if fixed:
                result = encoder(input_ids=batch.to(device))
            else:
                result = encoder(input_ids=test_data.to(device))
            embeddings.append(result.last_hidden_state.mean(dim=1).cpu())
    return torch.cat(embeddings)
