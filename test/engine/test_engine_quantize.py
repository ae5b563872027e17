"""INT8 and INT4: packing, error bounds, bytes, and answers that stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qwen_vl_ros.engine import packing
from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.layers import Linear
from qwen_vl_ros.engine.packing import close_ranks, pack, pack_weights
from qwen_vl_ros.engine.quant_linear import (
    Int4Linear,
    Int8GroupLinear,
    Int8Linear,
    group_size,
    pack_nibbles,
    unpack_nibbles,
)
from qwen_vl_ros.engine.quantize import quantize_language
from qwen_vl_ros.roboscene.evaluate import evaluate

TINY = Path(__file__).parents[2] / 'models' / 'tiny'


def matrix(rows: int, inputs: int, seed: int = 0, bias: bool = True) -> Linear:
    generator = torch.Generator().manual_seed(seed)
    return Linear(torch.randn(rows, inputs, generator=generator) * 0.05,
                  torch.randn(rows, generator=generator) if bias else None)


def test_nibbles_survive_packing():
    codes = torch.randint(0, 16, (5, 64), dtype=torch.uint8)
    packed = pack_nibbles(codes)
    assert packed.shape == (5, 32) and torch.equal(unpack_nibbles(packed), codes)
    assert pack_nibbles(torch.tensor([[3, 10]], dtype=torch.uint8)).item() == 3 + 16 * 10


@pytest.mark.parametrize(('form', 'bits'), [(Int8Linear, 8), (Int4Linear, 4)])
@pytest.mark.parametrize('inputs', [128, 256, 448, 96])
def test_each_weight_is_within_half_a_step(form, bits, inputs):
    linear = matrix(24, inputs)
    quantised = form.of(linear)
    error = (quantised.dequantised(torch.float32) - linear.weight).abs()
    if bits == 8:
        assert (error <= quantised.scales[:, None] * 0.5 + 1e-7).all()
    else:
        group = group_size(inputs)
        wide = linear.weight.view(24, -1, group)
        step = (wide.amax(-1).clamp(min=0) - wide.amin(-1).clamp(max=0)) / 15
        # A cut-off range may be off by more at its ends; never more than a fifth of the range.
        assert (error.view(24, -1, group) <= step[..., None] * (0.51 + 0.2 * 15)).all()
        assert error.mean() < 0.3 * step.mean()
    x = torch.randn(3, inputs)
    exact = linear(x) - linear.bias
    assert (quantised(x) - linear(x)).norm() / exact.norm() < (0.01 if bits == 8 else 0.15)


def test_the_call_is_that_of_the_dequantised_matrix_in_every_dtype():
    x = torch.randn(2, 128)
    for form in (Int8Linear, Int4Linear):
        quantised = form.of(matrix(16, 128))
        for dtype in (torch.float32, torch.bfloat16):
            bias = quantised.bias.to(dtype)
            plain = Linear(quantised.dequantised(dtype), bias)
            quantised.bias = bias
            assert torch.equal(quantised(x.to(dtype)), plain(x.to(dtype)))


def test_constant_and_zero_rows_are_exact_enough():
    linear = Linear(torch.stack((torch.zeros(128), torch.full((128,), 0.5),
                                 torch.full((128,), -0.25))))
    for form in (Int8Linear, Int4Linear):
        got = form.of(linear).dequantised(torch.float32)
        assert got[0].abs().max() == 0
        assert torch.allclose(got[1:], linear.weight[1:], rtol=0.01)


def test_bytes_are_those_of_the_codes():
    linear = matrix(64, 256, bias=False)
    assert Int8Linear.of(linear).nbytes == 64 * 256 + 64 * 4
    assert Int4Linear.of(linear).nbytes == 64 * 128 + 64 * 2 * (2 + 1)


def test_inputs_that_no_group_divides_are_refused():
    with pytest.raises(EngineError, match='multiple of 32; found 100') as caught:
        Int4Linear.of(matrix(4, 100))
    assert caught.value.code == ErrorCode.BAD_REQUEST


@pytest.mark.parametrize(('kind', 'share'), [('int8', 0.30), ('int4', 0.26)])
def test_a_quantised_engine_reads_less_and_still_answers(kind, share):
    plain = Engine.load(str(TINY), device='cpu')
    engine = Engine.load(str(TINY), device='cpu', quantization=kind)
    assert engine.info.quantization == kind
    assert engine.info.weight_bytes < share * plain.info.weight_bytes
    for family in ('relation', 'number', 'path'):
        score = next(iter(evaluate(engine, [family], count=8)))
        assert score.right >= 7, score.wrong
    plain.close()
    engine.close()


@pytest.mark.parametrize('kind', ['int8', 'int4', 'int8 in groups'])
def test_what_lies_anew_is_the_same(kind):
    language = Engine.load(
        str(TINY), device='cpu', quantization=kind.split()[0]).model.language
    if kind == 'int8 in groups':
        language.layers = [replace(x, qkv=Int8GroupLinear(
            torch.randint(0, 256, x.qkv.codes.shape, dtype=torch.uint8),
            torch.rand(x.qkv.codes.shape[0], 2).half(),
            torch.randint(0, 257, (x.qkv.codes.shape[0], 2), dtype=torch.int16), x.qkv.bias))
            for x in language.layers]
    x = torch.randn(3, language.config.width)
    layer = language.layers[1]
    matrices = layer.qkv, layer.out, layer.gate_up, language.head
    before = [m(x) for m in matrices]
    held = language.head.codes
    close_ranks(language)
    assert language.head.codes.data_ptr() != held.data_ptr()
    rooms = {getattr(m, name).untyped_storage().data_ptr() for m in matrices for name in m.parts}
    assert len(rooms) == 1
    assert all(torch.equal(a, m(x)) for a, m in zip(before, matrices))


def test_packed_weights_lie_side_by_side_and_are_the_same():
    linears = [matrix(24, 96), matrix(40, 96, 1), matrix(8, 17, 2)]
    before = [m.weight.clone() for m in linears]
    pack(linears)
    assert all(torch.equal(a, m.weight) for a, m in zip(before, linears))
    room = linears[0].weight.untyped_storage()
    assert room.nbytes() == 24 * 96 * 4 + 40 * 96 * 4 + 768  # 8 x 17 floats are 544 bytes
    for m in linears:
        assert m.weight.is_contiguous()
        assert m.weight.untyped_storage().data_ptr() == room.data_ptr()
        assert (m.weight.data_ptr() - room.data_ptr()) % 256 == 0


def test_every_matrix_of_several_layers_is_packed_once(monkeypatch):
    model = Engine.load(str(TINY), device='cpu').model
    packed = []
    monkeypatch.setattr(packing, 'pack', packed.append)
    pack_weights(model)
    assert packed == []  # torch's allocator for CPUs has no such blocks
    groups = list(packing._groups(model))
    assert [len(group) for group in groups] == 4 * [model.vision.config.depth] + 2 * [
        model.language.config.layers]
    assert len({id(linear) for group in groups for linear in group}) == sum(map(len, groups))


def test_unknown_kinds_and_broken_weights_are_refused():
    with pytest.raises(EngineError, match="quantization 'int3' is not one of none, int8, int4"):
        Engine.load(str(TINY), quantization='int3')
    engine = Engine.load(str(TINY), device='cpu')
    language = engine.model.language
    layers = language.layers
    layers[2].down.weight[0, 0] = float('nan')
    with pytest.raises(EngineError, match='layer 2 down holds values that are not finite'):
        quantize_language(language, 'int8')
    assert language.layers is layers
    engine.close()
