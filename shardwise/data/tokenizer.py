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

from shardwise.data.tokens import writing
from shardwise.errors import DataError

END = "<|end|>"
_ENDS = (END, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Tokens that mark the end of a document in tokenizers of this house and others; the first that is there counts."""


class Tokenizer(Protocol):
    vocab: int
    separator: int

    def encode(self, text: str) -> np.ndarray:
        """The ids of one text, without a separator."""
        ...

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of several texts at once, which may use more than one core."""
        ...

    def decode(self, ids: ArrayLike) -> str:
        """The text of some ids; separators, and what is not an id at all, show as nothing."""
        ...

    def bytes_of(self, ids: ArrayLike) -> int:
        """How many bytes of UTF-8 the ids stand for; a separator and an ignored target (-100) stand for none."""
        ...


class Bytes:
    vocab = 256
    separator = 0

    def encode(self, text: str) -> np.ndarray:
        ids = np.frombuffer(text.encode(), np.uint8)
        return ids[ids != self.separator]

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: ArrayLike) -> str:
        flat = np.asarray(ids).reshape(-1)
        return flat[(flat > 0) & (flat < self.vocab)].astype(np.uint8).tobytes().decode(errors="replace")

    def bytes_of(self, ids: ArrayLike) -> int:
        flat = np.asarray(ids)
        return int(np.count_nonzero((flat > 0) & (flat < self.vocab)))


class Subwords:
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, inner: Any, name: str):
        inner.encode_special_tokens = True
        inner.no_padding()  # saved tokenizers may carry settings for batches of another use
        inner.no_truncation()
        found = [inner.token_to_id(end) for end in _ENDS if inner.token_to_id(end) is not None]
        if not found:
            raise DataError(
                f"the tokenizer {name} has no token for the end of a document; give it one of {', '.join(_ENDS)} as a "
                f"special token."
            )
        self._inner, self.separator = inner, int(found[0])
        self.vocab = 1 + max(inner.get_vocab(with_added_tokens=True).values())
        self._widths = self._widths_in_bytes()

    def encode(self, text: str) -> np.ndarray:
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(one.ids, np.uint32) for one in self._inner.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: ArrayLike) -> str:
        return str(self._inner.decode(self._known(ids).tolist(), skip_special_tokens=True))

    def bytes_of(self, ids: ArrayLike) -> int:
        if self._widths is None:
            return len(self.decode(ids).encode())
        return int(self._widths[self._known(ids)].sum())

    def save(self, path: Path) -> None:
        with writing(path) as file:
            file.write(self._inner.to_str(pretty=True).encode())

    def _known(self, ids: ArrayLike) -> np.ndarray:
        flat = np.asarray(ids, np.int64).reshape(-1)
        return flat[(flat >= 0) & (flat < self.vocab)]

    def _widths_in_bytes(self) -> np.ndarray | None:
        """Bytes by id where tokens are spelled in bytes, one character each; None: only decoding can tell.

        Decoding cannot tell for ids that start or end amid a character, which windows of a corpus do.
        """
        if '"ByteLevel"' not in json.dumps(json.loads(self._inner.to_str())["decoder"]):
            return None
        widths = np.zeros(self.vocab, np.int64)
        for token, number in self._inner.get_vocab(with_added_tokens=True).items():
            widths[number] = len(token)
        for number, added in self._inner.get_added_tokens_decoder().items():
            widths[number] = 0 if added.special else len(added.content.encode())
        return widths


def bpe_size(name: str) -> int | None:
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
        return Bytes()
    library = _library()
    path = _saved(name)
    try:
        return Subwords(library.Tokenizer.from_str(path.read_text(encoding="utf-8")), str(path))
    except DataError:
        raise
    except Exception as error:  # the library raises bare Exceptions for files it does not like
        raise DataError(
            f"the tokenizer {path} cannot be read: {error}. Give a tokenizer.json of `tokenizers`."
        ) from error


def train_bpe(texts: Iterable[str], size: int) -> Subwords:
    """Byte-level pairs of `size` ids (fewer if the text has no more pairs); the same texts give the same tokenizer."""
    library = _library()
    inner = library.Tokenizer(library.models.BPE())
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),  # so that any text can be encoded
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return Subwords(inner, f"bpe:{size}")


def fingerprint(name: str) -> str:
    """What tells whether text would be encoded the same way: the name, or the content of a saved tokenizer."""
    if name == "bytes" or bpe_size(name) is not None:
        return name
    try:
        return hashlib.blake2b(_saved(name).read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise DataError(f"the tokenizer {name} cannot be read: {error.strerror}.") from error


def _saved(name: str) -> Path:
    path = Path(name).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise DataError(
            f"data.tokenizer = {name!r} is not a file; write 'bytes', 'bpe:SIZE' or the path of a tokenizer.json."
        )
    return path


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise DataError(
            "tokenizers other than 'bytes' need the tokenizers package, which is not installed; "
            "`pip install shardwise[bpe]`, or set data.tokenizer = 'bytes'."
        ) from None
    return tokenizers
