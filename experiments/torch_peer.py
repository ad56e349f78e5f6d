"""The same networks and training steps in plain PyTorch: the peer of the benchmark.

Written the way one writes it without a thought for speed, as the paper describes it:
the Jacobian by ``r`` backward passes with ``create_graph``, the mixtures by PyTorch's own
distributions. PyTorch is optional:
``pip install torch``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import distributions, nn


class Peer(NamedTuple):
    """A model in PyTorch.

    Attributes:
      step: ``step(images NCHW, labels)`` trains it once and gives its loss terms.
      log_probs: ``log_probs(images NCHW)`` ``[B, 10]``, in evaluation mode.
    """

    step: Callable[[torch.Tensor, torch.Tensor], dict[str, float]]
    log_probs: Callable[[torch.Tensor], torch.Tensor]


class SmallMLP(nn.Sequential):
    """Two hidden layers of 400 and 200 elu units with BatchNorm."""

    def __init__(self, outputs: int) -> None:
        super().__init__(
            nn.Flatten(),
            nn.Linear(3072, 400),
            nn.BatchNorm1d(400),
            nn.ELU(),
            nn.Linear(400, 200),
            nn.BatchNorm1d(200),
            nn.ELU(),
            nn.Linear(200, outputs),
        )


class _Block(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.stride, self.missing = stride, channels - channels_in

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        before = self.missing // 2
        shortcut = F.pad(
            x[:, :, :: self.stride, :: self.stride],
            (0, 0, 0, 0, before, self.missing - before),
        )
        return F.relu(y + shortcut)


class ResNet20(nn.Module):
    """He et al.'s 20-layer network for 32x32 images, Kaiming-normal start."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        widths = [(16, 16, 1)] * 3 + [(16, 32, 2)] + [(32, 32, 1)] * 2
        widths += [(32, 64, 2)] + [(64, 64, 1)] * 2
        self.blocks = nn.Sequential(*(_Block(*shape) for shape in widths))
        self.linear = nn.Linear(64, outputs)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.blocks(F.relu(self.norm(self.conv(x))))
        return self.linear(y.mean(dim=(2, 3)))


class Mixtures(nn.Module):
    """``q(z | y)``: 10 classes of ``components`` full-covariance Gaussians."""

    def __init__(self, dim: int, initialisation: str, classes: int = 10, components: int = 10):
        super().__init__()
        shape = (classes, components, dim)
        spread = {"zeros": 0.001, "random": 10.0}[initialisation]
        scale = torch.eye(dim).expand(classes, components, dim, dim).clone()
        if initialisation == "random":
            scale = scale + torch.tril(torch.empty_like(scale).uniform_(-1, 1), -1)
        self.logits = nn.Parameter(torch.zeros(shape[:-1]))
        self.means = nn.Parameter(torch.empty(shape).uniform_(-spread, spread))
        self.scale_tril = nn.Parameter(scale)

    def log_prob(self, z: torch.Tensor) -> torch.Tensor:
        """``[B, classes]``."""
        normal = distributions.MultivariateNormal(self.means, scale_tril=self.scale_tril)
        weights = distributions.Categorical(logits=self.logits)
        return distributions.MixtureSameFamily(weights, normal).log_prob(z[:, None])


def half_log_det(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """``1/2 log det(J J^T)`` by one backward pass per output."""
    rows = [
        torch.autograd.grad(z[:, i].sum(), x, create_graph=True)[0].flatten(1)
        for i in range(z.shape[1])
    ]
    jacobian = torch.stack(rows, 1)
    return 0.5 * torch.logdet(jacobian @ jacobian.transpose(1, 2))


def make_peer(network: str, variant: str, beta: float, num_jacobian: int) -> Peer:
    """An untrained model and its training step with the paper's hyperparameters.

    Args:
      network: ``"small_mlp"`` or ``"resnet20"``.
      variant: ``"softmax_ce"``, ``"vib"``, ``"mass_beta0"`` or ``"mass_exact_paper_bn"``.
      beta: of MASS and VIB.
      num_jacobian: examples in the Jacobian term.
    """
    small = network == "small_mlp"
    dim = 15 if small else 20
    outputs = {"softmax_ce": 10, "vib": (dim + dim * (dim + 1) // 2) if small else 2 * dim}
    net = (SmallMLP if small else ResNet20)(outputs.get(variant, dim))
    q = decoder = None
    own: list[nn.Parameter] = []
    if variant == "vib":
        decoder, q = nn.Linear(dim, 10), Mixtures(dim, "zeros", classes=1)
        own = [*decoder.parameters(), *q.parameters()]
    elif variant != "softmax_ce":
        q = Mixtures(dim, "random" if small else "zeros")
        own = list(q.parameters())
    optimizer: torch.optim.Optimizer
    if small:
        own_rate = 2.5e-5 if variant.startswith("mass") else 5e-4
        groups: list[dict[str, Any]] = [{"params": net.parameters()}]
        groups += [{"params": own, "lr": own_rate}] if own else []
        optimizer = torch.optim.Adam(groups, lr=5e-4)
    else:
        optimizer = torch.optim.SGD([*net.parameters(), *own], lr=0.1, momentum=0.9)

    def loss_terms(x: torch.Tensor, y: torch.Tensor) -> dict[str, tuple[float, torch.Tensor]]:
        if variant == "softmax_ce":
            return {"cross_entropy": (1.0, F.cross_entropy(net(x), y))}
        assert q is not None
        if variant == "vib":
            assert decoder is not None
            return _vib_terms(net(x), y, decoder, q, dim, 5 if small else 10, beta)
        if variant == "mass_beta0":
            return {"cross_entropy": (1.0, F.cross_entropy(q.log_prob(net(x)), y))}
        sub = x[:num_jacobian].requires_grad_()
        z_sub = net(sub)
        jacobian = -half_log_det(sub, z_sub).mean()
        class_log_prob = q.log_prob(torch.cat([z_sub, net(x[num_jacobian:])]))
        entropy = -(torch.logsumexp(class_log_prob, -1) - np.log(10)).mean()
        return {
            "cross_entropy": (1.0, F.cross_entropy(class_log_prob, y)),
            "entropy": (beta, entropy),
            "jacobian": (beta, jacobian),
        }

    def step(x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
        optimizer.zero_grad()
        terms = loss_terms(x, y)
        torch.stack([weight * value for weight, value in terms.values()]).sum().backward()
        optimizer.step()
        return {name: value.item() for name, (_, value) in terms.items()}

    @torch.no_grad()
    def log_probs(x: torch.Tensor) -> torch.Tensor:
        net.eval()
        outputs = net(x)
        net.train()
        if decoder is not None:  # without the encoder's noise: the mean is decoded
            outputs = decoder(outputs[:, :dim])
        elif q is not None:
            outputs = q.log_prob(outputs)
        return torch.log_softmax(outputs, -1)

    return Peer(step, log_probs)


def _vib_terms(
    outputs: torch.Tensor,
    y: torch.Tensor,
    decoder: nn.Linear,
    marginal: Mixtures,
    dim: int,
    samples: int,
    beta: float,
) -> dict[str, tuple[float, torch.Tensor]]:
    mean, diagonal = outputs[:, :dim], F.softplus(outputs[:, dim : 2 * dim])
    scale = torch.diag_embed(diagonal)
    if outputs.shape[1] > 2 * dim:
        rows, columns = torch.tril_indices(dim, dim, -1)
        scale[:, rows, columns] = outputs[:, 2 * dim :]
    noise = torch.randn(samples, len(y), dim)
    z = mean + torch.einsum("brs,nbs->nbr", scale, noise)
    log_encoder = (
        -0.5 * noise.square().sum(-1) - diagonal.log().sum(-1) - 0.5 * dim * np.log(2 * np.pi)
    )
    flat = z.flatten(0, 1)
    rate = (log_encoder.flatten() - marginal.log_prob(flat)[:, 0]).mean()
    return {
        "cross_entropy": (1.0, F.cross_entropy(decoder(flat), y.repeat(samples))),
        "rate": (beta, rate),
    }
