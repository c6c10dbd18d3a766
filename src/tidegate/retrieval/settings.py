"""Settings of this room: `[embedder]` turns text into vectors, `[retrieval]` finds passages."""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator

from tidegate.core.settings import Section


class EmbedderSettings(Section):
    """`[embedder]`: the multilingual model that turns text into vectors."""

    mode: Literal["child", "in_process"] = Field(
        "child", description="`child`: one embedder process serves every worker; `in_process`: the gateway loads the model itself."
    )
    socket: Path | None = Field(None, description="Unix socket of the embedder child; when empty, run/embedder.sock in the data folder.")
    runtime: Literal["onnxruntime", "openvino"] = Field(
        "onnxruntime", description="What computes: `onnxruntime`, or `openvino` where tidegate[openvino] is installed; their vectors may be mixed."
    )
    threads: int = Field(
        0, ge=0, le=64,
        description="Threads that one embedding may use; 0 takes half of the cores, at least one. Questions and passages are embedded at once.",
    )
    max_length: int = Field(
        512, ge=16, le=512, description="Tokens read at once; a longer text is read in windows of this size whose vectors are averaged."
    )
    batch_tokens: int = Field(
        512, ge=16, le=8192, description="Tokens computed at once, padding included: texts of like length together."
    )


class RetrievalSettings(Section):
    """`[retrieval]`: which passages are found for a question."""

    collection: str = Field("default", min_length=1, description="Collection that is searched where a capability names none.")
    k: int = Field(4, ge=1, le=100, description="Passages found for a question where a capability names no number.")
    hybrid: bool = Field(True, description="Passages are also found by their words (BM25), and both orders are fused; false: by vectors alone.")
    candidates: int = Field(
        30, ge=1, le=200, description="Passages that are looked for by vectors, and as many by words, before the best of both are chosen."
    )
    rerank: str = Field(
        "features",
        description="What looks at the candidates a second time: the name of a file in retrieval/rerankers (features, onnx, http, engine), or off.",
    )
    recall_sample: float = Field(
        0.01, ge=0, le=1,
        description="Share of the searches by the graph of neighbours that are done again beside the answer by comparing everything: their recall is "
        "a metric. One at a time; 0: none.",
    )
    rerank_share: float = Field(
        0.5, gt=0, lt=1, description="Most of a search's time left that the second look may take; one that is slower, or fails, changes nothing."
    )
    rerank_url: str = Field("", description='With rerank = "http": the whole address, with its path (http://gpu-1.internal:8080/rerank).')
    rerank_api_key: SecretStr | None = Field(None, description="Sent to that address as a bearer token.")
    rerank_model: str = Field(
        "", description="The model that is named there; with rerank = \"engine\" the public name of the model that judges (empty: the default)."
    )
    rerank_folder: Path | None = Field(
        None, description='With rerank = "onnx": the folder of a cross-encoder, with model.onnx and tokenizer.json.'
    )
    compress: bool = Field(
        False, description="Sentences of a passage that do not bear on the question are left out of the prompt; citations keep the whole passage."
    )
    max_file_mib: int = Field(64, ge=1, le=4096, description="Largest file that is ingested, in MiB; a larger one is refused.")
    max_pages: int = Field(2000, ge=1, description="Most pages of a file that is ingested.")
    keep_files: bool = Field(
        True, description="Keep the original bytes of PDF documents in the database, so that a passage can be shown where it stands on its page."
    )
    load_seconds: float = Field(120.0, gt=0, description="Seconds that reading one file may take; a slower one is refused.")
    load_memory_mib: int = Field(1024, ge=256, description="Memory (address space) of the process that reads files, in MiB.")
    ingest_workers: int = Field(
        0, ge=0, le=256, description="Files that an ingest reads at once, each in a process of its own; 0 takes the number of cores."
    )
    ingest_patience_s: float = Field(
        30.0, ge=0, le=3600, description="Seconds that an ingest waits for a database or an embedder that went down, before it ends."
    )
    ocr: Literal["off", "tesseract"] = Field(
        "off", description="What reads pages that are pictures: nothing (a note names them), or the program tesseract, which must be installed."
    )
    ocr_languages: str = Field(
        "eng", pattern=r"^[A-Za-z0-9_]+(\+[A-Za-z0-9_]+)*$", description="Languages that OCR looks for, as tesseract names them: `eng+chi_sim`."
    )
    passage_tokens: int = Field(280, ge=32, le=448, description="Most tokens of a passage; a change re-reads all documents.")
    passage_overlap: float = Field(0.12, ge=0, le=0.5, description="Share of a passage that the next one of its section repeats.")

    @field_validator("rerank_url")
    @classmethod
    def _url(cls, url: str) -> str:
        parts = urlsplit(url)
        if url and (parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0):
            raise ValueError("must begin with http:// or https:// and name a host")
        if parts.username or parts.password:
            raise ValueError("must not carry a user or password: use rerank_api_key")
        if not url.isascii() or any(sign <= " " for sign in url):
            raise ValueError("must be ASCII without spaces")
        return url
