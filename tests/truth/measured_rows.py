"""Trainings by four plans, as measured on real GPUs, all with driver 580.159.04, torch 2.11.0+cu130, transformers 5.17.0 and torchvision
0.26.0: h100.csv has what an H100 80GB HBM3 gave for the first 24 programs, h200.csv what an H200 gave for the next 13. The others wait for one.

    python measured_rows.py [--plans PLAN,...] [PROGRAM...] > figures.csv         # on a real GPU: a line of figures per training
    oomdiag run --device h100-sxm -- python measured_rows.py ROWS.json UNUSED     # for test_truth.py: a line of JSON per row

Plans: plain (float32, TF32 where PyTorch allows it by default), bf16 (autocast), checkpoint (each block recomputed) and both. Each
training runs in a child: its highest allocated and reserved bytes, what the process takes of the device beyond PyTorch's segments, the
median milliseconds of a step by CUDA events, and of those how many the host took to submit it.
"""
import argparse
import csv
import functools
import json
import os
import statistics
import sys
import time

PLANS = ("plain", "bf16", "checkpoint", "checkpoint-bf16")
WARM_UP, STEPS = 3, 6
MIB = 1 << 20
COLUMNS = ("program", "plan", "allocated_bytes", "reserved_bytes", "non_pytorch_bytes", "step_ms", "queued_ms")

def image_program(name, batch, size, blocks, classes=1000, **options):
    def make():
        import torch
        import torchvision
        model = getattr(torchvision.models, name)(weights=None, **options)
        images = torch.randn(batch, 3, size, size, device="cuda")
        labels = torch.randint(classes, (batch,), device="cuda")
        return model, blocks, lambda model: torch.nn.functional.cross_entropy(model(images), labels)
    return make


def segmentation(batch):
    import torch
    import torchvision
    model = torchvision.models.segmentation.fcn_resnet50(weights=None, weights_backbone=None, num_classes=21)
    images = torch.randn(batch, 3, 512, 512, device="cuda")
    labels = torch.randint(21, (batch, 512, 512), device="cuda")
    return model, ("backbone.layer1.*", "backbone.layer2.*", "backbone.layer3.*", "backbone.layer4.*"), \
        lambda model: torch.nn.functional.cross_entropy(model(images)["out"], labels)


def video(batch):
    import torch
    import torchvision
    model = torchvision.models.video.r3d_18(weights=None)
    clips = torch.randn(batch, 3, 16, 112, 112, device="cuda")
    labels = torch.randint(400, (batch,), device="cuda")
    return model, ("layer1.*", "layer2.*", "layer3.*", "layer4.*"), lambda model: torch.nn.functional.cross_entropy(model(clips), labels)


def diffusion_unet(batch):
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self, before, after):
            super().__init__()
            self.norm1, self.conv1 = nn.GroupNorm(32, before), nn.Conv2d(before, after, 3, padding=1)
            self.norm2, self.conv2 = nn.GroupNorm(32, after), nn.Conv2d(after, after, 3, padding=1)
            self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

        def forward(self, x):
            h = self.conv1(functional.silu(self.norm1(x)))
            return self.skip(x) + self.conv2(functional.silu(self.norm2(h)))

    class Attention(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm, self.inputs, self.output = nn.GroupNorm(32, width), nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

        def forward(self, x):
            n, c, h, w = x.shape
            q, k, v = self.inputs(self.norm(x)).reshape(n, 3, c // 64, 64, h * w).transpose(-1, -2).unbind(1)
            y = functional.scaled_dot_product_attention(q, k, v)
            return x + self.output(y.transpose(-1, -2).reshape(n, c, h, w))

    class UNet(nn.Module):
        def __init__(self, width=128, factors=(1, 2, 4)):
            super().__init__()
            widths = [width * factor for factor in factors]
            self.first = nn.Conv2d(4, width, 3, padding=1)
            self.down = nn.ModuleList(Block(a, b) for a, b in zip([width, *widths], widths))
            self.middle = nn.ModuleList([Block(widths[-1], widths[-1]), Attention(widths[-1]), Block(widths[-1], widths[-1])])
            self.up = nn.ModuleList(Block(a + a, b) for a, b in zip(reversed(widths), [*reversed(widths[:-1]), width]))
            self.last = nn.Sequential(nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, 4, 3, padding=1))

        def forward(self, x):
            x, kept = self.first(x), []
            for block in self.down:
                kept.append(block(x))
                x = functional.avg_pool2d(kept[-1], 2)
            for block in self.middle:
                x = block(x)
            for block in self.up:
                x = block(torch.cat([functional.interpolate(x, scale_factor=2), kept.pop()], 1))
            return self.last(x)

    latents, noise = torch.randn(2, batch, 4, 64, 64, device="cuda")
    return UNet(), ("down.*", "middle.*", "up.*"), lambda model: functional.mse_loss(model(latents), noise)


def language_model(config_name, model_name, batch, length, blocks, vocabulary=32000, **settings):
    def make():
        import torch
        import transformers
        config = getattr(transformers, config_name)(**settings)
        model = getattr(transformers, model_name)(config)
        tokens = torch.randint(1, min(vocabulary, 32000), (batch, length), device="cuda")
        return model, blocks, lambda model: model(input_ids=tokens, labels=tokens, **({} if "MaskedLM" in model_name else {"use_cache": False})).loss
    return make


def whisper(batch):
    import torch
    import transformers
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(
        d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8, decoder_attention_heads=8, encoder_ffn_dim=2048,
        decoder_ffn_dim=2048, num_mel_bins=80))
    sound = torch.randn(batch, 80, 3000, device="cuda")
    labels = torch.randint(1000, (batch, 128), device="cuda")
    return model, ("model.encoder.layers.*", "model.decoder.layers.*"), \
        lambda model: model(input_features=sound, labels=labels, use_cache=False).loss


def lstm(batch):
    import torch
    from torch import nn

    class Language(nn.Module):
        def __init__(self, vocabulary=20000, width=1024):
            super().__init__()
            self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
            self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(3))

        def forward(self, tokens):
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)[0]
            return self.head(x)

    tokens = torch.randint(20000, (batch, 129), device="cuda")
    return Language(), ("layers.*",), lambda model: nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def recommender(batch):
    import torch
    from torch import nn

    class Recommender(nn.Module):
        def __init__(self, tables=26, rows=200_000, width=64):
            super().__init__()
            self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
            self.bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
            pairs = (tables + 1) * tables // 2
            self.top = nn.Sequential(nn.Linear(width + pairs, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1))
            self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))

        def forward(self, dense, sparse):
            x = self.bottom(dense)
            all = torch.stack([x, *(table(ids) for table, ids in zip(self.tables, sparse))], 1)
            products = torch.bmm(all, all.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
            return self.top(torch.cat([x, products], 1)).squeeze(1)

    dense, sparse = torch.randn(batch, 13, device="cuda"), torch.randint(200_000, (26, batch, 4), device="cuda")
    labels = torch.rand(batch, device="cuda")
    return Recommender(), ("bottom", "top"), lambda model: nn.functional.binary_cross_entropy_with_logits(model(dense, sparse), labels)


def graph_network(batch):
    import torch
    from torch import nn

    nodes, edges = batch, 10 * batch

    class Layer(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.own, self.other, self.norm = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)

        def forward(self, x, source, target):
            sums = torch.zeros_like(x).index_add(0, target, self.other(x)[source].to(x.dtype))
            return torch.relu(self.norm(self.own(x) + sums)) + x

    class Network(nn.Module):
        def __init__(self, width=256):
            super().__init__()
            self.first, self.layers, self.last = nn.Linear(128, width), nn.ModuleList(Layer(width) for _ in range(4)), nn.Linear(width, 40)

        def forward(self, x, source, target):
            x = self.first(x)
            for layer in self.layers:
                x = layer(x, source, target)
            return self.last(x)

    x, labels = torch.randn(nodes, 128, device="cuda"), torch.randint(40, (nodes,), device="cuda")
    source, target = torch.randint(nodes, (2, edges), device="cuda")
    return Network(), ("layers.*",), lambda model: nn.functional.cross_entropy(model(x, source, target), labels)


def encoder(batch):
    import torch
    from torch import nn
    layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
    x = torch.randn(batch, 512, 768, device="cuda")
    return model, ("layers.*",), lambda model: model(x).square().mean()


def autoencoder(batch):
    import torch
    from torch import nn

    def down(before, after):
        return nn.Sequential(nn.Conv2d(before, after, 4, stride=2, padding=1), nn.BatchNorm2d(after), nn.LeakyReLU(0.2))

    def up(before, after):
        return nn.Sequential(nn.ConvTranspose2d(before, after, 4, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU())

    model = nn.Sequential(down(3, 64), down(64, 128), down(128, 256), down(256, 512), up(512, 256), up(256, 128), up(128, 64),
                          nn.ConvTranspose2d(64, 3, 4, stride=2, padding=1))
    images = torch.randn(batch, 3, 128, 128, device="cuda")
    return model, ("[0-6]",), lambda model: nn.functional.mse_loss(model(images), images)


def volume_unet(batch):
    import torch
    from torch import nn

    def block(before, after):
        return nn.Sequential(nn.Conv3d(before, after, 3, padding=1), nn.InstanceNorm3d(after), nn.LeakyReLU(),
                             nn.Conv3d(after, after, 3, padding=1), nn.InstanceNorm3d(after), nn.LeakyReLU())

    class UNet(nn.Module):
        def __init__(self, widths=(32, 64, 128, 256)):
            super().__init__()
            self.down = nn.ModuleList(block(a, b) for a, b in zip((1, *widths), widths))
            self.rise = nn.ModuleList(nn.ConvTranspose3d(a, b, 2, stride=2) for a, b in zip(widths[:0:-1], widths[-2::-1]))
            self.up = nn.ModuleList(block(2 * width, width) for width in widths[-2::-1])
            self.last = nn.Conv3d(widths[0], 3, 1)

        def forward(self, x):
            kept = []
            for block in self.down:
                x = block(x)
                kept.append(x)
                x = nn.functional.max_pool3d(x, 2) if len(kept) < len(self.down) else x
            kept.pop()
            for rise, block in zip(self.rise, self.up):
                x = block(torch.cat([rise(x), kept.pop()], 1))
            return self.last(x)

    scans, labels = torch.randn(batch, 1, 96, 96, 96, device="cuda"), torch.randint(3, (batch, 96, 96, 96), device="cuda")
    return UNet(), ("down.*", "up.*"), lambda model: nn.functional.cross_entropy(model(scans), labels)


def point_network(batch):
    import torch
    from torch import nn

    class PointNet(nn.Module):
        def __init__(self, widths=(64, 128, 256, 1024)):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU()) for a, b in zip((3, *widths), widths))
            self.last = nn.Sequential(nn.Linear(widths[-1], 512), nn.ReLU(), nn.Linear(512, 40))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.last(x.max(2)[0])

    points, labels = torch.randn(batch, 3, 4096, device="cuda"), torch.randint(40, (batch,), device="cuda")
    return PointNet(), ("layers.*",), lambda model: nn.functional.cross_entropy(model(points), labels)


def mixer(batch):
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, tokens, width):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.tokens = nn.Sequential(nn.Linear(tokens, tokens * 2), nn.GELU(), nn.Linear(tokens * 2, tokens))
            self.channels = nn.Sequential(nn.Linear(width, width * 4), nn.GELU(), nn.Linear(width * 4, width))

        def forward(self, x):
            x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
            return x + self.channels(self.norm2(x))

    class Mixer(nn.Module):
        def __init__(self, width=768):
            super().__init__()
            self.patches, self.blocks = nn.Conv2d(3, width, 16, stride=16), nn.ModuleList(Block(196, width) for _ in range(12))
            self.last = nn.Linear(width, 1000)

        def forward(self, x):
            x = self.patches(x).flatten(2).transpose(1, 2)
            for block in self.blocks:
                x = block(x)
            return self.last(x.mean(1))

    images, labels = torch.randn(batch, 3, 224, 224, device="cuda"), torch.randint(1000, (batch,), device="cuda")
    return Mixer(), ("blocks.*",), lambda model: nn.functional.cross_entropy(model(images), labels)


def field_of_light(batch):
    import torch
    from torch import nn
    widths = [60] + [256] * 8
    model = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in zip(widths, widths[1:])), nn.Linear(256, 4))
    rays, colours = torch.randn(batch, 60, device="cuda"), torch.rand(batch, 4, device="cuda")
    return model, ("[0-7]",), lambda model: nn.functional.mse_loss(model(rays), colours)


def translation(batch):
    import torch
    from torch import nn

    class Translation(nn.Module):
        def __init__(self, vocabulary=16000, width=512):
            super().__init__()
            self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
            self.transformer = nn.Transformer(width, 8, 6, 6, 2048, batch_first=True)

        def forward(self, source, target):
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device="cuda")
            return self.head(self.transformer(self.embedding(source), self.embedding(target), tgt_mask=mask))

    source, target = torch.randint(16000, (2, batch, 129), device="cuda")
    return Translation(), ("transformer.encoder.layers.*", "transformer.decoder.layers.*"), \
        lambda model: nn.functional.cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())


def dilated_convolutions(batch):
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width, dilation):
            super().__init__()
            self.convolution = nn.Conv1d(width, 2 * width, 3, padding=dilation, dilation=dilation)
            self.output = nn.Conv1d(width, width, 1)

        def forward(self, x):
            return x + self.output(nn.functional.glu(self.convolution(x), 1))

    model = nn.Sequential(nn.Conv1d(1, 128, 1), *(Block(128, 2 ** (i % 10)) for i in range(20)), nn.Conv1d(128, 256, 1))
    sound, labels = torch.randn(batch, 1, 16000, device="cuda"), torch.randint(256, (batch, 16000), device="cuda")
    return model, ("[1-9]", "1[0-9]", "20"), lambda model: nn.functional.cross_entropy(model(sound), labels)


def gru(batch):
    import torch
    from torch import nn

    class Tagger(nn.Module):
        def __init__(self, width=512):
            super().__init__()
            self.embedding = nn.Embedding(30000, width)
            self.layers = nn.GRU(width, width, 2, batch_first=True, bidirectional=True)
            self.head = nn.Linear(2 * width, 64)

        def forward(self, tokens):
            return self.head(self.layers(self.embedding(tokens))[0])

    tokens, labels = torch.randint(30000, (batch, 256), device="cuda"), torch.randint(64, (batch, 256), device="cuda")
    return Tagger(), ("head",), lambda model: nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def clip(batch):
    import torch
    import transformers
    model = transformers.CLIPModel(transformers.CLIPConfig())
    images, tokens = torch.randn(batch, 3, 224, 224, device="cuda"), torch.randint(1, 49000, (batch, 77), device="cuda")
    return model, ("vision_model.encoder.layers.*", "text_model.encoder.layers.*"), \
        lambda model: model(input_ids=tokens, pixel_values=images, return_loss=True).loss


def speech(batch):
    import torch
    import transformers
    model = transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(apply_spec_augment=False, layerdrop=0.0))
    sound, labels = torch.randn(batch, 160000, device="cuda"), torch.randint(1, 31, (batch, 60), device="cuda")
    return model, ("wav2vec2.encoder.layers.*",), lambda model: model(sound, labels=labels).loss


def segformer(batch):
    import torch
    import transformers
    model = transformers.SegformerForSemanticSegmentation(transformers.SegformerConfig(num_labels=20))
    images, labels = torch.randn(batch, 3, 512, 512, device="cuda"), torch.randint(20, (batch, 512, 512), device="cuda")
    return model, ("segformer.stages.*.blocks.*", "segformer.encoder.block.*.*"), lambda model: model(pixel_values=images, labels=labels).loss


def mvit(batch):
    import torch
    import torchvision
    model = torchvision.models.video.mvit_v2_s(weights=None)
    clips, labels = torch.randn(batch, 3, 16, 224, 224, device="cuda"), torch.randint(400, (batch,), device="cuda")
    return model, ("blocks.*",), lambda model: torch.nn.functional.cross_entropy(model(clips), labels)


RESNET = ("layer1.*", "layer2.*", "layer3.*", "layer4.*")
LAYERS = ("model.layers.*",)
PROGRAMS = {
    "resnet50": image_program("resnet50", 128, 224, RESNET),
    "resnext50": image_program("resnext50_32x4d", 96, 224, RESNET),
    "densenet121": image_program("densenet121", 64, 224, ("features.denseblock*",)),
    "mobilenet_v3_large": image_program("mobilenet_v3_large", 192, 224, ("features.*",)),
    "efficientnet_v2_s": image_program("efficientnet_v2_s", 64, 288, ("features.[1-6].*",)),
    "regnet_y_8gf": image_program("regnet_y_8gf", 64, 224, ("trunk_output.block*.*",)),
    "convnext_tiny": image_program("convnext_tiny", 64, 224, ("features.1.*", "features.3.*", "features.5.*", "features.7.*")),
    "vit_b_16": image_program("vit_b_16", 96, 224, ("encoder.layers.*",)),
    "swin_t": image_program("swin_t", 96, 224, ("features.1.*", "features.3.*", "features.5.*", "features.7.*")),
    "maxvit_t": image_program("maxvit_t", 48, 224, ("blocks.*.layers.*",)),
    "fcn_resnet50": functools.partial(segmentation, 12),
    "r3d_18": functools.partial(video, 24),
    "diffusion_unet": functools.partial(diffusion_unet, 32),
    "gpt2": language_model("GPT2Config", "GPT2LMHeadModel", 12, 1024, ("transformer.h.*",)),
    "bert": language_model("BertConfig", "BertForMaskedLM", 32, 512, ("bert.encoder.layer.*",), vocabulary=30000),
    "llama": language_model("LlamaConfig", "LlamaForCausalLM", 4, 2048, LAYERS, hidden_size=1024, intermediate_size=2816,
                                        num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=4, vocab_size=32000),
    "qwen3": language_model("Qwen3Config", "Qwen3ForCausalLM", 4, 2048, LAYERS, hidden_size=1024, intermediate_size=3072,
                                        num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=8, head_dim=64, vocab_size=32000),
    "mixtral": language_model("MixtralConfig", "MixtralForCausalLM", 4, 1024, LAYERS, hidden_size=1024, intermediate_size=2048,
                                          num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=4, num_local_experts=8,
                                          vocab_size=32000),
    "t5": language_model("T5Config", "T5ForConditionalGeneration", 32, 256, ("encoder.block.*", "decoder.block.*"),
                                      d_model=512, decoder_start_token_id=0),
    "whisper": functools.partial(whisper, 16),
    "encoder": functools.partial(encoder, 48),
    "lstm": functools.partial(lstm, 64),
    "recommender": functools.partial(recommender, 16384),
    "graph_network": functools.partial(graph_network, 100_000),
    # The second measurement, of programs that no rule and no fit had seen.
    "vgg16": image_program("vgg16", 64, 224, ("features.*",)),
    "efficientnet_b0": image_program("efficientnet_b0", 128, 224, ("features.[1-7].*",)),
    "shufflenet": image_program("shufflenet_v2_x1_0", 256, 224, ("stage2.*", "stage3.*", "stage4.*")),
    "mnasnet": image_program("mnasnet1_0", 128, 224, ("layers.*",)),
    "convnext_base": image_program("convnext_base", 48, 224, ("features.1.*", "features.3.*", "features.5.*", "features.7.*")),
    "swin_v2_t": image_program("swin_v2_t", 64, 256, ("features.1.*", "features.3.*", "features.5.*", "features.7.*")),
    "vit_l_16": image_program("vit_l_16", 32, 224, ("encoder.layers.*",)),
    "wide_resnet50": image_program("wide_resnet50_2", 96, 224, RESNET),
    "mvit_v2_s": functools.partial(mvit, 8),
    "opt": language_model("OPTConfig", "OPTForCausalLM", 8, 1024, ("model.decoder.layers.*",), hidden_size=1024, ffn_dim=4096,
                          num_hidden_layers=12, num_attention_heads=16, word_embed_proj_dim=1024),
    "gemma2": language_model("Gemma2Config", "Gemma2ForCausalLM", 2, 2048, LAYERS, hidden_size=1024, intermediate_size=4096,
                             num_hidden_layers=10, num_attention_heads=8, num_key_value_heads=4, head_dim=128, vocab_size=32000),
    "deberta": language_model("DebertaV2Config", "DebertaV2ForMaskedLM", 16, 512, ("deberta.encoder.layer.*",), hidden_size=768,
                              intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, vocab_size=32000,
                              relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=256, share_att_key=True),
    "llama_long": language_model("LlamaConfig", "LlamaForCausalLM", 1, 8192, LAYERS, hidden_size=1024, intermediate_size=2816,
                                 num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=8, vocab_size=32000),
    "clip": functools.partial(clip, 96),
    "wav2vec2": functools.partial(speech, 8),
    "segformer": functools.partial(segformer, 16),
    "gru": functools.partial(gru, 128),
    "autoencoder": functools.partial(autoencoder, 256),
    "volume_unet": functools.partial(volume_unet, 2),
    "point_network": functools.partial(point_network, 64),
    "mixer": functools.partial(mixer, 96),
    "field_of_light": functools.partial(field_of_light, 262144),
    "translation": functools.partial(translation, 64),
    "dilated_convolutions": functools.partial(dilated_convolutions, 16),
}


def checkpoint_blocks(model, patterns):
    import fnmatch

    from torch.utils.checkpoint import checkpoint
    chosen = [(path, module) for path, module in model.named_modules()
              if any(fnmatch.fnmatchcase(path, pattern) and path.count(".") == pattern.count(".") for pattern in patterns)]
    assert chosen, patterns
    for _, module in chosen:
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
    return len(chosen)


def make_step(program, plan):
    """A function that makes one optimizer step of the training."""
    import torch
    torch.manual_seed(0)
    with torch.device("cuda"):
        model, blocks, loss_of = PROGRAMS[program]()
    model.train()
    if plan.startswith("checkpoint"):
        checkpoint_blocks(model, blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step():
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=plan.endswith("bf16")):
            loss = loss_of(model)
        loss.backward()
        optimizer.step()

    return step


def measure(program, plan):
    import torch
    step = make_step(program, plan)
    for _ in range(WARM_UP):
        step()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    torch.cuda.synchronize()
    began = time.perf_counter()
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    queued = time.perf_counter() - began
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    stats = torch.cuda.memory_stats()
    return {"program": program, "plan": plan, "allocated_bytes": stats["allocated_bytes.all.peak"],
            "reserved_bytes": stats["reserved_bytes.all.peak"],
            "non_pytorch_bytes": total - free - stats["reserved_bytes.all.current"],
            "step_ms": round(statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:])), 3),
            "queued_ms": round(1000 * queued / STEPS, 3)}


def in_child(program, plan, report):
    """Calls `report` in the child with what was measured, or with {"error": …}."""
    child = os.fork()
    if child == 0:
        try:
            measured = measure(program, plan)
        except Exception as error:  # the others shall run
            measured = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
        report(measured)
        sys.stdout.flush()
        sys.exit(0)
    os.waitpid(child, 0)


def main():
    import torch  # noqa: F401, once, for all children
    import torchvision  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("programs", nargs="*")
    arguments = parser.parse_args()
    if arguments.programs and arguments.programs[0].endswith(".json"):
        measure_rows(arguments.programs[0])
        return
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    sys.stdout.flush()
    for program in arguments.programs or PROGRAMS:
        for plan in arguments.plans.split(","):
            in_child(program, plan, lambda measured: print({"program": program, "plan": plan, **measured}, file=sys.stderr)
                     if "error" in measured else writer.writerow(measured))


def measure_rows(file):
    """For test_truth.py."""
    rows = {}
    for row in json.load(open(file)):
        rows.setdefault((row["program"], row["plan"]), []).append(row)
    for (program, plan), wanted in rows.items():
        def report(measured):
            for row in wanted:
                figure = {"error": measured["error"]} if "error" in measured else {"mib": measured[row["figure"]] / MIB}
                print(json.dumps({"row": row["row"], **figure}), flush=True)
        in_child(program, plan, report)


if __name__ == "__main__":
    main()
