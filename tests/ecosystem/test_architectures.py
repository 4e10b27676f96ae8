"""Models of transformers, tiny: each trains under amp-core to the last bit as under torch.autocast."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_core
from amp_core import OpPolicy, PolicyError

from ..drawn import programs

hf = pytest.importorskip("transformers", reason="transformers is not installed; tox -e ecosystem installs it")

TEXT = {"input_ids": torch.arange(2, 34).reshape(2, 16)}
BOTH = {**TEXT, "decoder_input_ids": TEXT["input_ids"][:, :8]}
IMAGE = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)}
SOUND = {"input_features": torch.linspace(-1, 1, 2 * 16 * 64).reshape(2, 16, 64), **BOTH}
del SOUND["input_ids"]

WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
CAUSAL = {**WIDTHS, "vocab_size": 64, "num_key_value_heads": 2}
SEQUENCES = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 64,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 0}

MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "bert": (lambda: hf.BertModel(hf.BertConfig(vocab_size=64, **WIDTHS)), TEXT),
    "gpt2": (lambda: hf.GPT2Model(hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)), TEXT),
    "gpt_neo": (
        lambda: hf.GPTNeoModel(
            hf.GPTNeoConfig(
                vocab_size=64,
                hidden_size=32,
                num_layers=2,
                num_heads=4,
                attention_types=[[["global", "local"], 1]],
                window_size=8,
            )
        ),
        TEXT,
    ),
    "llama": (lambda: hf.LlamaModel(hf.LlamaConfig(**CAUSAL)), TEXT),
    "mixtral": (lambda: hf.MixtralModel(hf.MixtralConfig(num_local_experts=4, **CAUSAL)), TEXT),
    "mamba": (
        lambda: hf.MambaModel(
            hf.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
        ),
        TEXT,
    ),
    "t5": (
        lambda: hf.T5Model(
            hf.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, **SPECIAL)
        ),
        BOTH,
    ),
    "bart": (lambda: hf.BartModel(hf.BartConfig(**SEQUENCES, **SPECIAL)), BOTH),
    "whisper": (
        lambda: hf.WhisperModel(
            hf.WhisperConfig(num_mel_bins=16, max_source_positions=32, **SEQUENCES, **SPECIAL)
        ),
        SOUND,
    ),
    "vit": (lambda: hf.ViTModel(hf.ViTConfig(image_size=32, patch_size=8, **WIDTHS)), IMAGE),
    "resnet": (
        lambda: hf.ResNetModel(hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])),
        IMAGE,
    ),
}


def results(
    model: nn.Module, inputs: dict[str, Tensor], region: AbstractContextManager[Any]
) -> list[Tensor | None]:
    """Return the loss and all gradients of a training step, whose dropout is always the same."""
    model.zero_grad()
    torch.manual_seed(1)
    with region:
        outputs = model(**inputs)
    floating = [o for o in outputs.values() if isinstance(o, Tensor) and o.requires_grad]
    loss = torch.stack([o.float().square().mean() for o in floating]).sum()
    loss.backward()
    return [loss.detach(), *[None if p.grad is None else p.grad.clone() for p in model.parameters()]]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scope", ["none", "cached_casts", "master_weights", "record"])
def test_a_training_step_is_the_same(name: str, scope: str) -> None:
    """An architecture uses weights, views or ops in a way that regions or scopes do not expect."""
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model = make().train()
    expected = results(model, inputs, torch.autocast("cpu", torch.bfloat16))
    around = nullcontext() if scope == "none" else getattr(amp_core, scope)(model)
    with around:
        for _ in range(2):
            ours = results(model, inputs, amp_core.autocast("cpu", torch.bfloat16))
            for one, other in zip(expected, ours, strict=True):
                assert (one is None) == (other is None)
                assert one is None or torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")  # it has a new name
@pytest.mark.parametrize("name", MODELS)
def test_repeated_layers_keep_the_policy(name: str) -> None:
    """Gradient checkpointing repeats layers by torch's own rules, and the gradients are others."""
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model = make().train()
    if not model.supports_gradient_checkpointing:
        pytest.skip(f"{type(model).__name__} has no gradient checkpointing")
    policy = OpPolicy.default("cpu").override({"linear": "recipe mxfp8", "addmm": "fp32", "silu": "fp32"})
    region = amp_core.autocast("cpu", policy=policy)
    wanted = results(model, inputs, region)
    again = {"use_reentrant": False, "context_fn": amp_core.checkpoint_contexts}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=again)
    assert same(results(model, inputs, region), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_an_unmodified_model_is_not_called_faulty(name: str, dtype: torch.dtype) -> None:
    """`compare` names a culprit in a model whose loss and gradients are right, and `advise` slows it down."""
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model = make().eval()

    def step() -> Tensor:
        outputs = model(**inputs)
        floating = [o for o in outputs.values() if isinstance(o, Tensor) and o.requires_grad]
        # A target: the mean square of a layer norm's output alone is constant, and its gradient noise.
        errors = [o.float() - torch.linspace(-1, 1, o.numel()).view_as(o) for o in floating]
        return torch.stack([error.square().mean() for error in errors]).sum()

    scale = 1024.0 if dtype is torch.float16 else 1.0
    comparison = amp_core.compare(step, "cpu", dtype=dtype, model=model, scale=scale)
    assert comparison.leads() == []
    assert comparison.loss_error < 0.01


SIZES: dict[str, Any] = {
    name: size
    for size, names in {
        1: "bos_token_id",
        2: "n_layer n_layers num_layers num_hidden_layers num_key_value_heads encoder_layers decoder_layers",
        4: "n_head n_heads num_heads num_attention_heads encoder_attention_heads decoder_attention_heads "
        "num_experts num_local_experts state_size",
        8: "d_kv head_dim patch_size",
        32: "d_model dim embed_dim embedding_size hidden_size image_size moe_intermediate_size n_embd",
        64: "d_ff encoder_ffn_dim decoder_ffn_dim hidden_dim intermediate_size max_position_embeddings "
        "vocab_size",
    }.items()
    for name in names.split()
}
SIZES |= {"pad_token_id": 0, "eos_token_id": 2, "hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 1, 1]}
OPS = ["add", "bmm", "cat", "conv2d", "gelu", "layer_norm", "linear", "matmul", "mean", "mul", "pow", "rsqrt"]
OPS += ["scaled_dot_product_attention", "sigmoid", "silu", "softmax", "sum", "tanh", "where"]
RULES = ["fp32", "low_in_fp32_out", "lower_precision_fp", "lower_precision_fp above 20 kFLOP", "promote"]


def shrunk(config: Any) -> Any:
    """Set the sizes that `config` and the configurations within it have."""
    for name, value in vars(config).items():
        size = SIZES.get(name)
        if isinstance(value, hf.PreTrainedConfig):
            shrunk(value)
        elif isinstance(size, list) and isinstance(value, (list, tuple)):
            setattr(config, name, size[: len(value)])
        elif isinstance(size, int) and isinstance(value, int):
            setattr(config, name, size)
    return config


def tiny(name: str, region: AbstractContextManager[Any]) -> tuple[nn.Module, dict[str, Tensor]] | None:
    """Return a model that trains in torch's `region`, and what it takes; None if it is large or slow."""
    with suppress(Exception):
        config = shrunk(hf.CONFIG_MAPPING[name]())
        with torch.device("meta"):
            if sum(p.numel() for p in hf.AutoModel.from_config(config).parameters()) > 400_000:
                return None
        torch.manual_seed(0)
        model = hf.AutoModel.from_config(config).train()
        for inputs in (TEXT, BOTH, IMAGE, {**TEXT, **IMAGE}):
            with suppress(Exception):
                start = time.monotonic()
                first = results(model, inputs, region)
                if time.monotonic() - start > 1 or not first[0].isfinite():
                    return None
                return (model, inputs) if same(first, results(model, inputs, region)) else None
    return None


def same(some: list[Tensor | None], others: list[Tensor | None]) -> bool:
    return all(
        a is b if a is None or b is None else torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        for a, b in zip(some, others, strict=True)
    )


def drawn_policy(draw: random.Random) -> OpPolicy:
    policy = OpPolicy.default("cpu")
    for op in draw.sample(OPS, draw.randint(0, 4)):
        with suppress(PolicyError):  # some rules are for some ops
            policy = policy.override({op: draw.choice(RULES)})
    return policy


@pytest.mark.filterwarnings("ignore")  # those of the models
def test_scopes_change_no_bit_of_a_drawn_architecture() -> None:
    """One of hundreds of architectures has other weights, views or ops than those above, and its own bits."""
    known = sorted({*hf.models.auto.modeling_auto.MODEL_MAPPING_NAMES} & {*hf.CONFIG_MAPPING.keys()})
    trained = 0
    for draw in programs(seconds=25, number="architectures"):
        name, dtype = draw.choice(known), draw.choice([torch.bfloat16, torch.float16])
        made = tiny(name, torch.autocast("cpu", dtype))
        if made is None:
            continue
        model, inputs = made
        policy = drawn_policy(draw)
        wanted = results(model, inputs, amp_core.autocast("cpu", dtype, policy=policy))
        for scope in (amp_core.cached_casts, amp_core.master_weights, amp_core.record):
            with scope(model):
                for _ in range(2):
                    got = results(model, inputs, amp_core.autocast("cpu", dtype, policy=policy))
                    assert same(got, wanted), (name, dtype, policy.to_toml(), scope.__name__)
        trained += 1
    assert trained
