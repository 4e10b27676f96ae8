"""Train the digits in mixed precision on several processes, with DistributedDataParallel or FSDP2.

torchrun --nproc-per-node 2 docs/examples/demo_ddp.py --epochs 5
torchrun --nproc-per-node 2 docs/examples/demo_ddp.py --epochs 5 --shard
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from amp_core import GradScaler, autocast, get_backend
from amp_core.demo.data import Digits, load_digits
from amp_core.demo.model import build_model


def main() -> None:
    """Join the other ranks, train with them, and leave."""
    args = arguments()
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    train(args)  # the model is gone when it returns: it would hold on to the group
    dist.barrier()  # no rank takes its connections down while another still uses them
    time.sleep(0.2)  # gloo's threads let go of the last tensors; the end would cross them (pytorch#190489)
    dist.destroy_process_group()


def train(args: argparse.Namespace) -> None:
    """Train on this rank's share of every batch; rank 0 reports."""
    rank, world = dist.get_rank(), dist.get_world_size()
    # A process drives one card: the one with its number on this machine.
    device = torch.device(args.device, int(os.environ["LOCAL_RANK"]) if args.device != "cpu" else None)
    dtype = getattr(torch, args.dtype) if args.dtype else get_backend(args.device).default_dtype()

    torch.manual_seed(args.seed)
    model = build_model("conv").to(device)
    # Copies of the model that average their gradients, or one model in pieces.
    model = fully_shard(model) if args.shard else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = GradScaler(args.device, init_scale=args.init_scale)
    digits = load_digits(args.seed).to(device)
    order = torch.Generator().manual_seed(args.seed)
    for _ in range(args.epochs):
        for images, labels in digits.batches(args.batch_size, order):
            optimizer.zero_grad()
            with autocast(args.device, dtype=dtype):
                logits = model(images[rank::world])
            loss = nn.functional.cross_entropy(logits.float(), labels[rank::world])
            scaler.scale(loss).backward()
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()
    report(model, digits, scaler, args.device, dtype)


def report(
    model: nn.Module, digits: Digits, scaler: GradScaler, device_type: str, dtype: torch.dtype
) -> None:
    """Print the accuracy; fail if the ranks have drifted apart."""
    with torch.no_grad(), autocast(device_type, dtype=dtype):
        right = model(digits.test_images).argmax(1) == digits.test_labels
    params = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    state = torch.cat([p.detach().flatten() for p in params])
    state = torch.cat([state, state.new_tensor([scaler.get_scale()])])
    if not same_everywhere(state):
        raise SystemExit("the ranks hold different weights or scales")
    if dist.get_rank() == 0:
        print(
            f"accuracy {right.float().mean():.4f} scale {scaler.get_scale()} ranks {dist.get_world_size()}",
            flush=True,
        )


def same_everywhere(state: Tensor) -> bool:
    """Whether every rank holds the `state` of rank 0, bit for bit."""
    first = state.clone()
    dist.broadcast(first, 0)
    different = (first != state).any().float()
    dist.all_reduce(different)
    return not different.item()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu, cuda or a plugin's device")
    parser.add_argument("--dtype", help="the low precision (default: the device's)")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, over all ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--init-scale", type=float, default=2.0**16)
    parser.add_argument("--shard", action="store_true", help="cut the model into pieces (fully_shard)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
