"""A trained language model that scores and continues text, with the methods of lm-eval's `LM`.

    loglikelihood          (context, continuation) -> its log probability, and whether it is the most likely one
    loglikelihood_rolling  (text,) -> the log probability of all of it, in windows of the model's length
    generate_until         (context, {"until": [...], "max_gen_toks": 64, ...}) -> the text that follows

The model is a run in any layout, or a Hugging Face folder; a layout of several processes is for our own decoders."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.collectives import all_reduce
from shardwise.data.sample_stream import Samples, rank_positions
from shardwise.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from shardwise.errors import DataError, JobError
from shardwise.job import BatchConfig, GradientConfig, Job, LocalSGDConfig, load_job
from shardwise.launch.worker import init_distributed
from shardwise.layout import Layout
from shardwise.models.loss import VocabShard
from shardwise.models.pretrained_config import FORMATS, read_config_file
from shardwise.parallel.precision import Precision
from shardwise.parallel.prepare import prepare
from shardwise.run_job import check_job_file
from shardwise.train.checkpoint_folder import CheckpointGroup
from shardwise.train.export import open_checkpoint
from shardwise.train.generate import LocalDecoder, Sampling, generate_texts, load_run_tokenizer
from shardwise.train.local_machine import pick_device, require_memory
from shardwise.train.loop import make_engine
from shardwise.train.run_folder import RunFolder
from shardwise.train.warm_start import load_into

MAX_LENGTH = 4096  # tokens at once of a folder whose model can take more
MODEL_KEYS = "model.sequence", "model.eod_token_id"  # those that weights do not fix
Encoded = tuple[list[int], list[int]]  # the tokens of a context and of its continuation


def load_eval_job(path: Path, overrides: Sequence[str] = ()) -> Job:
    """Returns the job of a run, or one for the model of a folder."""
    for key in (override.partition("=")[0].strip() for override in overrides):
        if key.partition(".")[0] == "model" and key not in MODEL_KEYS:
            raise JobError(f"--set {key}: a trained model keeps its keys; eval sets only {' and '.join(MODEL_KEYS)}.")
    if (path / "job.toml").is_file():
        check_job_file(path)
        return load_job(path / "job.toml", overrides)
    if not (path / "config.json").is_file():
        raise JobError(f"{path} is neither a run nor a folder with a config.json.")
    found = read_config_file(path)
    model: dict[str, Any] = {"weights": str(path)} if found.get("model_type") in FORMATS else {"name": f"hf:{path}"}
    length = found.get("max_position_embeddings")
    if isinstance(length, int) and length > 0:
        model |= {"sequence": min(length, MAX_LENGTH)}
    return load_job(None, [*(f"model.{key}={value}" for key, value in model.items()), *overrides])


def _in_batches(job: Job, layout: Layout, rows: int) -> Job:
    """Returns the job with a batch of about this many rows that the layout can run, and nothing for training."""
    unit = layout.data * max(1, layout.micro_batch)
    samples = unit * (2 * layout.stage_count if layout.pipeline > 1 else max(1, rows // unit))
    changes = {"batch": BatchConfig(samples=samples), "local_sgd": LocalSGDConfig(), "gradient": GradientConfig()}
    return job.model_copy(update=changes | {"compile": False})


def target_scores(logits: Tensor, targets: Tensor, shard: VocabShard | None = None) -> Tensor:
    """Returns the log probability of each target, and whether it is the most likely token, as (2, ...) in float64."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    top, local = logits.amax(-1), targets - (shard.start if shard else 0)
    if shard:
        shard.all_reduce_max(top)
    is_here = (local >= 0) & (local < logits.shape[-1])
    chosen = logits.gather(-1, local.clamp(0, logits.shape[-1] - 1)[..., None])[..., 0].masked_fill(~is_here, 0.0)
    sums = torch.stack(((logits - top[..., None]).exp().sum(-1), chosen))
    if shard:
        shard.all_reduce_sum(sums)
    return torch.stack((sums[1] - top - sums[0].log(), (sums[1] >= top).to(top.dtype))).double()


class ShardedDecoder:
    """A decoder of ours in a layout. All ranks call it with the same rows and get the same numbers."""

    def __init__(self, job: Job, layout: Layout, checkpoint: Path | None, device: torch.device):
        self.job, self.length, self.device = job, job.model.length, device
        self.engine = make_engine(prepare(job, layout), device)
        if checkpoint is not None:
            load_into(checkpoint, self.engine, self.engine.make_optimizer(job), CheckpointGroup.create())
        torch.nn.ModuleList(self.engine.chains).eval()

    def open_cache(self, tokens: int) -> None:
        return None

    def _parts(self, tokens: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, VocabShard | None]]:
        """Yields, where this rank has the head: logits of its rows, these, their positions, its part of the vocab."""
        engine, data, size = self.engine, self.engine.mesh["data"], self.job.samples
        positions = torch.arange(self.length) if engine.positions is None else engine.positions.cpu()
        padded = torch.nn.functional.pad(tokens, (0, self.length - tokens.shape[1], 0, -len(tokens) % size))
        for first in range(0, len(padded), size):
            rows = first + torch.from_numpy(rank_positions(0, size, data.size, data.index))
            samples = Samples(padded[rows], padded[rows], torch.zeros(len(rows), dtype=torch.int64))
            parts = engine.prepare_samples(samples.to(self.device)).split(engine.batch.micro_batch)
            for part, part_rows in zip(parts, rows.split(engine.batch.micro_batch)):
                if (logits := engine.logits(part)) is not None:
                    project: Any = engine.chains[-1].get_submodule("head.project")
                    keep = part_rows < len(tokens)
                    yield logits[keep.to(logits.device)], part_rows[keep], positions, project.vocab_shard

    def _share(self, result: Tensor) -> Tensor:
        """Returns the sum over all ranks, which fill in different places."""
        result = result.to(self.device)
        all_reduce(result, axis=self.engine.mesh.all_ranks)
        return result.cpu()

    def scores(self, tokens: Tensor, targets: Tensor) -> Tensor:
        result = torch.zeros(2, len(tokens), self.length, dtype=torch.float64)
        wanted = torch.nn.functional.pad(targets, (0, self.length - targets.shape[1]))
        for logits, rows, positions, shard in self._parts(tokens):
            found = target_scores(logits, wanted[rows][:, positions].to(logits.device), shard).cpu()
            if self.engine.mesh["tensor"].index == 0:
                result[:, rows[:, None], positions] = found
        return self._share(result)[:, :, : tokens.shape[1]]

    def last_logits(self, tokens: Tensor) -> Tensor:
        result = torch.zeros(len(tokens), self.job.model.vocab_size, dtype=torch.float64)
        for logits, rows, positions, shard in self._parts(tokens.cpu()):
            place, start = (positions == tokens.shape[1] - 1).nonzero().flatten(), shard.start if shard else 0
            if len(place) and (shard is not None or self.engine.mesh["tensor"].index == 0):
                result[rows, start : start + logits.shape[-1]] = logits[:, place[0]].double().cpu()
        return self._share(result)


class LanguageModel:
    """A run or a folder, with the three methods of lm-eval's interface."""

    def __init__(self, path: str | Path, layout: str = "", step: int | str = "", batch_size: int | str = 8,
                 overrides: Sequence[str] = (), **ignored: Any):  # fmt: skip
        super().__init__()  # of lm-eval's LM, if this is one
        path, self.batch = Path(path), int(batch_size) if str(batch_size).isdecimal() else 8
        job, is_run = load_eval_job(path, overrides), (path / "job.toml").is_file()
        if not (job.model.is_causal_lm or (job.model.passes_batch and job.model.targets_are_text)):
            raise JobError(f"{path}: {job.model.description} does not predict text from left to right; use a decoder.")
        parsed, precision = Layout.parse(layout or "micro_batch=1"), Precision(job.precision)
        dtype = precision.compute_dtype if pick_device(job) == "cuda" else precision.master_dtype
        if is_run:
            folder = RunFolder.open(path)
            self.tokenizer: Tokenizer = load_run_tokenizer(folder, job)
        else:
            has_bytes = not (path / "tokenizer.json").is_file() and job.model.vocab_size == ByteTokenizer.vocab
            self.tokenizer = ByteTokenizer() if has_bytes else load_tokenizer(str(path))
        if self.tokenizer.vocab > job.model.vocab_size:
            raise DataError(f"{path}: the tokenizer has {self.tokenizer.vocab} ids, more than the model's vocabulary.")
        checkpoint = open_checkpoint(folder, str(step), dtype) if is_run else None
        if parsed.world > 1:
            batched, saved = _in_batches(job, parsed, self.batch), checkpoint.checkpoint if checkpoint else None
            self.decoder: Any = ShardedDecoder(batched, parsed, saved, init_distributed(parsed.world, job))
        else:
            require_memory(job, 8)
            model = checkpoint.load(dtype) if checkpoint else job.family.build_reference(job.model, job.seed, dtype)
            self.decoder = LocalDecoder(model.to(pick_device(job)), job.model)
        self.job, self.length, self.step = job, job.model.sequence_length, checkpoint.step if checkpoint else None

    def encode_pair(self, context: str, continuation: str) -> Encoded:
        """Returns the tokens of both. Spaces at the end of the context belong to the continuation."""
        split = len(context.rstrip())
        whole = self._encode(context + continuation)
        if not context:
            end = self.tokenizer.eos_id
            return (whole[:1], whole[1:]) if whole[:1] == [end] else ([end], whole)
        cut = len(self._encode(context[:split]))
        return (whole[:cut], whole[cut:]) if cut else ([self.tokenizer.eos_id], whole)

    def _encode(self, text: str) -> list[int]:
        return [int(token) for token in self.tokenizer.encode(text)]

    @torch.no_grad()
    def score_tokens(self, requests: Sequence[Encoded]) -> list[tuple[float, bool]]:
        """Returns the log probability of each continuation, and whether all of its tokens are the most likely ones."""
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        rows = [(context + continuation)[-self.length - 1 :] for context, continuation in requests]
        order = sorted(range(len(requests)), key=lambda number: -len(rows[number]))
        for first in range(0, len(order), self.batch):
            group = order[first : first + self.batch]
            width = max(1, len(rows[group[0]]) - 1)
            tokens = torch.zeros(2, len(group), width, dtype=torch.int64)  # causal: padding at the end changes nothing
            for place, number in enumerate(group):
                row = torch.tensor(rows[number], dtype=torch.int64)
                tokens[:, place, : max(0, len(row) - 1)] = torch.stack((row[:-1], row[1:]))
            found = self._scores(*tokens)
            for place, number in enumerate(group):
                last = len(rows[number]) - 1
                start = max(0, last - len(requests[number][1]))
                values, is_top = found[:, place, start:last]
                results[number] = float(values.sum()), bool(is_top.all())
        return results

    def _scores(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if isinstance(self.decoder, ShardedDecoder):
            return self.decoder.scores(tokens, targets)
        device = self.decoder.device
        return target_scores(self.decoder.logits(tokens.to(device)), targets.to(device)).cpu()

    def rolling_requests(self, text: str) -> list[Encoded]:
        """Returns the windows of a text: every token is predicted once, from as many before it as fit."""
        tokens, size = self._encode(text), self.length
        spans = [(start, min(start + size, len(tokens))) for start in range(0, len(tokens), size)]
        contexts = [tokens[end - size - 1 : start] if start else [self.tokenizer.eos_id] for start, end in spans]
        return [(context, tokens[start:end]) for context, (start, end) in zip(contexts, spans)]

    # lm-eval's interface; a request is an object with `args`.

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self.score_tokens([self.encode_pair(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        windows = [self.rolling_requests(request.args[0]) for request in requests]
        scores = iter(self.score_tokens([window for group in windows for window in group]))
        return [sum(next(scores)[0] for _ in group) for group in windows]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        texts = [""] * len(requests)
        asked = [repr(sorted(request.args[1].items())) for request in requests]
        for options in dict.fromkeys(asked):
            group = [number for number, one in enumerate(asked) if one == options]
            sampling = self._sampling(requests[group[0]].args[1])
            room = max(1, self.length - sampling.tokens)
            for first in range(0, len(group), self.batch):
                batch = group[first : first + self.batch]
                prompts = [(self._encode(requests[n].args[0]) or [self.tokenizer.eos_id])[-room:] for n in batch]
                for number, text in zip(batch, generate_texts(self.decoder, self.tokenizer, prompts, sampling)):
                    texts[number] = text
        return texts

    def _sampling(self, options: dict[str, Any]) -> Sampling:
        stop = options.get("until") or ()
        tokens = options.get("max_gen_toks", options.get("max_new_tokens", min(256, self.length // 2)))
        temperature = float(options.get("temperature") or 0.0) if options.get("do_sample", True) else 0.0
        return Sampling(int(tokens), temperature, int(options.get("top_k", 0)), float(options.get("top_p", 1.0)),
                        (stop,) if isinstance(stop, str) else tuple(stop), self.tokenizer.eos_id,
                        int(options.get("seed", 0)))  # fmt: skip
