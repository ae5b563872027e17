"""Folders that load, and folders that are refused with one sentence."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from engine_checkpoints import edit_json, make_checkpoint
from safetensors.torch import load_file, save_file

from qwen_vl_ros.engine import checkpoint, config, device
from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.errors import CheckpointError, EngineError, ErrorCode
from qwen_vl_ros.engine.finite import check_finite
from qwen_vl_ros.engine.types import Request, Visual


@pytest.fixture
def folder(folders, tmp_path):
    """Return a copy of the first checkpoint that a test may damage."""
    return shutil.copytree(folders['small'], tmp_path / 'model')


@pytest.fixture
def untied(folders, tmp_path):
    """Return a copy of the checkpoint with its own output matrix."""
    return shutil.copytree(folders['wide'], tmp_path / 'untied')


def refused(folder, *words: str, **options) -> str:
    """Load, expect a refusal in one line that names the words, and return it."""
    with pytest.raises(CheckpointError) as caught:
        Engine.load(str(folder), device='cpu', **options)
    message = caught.value.message
    assert '\n' not in message
    for word in words:
        assert word in message
    return message


def rewrite(folder, change) -> None:
    """Apply ``change`` to the dictionary of tensors and write it back."""
    file = folder / 'model.safetensors'
    tensors = load_file(file)
    tensors = change(tensors) or tensors
    save_file({k: v.contiguous() for k, v in tensors.items()}, file, {'format': 'pt'})


def old_names(tensors):
    """Return tensors under the key names of releases before 4.52."""
    out = {}
    for key, value in tensors.items():
        key = key.replace('model.language_model.', 'model.').replace('model.visual.', 'visual.')
        out[key] = value
    return out


def new_names(tensors):
    """Return tensors under the key names from release 4.52 on."""
    out = {}
    for key, value in tensors.items():
        if key.startswith('visual.'):
            key = f'model.{key}'
        elif key.startswith('model.') and not key.startswith(
                ('model.visual.', 'model.language_model.')):
            key = f'model.language_model.{key[6:]}'
        out[key] = value
    return out


def logits(folder, picture):
    """Return the logits of one fixed request."""
    request = Request('a red box', (Visual((picture(140, 112),)),))
    return Engine.load(str(folder), device='cpu').trace(request)[1]


@pytest.mark.parametrize('rename', [old_names, new_names])
@pytest.mark.parametrize('shape', ['small', 'wide'])
def test_old_and_new_key_names_load_alike(shape, rename, folders, tmp_path, picture):
    expected = logits(folders[shape], picture)
    folder = shutil.copytree(folders[shape], tmp_path / 'model')
    rewrite(folder, rename)
    keys = load_file(folder / 'model.safetensors').keys()
    assert any(k.startswith('model.language_model.') for k in keys) == (rename is new_names)
    assert torch.equal(logits(folder, picture), expected)


def test_shards_load_like_one_file(folders, tmp_path, picture):
    folder = make_checkpoint(tmp_path / 'small', 'small', max_shard_size='200KB')
    assert len(list(folder.glob('*.safetensors'))) > 2
    assert torch.equal(logits(folder, picture), logits(folders['small'], picture))
    first = sorted(folder.glob('*.safetensors'))[0]
    first.unlink()
    refused(folder, first.name, 'missing')


def test_a_config_in_the_flat_form_of_the_hub_loads(folder, picture):
    """Qwen's own repositories keep the text model's fields at the top of config.json."""
    expected = logits(folder, picture)
    path = folder / 'config.json'
    data = json.loads(path.read_text())
    text = data.pop('text_config')
    text.pop('model_type')
    rope = text.pop('rope_parameters', None)
    if rope:  # as transformers 5 writes it
        text['rope_theta'] = rope['rope_theta']
        text['rope_scaling'] = {'type': 'mrope', 'mrope_section': rope['mrope_section']}
    assert text['rope_scaling']['mrope_section'] == [2, 3, 3]
    data['vision_config'].pop('rope_parameters', None)
    data.update({**text, 'torch_dtype': 'float32'})
    data['vision_config'].pop('model_type')
    path.write_text(json.dumps(data))
    assert torch.equal(logits(folder, picture), expected)


def test_missing_and_left_over_weights_are_named(folder):
    def change(tensors):
        tensors['model.visual.blocks.9.extra'] = torch.zeros(3)
        del tensors['model.visual.merger.ln_q.bias']

    rewrite(folder, lambda t: new_names(t))
    rewrite(folder, change)
    refused(folder, str(folder), 'missing: model.visual.merger.ln_q.bias',
            'not expected: model.visual.blocks.9.extra')


def test_missing_weights_are_named_as_the_file_would(folder):
    def change(tensors):
        del tensors['model.layers.0.mlp.up_proj.weight']

    rewrite(folder, change)
    refused(folder, 'missing: model.layers.0.mlp.up_proj.weight')


def test_a_weight_of_another_shape_is_named(folder):
    def change(tensors):
        key = next(k for k in tensors if k.endswith('blocks.0.mlp.fc1.bias'))
        tensors[key] = tensors[key][:-1]

    rewrite(folder, change)
    refused(folder, 'blocks.0.mlp.fc1.bias [255] instead of [256]')


def test_a_weight_under_two_names_is_refused(folder):
    def change(tensors):
        tensors = old_names(tensors)
        tensors['model.language_model.norm.weight'] = tensors['model.norm.weight'].clone()
        return tensors

    rewrite(folder, change)
    refused(folder, 'two names', 'model.norm.weight', 'model.language_model.norm.weight')


def test_tied_and_untied_output(folder, untied, picture):
    """C18: with and without lm_head both load; what contradicts itself is refused by name."""
    expected = logits(folder, picture)

    def add_copy(tensors):
        key = next(k for k in tensors if k.endswith('embed_tokens.weight'))
        tensors['lm_head.weight'] = tensors[key].clone()

    rewrite(folder, add_copy)
    assert torch.equal(logits(folder, picture), expected)

    def spoil(tensors):
        tensors['lm_head.weight'][3, 3] += 1

    rewrite(folder, spoil)
    refused(folder, 'tie_word_embeddings true', 'lm_head.weight differs')
    assert logits(untied, picture).isfinite().all()

    def behead(tensors):
        del tensors['lm_head.weight']

    rewrite(untied, behead)
    refused(untied, 'missing: lm_head.weight')


@pytest.mark.parametrize('place', ['config', 'text_config'])
def test_tied_counts_wherever_a_release_wrote_it(folder, picture, place):
    expected = logits(folder, picture)
    data = json.loads((folder / 'config.json').read_text())
    data.pop('tie_word_embeddings', None)
    data['text_config'].pop('tie_word_embeddings', None)
    (data if place == 'config' else data['text_config'])['tie_word_embeddings'] = True
    (folder / 'config.json').write_text(json.dumps(data))
    assert torch.equal(logits(folder, picture), expected)


@pytest.mark.parametrize('damage', ['cut', 'header', 'empty', 'noise', 'longer'])
def test_damaged_safetensors_are_refused(folder, damage):
    file = folder / 'model.safetensors'
    data = file.read_bytes()
    file.write_bytes({
        'cut': data[:-1000], 'header': data[:100], 'empty': b'', 'longer': data + b'x',
        'noise': bytes(range(256)) * 10}[damage])
    message = refused(folder, str(file))
    if damage == 'cut':
        assert f'has {len(data) - 1000} bytes, but its header announces {len(data)}' in message


@pytest.mark.parametrize('value', [float('nan'), float('inf'), float('-inf')])
def test_a_weight_that_is_not_finite_is_named(folder, value):
    name = next(key for key in load_file(folder / 'model.safetensors') if 'fc1.weight' in key)

    def change(tensors):
        tensors[name].view(-1)[7] = value
    rewrite(folder, change)
    refused(folder, name, str(folder), 'holds 1 of', 'not finite')


def test_a_weight_that_half_precision_cannot_hold_is_named_and_a_large_sum_is_no_fault(tmp_path):
    large = {'a': torch.full((4096,), 100.0, dtype=torch.float16), 'b': torch.ones(3).int()}
    assert not large['a'].sum().isfinite()
    check_finite(tmp_path, large)
    large['c'] = torch.tensor([1.0, 1e6]).half()
    with pytest.raises(CheckpointError, match=r'c in .* holds 1 of 2 values that are not '
                                              'finite in float16'):
        check_finite(tmp_path, large)


def test_weights_that_are_no_floats_are_refused(folder):
    def change(tensors):
        key = next(k for k in tensors if k.endswith('ln_q.bias'))
        tensors[key] = tensors[key].to(torch.int8)

    rewrite(folder, change)
    refused(folder, 'ln_q.bias as I8', 'expected F32, F16 or BF16')


def test_missing_files_are_named(folder, tmp_path):
    refused(tmp_path / 'nowhere', str(tmp_path / 'nowhere'), 'not a folder')
    (tmp_path / 'empty').mkdir()
    refused(tmp_path / 'empty', str(tmp_path / 'empty' / 'config.json'), 'missing')
    (folder / 'model.safetensors').rename(folder / 'pytorch_model.bin')
    refused(folder, 'no model.safetensors', 'pickled')
    (folder / 'tokenizer.json').unlink()
    refused(folder, str(folder), 'no tokenizer')


def test_a_name_that_is_not_here_is_not_downloaded(tmp_path, monkeypatch):
    calls = []

    def download(name, local_files_only, allow_patterns):
        calls.append((name, local_files_only, '*.bin' in allow_patterns))
        raise OSError('offline')

    monkeypatch.setattr('huggingface_hub.snapshot_download', download)
    refused('some/model', "'some/model' is neither a folder", 'downloads are off')
    refused('some/model', "downloading 'some/model' failed: offline", allow_download=True)
    assert calls == [('some/model', True, False), ('some/model', False, False)]


@pytest.mark.parametrize('change,words', [
    ({'model_type': 'qwen2_5_vl'}, ("model_type 'qwen2_5_vl'", "expected 'qwen2_vl'")),
    ({'model_type': None}, ("model_type 'None'",)),
    ({'architectures': ['LlamaForCausalLM']}, ('LlamaForCausalLM',)),
    ({'quantization_config': {'quant_method': 'awq'}}, ("'awq'", 'None bits', '4 bits')),
    ({'text_config': 3}, ('not a valid Qwen2-VL config',)),
    ({'image_token_id': 10 ** 7}, ('image_token 10000000 lies outside',)),
])
def test_another_architecture_is_refused(folder, change, words):
    edit_json(folder / 'config.json', **change)
    refused(folder, str(folder / 'config.json'), *words)


@pytest.mark.parametrize('part,change,words', [
    ('text_config', {'num_key_value_heads': 4}, ('6 query heads', '4 key heads')),
    ('text_config', {'hidden_act': 'relu'}, ("activation 'relu'",)),
    ('text_config', {'rope_parameters': {
        'rope_type': 'default', 'rope_theta': 1e6, 'mrope_section': [1, 1, 1]}},
     ('mrope_section [1, 1, 1]',)),
    ('text_config', {'use_sliding_window': True, 'sliding_window': 8, 'max_window_layers': 1,
                     'layer_types': ['full_attention'] + ['sliding_attention'] * 2},
     ('sliding-window',)),
    ('vision_config', {'spatial_merge_size': 4}, ('expected 2 and 2',)),
    ('vision_config', {'in_channels': 1}, ('1 picture channels',)),
    ('vision_config', {'num_heads': 5}, ('does not split into 5 heads',)),
])
def test_shapes_that_are_not_covered_are_refused(folder, part, change, words):
    data = json.loads((folder / 'config.json').read_text())
    data[part].update(change)
    (folder / 'config.json').write_text(json.dumps(data))
    message = refused(folder, *words)
    assert message.count('config.json') <= 1


def test_json_that_is_none(folder):
    (folder / 'config.json').write_text('{"model_type": ')
    refused(folder, str(folder / 'config.json'), 'does not hold JSON')


def test_a_missing_chat_template_stops_the_start(folder):
    """C6, and the three places where a template may be."""
    template = folder / 'chat_template.jinja'
    text = template.read_text()
    template.unlink()
    edit_json(folder / 'tokenizer_config.json', chat_template=None)
    refused(folder, str(folder), 'no chat template')
    (folder / 'chat_template.json').write_text(json.dumps({'chat_template': text}))
    assert Engine.load(str(folder), device='cpu').prompts
    (folder / 'chat_template.json').unlink()
    edit_json(folder / 'tokenizer_config.json', chat_template=text)
    assert Engine.load(str(folder), device='cpu').prompts


def test_a_template_without_placeholders_stops_the_start(folder):
    (folder / 'chat_template.jinja').write_text(
        "{% for m in messages %}{{ m['role'] }}{% endfor %}")
    refused(folder, 'chat template is of no use', '0 visual placeholders')
    (folder / 'chat_template.jinja').write_text('{% if %}')
    refused(folder, 'chat template is of no use')


def test_a_tokenizer_of_another_model_is_refused(folder):
    edit_json(folder / 'config.json', video_token_id=7)
    refused(folder, "'<|video_pad|>'", 'config.json expects 7')


def test_a_tokenizer_larger_than_the_embedding_is_refused(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f'word{i}' for i in range(60)])
    tokenizer.save_pretrained(folder)
    refused(folder, f'has {len(tokenizer)} tokens', 'embeddings')


@pytest.mark.parametrize('version,good', [
    ('4.56.2', False), ('4.57.0', True), ('5.24.0', True), ('6.0.0', False)])
def test_the_supported_range_of_transformers(version, good, monkeypatch):
    """C17."""
    monkeypatch.setattr(transformers, '__version__', version)
    if good:
        config.check_transformers()
    else:
        with pytest.raises(CheckpointError, match=rf'transformers {version} .*4\.57.*6\.0'):
            config.check_transformers()


def test_memory_is_checked_before_loading(folder, tmp_path, monkeypatch):
    """D5: need plus margin against MemAvailable, with numbers."""
    meminfo = tmp_path / 'meminfo'
    monkeypatch.setattr(device, 'MEMINFO', meminfo)
    meminfo.write_text('MemTotal: 999999 kB\nMemAvailable:     102400 kB\n')
    monkeypatch.setattr(checkpoint, 'read_tensors', lambda file: pytest.fail('loaded anyway'))
    refused(folder, str(folder), 'only 100 MiB are free', 'margin 128')
    monkeypatch.undo()
    monkeypatch.setattr(device, 'MEMINFO', meminfo)
    meminfo.write_text('MemAvailable: 90000000 kB\n')
    assert Engine.load(str(folder), device='cpu')
    meminfo.unlink()
    assert device.memory_available(torch.device('cpu')) is None
    assert Engine.load(str(folder), device='cpu')


def test_cuda_is_never_replaced_by_the_cpu(folder, monkeypatch):
    """D6."""
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    with pytest.raises(CheckpointError) as caught:
        Engine.load(str(folder), device='cuda')
    assert torch.__version__ in caught.value.message
    assert 'build: ' in caught.value.message
    assert Engine.load(str(folder), device='auto').info.device == 'cpu'


@pytest.mark.parametrize('options,words', [
    ({'device': 'tpu'}, ("device 'tpu'", 'auto, cpu, cuda')),
    ({'dtype': 'int3'}, ("dtype 'int3'", 'bfloat16')),
    ({'quantization': 'int5'}, ("quantization 'int5'",)),
    ({'min_pixels': 5000, 'max_pixels': 4000}, ('min_pixels 5000', 'max_pixels 4000')),
    ({'min_pixels': 1, 'max_pixels': 700}, ('max_pixels >= 784',)),
    ({'max_context': 10 ** 6}, ('max_context 1000000', '4096')),
    ({'prefill_chunk': 0}, ('prefill_chunk',)),
])
def test_options_out_of_range_are_named(folder, options, words):
    with pytest.raises(EngineError) as caught:
        Engine.load(str(folder), **{'device': 'cpu', **options})
    assert caught.value.code == ErrorCode.BAD_REQUEST
    for word in words:
        assert word in caught.value.message


def test_info_says_what_is_loaded(folder, tmp_path):
    info = Engine.load(str(folder), device='cpu', dtype='bfloat16', max_pixels=50176).info
    assert (info.name, info.dtype, info.quantization) == ('model', 'bfloat16', 'none')
    assert (info.device, info.max_pixels, info.max_context) == ('cpu', 50176, 4096)
    assert len(info.revision) == 12
    total = sum(t.numel() for k, t in load_file(folder / 'model.safetensors').items()
                if 'visual' not in k)
    assert info.weight_bytes == 2 * total
    assert info.image_processor == 'pillow bicubic'  # C16
    snapshot = tmp_path / 'models--Some--Name' / 'snapshots' / 'abc123'
    shutil.copytree(folder, snapshot)
    info = Engine.load(str(snapshot), device='cpu').info
    assert (info.name, info.revision) == ('Some/Name', 'abc123')


def test_a_failed_load_can_be_tried_again(folder):
    file = folder / 'model.safetensors'
    data = file.read_bytes()
    file.write_bytes(data[:-8])
    refused(folder)
    file.write_bytes(data)
    assert Engine.load(str(folder), device='cpu')
