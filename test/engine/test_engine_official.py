"""Config and key names of Qwen's own 2B and 7B checkpoints, without their weights."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from qwen_vl_ros.engine import costs
from qwen_vl_ros.engine.checkpoint import canonical, expected_shapes
from qwen_vl_ros.engine.config import load_config
from qwen_vl_ros.engine.kv_cache import KVCache

#: config.json of Qwen/Qwen2-VL-2B-Instruct as on the hub; the flat form of transformers 4.45.
OFFICIAL = {
    'architectures': ['Qwen2VLForConditionalGeneration'], 'attention_dropout': 0.0,
    'bos_token_id': 151643, 'eos_token_id': 151645, 'vision_start_token_id': 151652,
    'vision_end_token_id': 151653, 'vision_token_id': 151654, 'image_token_id': 151655,
    'video_token_id': 151656, 'hidden_act': 'silu', 'hidden_size': 1536,
    'initializer_range': 0.02, 'intermediate_size': 8960, 'max_position_embeddings': 32768,
    'max_window_layers': 28, 'model_type': 'qwen2_vl', 'num_attention_heads': 12,
    'num_hidden_layers': 28, 'num_key_value_heads': 2, 'rms_norm_eps': 1e-06,
    'rope_theta': 1000000.0, 'sliding_window': 32768, 'tie_word_embeddings': True,
    'torch_dtype': 'bfloat16', 'transformers_version': '4.41.2', 'use_cache': True,
    'use_sliding_window': False, 'vocab_size': 151936,
    'rope_scaling': {'type': 'mrope', 'mrope_section': [16, 24, 24]},
    'vision_config': {
        'depth': 32, 'embed_dim': 1280, 'mlp_ratio': 4, 'num_heads': 16, 'in_chans': 3,
        'hidden_size': 1536, 'patch_size': 14, 'spatial_merge_size': 2,
        'spatial_patch_size': 14, 'temporal_patch_size': 2},
}

#: What the 7B checkpoint changes.
SEVEN = {
    'hidden_size': 3584, 'intermediate_size': 18944, 'num_attention_heads': 28,
    'num_key_value_heads': 4, 'vocab_size': 152064, 'tie_word_embeddings': False,
    'vision_config': {**OFFICIAL['vision_config'], 'hidden_size': 3584},
}


@pytest.fixture(params=['2B', '7B'])
def raw(request, tmp_path):
    """Return a folder with config.json and generation_config.json, and the config's text."""
    data = {**OFFICIAL, **(SEVEN if request.param == '7B' else {})}
    (tmp_path / 'config.json').write_text(json.dumps(data))
    (tmp_path / 'generation_config.json').write_text(json.dumps(
        {'bos_token_id': 151643, 'pad_token_id': 151643, 'do_sample': True,
         'eos_token_id': [151645, 151643], 'temperature': 0.01, 'top_p': 0.001, 'top_k': 1}))
    return tmp_path, data


def test_the_official_config_is_understood(raw):
    folder, data = raw
    config = load_config(folder)
    assert (config.vision.depth, config.vision.width, config.vision.head_dim) == (32, 1280, 80)
    assert (config.vision.mlp_width, config.vision.activation) == (5120, 'quick_gelu')
    assert (config.language.layers, config.language.head_dim) == (28, 128)
    assert config.language.mrope_section == (16, 24, 24)
    assert (config.language.theta, config.vision.theta) == (1e6, 1e4)
    assert config.language.eps == 1e-6
    assert config.tied == data['tie_word_embeddings']
    assert config.eos_tokens == (151643, 151645)


def test_every_weight_of_the_official_model_is_expected(raw):
    folder, data = raw
    config = load_config(folder)
    with torch.device('meta'):
        model = Qwen2VLForConditionalGeneration(Qwen2VLConfig.from_dict(data))
    names = {canonical(k): tuple(v.shape) for k, v in model.state_dict().items()}
    assert names == expected_shapes(config)


def test_costs_of_the_official_models_are_the_known_ones(tmp_path):
    """Bytes a token and FLOPs a picture, as worked out by hand for 2B in bfloat16."""
    (tmp_path / 'config.json').write_text(json.dumps(OFFICIAL))
    config = load_config(tmp_path)
    t = config.language
    body = sum(torch.Size(shape).numel() for name, shape in expected_shapes(config).items()
               if name.startswith('language.layers'))
    assert body == pytest.approx(1.310e9, rel=1e-3)
    weights = 2 * (body + t.vocab * t.width)
    token = costs.decoder_cost(t, 1, 428, 1, weights, 2)
    assert token['bytes_read'] == pytest.approx(3.087e9 + 428 * 28672, rel=1e-3)
    assert KVCache.bytes_for(t, 1, 2) == 28672
    picture = costs.encode_cost(config.vision, 588, [1564], 0, 2)
    assert picture['flops'] == pytest.approx(2.4e12, rel=0.03)
    prompt = costs.decoder_cost(t, 428, 0, 0, weights, 2)
    assert prompt['flops'] == pytest.approx(1.13e12, rel=0.03)
