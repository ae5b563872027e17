"""
What prompts alone have: attention by two groups of warps, last rows, the first token.

The twins are held against torch's own functions everywhere; on a GPU the kernels are held against
float64, beside plain torch in the same dtype, on fresh random numbers with poisoned outputs.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from qwen_vl_ros.engine.generate import Sampling, choice_of, choice_row
from qwen_vl_ros.engine.layers import rms_norm
from qwen_vl_ros.kernels.loader import KernelError
from qwen_vl_ros.kernels.prompt import HEAD_DIM, SPAN, PlainPrompt, PromptKernels

HALVES = (torch.bfloat16, torch.float16)


def relative(got, expected):
    return ((got.double() - expected).norm() / expected.norm()).item()


# ---- without a GPU ----------------------------------------------------------------------------


def test_the_twin_chooses_what_logits_say():
    generator = torch.Generator().manual_seed(3)
    x, head = torch.randn(1, 64, generator=generator), torch.randn(200, 64, generator=generator)
    norm = 1 + 0.1 * torch.randn(64, generator=generator)
    got = choice_of(PlainPrompt().first_token(x, norm, 1e-6, head, torch.empty(4).double()))
    expected = choice_of(choice_row(rms_norm(x, norm, 1e-6)[0] @ head.T, Sampling()))
    assert got.token == expected.token and got.finite
    assert got.probability == pytest.approx(expected.probability, rel=1e-4)
    assert got.margin == pytest.approx(expected.margin, rel=1e-3)
    head[7, 3] = float('nan')
    assert not choice_of(PlainPrompt().first_token(x, norm, 1e-6, head,
                                                   torch.empty(4).double())).finite


def test_the_twin_copies_the_last_row_that_counts():
    a, b = torch.arange(24.0).view(6, 4), -torch.arange(24.0).view(6, 4)
    span = torch.tensor([0, 0, 0, 0, 9, 5])
    got = PlainPrompt().last_rows(a, b, span, torch.empty(2, 4))
    assert torch.equal(got, torch.stack((a[4], b[4])))


# ---- on a GPU ---------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def kernels():
    try:
        return PromptKernels(torch.device('cuda', 0))
    except (FileNotFoundError, KernelError) as error:
        pytest.skip(str(error))


def span_of(kernels, cache, start, n):
    """Return the span of a chunk on the device, with its map where there is one."""
    span = torch.zeros(SPAN, dtype=torch.int64)
    span[:6] = torch.tensor([cache.data_ptr(), *cache.stride()[:3], start, n])
    if kernels.mapped:
        kernels.map_cache(span, cache)
    return span.cuda()


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', HALVES)
@pytest.mark.parametrize('n,start,heads,kv_heads', [
    (1, 0, 12, 2), (9, 0, 12, 2), (64, 0, 12, 2), (65, 63, 12, 2), (428, 0, 12, 2),
    (413, 15, 28, 4), (200, 1000, 4, 4), (1233, 0, 12, 2)])
def test_attention_of_a_prompt(kernels, dtype, n, start, heads, kv_heads):
    """Rows of other positions, and those that fill the bucket, are not numbers: never read."""
    rows, layer, capacity = -(-n // 64) * 64, 1, start + n + 5
    cache = torch.full((3, 2, kv_heads, capacity, HEAD_DIM), float('nan'), dtype=dtype,
                       device='cuda')
    cache[layer, :, :, :start + n] = torch.randn(2, kv_heads, start + n, HEAD_DIM, device='cuda')
    qkv = torch.full((rows, heads + 2 * kv_heads, HEAD_DIM), float('nan'), dtype=dtype,
                     device='cuda')
    qkv[:n] = torch.randn(n, heads + 2 * kv_heads, HEAD_DIM, device='cuda')
    span = span_of(kernels, cache, start, n)

    def attend(wide):
        q = qkv[:n, :heads].transpose(0, 1).to(wide)
        k, v = (z[:, :start + n].repeat_interleave(heads // kv_heads, 0).to(wide)
                for z in cache[layer])
        seen = torch.ones(n, start + n, dtype=torch.bool, device='cuda').tril(start)
        return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen)[
            0].transpose(0, 1)

    expected, plain = attend(torch.float64), attend(dtype)
    flat = qkv.view(rows, -1)
    for form in ('mma', 'wgmma') if kernels.mapped else ('mma',):
        got = torch.full((rows, heads * HEAD_DIM), float('nan'), dtype=dtype, device='cuda')
        kernels.attend(flat, heads, kv_heads, span, layer, got, form=form)
        assert torch.isfinite(got[:n]).all() and torch.isnan(got[n:]).all()
        error = relative(got[:n].view(expected.shape), expected)
        assert error <= 2 * relative(plain, expected), form
        tail = torch.full_like(got, float('nan'))
        kernels.attend(flat, heads, kv_heads, span, layer, tail, tail=True, form=form)
        first = (n - 1) // 64 * 64
        assert torch.equal(tail[first:n], got[first:n]) and torch.isnan(tail[:first]).all()


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', HALVES)
@pytest.mark.parametrize('vocab,width', [
    (151936, 1536), (152064, 3584), (513, 256), (3, 2048), (1001, 768)])
def test_the_first_token(kernels, dtype, vocab, width):
    head = torch.randn(vocab, width, device='cuda', dtype=dtype) * width ** -0.5
    norm = (1 + 0.1 * torch.randn(width, device='cuda')).to(dtype)
    for seed in range(3):
        x = torch.randn(1, width, device='cuda', dtype=dtype) * (1 + seed)
        expected = PlainPrompt().first_token(
            x.double(), norm, 1e-6, head, torch.empty(4, dtype=torch.float64, device='cuda'))
        # The normed row is rounded, as where logits are computed in this dtype.
        twin = PlainPrompt().first_token(
            x, norm, 1e-6, head, torch.empty(4, dtype=torch.float64, device='cuda'))
        plain = choice_row(rms_norm(x, norm, 1e-6)[0] @ head.T, Sampling())
        got = kernels.first_token(x, norm, 1e-6, head, torch.full(
            (4,), float('nan'), dtype=torch.float64, device='cuda'))
        assert (got[0] == twin[0] or twin[2] < 1e-3) and got[3] == 1
        assert abs(got[1] - twin[1]) <= 1e-3 * twin[1]
        assert abs(got[2] - twin[2]) <= 1e-3 * (1 + twin[2])
        error, plain_error = (abs(z[1] - expected[1]) for z in (got, plain))
        assert error <= 2 * plain_error + 2 ** -8 * expected[1]


@pytest.mark.gpu
def test_the_first_token_of_broken_and_equal_logits(kernels):
    out = torch.empty(4, dtype=torch.float64, device='cuda')
    x = torch.ones(1, 256, device='cuda', dtype=torch.bfloat16)
    norm, head = x[0].clone(), torch.zeros(5000, 256, device='cuda', dtype=torch.bfloat16)
    assert kernels.first_token(x, norm, 1e-6, head, out).tolist() == [0, 1 / 5000, 0, 1]
    head[4711:4713] = 1
    token, probability, margin, finite = kernels.first_token(x, norm, 1e-6, head, out).tolist()
    assert (token, margin, finite) == (4711, 0, 1) and probability == pytest.approx(0.5)
    for value in ('nan', 'inf', '-inf'):
        head[3000, 7] = float(value)
        assert kernels.first_token(x, norm, 1e-6, head, out)[3] == 0
    with pytest.raises(KernelError, match='a multiple of 256'):
        kernels.first_token(x[:, :64], norm[:64], 1e-6, head[:, :64].contiguous(), out)


@pytest.mark.gpu
def test_last_rows(kernels):
    a, b = (torch.randn(64, 1536, device='cuda', dtype=torch.bfloat16) for _ in range(2))
    for n in (1, 33, 64):
        span = torch.tensor([0, 0, 0, 0, 9, n], device='cuda')
        out = torch.full((2, 1536), float('nan'), device='cuda', dtype=torch.bfloat16)
        kernels.last_rows(a, b, span, out)
        assert torch.equal(out, torch.stack((a[n - 1], b[n - 1])))


@pytest.mark.gpu
def test_a_cache_that_does_not_lie_as_it_should_is_refused(kernels):
    cache = torch.zeros(2, 2, 2, 70, HEAD_DIM, device='cuda', dtype=torch.bfloat16)
    span = torch.zeros(SPAN, dtype=torch.int64)
    span[:6] = torch.tensor([cache.data_ptr(), *cache.stride()[:3], 0, 9])
    if kernels.mapped:
        kernels.map_cache(span, cache)
        assert span[8:].any()
    with pytest.raises(KernelError, match=r'one after the other|no wgmma form'):
        kernels.map_cache(span, cache[:, :, :, :64])


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', HALVES)
@pytest.mark.parametrize('rows,outs,ins', [
    (192, 8960, 1536), (448, 8960, 1536), (256, 18944, 3584), (1, 72, 64), (65, 8, 128),
    (200, 1000, 320), (700, 144, 64)])
def test_gated_products(kernels, dtype, rows, outs, ins):
    if not kernels.mapped:
        pytest.skip('no wgmma here')
    x = torch.randn(rows, ins, device='cuda', dtype=dtype)
    weight = torch.randn(2 * outs, ins, device='cuda', dtype=dtype) * ins ** -0.5
    gate, up = (x.double() @ weight.double().T).chunk(2, 1)
    expected = F.silu(gate) * up
    gate, up = (x @ weight.T).chunk(2, 1)
    plain = relative(F.silu(gate) * up, expected)
    got = torch.full((rows, outs), float('nan'), device='cuda', dtype=dtype)
    kernels.multiply_gated(x, weight, got)
    assert torch.isfinite(got).all()
    assert relative(got, expected) <= 2 * plain
    with pytest.raises(KernelError, match='a multiple of 64'):
        kernels.multiply_gated(x[:, :40].contiguous(), weight[:, :40].contiguous(), got)
