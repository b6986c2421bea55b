"""Which words of an application say what the order of its documents means."""

import pytest

from ctxreuse import ContextBlock
from ctxreuse.pipeline.context_finder import Context, contexts_in, reason_in_place
from ctxreuse.pipeline.known_texts import Form, KnownTexts

TEXTS = [f"{name} is a river. It flows to the sea." for name in ("Seine", "Tiber", "Rhine")]


def context(*forms: Form) -> Context:
    known = KnownTexts()
    known.add("", forms or TEXTS)
    found = contexts_in(known, "", "\n\n".join([one.text for one in forms] or TEXTS))
    assert found is not None
    [one] = found.contexts
    return one


@pytest.mark.parametrize(
    "words",
    [
        "Use the following pieces of retrieved context to answer the question. If you do not know "
        "the answer, just say so. Use three sentences maximum.",
        "Context information from multiple sources is below.\n---------------------\n"
        "Given the context information and not prior knowledge, answer the query.",
        "Answer the question based only on the following context:",
        "Article 5 of the first contract, in order to be clear: What is the source of the Nile?",
        "You are helpful. Think step by step. Use the documents. In which order were they built?",
        "Each has a title and a source. What is its source? Say so if the sources differ. Sources:",
    ],
)
def test_the_usual_templates_say_nothing(words):
    assert reason_in_place(context(), [words]) is None


@pytest.mark.parametrize(
    "words",
    [
        "Cite what you use:",
        "Give the number of the passage.",
        "Sources: a.txt, b.txt, c.txt",
        'ALWAYS return a "SOURCES" part in your answer.',
        "Use only the sources below. Fields: answer and source",
        "What sources did you use?",
        "Give the answer, and the integers of what you used.",
        "Say which document you used.",
        "Main document (best match):",
        "What does document 2 say?",
        "Mark statements with [1] and so on.",
        "Zitiere genau:",
        "Name the first document.",
        "Return the index of each chunk.",
        "Refer to them by their number.",
        "Include at the end of your reply, in a separate line, the sources.",
        "For each document say whether it helps.",
        "Nenne die Nummer des Dokuments.",
        "Indique le num\u00e9ro du document.",
        "Indica el n\u00famero del documento.",
        "\u8bf7\u6ce8\u660e\u5f15\u7528\u6765\u6e90",
        "\u0423\u043a\u0430\u0436\u0438 \u043d\u043e\u043c\u0435\u0440",
    ],
)
def test_words_on_numbers_need_labels_or_numbers_in_the_texts(words):
    assert reason_in_place(context(), [words]) == "numbers"
    labelled = [Form(f"[{one[:5]}] {one}", ContextBlock(text=one)) for one in TEXTS]
    assert reason_in_place(context(*labelled), [words]) is None
    numbered = [Form(f"Document{n:3}: {one}") for n, one in enumerate(TEXTS, 9)]
    assert context(*numbered).is_numbered
    assert not context(*[Form(f"ISO 9004, {one}") for one in TEXTS]).is_numbered
    assert reason_in_place(context(*numbered), [words]) is None


@pytest.mark.parametrize(
    "words",
    [
        "The passages are sorted by relevance.",
        "Memories in chronological order:",
        "Read the chunks in this order:",
        "Oldest first:",
        "Conversation so far:",
        "Transcript:",
        "Ranked results:",
        "The most relevant ones come first.",
        "Follow these steps:",
        "Newer entries come first.",
        "Die Texte sind nach Datum sortiert.",
        "Los documentos est\u00e1n ordenados por fecha.",
        "\u6587\u6863\u6309\u65f6\u95f4\u987a\u5e8f\u6392\u5217",
    ],
)
def test_words_on_the_order_keep_it_whatever_the_texts_show(words):
    assert reason_in_place(context(), [words]) == "order"
    labelled = [Form(f"[{one[:5]}] {one}", ContextBlock(text=one)) for one in TEXTS]
    assert reason_in_place(context(*labelled), [words]) == "order"


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ('{"type": "integer"}', "numbers"),
        ('{"title": "source_index", "type": "string"}', "numbers"),
        ('{"title": "cited_ids"}', "numbers"),
        ('{"title": "answer", "type": "string"}', None),
    ],
)
def test_the_schema_of_an_answer_may_ask_for_places(schema, reason):
    assert reason_in_place(context(), [], schema=schema) == reason
