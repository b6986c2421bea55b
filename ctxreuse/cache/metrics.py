"""What vLLM's `/metrics` tell about its prefix cache, all data-parallel engines together."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ctxreuse.context.checks import checked_kind

_SAMPLE = re.compile(
    r"""^(?P<name>[A-Za-z_:][A-Za-z0-9_:]*+)
        (?:\{(?P<labels>(?:[^"}]|"(?:[^"\\]|\\.)*+")*+)\})?
        [ \t]+(?P<value>\S+)""",
    re.VERBOSE,
)
# only where a name begins: from its every letter on, a name of n letters would be read n times
_LABEL = re.compile(r'(?<!\w)([A-Za-z_][A-Za-z0-9_]*+)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*+)"')
_POSITIVE = re.compile(r"[1-9][0-9]{0,17}")
_Labels: TypeAlias = tuple[tuple[str, str], ...]
_MOST_TOKENS = 1e18
_PREFIX = re.compile(r"^(?:ray_)?vllm[:_]")  # Ray renames them


@dataclass(frozen=True, slots=True)
class PrefixCacheMetrics:
    """The state of an engine's prefix cache; what the page lacks is None.

    Attributes:
        prefix_cache_queries: Prompt tokens looked up since the engine started.
        prefix_cache_hits: Those that were found.
        block_size: Tokens of a cache block.
        num_gpu_blocks: Blocks of all caches, those included that the engine keeps back.
        kv_cache_size_tokens: Tokens that all caches hold.
        engines: How many engines there are.
        prefix_caching: Whether all of them keep prefixes, as they were configured.
    """

    prefix_cache_queries: int | None = None
    prefix_cache_hits: int | None = None
    block_size: int | None = None
    num_gpu_blocks: int | None = None
    kv_cache_size_tokens: int | None = None
    engines: int = 1
    prefix_caching: bool | None = None

    @classmethod
    def parse(cls, text: str) -> PrefixCacheMetrics:
        """Read a `/metrics` page; skip lines about anything else, and values that cannot be.

        Of lines with the same name and labels, the last one counts.
        """
        found: defaultdict[str, dict[_Labels, float]] = defaultdict(dict)
        for name, labels, value in _samples(checked_kind("metrics", text, str, "a string")):
            if name == "cache_config_info" or 0 <= value <= _MOST_TOKENS:
                found[name][labels] = value
        queries, hits = found["prefix_cache_queries"], found["prefix_cache_hits"]
        configs: list[Mapping[str, str]] = [dict(one) for one in found["cache_config_info"]]
        sizes = _numbers(configs, "kv_cache_size_tokens")
        keeps = {one.get("enable_prefix_caching") for one in configs} & {"True", "False"}
        return cls(
            prefix_cache_queries=int(sum(queries.values())) if queries else None,
            prefix_cache_hits=int(sum(hits.values())) if hits else None,
            block_size=max(_numbers(configs, "block_size"), default=None),
            # every engine's line holds the blocks of all, but only its own tokens
            num_gpu_blocks=max(_numbers(configs, "num_gpu_blocks"), default=None),
            kv_cache_size_tokens=sum(sizes) if sizes else None,
            engines=max(len(queries), len(configs), 1),
            prefix_caching=keeps == {"True"} if keeps else None,
        )

    @property
    def capacity_tokens(self) -> int | None:
        """Tokens of prompts that all caches hold; vLLM keeps one block of each back."""
        if self.block_size is None:
            return None
        size = self.kv_cache_size_tokens
        if size is None and self.num_gpu_blocks is not None:
            size = self.num_gpu_blocks * self.block_size
        return None if size is None else max(0, size - self.engines * self.block_size)


def _samples(text: str) -> Iterator[tuple[str, _Labels, float]]:
    """Yield name (without vLLM's prefix and `_total`), labels and value of each sample."""
    for line in text.split("\n"):
        prefix = _PREFIX.match(line)
        found = _SAMPLE.match(line) if prefix else None
        if prefix is None or found is None:
            continue
        try:
            value = float(found["value"])
        except ValueError:
            continue
        if math.isfinite(value):
            labels = tuple(_LABEL.findall(found["labels"] or ""))
            yield found["name"][prefix.end() :].removesuffix("_total"), labels, value


def _numbers(configs: list[Mapping[str, str]], label: str) -> list[int]:
    """Return a label's positive integers; vLLM writes "None" for what it does not know."""
    shown = (config.get(label, "") for config in configs)
    return [int(text) for text in shown if _POSITIVE.fullmatch(text)]
