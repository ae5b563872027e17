"""Checkpoints with random weights, made the way that transformers saves real ones."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration

#: The chat template that Qwen2-VL-2B-Instruct and 7B-Instruct ship.
CHAT_TEMPLATE = (
    "{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}"
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}'
    "<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}<|im_end|>\n{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    '{% set image_count.value = image_count.value + 1 %}{% if add_vision_id %}'
    'Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>'
    "{% elif content['type'] == 'video' or 'video' in content %}"
    '{% set video_count.value = video_count.value + 1 %}{% if add_vision_id %}'
    'Video {{ video_count.value }}: {% endif %}<|vision_start|><|video_pad|><|vision_end|>'
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    '{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'
)

SPECIAL = [
    '<|endoftext|>', '<|im_start|>', '<|im_end|>', '<|vision_start|>', '<|vision_end|>',
    '<|image_pad|>', '<|video_pad|>',
]

SENTENCES = [
    'You are a helpful assistant.', 'What does the camera see?', 'user', 'system', 'assistant',
    'a red box stands left of the blue cone', 'the path is blocked by a pallet',
    '机器人看见一个红色的箱子。', '前面的路被挡住了吗?', 'naïve café, 3 × 2 = 6 😀🤖🚧',
]

#: Three shapes that differ in everything that can differ: heads, groups, depth, tied output.
SHAPES = {
    'small': {
        'vision': {'depth': 2, 'embed_dim': 64, 'num_heads': 4, 'mlp_ratio': 4},
        'text': {'hidden_size': 96, 'intermediate_size': 160, 'num_hidden_layers': 3,
                 'num_attention_heads': 6, 'num_key_value_heads': 2, 'section': [2, 3, 3]},
        'tied': True},
    'wide': {
        'vision': {'depth': 3, 'embed_dim': 96, 'num_heads': 3, 'mlp_ratio': 3},
        'text': {'hidden_size': 128, 'intermediate_size': 224, 'num_hidden_layers': 2,
                 'num_attention_heads': 4, 'num_key_value_heads': 1, 'section': [4, 6, 6]},
        'tied': False},
    'full': {
        'vision': {'depth': 1, 'embed_dim': 80, 'num_heads': 1, 'mlp_ratio': 2},
        'text': {'hidden_size': 64, 'intermediate_size': 96, 'num_hidden_layers': 5,
                 'num_attention_heads': 2, 'num_key_value_heads': 2, 'section': [4, 6, 6]},
        'tied': True},
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer like Qwen's, of a few hundred tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(SENTENCES, trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token='<|im_end|>', pad_token='<|endoftext|>')
    fast.add_special_tokens({'additional_special_tokens': SPECIAL})
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_checkpoint(folder: Path, shape: str = 'small', **save: object) -> Path:
    """
    Write a checkpoint with random weights.

    :param shape: a key of :data:`SHAPES`.
    :param save: keywords of ``save_pretrained``.
    """
    sizes = SHAPES[shape]
    tokenizer = make_tokenizer()
    text = dict(sizes['text'])
    section = text.pop('section')
    ids = {f'{name}_token_id': tokenizer.convert_tokens_to_ids(f'<|{name}{tail}|>')
           for name, tail in (('image', '_pad'), ('video', '_pad'), ('vision_start', ''),
                              ('vision_end', ''))}
    config = Qwen2VLConfig(
        text_config={
            **text, 'vocab_size': -(-len(tokenizer) // 32) * 32, 'rms_norm_eps': 1e-6,
            'max_position_embeddings': 4096, 'tie_word_embeddings': sizes['tied'],
            'rope_theta': 1000000.0,
            'rope_scaling': {'type': 'mrope', 'mrope_section': section},
            'eos_token_id': tokenizer.convert_tokens_to_ids('<|im_end|>'),
            'bos_token_id': tokenizer.convert_tokens_to_ids('<|endoftext|>')},
        vision_config={**sizes['vision'], 'hidden_size': text['hidden_size']},
        tie_word_embeddings=sizes['tied'], **ids)
    torch.manual_seed(sum(map(ord, shape)))
    model = Qwen2VLForConditionalGeneration(config)
    with torch.no_grad():
        # The default initialisation is so small that every picture gives nearly the same logits.
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.normal_(1.0 if 'norm' in name or 'ln_q' in name else 0.0, 0.2)
            else:
                weight.normal_(0.0, 2.0 / weight[0].numel() ** 0.5)
        model.get_input_embeddings().weight.normal_(0.0, 0.5)
    model.generation_config.eos_token_id = [
        tokenizer.convert_tokens_to_ids(t) for t in ('<|im_end|>', '<|endoftext|>')]
    model.save_pretrained(folder, **save)
    tokenizer.save_pretrained(folder)
    return folder


def edit_json(path: Path, **changes: object) -> None:
    """Change top-level keys of a JSON file; ``None`` removes one."""
    data = json.loads(path.read_text())
    data.update(changes)
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not None}))
