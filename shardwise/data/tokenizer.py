"""From text to tokens and back.

    bytes      256 ids, one per byte of UTF-8; nothing to train, nothing to install. The separator of documents is
               byte 0: text has no use for NUL, so one in the text is dropped when encoded.
    bpe:SIZE   byte-level pairs trained on the source with Hugging Face's `tokenizers` (an optional extra: training and
               encoding at the speed of compiled code is no work to repeat by hand). Id 0 is the separator, `<|end|>`.
    a path     a `tokenizer.json` of that library, or the folder that holds one, trained here or anywhere

A separator follows every document. Text that happens to spell a separator is encoded as plain characters, never as one.
The bytes that ids stand for can be counted, so that losses of different tokenizers compare as bits per byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from shardwise.data.token_file import write_data_file
from shardwise.errors import DataError

EOS_TOKEN = "<|end|>"
_EOS_TOKENS = (EOS_TOKEN, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Tokens that mark the end of a document in tokenizers of this house and others; the first that is there counts."""


class Tokenizer(Protocol):
    vocab: int
    eos_id: int

    def encode(self, text: str) -> np.ndarray:
        """The ids of one text, without a separator."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of several texts at once, which may use more than one core."""
        ...

    def decode(self, ids: ArrayLike) -> str:
        """The text of some ids; separators, and what is not an id at all, show as nothing."""
        ...

    def count_bytes(self, ids: ArrayLike) -> int:
        """How many bytes of UTF-8 the ids stand for; a separator and an ignored target (-100) stand for none."""
        ...


class ByteTokenizer:
    vocab = 256
    eos_id = 0

    def encode(self, text: str) -> np.ndarray:
        ids = np.frombuffer(text.encode(), np.uint8)
        return ids[ids != self.eos_id]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: ArrayLike) -> str:
        flat = np.asarray(ids).reshape(-1)
        return flat[(flat > 0) & (flat < self.vocab)].astype(np.uint8).tobytes().decode(errors="replace")

    def count_bytes(self, ids: ArrayLike) -> int:
        flat = np.asarray(ids)
        return int(np.count_nonzero((flat > 0) & (flat < self.vocab)))


class HuggingFaceTokenizer:
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, tokenizer: Any, name: str):
        tokenizer.encode_special_tokens = True
        tokenizer.no_padding()  # saved tokenizers may carry settings for batches of another use
        tokenizer.no_truncation()
        eos_ids = [tokenizer.token_to_id(token) for token in _EOS_TOKENS if tokenizer.token_to_id(token) is not None]
        if not eos_ids:
            raise DataError(
                f"the tokenizer {name} has no token for the end of a document; give it one of {', '.join(_EOS_TOKENS)} as a "
                f"special token."
            )
        self._tokenizer, self.eos_id = tokenizer, int(eos_ids[0])
        self.vocab = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
        self._token_bytes = self._bytes_per_token()

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [
            np.array(encoding.ids, np.uint32)
            for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        ]

    def decode(self, ids: ArrayLike) -> str:
        return str(self._tokenizer.decode(self._valid_ids(ids).tolist(), skip_special_tokens=True))

    def count_bytes(self, ids: ArrayLike) -> int:
        if self._token_bytes is None:
            return len(self.decode(ids).encode())
        return int(self._token_bytes[self._valid_ids(ids)].sum())

    def save(self, path: Path) -> None:
        with write_data_file(path) as file:
            file.write(self._tokenizer.to_str(pretty=True).encode())

    def _valid_ids(self, ids: ArrayLike) -> np.ndarray:
        flat = np.asarray(ids, np.int64).reshape(-1)
        return flat[(flat >= 0) & (flat < self.vocab)]

    def _bytes_per_token(self) -> np.ndarray | None:
        """Bytes by id where tokens are spelled in bytes, one character each; None: only decoding can tell.

        Decoding cannot tell for ids that start or end amid a character, which windows of a corpus do.
        """
        if '"ByteLevel"' not in json.dumps(json.loads(self._tokenizer.to_str())["decoder"]):
            return None
        token_bytes = np.zeros(self.vocab, np.int64)
        for token, token_id in self._tokenizer.get_vocab(with_added_tokens=True).items():
            token_bytes[token_id] = len(token)
        for token_id, added in self._tokenizer.get_added_tokens_decoder().items():
            token_bytes[token_id] = 0 if added.special else len(added.content.encode())
        return token_bytes


def parse_bpe_size(name: str) -> int | None:
    """The SIZE of `bpe:SIZE`; None: the name is of another kind."""
    kind, colon, size = name.partition(":")
    if kind != "bpe" or not colon:
        return None
    if not size.isdecimal() or int(size) < 257:
        raise DataError(
            f"data.tokenizer = {name!r}: write bpe:SIZE with a size of at least 257 (256 bytes and the separator), "
            f"for instance bpe:4096."
        )
    return int(size)


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, or a saved tokenizer by its path."""
    if name == "bytes":
        return ByteTokenizer()
    tokenizers = _import_tokenizers()
    path = _tokenizer_path(name)
    try:
        return HuggingFaceTokenizer(tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8")), str(path))
    except DataError:
        raise
    except Exception as error:  # the library raises bare Exceptions for files it does not like
        raise DataError(
            f"the tokenizer {path} cannot be read: {error}. Give a tokenizer.json of `tokenizers`."
        ) from error


def train_bpe(texts: Iterable[str], size: int) -> HuggingFaceTokenizer:
    """Byte-level pairs of `size` ids (fewer if the text has no more pairs); the same texts give the same tokenizer."""
    tokenizers = _import_tokenizers()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),  # so that any text can be encoded
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return HuggingFaceTokenizer(tokenizer, f"bpe:{size}")


def tokenizer_fingerprint(name: str) -> str:
    """What tells whether text would be encoded the same way: the name, or the content of a saved tokenizer."""
    if name == "bytes" or parse_bpe_size(name) is not None:
        return name
    try:
        return hashlib.blake2b(_tokenizer_path(name).read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise DataError(f"the tokenizer {name} cannot be read: {error.strerror}.") from error


def _tokenizer_path(name: str) -> Path:
    path = Path(name).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise DataError(
            f"data.tokenizer = {name!r} is not a file; write 'bytes', 'bpe:SIZE' or the path of a tokenizer.json."
        )
    return path


def _import_tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise DataError(
            "tokenizers other than 'bytes' need the tokenizers package, which is not installed; "
            "`pip install shardwise[bpe]`, or set data.tokenizer = 'bytes'."
        ) from None
    return tokenizers
