"""Trainings of Lightning, PyTorch Geometric, stable-baselines3 and torchdiffeq."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def _lightning(**options):
    """Count a whole `fit` of three steps as one step."""
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

        def training_step(self, batch, index):
            x, y = batch
            return F.cross_entropy(self.net(x), y)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    model = Classifier()
    loader = DataLoader(TensorDataset(torch.randn(96, 64), torch.randint(0, 10, (96,))), 32)

    def fit():
        made = lightning.Trainer(
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        made.fit(model, loader)
        fit.trainer = made

    return fit, model, None


def lightning_fit():
    return _lightning(accelerator="cpu")


def lightning_auto_accelerator():
    return _lightning(accelerator="auto", devices=1)


def _graph(convolution):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = convolution(64, 32), convolution(32, 7)

        def forward(self, x, edges):
            x = F.dropout(F.relu(self.first(x, edges)), training=self.training)
            return self.second(x, edges)

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    x, edges = torch.randn(200, 64), torch.randint(0, 200, (2, 800))
    y, mask = torch.randint(0, 7, (200,)), torch.rand(200) < 0.3

    def step():
        optimizer.zero_grad()
        F.cross_entropy(model(x, edges)[mask], y[mask]).backward()
        optimizer.step()

    return step, model, optimizer


def gcn():
    from torch_geometric.nn import GCNConv

    return _graph(GCNConv)


def gat():
    from torch_geometric.nn import GATConv

    return _graph(GATConv)


def sage():
    from torch_geometric.nn import SAGEConv

    return _graph(SAGEConv)


def ppo():
    """Count a `learn` of 64 environment steps as one step."""
    from stable_baselines3 import PPO

    made = PPO("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=32, n_epochs=2, device="cpu")
    return (lambda: made.learn(64)), made.policy, None


def dqn():
    from stable_baselines3 import DQN

    made = DQN("MlpPolicy", "CartPole-v1", learning_starts=16, buffer_size=500, device="cpu")
    return (lambda: made.learn(64)), made.policy, None


def _neural_ode(**options):
    from torchdiffeq import odeint_adjoint

    class Derivative(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 2))

        def forward(self, t, y):
            return self.net(y**3)

    model = Derivative()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    start, truth = torch.randn(20, 1, 2), torch.randn(10, 20, 1, 2)
    times = torch.linspace(0.0, 2.0, 10)

    def step():
        optimizer.zero_grad()
        (odeint_adjoint(model, start, times, **options) - truth).abs().mean().backward()
        optimizer.step()

    return step, model, optimizer


def neural_ode_with_fixed_steps():
    return _neural_ode(method="rk4")


def neural_ode_with_adaptive_steps():
    return _neural_ode()
