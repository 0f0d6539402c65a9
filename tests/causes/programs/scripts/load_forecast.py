"""Forecasts the electricity load of households with a small training framework."""
import torch
import torch.nn as nn

from expected import expected

cuda = torch.device("cuda")


class BaseForecaster(nn.Module):
    def __init__(self, fixed=False):
        super().__init__()
        self.fixed = fixed
        self.training_step_outputs = []
        self.epoch_losses = []

    def step(self, x, y):
        prediction = self(x)
        loss = self.loss_fn(prediction, y)
        log = {"loss": loss, "n_samples": x.size(0), "prediction": prediction, "encoder_input": x}
        return log, prediction

    def training_step(self, batch):
        x, y = batch
        log, _ = self.step(x.to(cuda), y.to(cuda))
        if self.fixed:
            kept = {key: value.detach() if torch.is_tensor(value) else value for key, value in log.items()}
            kept.update(prediction=kept["prediction"].cpu(), encoder_input=kept["encoder_input"].cpu())
            self.training_step_outputs.append(kept)
        else:
            self.training_step_outputs.append(log)
        return log["loss"]

    def on_train_epoch_end(self):
        losses = [o["loss"] * o["n_samples"] for o in self.training_step_outputs]
        self.epoch_losses.append((sum(losses) / sum(o["n_samples"] for o in self.training_step_outputs)).item())
        self.training_step_outputs.clear()


class LoadForecaster(BaseForecaster):
    def __init__(self, history=336, horizon=24, width=512, fixed=False):
        super().__init__(fixed)
        self.loss_fn = nn.SmoothL1Loss()
        self.inp = nn.Linear(6, width)
        self.conv = nn.Sequential(nn.Conv1d(width, width, 5, padding=2), nn.GELU(), nn.Conv1d(width, width, 5, padding=2))
        self.out = nn.Linear(width, horizon)

    def forward(self, x):
        h = self.inp(x).transpose(1, 2)
        h = h + self.conv(h)
        return self.out(h.transpose(1, 2))


class Fitter:
    def __init__(self, max_epochs=1):
        self.max_epochs = max_epochs

    def fit(self, module, loader):
        opt = torch.optim.AdamW(module.parameters(), lr=1e-3)
        for _ in range(self.max_epochs):
            module.train()
            for batch in loader:
                loss = module.training_step(batch)
                opt.zero_grad()
                loss.backward()
                opt.step()
            module.on_train_epoch_end()


class HourlyLoad:
    def __init__(self, batches, batch_size=1024, history=336, horizon=24):
        self.batches, self.size, self.history, self.horizon = batches, batch_size, history, horizon

    def __iter__(self):
        for _ in range(self.batches):
            yield torch.rand(self.size, self.history, 6), torch.rand(self.size, self.history, self.horizon)


@expected("kept_tensors", fix="detach", thread="sktime/pytorch-forecasting#1924", memory=5734)
def load_forecast(fixed=False):
    """The dictionaries with loss, predictions and inputs of all steps, attached to their graphs, lie in `training_step_outputs` for a whole
    epoch. Cured by: Detach the tensors before they are appended, and move the predictions to the CPU.
    """
    module = LoadForecaster(fixed=fixed).to(cuda)
    Fitter().fit(module, HourlyLoad(30))
    return module.epoch_losses
