"""Fine-tunes a transformer of atoms and energy grids of porous materials, and predicts the test set."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from expected import expected

ATOMS, DIM = 300, 512


class MofDataset(Dataset):
    def __init__(self, n, seed=0):
        self.n, self.seed = n, seed

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 100003 + i)
        return {"atom_num": torch.randint(1, 90, (ATOMS,), generator=g), "grid": torch.randn(30, 30, 30, generator=g),
                "cif_id": f"mof{i:05d}", "target": torch.randn((), generator=g)}


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.atom = nn.Embedding(100, DIM)
        self.patch = nn.Conv3d(1, DIM, 5, stride=5)
        self.cls = nn.Parameter(torch.zeros(1, 1, DIM))
        self.kind = nn.Embedding(2, DIM)

    def forward(self, batch):
        a = self.atom(batch["atom_num"]) + self.kind.weight[0]
        p = self.patch(batch["grid"].unsqueeze(1)).flatten(2).transpose(1, 2) + self.kind.weight[1]
        return torch.cat([self.cls.expand(len(a), -1, -1), a, p], dim=1)


class MofTransformer(nn.Module):
    def __init__(self, layers=4, heads=8):
        super().__init__()
        self.embed = Embeddings()
        layer = nn.TransformerEncoderLayer(DIM, heads, 2 * DIM, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
        self.transformer = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.pool, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, 1)

    def infer(self, batch):
        x = self.norm(self.transformer(self.embed(batch)))
        return {"graph_feats": x[:, 1:1 + ATOMS], "grid_feats": x[:, 1 + ATOMS:],
                "raw_cls_feats": x[:, 0], "cls_feats": torch.tanh(self.pool(x[:, 0]))}

    def forward(self, batch):
        out = self.infer(batch)
        out["cif_id"] = batch["cif_id"]
        out["regression_labels"] = batch["target"]
        out["regression_logits"] = self.head(out["cls_feats"]).squeeze(-1)
        out["regression_loss"] = F.mse_loss(out["regression_logits"], batch["target"])
        return out


class Trainer:
    def __init__(self, model, device, lr=1e-4, fixed=False):
        self.model, self.device, self.fixed = model.to(device), device, fixed
        self.opt = torch.optim.AdamW(model.parameters(), lr=lr)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, 4)

    def to_device(self, batch):
        return {k: v.to(self.device) if torch.is_tensor(v) else v for k, v in batch.items()}

    def fit(self, loader):
        self.model.train()
        for batch in loader:
            out = self.model(self.to_device(batch))
            self.opt.zero_grad()
            out["regression_loss"].backward()
            self.opt.step()
            self.sched.step()

    def test_step(self, batch):
        output = self.model(self.to_device(batch))
        if self.fixed:
            output = {k: v.cpu() if torch.is_tensor(v) else v for k, v in output.items()}
        return output

    def test_epoch_end(self, outputs):
        logits = torch.cat([o["regression_logits"] for o in outputs]).cpu()
        labels = torch.cat([o["regression_labels"] for o in outputs]).cpu()
        cls = torch.cat([o["cls_feats"] for o in outputs]).cpu()
        ids = [c for o in outputs for c in o["cif_id"]]
        return {"mae": (logits - labels).abs().mean().item(), "structures": len(ids), "vectors": len(cls)}

    @torch.no_grad()
    def test(self, loader):
        self.model.eval()
        outputs = []
        for batch in loader:
            outputs.append(self.test_step(batch))
        return self.test_epoch_end(outputs)


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="hspark1212/MOFTransformer#92", memory=1300)
def moft_test(fixed=False):
    torch.manual_seed(0)
    trainer = Trainer(MofTransformer(), torch.device("cuda"), fixed=fixed)
    trainer.fit(DataLoader(MofDataset(32), batch_size=8, shuffle=True))
    return trainer.test(DataLoader(MofDataset(960, seed=1), batch_size=32))
