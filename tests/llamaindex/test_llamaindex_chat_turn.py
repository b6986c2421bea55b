import pytest
from llama_index.core.llms import ChatMessage

from llamaindex_ctxreuse.chat.chat_turn import Transcript


def transcript(messages):
    roles = ("user", "assistant")
    return Transcript().recalled(
        [ChatMessage(role=roles[n % 2], content=f"{n:04}") for n in range(messages)]
    )


@pytest.mark.parametrize(("tokens", "kept"), [(11, 0), (24, 2), (47, 2), (48, 4), (1_000, 4)])
def test_the_newest_turns_that_fit_are_kept_and_never_the_first(tokens, kept):
    rest = transcript(6).newest(tokens, lambda text: len(text) + 8)
    assert [one.sent.content for one in rest.utterances] == [f"{n:04}" for n in range(6)][
        6 - kept :
    ]


@pytest.mark.parametrize("tokens", [1, 10**9])
def test_each_message_is_counted_once_at_most(tokens):
    counted = []
    transcript(200).newest(tokens, lambda text: counted.append(text) or len(text))
    assert len(set(counted)) == len(counted)
