"""`advise` on tiny models of transformers: no rule is proposed where the loss and the gradients are right.

Run as a program, it goes through all architectures that can be made small, or those named:
``python tests/ecosystem/test_advice_on_architectures.py [KIND ...]``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_core

hf = pytest.importorskip("transformers", reason="transformers is not installed; tox -e ecosystem installs it")

_SMALL = {
    2: "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers num_key_value_heads num_kv_heads num_experts_per_tok moe_topk",
    4: "num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads "
    "num_experts num_local_experts n_routed_experts state_size",
    8: "head_dim d_kv patch_size qk_rope_head_dim qk_nope_head_dim v_head_dim attention_head_dim",
    16: "num_mel_bins window_size",
    32: "hidden_size d_model n_embd dim hidden_dim embed_dim embedding_size emb_dim image_size "
    "moe_intermediate_size kv_lora_rank q_lora_rank",
    64: "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim vocab_size "
    "max_position_embeddings n_positions",
}
_SIZES = {name: size for size, names in _SMALL.items() for name in names.split()}
_LISTS = {"hidden_sizes": 8, "embed_dims": 8, "neck_hidden_sizes": 8}
_FACTORS = {"depth_multiplier": 0.25, "width_multiplier": 0.25}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 0}
_MOST_PARAMETERS = 3_000_000


class NotTinyError(Exception):
    """The architecture cannot be made small, or takes inputs that are not made here."""


def config_of(kind: str) -> Any:
    """Return a configuration of few layers and a width of about 32."""
    default = hf.AutoConfig.for_model(kind)
    numbers = {n: getattr(default, n, None) for n in [*_SIZES, *_FACTORS, *_TOKENS]}
    lists = {n: getattr(default, n, None) for n in [*_LISTS, "depths"]}
    settings: dict[str, Any] = {n: s for n, s in _SIZES.items() if type(numbers[n]) is int and numbers[n] > s}
    settings |= {n: factor for n, factor in _FACTORS.items() if type(numbers[n]) is float}
    settings |= {n: token for n, token in _TOKENS.items() if type(numbers[n]) is int}
    for name, value in lists.items():
        if isinstance(value, (list, tuple)) and all(type(v) is int for v in value):
            settings[name] = [_LISTS[name] * 2**i if name in _LISTS else 1 for i in range(len(value))]
    return hf.AutoConfig.for_model(kind, **settings)


def make(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model with random weights, in eval mode, and inputs that it accepts."""
    try:
        config = config_of(kind)
        with torch.device("meta"):
            size = sum(p.numel() for p in hf.AutoModel.from_config(config).parameters())
        if size > _MOST_PARAMETERS:
            raise NotTinyError(f"{kind}: {size:,} parameters")
        torch.manual_seed(0)
        model = hf.AutoModel.from_config(config).eval()
    except NotTinyError:
        raise
    except Exception as error:  # whatever the configuration of an architecture may raise
        raise NotTinyError(f"{kind}: {error}") from error
    reason: object = f"takes {model.main_input_name}"
    for inputs in inputs_for(model):
        try:
            if floating(model(**inputs)):
                return model, inputs
        except Exception as error:  # the wrong inputs
            reason = error
    raise NotTinyError(f"{kind}: {reason}")


def inputs_for(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield the inputs to try."""
    tokens = torch.arange(2, 34).reshape(2, 16)
    shapes = {
        "pixel_values": [(2, 3, 32, 32), (2, 3, 64, 64), (2, 3, 224, 224)],
        "input_features": [(2, 16, 64), (2, 64, 16)],
        "input_values": [(2, 4000)],
    }
    name = model.main_input_name
    given = [tokens, tokens.repeat(1, 4)] if name == "input_ids" else map(_ramp, shapes.get(name, []))
    for tensor in given:
        yield {name: tensor}
        yield {name: tensor, "decoder_input_ids": tokens[:, :8]}


def _ramp(shape: tuple[int, ...]) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)


def floating(outputs: Any) -> list[Tensor]:
    """Return the outputs that depend on parameters."""
    return [o for o in outputs.values() if isinstance(o, Tensor) and o.requires_grad]


def step_of(model: nn.Module, inputs: dict[str, Tensor]) -> Callable[[], Tensor]:
    """Return a step with a target for each output."""

    def step() -> Tensor:
        errors = [o.float() - _ramp(tuple(o.shape)) for o in floating(model(**inputs))]
        return torch.stack([error.square().mean() for error in errors]).sum()

    return step


def advice_for(kind: str, dtype: torch.dtype, rounds: int = 8) -> amp_core.Advice:
    return amp_core.advise(step_of(*make(kind)), "cpu", dtype=dtype, rounds=rounds, progress=False)


def has_rules(advice: amp_core.Advice) -> bool:
    return bool(advice.modules) or advice.policy != amp_core.OpPolicy.default("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["electra", "longt5", "pegasus"])
def test_no_rules_for_a_sound_model(kind: str, dtype: torch.dtype) -> None:
    """`advise` slows down a model whose loss and gradients are right, or keeps quiet about wrong ones."""
    advice = advice_for(kind, dtype, rounds=1)
    assert advice.before is not None
    if kind == "longt5" and dtype is torch.float16:  # a mask of -1e10 gives NaN, under torch.autocast too
        assert advice.before.gradient_error == float("inf")
        assert has_rules(advice)
        return
    assert not has_rules(advice)
    assert advice.after is not None
    assert advice.after.loss_error < 0.01
    # Without a loss scale some gradients underflow, and the scale must then restore them.
    assert all(f.fix.startswith("init_scale") and f.after < 0.1 for f in advice.findings)
    assert not advice.findings or advice.before.gradient_error > 0.125


def _main(kinds: list[str]) -> None:
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    for kind in kinds or sorted(MODEL_MAPPING_NAMES):
        for dtype in (torch.bfloat16, torch.float16):
            try:
                advice = advice_for(kind, dtype)
            except NotTinyError as error:
                print(f"left out: {' '.join(str(error).split())[:160]}", flush=True)  # noqa: T201
                break
            except RuntimeError as error:  # some models do not run in low precision, or have no gradients
                print(f"{kind} {dtype}: {error}"[:160], flush=True)  # noqa: T201
                continue
            before = advice.before
            assert before is not None
            found = "; ".join(f"{f.fault}: {f.fix or 'no fix'}" for f in advice.findings) or "no findings"
            errors = f"loss {before.loss_error:.1e}, gradients {before.gradient_error:.1e}"
            print(f"{kind} {dtype}: {errors}; rules: {has_rules(advice)}; {found}", flush=True)  # noqa: T201


if __name__ == "__main__":
    torch.set_num_threads(1)
    _main(sys.argv[1:])
