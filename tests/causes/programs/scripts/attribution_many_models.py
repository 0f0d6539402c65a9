"""Computes DeepLIFT attributions of the same sequences with the models of twelve folds."""
import torch
import torch.nn as nn

from expected import expected


class ProfileNet(nn.Module):
    def __init__(self, filters=64, n_layers=8, out_len=1000):
        super().__init__()
        self.stem = nn.Conv1d(4, filters, 21, padding=10)
        self.stem_act = nn.ReLU()
        self.dil = nn.ModuleList(
            nn.Conv1d(filters, filters, 3, padding=2 ** i, dilation=2 ** i) for i in range(1, n_layers + 1))
        self.acts = nn.ModuleList(nn.ReLU() for _ in range(n_layers))
        self.counts = nn.Linear(filters, 1)

    def forward(self, x):
        x = self.stem_act(self.stem(x))
        for conv, act in zip(self.dil, self.acts):
            x = x + act(conv(x))
        return self.counts(x.mean(dim=2))


def remember_tensors(module, inputs, output):
    module.input = inputs[0].detach()
    module.output = output.detach()


def rescale(module, grad_input, grad_output):
    x, ref = module.input.chunk(2)
    y, ref_y = module.output.chunk(2)
    slope = (y - ref_y) / (x - ref + 1e-7)
    slope = torch.cat([slope, slope])
    return (grad_output[0] * slope,)


def register(model):
    handles = []
    for m in model.modules():
        if isinstance(m, nn.ReLU):
            handles.append(m.register_forward_hook(remember_tensors))
            handles.append(m.register_full_backward_hook(rescale))
    return handles


def clear_hooks(handles, model=None):
    for h in handles:
        h.remove()
    if model is not None:
        for m in model.modules():
            if hasattr(m, "input"):
                del m.input, m.output


def deep_lift(model, X, refs, batch_size=64, device="cuda", fixed=False):
    model.to(device).eval()
    handles = register(model)
    attributions = []
    for start in range(0, len(X), batch_size):
        xb = X[start:start + batch_size].to(device)
        rb = refs[start:start + batch_size].to(device)
        both = torch.cat([xb, rb]).requires_grad_()
        y = model(both)
        n = xb.shape[0]
        delta = (y[:n] - y[n:]).sum()
        grads = torch.autograd.grad(delta, both)[0]
        attributions.append(((xb - rb) * grads[:n]).detach().cpu())
    clear_hooks(handles, model if fixed else None)
    return torch.cat(attributions)


def load_models(n):
    return {f"fold_{i}": ProfileNet() for i in range(n)}


@expected("kept_tensors", fix=r"\bdel\b|models\.pop|None", thread="jmschrei/tangermeme#84", memory=11900)
def attribution_many_models(fixed=False):
    """The DeepLIFT hooks put the input and the output of each activation on the module (`module.input`, `module.output`); `clear_hooks`
    removes the hooks only, so that each of the twelve models keeps the activations of its last batch. Cured by: `del module.input,
    module.output` in `clear_hooks`.
    """
    torch.manual_seed(0)
    X = torch.zeros(192, 4, 2114)
    X.scatter_(1, torch.randint(0, 4, (192, 1, 2114)), 1.0)
    refs = X[:, :, torch.randperm(2114)]
    models = load_models(12)
    scores = {}
    for name, model in models.items():
        scores[name] = deep_lift(model, X, refs, fixed=fixed)
    return torch.stack(list(scores.values())).mean(0).shape
