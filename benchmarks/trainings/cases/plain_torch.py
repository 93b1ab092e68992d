"""Trainings in plain torch, as its tutorials write them."""

import copy
import os
import tempfile

import torch
from torch import nn
from torch.distributions import Categorical
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def mlp_with_a_data_loader():
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(256, 128), torch.randint(0, 10, (256,)))
    loader = DataLoader(data, batch_size=64, shuffle=True)

    def epoch():
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return epoch, model, optimizer


def mlp_with_two_workers():
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters())
    data = TensorDataset(torch.randn(128, 128), torch.randint(0, 10, (128,)))
    loader = DataLoader(data, batch_size=64, num_workers=2)

    def epoch():
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return epoch, model, optimizer


def autocast_bfloat16():
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(64, 256)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer


def gradient_accumulation():
    model = nn.Sequential(nn.Linear(128, 512), nn.Tanh(), nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    batches = [(torch.randn(32, 128), torch.randint(0, 10, (32,))) for _ in range(4)]

    def step():
        optimizer.zero_grad()
        for x, y in batches:
            (F.cross_entropy(model(x), y) / len(batches)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step, model, optimizer


def language_model_lstm():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(1000, 64)
            self.lstm = nn.LSTM(64, 128, num_layers=2, batch_first=True)
            self.head = nn.Linear(128, 1000)

        def forward(self, tokens):
            return self.head(self.lstm(self.embedding(tokens))[0])

    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    tokens = torch.randint(0, 1000, (8, 33))

    def step():
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.reshape(-1, 1000), tokens[:, 1:].reshape(-1)).backward()
        optimizer.step()

    return step, model, optimizer


def gru_classifier():
    gru, head = nn.GRU(32, 64, batch_first=True), nn.Linear(64, 4)
    model = nn.ModuleList([gru, head])
    optimizer = torch.optim.RMSprop(model.parameters())
    x, y = torch.randn(16, 20, 32), torch.randint(0, 4, (16,))

    def step():
        optimizer.zero_grad()
        _, hidden = gru(x)
        F.cross_entropy(head(hidden[-1]), y).backward()
        optimizer.step()

    return step, model, optimizer


def transformer_encoder():
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(64 * 32, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    x, y = torch.randn(8, 32, 64), torch.randint(0, 10, (8,))

    def step():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()

    return step, model, optimizer


def variational_autoencoder():
    encoder = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 40))
    decoder = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 784), nn.Sigmoid())
    model = nn.ModuleList([encoder, decoder])
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.rand(64, 784)

    def step():
        optimizer.zero_grad()
        mean, logvar = encoder(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
        divergence = -0.5 * torch.sum(1 + logvar - mean.pow(2) - logvar.exp())
        (F.binary_cross_entropy(decoder(z), x, reduction="sum") + divergence).backward()
        optimizer.step()

    return step, model, optimizer


def dcgan():
    generator = nn.Sequential(
        nn.ConvTranspose2d(64, 64, 4, 1, 0, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(True),
        nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(True),
        nn.ConvTranspose2d(32, 3, 4, 2, 1, bias=False),
        nn.Tanh(),
    )
    discriminator = nn.Sequential(
        nn.Conv2d(3, 32, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(32, 64, 4, 2, 1, bias=False),
        nn.BatchNorm2d(64),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(64, 1, 4, 1, 0, bias=False),
        nn.Sigmoid(),
        nn.Flatten(0),
    )
    of_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    of_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    images, criterion = torch.randn(16, 3, 16, 16), nn.BCELoss()

    def step():
        of_d.zero_grad()
        criterion(discriminator(images), torch.ones(16)).backward()
        made = generator(torch.randn(16, 64, 1, 1))
        criterion(discriminator(made.detach()), torch.zeros(16)).backward()
        of_d.step()
        of_g.zero_grad()
        criterion(discriminator(made), torch.ones(16)).backward()
        of_g.step()

    return step, nn.ModuleList([generator, discriminator]), of_g


def wgan_with_gradient_penalty():
    generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32))
    critic = nn.Sequential(nn.Linear(32, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    of_g = torch.optim.RMSprop(generator.parameters())
    of_c = torch.optim.RMSprop(critic.parameters())
    real = torch.randn(64, 32)

    def step():
        of_c.zero_grad()
        fake = generator(torch.randn(64, 16)).detach()
        mix = torch.rand(64, 1)
        between = (mix * real + (1 - mix) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
        (critic(fake).mean() - critic(real).mean() + 10 * penalty).backward()
        of_c.step()
        of_g.zero_grad()
        (-critic(generator(torch.randn(64, 16))).mean()).backward()
        of_g.step()

    return step, nn.ModuleList([generator, critic]), of_c


def knowledge_distillation():
    teacher = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)).eval()
    student = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(student.parameters())
    x, y = torch.randn(128, 64), torch.randint(0, 10, (128,))

    def step():
        optimizer.zero_grad()
        with torch.no_grad():
            soft = teacher(x).div(2).softmax(-1)
        logits = student(x)
        loss = F.kl_div(logits.div(2).log_softmax(-1), soft, reduction="batchmean")
        (loss + F.cross_entropy(logits, y)).backward()
        optimizer.step()

    return step, student, optimizer


def averaged_weights():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    averaged = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))

    def step():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        averaged.update_parameters(model)

    return step, model, optimizer


def per_sample_gradients():
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(16, 32), torch.randint(0, 10, (16,))

    def loss_of(parameters, one, label):
        logits = functional_call(model, parameters, (one.unsqueeze(0),))
        return F.cross_entropy(logits, label.unsqueeze(0))

    def step():
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        gradients = vmap(grad(loss_of), in_dims=(None, 0, 0))(parameters, x, y)
        for name, parameter in model.named_parameters():
            each = gradients[name]
            norm = each.flatten(1).norm(dim=1).clamp(min=1.0)
            parameter.grad = (each / norm.view(-1, *[1] * (each.dim() - 1))).mean(0)
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer


def triplet_loss():
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
    optimizer = torch.optim.Adagrad(model.parameters())
    anchor, positive, negative = (torch.randn(64, 64) for _ in range(3))

    def step():
        optimizer.zero_grad()
        F.triplet_margin_loss(model(anchor), model(positive), model(negative)).backward()
        optimizer.step()

    return step, model, optimizer


def policy_gradient():
    policy = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
    value = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    model = nn.ModuleList([policy, value])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    states, rewards = torch.randn(256, 8), torch.randn(256)

    def step():
        with torch.no_grad():
            before = Categorical(logits=policy(states))
            actions = before.sample()
            old = before.log_prob(actions)
        for _ in range(2):
            now = Categorical(logits=policy(states))
            ratio = (now.log_prob(actions) - old).exp()
            values = value(states).squeeze(-1)
            gain = rewards - values.detach()
            clipped = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
            loss = F.mse_loss(values, rewards) - clipped.mean() - 0.01 * now.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return step, model, optimizer


def contrastive_learning():
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 256, 256), nn.ReLU(), nn.Linear(256, 64))
    momentum = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    images = torch.randn(32, 3, 16, 16)

    def step():
        first = F.normalize(model(images + 0.1 * torch.randn_like(images)))
        with torch.no_grad():
            for slow, fast in zip(momentum.parameters(), model.parameters(), strict=True):
                slow.mul_(0.99).add_(fast, alpha=0.01)
            second = F.normalize(momentum(images))
        optimizer.zero_grad()
        F.cross_entropy(first @ second.T / 0.07, torch.arange(32)).backward()
        optimizer.step()

    return step, model, optimizer


def matrix_factorization():
    users, items = nn.Embedding(2000, 32), nn.Embedding(3000, 32)
    model = nn.ModuleList([users, items])
    optimizer = torch.optim.AdamW(model.parameters())
    u, i, y = torch.randint(0, 2000, (256,)), torch.randint(0, 3000, (256,)), torch.rand(256)

    def step():
        optimizer.zero_grad()
        F.mse_loss((users(u) * items(i)).sum(-1), y).backward()
        optimizer.step()

    return step, model, optimizer


# ------------------------------------------------------------------ distributed, one process


def _one_process():
    if not torch.distributed.is_initialized():
        where = os.path.join(tempfile.mkdtemp(), "store")
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{where}", rank=0, world_size=1
        )


def _layers():
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 8))


def _step_of(model, optimizer):
    x = torch.randn(32, 128)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step, model, optimizer


def distributed_data_parallel():
    _one_process()
    model = nn.parallel.DistributedDataParallel(_layers())
    return _step_of(model, torch.optim.AdamW(model.parameters()))


def zero_redundancy_optimizer():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    _one_process()
    model = nn.parallel.DistributedDataParallel(_layers())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    return _step_of(model, optimizer)


def fsdp2():
    from torch.distributed.fsdp import fully_shard

    _one_process()
    model = _layers()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return _step_of(model, torch.optim.AdamW(model.parameters()))
