"""materialize: architectures of transformers and torchvision, with random weights."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_core import OpPolicy, autocast, materialize
from amp_core.common.containers import tensors_in


def torchvision() -> Any:
    """Import torchvision, if it is installed, before transformers does.

    Its models need none of its compiled ops, but its import needs the names of two. The wheels on the index
    load those beside torch's CUDA build only.
    """
    if importlib.util.find_spec("torchvision") is None:
        return None
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:
        names = torch.library.Library("torchvision", "FRAGMENT")
        for op in ("nms", "qnms"):
            names.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        return importlib.import_module("torchvision")


VISION = torchvision()
hf = pytest.importorskip("transformers", reason="transformers is not installed; tox -e ecosystem installs it")
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch copies its own graphs

LOW = torch.bfloat16
DEFAULT = OpPolicy.default("cpu")
LOW_TABLES = DEFAULT.override({"embedding": "lower_precision_fp"})

WIDTHS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
TEXT = {"input_ids": torch.arange(2, 34).reshape(2, 16)}
UNCACHED = {**TEXT, "use_cache": False}
IMAGE = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)


def gpt2() -> nn.Module:
    special = {"bos_token_id": 0, "eos_token_id": 1}
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4, **special))


LANGUAGE: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "bert": (lambda: hf.BertModel(hf.BertConfig(vocab_size=512, **WIDTHS)), TEXT),
    "gpt2": (gpt2, UNCACHED),
    "llama": (
        lambda: hf.LlamaModel(hf.LlamaConfig(vocab_size=512, num_key_value_heads=2, **WIDTHS)),
        UNCACHED,
    ),
    "t5": (
        lambda: hf.T5Model(
            hf.T5Config(vocab_size=512, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
        ),
        {**UNCACHED, "decoder_input_ids": TEXT["input_ids"][:, :8]},
    ),
}
PICTURES: dict[str, Callable[[Any], nn.Module]] = {
    "resnet": lambda models: models.resnet18(num_classes=10),
    "vit": lambda models: models.VisionTransformer(32, 8, 2, 4, 64, 128),
    "mobilenet": lambda models: models.mobilenet_v3_small(num_classes=10),
}


def nbytes(model: nn.Module) -> int:
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def results(model: nn.Module, inputs: dict[str, Any], policy: OpPolicy | None) -> Iterator[Tensor]:
    with torch.no_grad(), autocast("cpu", LOW, policy=policy):
        return tensors_in(model(**inputs))


def check(model: nn.Module, inputs: dict[str, Any], policy: OpPolicy | None) -> nn.Module:
    """Return the materialized model after a comparison on other inputs than it was traced with."""
    low = materialize(model, (), inputs, policy=policy, dtype=LOW)
    other = {k: v.flip(0) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    for mine, wanted in zip(tensors_in(low(**other)), results(model, other, policy), strict=True):
        assert mine.dtype is wanted.dtype
        assert torch.equal(mine, wanted)
    return low


@pytest.mark.parametrize("name", LANGUAGE)
def test_language_models_have_equal_bits_and_half_the_memory(name: str) -> None:
    """An architecture with casts in unusual places computes otherwise in production than in its tests.

    With embeddings in low precision, all tables are stored so, tied ones too.
    """
    torch.manual_seed(0)
    make, inputs = LANGUAGE[name]
    model = make().eval()
    low = check(model, inputs, LOW_TABLES)
    assert nbytes(low) <= 0.55 * nbytes(model)
    if name in ("bert", "gpt2"):  # sums of embeddings are float32 by default, so their tables must be
        low = check(model, inputs, None)
        wide = {n for n, p in low.named_parameters() if p.dtype is torch.float32 and p.dim() > 1}
        assert wide == {
            n for n, _ in model.named_parameters() if "_embeddings." in n or "wte" in n or "wpe" in n
        }
    exported = torch.export.export(low, (), inputs)
    for mine, wanted in zip(tensors_in(exported.module()(**inputs)), tensors_in(low(**inputs)), strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.skipif(VISION is None, reason="torchvision is not installed; tox -e ecosystem installs it")
@pytest.mark.parametrize("name", PICTURES)
def test_vision_models_have_equal_bits_and_half_the_memory(name: str) -> None:
    """Convolutions and batch norms of real models, in their nesting."""
    torch.manual_seed(0)
    model = PICTURES[name](VISION.models).eval()
    low = check(model, {"x": IMAGE}, None)
    assert nbytes(low) <= 0.55 * nbytes(model)
    if name == "vit":
        assert torch.equal(torch.compile(low, backend="aot_eager", fullgraph=True)(x=IMAGE), low(x=IMAGE))


@pytest.mark.filterwarnings("ignore")  # of the exporter
def test_another_runtime_runs_bert(tmp_path: Path) -> None:
    """What leaves for ONNX must compute the same, with no trace of a region."""
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    torch.manual_seed(0)
    model = LANGUAGE["bert"][0]().eval()
    low = materialize(model, (), TEXT, policy=OpPolicy.uniform("cpu"), dtype=torch.float16)
    path = tmp_path / "model.onnx"
    torch.onnx.export(low, (), kwargs=TEXT, dynamo=True, verbose=False).save(str(path))
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    first, *_ = session.run(None, {session.get_inputs()[0].name: TEXT["input_ids"].numpy()})
    wanted = next(tensors_in(low(**TEXT)))
    torch.testing.assert_close(torch.from_numpy(first).to(wanted.dtype), wanted, rtol=1e-2, atol=1e-2)
