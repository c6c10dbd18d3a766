"""The command plan: does a model fit on cards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tidegate.cli.options import secret


@click.command()
@click.argument("model", metavar="MODEL", type=click.Path(path_type=Path))
@click.option("--gpu", metavar="NAME", help="The card, e.g. H100, A100-80GB, RTX-4090.")
@click.option("--gpu-memory", type=float, metavar="GIB", help="The memory that a program sees on the card, where it is another or you know better.")
@click.option("--tp", type=click.IntRange(1, 1024), default=1, show_default=True, help="Tensor parallel: cards that share each layer.")
@click.option("--pp", type=click.IntRange(1, 1024), default=1, show_default=True, help="Pipeline parallel: stages of layers.")
@click.option("--engine", default="auto", show_default=True, help="auto, vllm or llama.cpp.")
@click.option("--engine-version", metavar="X.Y", help="vLLM's version (default: the newest that is known).")
@click.option("--length", type=click.IntRange(1, 1 << 31), metavar="TOKENS", help="The longest request (default: the model's context).")
@click.option("--concurrency", type=click.IntRange(1, 1 << 20), default=1, show_default=True, help="How many requests of that length at once.")
@click.option("--kv-dtype", default="auto", show_default=True, help="The type of the KV cache: bf16, fp8, q8_0, ...")
@click.option("--share", type=float, help="The part of the card that the engine may use (vLLM: --gpu-memory-utilization).")
@click.option("--step-tokens", type=click.IntRange(1, 1 << 24), help="vLLM: --max-num-batched-tokens.")
@click.option("--sequences", type=click.IntRange(1, 1 << 20), help="vLLM: --max-num-seqs.")
@click.option("--block", type=click.IntRange(1, 1 << 16), default=16, show_default=True, help="vLLM: --block-size.")
@click.option("--micro-batch", type=click.IntRange(1, 1 << 20), default=512, show_default=True, help="llama.cpp: --ubatch-size.")
@click.option("--prefix-caching/--no-prefix-caching", default=True, show_default=True, help="vLLM: recurrent layers keep more states with it.")
@click.option("--cuda-graphs/--no-cuda-graphs", default=True, show_default=True, help="vLLM: graphs; off is --enforce-eager.")
@click.option("--draft-tokens", type=click.IntRange(0, 64), default=0, show_default=True, help="Tokens drafted by a multi-token-prediction head.")
@click.option("--weights", type=float, metavar="GIB", help="Given instead of computed, per card; so are --activation, --non-torch and --graphs.")
@click.option("--activation", type=float, metavar="GIB", help="The peak of a step.")
@click.option("--non-torch", type=float, metavar="GIB", help="Context, libraries, collective operations.")
@click.option("--graphs", type=float, metavar="GIB", help="CUDA graphs.")
@click.option("--qps", type=float, help="Requests a second: also says how many run at once, and the bandwidth of each.")
@click.option("--prompt-tokens", type=click.IntRange(0, 1 << 31), default=1024, show_default=True, help="For --qps: tokens of a prompt.")
@click.option("--answer-tokens", type=click.IntRange(1, 1 << 24), default=256, show_default=True, help="For --qps: tokens of an answer.")
@click.option("--slo", type=float, metavar="PERCENT", help="For --qps: the objective, e.g. 99.9; says its error budget.")
@click.option("--observe", metavar="URL", help="A running engine (vLLM, llama.cpp) to compare with.")
@click.option("--api-key-env", metavar="VARIABLE", help="The environment variable that holds that engine's API key.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.pass_context
def plan(ctx: click.Context, /, model: Path, api_key_env: str | None, as_json: bool, **options: Any) -> None:
    """Say whether a model fits on cards: weights, KV cache, activation, and with how much to spare.

    MODEL is a config.json, a folder with one, or a GGUF file. The exit code is 0 where it fits (also tightly), 1 where it does not.
    """
    from tidegate.sizing.command import Options, make_plan
    from tidegate.sizing.report import render
    from tidegate.terminal import plain

    made, comparison = make_plan(model, Options(**options), api_key=secret(api_key_env))
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode({**msgspec.to_builtins(made), "compared": comparison})))
    else:
        click.echo("\n".join(plain(line) for line in render(made, comparison).split("\n")))
    ctx.exit(1 if made.verdict == "fails" else 0)
