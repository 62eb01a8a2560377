"""Products of training: the same numbers, values and gradients, as PyTorch's own linear layers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from distill import products
from distill.products import is_bare, product, project


def exact(dtype):
    return {"rtol": 1e-9, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_product_with_a_weight_and_its_transpose(rows, dtype):
    x, weight = torch.randn(rows, 24, dtype=dtype), torch.randn(40, 24, dtype=dtype)
    want = x.double() @ weight.double().T
    torch.testing.assert_close(product(x, weight).double(), want, **exact(dtype))
    torch.testing.assert_close(product(x, weight.T.contiguous().T).double(), want, **exact(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_project_is_linear_with_its_gradients(dtype):
    """Against double precision, through a result that is not contiguous when its gradient comes."""
    linear, x = nn.Linear(24, 40, bias=False, dtype=dtype), torch.randn(2, 9, 24, dtype=dtype, requires_grad=True)
    factor = torch.randn(2, 40, 9, dtype=torch.float64)
    x_, weight_ = (t.detach().double().requires_grad_() for t in (x, linear.weight))
    got, want = project(linear, x), F.linear(x_, weight_)
    torch.testing.assert_close(got.double(), want, **exact(dtype))
    (got.transpose(1, 2).double() * factor).sum().backward()
    (want.transpose(1, 2) * factor).sum().backward()
    torch.testing.assert_close(x.grad.double(), x_.grad, **exact(dtype))
    torch.testing.assert_close(linear.weight.grad.double(), weight_.grad, **exact(dtype))


def test_only_the_gradients_that_are_wanted():
    linear, x = nn.Linear(8, 6, bias=False), torch.randn(3, 8)
    project(linear, x).sum().backward()
    assert x.grad is None
    torch.testing.assert_close(linear.weight.grad, x.sum(0).expand(6, 8))
    frozen, y = nn.Linear(8, 6, bias=False).requires_grad_(False), torch.randn(3, 8, requires_grad=True)
    project(frozen, y).sum().backward()
    assert frozen.weight.grad is None
    torch.testing.assert_close(y.grad, frozen.weight.sum(0).expand(3, 8))


def test_only_plain_layers_are_bypassed(monkeypatch):
    """A bias, a subclass, a hook, autocast or no gradient: the module itself is called."""

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    hooked = nn.Linear(4, 4, bias=False)
    hooked.register_forward_hook(lambda _module, _args, out: out + 1)
    special = [nn.Linear(4, 4), Doubled(4, 4, bias=False), hooked, nn.Identity()]
    assert not any(map(is_bare, special))
    x, plain = torch.randn(3, 4), nn.Linear(4, 4, bias=False)
    assert is_bare(plain)
    monkeypatch.setattr(products, "_Project", None)  # using it fails
    for module in special:
        torch.testing.assert_close(project(module, x), module(x))
    with torch.no_grad():
        torch.testing.assert_close(project(plain, x), plain(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert project(plain, x).dtype == torch.bfloat16
