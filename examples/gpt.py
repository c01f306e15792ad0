"""A small GPT learns the Python standard library's sources, and goes on when it loses a rank.

    everstep run --nproc-per-node 4 examples/gpt.py
    everstep run --nproc-per-node 4 --chaos kill:rank=1,step=5 examples/gpt.py
    torchrun --nproc-per-node 4 examples/gpt.py     (the same training, unprotected)
    python examples/gpt.py                          (one rank of it, unprotected)

    everstep run --nproc-per-node 4 examples/gpt.py --shards 2     (FSDP2, replicated twice)

Ordinary training code under DDP or FSDP2. Six of its lines are everstep's; they end in
`# everstep`.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, gelu, linear, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

import everstep  # everstep

# ---------------------------------------------------------------- the model


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x, result: float (batch, context, width)."""
        shape = (*x.shape[:2], self.heads, -1)
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.view(shape).transpose(1, 2) for part in parts)
        dropout = self.dropout if self.training else 0.0
        mixed = scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.drop(self.proj(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """A transformer over bytes; the output layer shares the embedding's weights."""

    def __init__(self, width: int, layers: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.context = context
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: int64 (batch, context). Returns logits: float (batch, context, 256)."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return linear(self.norm(self.blocks(self.drop(x))), self.tokens.weight)

    @torch.no_grad()
    def write(self, start: str, length: int) -> str:
        """`start`, continued by `length` bytes drawn from the model."""
        self.eval()
        text = list(start.encode())
        for _ in range(length):
            tokens = torch.tensor([text[-self.context :]], device=self.tokens.weight.device)
            logits = self(tokens)[0, -1]
            text.append(int(torch.multinomial(logits.softmax(-1), 1)))
        return bytes(text).decode(errors="replace")


# ---------------------------------------------------------------- the training


class TextDataset(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of the standard library's sources: `context` bytes, and the bytes that follow each."""

    def __init__(self, context: int, limit_bytes: int) -> None:
        text = bytearray()
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            if len(text) < limit_bytes:
                text += path.read_bytes()
        self.text, self.context = torch.frombuffer(text, dtype=torch.uint8), context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        first = number * self.context
        piece = self.text[first : first + self.context + 1].long()
        return piece[:-1], piece[1:]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A small GPT on Python's own sources.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=2, help="pieces per rank and step")
    parser.add_argument("--context", type=int, default=64, help="bytes per piece of text")
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=10, help="steps until the full learning rate")
    parser.add_argument("--shards", type=int, default=1, help="cut the model over so many ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=int, default=0, help="bytes of text to write at the end")
    return parser.parse_args()


def shard(gpt: GPT, shards: int) -> nn.Module:
    """`gpt` under FSDP2: cut over `shards` ranks, and every piece held by the rest as well."""
    replicas = dist.get_world_size() // shards
    device, names = gpt.tokens.weight.device.type, ("replicate", "shard")
    mesh = init_device_mesh(device, (replicas, shards), mesh_dim_names=names)
    for parameter in gpt.parameters():
        dist.broadcast(parameter.detach(), src=0)  # what DDP does by itself
    for block in gpt.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(gpt, mesh=mesh)


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    run = everstep.init()  # everstep
    torch.manual_seed(args.seed + run.rank)  # dropout differs by rank; DDP takes rank 0's weights

    gpt = GPT(args.width, args.layers, heads=4, context=args.context, dropout=0.1)
    gpt.to(run.device)
    model = shard(gpt, args.shards) if args.shards > 1 else DistributedDataParallel(gpt)
    optimizer = AdamW(model.parameters(), lr=args.lr)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / max(1, args.warmup)))
    dataset = TextDataset(args.context, limit_bytes=2_000_000)
    data = run.data(dataset, batch_size=args.batch_size, seed=args.seed)  # everstep
    run.protect(model=model, optimizer=optimizer, scheduler=scheduler, data=data)  # everstep

    @run.step  # everstep
    def train_step(batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = (part.to(run.device) for part in batch)
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.detach()

    for batch in run.batches(until=args.steps):  # everstep
        loss = train_step(batch)
        if run.rank == 0 and run.committed % 5 == 0:
            print(f"step {run.committed:4}  loss {loss.item():.3f}")
    if run.rank == 0 and args.write:
        print(gpt.write("def ", args.write))


if __name__ == "__main__":
    main()
