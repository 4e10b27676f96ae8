"""A training script as one wrote them in 2020, with the names that were current then."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.cuda.amp import GradScaler, autocast, custom_bwd, custom_fwd


class Square(torch.autograd.Function):
    @staticmethod
    @custom_fwd(cast_inputs=torch.float32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @custom_bwd
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4 * 6 * 6, 3)

    @autocast()
    def forward(self, x):
        x = F.relu(self.bn(self.conv(x)))
        x = Square.apply(x)
        return self.fc(x.view(x.size(0), -1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--fp16", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data, target = torch.randn(32, 1, 8, 8), torch.randint(0, 3, (32,))
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = GradScaler(enabled=args.fp16)
    for epoch in range(args.epochs):
        for start in range(0, 32, 16):
            x, y = data[start : start + 16].to(device), target[start : start + 16].to(device)
            optimizer.zero_grad()
            with autocast(enabled=args.fp16):
                loss = F.cross_entropy(model(x), y)
            with torch.cpu.amp.autocast():
                assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        print("epoch", epoch, "loss", "%.6f" % loss.item())
    print("scaler", type(scaler).__module__)


if __name__ == "__main__":
    main()
