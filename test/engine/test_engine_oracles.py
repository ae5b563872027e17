"""What must hold when units are dropped, chunks are cut and caches are used."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.kv_cache import KVCache
from qwen_vl_ros.engine.patches import extract_patches, grid_of
from qwen_vl_ros.engine.prompt import VisualToken
from qwen_vl_ros.engine.types import Request, Visual

QUESTION = 'What does the camera see?'


def random_keep(units: int, share: float = 0.4, seed: int = 0) -> np.ndarray:
    """Return a mask with about ``share`` of the units kept."""
    return np.random.default_rng(seed).random(units) < share


def encode(engine, frames, units=None):
    """Return grid and merged tokens of frames; ``units`` is an index list."""
    grid = grid_of(frames, 3136, 1003520)
    patches = torch.from_numpy(extract_patches(frames, grid))
    index = None if units is None else torch.as_tensor(units)
    return grid, engine.model.vision.encode(patches, grid, index)


@pytest.fixture
def clip(picture):
    """Return four frames of 5x7 units: two temporal slices."""
    return tuple(picture(196, 140, seed) for seed in range(4))


def test_keeping_all_is_bit_equal(engine, picture, clip):
    for frames in ((picture(448, 336),), clip):
        grid, whole = encode(engine, frames)
        _, kept = encode(engine, frames, range(grid[0] * grid[1] * grid[2] // 4))
        assert torch.equal(whole, kept)
    visual = Visual(clip)
    masked = Visual(clip, np.ones(grid[0] * grid[1] * grid[2] // 4, bool))
    assert torch.equal(engine.trace(Request(QUESTION, (visual,)))[1],
                       engine.trace(Request(QUESTION, (masked,)))[1])


def test_dropping_in_the_encoder_equals_masking_the_keys(
        engine, reference, picture, clip, monkeypatch):
    plain = torch.nn.functional.scaled_dot_product_attention
    for frames in ((picture(448, 336),), clip):
        grid = grid_of(frames, 3136, 1003520)
        total = grid[0] * grid[1] * grid[2] // 4
        keep = random_keep(total)
        _, ours = encode(engine, frames, np.flatnonzero(keep))
        masks = torch.from_numpy(np.repeat(keep.reshape(grid[0], -1), 4, axis=1))
        calls = []

        def masked(q, k, v, attn_mask=None, masks=masks, calls=calls, **more):
            mask = masks[len(calls) % len(masks)]
            calls.append(1)
            assert attn_mask is None and mask.numel() == k.shape[2]
            return plain(q, k, v, attn_mask=mask.expand(q.shape[2], -1), **more)

        monkeypatch.setattr(torch.nn.functional, 'scaled_dot_product_attention', masked)
        merged = reference.merged(Visual(frames))
        monkeypatch.undo()
        assert len(calls) == grid[0] * len(engine.model.vision.blocks)
        expected = merged[torch.from_numpy(keep)]
        assert not torch.allclose(ours, encode(engine, frames)[1][torch.from_numpy(keep)], 1e-2)
        assert (ours - expected).abs().max() < 1e-4 * expected.abs().max()


def test_dropping_in_the_decoder_equals_masking_the_keys(engine, reference, picture):
    frame = picture(448, 336)
    keep = random_keep(192)
    pruned = Request(QUESTION, (Visual((frame,), keep),))
    prompt, logits = engine.trace(pruned)
    full, _ = engine.trace(Request(QUESTION, (Visual((frame,)),)))
    start, stop = full.spans[0]
    seen = np.ones(full.ids.size, bool)
    seen[start:stop] = keep
    assert seen.sum() == prompt.ids.size
    model = reference.model.model
    embeds = model.get_input_embeddings()(torch.from_numpy(full.ids)[None]).detach()
    embeds[0, start:stop] = 7.0  # nobody may see what stands at a dropped unit
    embeds[0, start:stop][torch.from_numpy(keep)] = encode(
        engine, (frame,), np.flatnonzero(keep))[1]
    with torch.no_grad():
        out = reference.model(
            inputs_embeds=embeds, attention_mask=torch.from_numpy(seen)[None].long(),
            position_ids=torch.from_numpy(full.positions)[:, None])
    expected = out.logits[0, torch.from_numpy(seen)]
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize('chunk', [1, 7, 64, 200])
def test_prefill_in_chunks_equals_one_pass(engine, picture, chunk):
    request = Request(QUESTION, (Visual((picture(448, 336),), random_keep(192, 0.7)),))
    prompt, logits = engine.trace(request)
    model = engine.model
    features = [(prompt.spans[0], encode(
        engine, request.visuals[0].frames, np.flatnonzero(request.visuals[0].keep))[1])]
    with torch.inference_mode():
        embeddings = model.embed(prompt, 0, features)
        cache = KVCache(model.config.language, prompt.ids.size, model.device, model.dtype)
        positions = torch.from_numpy(prompt.positions)
        rows = []
        for start in range(0, prompt.ids.size, chunk):
            part = slice(start, start + chunk)
            rows.append(model.language.prefill(
                embeddings[part], positions[:, part], cache, start))
        ours = model.language.logits(torch.cat(rows))
    assert (ours - logits).abs().max() < 1e-4 * logits.abs().max()


def test_golden_positions_of_two_pictures(engine):
    """Written out by hand: 2 words, 2x3 units, 1 word, 3x1 units with one dropped, 2 words."""
    image = engine.model.config.image_token
    first = VisualToken((1, 4, 6), False, 11)
    second = VisualToken((1, 6, 2), False, 22, np.array([0, 2]))
    prompt = engine.prompts.expand([1, 2, image, 3, image, 4, 5], [first, second])
    assert prompt.positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 9, 10],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 8, 9, 10],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 6, 9, 10]]
    assert prompt.ids.tolist() == [1, 2, *[image] * 6, 3, image, image, 4, 5]
    assert prompt.spans == ((2, 8), (9, 11))
    assert prompt.next_position == 11
    swapped = engine.prompts.expand([1, 2, image, 3, image, 4, 5], [second, first])
    assert swapped.positions.tolist() == [
        [0, 1, 2, 2, 5, 6, 6, 6, 6, 6, 6, 9, 10],
        [0, 1, 2, 4, 5, 6, 6, 6, 7, 7, 7, 9, 10],
        [0, 1, 2, 2, 5, 6, 7, 8, 6, 7, 8, 9, 10]]


def test_golden_positions_of_a_clip_longer_than_its_sides(engine):
    """4 slices of 1x2 units: text goes on at 1 + 2, while the time axis reaches 1 + 3."""
    video = engine.model.config.video_token
    clip = VisualToken((4, 2, 4), True, 5)
    prompt = engine.prompts.expand([9, video], [clip])
    assert prompt.positions.tolist() == [
        [0, 1, 1, 2, 2, 3, 3, 4, 4], [0] + [1] * 8, [0, 1, 2, 1, 2, 1, 2, 1, 2]]
    assert prompt.next_position == 5
    longer = engine.prompts.expand([9, video, 8, 8, 8], [clip])
    assert longer.positions[:, -3:].tolist() == [[3, 4, 5]] * 3
    assert longer.next_position == 6
    # Also where the last slice is dropped.
    cut = VisualToken((4, 2, 4), True, 5, np.arange(6))
    assert engine.prompts.expand([9, video], [cut]).next_position == 5


def test_dropping_does_not_move_the_decode_position(engine, picture):
    frame = picture(448, 336)
    whole, _ = engine.trace(Request(QUESTION, (Visual((frame,)),)))
    for keep in (random_keep(192, 0.1), np.arange(192) == 191, np.arange(192) == 0):
        pruned, _ = engine.trace(Request(QUESTION, (Visual((frame,), keep),)))
        assert pruned.next_position == whole.next_position
        start, stop = whole.spans[0]
        kept = np.r_[np.ones(start, bool), keep, np.ones(whole.ids.size - stop, bool)]
        assert np.array_equal(pruned.positions, whole.positions[:, kept])


def test_the_order_of_the_keep_list_does_not_matter(engine, clip):
    grid = grid_of(clip, 3136, 1003520)
    units = np.flatnonzero(random_keep(grid[0] * grid[1] * grid[2] // 4))
    shuffled = np.random.default_rng(1).permutation(units)
    assert not np.array_equal(units, shuffled)
    assert torch.equal(encode(engine, clip, units)[1], encode(engine, clip, shuffled)[1])


def test_slices_apart_equal_the_whole_clip(engine, clip):
    grid, whole = encode(engine, clip)
    parts = [encode(engine, clip[i:i + 2]) for i in (0, 2)]
    assert [part[0] for part in parts] == [(1, *grid[1:])] * 2
    apart = torch.cat([part[1] for part in parts])
    assert (apart - whole).abs().max() < 1e-5 * whole.abs().max()
    # With an uneven keep mask as well, one slice being empty.
    area = grid[1] * grid[2] // 4
    units = np.array([0, 3, area - 1])
    _, pruned = encode(engine, clip, units + area)
    _, alone = encode(engine, clip[2:], units)
    assert (pruned - alone).abs().max() < 1e-5 * alone.abs().max()


def test_cached_decode_with_drops_equals_recomputing(engine, picture):
    request = Request(QUESTION, (Visual((picture(448, 336),), random_keep(192)),))
    prompt, _ = engine.trace(request)
    model = engine.model
    visual = (prompt.spans[0], encode(
        engine, request.visuals[0].frames, np.flatnonzero(request.visuals[0].keep))[1])
    with torch.inference_mode():
        length = prompt.ids.size
        cache = KVCache(model.config.language, length + 20, model.device, model.dtype)
        hidden = model.language.prefill(
            model.embed(prompt, 0, [visual]), torch.from_numpy(prompt.positions), cache, 0)
        step = model.language.logits(hidden[-1:])[0]
        tokens: list[int] = []
        for i in range(20):
            again = prompt if not tokens else type(prompt)(
                np.r_[prompt.ids, tokens],
                np.c_[prompt.positions, np.tile(prompt.next_position + np.arange(i), (3, 1))],
                prompt.names, prompt.spans, 0)
            whole = model.all_logits(again, [visual])[-1]
            assert (step - whole).abs().max() < 1e-4 * whole.abs().max()
            tokens.append(int(step.argmax()))
            step = model.language.decode(
                torch.tensor(tokens[-1:]), prompt.next_position + i, cache, length + i)
    engine.end_tokens, ends = frozenset(), engine.end_tokens
    try:
        done = list(engine.answer(Request(
            QUESTION, request.visuals, max_new_tokens=20)))[-1]
    finally:
        engine.end_tokens = ends
    assert list(done.answer.token_ids) == tokens


def test_dropping_everything_is_refused_and_harms_nobody(engine, picture):
    nothing = Visual((picture(112, 112),), np.zeros(16, bool))
    with pytest.raises(EngineError, match='keeps none of the 16 units') as caught:
        list(engine.answer(Request(QUESTION, (nothing,), max_new_tokens=3)))
    assert caught.value.code == ErrorCode.BAD_REQUEST
    one = Visual((picture(112, 112),), np.arange(16) == 5)
    done = list(engine.answer(Request(QUESTION, (one,), max_new_tokens=3)))[-1]
    assert (done.answer.vision_tokens_in, done.answer.vision_tokens_kept) == (16, 1)
