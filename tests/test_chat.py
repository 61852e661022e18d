"""Chats: templates as transformers renders them, masks, rows, packing that equals not packing, and bad rows."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_train import losses, train, validation

from shardwise.cli import main
from shardwise.data import chat
from shardwise.data.chat_template import CHATML, ChatTemplate, load_template
from shardwise.data.input_files import BadRecords
from shardwise.data.make_sources import make_sources
from shardwise.data.sample_stream import Samples
from shardwise.errors import DataError, JobError, RunError, UserError
from shardwise.job import Job, make_job
from shardwise.layout import Layout
from shardwise.models.chain import IGNORE_INDEX
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.prepare import prepare
from shardwise.train.run_folder import RunFolder
from shardwise.verify.parity import verify

LLAMA = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 256, "sequence": 96}
LEARNED = {**LLAMA, "kv_heads": 4, "norm": "layer", "positions": "learned", "activation": "gelu", "bias": True}
MOE = {**LLAMA, "name": "moe", "experts": 4, "expert_ffn": 20, "dense_layers": 1, "router_aux_loss_coef": 0.0}
LATENT = {**MOE, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
SIZES = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip
QWEN = {"name": "hf:qwen3", "sequence": 96, "args": SIZES}
WINDOW = {"name": "hf:mistral", "sequence": 96, "args": {**SIZES, "sliding_window": 16}}
GPT2 = {"name": "hf:gpt2", "sequence": 96, "args": {
    "vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96, "bos_token_id": 0, "eos_token_id": 0,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}}  # fmt: skip

ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1?"},
                  {"role": "assistant", "content": "One"}, {"role": "user", "content": "2?"},
                  {"role": "assistant", "content": "Two, née Zwei 🙂"}]},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]},
    {"prompt": "Hi", "completion": "Hello!"},
    {"prompt": [{"role": "user", "content": "Hi"}], "completion": [{"role": "assistant", "content": "Hello!"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
                  {"role": "assistant", "content": "Hello!"}]},
    {"system": "Be kind.", "conversations": [{"from": "human", "value": "Bye"}, {"from": "gpt", "value": "See you."}]},
]  # fmt: skip
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start|>' + m['role'] + '<|sep|>' + m['content'] | trim + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant<|sep|>' }}{% endif %}"
)
FORGETS = (  # what the assistant thought before its last message, as Qwen3's template does
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '<|sep|>' }}"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|sep|>{% endif %}"
)


def write_rows(path: Path, rows: list[Any] | None = None) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in (ROWS if rows is None else rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def save_tokenizer(folder: Path, template: str = LLAMA3) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = ["</s>", "<|bos|>", "<|start|>", "<|sep|>", "<|eot|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator([json.dumps(row) for row in ROWS] * 4, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": template, "bos_token": {"content": "<|bos|>"}, "eos_token": "</s>",
              "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 10**30}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def chat_job(path: str, model: dict[str, Any] | None = None, samples: int = 2, **data: Any) -> Job:
    section = {"source": "chat", "path": path, "validation_fraction": 0.0, **data}
    values = {"precision": "float64", "steps": 2, "layout": "pipeline=1", "model": model or LLAMA}
    return make_job({**values, "data": section, "batch": {"samples": samples}, "run": {"device": "cpu"}})


def open_rows(job: Job, tmp_path: Path) -> Any:
    return make_sources(job, tmp_path / "cache")[0]


def counted(rows: Any, index: int, tokenizer: Any) -> str:
    targets = rows.read_row(index)[1]
    return str(tokenizer.decode(targets[targets != IGNORE_INDEX], keep_special=True))


# Templates


@pytest.mark.parametrize("text", [CHATML, LLAMA3, FORGETS])
def test_text_is_what_transformers_renders(text: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    template = ChatTemplate(text, "own", {"bos_token": "<|bos|>"})
    for row in ROWS:
        messages, _ = chat.parse_conversation(row)
        for prompted in (False, True):
            expected, spans = utils.render_jinja_template(
                [messages], chat_template=text, add_generation_prompt=prompted, return_assistant_tokens_mask=True,
                bos_token="<|bos|>",
            )  # fmt: skip
            assert template.render(messages, None, prompted) == (expected[0], [tuple(span) for span in spans[0]])


def test_tokens_and_mask_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    marked = LLAMA3.replace(
        "m['content'] | trim + '<|eot|>' }}",
        "'' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|eot|>' }}{% endgeneration %}"
        "{% else %}{{ m['content'] | trim + '<|eot|>' }}{% endif %}",
    )
    folder = save_tokenizer(tmp_path / "tokenizer", marked)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<|bos|>", eos_token="</s>", chat_template=marked
    )
    path = write_rows(tmp_path / "chats.jsonl")
    for template in (marked, LLAMA3):  # found by blocks, and by the generation prompt
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "bos_token": "<|bos|>"}))
        rows = open_rows(chat_job(path, {**LLAMA, "vocab": 300}, tokenizer=str(folder)), tmp_path)
        assert len(rows) == len(ROWS)
        for index, row in enumerate(ROWS):
            messages, _ = chat.parse_conversation(row)
            found = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
            ids, mask = np.array(found["input_ids"]), np.array(found["assistant_masks"])
            tokens, targets, _ = rows.read_row(index)
            assert tokens[: len(ids) - 1].tolist() == ids[:-1].tolist()
            expected = np.where(mask, ids, IGNORE_INDEX)[1:]
            assert targets[: len(ids) - 1].tolist() == expected.tolist()
            assert (targets[len(ids) - 1 :] == IGNORE_INDEX).all()


@pytest.mark.parametrize(("train_on", "expected"), [
    ("assistant", "One<|eot|>Two, née Zwei 🙂<|eot|>"), ("last", "Two, née Zwei 🙂<|eot|>"),
    ("all", "<|start|>system<|sep|>Be brief.<|eot|><|start|>user<|sep|>1?<|eot|><|start|>assistant<|sep|>One<|eot|>"
            "<|start|>user<|sep|>2?<|eot|><|start|>assistant<|sep|>Two, née Zwei 🙂<|eot|>"),
])  # fmt: skip
def test_what_counts(train_on: str, expected: str, tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer")
    job = chat_job(write_rows(tmp_path / "c.jsonl"), {**LLAMA, "vocab": 300}, tokenizer=str(folder), train_on=train_on)
    rows, _, tokenizer = make_sources(job, tmp_path / "cache")
    assert counted(rows, 1, tokenizer) == expected


def test_each_message_is_a_sample_if_the_template_writes_it_differently_later(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "hm</think>One"},
                {"role": "user", "content": "2?"}, {"role": "assistant", "content": "oh</think>Two"}]  # fmt: skip
    first, last = ChatTemplate(FORGETS, "own", {}).mark(messages, None, "assistant")
    for (text, ((start, stop),)), said in ((first, "hm</think>One<|eot|>"), (last, "oh</think>Two<|eot|>")):
        assert text[start:stop] == said and stop == len(text)
    assert "hm" not in last[0] and "<|sep|>One" in last[0]
    with pytest.raises(DataError, match="begins message 4 without its generation prompt"):
        ChatTemplate(FORGETS.replace("assistant<|sep|>{% endif", "bot{% endif"), "own", {}).mark(messages, None, "last")


@pytest.mark.parametrize(("text", "said"), [
    ("{{ raise_exception('roles must alternate') }}", "does not take this conversation: roles must alternate."),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError: access to attribute '__class__'"),
    ("{{ messages.clear() }}", "SecurityError: access to attribute 'clear'"),
    ("{{ cycler.__init__.__globals__.os.system('true') }}", "SecurityError"),
    ("{% include '/etc/passwd' %}", "TypeError: no loader for this environment"),
    ("{{ 'a' * 1000000000 }}", "SecurityError: * makes too much"), ("{{ 9 ** 999999999 }}", "SecurityError"),
    ("{% for i in range(999999999) %}{% endfor %}", "OverflowError: Range too big"),
    ("{% for m in messages %}", "bad.jinja, line 1: "), ("{{ messages[7]['content'] }}", "has no element 7"),
])  # fmt: skip
def test_a_template_that_fails_or_attacks_is_a_sentence(text: str, said: str) -> None:
    with pytest.raises(DataError) as told:
        ChatTemplate(text, "bad.jinja", {}).render([{"role": "user", "content": "Hi"}])
    assert said in str(told.value) and "bad.jinja" in str(told.value)


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer")
    assert load_template("", str(folder), False).text == LLAMA3
    tokens = {"bos_token": "<|bos|>", "eos_token": "</s>"}
    assert load_template("", str(folder / "tokenizer.json"), False).tokens == tokens
    (folder / "chat_template.jinja").write_text("newer")
    assert load_template("", str(folder), False).text == "newer"
    own = tmp_path / "own.jinja"
    own.write_text("own")
    assert load_template(str(own), str(folder), False).text == "own"
    assert load_template("", "bytes", True).text == CHATML
    for file in (folder / "chat_template.jinja", folder / "tokenizer_config.json"):
        file.unlink()
    with pytest.raises(DataError, match="has no chat template, nor the tokens"):
        load_template("", str(folder), False)
    several = [{"name": "tool_use", "template": "other"}, {"name": "default", "template": "this"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert load_template("", str(folder), False).text == "this"
    with pytest.raises(DataError, match="cannot be read"):
        load_template(str(tmp_path / "none.jinja"), str(folder), False)


# Rows


def test_all_forms_of_a_conversation_are_the_same() -> None:
    found = [chat.parse_conversation(row)[0] for row in ROWS]
    parsed = [[{key: message[key] for key in ("role", "content")} for message in messages] for messages in found]
    assert parsed[0] == parsed[2] == parsed[3] == parsed[4] == parsed[5]
    assert parsed[6][0] == {"role": "system", "content": "Be kind."}


@pytest.mark.parametrize(("row", "said"), [
    ("{", "not valid JSON"), ("[1]", "this is no JSON object"), ({"text": "Hi"}, "the row has the keys 'text'"),
    ({"messages": []}, "a list of objects"), ({"messages": "Hi"}, "a list of objects"),
    ({"messages": [{"role": "wizard", "content": "Hi"}]}, "message 1 has the role 'wizard'"),
    ({"messages": [{"content": "Hi"}]}, "message 1 has the role None"),
    ({"messages": [{"role": "user", "content": 3}]}, "message 1 has the content 3, which is not a text"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "message 1 has the content [{'type': 'image'}]"),
    ({"messages": [{"role": "system", "content": "Hi"}]}, "no message is the assistant's"),
    ({"prompt": "Hi"}, "it needs messages, conversations, or prompt and completion"),
    ({"prompt": "Hi", "completion": None}, "message 2 has the content None"),
    ({"prompt": "Hi", "completion": "\ud800"}, "surrogates not allowed"),
    ({"prompt": "Hi", "completion": "a\ufdd0b"}, "a character that Unicode reserves"),
])  # fmt: skip
def test_a_bad_row_is_named_or_skipped(row: Any, said: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "chats.jsonl", [ROWS[0], row, ROWS[1]])
    with pytest.raises(DataError) as told:
        open_rows(chat_job(path), tmp_path)
    assert f"{path}, line 2: " in str(told.value) and said in str(told.value), told.value
    bad_records = BadRecords(skip=True)
    rows, _, _ = make_sources(chat_job(path, on_bad_record="skip"), tmp_path / "cache", bad_records)
    assert len(rows) == 2 and "1 bad record skipped" in bad_records.summary()


@pytest.mark.parametrize(("rows", "data", "model", "said"), [
    ([], {}, {}, "has no conversations"), (["", " "], {}, {}, "has no conversations"),
    (None, {}, {"vocab": 200}, "the tokenizer has 256 ids, but model.vocab is 200"),
    (None, {}, {"eod_token_id": 3}, "use data.pack instead"),
    (None, {"tokenizer": "bpe:300"}, {}, "is not trained on chats"),
    (None, {"truncate": "drop"}, {"sequence": 8}, "no conversation is left of 7 conversations"),
    (None, {"source": "jsonl", "pack": True}, {}, 'pack = True is for source = "chat" only'),
    (None, {}, {"name": "bert", "kv_heads": 4}, "models that predict the next token"),
    (None, {"path": "nowhere.jsonl"}, {}, "no such file or folder"),
    (None, {"chat_template": "empty.jinja"}, {}, "line 1: no token of the conversation counts"),
    (None, {"chat_template": "none.jinja"}, {}, "the chat template none.jinja cannot be read"),
])  # fmt: skip
def test_what_cannot_be_read_is_a_sentence(
    rows: Any, data: dict[str, Any], model: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "chats.jsonl", rows)
    monkeypatch.chdir(tmp_path)
    Path("empty.jinja").touch()
    with pytest.raises(UserError) as told:
        open_rows(chat_job(data.pop("path", path), {**LLAMA, **model}, **data), tmp_path)
    assert said in str(told.value), told.value


def test_the_command_line_ends_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_rows(tmp_path / "chats.jsonl", [{"messages": [{"role": "user", "content": "Hi"}]}])
    words = ["shardwise", "train", "--set", "data.source=chat", "--set", f"data.path={path}", "--set", "steps=1"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"shardwise: {path}, line 1: no message is the assistant's")


def test_long_conversations_are_cut_or_dropped(tmp_path: Path) -> None:
    long = {"prompt": "a" * 200, "completion": "b" * 10}
    path = write_rows(tmp_path / "chats.jsonl", [ROWS[0], long, {"prompt": "a", "completion": "b" * 200}])
    found = {}
    for truncate in ("left", "right", "drop"):
        rows = open_rows(chat_job(path, truncate=truncate), tmp_path)
        found[truncate] = rows
        assert rows.length == 96 and all((rows.read_row(n)[1] != IGNORE_INDEX).any() for n in range(len(rows)))
    assert "2 cut at the left" in found["left"].summary and len(found["left"]) == 3
    assert "1 cut at the right, 1 dropped (with nothing that counts within 97 tokens)" in found["right"].summary
    assert "2 dropped (longer than 97 tokens)" in found["drop"].summary and len(found["drop"]) == 1
    text = bytes(found["left"].read_row(1)[0].tolist()).decode()
    assert text.startswith("aaa") and text.endswith("b<|im_end|>")
    assert bytes(found["right"].read_row(1)[0].tolist()).decode().startswith("<|im_start|>user\na<|im_end|>")


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_packing_loses_nothing_and_fits(sizes: list[int]) -> None:
    rows = chat.pack(sizes, 40)
    assert sorted(item for row in rows for item in row) == list(range(len(sizes)))
    assert all(sum(sizes[item] for item in row) <= 40 for row in rows)
    assert len(rows) <= 1.7 * -(-sum(sizes) // 40)
    assert rows == chat.pack(sizes, 40)


def test_a_packed_row_holds_what_rows_of_one_hold(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "chats.jsonl", ROWS * 3)
    pickled = pickle.loads(pickle.dumps(open_rows(chat_job(path, pack=True), tmp_path)))  # as data workers get it
    assert len(pickled.read_row(0)[0]) == 96
    alone, packed = (
        open_rows(chat_job(path, {**LLAMA, "sequence": 256}, pack=pack), tmp_path) for pack in (False, True)
    )
    assert len(alone) == 21 and len(packed) < 10 and packed.filled > alone.filled
    pieces: list[tuple[list[int], list[int]]] = []
    for index in range(len(packed)):
        tokens, targets, is_first = packed.read_row(index)
        places = [*np.flatnonzero(is_first).tolist(), len(tokens)]
        pieces += [(tokens[a:b].tolist(), targets[a:b].tolist()) for a, b in zip(places, places[1:])]
        assert (targets[[place - 1 for place in places[1:]]] != 0).all()
    pieces = [piece for piece in pieces if any(target != IGNORE_INDEX for target in piece[1])]
    singles = []
    for index in range(len(alone)):
        tokens, targets, is_first = alone.read_row(index)
        end = np.flatnonzero(is_first)[1]
        singles.append((tokens[:end].tolist(), targets[:end].tolist()))
    assert sorted(pieces) == sorted(singles)
    samples = packed.samples(np.arange(2), np.arange(2)).with_packed_ids()
    assert (samples.tokens >= 0).all() and samples.document_ids is not None
    assert (samples.document_ids.diff() >= 0).all() and samples.document_ids[:, -1].min() > 1


# Packing equals not packing


def _losses_and_gradients(job: Job, rows: Any) -> tuple[float, dict[str, torch.Tensor]]:
    engine = parallelize(prepare(job, Layout.parse("pipeline=1 micro_batch=1")), torch.device("cpu"))
    samples: Samples = rows.samples(np.arange(len(rows)), np.arange(len(rows)))
    loss = engine.run(samples, torch.ones((), dtype=torch.float64))
    assert engine.num_targets(samples) > 50
    return float(loss), {shard.name: shard.full_grad.clone() for shard in engine.param_shards}


def _compare(path: str, model: dict[str, Any], cache: Path) -> tuple[float, float]:
    """Returns the largest errors of loss and gradients of packed rows against rows of one conversation each."""
    found = []
    for pack in (False, True):
        rows = open_rows(chat_job(path, model, pack=pack), cache)
        found.append(_losses_and_gradients(chat_job(path, model, len(rows), pack=pack), rows))
    (alone, expected), (packed, gradients) = found
    errors = [float((gradients[name] - expected[name]).norm() / expected[name].norm()) for name in expected
              if expected[name].norm() > 1e-12]  # fmt: skip
    return abs(packed - alone) / alone, max(errors)


PACKED_ROWS = [{"prompt": "q" * (3 * n % 7 + 1), "completion": "answer "[: n % 7 + 1]} for n in range(8)]


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", ["LLAMA", "LEARNED", "MOE", "LATENT", "QWEN", "WINDOW", "GPT2"])
def test_packing_equals_not_packing(name: str, tmp_path: Path) -> None:
    model = globals()[name]
    if model.get("name", "").startswith("hf:"):
        pytest.importorskip("transformers")
    path = write_rows(tmp_path / "chats.jsonl", PACKED_ROWS)
    model = {**model, "sequence": 160}
    if name == "GPT2":
        model = {**model, "args": {**model["args"], "n_positions": 160}}
    loss, gradient = _compare(path, model, tmp_path)
    assert loss < 1e-10 and gradient < 1e-10


@pytest.mark.parametrize("name", ["LLAMA", "LEARNED", "QWEN"])
def test_a_leak_between_conversations_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the borders of conversations are not seen."""
    if name == "QWEN":
        pytest.importorskip("transformers")
    right = Samples.with_packed_ids

    def without_borders(self: Samples) -> Samples:
        found = right(self)
        return Samples(found.tokens, found.targets, found.ids)

    monkeypatch.setattr(Samples, "with_packed_ids", without_borders)
    path = write_rows(tmp_path / "chats.jsonl", PACKED_ROWS)
    loss, gradient = _compare(path, {**globals()[name], "sequence": 160}, tmp_path)
    assert loss > 1e-8 and gradient > 1e-4


@pytest.mark.thin(by_kind=True)
@pytest.mark.parametrize(("family", "name", "layout"), [
    ("gpt", "LLAMA", "shard=2 zero=3"), ("gpt", "LLAMA", "pipeline=2 tensor=2"), ("gpt", "LLAMA", "context=2"),
    ("gpt", "LLAMA", "context=2 context_method=ulysses"), ("gpt", "LEARNED", "context=2 tensor=2"),
    ("gpt", "LEARNED", "pipeline=2 recompute=full"), ("moe", "MOE", "shard=2 expert=2"), ("moe", "LATENT", "tensor=2"),
    ("hf", "QWEN", "shard=2 zero=3"), ("hf", "QWEN", "tensor=2"), ("hf", "QWEN", "pipeline=2"),
    ("hf", "QWEN", "context=2"), ("hf", "WINDOW", "context=2"), ("hf", "GPT2", "context=2"),
    ("hf", "GPT2", "pipeline=2"),
])  # fmt: skip
def test_packed_chats_in_any_layout(family: str, name: str, layout: str) -> None:
    model = globals()[name]
    if family == "hf":
        pytest.importorskip("transformers")
    elif name in ("LLAMA", "MOE"):
        model = {**model, "dropout": 0.1}
    job = chat_job("none", {**model, "sequence": 24}, 8, pack=True)
    (record,) = verify(job, [Layout.parse(layout)], steps=2)
    assert record.ok, record.describe()


@pytest.mark.parametrize(("model", "said"), [
    ({"name": "t5", "sequence": 24, "target_sequence": 16}, "cannot keep the conversations of a sample apart"),
    ({"name": "hf:mamba", "sequence": 8, "args": {"vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 2}},
     "may let the conversations of a sample see one another"),
])  # fmt: skip
def test_who_cannot_keep_conversations_apart_says_so(model: dict[str, Any], said: str) -> None:
    if model["name"].startswith("hf:"):
        pytest.importorskip("transformers")
    with pytest.raises(JobError, match=said):
        prepare(chat_job("none", model, pack=True), Layout.parse("pipeline=1"))


# Runs


def test_a_run_keeps_template_and_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, path = save_tokenizer(tmp_path / "tokenizer"), write_rows(tmp_path / "chats.jsonl", ROWS * 4)
    job = chat_job(path, {**LLAMA, "vocab": 300}, tokenizer=str(folder), pack=True, validation_fraction=0.2)
    job = job.model_copy(update={"run": job.run.model_copy(update={"folder": str(tmp_path / "run")})})
    run, record = RunFolder.create(job), RunFolder(tmp_path / "none").data_record()
    sources = make_sources(job, record=record)
    run.write_data(record, *sources)
    for file in (*folder.iterdir(), *(tmp_path / "cache").rglob("*.bin")):
        file.unlink()
    again = RunFolder.open(run.path).sources(job)
    assert len(again[1]) and len(again[0]) == len(sources[0])
    for index in range(len(again[0])):
        assert again[0].read_row(index)[0].tolist() == sources[0].read_row(index)[0].tolist()


@pytest.mark.thin(2)
@pytest.mark.parametrize("model", [LLAMA, {**LLAMA, "lora": {"rank": 2, "init_std": 0.02}}], ids=["full", "lora"])
def test_a_run_is_the_same_in_any_layout_and_after_a_restart(
    model: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chats = Path(__file__).parent.parent / "examples" / "chats.jsonl"
    found = {}
    for name, layout, resumed in (("one", "pipeline=1", ""), ("two", "shard=2 zero=3", "context=2")):
        job = chat_job(str(chats), {**model, "layers": 1, "sequence": 192}, 8, pack=True, validation_fraction=0.1)
        job = job.model_copy(update={
            "steps": 4, "run": job.run.model_copy(update={"folder": str(tmp_path / name)}),
            "checkpoint": job.checkpoint.model_copy(update={"every": 2, "asynchronous": False}),
        })  # fmt: skip
        if resumed:
            with pytest.raises(RunError):
                train(job, layout, die_after=3)
        run = train(job, resumed or layout, resume=bool(resumed))
        found[name] = [*losses(run), validation(run)]
    assert found["one"] == pytest.approx(found["two"], rel=1e-10)


def test_the_preview_shows_what_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, path = save_tokenizer(tmp_path / "tokenizer"), write_rows(tmp_path / "chats.jsonl", ROWS[:2])
    settings = [f"data.tokenizer={folder}", "data.source=chat", f"data.path={path}", "data.pack=true"]
    words = ["shardwise", "data", "preview", "--count", "1", *(word for s in settings for word in ("--set", s))]
    monkeypatch.setattr(sys, "argv", [*words, "--set", "data.validation_fraction=0"])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr().out
    assert not ended.value.code and "--- sample 0: " in shown and "of 256 tokens count" in shown
    assert "\n<|bos|><|start|>user<|sep|>Hi<|eot|><|start|>assistant<|sep|>[[Hello!<|eot|>]]\n" in shown
    assert "<|sep|>2?<|eot|><|start|>assistant<|sep|>[[Two, née Zwei 🙂<|eot|>]]\n" in shown
