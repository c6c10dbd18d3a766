"""Settings of the pipeline room."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tidegate.core.settings import Section


class CapabilitySettings(Section):
    """`[capabilities]`: where the folders of your capabilities are."""

    folders: list[str] = Field(
        default_factory=list,
        description="Folders that hold capabilities as GROUP/NAME/capability.toml; each is served at POST /api/v1/GROUP/NAME.",
    )


class BudgetSettings(Section):
    """`[budgets]`: how the one deadline of a request is cut among the stages of a capability. Each is enforced by cancel, and a rung of the ladder is
    the fallback."""

    profile: Literal["gpu", "embedded"] = Field(
        "gpu",
        description="Named values for the settings below and `admission.forecast_s`. `gpu`: retrieval 0.2 s, first token 0.8 s, forecast wait 3 s. "
        "`embedded`: 2 s, 30 s, 60 s; `tidegate up` takes it for its own engine where nothing is set. A value that is set beside it wins.",
    )
    retrieve_s: float = Field(
        0.2, gt=0, le=86_400, allow_inf_nan=False, description="Seconds that retrieval may take, where a capability does not say it."
    )
    first_token_s: float = Field(
        0.8, gt=0, le=86_400, allow_inf_nan=False,
        description="Seconds from the engine's call to its first token, where a capability does not say it. On /v1 engines.NAME.first_token_s alone "
        "holds: it has no ladder.",
    )


class LengthSettings(Section):
    """What happens to a prompt that is too long. `[length]` of tidegate.toml for `/v1`, of capability.toml for the stage `fit`."""

    policy: Literal["off", "refuse", "head", "tail", "middle", "compress"] = Field(
        "off",
        description="`off`: the engine says whether it fits; `refuse`: an error before it is asked; `head`, `tail`, `middle`: that part is cut away; "
        "`compress`: a model's summary stands in place of the middle.",
    )
    max_prompt_tokens: int = Field(
        0, ge=0, description="Tokens above which a prompt is too long, counted as the engine counts; 0: what its context leaves beside the answer."
    )
    last_message: Literal["cut", "refuse"] = Field(
        "cut",
        description="Where system messages and the last message of the user alone are too long: that message is cut too, or the request is refused.",
    )
    marker: str = Field(" [...] ", description="What stands in a text where something was cut out of it.")
    compress_model: str = Field("default", description="With `compress`: the model that summarises; best a small one.")
    compress_to_tokens: int = Field(0, ge=0, description="With `compress`: tokens of the prompt then; 0: three quarters of the bound.")
    compress_s: float = Field(15.0, gt=0, allow_inf_nan=False, description="With `compress`: seconds that the summary may take.")
    compress_else: Literal["refuse", "head", "tail", "middle"] = Field("middle", description="With `compress`: what happens where no summary comes.")


class ShardSettings(Section):
    """`[shard]` of capability.toml: how the stage `shard` reads a long document in parts."""

    field: str = Field("document", description="The input field whose text is read in parts.")
    question: str = Field("question", description="The input field that says what is sought in it; empty: nothing is, all parts are of equal worth.")
    tokens: int = Field(2048, ge=64, description="Most tokens of a part, counted as the engine counts; fewer where its context holds fewer.")
    most: int = Field(64, ge=1, le=4096, description="Most parts; a longer document is refused.")
    parallel: int = Field(4, ge=1, le=64, description="Parts that are read at the same time; each beside the first waits for a slot as any request.")
    answer_tokens: int = Field(160, ge=1, description="Most tokens that the model may say of a part.")
    keep: int = Field(6, ge=1, le=50, description="How many parts' findings go into the prompt: the most relevant, in the order of the document.")
    budget_s: float = Field(60.0, gt=0, allow_inf_nan=False, description="Seconds that all parts may take; what is not read by then is left out.")
    model: str = Field("", description="The model that reads the parts; empty: the capability's own.")
    ask: str = Field(
        "The user sends a part of a longer document, and a question. Write down, briefly and in the words of the document, what in this part helps "
        "to answer the question. If nothing in it helps, write NONE.",
        description="What the model is told to do with a part.",
    )


class GenerationSettings(Section):
    """`[generation]`: how an answer is told."""

    max_resumes: int = Field(
        2, ge=0, description="How often one answer that an engine broke off in its middle goes on, on the same or another engine. 0: it is an error."
    )
    resume_wait_s: float = Field(
        10.0, ge=0, allow_inf_nan=False,
        description="Seconds that an answer which broke off waits while no engine of its model can be reached. 0: none.",
    )
    max_retries: int = Field(
        2, ge=0, le=10,
        description="How often a request that failed before its first token is planned anew, on another engine of its model. 0: never.",
    )
    retry_ratio: float = Field(
        0.2, ge=0, le=1,
        description="New plans at most, as a share of the requests: a fleet in trouble is not asked twice as much as one that is well.",
    )
    retry_burst: float = Field(10.0, ge=0, le=1_000_000, description="New plans that may be made at once beyond that share.")
    try_share: float = Field(
        0.5, gt=0, le=1,
        description="Share of a capability's first_token_s after which an engine that said nothing is given up, where another one can be asked.",
    )
    hedge_after_s: float = Field(
        0.0, ge=0, le=3600,
        description="Seconds without a first token after which another engine of the model is asked too; who speaks first is heard. 0: never.",
    )
    hedge_ratio: float = Field(0.05, ge=0, le=1, description="Requests that are asked twice at most, as a share of all.")
