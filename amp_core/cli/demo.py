"""``amp demo``: train on handwritten digits in float32, in mixed precision and as advised, side by side."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from amp_core.cli import UsageError, count
from amp_core.common.files import why_unwritable

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from amp_core.demo.data import Digits
    from amp_core.demo.train import History, Settings
    from amp_core.plugin import Backend


_NEEDED = {"matplotlib": "matplotlib", "numpy": "numpy", "rich": "rich", "sklearn": "scikit-learn"}
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``amp demo``."""
    add = parser.add_argument
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, xpu or a plugin's device (default: auto)")
    add("--dtype", help="the low precision, such as bfloat16 or float16 (default: the device's)")
    add("--model", default="conv", choices=("conv", "mlp"), help="mlp for a device without convolutions")
    add("--epochs", type=count, default=15, help="passes over the data (default: 15)")
    add("--batch-size", type=count, default=64, help="images per step (default: 64)")
    add("--seed", type=seed, default=0, help="seed of the split, the weights and the order (default: 0)")
    add("--output", type=Path, default=Path("amp-demo.png"), help="the picture (default: amp-demo.png)")


def run(args: argparse.Namespace) -> int:
    """Check the settings, train three times, compare; then cause an overflow and find it."""
    _require_extras()
    settings = _settings(args)
    _require_writable(args.output)

    from rich.console import Console

    from amp_core.demo.data import load_digits
    from amp_core.demo.fault import show_fault
    from amp_core.demo.report import comparison, save_picture, verdict

    console = Console(highlight=False, markup=False, emoji=False)
    digits = load_digits(settings.seed)
    if settings.batch_size > len(digits.train_labels):
        raise UsageError(
            f"--batch-size {settings.batch_size} exceeds the {len(digits.train_labels)} training images."
        )
    title = _title(settings)
    console.print(title)
    runs = _train(settings, digits, console)
    console.print(comparison(runs))
    console.print(verdict(*runs))
    try:
        save_picture(runs, args.output, title)
    except OSError as error:  # the disk is full now
        raise _unwritable(args.output, error.strerror) from error
    console.print(f"Loss and scale curves: {args.output}", soft_wrap=True)
    show_fault(settings, digits, console)
    return 0


def _train(settings: Settings, digits: Digits, console: Console) -> list[History]:
    from amp_core.demo.report import progress_bars
    from amp_core.demo.train import Trainer, train

    trainers = [Trainer(settings, digits, mixed) for mixed in (False, True)]
    try:
        for trainer in trainers:
            trainer.watch()
    except NotImplementedError as error:
        other = " Try --model mlp." if settings.model == "conv" else ""
        reason = str(error).partition(". ")[0]
        raise UsageError(
            f"{settings.device} cannot train the {settings.model} model: {reason}.{other}"
        ) from error
    steps = settings.epochs * (len(digits.train_labels) // settings.batch_size)
    trainers.append(Trainer(settings, digits, mixed=True, advice=trainers[1].advise()))
    trainers[-1].watch()
    with progress_bars(console, [trainer.history.name for trainer in trainers], steps) as on_step:
        return train(trainers, on_step)


def _title(settings: Settings) -> str:
    from amp_core.common.text import dtype_name

    dtypes = f"float32 against {dtype_name(settings.dtype)}"
    size = settings.batch_size
    return f"amp demo: {settings.model} model, {dtypes} on {settings.device}, batch size {size}"


def _settings(args: argparse.Namespace) -> Settings:
    from amp_core import BackendError
    from amp_core.demo.train import Settings

    try:
        device, backend = _device(args.device)
        dtype = _dtype(args.dtype, backend)
    except (BackendError, RuntimeError, AssertionError) as error:
        raise UsageError(_one_line(error)) from error
    return Settings(device, dtype, args.model, args.epochs, args.batch_size, args.seed)


def _device(name: str) -> tuple[torch.device, Backend]:
    import torch

    from amp_core import get_backend
    from amp_core.common.arguments import device_type_of

    device_type = device_type_of(name)
    backend = get_backend(device_type)
    available = backend.availability()
    if not available:
        raise UsageError(f"{device_type} cannot be used: {available.reason}.")
    device = torch.device(device_type if name == "auto" else name)
    torch.empty(0, device=device)
    return device, backend


def _dtype(name: str | None, backend: Backend) -> torch.dtype:
    import torch

    from amp_core.common.text import dtype_name

    dtype: object
    if name is None:
        dtype, given = backend.default_dtype(), "the default dtype"
    else:
        dtype, given = getattr(torch, _SHORT.get(name, name), None), f"--dtype {name}"
    legal = f"{backend.device_type} can use {', '.join(map(dtype_name, backend.supported_dtypes()))}"
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"{given} is not a dtype of torch; {legal}.")
    if dtype not in backend.supported_dtypes():
        raise UsageError(f"{given}: {backend.dtype_reason(dtype)}; {legal}.")
    return dtype


def _require_extras() -> None:
    missing = [package for module, package in _NEEDED.items() if find_spec(module) is None]
    if missing:
        raise UsageError(f"needs {', '.join(missing)}; install them with: pip install 'amp-core[demo]'")


def _require_writable(path: Path) -> None:
    """Fail before training, not after it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    formats = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise UsageError(f"--output {path}: the suffix must be one of {', '.join(sorted(formats))}.")
    why = why_unwritable(path)
    if why:
        raise _unwritable(path, why)


def _unwritable(path: Path, why: str | None) -> UsageError:
    return UsageError(f"--output {path} cannot be written: {why}.")


def seed(text: str) -> int:
    """Return a seed of the command line."""
    value = int(text)
    if not 0 <= value < 2**32:  # the range of NumPy's generator, which splits the data
        raise argparse.ArgumentTypeError(f"{value} is not a seed; use a number from 0 to {2**32 - 1}")
    return value


def _one_line(error: Exception) -> str:
    """Return the message on one line; torch's page on a missing kernel becomes its first sentence."""
    text = " ".join(str(error).split())
    return text.partition(". ")[0] if isinstance(error, NotImplementedError) else text
