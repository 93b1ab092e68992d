"""Small training scripts that run out of memory, one for each cause."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    def __init__(self, width, heads, eager):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.eager = heads, eager

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (
            part.view(B, T, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        if self.eager:
            scores = q @ k.transpose(-2, -1) / (C // self.heads) ** 0.5
            mask = torch.ones(T, T, dtype=torch.bool).tril()
            probs = scores.masked_fill(~mask, float("-inf")).softmax(-1)
            y = probs @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class Layer(nn.Module):
    def __init__(self, width, heads, eager):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, eager)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        x = x + self.attention(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocab=64, width=64, layers=4, heads=4, eager=False, checkpointed=False):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width, heads, eager) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.checkpointed = checkpointed

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(self.norm(x))


class CNN(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.pool, self.out = nn.MaxPool2d(2), nn.Linear(2 * width, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = F.relu(self.conv2(x))
        return self.out(x.mean((2, 3)))


def loss_of(model, B, T, vocab):
    ids = torch.randint(vocab, (B, T))
    logits = model(ids)
    return F.cross_entropy(logits.view(-1, vocab).float(), ids.view(-1))


def train(model, B=2, T=32, vocab=64, steps=3, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        loss = loss_of(model, B, T, vocab)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def large_batch():
    model = CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        images, labels = torch.randn(256, 3, 32, 32), torch.randint(10, (256,))
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def large_batch_gpt():
    train(GPT(layers=3), B=128, T=32)


def long_sequence():
    train(GPT(layers=4, eager=True), B=2, T=512)


def deep_without_checkpointing():
    train(GPT(layers=24), B=8, T=64)


def large_vocabulary():
    train(GPT(layers=2, vocab=16384, width=32), B=4, T=64, vocab=16384)


def optimizer_state():
    train(GPT(layers=6, width=128), B=1, T=16)


def validate(model, batches=8):
    total = 0.0
    for _ in range(batches):
        total += loss_of(model, 8, 64, 64).item()
    return total


def validation_with_gradients():
    model = GPT(layers=6)
    train(model, B=2, T=64)
    validate(model)


def losses_kept():
    model = GPT(layers=2)
    optimizer = torch.optim.AdamW(model.parameters())
    history = []
    for _ in range(30):
        loss = loss_of(model, 2, 64, 64)
        extra = loss_of(model, 2, 64, 64)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(extra)


def accumulated_loss():
    model = GPT(layers=2)
    optimizer = torch.optim.AdamW(model.parameters())
    total = 0
    for _ in range(30):
        loss = loss_of(model, 2, 64, 64)
        total = total + loss
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def generate(model, tokens=200, B=4, width=64):
    cache = [None] * 6
    for _ in range(tokens):
        for layer in range(6):
            new = torch.randn(B, 4, 1, width)
            cache[layer] = new if cache[layer] is None else torch.cat([cache[layer], new], dim=2)


def generation():
    model = GPT(layers=2)
    train(model)
    generate(model)


def fragmentation():
    """Features of a middle length stay in the holes that long sequences left."""
    cache = []
    long = [torch.empty(10 * 2**20) for _ in range(8)]
    model = nn.Linear(256, 256)
    del long
    for _ in range(8):
        cache.append(torch.empty(21 * 2**18))
    model(torch.empty(24 * 2**10, 256))


def loading():
    GPT(layers=8, width=128)


# ------------------------------------------------------------------ near misses


def checkpointed():
    train(GPT(layers=24, checkpointed=True), B=24, T=64)


def validation_without_gradients():
    model = GPT(layers=6)
    train(model, B=2, T=32)
    with torch.no_grad():
        validate(model)


def losses_detached():
    model = GPT(layers=2)
    optimizer = torch.optim.AdamW(model.parameters())
    history = []
    for _ in range(8):
        loss = loss_of(model, 8, 64, 64)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.item())


def fused_attention():
    train(GPT(layers=4), B=2, T=512)


def small_vocabulary():
    train(GPT(layers=3, vocab=64), B=64, T=64, vocab=64)


def later_optimizer_step():
    """The state is small, and the third step has a larger batch."""
    model = GPT(layers=3)
    optimizer = torch.optim.AdamW(model.parameters())
    for B in (1, 1, 64):
        loss_of(model, B, 64, 64).backward()
        optimizer.step()
        optimizer.zero_grad()


def fixed_cache():
    """A preallocated cache does not grow; the batch of prompts is too large."""
    model = GPT(layers=3)
    with torch.no_grad():
        cache = torch.zeros(3, 4, 64, 64)
        for position in range(4):
            cache[:, :, position] = 1
            loss_of(model, 256, 64, 64)


def leak_that_fails_in_the_optimizer():
    """Each step keeps a tensor; the last temporaries of the optimizer do not fit any more."""
    model = GPT(layers=6, width=128)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    kept = []
    for _ in range(30):
        loss_of(model, 1, 8, 64).backward()
        optimizer.step()
        kept.append(torch.ones(2**18))
        optimizer.zero_grad()


def validate_and_keep(model, batches=12):
    kept = []
    for _ in range(batches):
        loss = loss_of(model, 8, 64, 64)
        kept.append(loss)


def validation_that_keeps_outputs():
    model = GPT(layers=4)
    train(model, B=2, T=64)
    validate_and_keep(model)
