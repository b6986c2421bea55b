"""Where caches differ is said by their rules: nobody else asks which cache it is."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("ctxreuse", "integrations", "agents", "benchmarks")
RULES = ROOT / "ctxreuse" / "rules"
QUESTION = re.compile(
    r"\b(has_marks|is_hosted|granularity|VLLM)\b|\.key (==|!=) |(==|!=|\bis) DEFAULT_CACHE"
)


def test_only_the_rules_ask_which_cache_it_is():
    asking = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if RULES not in path.parents
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if QUESTION.search(line)
    ]
    assert not asking
