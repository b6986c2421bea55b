"""Where a plan's blocks end in the prompt, counted in tokens."""

import pytest
from tokenizers import Tokenizer as Tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner, Templates
from ctxreuse.cache import KVEventSync, block_ends
from ctxreuse.cache.prompt_ends import estimated_ends
from ctxreuse.errors import InvalidRequestError
from ctxreuse.serving.emulation.word_tokenizer import ENGINE_TOKENIZER, chat_markup

pytestmark = pytest.mark.usefixtures("paper_words")


def test_block_ends_are_where_the_rendered_prompt_says(planner):
    history = [
        {"role": "user", "content": "Hi [Doc_1] one two"},
        {"role": "assistant", "content": "?"},
    ]
    plans = [
        planner.plan(ContextRequest(["one two", "three"], "Which?", system="Be brief.")),
        planner.plan(ContextRequest(["one two", "three"], "Which?", history=history)),
        planner.plan(ContextRequest([], "Which?")),
    ]

    def count(text):
        return len(ENGINE_TOKENIZER.ids(text))

    for plan in plans:
        rendered = chat_markup(plan.messages())
        expected = [
            count(rendered[: rendered.rindex(block.text) + len(block.text)])
            for block in plan.blocks
        ]
        assert block_ends(plan, count, chat_markup) == expected
        prompt_tokens = count(rendered)
        estimated = estimated_ends(plan, prompt_tokens)
        assert estimated == sorted(estimated)
        assert len(estimated) == len(expected)
        assert all(end <= prompt_tokens for end in estimated)


class Tokenizer:
    def __init__(self, template):
        self._template = template

    def encode(self, text, add_special_tokens):
        assert add_special_tokens is False
        return ENGINE_TOKENIZER.ids(text)

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert (tokenize, add_generation_prompt) == (False, True)
        return self._template(messages)


def test_the_tokenizers_own_template_is_used_and_may_strip_messages():
    planner = ReusePlanner(templates=Templates(block="  {label} {text}"))
    plan = planner.plan(ContextRequest(["one two ", "three\ud800"], "Which? \n"))
    rendered = "<u>[Doc_1] one two \n\n  [Doc_2] three?\n\nWhich?</u>"
    tokenizer = Tokenizer(lambda messages: f"<u>{messages[0]['content'].strip()}</u>")
    assert block_ends(plan, tokenizer) == [
        len(ENGINE_TOKENIZER.ids(rendered[: rendered.index("two ") + 4])),
        len(ENGINE_TOKENIZER.ids(rendered[: rendered.index("three?") + 6])),
    ]


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (len, "has no chat template; pass render="),
        (Tokenizer(lambda messages: "something else"), "does not hold the plan's message as it is"),
        (3, "token_counter must be a function or a tokenizer, not 3"),
    ],
)
def test_a_prompt_in_which_the_blocks_cannot_be_found_is_said_so(tokenizer, message):
    plan = ReusePlanner().plan(ContextRequest(["one"], "Which?"))
    with pytest.raises(InvalidRequestError, match=message):
        block_ends(plan, tokenizer)


def real_tokenizer(*, pads=0):
    """A tokenizer of `tokenizers`: a token a word and mark, in one alphabet of words."""
    vocabulary = {"?": 0, "[PAD]": 1}
    tokenizer = Tokenizers(WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    if pads:
        tokenizer.enable_padding(length=pads, pad_id=1, pad_token="[PAD]")
    return tokenizer


class Counting:
    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.encoded = []

    encode_batch = None

    def encode(self, text, add_special_tokens):
        self.encoded.append(text)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return chat_markup(messages)


class Fast:
    """A fast tokenizer as `transformers` has them: numbers alone, or a mapping with offsets."""

    is_fast = True

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.calls = 0

    def encode(self, text, add_special_tokens):
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def __call__(self, text, add_special_tokens, return_offsets_mapping):
        assert (add_special_tokens, return_offsets_mapping) == (False, True)
        self.calls += 1
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return {"input_ids": encoded.ids, "offset_mapping": encoded.offsets}


@pytest.mark.parametrize("pads", [0, 400])
def test_a_prompt_is_encoded_once_by_a_tokenizer_that_tells_where_its_tokens_are(pads):
    plan = ReusePlanner().plan(
        ContextRequest([f"Bl\u00f6ck {number}: \U0001f600 one, two." for number in range(15)], "?")
    )
    plain = real_tokenizer()
    expected = block_ends(
        plan, lambda text: len(plain.encode(text, add_special_tokens=False)), chat_markup
    )
    counting, fast = Counting(real_tokenizer(pads=pads)), Fast(real_tokenizer(pads=pads))
    assert block_ends(plan, counting) == expected
    assert counting.encoded == [chat_markup(plan.messages())]
    assert block_ends(plan, fast, chat_markup) == expected
    assert fast.calls == 1


def test_a_token_over_the_end_of_a_block_belongs_to_it():
    class Offsets:
        encode_batch = None

        def __init__(self, *offsets):
            self.offsets = list(offsets)

        def encode(self, text, add_special_tokens):
            return self

        def __len__(self):
            return 7

    planner = ReusePlanner(templates=Templates(label="[Doc_{id}]", block="{label}{text}"))
    plan = planner.plan(ContextRequest([ContextBlock(id=1, text="abcd")], "e"))
    assert plan.content == "[Doc_1]abcd\n\ne"  # the block ends at character 11
    for offsets, end in (
        ([(0, 10), (10, 13), (13, 14)], 2),
        ([(0, 11), (11, 14)], 1),
        ([(0, 0), (0, 9), (9, 9), (9, 11), (11, 11), (11, 14)], 4),
        ([(0, 0)], 0),
        ([(11, 14), (0, 11)], 7),  # not in the text's order: the beginnings are counted
    ):
        assert block_ends(plan, Offsets(*offsets), lambda m: m[0]["content"]) == [end]


def test_a_tokenizer_makes_the_ends_exact_unless_its_template_changes_the_text(planner):
    plan = planner.plan(ContextRequest(["one two", "three"], "Which?"))
    tokens = ENGINE_TOKENIZER.ids(chat_markup(plan.messages()))
    exact = block_ends(plan, Tokenizer(chat_markup))
    changing = Tokenizer(lambda messages: "something else")
    for tokenizer, ends in (
        (Tokenizer(chat_markup), exact),
        (changing, estimated_ends(plan, len(tokens))),
        (None, estimated_ends(plan, len(tokens))),
    ):
        sync = KVEventSync(planner, "tcp://127.0.0.1:1", tokenizer=tokenizer)
        sync.record(plan, tokens)
        [recorded] = sync._recorded.waiting().values()
        assert recorded.block_ends == ends


def test_estimated_ends_allow_for_words_of_the_template_before_the_messages(planner):
    blocks = [f"{letter} " * 300 for letter in "abcd"]
    plan = planner.plan(ContextRequest(blocks, "Which?", system="Be brief."))
    for words in (0, 10, 50):
        before = "template " * words

        def render(messages, before=before):
            return before + chat_markup(messages)

        exact = block_ends(plan, lambda text: len(ENGINE_TOKENIZER.ids(text)), render)
        tokens = len(ENGINE_TOKENIZER.ids(render(plan.messages())))
        estimated = estimated_ends(plan, tokens)
        assert all(real <= late <= tokens for real, late in zip(exact, estimated, strict=True))


def test_of_many_blocks_the_first_64_ends_are_counted_as_a_whole():
    plan = ReusePlanner().plan(ContextRequest([f"one two {n}" for n in range(100)], "?"))
    counted = []

    def words(text):
        counted.append(len(text))
        return len(text.split())

    ends = block_ends(plan, words, render=lambda messages: messages[0]["content"])
    assert ends == [4 * (n + 1) for n in range(100)]
    assert sum(counted) < 40 * len(plan.content)
