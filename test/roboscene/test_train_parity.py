"""The training forward is transformers' Qwen2-VL: same logits, with and without dropped units."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qwen_vl_ros.roboscene.items import items
from qwen_vl_ros.roboscene.render import render
from tools.train_tiny import tokenizer as tok
from tools.train_tiny.data import item_batch
from tools.train_tiny.model import PATCH, Shape, TinyQwen2VL, load_published, published_names
from tools.train_tiny.step import Stepper, block_mask, draw_keep


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp('tiny')
    tokenizer = tok.save(path)
    torch.manual_seed(3)
    model = TinyQwen2VL(Shape(vision_depth=2, depth=2, vocab=512))
    with torch.no_grad():  # larger weights: every term must show in the logits
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(2.5)
    ids = {t: tokenizer.token_to_id(t) for t in tok.SPECIAL}
    model.save(path, ids)
    return path


@pytest.fixture(scope='module')
def pair(folder):
    from safetensors.torch import load_file
    from transformers import Qwen2VLForConditionalGeneration
    reference = Qwen2VLForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation='eager').eval()
    model = TinyQwen2VL(Shape(vision_depth=2, depth=2, vocab=512))
    load_published(model, load_file(folder / 'model.safetensors'))
    return reference, model.eval()


def _pixels(rgb: np.ndarray, model: TinyQwen2VL) -> torch.Tensor:
    """Both temporal halves of the patches, [N * 768, 1176]."""
    x = model.patches(torch.from_numpy(rgb)).view(-1, 3, 1, PATCH * PATCH)
    return x.expand(-1, -1, 2, -1).reshape(-1, 1176)


@pytest.mark.parametrize('family', ['relation', 'change'])
def test_logits_equal_transformers(family, folder, pair):
    from transformers import AutoTokenizer
    reference, model = pair
    item = next(iter(items(family, 'test', 1)))
    batch = item_batch([item])
    rgb = render(item.scenes)
    stepper = Stepper(model, torch.device('cpu'))
    with torch.no_grad():
        ours = stepper.logits(batch, torch.from_numpy(rgb))[0][0][0, 0]
    tokens = AutoTokenizer.from_pretrained(folder)
    slices = len(item.scenes)
    kind = 'video' if slices == 2 else 'image'
    text = tokens.apply_chat_template(
        [{'role': 'user', 'content': [{'type': kind}, {'type': 'text',
                                                       'text': item.question.text}]}],
        tokenize=False, add_generation_prompt=True)
    text = text.replace(f'<|{kind}_pad|>', f'<|{kind}_pad|>' * 192 * slices)
    ids = tokens(text + item.question.answer, return_tensors='pt').input_ids
    grid = torch.tensor([[slices, 24, 32]])
    pad = tokens.convert_tokens_to_ids(f'<|{kind}_pad|>')
    extra = {'mm_token_type_ids': (ids == pad).int() * (2 if slices == 2 else 1)}
    visual = ({'pixel_values_videos': _pixels(rgb, model), 'video_grid_thw': grid}
              if slices == 2 else
              {'pixel_values': _pixels(rgb, model), 'image_grid_thw': grid})
    with torch.no_grad():
        theirs = reference(input_ids=ids, **visual, **extra).logits[0]
    said = (batch.labels[0 if slices == 1 else 1][0, 0] >= 0).nonzero()[0]
    # The block's tokens are the tail of the prompt; compare where the answer is predicted.
    count = len(said) - 1  # the last label is the end token, which ids does not hold
    want = theirs[-count - 1:]
    got = ours[said[0]:said[0] + count + 1]
    assert torch.allclose(got, want, rtol=1e-3, atol=1e-3 * want.abs().max())
    assert want.std() > 0.1  # not a comparison of nothings


def test_keep_all_is_the_plain_forward(pair):
    model = pair[1]
    item = next(iter(items('pointing', 'test', 1)))
    batch, rgb = item_batch([item]), torch.from_numpy(render(item.scenes))
    stepper = Stepper(model, torch.device('cpu'))
    with torch.no_grad():
        plain = stepper.logits(batch, rgb)[0][0]
        kept = stepper.logits(batch, rgb, torch.arange(192)[None])[0][0]
    assert torch.equal(plain, kept)


def test_draw_keep_prefers_things_and_is_sorted(pair):
    items_ = list(items('relation', 'test', 8))
    objects = torch.from_numpy(item_batch(items_).objects)
    keep = draw_keep(objects, 64, torch.Generator().manual_seed(1))
    assert keep.shape == (8, 64)
    assert (keep[:, 1:] > keep[:, :-1]).all()
    assert keep.min() >= 0 and keep.max() < 192


def test_block_mask_drawn():
    got = block_mask(2, 2, 2, 7, torch.device('cpu')).int().tolist()
    assert got == [[1, 0, 0, 0, 0, 0, 0],
                   [1, 1, 0, 0, 0, 0, 0],
                   [1, 1, 1, 0, 0, 0, 0],
                   [1, 1, 1, 1, 0, 0, 0],
                   [1, 1, 0, 0, 1, 0, 0],
                   [1, 1, 0, 0, 1, 1, 0],
                   [1, 1, 0, 0, 0, 0, 1]]


def test_patch_weight_survives_the_round_trip(pair):
    model = pair[1]
    again = TinyQwen2VL(model.shape)
    load_published(again, {k: v.detach() for k, v in published_names(model).items()})
    assert torch.equal(model.patch, again.patch)
