"""What a process knows of documents' texts: whose they are, how many, and where they stand."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

from forked import in_children
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.context.lru_map import PartSize
from ctxreuse.pipeline import known_texts as known_texts_module
from ctxreuse.pipeline.known_texts import Form, KnownTexts, TextList, known_texts


def knowing(*texts: str) -> KnownTexts:
    known = KnownTexts()
    known.add("", texts)
    return known


def found(known: KnownTexts, message: str, tenant: str = "") -> list[str]:
    spans = known.standing_at(tenant, message)
    assert spans is not None
    return [message[start:end] for start, end, _ in spans]


BEGINNING = "h" * 20
ENDINGS = st.text("a\n\U0010ffff", max_size=9)


@given(st.lists(ENDINGS, min_size=1, max_size=12), ENDINGS, ENDINGS)
def test_of_texts_that_begin_alike_the_longest_is_found(endings, shown, behind):
    texts = [BEGINNING + one for one in endings]
    message = BEGINNING + shown + behind
    standing = [one for one in {*texts, *map(str.strip, texts)} if message.startswith(one)]
    assert found(knowing(*texts), message)[:1] == sorted(standing, key=len)[-1:]


def test_tenants_see_their_own_texts_only():
    known = knowing("what everybody knows")
    known.add("a", ["what only a knows"])
    assert found(known, "what only a knows", "a") == ["what only a knows"]
    assert found(known, "what only a knows") == found(known, "what everybody knows", "a") == []


def test_a_flood_of_one_tenant_takes_nothing_from_another():
    known = KnownTexts(max_characters=100_000)
    known.add("quiet", ["a text of somebody quiet"])
    for number in range(1_000):
        known.add("loud", [f"text {number} of somebody loud" + "!" * 300])
    assert found(known, "a text of somebody quiet", "quiet")
    assert not found(known, "text 0 of somebody loud" + "!" * 300, "loud")
    assert found(known, "text 999 of somebody loud" + "!" * 300, "loud")
    size = known.parts["known_characters"]
    assert size.bound == 100_000
    assert 90_000 < size.entries <= size.bound


def test_what_is_used_is_kept_and_what_is_forgotten_leaves_nothing():
    known = KnownTexts(max_characters=1_000)
    for number in range(50):
        known.add("", [f"text of number {number:02}", "a text that is used"])
    assert found(known, "a text that is used")
    assert sum(map(len, known._beginnings[""].values())) == len(known._known)
    known.add("huge", ["x" * 5_000])  # more than all may hold together
    assert found(known, "x" * 5_000, "huge") == []
    assert found(known, "a text that is used"), "it is no part of the flood"


def test_the_work_is_bounded_by_the_length_of_a_message(monkeypatch):
    compared = []
    starts_with = known_texts_module._longest_at

    def counting(texts, message, start, spend):
        def noting(work):
            compared.append(work)
            return spend(work)

        return starts_with(texts, message, start, noting)

    monkeypatch.setattr(known_texts_module, "_longest_at", counting)
    nested = knowing(*("line\n" * number for number in range(3, 400)))
    hard = knowing(*("line\n" * number + "x" for number in range(3, 400)))
    for lines in (1_000, 8_000):
        message = "line\n" * lines
        compared.clear()
        assert nested.standing_at("", message)
        assert sum(compared) < 10 * len(message)
        compared.clear()
        assert hard.standing_at("", message) is None, "too much work"
        assert sum(compared) < 70 * len(message)


def test_a_text_stands_in_the_newest_list_or_in_that_of_the_run():
    known = KnownTexts()
    texts = ["a text about a", "a text about b"]
    run, newest = TextList("run"), TextList("other")
    known.add("", texts, run)
    known.add("", texts[::-1], newest)
    one = known.known("", texts[0])
    assert one is not None
    assert one.list_of("run") is run
    assert one.list_of(None) is one.list_of("third") is newest
    assert (one.rank_in(run), one.rank_in(newest), one.rank_in(TextList())) == (0, 1, None)
    known.add("", [texts[1], *texts], repeated := TextList("twice"))
    other = known.known("", texts[1])
    assert other is not None
    assert other.rank_in(repeated) == 0, "a repeat has the rank of the first"
    for _ in range(20):
        known.add("", texts)
    one = known.known("", texts[0])
    assert one is not None
    assert (len(one.lists), one.rank_in(run)) == (16, None)


def test_a_list_that_a_plan_of_ours_has_ordered_is_told_by_its_texts():
    known = KnownTexts()
    texts = ["a text about a", "a text about b", "a text about c"]
    known.add_seen("", [[Form(one) for one in texts]])
    assert known.planned_list("", texts) is None, "a retriever's own order"
    planned = TextList("run", is_ours=True, take_back=print, order=[1, 0])
    known.add("", [texts[2], texts[0]], planned)
    assert known.planned_list("", [texts[2], texts[0]]) is None, "another query found these"
    assert known.planned_list("", [texts[0], texts[2]]) == (planned, [1, 0])
    assert known.planned_list("", texts) is None, "one of them is not in it"
    assert known.planned_list("", []) is known.planned_list("", ["unknown text"]) is None
    known.add_seen("", [[Form(texts[0]), Form(texts[2])]], "run")
    one = known.known("", texts[0])
    assert one is not None
    assert one.lists[0][0] is planned, "what was retrieved is what was planned"
    known.add("", ["Title: x\na text about a"], *known.planned_list("", texts[:1]))
    rendered = known.known("", "Title: x\na text about a")
    assert rendered is not None
    assert rendered.lists == ((planned, 1),), "it is as good as the text itself"


def test_threads_may_add_and_find_at_the_same_time():
    known = KnownTexts(max_characters=20_000)

    def add_and_find(name: int) -> int:
        for number in range(100):
            text = f"text {number} of thread {name}"
            known.add("", [text])
            assert found(known, text) in ([text], [])
        return name

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(add_and_find, range(8))) == list(range(8))
    assert sum(map(len, known._beginnings[""].values())) == len(known._known)


def test_a_process_shares_one_and_copies_are_the_same():
    with ThreadPoolExecutor(8) as pool:
        [shared] = set(pool.map(lambda _: known_texts(), range(20)))
    assert copy.copy(shared) is copy.deepcopy(shared) is pickle.loads(pickle.dumps(shared))
    shared.add("", ["a text that is known"])
    shared.forget_all()
    assert shared.parts["known_characters"] == PartSize(0, 32_000_000)


def test_a_child_knows_what_its_parent_knew_and_never_waits_for_it():
    known_texts().add("", ["a text that is known"])

    def work(child: int) -> int:
        known_texts().add("", [f"a text of child {child}"])
        return len(found(known_texts(), f"a text of child {child}\na text that is known"))

    assert in_children(2, work) == [2, 2]
    busy = in_children(4, work, load=lambda n: known_texts().add("", [f"a text of thread {n}"]))
    assert set(busy) <= {1, 2}, "what was being changed is forgotten"
