"""Cross-validates a text classifier, and keeps the models of all folds for an ensemble."""
import torch
from transformers import DistilBertConfig, DistilBertForSequenceClassification

from expected import expected

device = torch.device("cuda")


def run_epoch(model, ids, labels, index, optimizer=None):
    total = 0.0
    for b in index.split(16):
        with torch.set_grad_enabled(optimizer is not None):
            out = model(input_ids=ids[b].to(device), labels=labels[b].to(device))
        if optimizer is not None:
            optimizer.zero_grad()
            out.loss.backward()
            optimizer.step()
        total += out.loss.item() * len(b)
    return total / len(index)


@expected("several_models", fix=r"\.cpu\(\)", thread="deepset-ai/FARM#219", memory=888)
def folds(fixed=False, n_folds=6, n_samples=240):
    config = DistilBertConfig(vocab_size=15000, dim=384, n_heads=6, hidden_dim=1536)
    ids = torch.randint(1000, config.vocab_size, (n_samples, 64))
    labels = torch.randint(0, 2, (n_samples,))
    parts = torch.randperm(n_samples).chunk(n_folds)
    models, results = [], []
    for k in range(n_folds):
        train_idx = torch.cat([f for i, f in enumerate(parts) if i != k])
        model = DistilBertForSequenceClassification(config).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
        model.train()
        run_epoch(model, ids, labels, train_idx, optimizer)
        model.eval()
        results.append(run_epoch(model, ids, labels, parts[k]))
        if fixed:
            model.cpu()
        models.append(model)
    return models, sum(results) / n_folds
