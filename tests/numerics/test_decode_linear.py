"""What the CUDA decode linears share and needs no GPU: cutting a call into parts of as many tokens as a kernel
takes."""

import pytest
import torch
from fu_compile.lowerings import decode_linear as common


@pytest.mark.parametrize("shape", [(1,), (1, 1), (4, 2), (3, 5), (70,)])
@pytest.mark.parametrize("epilogue", ["", "residual", "swiglu", "swiglu|residual"])
@pytest.mark.parametrize("most", [1, 4, 8, 64])
def test_parts_are_the_whole(shape, epilogue, most):
    n, k = 6, 8
    x, weight = torch.randn(*shape, k), torch.randn(n, k)
    columns = n // 2 if "swiglu" in epilogue else n
    residual = torch.randn(*shape, columns) if "residual" in epilogue else None
    seen = []

    def linear(x, residual, y):
        out = x @ weight.T
        if "swiglu" in epilogue:
            gate, up = out.chunk(2, -1)
            out = gate * up
        out = out if residual is None else out + residual
        seen.append(x.numel() // k)
        return out if y is None else y.copy_(out)

    got = common.in_parts(x, n, k, residual, epilogue, most, linear)
    assert max(seen) <= most
    assert sum(seen) == x.numel() // k
    # The same products, summed by a matrix product of another height.
    torch.testing.assert_close(got, linear(x, residual, None), rtol=1e-5, atol=1e-5)


def test_a_residual_without_its_epilogue_is_not_added():
    x, seen = torch.randn(5, 8), []
    common.in_parts(x, 8, 8, torch.randn(5, 8), "", 2, lambda x, r, y: seen.append(r) or y.copy_(x))
    assert seen == [None, None, None]
