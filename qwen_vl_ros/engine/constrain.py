"""Answers that follow a JSON schema, by the library ``llguidance`` where it is installed."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from qwen_vl_ros.engine.errors import EngineError, ErrorCode, one_line


class Constraint:
    """
    The grammar of one answer.

    :param matcher: llguidance's matcher.
    :param vocab: rows of the output matrix.
    """

    def __init__(self, matcher: Any, vocab: int) -> None:
        self._matcher = matcher
        self._vocab = vocab

    def advance(self, last: int | None) -> Tensor:
        """
        Take the token just chosen and return the mask for the next one.

        :param last: ``None`` before the first token.
        :return: bool [vocab]; only end tokens are left when the JSON is complete.
        """
        if last is not None:
            self._matcher.consume_token(last)
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        mask = (bits[:, None] >> torch.arange(8)).bitwise_and(1).flatten()[:self._vocab].bool()
        if self._matcher.is_error():
            raise EngineError(
                ErrorCode.BAD_SCHEMA,
                f'the schema cannot be followed: {one_line(self._matcher.get_error())}')
        return mask


class Constraints:
    """
    Compiles schemas against one tokenizer; converting that takes a second, once.

    :param tokenizer: transformers' fast tokenizer.
    :param vocab: rows of the output matrix, at least the tokenizer's size.
    :param end_tokens: ids that end an answer.
    """

    def __init__(self, tokenizer: Any, vocab: int, end_tokens: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._end_tokens = sorted(end_tokens)
        self._words: Any = None

    def compile(self, schema: str) -> Constraint | None:
        """
        Return the constraint of a JSON schema.

        :param schema: JSON text; empty gives ``None``.
        :raises EngineError: BAD_SCHEMA; without llguidance it names the command that installs it.
        """
        if not schema:
            return None
        try:
            parsed = json.loads(schema)
        except ValueError as error:
            raise EngineError(
                ErrorCode.BAD_SCHEMA, f'json_schema is not JSON: {one_line(error)}') from error
        if not isinstance(parsed, dict):
            raise EngineError(ErrorCode.BAD_SCHEMA, 'json_schema is not a JSON object')
        try:
            import llguidance
            import llguidance.hf
        except ImportError:
            raise EngineError(
                ErrorCode.BAD_SCHEMA,
                'json_schema needs the library llguidance: pip install llguidance') from None
        try:
            if self._words is None:
                self._words = llguidance.hf.from_tokenizer(
                    self._tokenizer, n_vocab=self._vocab, eos_token=self._end_tokens)
            matcher = llguidance.LLMatcher(
                self._words, llguidance.LLMatcher.grammar_from_json_schema(parsed))
        except Exception as error:
            raise EngineError(
                ErrorCode.BAD_SCHEMA, f'json_schema is refused: {one_line(error)}') from error
        if matcher.is_error():
            raise EngineError(
                ErrorCode.BAD_SCHEMA, f'json_schema is refused: {one_line(matcher.get_error())}')
        return Constraint(matcher, self._vocab)


def is_json(text: str) -> bool:
    """Return whether a text is one whole JSON value."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
