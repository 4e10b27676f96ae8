"""A training script as users have it: its import line decides whose autocast and GradScaler it uses."""

import json

import torch
from torch import nn
from torch.amp import GradScaler, autocast

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
scaler = GradScaler("cpu", init_scale=2.0**40, growth_interval=5)
inputs, targets = torch.randn(256, 16), torch.randint(4, (256,))
losses, scales = [], []
for _ in range(60):
    for part in range(2):
        rows = slice(part * 128, (part + 1) * 128)
        with autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(inputs[rows]), targets[rows]) / 2
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() >= before:
        schedule.step()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item())
    scales.append(scaler.get_scale())
weights = [p.detach().view(torch.int32).flatten().tolist() for p in model.parameters()]
report = {"losses": losses, "scales": scales, "weights": weights, "state": scaler.state_dict()}
print(json.dumps(report))
