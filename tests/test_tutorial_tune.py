"""Every command of docs/tutorial-tune.md, in a folder with the examples: from a base folder to a served answer."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from test_docs import ROOT, blocks

pytestmark = pytest.mark.cluster

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
pytest.importorskip("yaml")


def ask(request: str, url: str) -> str:
    for _ in range(600):
        try:
            with urllib.request.urlopen(urllib.request.Request(url, request.encode()), timeout=60) as answer:
                return answer.read().decode()
        except OSError:
            time.sleep(0.2)
    raise AssertionError("the server does not answer")


def test_from_a_base_folder_to_a_served_answer(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}"}
    servers, ran, answer = [], [], ""
    try:
        for block in blocks(ROOT / "docs" / "tutorial-tune.md", "console"):
            for line in block.splitlines():
                if not line.startswith("$ "):
                    continue
                program, *words = shlex.split(line[2:].replace("$'", "'").replace("\\n", "\n"))
                if program == "curl":
                    answer = ask(words[1], words[2])
                    continue
                python = [sys.executable, *(["-m", "shardwise"] if program == "shardwise" else [])]
                if words[-1] == "&":
                    servers.append(subprocess.Popen([*python, *words[:-1]], cwd=tmp_path, env=environment))
                    continue
                done = subprocess.run(
                    [*python, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
                )
                assert done.returncode == 0, line + done.stdout + done.stderr
                ran.append(words[0])
    finally:
        for server in servers:
            server.kill()
    assert ran == ["train", "export", "data", "verify", "train", "sample", "eval", "export", "drift"]
    message = json.loads(answer)
    assert message["role"] == "assistant" and " says " in message["content"], message
