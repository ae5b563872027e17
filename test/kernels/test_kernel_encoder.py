"""
Kernels of encoder and prefill against float64, beside their plain twins in the same dtype.

On a GPU every kernel is run on fresh random numbers with its output poisoned before; what needs
none (tiles, remembered algorithms, the twins themselves) is tested everywhere.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from qwen_vl_ros.engine.layers import activate, inverse_frequencies
from qwen_vl_ros.kernels.encoder import (
    ACTIVATIONS,
    FORMS,
    ROTATED_HEAD_DIM,
    TILE_ROWS,
    EncoderKernels,
    tile_list,
)
from qwen_vl_ros.kernels.encoder_plain import PlainKernels, PlainProducts, quantize_rows
from qwen_vl_ros.kernels.gemm import ALGORITHM_BYTES, Products, Shape, Store
from qwen_vl_ros.kernels.loader import KernelError

HALVES = (torch.bfloat16, torch.float16)

#: Steps of rounding to INT8, as a share of the norm, for numbers like these.
INT8_ERROR = 0.02


def relative(got, expected):
    return ((got.double() - expected).norm() / expected.norm()).item()


def no_worse(got, twin, expected):
    """Rule of the house: at most twice the error of the plain form in the same dtype."""
    assert torch.isfinite(got).all()
    assert relative(got, expected) <= 2 * relative(twin, expected) + 1e-9


# ---- without a GPU ----------------------------------------------------------------------------


@pytest.mark.parametrize('segments', [[4], [128], [129], [4, 300, 128], [1564], [8] * 20])
def test_tiles_cover_every_row_once_and_stay_in_their_segment(segments):
    tiles = tile_list(segments)
    ends = np.cumsum(segments)
    covered = []
    for first, end, first_key, end_key in tiles:
        assert 0 < end - first <= TILE_ROWS
        assert end_key in ends and first_key == end_key - segments[list(ends).index(end_key)]
        assert first_key <= first and end <= end_key
        covered += range(first, end)
    assert covered == list(range(sum(segments)))


def test_no_segments_make_no_tiles():
    assert tile_list([]).shape == (0, 4)


def test_remembered_algorithms_outlive_the_process(tmp_path):
    file = tmp_path / 'deep' / 'products.json'
    name = Shape(64, 128, 256, torch.bfloat16, True, False).name
    algorithm = bytes(range(ALGORITHM_BYTES))
    Store(file, 'GPU 1').put(name, algorithm)
    Store(file, 'GPU 2').put(name, algorithm[::-1])
    assert Store(file, 'GPU 1').get(name) == algorithm
    assert Store(file, 'GPU 2').get(name) == algorithm[::-1]
    assert Store(file, 'GPU 3').get(name) is None
    assert Store(file, 'GPU 1').get('another shape') is None


@pytest.mark.parametrize('text', ['', '{', '[]', '{"GPU": 3}', '{"GPU": {"shape": "zz"}}',
                                  '{"GPU": {"shape": "00"}}', '{"GPU": {"shape": 7}}'])
def test_a_spoilt_file_of_algorithms_is_as_good_as_none(tmp_path, text):
    file = tmp_path / 'products.json'
    file.write_text(text)
    store = Store(file, 'GPU')
    assert store.get('shape') is None
    store.put('shape', bytes(ALGORITHM_BYTES))
    assert json.loads(file.read_text())['GPU']['shape'] == '00' * ALGORITHM_BYTES


def test_a_file_that_cannot_be_written_is_no_failure(tmp_path):
    (tmp_path / 'products.json').mkdir()
    store = Store(tmp_path / 'products.json', 'GPU')
    store.put('shape', bytes(ALGORITHM_BYTES))
    assert store.get('shape') == bytes(ALGORITHM_BYTES)


def test_names_tell_shapes_apart():
    shapes = [Shape(r, 128, 64, dtype, bias, add) for r in (1, 2) for dtype in HALVES
              for bias in (False, True) for add in (False, True)]
    assert len({shape.name for shape in shapes}) == len(shapes)
    assert shapes[0].flops == 2 * 128 * 64


def test_rows_in_int8_are_symmetric_and_tell_zeros():
    x = torch.randn(5, 64)
    x[2] = 0
    codes, scales = quantize_rows(x)
    assert codes.abs().amax(1).tolist() == [127, 127, 0, 127, 127]
    assert ((codes * scales[:, None] - x).abs() <= scales[:, None] * 0.51).all()


# ---- on a GPU ---------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def kernels():
    try:
        return EncoderKernels(torch.device('cuda'))
    except (FileNotFoundError, KernelError) as error:
        pytest.skip(str(error))


@pytest.fixture(scope='module')
def products(kernels, tmp_path_factory):
    return Products(torch.device('cuda', 0), store=tmp_path_factory.mktemp('store') / 'p.json')


def random(*shape, dtype, scale=1.0):
    return (torch.randn(*shape, device='cuda') * scale).to(dtype)


def poisoned(*shape, dtype):
    if dtype == torch.int8:
        return torch.full(shape, 99, dtype=dtype, device='cuda')
    return torch.full(shape, float('nan'), dtype=dtype, device='cuda')


TWINS = PlainKernels()


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', HALVES)
@pytest.mark.parametrize('rows,width', [(1600, 1280), (37, 1536), (5, 256), (3, 3584), (1, 8),
                                        (6, 520), (2, 1032), (7, 2048), (9, 2056)])
def test_norms(kernels, dtype, rows, width):
    x, weight = random(rows, width, dtype=dtype, scale=3) + 1, random(width, dtype=dtype)
    for bias in (random(width, dtype=dtype), None):
        wide = x.double()
        if bias is not None:
            expected = F.layer_norm(wide, (width,), weight.double(), bias.double(), 1e-6)
            twin = F.layer_norm(x, (width,), weight, bias, 1e-6)
        else:
            expected = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (
                weight.double())
            twin = TWINS.norm(x, weight, None, 1e-6, torch.empty_like(x))
        no_worse(kernels.norm(x, weight, bias, 1e-6, poisoned(rows, width, dtype=dtype)), twin,
                 expected)
        codes, scales = poisoned(rows, width, dtype=torch.int8), poisoned(rows,
                                                                          dtype=torch.float32)
        kernels.norm_s8(x, weight, bias, 1e-6, codes, scales)
        assert relative(codes * scales.double()[:, None], expected) < INT8_ERROR


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', HALVES)
@pytest.mark.parametrize('name', ACTIVATIONS)
def test_activations(kernels, dtype, name):
    for rows, width in ((130, 5120), (3, 8), (17, 264)):
        x = random(rows, width, dtype=dtype, scale=3)
        x[0, :4] = torch.tensor([-60000.0, 60000.0, 0.0, -1e-6])
        expected = activate(x.double(), name)
        twin = activate(x, name)
        no_worse(kernels.activate(x, name, poisoned(rows, width, dtype=dtype)), twin, expected)
        own = x.clone()
        no_worse(kernels.activate(own, name, own), twin, expected)
        y = random(rows, width, dtype=dtype)
        codes, scales = poisoned(rows, width, dtype=torch.int8), poisoned(rows,
                                                                          dtype=torch.float32)
        kernels.activate_s8(y, name, codes, scales)
        assert relative(codes * scales.double()[:, None],
                        activate(y.double(), name)) < INT8_ERROR
        both = random(rows, 2 * width, dtype=dtype)
        first, second = both.chunk(2, dim=-1)
        no_worse(kernels.gate(both, name, poisoned(rows, width, dtype=dtype)),
                 activate(first, name) * second,
                 activate(first.double(), name) * second.double())


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', HALVES)
@pytest.mark.parametrize('rows,width,filled', [(1600, 588, 592), (3, 1176, 1176), (5, 4, 16)])
def test_bytes_are_centred_exactly(kernels, dtype, rows, width, filled):
    x = torch.randint(0, 256, (rows, width), device='cuda', dtype=torch.uint8)
    got = kernels.centre(x, poisoned(rows, filled, dtype=dtype))
    assert torch.equal(got[:, :width].int(), x.int() - 128) and not got[:, width:].any()


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', HALVES)
@pytest.mark.parametrize('heads,dim', [(16, 80), (4, 64)])
def test_rotation_on_the_grid(kernels, dtype, heads, dim):
    rows = 333
    qkv = random(rows, 3 * heads * dim, dtype=dtype)
    spots = torch.randint(0, 2048, (rows, 2), device='cuda', dtype=torch.int32)
    angles = torch.arange(2048)[:, None].float() * inverse_frequencies(dim // 2, 1e4)
    turns = torch.stack((angles.cos(), angles.sin()), -1).cuda()
    expected, twin = qkv.double(), qkv.clone()
    TWINS.rotate_grid(expected, heads, spots, turns.double())
    TWINS.rotate_grid(twin, heads, spots, turns)
    values = qkv[:, 2 * heads * dim:].clone()
    kernels.rotate_grid(qkv, heads, spots, turns)
    no_worse(qkv, twin, expected)
    assert torch.equal(qkv[:, 2 * heads * dim:], values)


SEGMENTS = ([1564], [200, 36, 4, 1000], [4], [64, 128, 129], [112, 224, 113, 336], [4784],
            [160, 320, 161, 480, 159], [516] * 4,
            [1, 2, 3, 5, 31, 63, 64, 65, 111, 112, 113, 127, 128, 129, 130])


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', HALVES)
@pytest.mark.parametrize('form,dim', [('mma', 80), ('mma', 64), ('wgmma', 80),
                                      ('wgmma_fine', 80)])
def test_attention_within_segments(kernels, dtype, form, dim):
    if not kernels.has(form):
        pytest.skip(f'this GPU has no {form}')
    heads = 16
    for segments in SEGMENTS:
        n = sum(segments)
        qkv = random(n, 3 * heads * dim, dtype=dtype)
        tiles = torch.from_numpy(tile_list(segments)).cuda()
        # Empty tiles fill the bucket.
        padded = torch.cat((tiles, torch.zeros(3, 4, dtype=torch.int32, device='cuda')))
        expected = TWINS.attend_segments(
            qkv.double(), heads, tiles, torch.empty(n, heads * dim, device='cuda').double())
        twin = TWINS.attend_segments(qkv, heads, tiles, torch.empty(n, heads * dim, dtype=dtype,
                                                                    device='cuda'))
        got = kernels.attend_segments(qkv, heads, padded, poisoned(n, heads * dim, dtype=dtype),
                                      form)
        no_worse(got, twin, expected)


@pytest.mark.gpu
def test_a_segment_that_is_not_finite_spoils_no_other(kernels):
    for form in filter(kernels.has, FORMS):
        qkv = random(300, 3 * 16 * 80, dtype=torch.bfloat16)
        tiles = torch.from_numpy(tile_list([100, 200])).cuda()
        clean = kernels.attend_segments(qkv, 16, tiles, torch.empty_like(qkv[:, :1280]), form)
        qkv[100:] = float('nan')
        spoilt = kernels.attend_segments(qkv, 16, tiles, torch.empty_like(qkv[:, :1280]), form)
        assert torch.equal(clean[:100], spoilt[:100]) and torch.isnan(spoilt[100:]).all()


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', HALVES)
@pytest.mark.parametrize('n,start,heads,kv_heads,dim', [
    (428, 0, 12, 2, 128), (37, 100, 12, 2, 128), (1, 5, 28, 4, 128), (200, 33, 4, 2, 64),
    (512, 700, 12, 2, 128), (65, 64, 16, 16, 80)])
def test_text_into_the_cache_and_attention_to_it(kernels, dtype, n, start, heads, kv_heads, dim):
    rows, capacity, layer = -(-n // 64) * 64, 1300, 1
    cache = poisoned(3, 2, kv_heads, capacity, dim, dtype=dtype)
    cache[layer, :, :, :start] = random(2, kv_heads, start, dim, dtype=dtype)
    before = cache.clone()
    qkv = random(rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
    raw = qkv.clone().view(rows, -1, dim)
    positions = torch.randint(0, 30000, (3, rows), device='cuda')
    axes = torch.randint(0, 3, (dim // 2,), device='cuda', dtype=torch.int32)
    frequencies = inverse_frequencies(dim, 1e6).cuda()
    turns = kernels.turns(positions, axes, frequencies,
                          poisoned(rows, dim // 2, 2, dtype=torch.float32))
    angles = (positions[axes.long()].T.float() * frequencies).double()
    assert (turns - torch.stack((angles.cos(), angles.sin()), -1)).abs().max() < 1e-6
    span = torch.tensor([cache.data_ptr(), *cache.stride()[:3], start, n], device='cuda')
    kernels.rotate_text(qkv, heads, kv_heads, turns, span, layer)

    cos, sin = (turns[:n, None, :, i].double().repeat(1, 1, 2) for i in range(2))
    turned = raw[:n, :heads + kv_heads].double()
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-high, low), -1) * sin
    q = qkv.view(rows, -1, dim)[:n, :heads]
    keys, values = cache[layer]
    no_worse(q, turned[:, :heads].to(dtype), turned[:, :heads])
    new = keys[:, start:start + n].transpose(0, 1)
    no_worse(new, turned[:, heads:].to(dtype), turned[:, heads:])
    assert torch.equal(values[:, start:start + n].transpose(0, 1), raw[:n, heads + kv_heads:])
    rest = cache.clone()
    rest[layer, :, :, start:start + n] = before[layer, :, :, start:start + n]
    assert torch.equal(rest.nan_to_num(7), before.nan_to_num(7))  # nothing else was written

    group = heads // kv_heads
    k, v = (z[:, :start + n].repeat_interleave(group, 0) for z in (keys, values))
    seen = torch.ones(n, start + n, dtype=torch.bool, device='cuda').tril(start)

    def attend(kind):
        return F.scaled_dot_product_attention(
            *(z[None].to(kind) for z in (q.transpose(0, 1), k, v)), attn_mask=seen)[0]

    got = kernels.attend_cache(qkv, heads, kv_heads, span, layer,
                               poisoned(rows, heads * dim, dtype=dtype))
    no_worse(got.view(rows, heads, dim)[:n].transpose(0, 1), attend(dtype), attend(torch.double))
    assert torch.isnan(got[n:]).all()


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', HALVES)
@pytest.mark.parametrize('rows,outs,ins', [(1600, 1280, 1280), (37, 264, 64), (448, 1536, 8960)])
def test_products(products, dtype, rows, outs, ins):
    twin = PlainProducts()
    for bias, add in ((True, False), (False, True), (True, True), (False, False)):
        x, weight = random(rows, ins, dtype=dtype), random(outs, ins, dtype=dtype, scale=0.03)
        b = random(outs, dtype=dtype) if bias else None
        base = random(rows, outs, dtype=dtype) if add else None
        expected = x.double() @ weight.double().T
        expected += 0 if b is None else b.double()
        expected += 0 if base is None else base.double()
        own = twin.multiply(x, weight, b, torch.empty(rows, outs, dtype=dtype, device='cuda'),
                            base)
        for _ in range(2):  # as it comes, then with an algorithm chosen by timing
            out = poisoned(rows, outs, dtype=dtype) if base is None else base.clone()
            no_worse(products.multiply(x, weight, b, out, None if base is None else out), own,
                     expected)
            products.tune(rows, [weight], [b], add)
        assert products.tune(rows, [weight], [b], add) is None  # remembered


@pytest.mark.gpu
def test_a_remembered_algorithm_is_taken_up_and_a_wrong_one_is_not(products, kernels, tmp_path):
    shape = Shape(64, 256, 128, torch.bfloat16, False, False)
    weight = random(256, 128, dtype=torch.bfloat16)
    assert products.tune(64, [weight], [None]) is not None
    again = Products(products.device, store=products._store.path)
    assert again.tune(64, [weight], [None]) is None
    again._store.put(shape.name, b'\xff' * ALGORITHM_BYTES)
    third = Products(products.device, store=products._store.path)
    x = random(64, 128, dtype=torch.bfloat16)
    got = third.multiply(x, weight, None, poisoned(64, 256, dtype=torch.bfloat16))
    no_worse(got, F.linear(x, weight), x.double() @ weight.double().T)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', HALVES)
@pytest.mark.parametrize('rows,outs,ins,name', [
    (1600, 5120, 1280, 'quick_gelu'), (37, 264, 64, 'quick_gelu'), (448, 8960, 1536, 'silu'),
    (70, 104, 192, 'silu'), (129, 96, 64, 'silu')])
def test_products_with_activation(kernels, dtype, rows, outs, ins, name):
    if not kernels.has('wgmma'):
        pytest.skip('this GPU has no wgmma')
    gated = name == 'silu'
    x, weight = random(rows, ins, dtype=dtype), random(outs * (1 + gated), ins, dtype=dtype,
                                                       scale=ins ** -0.5)
    bias = None if gated else random(outs, dtype=dtype)
    y = x.double() @ weight.double().T
    if gated:
        first, second = y.chunk(2, dim=-1)
        expected = activate(first, name) * second
        a, b = F.linear(x, weight).chunk(2, dim=-1)
        twin = activate(a, name) * b
    else:
        expected = activate(y + bias.double(), name)
        twin = activate(F.linear(x, weight, bias), name)
    got = kernels.multiply_activated(x, weight, bias, name, poisoned(rows, outs, dtype=dtype))
    no_worse(got, twin, expected)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', HALVES)
@pytest.mark.parametrize('rows,heads,ins', [(1600, 16, 1280), (37, 1, 64), (129, 5, 192)])
def test_products_with_rotation(kernels, dtype, rows, heads, ins):
    if not kernels.has('wgmma'):
        pytest.skip('this GPU has no wgmma')
    dim = ROTATED_HEAD_DIM
    x, bias = random(rows, ins, dtype=dtype), random(3 * heads * dim, dtype=dtype)
    weight = random(3 * heads * dim, ins, dtype=dtype, scale=ins ** -0.5)
    spots = torch.randint(0, 2048, (rows, 2), device='cuda', dtype=torch.int32)
    angles = torch.arange(2048)[:, None].float() * inverse_frequencies(dim // 2, 1e4)
    turns = torch.stack((angles.cos(), angles.sin()), -1).cuda()
    expected, twin = (TWINS.multiply_rotated(
        x.to(kind), weight.to(kind), bias.to(kind), spots, turns,
        torch.empty(rows, 3 * heads * dim, dtype=kind, device='cuda'))
        for kind in (torch.double, dtype))
    got = kernels.multiply_rotated(x, weight, bias, spots, turns,
                                   poisoned(rows, 3 * heads * dim, dtype=dtype))
    for part in zip(*(y.chunk(3, dim=1) for y in (got, twin, expected)), strict=True):
        no_worse(*part)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', HALVES)
@pytest.mark.parametrize('rows,outs,ins', [(1600, 1280, 5120), (37, 264, 128), (129, 384, 256)])
def test_int8_products_are_rounded_once(kernels, dtype, rows, outs, ins):
    x, weight = (torch.randint(-127, 128, (n, ins), device='cuda', dtype=torch.int8)
                 for n in (rows, outs))
    scales = torch.rand(rows, device='cuda') / 100 + 1e-3, torch.rand(outs, device='cuda') / 100
    for bias, add in ((True, True), (False, False)):
        b = random(outs, dtype=dtype) if bias else None
        base = random(rows, outs, dtype=dtype) if add else None
        expected = TWINS.multiply_s8(x, scales[0], weight, scales[1], b,
                                     torch.empty(rows, outs, device='cuda').double(), base)
        out = poisoned(rows, outs, dtype=dtype) if base is None else base.clone()
        kernels.multiply_s8(x, scales[0], weight, scales[1], b, out,
                            None if base is None else out)
        no_worse(out, expected.to(dtype), expected)


@pytest.mark.gpu
def test_what_does_not_fit_is_refused_in_a_sentence(kernels, products):
    x = random(8, 12, dtype=torch.bfloat16)
    with pytest.raises(KernelError, match='multiple of 8'):
        kernels.norm(x, x[0], None, 1e-6, x)
    with pytest.raises(KernelError, match='multiples of 4 and 8'):
        kernels.centre(torch.zeros(2, 6, dtype=torch.uint8, device='cuda'),
                       random(2, 8, dtype=torch.bfloat16))
    with pytest.raises(KernelError, match='multiples of 8'):
        products.multiply(x, x, None, random(8, 8, dtype=torch.bfloat16))
    qkv = random(8, 3 * 2 * 48, dtype=torch.bfloat16)
    tiles = torch.from_numpy(tile_list([8])).cuda()
    with pytest.raises(KernelError, match='64, 80 or 128'):
        kernels.attend_segments(qkv, 2, tiles, random(8, 96, dtype=torch.bfloat16))
    long = random(4, 5000, dtype=torch.bfloat16)
    with pytest.raises(KernelError, match='4096'):
        kernels.norm(long, long[0], None, 1e-6, long)
