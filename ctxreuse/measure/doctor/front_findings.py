"""Whether something varies in front of the contexts of a recording, as a finding with a remedy."""

from __future__ import annotations

from collections.abc import Sequence

from ctxreuse.measure.doctor.findings import Finding, Verdict
from ctxreuse.measure.traces.trace_files import TraceRequest
from ctxreuse.measure.traces.varying_fronts import (
    OFTEN,
    Variation,
    first_turns,
    front_variations,
    is_digest,
    openings,
    system_texts,
)

CHECK = "in front of the contexts"


def check_fronts(trace: Sequence[TraceRequest]) -> Finding:
    """Look for what varies in front of the contexts of a recorded trace."""
    requests = first_turns(trace)
    systems, first = system_texts(requests), list(openings(requests))
    fronts = [one.front for one in requests if one.front is not None]
    if not systems and not first and fronts:
        return _counted(
            fronts,
            "text{s} before the documents of {requests:,} prompts",
            "put what differs behind the documents: in your template, {context} must stand before "
            "{question}",
        )
    if not systems and not first:
        if requests and all(one.sent is not None for one in requests):
            found = f"0 texts in front of the contexts of {len(requests):,} whole prompts"
            return Finding(CHECK, Verdict.OK, found, "", {"requests": len(requests)})
        return Finding(
            CHECK,
            Verdict.UNKNOWN,
            f"{len(requests):,} requests, none with a system text: retrievers do not see it",
            "record whole prompts: ctxreuse record --source openai -o recording app.py",
            {"requests": len(requests)},
        )
    if systems and all(is_digest(text) for _, text in systems):
        return _counted(
            systems,
            "system texts in {requests:,} requests",
            "record some requests without --hash-only, and look at them: ctxreuse doctor recording",
            "; where they differ is not in a recording without texts",
        )
    often = [one for one in front_variations(trace) if one.is_often]
    if often:
        return _found(max(often, key=lambda one: one.requests), len(often))
    forms = len(set(systems)) + len(set(first))
    found = f"{forms:,} form{'s' * (forms > 1)} in {len(requests):,} requests"
    return Finding(CHECK, Verdict.OK, found, "", {"requests": len(requests), "forms": forms})


def _found(worst: Variation, number: int) -> Finding:
    first, second = worst.values
    others = f"; so do {number - 1:,} other set-ups" if number > 1 else ""
    return Finding(
        CHECK,
        Verdict.PROBLEM,
        f"{worst.forms:,} forms of the {worst.part} in {worst.requests:,} requests; they part at "
        f"token {worst.token:,}: “{worst.before}” is followed by “{first}” and by “{second}”"
        f"{others}",
        f"say {worst.kind} behind the contexts, such as in the question: nothing behind it is "
        "found again",
        {
            "requests": worst.requests,
            "forms": worst.forms,
            "token": worst.token,
            "set_ups": number,
        },
    )


def _counted(texts: Sequence[object], words: str, remedy: str, more: str = "") -> Finding:
    """Judge texts of which hashes are known: how many there are is all that these say."""
    forms = len(set(texts))
    found = f"{forms:,} {words.format(s='s' * (forms > 1), requests=len(texts))}"
    figures = {"requests": len(texts), "forms": forms}
    if forms <= max(1, OFTEN * len(texts)):
        return Finding(CHECK, Verdict.OK, found, "", figures)
    return Finding(CHECK, Verdict.PROBLEM, found + more, remedy, figures)
