"""Measures how well a classifier of images withstands an attack by the sign of the gradient."""
import torch
import torch.nn.functional as F
from torchvision.models import resnet18

from expected import expected


def load_data(n_examples, fixed=False):
    x_test = torch.rand(n_examples, 3, 224, 224)
    y_test = torch.randint(0, 1000, (n_examples,))
    if fixed:
        return x_test, y_test
    return x_test.cuda(), y_test.cuda()


def clean_accuracy(model, x, y, batch_size=25):
    correct = 0
    with torch.no_grad():
        for i in range(0, len(x), batch_size):
            x_curr = x[i:i + batch_size].cuda()
            y_curr = y[i:i + batch_size].cuda()
            correct += (model(x_curr).argmax(1) == y_curr).sum().item()
    return correct / len(x)


def fgsm(model, x, y, eps):
    x = x.clone().requires_grad_(True)
    grad, = torch.autograd.grad(F.cross_entropy(model(x), y), x)
    return (x + eps * grad.sign()).clamp(0, 1).detach()


@expected("data_on_gpu", fix="on the host|DataLoader|remove", thread="fra31/auto-attack#32", memory=1600)
def allcuda(fixed=False):
    x_test, y_test = load_data(1750, fixed)
    model = resnet18(weights=None).cuda().eval()
    clean = clean_accuracy(model, x_test, y_test)
    robust = 0
    for i in range(0, len(x_test), 25):
        x_curr, y_curr = x_test[i:i + 25].cuda(), y_test[i:i + 25].cuda()
        x_adv = fgsm(model, x_curr, y_curr, 8 / 255)
        with torch.no_grad():
            robust += (model(x_adv).argmax(1) == y_curr).sum().item()
    return clean, robust / len(x_test)
