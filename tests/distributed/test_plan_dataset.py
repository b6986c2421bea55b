"""Planning on a small Ray cluster, of this machine."""

import asyncio
import gc
import os
import random
import threading
from pathlib import Path
from queue import SimpleQueue

import pytest
import ray
from http_servers import engine_script, listening

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.cache import BlockLevelCache
from ctxreuse.distributed import plan_dataset
from ctxreuse.errors import InvalidRequestError
from ctxreuse.serving import EmulatedEngine
from ctxreuse.sharing import SQLiteLog

REQUESTS = 600

# Ray warns of what it does itself, and leaves its logs open
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\."),
    pytest.mark.filterwarnings(r"ignore:.*/logs/ray-data:pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings(r"ignore:.*/logs/ray-data:ResourceWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=100 << 20,
    )
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    yield
    ray.shutdown()
    gc.collect()  # so that the warnings come here, and not in tests of other things


def made_up_rows(number=REQUESTS, topics=40, seed=1):
    """Return questions, of which those of one topic retrieve nearly the same."""
    drawn = random.Random(seed)
    rows = []
    for question in range(number):
        topic = drawn.randrange(topics)
        ids = [f"{topic}-{one}" for one in range(4) if drawn.random() < 0.8]
        ids.append(f"{topic // 4}-common")
        drawn.shuffle(ids)
        documents = [{"id": one, "text": f"text of {one} " * 20} for one in ids]
        rows.append({"question": f"question {question}", "documents": documents, "n": question})
    return rows


COLUMNS = {"blocks": "documents", "query": "question"}
ROWS = made_up_rows()


def plan(rows, blocks=5, **options):
    return plan_dataset(
        ray.data.from_items(rows, override_num_blocks=blocks),
        **{"columns": COLUMNS, "partition_size": 100, "batch_size": 16, **options},
    )


def hit_ratio(rows, orders):
    """Return the share of block tokens that an unlimited cache serves, in the order of the rows."""
    cache, usage = BlockLevelCache(), None
    for row, order in zip(rows, orders, strict=True):
        keys = [row["documents"][position]["id"].encode() for position in order]
        served = cache.serve(keys, [60] * len(keys))
        usage = served if usage is None else usage + served
    return usage.hit_ratio


@pytest.fixture(scope="module")
def planned():
    return plan(ROWS).take_all()


def test_every_row_comes_back_once_in_execution_order(planned):
    assert sorted(row["n"] for row in planned) == list(range(REQUESTS))
    places = [(row["plan_partition"], row["plan_position"]) for row in planned]
    assert places == sorted(places)
    sizes = [partition for partition, _ in places]
    assert max(map(sizes.count, set(sizes))) <= 100
    assert planned[0]["documents"] == ROWS[planned[0]["n"]]["documents"]
    for row in planned:
        assert row["messages"][0]["content"].endswith(ROWS[row["n"]]["question"])
        assert sorted(row["plan_order"]) == list(range(len(row["documents"])))


def test_partitions_lose_little_of_what_planning_all_at_once_saves(planned):
    requests = [
        ContextRequest([one["text"] for one in row["documents"]], row["question"]) for row in ROWS
    ]
    batch = ReusePlanner().plan_batch(requests)
    texts = [{one["text"]: place for place, one in enumerate(row["documents"])} for row in ROWS]
    orders = [
        [texts[position][block.text] for block in plan.blocks]
        for position, plan in zip(batch.order, batch.plans, strict=True)
    ]
    at_once = hit_ratio([ROWS[position] for position in batch.order], orders)
    assert hit_ratio(planned, [row["plan_order"] for row in planned]) >= 0.98 * at_once
    assert at_once > 1.5 * hit_ratio(ROWS, [range(len(row["documents"])) for row in ROWS])


def test_the_result_depends_on_neither_the_blocks_nor_the_order_of_the_rows(planned):
    shuffled = random.Random(2).sample(ROWS, REQUESTS)
    assert plan(shuffled, blocks=2).take_all() == planned


def test_the_order_holds_in_batches_of_what_follows_and_groups_stand_in_one():
    def named(batch):
        return {**batch, "batch": [str(batch["n"][0])] * len(batch["n"])}

    ds = plan(made_up_rows(topics=200), partition_size=300, batch_size=64)
    rows = ds.map_batches(named, batch_size=64).take_all()
    places = [(row["plan_partition"], row["plan_position"]) for row in rows]
    assert places == sorted(places)
    groups = {}
    for row in rows:
        groups.setdefault(row["plan_group"], set()).add(row["batch"])
    assert len(groups) < REQUESTS / 2
    whole = [group for group, batches in groups.items() if len(batches) == 1]
    assert len(whole) >= 0.95 * len(groups)


def dies_once(folder, times):
    """Return what makes requests; the process that does it for one row the n-th time dies."""

    def read(row):
        if row["n"] == 7:
            for number in range(times):
                try:
                    Path(folder, str(number)).mkdir()
                except FileExistsError:
                    continue
                if number == times - 1:
                    os._exit(1)
                break
        return ContextRequest(
            [ContextBlock(id=one["id"], text=one["text"]) for one in row["documents"]],
            row["question"],
        )

    return read


@pytest.mark.parametrize("times", [1, 2, 3], ids=["counting", "locating", "planning"])
def test_what_a_worker_did_that_died_is_done_again_with_the_same_result(planned, tmp_path, times):
    rows = plan(ROWS, columns=None, request=dies_once(str(tmp_path), times)).take_all()
    assert len(list(tmp_path.iterdir())) == times
    assert [row["n"] for row in rows] == [row["n"] for row in planned]
    assert [row["messages"] for row in rows] == [row["messages"] for row in planned]


def test_later_turns_follow_their_conversation():
    rows = [
        {
            "blocks": [f"document {conversation % 7} " * 20, f"other {turn} {conversation}"],
            "history": [{"role": "user", "content": f"turn {one}"} for one in range(turn)],
            "conversation_id": conversation,
            "turn": turn,
        }
        for turn in (2, 0, 1)
        for conversation in range(40)
    ]
    found = plan(rows, columns=None, partition_size=30).take_all()
    turns = {}
    for row in found:
        turns.setdefault(row["conversation_id"], []).append(row)
    assert len({row["plan_partition"] for row in found}) > 3
    for of_one in turns.values():
        assert [row["turn"] for row in of_one] == [0, 1, 2]
        assert len({row["plan_partition"] for row in of_one}) == 1


def test_nothing_in_nothing_out():
    empty = ray.data.from_items(ROWS[:2]).limit(0)
    assert plan_dataset(empty, columns=COLUMNS).take_all() == []


def test_one_partition_is_enough_for_few_requests():
    rows = plan(ROWS[:5], partition_size=100).take_all()
    assert {row["plan_partition"] for row in rows} == {0}
    assert [row["plan_position"] for row in rows] == list(range(5))


def test_wrong_rows_name_what_is_missing():
    with pytest.raises(Exception, match="there is no column 'blocks' with the blocks"):
        plan(ROWS, columns=None)
    with pytest.raises(Exception, match="what request returns for a row must be a ContextRequest"):
        plan(ROWS[:3], columns=None, request=lambda row: row["question"])


def test_a_column_of_the_users_is_not_overwritten():
    rows = [{"blocks": ["a"], "messages": "mine"}]
    with pytest.raises(Exception, match="the dataset has a column 'messages' already"):
        plan(rows, columns=None).take_all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ds": ROWS}, "ds must be a ray.data.Dataset, not"),
        ({"partition_size": 0}, "partition_size must be an integer from 1, not 0 (int)"),
        ({"batch_size": 0}, "batch_size must be an integer from 1, not 0 (int)"),
        ({"request": 1}, "request must be a function or None, not 1 (int)"),
        ({"planner": 1}, "planner must be a ReusePlanner or None, not 1 (int)"),
        ({"columns": {}, "request": len}, "give columns or request, not both: "),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises(InvalidRequestError) as refused:
        plan_dataset(**{"ds": ray.data.range(1), **options})
    assert str(refused.value).startswith(message)


def test_a_planner_with_a_shared_log_is_refused(tmp_path):
    planner = ReusePlanner(shared_log=SQLiteLog(str(tmp_path / "sent.sqlite")))
    with pytest.raises(InvalidRequestError, match="a planner with a shared log plans by what"):
        plan(ROWS, planner=planner)


def test_the_planners_settings_count():
    planner = ReusePlanner(annotate=False)
    planner.plan(ContextRequest(["what it has seen"]))
    rows = plan(ROWS[:60], planner=planner, partition_size=100).take_all()
    assert any(row["plan_order"] != sorted(row["plan_order"]) for row in rows)
    assert not any("priority order" in row["messages"][0]["content"] for row in rows)


@pytest.fixture
def engine():
    emulated, is_over, urls = EmulatedEngine(model="m"), threading.Event(), SimpleQueue()

    async def serve():
        async with listening(engine_script(emulated)) as [server]:
            urls.put(f"{server.url}/v1/chat/completions")
            await asyncio.to_thread(is_over.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    yield emulated, urls.get(timeout=20)
    is_over.set()
    thread.join()


def test_the_http_processor_sends_batches_in_the_planned_order(engine):
    from ray.data.llm import HttpRequestProcessorConfig, build_processor

    emulated, url = engine
    planned = plan(ROWS[:200]).materialize()
    planned.context.execution_options.preserve_order = True  # what is materialized is not sorted
    processor = build_processor(
        HttpRequestProcessorConfig(url=url, batch_size=16, concurrency=1),
        preprocess=lambda row: {"payload": {"model": "m", "messages": row["messages"]}},
        postprocess=lambda row: {
            "n": row["n"],
            "cached": row["http_response"]["usage"]["prompt_tokens_details"]["cached_tokens"],
        },
    )
    rows = processor(planned).take_all()
    expected = planned.take_all()
    assert [row["n"] for row in rows] == [row["n"] for row in expected]
    place = {row["messages"][0]["content"]: number for number, row in enumerate(expected)}
    arrived = [place[body["messages"][-1]["content"]] for body in emulated.requests]
    assert sorted(arrived) == list(range(200))
    # batches may run side by side, but each is sent one after the other
    batches = {}
    for number in arrived:
        row = expected[number]
        batches.setdefault((row["plan_partition"], row["plan_position"] // 16), []).append(number)
    assert all(members == sorted(members) for members in batches.values())
    assert len(batches) > 10
    assert sum(row["cached"] for row in rows) > 0
