"""A plain PyTorch loop whose optimizer state lives on disk: what `overspill.attach` adds is marked with a #.

A small byte-level transformer learns Macbeth for 30 steps, is stopped, and goes on from the disk as if nothing had
happened. Runs in seconds on a laptop; nothing of it is special to small models.

    python examples/quickstart.py
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

import overspill
from overspill.plan import Durability, Placement, Plan

TEXT = torch.tensor(list((Path(__file__).parent.parent / "tests/assets/tiny/macbeth.txt").read_bytes()))
SEQ_LEN, BATCH, STEPS = 128, 8, 30


class ByteModel(nn.Module):
    """Next byte from the bytes before it."""

    def __init__(self, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Embedding(SEQ_LEN, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) + self.position.weight
        mask = nn.Transformer.generate_square_subsequent_mask(SEQ_LEN)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(TEXT) - SEQ_LEN - 1, (BATCH,))
    rows = torch.stack([TEXT[s : s + SEQ_LEN + 1] for s in starts])
    return rows[:, :-1], rows[:, 1:]


def train(steps: int, directory: Path | None, *, resume: bool = False) -> list[float]:
    torch.manual_seed(0)
    model = ByteModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = Plan(  #
        memory_nbytes="64MiB",  # everything but what torch itself allocates comes out of this, or training is refused
        optimizer_state=Placement(disk=1.0) if directory else Placement(host=1.0),  #
        durability=Durability(every_steps=1 if directory else 0),  # a crash loses at most the step under way
        max_grad_norm=1.0,  #
    )
    session = overspill.attach(model, optimizer=optimizer, plan=plan, directory=directory, resume=resume)  #
    losses = []
    while session.step < steps:
        inputs, targets = batch()
        session.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        session.optimizer.step()
        session.step_boundary()  # the random generators as they are now belong to this step
        losses.append(loss.item())
    session.close()  #
    return losses


def main() -> None:
    torch.set_num_threads(1)
    in_memory = train(STEPS, None)
    with tempfile.TemporaryDirectory() as folder:
        on_disk = train(STEPS // 2, Path(folder))
        on_disk += train(STEPS, Path(folder), resume=True)
    print(f"loss in memory: {in_memory[0]:.4f} … {in_memory[-1]:.4f}")
    print(f"loss on disk, interrupted half-way: {on_disk[0]:.4f} … {on_disk[-1]:.4f}")
    assert in_memory == on_disk, "placement and interruption must not change a single bit"
    print("All losses are bit-identical.")


if __name__ == "__main__":
    main()
