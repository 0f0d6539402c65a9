"""Trains a recommender for sessions with a large catalogue and evaluates it."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected

ITEMS, DIM, LEN = 300_000, 64, 20


class SessionModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.item = nn.Embedding(ITEMS, DIM)
        self.gru = nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, seq):
        out, _ = self.gru(self.item(seq))
        return out[:, -1] @ self.item.weight.t()


class RecTrainer:
    def __init__(self, model, lr=1e-3, train_bs=128, eval_bs=1024):
        self.model = model.cuda()
        self.opt = torch.optim.Adam(model.parameters(), lr=lr)
        self.train_bs, self.eval_bs = train_bs, eval_bs

    def batches(self, sessions, size):
        for s in range(0, len(sessions), size):
            chunk = sessions[s:s + size].cuda()
            yield chunk[:, :-1], chunk[:, -1]

    def train(self, sessions):
        self.model.train()
        for seq, target in self.batches(sessions, self.train_bs):
            loss = F.cross_entropy(self.model(seq), target)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()

    def evaluation_loop(self, sessions, top_k=None):
        self.model.eval()
        preds_host, labels_host, losses = None, None, []
        with torch.no_grad():
            for seq, target in self.batches(sessions, self.eval_bs):
                logits = self.model(seq)
                losses.append(F.cross_entropy(logits, target).item())
                if top_k:
                    logits = logits.topk(top_k, dim=-1).indices
                preds_host = logits if preds_host is None else torch.cat((preds_host, logits), dim=0)
                labels_host = target if labels_host is None else torch.cat((labels_host, target), dim=0)
        return preds_host, labels_host, sum(losses) / len(losses)

    def evaluate(self, sessions, ks=(10, 20), fixed=False):
        preds, labels, loss = self.evaluation_loop(sessions, max(ks) if fixed else None)
        result = {"loss": loss}
        top = preds if fixed else preds.topk(max(ks), dim=-1).indices
        hit = top == labels.unsqueeze(1)
        for k in ks:
            result[f"recall@{k}"] = hit[:, :k].any(1).float().mean().item()
        return result


def make_sessions(n):
    return torch.randint(0, ITEMS, (n, LEN + 1))


@expected("growing_buffer", fix=r"topk|\.cpu\(\)", thread="NVIDIA-Merlin/Transformers4Rec#721", memory=11900)
def session_rec_eval(fixed=False):
    """The evaluation concatenates the scores of all items of every session on the GPU until its end. Cured by: Keep the best k of each
    batch only, or move the scores to the CPU.
    """
    trainer = RecTrainer(SessionModel())
    train_set, eval_set = make_sessions(1280), make_sessions(20480)
    for _ in range(2):
        trainer.train(train_set)
        result = trainer.evaluate(eval_set, fixed=fixed)
    return result
