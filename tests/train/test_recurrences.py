"""The chunked forms against the plain recurrences, values and gradients; ragged lengths."""

import pytest
import torch
from tinymodels.delta_rule import chunk_gated_delta_rule, recurrent_gated_delta_rule
from tinymodels.ssd import chunk_ssm, recurrent_ssm


def check(chunked, plain, inputs, **chunk):
    inputs = [t.requires_grad_() for t in inputs]
    a, b = chunked(*inputs, **chunk), plain(*inputs)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    weights = torch.randn_like(a)
    gradients = [torch.autograd.grad((out * weights).sum(), inputs) for out in (a, b)]
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("length", [1, 16, 37])
def test_delta_rule(length):
    q, k = torch.randn(2, 2, length, 2, 8)
    v = torch.randn(2, length, 4, 6)
    g, beta = -torch.rand(2, length, 4) * 3, torch.rand(2, length, 4)
    check(chunk_gated_delta_rule, recurrent_gated_delta_rule, [q, k, v, g, beta], chunk=16)


def test_delta_rule_repeated_keys_and_strong_decay():
    """All keys equal and beta 1: the worst conditioned system; decay e^-20 a token must not overflow."""
    k = torch.randn(1, 1, 1, 8).expand(1, 64, 1, 8).clone()
    v = torch.randn(1, 64, 1, 4)
    for decay in (0.0, -20.0):
        g = torch.full((1, 64, 1), decay)
        inputs = [k.clone(), k.clone(), v.clone(), g, torch.ones(1, 64, 1)]
        check(chunk_gated_delta_rule, recurrent_gated_delta_rule, inputs)


@pytest.mark.parametrize("length", [1, 16, 37])
def test_ssm(length):
    x, dt = torch.randn(2, length, 4, 6), torch.rand(2, length, 4)
    b, c = torch.randn(2, 2, length, 2, 8)
    check(chunk_ssm, recurrent_ssm, [x, dt, -torch.rand(4) * 8, b, c], chunk=16)
