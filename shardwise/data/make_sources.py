"""Opens the sources of a job's `[data]` section: files -> documents -> token file -> windows -> training | validation.

Text is encoded once, into a cache folder whose name is a hash of everything that determines the tokens (format version,
source, files with their sizes, times and sampled content, tokenizer): a changed corpus gets a new folder, an unchanged
one opens at once. When all ranks of a run open the same folder, one of them encodes while the others wait for a file
lock. On a file system without locks all of them encode the same tokens, and files are replaced atomically."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import numpy as np

from shardwise.console import pluralize
from shardwise.data import chat, criteo, images
from shardwise.data.chat_template import CHATML_TOKENS, load_template
from shardwise.data.image_files import ImageFiles, index_folder, index_shards
from shardwise.data.images import IMAGE_SIZE, NUM_CLASSES, ImageAugmentation
from shardwise.data.input_files import BadRecords, DataFile, DataRecord
from shardwise.data.sample_stream import Mixture, Source, Subset, SyntheticTokens, job_stream
from shardwise.data.table_files import STREAM
from shardwise.data.text import describe_source, encode_files, find_files, load_or_train_bpe, source_by_name
from shardwise.data.token_file import RAW_DTYPES, TokenFile, TokenWindows, open_raw_token_file, open_token_file
from shardwise.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, parse_bpe_size, tokenizer_fingerprint
from shardwise.errors import DataError
from shardwise.files import cache_folder, file_lock, import_extra, parse_json, user_path, write_text
from shardwise.job import DataConfig, Job
from shardwise.models.chain import IGNORE_INDEX
from shardwise.models.objectives import next_token
from shardwise.models.preference import plain_targets
from shardwise.object_store import local_copy, parse_url
from shardwise.random import Permutation

CACHE_VERSION = 2  # increment this when the same files would encode to different tokens, which invalidates old caches
Sources = tuple[Source, Source, Tokenizer | None]  # for training and for validation, and the tokenizer, if known
SAMPLE_KINDS = {"criteo": "clicks", "cifar10": "images", "images": "images"}  # others: text, tokens or synthetic


def make_sources(job: Job, cache: Path | None = None, bad_records: BadRecords | None = None,
                 record: DataRecord | None = None, own_tokenizer: Path | None = None) -> Sources:  # fmt: skip
    """Returns the training source, the validation source (may be empty) and the tokenizer, if known. `record`: files
    of the run so far, or an empty one to fill in. `own_tokenizer`: used instead of data.tokenizer."""
    bad_records, record = bad_records or BadRecords(job.data.on_bad_record == "skip"), record or DataRecord()
    if own_tokenizer is not None:
        job = job.model_copy(update={"data": job.data.model_copy(update={"tokenizer": str(own_tokenizer)})})
    job = job.model_copy(update={"data": download_data(job.data)})
    source, wanted, cache = job.data.source, job.model.sample_kind, cache or cache_folder()
    if brought := job.family.sources(job.model):
        return *brought, None
    given = SAMPLE_KINDS.get(source, wanted)
    if given != wanted and wanted == "tokens":
        raise DataError(f"data.source = {source!r} has {given}, but model.name = {job.model.name!r} reads tokens.")
    if job.loss.dpo_beta and source != "chat":
        raise DataError(f"loss.dpo_beta needs pairs of answers, which data.source = {source!r} has not; use chat.")
    if source == "synthetic":  # validation samples come after those for training and follow the same rules
        count = job.data.samples
        num_held_out = _num_held_out(count + 1, job.data.validation_fraction)  # + 1: they are extra samples
        return synthetic_source(job, count), synthetic_source(job, num_held_out, first=count), None
    if wanted == "clicks":
        return *_click_sources(job, bad_records, record), None
    if wanted == "images":
        return *(_image_sources if source == "images" else _cifar_sources)(job, cache, bad_records, record), None
    if source == "chat":
        return _chat_sources(job, cache, bad_records, record)
    if source == "mix":
        return _mixture_sources(job, cache, bad_records, record)
    return _token_sources(job, cache, bad_records, record)


def download_data(data: DataConfig) -> DataConfig:
    """Returns the section with local paths instead of URLs, once what they name has been downloaded."""

    def localize(path: str) -> str:
        suffix = next((f":{kind}" for kind in RAW_DTYPES if path.endswith(f":{kind}")), "")
        return path if path.startswith(STREAM) else local_copy(path.removesuffix(suffix)) + suffix

    def localize_entry(name: str) -> str:
        kind, path = source_by_name(name)
        return name if kind == "stdlib" or not parse_url(path) else f"{kind}:{localize(path)}"

    mix = {localize_entry(name): weight for name, weight in data.mix.items()}
    return data.model_copy(update={"path": localize(data.path), "mix": mix})


def _mixture_sources(job: Job, cache: Path, bad_records: BadRecords, record: DataRecord) -> Sources:
    """Opens every source of a mixture on its own; each holds out its own validation samples."""
    mix = job.data.mix
    if parse_bpe_size(job.data.tokenizer):
        problem = f"data.tokenizer = {job.data.tokenizer!r} would train a tokenizer for each source of the mixture"
        kind, path = next((one for one in map(source_by_name, mix) if one[0] != "tokens"), ("text", "FILE"))
        settings = f"--set data.source={kind} --set 'data.path={path}' --set data.tokenizer={job.data.tokenizer}"
        remedy = f'`shardwise data mine.bin {settings}`, then set data.tokenizer = "mine.tokenizer.json"'
        raise DataError(f"{problem}; train it on one source: {remedy}.")
    sources = []
    for name in mix:
        data = job.data.model_copy(update=dict(zip(("source", "path"), source_by_name(name))) | {"mix": {}})
        sources.append(_token_sources(job.model_copy(update={"data": data}), cache, bad_records, record))
    training, validation, tokenizers = zip(*sources)
    tokenizer = tokenizers[0] if all(tokenizer is not None for tokenizer in tokenizers) else None
    weights = list(mix.values())
    return _mix_nonempty(training, weights), _mix_nonempty(validation, weights), tokenizer


def _mix_nonempty(sources: Sequence[Source], weights: Sequence[float]) -> Source:
    nonempty = [(source, weight) for source, weight in zip(sources, weights, strict=True) if len(source)]
    return Mixture(*zip(*nonempty, strict=True)) if nonempty else sources[0]


def _cifar_sources(job: Job, cache: Path, bad_records: BadRecords, record: DataRecord) -> tuple[Source, Source]:
    model = cast(Any, job.model)
    if job.data.source != "cifar10":
        raise DataError(f"data.source = {job.data.source!r} has no images; use images, cifar10 or synthetic.")
    if model.image_size != IMAGE_SIZE or model.num_classes < NUM_CLASSES:
        raise DataError(f"CIFAR-10 needs model.image_size = {IMAGE_SIZE} and model.num_classes = {NUM_CLASSES}.")
    training, held_out = images.open_cifar10(job.data.path, bad_records, ImageAugmentation(job.data.augment, job.seed))
    record.take([*training.paths, *held_out.paths])
    return training, held_out


def _image_sources(job: Job, cache: Path, bad_records: BadRecords, record: DataRecord) -> tuple[Source, Source]:
    """Returns the images of folders or shards. Those for validation have a folder of their own, or are held out."""
    import_extra("PIL.Image", "images", "data.source = 'images'")
    model, augment, path = cast(Any, job.model), ImageAugmentation(job.data.augment, job.seed), job.data.path

    def find_images(path: str) -> tuple[Sequence[Path], np.ndarray]:
        folder = user_path(path)
        if path and folder.is_dir() and not any(".tar" in file.suffixes for file in folder.iterdir()):
            paths, index = index_folder(record.take([folder])[0].path, model.num_classes)
        else:
            files, new = record.take(find_files("images", path)), BadRecords(bad_records.skip)
            paths, cached = [file.path for file in files], cache / _cache_key(job.data, files, str(model.num_classes))
            encode = partial(index_shards, files, model.num_classes, new, cached / "index.npy")
            index = _open_or_encode(cached, partial(np.load, cached / "index.npy"), encode, bad_records, new)
        return paths, index[Permutation(len(index), "images")(np.arange(len(index)))]  # files are sorted by class

    names = [name for name in ("train", "val", "validation", "test") if user_path(Path(path or "-", name)).is_dir()]
    if len(names) > 1 and names[0] == "train":
        parts = [find_images(f"{path}/{name}") for name in names[:2]]
    else:
        paths, index = find_images(path)
        kept = len(index) - _num_held_out(len(index), job.data.validation_fraction)
        parts = [(paths, index[:kept]), (paths, index[kept:])]
    options = model, bad_records
    return ImageFiles(*parts[0], *options, augment), ImageFiles(*parts[1], *options)


def _token_sources(job: Job, cache: Path, bad_records: BadRecords, record: DataRecord) -> Sources:
    is_encoded = job.data.source == "tokens"
    files, tokenizer = _open_token_files(job, record) if is_encoded else _encode_cached(job, cache, bad_records, record)
    source = TokenWindows(files, job.model.text_window)
    if not len(source):
        longest = max(file.count for file in files)
        subject = "the longest of its files has" if len(files) > 1 else "it has"
        problem = f"{describe_source(job.data)} is too short for one sample: {subject} {pluralize(longest, 'token')}"
        raise DataError(f"{problem}, and a sample needs {job.model.text_window + 1}; use more text.")
    first_held_out = len(source) - _num_held_out(len(source), job.data.validation_fraction)
    return Subset(source, 0, first_held_out), Subset(source, first_held_out, len(source)), tokenizer


def synthetic_source(job: Job, count: int, first: int = 0) -> Source:
    """Returns samples that need no files, for any model; those after the first ones are for validation."""
    model: Any = job.model
    if brought := job.family.sources(model):
        return cast(Source, brought[0])
    if model.sample_kind == "clicks":
        return criteo.SyntheticClicks(model, first, count, job.seed)
    if model.sample_kind == "images":
        augmentation = None if first else ImageAugmentation(job.data.augment, job.seed)
        return images.SyntheticImages(count, model.image_size, model.num_classes, job.seed, augmentation, first)
    tokens = SyntheticTokens(first + count, model.text_window, model.vocab_size - model.reserved_ids, job.seed)
    return Subset(tokens, first, first + count) if first else tokens


def _click_sources(job: Job, bad_records: BadRecords, record: DataRecord) -> tuple[Source, Source]:
    """Returns clicks of a Criteo file; the last ones are held out."""
    model = cast(Any, job.model)
    if job.data.source != "criteo":
        raise DataError(f"data.source = {job.data.source!r} is not a click log; use 'synthetic' or 'criteo'.")
    sparse, dense = criteo.NUM_SPARSE_FEATURES, criteo.NUM_DENSE_FEATURES
    if (model.tables, model.dense_features) != (sparse, dense):
        raise DataError(f"Criteo rows need model.tables = {sparse} and model.dense_features = {dense}.")
    if not job.data.path:
        raise DataError("data.source = 'criteo' reads a Criteo file; set data.path to it.")
    path = Path(job.data.path)
    offsets, lines = criteo.index_criteo_file(record.take([path])[0])
    criteo.require_good_row(path, model)
    first_held_out = lines - _num_held_out(lines, job.data.validation_fraction)
    clicks = partial(criteo.CriteoClicks, model, path, offsets, bad=bad_records)
    return clicks(0, first_held_out), clicks(first_held_out, lines - first_held_out)


def _num_held_out(count: int, fraction: float) -> int:
    """Returns how many of `count` samples to hold out: at least one if `fraction` is positive, and never all."""
    return min(count - 1, max(1, round(count * fraction))) if fraction > 0 else 0


def _open_token_files(job: Job, record: DataRecord) -> tuple[list[TokenFile], Tokenizer | None]:
    dtype = next((kind for kind in RAW_DTYPES if job.data.path.endswith(f":{kind}")), "")  # of headerless files
    found = record.take(find_files("tokens", job.data.path.removesuffix(f":{dtype}")))
    vocab = job.model.vocab_size - job.model.reserved_ids
    files = [open_raw_token_file(f.path, dtype, vocab, f.size) if dtype else open_token_file(f.path) for f in found]
    for file in files:
        _check_vocab(f"the token file {file.path}", file.vocab, job)
    return files, _tokenizer_for_token_files(0 if dtype else max(file.vocab for file in files), job)


def _tokenizer_for_token_files(vocab: int, job: Job) -> Tokenizer | None:
    """Returns the tokenizer of token files with `vocab` ids (0: unknown); None if `bytes` has a different number."""
    if parse_bpe_size(job.data.tokenizer):
        raise DataError("data.source = 'tokens' has no text to train on; set data.tokenizer to what encoded it.")
    if job.data.tokenizer == "bytes":
        return ByteTokenizer() if vocab == ByteTokenizer.vocab else None
    tokenizer = load_tokenizer(job.data.tokenizer)
    if tokenizer.vocab < vocab:
        raise DataError(f"{job.data.path} has {vocab} ids, its tokenizer {tokenizer.vocab}; use what encoded it.")
    return tokenizer


def _encode_cached(job: Job, cache: Path, bad: BadRecords, record: DataRecord) -> tuple[list[TokenFile], Tokenizer]:
    """Opens the source's token file in the cache; encodes it first if it is missing."""
    files = record.take(find_files(job.data.source, job.data.path))
    # Checks the size before the tokenizer is trained, which may take an hour.
    _check_vocab("the tokenizer", parse_bpe_size(job.data.tokenizer) or 0, job)
    data, new = job.data, BadRecords(bad.skip)
    if parse_bpe_size(data.tokenizer):  # tokens are cached by the content of their tokenizer
        folder = cache / _cache_key(data, files)
        with file_lock(folder):
            load_or_train_bpe(data, files, folder / "tokenizer.json", new)
        data = data.model_copy(update={"tokenizer": str(folder / "tokenizer.json")})
    folder, tokenizer = cache / _cache_key(data, files), load_tokenizer(data.tokenizer)
    _check_vocab("the tokenizer", tokenizer.vocab, job)
    open_files = partial(open_token_file, folder / "tokens.bin")
    encode = partial(encode_files, data, files, tokenizer, folder / "tokens.bin", new)
    return [_open_or_encode(folder, open_files, encode, bad, new)], tokenizer


def _open_or_encode(folder: Path, open_files: Callable[[], Any], encode: Callable[[], Any], bad_records: BadRecords,
                    new: BadRecords) -> Any:  # fmt: skip
    """Opens what the cache has in `folder`; encodes it first if it is missing or damaged. `encode` fills `new`."""
    with file_lock(folder):
        try:
            notes, opened = parse_json((folder / "notes.json").read_bytes()), open_files()
        except (OSError, ValueError, DataError):
            encode()
            notes = {"bad": list(new.messages), "skipped": list(new.skipped_files)}
            write_text(folder / "notes.json", json.dumps(notes))
            opened = open_files()
    for message in notes["bad"]:
        bad_records.report(DataError(message))
    bad_records.skipped_files |= dict.fromkeys(notes["skipped"])
    return opened


def _chat_sources(job: Job, cache: Path, bad_records: BadRecords, record: DataRecord) -> Sources:
    data, length, beta, pairs = job.data, job.model.text_window, job.loss.dpo_beta, job.loss.dpo_beta > 0
    if job.family.objective(job.model, job.seed) is not next_token:
        raise DataError(f"data.source = 'chat' is for models that predict the next token, not {job.model.description}.")
    if parse_bpe_size(data.tokenizer):
        raise DataError(f"data.tokenizer = {data.tokenizer!r} is not trained on chats; name a tokenizer.json.")
    files, tokenizer = record.take(find_files("chat", data.path)), load_tokenizer(data.tokenizer)
    _check_vocab("the tokenizer", tokenizer.vocab, job)
    has_chatml_tokens = len(tokenizer.encode_chat(["".join(CHATML_TOKENS)])[0][0]) == len(CHATML_TOKENS)
    template = load_template(data.chat_template, data.tokenizer, has_chatml_tokens or data.tokenizer == "bytes")
    if data.chat_template:
        record.take([user_path(data.chat_template)])
    train_on = "pairs" if pairs else data.train_on
    folder = cache / _cache_key(data, files, train_on, data.on_bad_record, template.as_tokenizer_config())
    new, open_files = BadRecords(bad_records.skip), partial(chat.open_chats, folder, length, data.truncate, pairs)
    encode = partial(chat.encode_chats, data, files, tokenizer, template, folder, new, pairs)
    tokens, extents, summary = _open_or_encode(folder, open_files, encode, bad_records, new)
    together = 1 + pairs
    first_held_out = len(extents) - together * _num_held_out(len(extents) // together, data.validation_fraction)
    rows = partial(chat.ChatRows, tokens, length=length, pad_id=tokenizer.eos_id, packed=data.pack, dpo_beta=beta)
    training, held_out = rows(extents[:first_held_out]), rows(extents[first_held_out:])
    training.tokenizer_config = template.as_tokenizer_config()
    training.summary = f"{summary}; {pluralize(len(training), 'sample')} for training, {training.filled:.0%} full."
    return training, held_out, tokenizer


def _cache_key(data: DataConfig, files: Sequence[DataFile], *chat_settings: str) -> str:
    skips = data.on_bad_record == "skip"
    field = "" if data.source in ("stdlib", "text", "chat") else data.text_field + ":skip" * skips
    stream = (data.path, str(data.samples)) if data.path.startswith(STREAM) else ()
    settings = (CACHE_VERSION, data.source, field, tokenizer_fingerprint(data.tokenizer), *chat_settings, *stream)
    listing = [(str(file.path.absolute()), file.size, file.mtime_ns, file.digest) for file in files]
    return f"{data.source}-{blake2b(repr((settings, listing)).encode(), digest_size=8).hexdigest()}"


def _check_vocab(owner: str, vocab: int, job: Job) -> None:
    model = job.model
    if vocab + model.reserved_ids > model.vocab_size:
        reserved = f", and {model.description} reserves {model.reserved_ids} more" if model.reserved_ids else ""
        remedy = f"set model.vocab = {vocab + model.reserved_ids}"
        raise DataError(f"{owner} has {vocab} ids{reserved}, but model.vocab is {model.vocab_size}; {remedy}.")


def preview_job(job: Job, count: int, in_colour: bool) -> Iterator[str]:
    """Yields lines about the first samples of a run, as the model gets them (`shardwise data preview`). What counts
    towards the loss is green, the rest dim; or it is in brackets."""
    source, _, tokenizer = make_sources(job)
    if tokenizer is None:
        raise DataError(f"data.source = {job.data.source!r} has no tokenizer, so its samples cannot be shown as text.")
    yield getattr(source, "summary", f"{len(source)} samples for training.")
    counted, other = ("\033[32m{}\033[0m", "\033[2m{}\033[0m") if in_colour else ("[[{}]]", "{}")
    samples = job_stream(job, source).read(np.arange(count))
    for number, (tokens, targets) in enumerate(zip(samples.tokens.numpy(), samples.targets.numpy(), strict=True)):
        counts, targets = targets != IGNORE_INDEX, plain_targets(targets)
        yield f"--- sample {number}: {int(counts.sum())} of {len(tokens)} tokens count"
        borders = sorted({0, *np.flatnonzero(tokens < 0).tolist(), len(tokens)})  # of packed conversations
        for start, stop in zip(borders, borders[1:]):
            ids = np.append(np.maximum(tokens, ~tokens)[start:stop], targets[stop - 1 : stop][counts[stop - 1 : stop]])
            marks = np.append(False, counts[start:stop])[: len(ids)]
            ids = ids[: len(np.trim_zeros(ids != tokenizer.eos_id, "b"))]  # without padding
            cuts = [0, *(np.flatnonzero(np.diff(marks[: len(ids)])) + 1).tolist(), len(ids)]
            parts = [(marks[a], tokenizer.decode(ids[a:b], keep_special=True)) for a, b in zip(cuts, cuts[1:])]
            if len(ids):
                yield "".join((counted if is_counted else other).format(text) for is_counted, text in parts)
