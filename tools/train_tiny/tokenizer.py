"""
The tiny checkpoint's tokenizer: Qwen2's byte-level BPE over the vocabulary of RoboScene-VQA.

Same class, same splitting rule and same special tokens as the published checkpoints; every byte
has a token, so any text can be encoded. Bins of pointing answers are tokens of their own.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from qwen_vl_ros.roboscene.geometry import GRID_H, GRID_W
from qwen_vl_ros.roboscene.questions import answer_vocabulary

SPECIAL = ('<|endoftext|>', '<|im_start|>', '<|im_end|>', '<|object_ref_start|>',
           '<|object_ref_end|>', '<|box_start|>', '<|box_end|>', '<|quad_start|>',
           '<|quad_end|>', '<|vision_start|>', '<|vision_end|>', '<|vision_pad|>',
           '<|image_pad|>', '<|video_pad|>')
BINS = tuple(f'<x{i}>' for i in range(GRID_W)) + tuple(f'<y{i}>' for i in range(GRID_H))
# Qwen2's pre-tokenisation: words with their leading space, single digits, punctuation.
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
         r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+')

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or 'image' in part or 'image_url' in part %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif part['type'] == 'video' or 'video' in part %}"
    "{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


def build() -> Tokenizer:
    """Train the BPE merges on every question and answer that RoboScene-VQA can form."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), 'isolated'),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048, min_frequency=1, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(answer_vocabulary(), trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False)
                                  for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in BINS])
    return tokenizer


def save(folder: Path) -> Tokenizer:
    """Write tokenizer.json, tokenizer_config.json and the chat template into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build()
    tokenizer.save(str(folder / 'tokenizer.json'))
    inner = json.loads((folder / 'tokenizer.json').read_text())['model']
    (folder / 'vocab.json').write_text(json.dumps(inner['vocab'], ensure_ascii=False))
    merges = [m if isinstance(m, str) else ' '.join(m) for m in inner['merges']]
    (folder / 'merges.txt').write_text('#version: 0.2\n' + '\n'.join(merges) + '\n')
    added = {str(tokenizer.token_to_id(t)): {
        'content': t, 'lstrip': False, 'rstrip': False, 'normalized': False,
        'single_word': False, 'special': t in SPECIAL} for t in SPECIAL + BINS}
    config = {
        'add_prefix_space': False, 'added_tokens_decoder': added,
        'additional_special_tokens': list(SPECIAL[1:]), 'bos_token': None,
        'clean_up_tokenization_spaces': False, 'eos_token': '<|im_end|>', 'errors': 'replace',
        'model_max_length': 4096, 'pad_token': '<|endoftext|>', 'split_special_tokens': False,
        'tokenizer_class': 'Qwen2Tokenizer', 'unk_token': None, 'padding_side': 'left',
        'chat_template': CHAT_TEMPLATE}
    (folder / 'tokenizer_config.json').write_text(json.dumps(config, indent=2))
    (folder / 'chat_template.json').write_text(json.dumps({'chat_template': CHAT_TEMPLATE}))
    return tokenizer
