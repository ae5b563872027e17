"""Streamed text: pieces joined equal the tokenizer's decoding, and end where characters end."""

from __future__ import annotations

import pytest
from engine_checkpoints import make_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qwen_vl_ros.engine.text import TextStream, byte_alphabet

TOKENIZER = make_tokenizer()


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are words, joined by blanks."""
    words = ['<|endoftext|>', '<|im_end|>', '[UNK]', 'a', 'red', 'box', '盒', '\ufffd']
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, '[UNK]'))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token='[UNK]', eos_token='<|im_end|>')


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that spells unknown characters as bytes, as sentencepiece does."""
    vocab = {'a': 0, '▁b': 1, '\ufffd': 2, **{f'<0x{i:02X}>': 3 + i for i in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


WORDS, FALLBACK = word_tokenizer(), byte_fallback_tokenizer()


def stream(tokenizer, ids):
    """Return the pieces, the last one from the end."""
    text = TextStream(tokenizer)
    return [*(text.push(i) for i in ids), text.finish()]


def decoded(tokenizer, ids):
    """Return the tokenizer's own decoding."""
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40))
def test_any_bytes_joined_equal_the_decoding(ids):
    """Random tokens are mostly broken UTF-8: both sides replace the same bytes."""
    assert ''.join(stream(TOKENIZER, ids)) == decoded(TOKENIZER, ids)


@given(st.text(max_size=40))
def test_real_text_never_ends_in_half_a_character(text):
    ids = TOKENIZER(text, add_special_tokens=False)['input_ids']
    pieces = stream(TOKENIZER, ids)
    assert ''.join(pieces) == decoded(TOKENIZER, ids)
    assert pieces[-1] == ''
    if '\ufffd' not in text:
        assert not any('\ufffd' in piece for piece in pieces)


@pytest.mark.parametrize('text', ['🤖🚧 gut', '前面的路被挡住了吗?', 'é', '👩‍🚀'])
def test_characters_of_several_tokens_come_whole(text):
    ids = TOKENIZER(text, add_special_tokens=False)['input_ids']
    assert len(ids) > 1
    pieces = stream(TOKENIZER, ids)
    assert ''.join(pieces) == text
    assert '\ufffd' not in ''.join(pieces)


@pytest.mark.parametrize('tokenizer', [TOKENIZER, WORDS, FALLBACK])
def test_a_real_replacement_character_does_not_stall(tokenizer):
    """C13: text after a genuine U+FFFD comes out, and the character itself too."""
    ids = tokenizer('\ufffd', add_special_tokens=False)['input_ids']
    a = tokenizer('a', add_special_tokens=False)['input_ids']
    pieces = stream(tokenizer, ids + a * 6)
    assert ''.join(pieces) == decoded(tokenizer, ids + a * 6)
    assert '\ufffd' in ''.join(pieces[:len(ids) + 3])
    lonely = stream(tokenizer, ids * 8)
    assert '\ufffd' in ''.join(lonely[:-1])


@given(st.text(max_size=20))
def test_fallback_text_joined_equals_the_decoding(text):
    ids = FALLBACK(text, add_special_tokens=False)['input_ids']
    assert ''.join(stream(FALLBACK, ids)) == decoded(FALLBACK, ids)


def test_fallback_characters_come_whole():
    ids = FALLBACK('盒a', add_special_tokens=False)['input_ids']
    assert len(ids) == 4
    assert stream(FALLBACK, ids) == ['', '', '盒', 'a', '']


def test_words_come_one_by_one():
    ids = WORDS('a red box 盒', add_special_tokens=False)['input_ids']
    assert stream(WORDS, ids) == ['a', ' red', ' box', ' 盒', '']


def test_special_tokens_and_padded_rows_say_nothing():
    end = TOKENIZER.convert_tokens_to_ids('<|im_end|>')
    assert stream(TOKENIZER, [end, len(TOKENIZER) + 5]) == ['', '', '']


def test_the_alphabet_is_the_tokenizers():
    alphabet = byte_alphabet()
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))
