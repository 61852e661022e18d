"""Evaluation and generation: scores in any layout equal those of one process, and lm-eval's own numbers."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.cli import app
from shardwise.comm.world import run_world
from shardwise.data.tokenizer import ByteTokenizer
from shardwise.errors import JobError, UserError
from shardwise.eval.language_model import LanguageModel
from shardwise.eval.lm_eval_model import lm_eval_model
from shardwise.eval.tasks import Request, evaluate
from shardwise.job import make_job
from shardwise.layout import Layout
from shardwise.models.chain import init_weights
from shardwise.models.gpt import KeyValueCache
from shardwise.parallel.prepare import prepare
from shardwise.train.export import export_run
from shardwise.train.generate import LocalDecoder, Sampling, generate_texts
from shardwise.train.loop import TrainingLoop
from shardwise.train.run_folder import RunFolder

TINY = {"layers": 2, "width": 32, "heads": 4, "vocab": 256, "sequence": 24}


def tiny_decoder(**model: Any) -> LocalDecoder:
    job = make_job({"model": {"name": "gpt", **TINY, **model}})
    with torch.device("cpu"):
        chain = job.family.build(job.model, 0).double()
    init_weights(chain, 0)
    with torch.no_grad():
        for weight in chain.parameters():
            weight.mul_(3.0)
    return LocalDecoder(chain, job.model)


@pytest.mark.parametrize("model", [{}, {"positions": "learned", "norm": "layer"}, {"kv_heads": 2, "qk_norm": True}])
def test_key_value_cache_gives_the_same_logits(model: dict[str, Any]) -> None:
    decoder, tokens = tiny_decoder(**model), torch.arange(20).reshape(2, 10) * 7
    with torch.no_grad():
        expected = decoder.logits(tokens)
        cache = KeyValueCache(decoder.model, decoder.config)
        found = [cache(tokens[:, :4]), *(cache(tokens[:, n : n + 1]) for n in range(4, 10))]
        cache.close()
        assert torch.equal(decoder.logits(tokens), expected)
    torch.testing.assert_close(torch.stack(found, 1), expected[:, 3:], rtol=0, atol=1e-12)


def test_generation_is_independent_of_batching_and_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, tokenizer = tiny_decoder(), ByteTokenizer()
    prompts = [list(b"one"), list(b"two"), list(b"longer one")]
    sampling = Sampling(12, temperature=0.9, top_k=20, top_p=0.9)
    together = generate_texts(decoder, tokenizer, prompts, sampling)
    assert together[0] == generate_texts(decoder, tokenizer, prompts[:1], sampling)[0]
    monkeypatch.setattr(LocalDecoder, "open_cache", lambda self, tokens: None)
    assert generate_texts(decoder, tokenizer, prompts, sampling) == together


def test_sampling_keeps_top_k_and_top_p() -> None:
    logits, generator = torch.tensor([0.0, 3.0, 2.0, 1.0]), torch.Generator().manual_seed(0)
    assert {Sampling(1, 1.0, top_k=2).choose(logits, generator) for _ in range(200)} == {1, 2}
    assert {Sampling(1, 1.0, top_p=0.6).choose(logits, generator) for _ in range(200)} == {1}
    assert Sampling(1).choose(logits, generator) == 1
    with pytest.raises(JobError, match="top-p above 0"):
        Sampling(1, top_p=0.0)


def test_text_ends_at_stop_strings_and_at_the_end_token() -> None:
    class Scripted:
        length, device = 100, torch.device("cpu")

        def open_cache(self, tokens: int) -> None:
            return None

        def last_logits(self, rows: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.one_hot(torch.tensor([b"abc\ndef\0ghi"[rows.shape[1] - 1]]), 256)

    def text(**options: Any) -> str:
        return generate_texts(Scripted(), ByteTokenizer(), [[0]], Sampling(11, **options))[0]

    assert text() == "abc\ndefghi"
    assert text(stop=("\n", "c")) == "ab"
    assert text(end_token=0) == "abc\ndef"


def train_run(folder: Path, model: dict[str, Any] | None = None, **changes: Any) -> RunFolder:
    """Trains a tiny decoder on text, in this process."""
    values: dict[str, Any] = {
        "steps": 2, "precision": "float64", "model": {"name": "gpt", **TINY, **(model or {})}, "batch": {"samples": 4},
        "data": {"source": "text", "path": str(folder.parent / "corpus.txt")}, "checkpoint": {"snapshot_every": 0},
        "run": {"folder": str(folder), "device": "cpu"}, "optimizer": {"lr": 0.05}, "validation": {"samples": 4},
    }  # fmt: skip
    (folder.parent / "corpus.txt").write_text("The capital of France is Paris, that of Peru is Lima.\n" * 60)
    run = RunFolder.create(make_job(values | changes))
    TrainingLoop(prepare(run.job(), Layout()), run, torch.device("cpu")).run()
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return train_run(tmp_path_factory.mktemp("eval") / "run")


CHOICES = [{"country": "France", "choices": ["Paris", "a long wrong answer"], "answer": 0},
           {"country": "Peru", "choices": ["Oslo", "Lima", "Rome"], "answer": 1},
           {"country": "Chad ", "choices": ["x", "y"], "answer": "y"}]  # fmt: skip
TASKS = """
- task: capitals
  dataset_path: json
  dataset_kwargs: {data_files: {test: capitals.jsonl}}
  test_split: test
  output_type: multiple_choice
  doc_to_text: "The capital of {{country}} is"
  doc_to_choice: "{{choices}}"
  doc_to_target: answer
  metric_list: [{metric: acc}, {metric: acc_norm}, {metric: "python:eval_metrics:chosen"}]
- task: continue
  data: capitals.jsonl
  output_type: generate_until
  doc_to_text: "The capital of {{country}} is"
  doc_to_target: "{{choices[0]}}"
  generation_kwargs: {until: ["\\n", "is"], max_gen_toks: 5}
  metric_list: [{metric: exact_match, ignore_case: true}, {metric: "python:eval_metrics:length"}]
- task: words
  data: capitals.jsonl
  output_type: loglikelihood
  doc_to_text: "The capital of {{country}} is"
  doc_to_target: country
- task: pages
  data: capitals.jsonl
  output_type: loglikelihood_rolling
  doc_to_target: "All of {{country}} and more than one window of text."
"""


def write_tasks(folder: Path) -> Path:
    (folder / "capitals.jsonl").write_text("".join(json.dumps(record) + "\n" for record in CHOICES))
    (folder / "tasks.yaml").write_text(TASKS)
    (folder / "eval_metrics.py").write_text(
        "def chosen(record, prediction): return prediction\ndef length(record, prediction): return len(prediction)\n"
    )
    (folder / "held.jsonl").write_text('{"text": "The capital of Peru is Lima, of Chad N\'Djamena."}\n{"text": "x"}\n')
    return folder / "tasks.yaml"


def plain_score(model: LanguageModel, context: list[int], continuation: list[int]) -> float:
    """The log probability of a continuation, token by token."""
    total = 0.0
    for number, token in enumerate(continuation):
        row = torch.tensor([(context + continuation[:number])[-TINY["sequence"] :]])
        with torch.no_grad():
            total += float(model.decoder.logits(row)[0, -1].log_softmax(-1)[token])
    return total


def test_perplexity_is_that_of_a_plain_loop(run: RunFolder, tmp_path: Path) -> None:
    model, text = LanguageModel(run.path), "The capital of Peru is Lima, not Quito.\n"
    ids = list(text.encode())
    windows = [([0], ids[:24]), (ids[len(ids) - 25 : 24], ids[24:])]
    expected = sum(plain_score(model, *window) for window in windows)
    assert model.loglikelihood_rolling([Request((text,))])[0] == pytest.approx(expected, rel=1e-12)
    (tmp_path / "held.txt").write_text(text)
    found = evaluate(run.path, [str(tmp_path / "held.txt")], [])[str(tmp_path / "held.txt")]
    assert found["perplexity"] == pytest.approx(math.exp(-expected / len(ids)), rel=1e-12)
    assert found["bits_per_byte"] == pytest.approx(-expected / len(ids) / math.log(2), rel=1e-12)
    pair = model.loglikelihood([Request(("capital of Peru is ", "Lima")), Request(("", "Lima"))])
    assert pair[0][0] == pytest.approx(plain_score(model, list(b"capital of Peru is"), list(b" Lima")), rel=1e-12)
    assert pair[1][0] == pytest.approx(plain_score(model, [0], list(b"Lima")), rel=1e-12)


def test_tasks(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = evaluate(run.path, [], [write_tasks(tmp_path)])
    model = LanguageModel(run.path)
    contexts = [list(f"The capital of {record['country']} is".encode()) for record in CHOICES[:2]]
    scores = [[plain_score(model, context, list(f" {choice}".encode())) for choice in record["choices"]]
              for context, record in zip(contexts, CHOICES)]  # fmt: skip
    best = [int(np.argmax(row)) for row in scores]
    assert found["capitals"]["samples"] == 3
    assert found["capitals"]["python:eval_metrics:chosen"] >= sum(best) / 3
    assert {"acc", "acc_norm", "acc_stderr"} <= found["capitals"].keys()
    assert 0 <= found["continue"]["python:eval_metrics:length"] <= 5
    assert found["words"]["perplexity"] > 1
    assert found["pages"]["tokens"] == sum(
        len(f"All of {r['country']} and more than one window of text.") for r in CHOICES
    )


@pytest.fixture(scope="module")
def numbers_of_one_process(run: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """Of a world that is forked, since the module for one's own metrics is imported from a folder that differs."""
    folder = tmp_path_factory.mktemp("one_process")
    tasks = [write_tasks(folder)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return run_world(evaluate, 1, run.path, ["held.jsonl"], tasks)[0]


@pytest.mark.parametrize("layout", ["tensor=2", "pipeline=2 context=2", "shard=2 zero=3"])
def test_layouts_give_the_same_numbers(
    run: RunFolder,
    numbers_of_one_process: dict[str, dict[str, float]],
    layout: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    tasks, expected = [write_tasks(tmp_path)], numbers_of_one_process
    prepare(run.job(), Layout())  # so that no rank needs to trace the model again
    found = evaluate(run.path, ["held.jsonl"], tasks, layout)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-10), name


LM_EVAL_TASK = """
task: local_capitals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/capitals.jsonl}}}}
test_split: test
output_type: {kind}
doc_to_text: "The capital of {{{{country}}}} is"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["\\n", "is"], max_gen_toks: 5, do_sample: false}}
metric_list: [{metrics}]
"""


@pytest.mark.parametrize(("kind", "metrics"), [
    ("multiple_choice", "{metric: acc}, {metric: acc_norm}"),
    ("generate_until", "{metric: exact_match}"),
    ("loglikelihood_rolling", "{metric: byte_perplexity}, {metric: bits_per_byte}"),
])  # fmt: skip
def test_lm_eval_gets_the_same_numbers_from_run_and_folder(kind: str, metrics: str, tmp_path: Path) -> None:
    """lm-eval's own harness on our class and on its Hugging Face class; and `shardwise eval` on the same task file."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedTokenizerFast

    run = train_run(tmp_path / "run", {"vocab": 300}, data={
        "source": "text", "path": str(tmp_path / "corpus.txt"), "tokenizer": "bpe:300"})  # fmt: skip
    list(export_run(run.path, tmp_path / "out", "", "float64", 10**9))
    write_tasks(tmp_path)
    (tmp_path / "task").mkdir()
    task = LM_EVAL_TASK.format(folder=tmp_path, kind=kind, metrics=metrics)
    task = task if kind == "multiple_choice" else task.replace('doc_to_choice: "{{choices}}"\n', "")
    (tmp_path / "task" / "task.yaml").write_text(task)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(run.tokenizer), eos_token="<|end|>")
    theirs = HFLM(pretrained=str(tmp_path / "out"), tokenizer=tokenizer, dtype="float64", device="cpu", batch_size=2)
    pairs = [Request((f"The capital of {record['country']}", f" is {choice}")) for record in CHOICES
             for choice in record["choices"]]  # fmt: skip
    for found, expected in zip(
        lm_eval_model(str(run.path)).loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True
    ):
        assert found[0] == pytest.approx(expected[0], rel=1e-7)  # their rotary frequencies are in float32
        assert found[1] == expected[1]
    options = {"until": ["\n", "Peru"], "max_gen_toks": 8, "do_sample": False}
    prompts = [Request((f"The capital of {record['country']}", options)) for record in CHOICES]
    assert lm_eval_model(str(run.path)).generate_until(prompts) == theirs.generate_until(prompts)
    results = []
    for model in (
        lm_eval_model(str(run.path)),
        lm_eval_model(str(tmp_path / "out"), overrides=["precision=float64"]),
        theirs,
    ):
        manager = TaskManager(include_path=str(tmp_path / "task"), include_defaults=False)
        found = lm_eval.simple_evaluate(model=model, tasks=["local_capitals"], task_manager=manager, bootstrap_iters=0)
        results.append(found["results"]["local_capitals"])
    numbers = {key: value for key, value in results[2].items() if isinstance(value, float) and "stderr" not in key}
    assert numbers
    own = evaluate(run.path, [], [tmp_path / "task" / "task.yaml"])["local_capitals"]
    for key, value in numbers.items():
        assert results[0][key] == pytest.approx(value, rel=1e-7), key
        assert results[1][key] == pytest.approx(value, rel=1e-7), key
        assert own[key.partition(",")[0]] == pytest.approx(value, rel=1e-7), key


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "nothing to evaluate on"),
    (["--data", "missing.txt"], "no such file"),
    (["--tasks", "bad.yaml"], "a task needs a name"),
    (["--tasks", "kind.yaml"], "use multiple_choice"),
    (["--tasks", "metric.yaml"], "cannot be imported"),
    (["--tasks", "field.yaml"], "does not fit a record"),
    (["--tasks", "code.yaml"], "is unsafe"),
    (["--data", "held.jsonl", "--layout", "pipeline=2 schedule=interleaved virtual=3"], "has 6 stages"),
    (["--data", "held.jsonl", "--set", "model.layers=1"], "model.layers: a trained model keeps its keys"),
])  # fmt: skip
def test_errors_are_sentences(
    arguments: list[str], message: str, run: RunFolder, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tasks(tmp_path)
    (tmp_path / "bad.yaml").write_text("doc_to_text: x")
    (tmp_path / "kind.yaml").write_text("task: a\noutput_type: other")
    (tmp_path / "metric.yaml").write_text("task: a\nmetric_list: [{metric: 'python:nothing:here'}]")
    (tmp_path / "code.yaml").write_text("task: a\ndata: capitals.jsonl\ndoc_to_text: '{{country.__class__.__mro__}}'")
    (tmp_path / "field.yaml").write_text("task: a\ndata: capitals.jsonl\ndoc_to_text: '{{nothing}}'")
    with pytest.raises(UserError, match=message):
        app(["eval", str(run.path), *arguments], standalone_mode=False)


def test_a_folder_keeps_the_keys_of_its_model(run: RunFolder, tmp_path: Path) -> None:
    list(export_run(run.path, tmp_path / "out", "", "float64", 10**9))
    for path in (run.path, tmp_path / "out"):
        assert LanguageModel(path, overrides=["model.sequence=12", "precision=float64"]).length == 12
        with pytest.raises(JobError, match="model.norm_eps"):
            LanguageModel(path, overrides=["model.norm_eps=0.1"])


def test_command_prints_json(run: RunFolder, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write_tasks(tmp_path)
    app(["eval", str(run.path), "--data", "held.jsonl", "--tasks", "tasks.yaml", "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert found["held.jsonl"]["documents"] == 2
    assert list(found) == ["held.jsonl", "capitals", "continue", "words", "pages"]


@pytest.mark.parametrize("kind", ["gpt_neox", "mixtral"])
def test_folders_of_transformers(kind: str, tmp_path: Path) -> None:
    """A folder that only transformers computes, and one of ours, with experts over two ranks; both continue text."""
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
             "vocab_size": 256, "max_position_embeddings": 32, "sliding_window": None}  # fmt: skip
    torch.manual_seed(0)
    shape |= {"num_key_value_heads": 2, "num_local_experts": 4} if kind == "mixtral" else {}
    config = transformers.CONFIG_MAPPING[kind](**shape)
    module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    module.save_pretrained(tmp_path / "folder")
    model = LanguageModel(tmp_path / "folder")
    ids = list(b"some text to score")
    with torch.no_grad():
        logits = module(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = sum(float(logits[n, ids[n + 1]]) for n in range(8, len(ids) - 1))
    assert model.length == 32
    assert model.score_tokens([(ids[:9], ids[9:])])[0][0] == pytest.approx(expected, rel=1e-5)
    greedy = module.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=255)
    new = ByteTokenizer().decode(greedy[0, len(ids) :].numpy())
    options = {"max_gen_toks": 6, "do_sample": False}
    assert model.generate_until([Request(("some text to score", options))]) == [new.partition("\0")[0]]
    if kind == "mixtral":
        (tmp_path / "text.txt").write_text("some text to score, of more than one window")
        arguments = tmp_path / "folder", [str(tmp_path / "text.txt")], []
        one = run_world(evaluate, 1, *arguments)[0]
        two = evaluate(*arguments, "shard=2 expert=2")
        assert two[arguments[1][0]] == pytest.approx(one[arguments[1][0]], rel=1e-5)
    else:
        with pytest.raises(JobError, match="in one process"):
            evaluate(tmp_path / "folder", ["x.txt"], [], "tensor=2")
