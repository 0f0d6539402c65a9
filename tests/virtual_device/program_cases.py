"""Cases of test_device.py that are whole programs, small: training steps of public model zoos, compiled models, capture, allocator settings."""

from device_cases import MIB, Skip, case, expect, expect_equal, load_optional, main


def train_all(models):
    """Two steps of SGD for each of {name: (make_model, make_arguments)}; all failures in one error."""
    import torch

    failures = []
    for name, (make_model, make_arguments) in models.items():
        try:
            model = make_model().cuda().train()
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            for _ in range(2):
                loss_of(model(**make_arguments())).backward()
                optimizer.step()
                optimizer.zero_grad()
        except Exception as error:  # noqa: BLE001, any failure is one
            failures.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        model = optimizer = None
        torch.cuda.empty_cache()
    expect(not failures, "; ".join(failures))


def loss_of(output):
    import torch

    if isinstance(output, torch.Tensor):
        return output.sum()
    if getattr(output, "loss", None) is not None:
        return output.loss
    values = output.values() if isinstance(output, dict) else output
    return sum(value.sum() for value in values if isinstance(value, torch.Tensor) and value.requires_grad)


# torchvision.

IMAGE_MODELS = {
    "resnet18": 64,
    "vit_b_16": 224,
    "swin_t": 64,
    "swin_v2_t": 64,
    "efficientnet_b0": 64,
    "convnext_tiny": 64,
    "mobilenet_v3_small": 64,
    "densenet121": 64,
    "maxvit_t": 224,
    "regnet_y_400mf": 64,
    "squeezenet1_1": 64,
    "shufflenet_v2_x0_5": 64,
    "mnasnet0_5": 64,
    "vgg11": 64,
    "alexnet": 64,
}


def image_model(zoo, name, size):
    import torch

    return lambda: getattr(zoo, name)(weights=None), lambda: {"x": torch.randn(2, 3, size, size, device="cuda")}


@case(group="slow")
def image_models_train():
    import torch

    zoo = load_optional("torchvision").models
    models = {name: image_model(zoo, name, size) for name, size in IMAGE_MODELS.items()}
    images = torch.randn(2, 3, 299, 299, device="cuda")
    models["inception_v3"] = (lambda: zoo.inception_v3(weights=None, init_weights=False), lambda: {"x": images})
    for name, argument in (("deeplabv3_mobilenet_v3_large", "x"), ("lraspp_mobilenet_v3_large", "input")):
        make = getattr(zoo.segmentation, name)
        models[name] = (lambda make=make: make(weights=None, weights_backbone=None), lambda argument=argument: {argument: images})
    models["r3d_18"] = (lambda: zoo.video.r3d_18(weights=None), lambda: {"x": torch.randn(1, 3, 8, 64, 64, device="cuda")})
    train_all(models)


DETECTORS = (
    "fasterrcnn_resnet50_fpn",
    "maskrcnn_resnet50_fpn",
    "keypointrcnn_resnet50_fpn",
    "retinanet_resnet50_fpn",
    "ssd300_vgg16",
    "fcos_resnet50_fpn",
)


@case(group="slow")
def detection_models_run():
    import torch

    zoo = load_optional("torchvision").models.detection
    images = [torch.rand(3, 128, 128, device="cuda") for _ in range(2)]
    target = {
        "boxes": torch.tensor([[10.0, 10, 50, 50], [20, 20, 90, 90]], device="cuda"),
        "labels": torch.tensor([1, 2], device="cuda"),
        "masks": torch.ones(2, 128, 128, device="cuda", dtype=torch.uint8),
        "keypoints": torch.ones(2, 17, 3, device="cuda"),
    }
    train_all({name: (lambda make=getattr(zoo, name): make(weights=None, weights_backbone=None, num_classes=5), lambda: {"images": images, "targets": [target] * 2}) for name in DETECTORS})
    for name in DETECTORS:
        getattr(zoo, name)(weights=None, weights_backbone=None, num_classes=5).cuda().eval()(images)


# transformers, from configurations: nothing is downloaded.


def language_models(transformers):
    import torch

    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000}
    tokens = torch.zeros(2, 64, dtype=torch.long, device="cuda")
    both = {"input_ids": tokens, "labels": tokens}
    sound = {"input_features": torch.randn(1, 80, 3000, device="cuda"), "labels": tokens[:1]}

    def causal(kind, **options):
        configuration = getattr(transformers, kind + "Config")(**small, **options)
        return lambda: getattr(transformers, kind + "ForCausalLM")(configuration), lambda: both

    def checkpointed():
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_head=4, n_embd=64, vocab_size=1000))
        model.gradient_checkpointing_enable()
        return model

    t5 = transformers.T5Config(d_model=64, d_ff=128, num_layers=2, num_heads=4, vocab_size=1000, decoder_start_token_id=0, pad_token_id=0)
    heads = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    whisper = transformers.WhisperConfig(d_model=64, encoder_ffn_dim=128, decoder_ffn_dim=128, vocab_size=1000, **heads, **ends)
    return {
        "llama": causal("Llama", num_key_value_heads=2),
        "qwen2": causal("Qwen2", num_key_value_heads=2),
        "mixtral": causal("Mixtral", num_key_value_heads=2, num_local_experts=4),
        "t5": (lambda: transformers.T5ForConditionalGeneration(t5), lambda: both),
        "whisper": (lambda: transformers.WhisperForConditionalGeneration(whisper), lambda: sound),
        "bert": (lambda: transformers.BertForMaskedLM(transformers.BertConfig(**small)), lambda: both),
        "gpt2 with gradient checkpointing": (checkpointed, lambda: both),
    }


@case(group="slow")
def language_models_train():
    transformers = load_optional("transformers")
    transformers.logging.set_verbosity_error()
    train_all(language_models(transformers))


@case()
def a_language_model_generates_to_the_end():
    import torch

    transformers = load_optional("transformers")
    transformers.logging.set_verbosity_error()
    configuration = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=1000, bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model = transformers.GPT2LMHeadModel(configuration).cuda().eval()
    tokens = model.generate(torch.tensor([[5, 6, 7], [8, 9, 10]]).cuda(), max_new_tokens=5, do_sample=False)
    expect_equal(tokens.shape, (2, 8), "the shape of what was generated")


# torch.compile: TorchInductor, Triton and its own look at the driver.


def compiled(make_model, make_input, **options):
    import torch

    model = torch.compile(make_model().cuda(), **options)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        model(make_input()).sum().backward()
        model.zero_grad()
    torch.cuda.synchronize()


def small_net():
    from torch import nn

    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.LayerNorm(128), nn.Linear(128, 10))


def rows():
    import torch

    return torch.randn(8, 64, device="cuda")


@case(group="slow", TORCHINDUCTOR_COMPILE_THREADS="1")
def compiled_models_train():
    import torch
    from torch import nn

    compiled(small_net, rows)
    compiled(small_net, rows, mode="max-autotune-no-cudagraphs")
    convolutions = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 30 * 30, 10))
    compiled(lambda: convolutions, lambda: torch.randn(4, 3, 32, 32, device="cuda"))


@case(group="slow", TORCHINDUCTOR_COMPILE_THREADS="1")
def compiled_models_train_in_graphs():
    compiled(small_net, rows, mode="reduce-overhead")
    compiled(small_net, rows, mode="max-autotune")


@case(group="slow", TORCHINDUCTOR_COMPILE_THREADS="1")
def flexible_attention_is_compiled():
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query = torch.randn(1, 4, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mask = create_block_mask(lambda batch, head, left, right: left >= right, None, None, 256, 256)
    torch.compile(flex_attention)(query, query, query, block_mask=mask).sum().backward()
    expect_equal(query.grad.shape, query.shape)


# The allocator.


@case()
def memory_pools_keep_their_memory_apart():
    import torch

    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
    outside = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
    in_pool = sum(segment["total_size"] for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) == tuple(pool.id))
    expect_equal(in_pool, 32 * MIB, "the pool's segments")
    del inside, outside


@case()
def graphs_share_a_pool():
    import torch

    layer = small_net().cuda()
    x = rows()
    layer(x)
    torch.cuda.synchronize()
    pool = torch.cuda.graph_pool_handle()
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph in graphs:  # the first must live while the second is captured: it holds the pool
        with torch.cuda.graph(graph, pool=pool):
            layer(x)
        graph.replay()
    made = torch.cuda.make_graphed_callables(layer, (x,))
    made(x).sum().backward()


@case()
def optimizers_of_every_kind_step():
    import torch

    kinds = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.LBFGS]
    for kind in kinds:
        model = small_net().cuda()
        optimizer = kind(model.parameters())

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(rows()).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    for options in ({"foreach": True}, {"fused": True}, {"capturable": True}, {"foreach": False}):
        model = small_net().cuda()
        model(rows()).sum().backward()
        torch.optim.AdamW(model.parameters(), **options).step()


@case()
def pytorchs_own_history_and_observers_work():
    import torch

    heard = []
    torch.cuda.memory._record_memory_history()
    torch._C._cuda_attach_out_of_memory_observer(lambda *facts: heard.append(facts))
    block = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
    try:
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        pass
    actions = [entry["action"] for entry in torch.cuda.memory._snapshot()["device_traces"][0]]
    torch.cuda.memory._record_memory_history(None)
    expect("alloc" in actions and actions[-1] == "oom", f"the history ends with {actions[-3:]}")
    expect_equal(len(heard), 1, "how often the observer was called")
    expect(torch.cuda.memory_stats()["num_ooms"] >= 1, "the statistics count no OOM")
    del block


@case()
def the_profiler_runs():
    import os

    import torch

    if "libcupti" not in os.environ["LD_PRELOAD"]:
        raise Skip("no virtual CUPTI is preloaded, and the real one does not end in a process with this driver")
    with torch.profiler.profile() as profile:
        rows() @ rows().t()
    expect(len(profile.events()) > 0, "no events")


if __name__ == "__main__":
    main()
