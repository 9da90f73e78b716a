"""Every schedule of the learning rate, by its equation."""

import math

import pytest
import torch

from flatten_zoo.training.loop.optimization import build_scheduler
from flatten_zoo.training.options.definitions import train_parser

T = 6


def rates(options: str) -> list[float]:
    """The rate of every epoch, from 1 on and without warm-up if not told otherwise."""
    args = train_parser().parse_args(f'--epochs {T} --lr 1 --warmup-epochs 0 {options}'.split())
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=args.lr)
    scheduler, epochs = build_scheduler(args, optimizer, updates=10, start=0)
    seen = []
    for epoch in range(epochs):
        if scheduler is not None and epoch:
            scheduler.step(epoch, 0.0)
        seen.append(optimizer.param_groups[0]['lr'])
    return seen


@pytest.mark.filterwarnings('ignore:PlateauLRScheduler')
@pytest.mark.parametrize(
    'options, expected',
    [
        ('--sched cosine', [(1 + math.cos(math.pi * t / T)) / 2 for t in range(T)]),
        ('--sched cosine --min-lr 0.2', [0.2 + 0.8 * (1 + math.cos(math.pi * t / T)) / 2 for t in range(T)]),
        ('--sched cosine --lr-k-decay 2', [(1 + math.cos(math.pi * t**2 / T**2)) / 2 for t in range(T)]),
        (
            '--sched cosine --epochs 2 --lr-cycle-limit 2 --lr-cycle-mul 2 --lr-cycle-decay 0.5',
            [(1 + math.cos(math.pi * t / 2)) / 2 for t in range(2)]
            + [(1 + math.cos(math.pi * t / 4)) / 4 for t in range(4)],
        ),
        ('--sched tanh', [1, *((1 - math.tanh(-7 * (1 - t / T) + 3 * t / T)) / 2 for t in range(1, T))]),
        ('--sched step --decay-epochs 2 --dr 0.5', [1, 1, 0.5, 0.5, 0.25, 0.25]),
        ('--sched multistep --decay-milestones 2 4', [1, 0.1, 0.1, 0.01, 0.01, 0.01]),  # timm counts the epoch to come
        ('--sched poly --decay-rate 2', [(1 - t / T) ** 2 for t in range(T)]),
        ('--sched wsd --decay-epochs 4', [1, 1, *(1 - math.sqrt(t / 4) for t in range(4))]),
        (
            '--sched rsqrt --decay-epochs 4 --warmup-epochs 2 --warmup-lr 0.2',
            [0.2, 0.6, *(math.sqrt(2 / (2 + t)) * (1 - t / 4) for t in range(4))],
        ),
        ('--sched plateau --patience-epochs 1', [1, 1, 1, 0.1, 0.1, 0.01]),
        ('--sched constant', [1] * T),
        ('--sched none', [1] * T),
        (
            '--sched cosine --warmup-epochs 2 --warmup-prefix --warmup-lr 0.5 --min-lr 0.25 --cooldown-epochs 1',
            [0.5, 0.75, *(0.25 + 0.75 * (1 + math.cos(math.pi * t / T)) / 2 for t in range(T)), 0.25],
        ),
        ('--sched constant --warmup-epochs 2 --warmup-prefix --warmup-lr 0.5', [0.5, 0.75, *[1] * T]),
    ],
)
def test_rates(options, expected):
    assert rates(options) == pytest.approx(expected, abs=1e-9)


def test_noise_is_within_its_limits_and_time():
    noisy = rates('--sched constant --lr-noise 0.5 --lr-noise-pct 0.3 --lr-noise-std 5')
    assert noisy[: T // 2] == [1] * (T // 2)
    assert all(rate != 1 and abs(rate - 1) < 0.3 for rate in noisy[T // 2 :])
