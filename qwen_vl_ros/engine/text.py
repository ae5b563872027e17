"""Token ids to text as they come, never half a character."""

from __future__ import annotations

import codecs
from typing import Any

REPLACEMENT = '\ufffd'


class TextStream:
    """
    Turns generated ids into text whose pieces joined equal the tokenizer's own decoding.

    Byte-level tokenizers (Qwen's) are decoded byte by byte: a piece ends where a character ends,
    and U+FFFD that the model really wrote is a character like any other. Other tokenizers are
    decoded as a whole each time; a trailing U+FFFD is then held back for three tokens, after which
    it cannot be the start of a longer character.

    :param tokenizer: transformers' fast tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.added_tokens_decoder
        backend = getattr(tokenizer, 'backend_tokenizer', None)
        decoder = getattr(backend, 'decoder', None)
        self._bytes = byte_alphabet() if type(decoder).__name__ == 'ByteLevel' else None
        self.reset()

    def reset(self) -> None:
        """Start a new answer."""
        self._utf8 = codecs.getincrementaldecoder('utf-8')('replace')
        self._ids: list[int] = []
        self._sent = ''
        self._held = 0

    def push(self, token: int) -> str:
        """Return the text that became final with one more id."""
        if self._bytes is not None:
            return self._utf8.decode(self._token_bytes(token))
        self._ids.append(token)
        text = self._decode()
        if text.endswith(REPLACEMENT) and self._held < 3:
            self._held += 1
            return ''
        self._held = 0
        return self._advance(text)

    def finish(self) -> str:
        """Return what is left when no id follows."""
        if self._bytes is not None:
            return self._utf8.decode(b'', final=True)
        return self._advance(self._decode())

    def _decode(self) -> str:
        return str(self._tokenizer.decode(
            self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _advance(self, text: str) -> str:
        """Return what ``text`` adds; a rewritten past is left as it was sent."""
        piece = text[len(self._sent):]
        self._sent += piece
        return piece

    def _token_bytes(self, token: int) -> bytes:
        added = self._added.get(token)
        if added is not None:
            return b'' if added.special else added.content.encode()
        text = self._tokenizer.convert_ids_to_tokens(token)
        if text is None:  # a padded row of the embedding
            return b''
        assert self._bytes is not None
        try:
            return bytes(self._bytes[char] for char in text)
        except KeyError:
            return str(text).encode()


def byte_alphabet() -> dict[str, int]:
    """
    Return the printable character that stands for each byte in byte-level vocabularies (GPT-2).

    Printable Latin-1 stands for itself, the other bytes follow from U+0100 on.
    """
    plain = {*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)}
    rest = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain}
    table.update({chr(0x100 + i): byte for i, byte in enumerate(rest)})
    return table
