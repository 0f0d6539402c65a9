"""Programs of many architectures, for the claims that a report makes of them (test_batch_line.py):

    python architectures.py NAME BATCH

None of them was looked at while the rules were written.
"""
import sys

import torch
from torch import nn
from torch.nn import functional

from fit_programs import classes, images, tokens, train

PROGRAMS = {}
LENGTH = 64


def of_torchvision(name, size):
    def program(batch):
        import torchvision

        model = getattr(torchvision.models, name)(weights=None, num_classes=10)

        def loss(model, _):
            found = model(images(batch, size))
            return functional.cross_entropy(getattr(found, "logits", found), classes(batch))

        train(model, loss, torch.optim.SGD, lr=0.1, momentum=0.9)
    PROGRAMS[name] = program


for _name, _size in {"resnet50": 64, "densenet121": 64, "efficientnet_b0": 64, "convnext_tiny": 64, "swin_t": 64, "regnet_y_400mf": 64,
                     "squeezenet1_1": 64, "shufflenet_v2_x1_0": 64, "vgg11_bn": 64, "mnasnet0_5": 64, "vit_b_32": 224}.items():
    of_torchvision(_name, _size)


SMALL = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512, "vocab_size": 2000}


def of_transformers(name, config, kind="ForCausalLM", **options):
    def program(batch):
        import transformers

        made = getattr(transformers, config)(**{**SMALL, **options})
        model = getattr(transformers, f"AutoModel{kind}").from_config(made)

        def loss(model, _):
            ids = tokens(batch, LENGTH)
            return model(input_ids=ids, labels=classes(batch, 2) if "Classification" in kind else ids).loss

        train(model, loss)
    PROGRAMS[name] = program


of_transformers("roberta", "RobertaConfig", "ForMaskedLM")
of_transformers("albert", "AlbertConfig", "ForSequenceClassification", embedding_size=128)
of_transformers("electra", "ElectraConfig", "ForSequenceClassification", embedding_size=128)
of_transformers("opt", "OPTConfig", ffn_dim=512, word_embed_proj_dim=256)
of_transformers("pythia", "GPTNeoXConfig")
of_transformers("qwen2", "Qwen2Config", num_key_value_heads=2)
of_transformers("mistral", "MistralConfig", num_key_value_heads=2)
of_transformers("t5", "T5Config", "ForSeq2SeqLM", d_model=256, num_layers=4, num_heads=4, d_ff=512,
                decoder_start_token_id=0)
of_transformers("bart", "BartConfig", "ForSeq2SeqLM", d_model=256, encoder_layers=3, decoder_layers=3, encoder_ffn_dim=512,
                decoder_ffn_dim=512, encoder_attention_heads=4, decoder_attention_heads=4)


def program(function):
    PROGRAMS[function.__name__] = function
    return function


@program
def autoencoder(batch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 1024), nn.ReLU(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 1024), nn.ReLU(),
                          nn.Linear(1024, 3072))

    def loss(model, _):
        data = images(batch, 32)
        return functional.mse_loss(model(data), data.flatten(1))

    train(model, loss)


@program
def volumes(batch):
    model = nn.Sequential(nn.Conv3d(1, 16, 3, padding=1), nn.BatchNorm3d(16), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(16, 32, 3, padding=1),
                          nn.ReLU(), nn.Upsample(scale_factor=2), nn.Conv3d(32, 2, 1))

    def loss(model, _):
        data = torch.randn(batch, 1, 16, 32, 32, device="cuda")
        return functional.cross_entropy(model(data), torch.randint(0, 2, (batch, 16, 32, 32), device="cuda"))

    train(model, loss, torch.optim.Adam)


@program
def gan(batch):
    critic = nn.Sequential(nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(64, 128, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(),
                           nn.Linear(128 * 64, 1)).cuda()
    generator = nn.Sequential(nn.ConvTranspose2d(64, 128, 8), nn.BatchNorm2d(128), nn.ReLU(), nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.ReLU(),
                              nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh()).cuda()
    of_critic, of_generator = (torch.optim.Adam(model.parameters(), 2e-4) for model in (critic, generator))
    for _ in range(3):
        made = generator(torch.randn(batch, 64, 1, 1, device="cuda"))
        of_critic.zero_grad()
        (critic(made.detach()).mean() - critic(images(batch, 32)).mean()).backward()
        of_critic.step()
        of_generator.zero_grad()
        (-critic(made).mean()).backward()
        of_generator.step()


@program
def waves(batch):
    layers = [nn.Conv1d(1, 32, 7, padding=3)]
    for dilation in (1, 2, 4, 8, 16):
        layers += [nn.Conv1d(32, 32, 3, padding=dilation, dilation=dilation), nn.GroupNorm(4, 32), nn.GELU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 10))
    train(model, lambda model, _: functional.cross_entropy(model(torch.randn(batch, 1, 4000, device="cuda")), classes(batch)))


@program
def encoder_of_torch(batch):
    model = nn.Sequential(nn.Embedding(1000, 256), nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4, 512, batch_first=True), 4),
                          nn.Linear(256, 1000))

    def loss(model, _):
        ids = tokens(batch, LENGTH)
        return functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    train(model, loss)


@program
def pairs(batch):
    """Contrastive: every sample against every other."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 512), nn.ReLU(), nn.Linear(512, 128))

    def loss(model, _):
        one, other = (functional.normalize(model(images(batch, 32))) for _ in range(2))
        return functional.cross_entropy(one @ other.T / 0.1, torch.arange(batch, device="cuda"))

    train(model, loss)


@program
def points(batch):
    model = nn.Sequential(nn.Conv1d(3, 64, 1), nn.BatchNorm1d(64), nn.ReLU(), nn.Conv1d(64, 256, 1), nn.BatchNorm1d(256), nn.ReLU(),
                          nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(256, 10))
    train(model, lambda model, _: functional.cross_entropy(model(torch.randn(batch, 3, 1024, device="cuda")), classes(batch)))


@program
def ratings(batch):
    users, items = nn.Embedding(20000, 64), nn.Embedding(5000, 64)

    def loss(model, _):
        found = (model[0](tokens(batch * 256, most=20000)) * model[1](tokens(batch * 256, most=5000))).sum(1)
        return functional.mse_loss(found, torch.rand(batch * 256, device="cuda"))

    train(nn.ModuleList([users, items]), loss)


@program
def accumulated(batch):
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                          nn.Linear(64, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(8):
        (functional.cross_entropy(model(images(batch, 32)), classes(batch)) / 4).backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](int(sys.argv[2]))
