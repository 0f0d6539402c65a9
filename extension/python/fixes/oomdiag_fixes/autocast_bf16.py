"""Mixed precision around the outermost module."""
import torch

from .roots import wrap_forward


def apply(_settings):
    wrap_forward("autocast_bf16", torch.autocast("cuda", dtype=torch.bfloat16),
                 ['model.forward = torch.autocast("cuda", dtype=torch.bfloat16)(model.forward)'])
