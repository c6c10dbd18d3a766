"""Rerankers: one file each, named as `retrieval.rerank` says. Each gives `build(parts) -> Reranker`; `off` is none."""
