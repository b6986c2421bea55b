"""What `ctxreuse doctor` looks at."""

from __future__ import annotations

from dataclasses import dataclass, field

from ctxreuse.context.checks import checked_number
from ctxreuse.errors import InvalidRequestError
from ctxreuse.measure.options import BESIDE_TRACE, option

MOST_TOKENS = 20_000  # the longest prompt that is sent


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """What is looked at; at least one of them."""

    recording: str | None = option(
        "A folder that `ctxreuse record` wrote, or a trace: does anything vary in front of the "
        "contexts?",
        None,
        argument=True,
    )
    corpus: str | None = option(BESIDE_TRACE, None)
    base_url: str | None = option(
        "Send this engine four made-up prompts, each at most 20,000 tokens long: is the cache on, "
        "does usage report it, does a common half hit? The key is taken from OPENAI_API_KEY.",
        None,
    )
    metrics_url: str | None = option(
        "Where vLLM's metrics are, if not at /metrics of the same server.", None, "--metrics"
    )
    shared_log: str | None = option(
        "The log that the processes share: who writes to it? The file of a SQLiteLog, or the URL "
        "of a RedisLog's server, whose secret is not needed; a password is in no list of processes "
        "if CTXREUSE_SHARED_LOG holds the URL.",
        None,
        secret=True,
        envvar="CTXREUSE_SHARED_LOG",
    )
    stream: str | None = option(
        "The name of the RedisLog's stream, if it is not the usual one.", None
    )
    workers: int | None = option(
        "How many processes of yours send prompts to the engine.", None, min=1
    )
    model: str | None = option("The model to ask; the server's first one if not given.", None)
    tokens: int | None = option(
        "How long a prompt is, about; without it 2,800, or what large cache blocks need.",
        None,
        min=64,
        max=MOST_TOKENS,
    )
    quiet_s: float = option(
        "Seconds without a prompt, to see those of others.", 2.0, "--watch", min=0, max=3_600
    )
    timeout_s: float = option(
        "Seconds that an answer may take.", 30.0, "--timeout", min=0.1, max=3_600
    )
    api_key: str = field(default="EMPTY", repr=False)

    def __post_init__(self) -> None:
        """Check it."""
        if not (self.recording or self.base_url or self.metrics_url or self.shared_log):
            raise InvalidRequestError(
                "there is nothing to look at; give --base-url, --metrics, --shared-log or a folder "
                "that ctxreuse record wrote"
            )
        checked_number("quiet_s", self.quiet_s)
        checked_number("timeout_s", self.timeout_s)
