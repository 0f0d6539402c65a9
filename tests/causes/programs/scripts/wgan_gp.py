"""Trains a WGAN with a gradient penalty on faces of 128 x 128 pixels."""
import torch
import torch.nn as nn

from expected import expected

dev = torch.device("cuda")
Z, CH, BS = 128, 24, 64


def up(i, o):
    return nn.Sequential(nn.ConvTranspose2d(i, o, 4, 2, 1), nn.BatchNorm2d(o), nn.ReLU())


def down(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 4, 2, 1), nn.LeakyReLU(0.2))


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(Z, CH * 8 * 8 * 8)
        self.net = nn.Sequential(up(CH * 8, CH * 4), up(CH * 4, CH * 2), up(CH * 2, CH),
                                 nn.ConvTranspose2d(CH, 3, 4, 2, 1), nn.Tanh())

    def forward(self, z):
        return self.net(self.fc(z).view(-1, CH * 8, 8, 8))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, CH, 3, 1, 1), nn.LeakyReLU(0.2), down(CH, CH * 2),
                                 down(CH * 2, CH * 4), down(CH * 4, CH * 8))
        self.out = nn.Linear(CH * 8 * 16 * 16, 1)

    def forward(self, x):
        return self.out(self.net(x).flatten(1))


class WGANGP:
    def __init__(self, gen, critic, reg_lambda=10.0, fixed=False):
        self.gen, self.critic, self.reg_lambda, self.fixed = gen, critic, reg_lambda, fixed

    def gradient_penalty(self, real, fake):
        eps = torch.rand(real.size(0), 1, 1, 1, device=dev)
        merged = eps * real + (1 - eps) * fake
        merged = merged.detach().requires_grad_(True)
        score = self.critic(merged)
        if self.fixed:
            grad = torch.autograd.grad(outputs=score, inputs=merged, grad_outputs=torch.ones_like(score), retain_graph=True,
                                       create_graph=True)[0].flatten(1)
        else:
            score.backward(gradient=torch.ones_like(score), retain_graph=True, create_graph=True)
            grad = merged.grad.flatten(1)
        return self.reg_lambda * ((grad.norm(2, dim=1) - 1) ** 2).mean()

    def critic_loss(self, real, fake):
        loss = self.critic(fake).mean() - self.critic(real).mean()
        return loss + self.gradient_penalty(real, fake)

    def gen_loss(self, fake):
        return -self.critic(fake).mean()


def train(wgan, steps=120, n_critic=2):
    opt_g = torch.optim.Adam(wgan.gen.parameters(), lr=1e-4, betas=(0.0, 0.9))
    opt_c = torch.optim.Adam(wgan.critic.parameters(), lr=1e-4, betas=(0.0, 0.9))
    for _ in range(steps):
        for _ in range(n_critic):
            real = torch.rand(BS, 3, 128, 128).to(dev)
            with torch.no_grad():
                fake = wgan.gen(torch.randn(BS, Z, device=dev))
            opt_c.zero_grad()
            loss_c = wgan.critic_loss(real, fake)
            loss_c.backward()
            opt_c.step()
        opt_g.zero_grad()
        loss_g = wgan.gen_loss(wgan.gen(torch.randn(BS, Z, device=dev)))
        loss_g.backward()
        opt_g.step()
    return loss_g.item()


@expected("create_graph", fix=r"autograd\.grad", thread="akanimax/pro_gan_pytorch#12", memory=3000)
def wgan_gp(fixed=False):
    """The gradient penalty calls `score.backward(create_graph=True)` and reads `merged.grad`: the tensor and its gradient keep one another
    and the graph of each step. Cured by: `torch.autograd.grad(outputs=score, inputs=merged, create_graph=True)[0]`.
    """
    return train(WGANGP(Generator().to(dev), Critic().to(dev), fixed=fixed))
