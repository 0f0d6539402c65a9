"""Models whose FLOPs are counted twice: by torch.utils.flop_counter, printed here as a line of JSON for each, and by the meter.

Each is a step of the run, in their order: one forward and backward pass. Run by test_cost.py.
"""
import json
import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

CUDA = {"device": "cuda"}


def images(size=64, batch=2, channels=3):
    return torch.randn(batch, channels, size, size, **CUDA)


def vision(name, size=64, **options):
    def make():
        import torchvision
        return torchvision.models.get_model(name, weights=None, **options), (images(size),)
    return make


def segmentation(name):
    def make():
        import torchvision
        return torchvision.models.get_model(name, weights=None, weights_backbone=None), (images(),)
    return make


def video(name):
    def make():
        import torchvision
        return torchvision.models.get_model(name, weights=None), (torch.randn(1, 3, 16, 112, 112, **CUDA),)
    return make


def layers(*shape, **modules):
    return lambda: (nn.Sequential(*modules.values()), (torch.randn(*shape, **CUDA),))


def language(kind, **settings):
    def make():
        import transformers
        config = getattr(transformers, f"{kind}Config")(**settings)
        model = transformers.AutoModel.from_config(config)
        ids = torch.zeros(2, 32, dtype=torch.long, **CUDA)
        return model, ({"input_ids": ids, "decoder_input_ids": ids} if kind == "T5" else {"input_ids": ids},)
    return make


class Attention(nn.Module):
    def __init__(self, dtype, heads=4, key_length=64, causal=False):
        super().__init__()
        self.project = nn.Linear(128, 128)
        self.dtype, self.heads, self.key_length, self.causal = dtype, heads, key_length, causal

    def forward(self, x):
        q = self.project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2).to(self.dtype)
        k = q[:, :, :1].expand(-1, -1, self.key_length, -1) * 2
        return functional.scaled_dot_product_attention(q, k, k + 1, is_causal=self.causal).float()


class Einsum(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16, 24))

    def forward(self, x):
        return torch.einsum("bnd,ndo->bno", x, self.weight)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)


def attention(**options):
    return lambda: (Attention(**options), (torch.randn(2, 64, 128, **CUDA),))


def encoder_layer():
    return nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), (torch.randn(2, 16, 64, **CUDA),)


SMALL = dict(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=128, intermediate_size=128)
MODELS = {
    "mlp": layers(8, 32, a=nn.Linear(32, 64), b=nn.ReLU(), c=nn.Linear(64, 8)),
    "linear_3d": layers(4, 7, 32, a=nn.Linear(32, 5, bias=False)),
    "conv1d": layers(2, 4, 50, a=nn.Conv1d(4, 8, 5, stride=2)),
    "conv2d": layers(2, 3, 32, 32, a=nn.Conv2d(3, 16, 3, padding=1), b=nn.ReLU(), c=nn.Conv2d(16, 8, 5, stride=2)),
    "conv2d_dilated": layers(2, 8, 32, 32, a=nn.Conv2d(8, 8, 3, dilation=2), b=nn.Conv2d(8, 8, 3)),
    "conv2d_groups": layers(2, 16, 32, 32, a=nn.Conv2d(16, 32, 3, groups=4), b=nn.Conv2d(32, 32, 3, groups=8)),
    "conv2d_depthwise": layers(2, 16, 32, 32, a=nn.Conv2d(16, 16, 3, groups=16, padding=1), b=nn.Conv2d(16, 4, 1)),
    "conv3d": layers(2, 3, 8, 16, 16, a=nn.Conv3d(3, 8, 3), b=nn.Conv3d(8, 4, (1, 3, 3))),
    "conv_transpose1d": layers(2, 8, 20, a=nn.ConvTranspose1d(8, 4, 4, stride=2)),
    "conv_transpose2d": layers(2, 8, 16, 16, a=nn.ConvTranspose2d(8, 4, 2, stride=2), b=nn.Conv2d(4, 4, 3)),
    "conv_transpose3d": layers(1, 4, 4, 8, 8, a=nn.ConvTranspose3d(4, 2, 3), b=nn.Conv3d(2, 2, 3)),
    "einsum": lambda: (Einsum(), (torch.randn(4, 8, 16, **CUDA),)),
    "checkpoint": lambda: (Checkpointed(), (torch.randn(8, 64, requires_grad=True, **CUDA),)),
    "attention_flash": attention(dtype=torch.float16, causal=True),
    "attention_flash_bf16": attention(dtype=torch.bfloat16),
    "attention_efficient": attention(dtype=torch.float32),
    "attention_cross": attention(dtype=torch.float16, key_length=96),
    "transformer_layer": encoder_layer,
    **{name: vision(name) for name in (
        "resnet18", "resnet50", "wide_resnet50_2", "resnext50_32x4d", "mobilenet_v2", "mobilenet_v3_small", "densenet121", "vgg11", "vgg16_bn",
        "squeezenet1_1", "shufflenet_v2_x1_0", "efficientnet_b0", "efficientnet_v2_s", "convnext_tiny", "regnet_x_400mf", "regnet_y_400mf",
        "mnasnet0_5", "swin_t", "swin_v2_t")},
    "alexnet": vision("alexnet", 96),
    "vit_b_16": vision("vit_b_16", 64, image_size=64),
    "maxvit_t": vision("maxvit_t", 224),
    **{name: segmentation(name) for name in ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large")},
    "r3d_18": video("r3d_18"),
    "mc3_18": video("mc3_18"),
    "gpt2": language("GPT2", n_embd=64, n_head=4, n_layer=2, vocab_size=128),
    "bert": language("Bert", **SMALL),
    "llama": language("Llama", num_key_value_heads=4, **SMALL),
    "t5": language("T5", d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=128),
}


def convolution_backward(grad_shape, x_shape, weight_shape, *args, out_shape=None, **_):
    """As PyTorch counts it, but the weight's gradient with groups: each gradient costs as much as the forward pass."""
    transposed, mask = args[4], args[7]
    one = conv_flop_count(x_shape, weight_shape, grad_shape, transposed=transposed)
    return one * (int(mask[0]) + int(mask[1]))


def leaves(value):
    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for one in values for tensor in leaves(one)]


def train(model, inputs):
    outputs = model(**inputs[0]) if isinstance(inputs[0], dict) else model(*inputs)
    sum(tensor.float().sum() for tensor in leaves(outputs) if tensor.requires_grad).backward()


def main():
    marker = torch.optim.SGD([nn.Parameter(torch.zeros(1, **CUDA))], lr=1)  # its steps are those of the meter
    for name in sys.argv[1:]:
        model, inputs = MODELS[name]()
        model = model.cuda().train()
        counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.convolution_backward: convolution_backward})
        with counter:
            train(model, inputs)
        marker.step()
        train(model, inputs)
        marker.step()
        print(json.dumps([name, counter.get_total_flops()]), flush=True)


if __name__ == "__main__":
    main()
