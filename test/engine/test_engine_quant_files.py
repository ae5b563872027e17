"""AWQ and GPTQ folders against the same weights written out in floats."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.errors import CheckpointError, EngineError
from qwen_vl_ros.engine.quant_files import AWQ_ORDER, unpack_words
from qwen_vl_ros.engine.types import Request, Visual
from qwen_vl_ros.roboscene.evaluate import frames_of
from qwen_vl_ros.roboscene.items import items

TINY = Path(__file__).parents[2] / 'models' / 'tiny'
GROUP = 64
AWQ = {'quant_method': 'awq', 'bits': 4, 'group_size': GROUP, 'version': 'gemm',
       'zero_point': True, 'modules_to_not_convert': ['visual']}
GPTQ4 = {'quant_method': 'gptq', 'bits': 4, 'group_size': GROUP, 'desc_act': False, 'sym': True}
GPTQ8 = {**GPTQ4, 'bits': 8}
GPTQ_V2 = {**GPTQ4, 'checkpoint_format': 'gptq_v2'}


def pack_int32(codes, bits, order):
    """Pack the last axis into words, one code after another, as the tools that write files do."""
    count = 32 // bits
    words = torch.zeros((*codes.shape[:-1], codes.shape[-1] // count), dtype=torch.int64)
    for place in range(count):
        words |= codes[..., order[place]::count].long() << (place * bits)
    return words.to(torch.int32)  # wraps like the uint32 it stands for


def quantise(weight, config):
    """Return (tensors of the file without base, weight that they stand for); rows x inputs."""
    bits, levels = config['bits'], 2 ** config['bits'] - 1
    rows, inputs = weight.shape
    wide = weight.float().view(rows, inputs // GROUP, GROUP)
    if config['quant_method'] == 'awq':
        low, high = wide.amin(-1).clamp(max=0), wide.amax(-1).clamp(min=0)
        scale = ((high - low) / levels).clamp(min=1e-6).half()
        zero = (-low / scale.float()).round().clamp(0, levels)
    else:
        scale = (wide.abs().amax(-1) / (levels // 2)).clamp(min=1e-6).half()
        zero = torch.full_like(scale.float(), (levels + 1) // 2)
    codes = (wide / scale.float()[..., None] + zero[..., None]).round().clamp(0, levels)
    exact = ((codes - zero[..., None]) * scale.float()[..., None]).view(rows, inputs)
    codes, zero = codes.view(rows, inputs), zero.T.contiguous()  # zeros [groups, rows]
    plain = list(range(32 // bits))
    if config['quant_method'] == 'awq':
        return {'qweight': pack_int32(codes.T.contiguous(), 4, AWQ_ORDER),
                'qzeros': pack_int32(zero, 4, AWQ_ORDER),
                'scales': scale.T.contiguous()}, exact
    stored = zero - (0 if config.get('checkpoint_format') == 'gptq_v2' else 1)
    return {'qweight': pack_int32(codes, bits, plain).T.contiguous(),
            'qzeros': pack_int32(stored, bits, plain), 'scales': scale.T.contiguous(),
            'g_idx': (torch.arange(inputs) // GROUP).to(torch.int32)}, exact


def write(folder: Path, config: dict, change=lambda tensors: None) -> tuple[Path, Path]:
    """Write the quantised folder and the one with the same weights in float32."""
    tensors, floats = {}, {}
    for name, tensor in load_file(TINY / 'model.safetensors').items():
        if '.layers.' in name and name.endswith('proj.weight'):
            parts, exact = quantise(tensor, config)
            base = name.removesuffix('weight')
            tensors |= {base + k: v for k, v in parts.items()}
            floats[name] = exact
        else:
            tensors[name], floats[name] = tensor, tensor.float()
    change(tensors)
    out = []
    for name, content, extra in (('quantised', tensors, {'quantization_config': config}),
                                 ('floats', floats, {})):
        path = folder / name
        shutil.copytree(TINY, path, ignore=shutil.ignore_patterns('*.safetensors'))
        save_file(content, path / 'model.safetensors')
        raw = json.loads((TINY / 'config.json').read_text())
        (path / 'config.json').write_text(json.dumps({**raw, **extra}))
        out.append(path)
    return out[0], out[1]


@pytest.mark.parametrize('config', [AWQ, GPTQ4, GPTQ8, GPTQ_V2],
                         ids=['awq', 'gptq4', 'gptq8', 'gptq_v2'])
def test_a_quantised_folder_equals_its_weights_in_floats(config, tmp_path):
    quantised, floats = write(tmp_path, config)
    item = next(items('relation', 'test', 1))
    request = Request(item.question.text, (Visual(frames_of(item)),), max_new_tokens=8)
    got, want = (Engine.load(str(p), device='cpu', dtype='float32') for p in (quantised, floats))
    assert got.info.quantization == f"{config['quant_method']}-int{config['bits']}"
    ours, expected = got.trace(request)[1], want.trace(request)[1]
    assert (ours - expected).abs().max() / expected.abs().max() < 1e-5
    said = [list(e.answer(request))[-1].answer.text for e in (got, want)]
    assert said[0] == said[1] == item.question.answer
    assert got.info.weight_bytes < (0.6 if config['bits'] == 8 else 0.45) * want.info.weight_bytes
    with pytest.raises(EngineError, match='quantised already'):
        Engine.load(str(quantised), device='cpu', quantization='int8')


@pytest.mark.parametrize('zero', [True, False])
def test_biases_that_autogptq_writes_are_zeros(zero, tmp_path):
    def change(tensors):
        for name in [n for n in tensors if n.endswith('.qweight')]:
            base = name.removesuffix('qweight')
            if base.split('.')[-2] in ('o_proj', 'gate_proj', 'up_proj', 'down_proj'):
                tensors[base + 'bias'] = torch.zeros(tensors[name].shape[1], dtype=torch.half)
                tensors[base + 'bias'][3] = 0 if zero else 0.5

    quantised, _ = write(tmp_path, GPTQ4, change)
    if zero:
        Engine.load(str(quantised), device='cpu').close()
        return
    with pytest.raises(CheckpointError, match=r'proj\.bias is not zero; expected no bias, or the'):
        Engine.load(str(quantised), device='cpu')


def test_scales_beyond_float16_are_refused_at_load(tmp_path):
    def change(tensors):
        name = next(n for n in tensors if n.endswith('.scales'))
        tensors[name] = tensors[name].float()
        tensors[name][0, 0] = 1e6

    quantised, _ = write(tmp_path, AWQ, change)
    with pytest.raises(CheckpointError, match=r'scales hold values beyond float16'):
        Engine.load(str(quantised), device='cpu')


def test_awq_order_by_hand():
    # Column c of a word holds the code c + 1.
    word = sum((AWQ_ORDER[place] + 1) << (4 * place) for place in range(8))
    word -= (1 << 32) if word >= 1 << 31 else 0
    words = torch.tensor([[word]], dtype=torch.int32)
    assert unpack_words(words, 4, AWQ_ORDER).tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert unpack_words(torch.tensor([[-1]], dtype=torch.int32), 8).tolist() == [[255] * 4]


@pytest.mark.parametrize(('config', 'words'), [
    ({**AWQ, 'bits': 3}, ('awq', '3 bits', '4 bits')),
    ({**AWQ, 'version': 'gemv'}, ("version 'gemv'", "'gemm'")),
    ({**AWQ, 'zero_point': False}, ('without zero points',)),
    ({**GPTQ4, 'desc_act': True}, ('desc_act',)),
    ({**GPTQ4, 'checkpoint_format': 'marlin'}, ("'marlin'", 'gptq_v2')),
    ({**GPTQ4, 'group_size': 0}, ('groups of 0',)),
    ({'quant_method': 'bitsandbytes', 'bits': 4}, ("'bitsandbytes'", 'awq, gptq')),
    ({**AWQ, 'group_size': 100}, ('groups of 100', 'do not divide')),
    ({**AWQ, 'version': 1}, ("version '1'", "'gemm'")),
    ('awq', ('quantization_config is str', 'an object')),
    ([4], ('quantization_config is list', 'an object')),
])
def test_formats_that_are_not_read_are_named(config, words, tmp_path):
    shutil.copytree(TINY, tmp_path / 'm')
    raw = json.loads((TINY / 'config.json').read_text())
    (tmp_path / 'm' / 'config.json').write_text(json.dumps({**raw, 'quantization_config': config}))
    with pytest.raises(CheckpointError) as caught:
        Engine.load(str(tmp_path / 'm'), device='cpu')
    for word in words:
        assert word in caught.value.message
    assert '\n' not in caught.value.message


def test_act_order_and_missing_parts_are_named(tmp_path):
    def shuffle(tensors):
        name = next(n for n in tensors if n.endswith('g_idx'))
        tensors[name] = tensors[name].flip(0).contiguous()
    folder, _ = write(tmp_path / 'a', GPTQ4, shuffle)
    with pytest.raises(CheckpointError, match='act-order'):
        Engine.load(str(folder), device='cpu')
    folder, _ = write(tmp_path / 'b', AWQ, lambda t: t.pop('model.layers.0.mlp.up_proj.scales'))
    with pytest.raises(CheckpointError, match=r'missing: model.layers.0.mlp.up_proj.scales'):
        Engine.load(str(folder), device='cpu')
