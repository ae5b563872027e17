"""The TensorRT encoder: network layer by layer, builds without a GPU, files, fallback."""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_networks import walk

from qwen_vl_ros.engine import tensorrt
from qwen_vl_ros.engine.quant_linear import Int8Linear
from qwen_vl_ros.engine.tensorrt import (
    TensorRtEncoder,
    TensorRtError,
    build,
    choose_engine,
    find_tensorrt,
    model_digest,
)
from qwen_vl_ros.engine.tensorrt_network import (
    INPUTS,
    OUTPUT,
    QUANTISED,
    Builder,
    Profile,
    add_encoder,
    calibrate,
    calibration_pictures,
    fault,
)
from qwen_vl_ros.engine.tensorrt_store import Key, Store
from qwen_vl_ros.engine.vision import patch_positions, rotary_tables

PROFILE = Profile(4, 64, 256)


@pytest.fixture(scope='module')
def trt():
    try:
        return find_tensorrt()
    except TensorRtError as error:
        pytest.skip(str(error))


@pytest.fixture(scope='module')
def encoder(engines):
    return engines['small'].model.vision


def network_of(trt, encoder, scales=None):
    """Return a network (with what keeps it alive) of an encoder."""
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    flag = getattr(trt.NetworkDefinitionCreationFlag, 'STRONGLY_TYPED', None)
    network = builder.create_network(0 if flag is None else 1 << int(flag))
    parts = Builder(trt, network, scales)
    add_encoder(parts, encoder)
    return network, (logger, builder, parts)


def inputs_of(encoder, patches, grid, units=None):
    """Return the network's inputs for a still."""
    cfg = encoder.config
    spots = patch_positions(*grid[1:])
    if units is not None:
        patches = patches.reshape(-1, 4, patches.shape[1])[units].flatten(0, 1)
        spots = spots.reshape(-1, 4, 2)[units].flatten(0, 1)
    cos, sin = rotary_tables(spots, cfg.head_dim, cfg.theta)
    return {INPUTS[0]: encoder.embed(patches).half(), INPUTS[1]: cos, INPUTS[2]: sin}


def relative(got, expected):
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize('grid', [(1, 2, 2), (1, 4, 6), (1, 10, 4), (1, 16, 16)])
@torch.inference_mode()
def test_the_network_says_what_the_encoder_does(trt, encoder, grid):
    """In float64 it is the encoder but for weights in float16; in float16 as good as torch."""
    network, _kept = network_of(trt, encoder)
    patches = torch.from_numpy(np.random.default_rng(1).integers(
        0, 256, (grid[1] * grid[2], 588), np.uint8))
    given = inputs_of(encoder, patches, grid)
    expected = encoder.encode_plain(given[INPUTS[0]].float(), grid)
    assert network.get_output(0).name == OUTPUT
    wide = walk(trt, network, given, rounded=False)
    assert wide.shape == expected.shape
    assert relative(wide, expected) < 1e-3
    assert relative(walk(trt, network, given), expected) < 5e-3


@torch.inference_mode()
def test_kept_units_keep_their_places(trt, encoder):
    network, _kept = network_of(trt, encoder)
    grid, units = (1, 8, 6), torch.tensor([1, 4, 5, 11])
    patches = torch.from_numpy(np.random.default_rng(2).integers(0, 256, (48, 588), np.uint8))
    expected = encoder.encode(patches, grid, units)
    got = walk(trt, network, inputs_of(encoder, patches, grid, units), rounded=False)
    assert relative(got, expected) < 2e-3


@torch.inference_mode()
def test_int8_is_calibrated_and_close(trt, encoder):
    pictures = calibration_pictures()
    scales = calibrate(encoder, pictures)
    assert set(scales) == {(i, name) for i in range(encoder.config.depth) for name in QUANTISED}
    assert all(0 < s < 100 for s in scales.values())
    assert type(encoder.blocks[0].qkv).__name__ == 'Linear'  # nothing stays watched
    network, _kept = network_of(trt, encoder, scales)
    kinds = [network.get_layer(i).type.name for i in range(network.num_layers)]
    assert kinds.count('QUANTIZE') == 3 * encoder.config.depth
    assert kinds.count('DEQUANTIZE') == 6 * encoder.config.depth
    patches, grid = pictures[3]
    expected = encoder.encode(patches, grid)
    error = relative(walk(trt, network, inputs_of(encoder, patches, grid)), expected)
    assert 1e-4 < error < 0.1


@pytest.mark.parametrize('precision', ['fp16', 'int8'])
def test_an_engine_is_built_without_a_gpu(trt, encoder, precision):
    if trt.__name__ != 'tensorrt_rtx':
        pytest.skip('only TensorRT-RTX builds for a GPU that is not there')
    plan, timings = build(trt, encoder, PROFILE, precision, capability='SM86')
    assert len(plan) > 50_000 and timings == b''
    again, _ = build(trt, encoder, PROFILE, precision, capability='SM89', timings=timings)
    assert again != plan


def test_what_cannot_be_built_says_why(trt, encoder):
    with pytest.raises(TensorRtError, match=r'the engine could not be built: .+'):
        build(trt, encoder, Profile(256, 64, 4), capability='SM86')


def test_encoders_that_are_not_covered(encoder):
    assert fault(encoder) == ''
    other = SimpleNamespace(blocks=encoder.blocks,
                            config=replace(encoder.config, activation='silu'))
    assert 'silu' in fault(other)
    linear = encoder.blocks[0].qkv
    quantised = Int8Linear.__new__(Int8Linear)
    other.blocks = [replace(encoder.blocks[0], qkv=quantised)]
    assert 'quantised' in fault(other)
    assert linear is encoder.blocks[0].qkv


KEY = Key('tensorrt_rtx 1.7', 'RTX sm_86', 'abc', 'fp16', (4, 64, 256), 1)


def test_files_come_back_as_they_were_stored(tmp_path):
    store = Store(tmp_path / 'new')
    assert store.read(KEY) is None
    store.write(KEY, b'\x00\nplan\n')
    assert store.read(KEY) == b'\x00\nplan\n'
    assert store.path(KEY).stat().st_mode & 0o777 == 0o600
    assert len(list(store.folder.iterdir())) == 1
    header = json.loads(store.path(KEY).read_bytes().split(b'\n')[0])
    assert header['gpu'] == 'RTX sm_86' and len(header['sha256']) == 64
    for name, value in [('library', 'tensorrt 10.3'), ('gpu', 'Orin sm_87'), ('model', 'abd'),
                        ('precision', 'int8'), ('grid', (4, 64, 512)), ('network', 2)]:
        other = replace(KEY, **{name: value})
        assert store.read(other) is None
        # The file of another machine under this one's name.
        store.path(other).write_bytes(store.path(KEY).read_bytes())
        store.path(other).chmod(0o600)
        assert store.read(other) is None


@pytest.mark.parametrize('harm', [
    lambda data: data[:-1], lambda data: data + b'x', lambda data: b'', lambda data: b'x' * 9000,
    lambda data: data.replace(b'plan', b'plam'), lambda data: data.replace(b'fp16', b'int8'),
    lambda data: data.split(b'\n', 1)[1]])
def test_broken_files_are_refused_and_replaced(tmp_path, caplog, harm):
    store = Store(tmp_path)
    store.write(KEY, b'the plan')
    store.path(KEY).write_bytes(harm(store.path(KEY).read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert store.read(KEY) is None
    assert 'is not used and will be made again: its header' in caplog.text
    store.write(KEY, b'the plan')
    assert store.read(KEY) == b'the plan'


def test_files_that_others_could_have_written_are_refused(tmp_path, caplog):
    store = Store(tmp_path)
    store.write(KEY, b'the plan')
    store.path(KEY).chmod(0o666)
    assert store.read(KEY) is None and 'other users could have written it' in caplog.text
    store.path(KEY).chmod(0o600)
    other = tmp_path / 'other'
    os.replace(store.path(KEY), other)
    store.path(KEY).symlink_to(other)
    assert store.read(KEY) is None and 'not a plain file' in caplog.text
    caplog.clear()
    os.replace(other, store.path(KEY))
    assert store.read(KEY) == b'the plan' and not caplog.records
    tmp_path.chmod(0o777)
    assert store.read(KEY) is None and 'other users could have written it' in caplog.text


def test_running_out_of_memory_is_no_reason_to_have_no_engine(encoder, caplog, monkeypatch):
    def fail(*given):
        raise torch.cuda.OutOfMemoryError('CUDA out of memory. Tried to allocate\nmore')

    monkeypatch.setattr(tensorrt, 'TensorRtEncoder', fail)
    fused = encoder.fused
    assert choose_engine(encoder, 'tensorrt', 401408) == 'native' and encoder.fused is fused
    assert len(caplog.records) == 1 and 'CUDA out of memory' in caplog.text


def test_a_folder_that_cannot_be_written_is_told(tmp_path, caplog):
    (tmp_path / 'file').write_text('')
    Store(tmp_path / 'file' / 'below').write(KEY, b'x')
    assert 'cannot be kept' in caplog.text


def test_the_digest_sees_every_weight(folders):
    from qwen_vl_ros.engine.engine import Engine

    encoder = Engine.load(str(folders['small']), device='cpu').model.vision
    before = model_digest(encoder)
    assert before == model_digest(encoder)
    with torch.inference_mode():
        encoder.blocks[1].fc2.weight[3, 5] += 1
    assert model_digest(encoder) != before


def test_one_line_says_why_tensorrt_is_not_used(encoder, caplog, monkeypatch):
    fused = encoder.fused
    for name in tensorrt.MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    with caplog.at_level(logging.WARNING):
        assert choose_engine(encoder, 'tensorrt', 401408) == 'native'
    assert len(caplog.records) == 1 and 'requirements-tensorrt.txt' in caplog.text
    assert encoder.fused is fused
    assert choose_engine(encoder, 'native', 401408) == 'native' and encoder.fused is fused


def test_a_cpu_and_a_foreign_gpu_are_named(trt, encoder, caplog, monkeypatch):
    assert choose_engine(encoder, 'tensorrt', 401408) == 'native'
    assert 'it runs on a GPU only' in caplog.text
    if trt.__name__ == 'tensorrt_rtx':
        monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: (8, 7))
        hopeful = SimpleNamespace(encoder=SimpleNamespace(device=torch.device('cuda')), _trt=trt)
        assert TensorRtEncoder._unsupported(hopeful) == 'TensorRT-RTX does not run on sm_87'


@pytest.mark.gpu
@pytest.mark.parametrize('precision', ['fp16', 'int8'])
def test_outputs_on_a_gpu(trt, folders, tmp_path, precision):
    from qwen_vl_ros.engine.engine import Engine

    encoder = Engine.load(str(folders['small']), device='cuda', dtype='float16').model.vision
    store = Store(tmp_path)
    try:
        made = TensorRtEncoder(encoder, PROFILE, precision, store)
    except TensorRtError as error:
        pytest.skip(str(error))
    stamp = store.path(made.key).stat().st_mtime_ns
    again = TensorRtEncoder(encoder, PROFILE, precision, store)
    assert store.path(again.key).stat().st_mtime_ns == stamp
    rng = np.random.default_rng(3)
    for grid, units in [((1, 4, 6), None), ((3, 4, 4), None), ((2, 8, 8), [0, 3, 17, 18, 30])]:
        clip = 588 * (2 if grid[0] > 1 else 1)
        patches = torch.from_numpy(rng.integers(
            0, 256, (grid[0] * grid[1] * grid[2], clip), np.uint8)).cuda()
        kept = None if units is None else torch.tensor(units)
        encoder.fused = None
        expected = encoder.encode(patches, grid, kept)
        encoder.fused = made
        assert relative(encoder.encode(patches, grid, kept), expected) < (
            0.01 if precision == 'fp16' else 0.15)
