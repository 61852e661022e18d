"""Tokenizers.

    bytes      256 ids, one per byte of UTF-8; needs no package. Byte 0 ends a document; NUL characters are dropped
    bpe:SIZE   byte-level BPE trained on the source with Hugging Face's `tokenizers`. Id 0, `<|end|>`, ends a document
    a path     a `tokenizer.json` of that library, or a folder that has one

An end-of-document token follows every document. Text that spells a special token is encoded as plain characters.
Tokenizers count the bytes that ids stand for, so that losses of different tokenizers compare as bits per byte."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from shardwise.data.token_file import write_data_file
from shardwise.errors import DataError, shorten
from shardwise.files import import_extra, os_errors_as, user_path

MAX_VOCAB = 10**7  # as of model.vocab
EOS_TOKEN = "<|end|>"
_EOS_TOKENS = (EOS_TOKEN, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Known end-of-document tokens, ours and those of other tokenizers; the first one in the vocabulary is used."""


class ByteTokenizer:
    """The methods of every tokenizer, for `bytes`."""

    vocab, eos_id = 256, 0

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of a text, without an end-of-document token."""
        ids = np.frombuffer(text.encode(), np.uint8)
        return ids[ids != self.eos_id]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of several texts; may use several cores."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: ArrayLike, keep_special: bool = False) -> str:
        """Returns the text of some ids; drops special tokens, unless they are kept, and invalid ids."""
        flat = np.asarray(ids).reshape(-1)
        return flat[(flat > 0) & (flat < self.vocab)].astype(np.uint8).tobytes().decode(errors="replace")

    def encode_chat(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Returns the ids of each text, special tokens recognized, and the first and last character of each id."""
        sizes = [np.array([len(letter.encode()) * (letter != "\0") for letter in text], int) for text in texts]
        places = [np.repeat(np.arange(len(of_text)), of_text) for of_text in sizes]
        return [(self.encode(text), place, place + 1) for text, place in zip(texts, places, strict=True)]

    def count_bytes(self, ids: ArrayLike) -> int:
        """Returns the UTF-8 bytes that the ids stand for; end-of-document tokens and ignored targets (-100) count 0."""
        flat = np.asarray(ids)
        return int(np.count_nonzero((flat > 0) & (flat < self.vocab)))


class HuggingFaceTokenizer:
    def __init__(self, tokenizer: Any, name: str, text: str = ""):
        tokenizer.encode_special_tokens = True
        tokenizer.no_padding()  # saved tokenizers may have padding and truncation enabled
        tokenizer.no_truncation()
        eos_ids = [tokenizer.token_to_id(token) for token in _EOS_TOKENS if tokenizer.token_to_id(token) is not None]
        if not eos_ids:
            options = f"add one of {', '.join(_EOS_TOKENS)} as a special token"
            raise DataError(f"the tokenizer {name} has no end-of-document token; {options}.")
        self._tokenizer, self.eos_id, self._text = tokenizer, int(eos_ids[0]), text
        self.vocab = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
        if self.vocab > MAX_VOCAB:
            raise DataError(f"the tokenizer {name} has the id {self.vocab - 1:,}; ids must be below {MAX_VOCAB:,}.")
        self._token_bytes = self._bytes_per_token()

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: ArrayLike, keep_special: bool = False) -> str:
        return str(self._tokenizer.decode(self._valid_ids(ids).tolist(), skip_special_tokens=not keep_special))

    def encode_chat(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        self._tokenizer.encode_special_tokens = False
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        self._tokenizer.encode_special_tokens = True
        return [(np.array(e.ids, np.uint32), *np.array(e.offsets, np.int64).reshape(-1, 2).T) for e in encodings]

    def count_bytes(self, ids: ArrayLike) -> int:
        if self._token_bytes is None:
            return len(self.decode(ids).encode())
        return int(self._token_bytes[self._valid_ids(ids)].sum())

    def save(self, path: Path) -> None:
        with write_data_file(path) as file:
            file.write((self._text or self._tokenizer.to_str(pretty=True)).encode())

    def _valid_ids(self, ids: ArrayLike) -> np.ndarray:
        flat = np.asarray(ids, np.int64).reshape(-1)
        return flat[(flat >= 0) & (flat < self.vocab)]

    def _bytes_per_token(self) -> np.ndarray | None:
        """Returns the number of bytes of each id of a byte-level tokenizer; None for others, which have to decode.
        Decoding is inexact for ids that begin or end within a character, which the windows of a corpus do."""
        if '"ByteLevel"' not in json.dumps(json.loads(self._tokenizer.to_str())["decoder"]):
            return None
        token_bytes = np.zeros(self.vocab, np.int64)
        for token, token_id in self._tokenizer.get_vocab(with_added_tokens=True).items():
            token_bytes[token_id] = len(token)
        for token_id, added in self._tokenizer.get_added_tokens_decoder().items():
            token_bytes[token_id] = 0 if added.special else len(added.content.encode())
        return token_bytes


Tokenizer = ByteTokenizer | HuggingFaceTokenizer


def parse_bpe_size(name: str) -> int | None:
    """Returns the SIZE of `bpe:SIZE`; None for any other name."""
    kind, colon, size = name.partition(":")
    if kind != "bpe" or not colon:
        return None
    if not size.isdecimal() or len(size) > 8 or not 257 <= int(size) <= MAX_VOCAB:
        raise DataError(f"data.tokenizer = {shorten(name)}: write bpe:SIZE of at least 257 and at most 10,000,000 ids.")
    return int(size)


def load_tokenizer(name: str) -> Tokenizer:
    """Returns the byte tokenizer for `bytes`, else loads the tokenizer at a path."""
    if name == "bytes":
        return ByteTokenizer()
    tokenizers = import_extra("tokenizers", "bpe", "this tokenizer")
    path = _tokenizer_path(name)
    try:
        text = path.read_bytes().decode()
        return HuggingFaceTokenizer(tokenizers.Tokenizer.from_str(text), str(path), text)
    except DataError:
        raise
    except Exception as error:  # the library raises bare Exceptions for malformed files
        raise DataError(f"the tokenizer {path} cannot be read: {error}. It must be a tokenizer.json.") from error


def train_bpe(texts: Iterable[str], size: int) -> HuggingFaceTokenizer:
    """Trains a byte-level BPE of `size` ids, or fewer if the text has too few pairs. Training is deterministic."""
    tokenizers = import_extra("tokenizers", "bpe", "this tokenizer")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()  # so that any text can be encoded
    options = {"special_tokens": [EOS_TOKEN], "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(vocab_size=size, **options))
    return HuggingFaceTokenizer(tokenizer, f"bpe:{size}")


def tokenizer_fingerprint(name: str) -> str:
    """Returns a string that changes with the encoding: the name, or a hash of a saved tokenizer."""
    if name == "bytes" or parse_bpe_size(name) is not None:
        return name
    with os_errors_as(DataError, f"the tokenizer {name} cannot be read"):
        return hashlib.blake2b(_tokenizer_path(name).read_bytes(), digest_size=16).hexdigest()


def _tokenizer_path(name: str) -> Path:
    path = user_path(name)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise DataError(f"data.tokenizer = {name!r} is not a file; use bytes, bpe:SIZE or a path of a tokenizer.json.")
    return path
