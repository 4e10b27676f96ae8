"""A mixture of experts over ranks: what `ranks.py` runs on four processes."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import amp_core

COUNT, STEPS, OVERFLOW, BAD = 4, 4, 1, 2


class Net(nn.Module):
    """Each token goes to one expert, never to the last. A rank has one of them; without a mesh, all."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.router, self.head = nn.Linear(6, 8), nn.Linear(8, COUNT), nn.Linear(8, 5)
        experts = [nn.Linear(8, 8) for _ in range(COUNT)]
        self.mesh, self.owned = mesh, list(range(COUNT)) if mesh is None else [mesh.get_local_rank()]
        self.experts = nn.ModuleDict({str(number): experts[number] for number in self.owned})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        gates, chosen = self.router(x).float().softmax(-1)[:, :-1].max(-1)
        tokens, weights = self.parts_of_gradients(x), self.parts_of_gradients(gates)
        out = 0 * tokens + 0 * weights[:, None]  # so that each rank takes part in the backward's collectives
        for number in self.owned:
            mine = chosen == number
            if mine.any():
                out = out.index_put((mine,), self.experts[str(number)](tokens[mine]) * weights[mine, None])
        if self.mesh is not None:
            out = DTensor.from_local(out, self.mesh, [Partial()], run_check=False).full_tensor()
        return self.head(x + out)

    def parts_of_gradients(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`, of whose gradient each rank then computes a summand."""
        if self.mesh is None:
            return x
        whole = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return whole.to_local(grad_placements=[Partial()])


def trained(mesh: DeviceMesh | None) -> tuple[Net, list[float], amp_core.GradScaler]:
    net = Net(mesh)
    shared = [*net.inner.parameters(), *net.router.parameters(), *net.head.parameters()]
    optimizers = [torch.optim.AdamW(part, lr=0.03) for part in (shared, net.experts.parameters())]
    over = {} if mesh is None else {mesh: net.experts.parameters()}
    group = None if mesh is None else dist.group.WORLD
    scaler = amp_core.GradScaler("cpu", 1024.0, process_group=group, sharded_over=over)
    x, losses = torch.randn(32, 6, generator=torch.Generator().manual_seed(1)), []
    for number in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with amp_core.autocast("cpu", dtype=torch.float16):
            loss = net(x).float().square().mean()
        scaler.scale(loss).backward()
        if number == OVERFLOW and BAD in net.owned:
            net.experts[str(BAD)].weight.grad[0, 0] = math.inf
        scaler.clip_grad_norm_(optimizers, 0.1)
        for optimizer in optimizers:
            scaler.step(optimizer)
        losses.append(float(loss.detach()))
        assert bool(scaler.landed()) == (number != OVERFLOW)
        scaler.update()
    return net, losses, scaler


def experts() -> None:
    """Experts learn as in one process, though one overflows and another has no gradient."""
    alone, expected, its_scaler = trained(None)
    net, losses, scaler = trained(init_device_mesh("cpu", (COUNT,)))
    assert COUNT - 1 not in net.owned or net.experts[str(COUNT - 1)].weight.grad is None
    assert losses[OVERFLOW] == losses[OVERFLOW + 1]
    assert losses[-1] < losses[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-3, atol=1e-4)
    norms = [torch.tensor([r.total_norm for r in each.history]) for each in (scaler, its_scaler)]
    torch.testing.assert_close(*norms, rtol=1e-2, atol=1e-4)
    theirs = dict(alone.named_parameters())
    for name, param in net.named_parameters():
        torch.testing.assert_close(param, theirs[name], rtol=1e-2, atol=1e-2)
    same = torch.cat([p.detach().flatten() for n, p in net.named_parameters() if "experts" not in n])
    same = torch.cat([same, torch.tensor([scaler.get_scale()])])
    every = [torch.empty_like(same) for _ in range(COUNT)]
    dist.all_gather(every, same)
    assert all(torch.equal(each, same) for each in every), "what all ranks share has parted"
