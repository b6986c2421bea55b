"""Whether something varies in a recording, in front of contexts or in documents, as findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ctxreuse.measure.doctor.findings import Finding, Verdict
from ctxreuse.measure.traces.changing_documents import (
    IN_TEXTS,
    UNKNOWN,
    changing_documents,
    hides_texts,
)
from ctxreuse.measure.traces.trace_files import TraceRequest
from ctxreuse.measure.traces.varying_fronts import (
    first_turns,
    front_variations,
    texts_in_front,
)

CHECK = "in front of the contexts"


def check_fronts(trace: Sequence[TraceRequest]) -> Finding:
    """Look for what varies in front of the contexts of a recorded trace."""
    changing = changing_documents(trace)  # which says more of a first paragraph that is a document
    requests = first_turns(trace if changing is None else changing.settled(trace))
    forms = sum(len(set(texts)) for texts in texts_in_front(requests).values())
    if not forms:
        if requests and all(one.sent is not None or one.front == "" for one in requests):
            found = f"0 texts in front of the contexts of {len(requests):,} whole prompts"
            return Finding(CHECK, Verdict.OK, found, "", {"requests": len(requests)})
        return Finding(
            CHECK,
            Verdict.UNKNOWN,
            f"{len(requests):,} requests, none with a system text: retrievers do not see it",
            "record whole prompts: ctxreuse record --source openai -o recording app.py",
            {"requests": len(requests)},
        )
    often = [one for one in front_variations(requests) if one.is_often]
    if often:
        worst = max(often, key=lambda one: one.requests)
        figures = {"requests": worst.requests, "forms": worst.forms, "set_ups": len(often)}
        return Finding(CHECK, Verdict.PROBLEM, str(worst), worst.remedy, figures)
    found = f"{forms:,} form{'s' * (forms > 1)} in {len(requests):,} requests"
    return Finding(CHECK, Verdict.OK, found, "", {"requests": len(requests), "forms": forms})


def check_documents(trace: Sequence[TraceRequest]) -> Iterator[Finding]:
    """Yield what changes in a recorded trace's documents, if anything does, or may."""
    changing = changing_documents(trace)
    if hides_texts(trace):
        yield Finding("documents", Verdict.UNKNOWN, UNKNOWN, IN_TEXTS)
    elif changing is not None:
        yield Finding("documents", Verdict.PROBLEM, str(changing), changing.remedy)
