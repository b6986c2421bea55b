import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.cache import PrefixCacheMetrics
from ctxreuse.errors import InvalidRequestError

PAGE = r"""# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 15013.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="a } \"b\\"} 0.25
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0",model_name="a } \"b\\"} 1200.0
vllm:prefix_cache_queries_created{engine="0",model_name="a } \"b\\"} 1.7629e+09
vllm:prefix_cache_hits_total{engine="0",model_name="a } \"b\\"} 3.0e+02
vllm:external_prefix_cache_queries_total{engine="0",model_name="m"} 77.0
# TYPE vllm:cache_config_info gauge
"""
PAGE += (
    'vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",'
    'enable_prefix_caching="True",kv_cache_size_tokens="87040",num_cpu_blocks="None",'
    'num_gpu_blocks="2720",num_gpu_blocks_override="None"} 1.0\n'
)


def test_a_page_of_vllm_is_read():
    assert PrefixCacheMetrics.parse(PAGE) == PrefixCacheMetrics(
        prefix_cache_queries=1200,
        prefix_cache_hits=300,
        block_size=32,
        num_gpu_blocks=2720,
        kv_cache_size_tokens=87040,
        engines=1,
        prefix_caching=True,
    )


def test_one_block_is_kept_back_by_the_engine_and_the_size_may_follow_from_the_blocks():
    assert PrefixCacheMetrics.parse(PAGE).capacity_tokens == 87040 - 32
    page = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="11"} 1\n'
    assert PrefixCacheMetrics.parse(page).capacity_tokens == 160


def test_engines_are_added_up():
    page = "\n".join(
        f'vllm:prefix_cache_queries_total{{engine="{engine}"}} 100\n'
        f'vllm:prefix_cache_hits_total{{engine="{engine}"}} {10 * engine}\n'
        f'vllm:cache_config_info{{block_size="16",engine="{engine}",'
        f'kv_cache_size_tokens="1600",num_gpu_blocks="300"}} 1'
        for engine in (1, 2, 3)
    )
    metrics = PrefixCacheMetrics.parse(page)
    assert metrics == PrefixCacheMetrics(300, 60, 16, 300, 4800, engines=3)
    assert metrics.capacity_tokens == 4800 - 3 * 16


@pytest.mark.parametrize("prefix", ["vllm:", "vllm_", "ray_vllm_"])
@pytest.mark.parametrize("suffix", ["", "_total"])
def test_names_are_known_as_other_exporters_write_them(prefix, suffix):
    page = f"{prefix}prefix_cache_hits{suffix}\t5 1763000000000\r\n"
    assert PrefixCacheMetrics.parse(page) == PrefixCacheMetrics(prefix_cache_hits=5)


@pytest.mark.parametrize(
    ("shown", "keeps_prefixes"),
    [
        (["True", "True"], True),
        (["True", "False"], False),
        (["False"], False),
        (["None"], None),
        (["None", "True"], True),
    ],
)
def test_prefixes_are_kept_where_all_engines_keep_them(shown, keeps_prefixes):
    page = "".join(
        f'vllm:cache_config_info{{engine="{engine}",enable_prefix_caching="{one}"}} 1\n'
        for engine, one in enumerate(shown)
    )
    assert PrefixCacheMetrics.parse(page).prefix_caching is keeps_prefixes


def test_what_a_page_lacks_is_unknown():
    assert PrefixCacheMetrics.parse("") == PrefixCacheMetrics()
    assert PrefixCacheMetrics().capacity_tokens is None
    page = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1\n'
    metrics = PrefixCacheMetrics.parse(page)
    assert (metrics.block_size, metrics.num_gpu_blocks, metrics.capacity_tokens) == (16, None, None)


@pytest.mark.parametrize(
    "line",
    [
        "vllm:prefix_cache_hits_total",
        "vllm:prefix_cache_hits_total NaN",
        "vllm:prefix_cache_hits_total +Inf",
        "vllm:prefix_cache_hits_total many",
        'vllm:prefix_cache_hits_total{engine="0 5',
        "# vllm:prefix_cache_hits_total 5",
        "xvllm:prefix_cache_hits_total 5",
        'vllm:cache_config_info{block_size="-3",num_gpu_blocks="0"} 1',
        f'vllm:cache_config_info{{block_size="{"9" * 5000}",num_gpu_blocks="1.5"}} 1',
    ],
)
def test_lines_that_make_no_sense_are_passed_over(line):
    metrics = PrefixCacheMetrics.parse(f"{line}\nvllm:prefix_cache_queries_total 3\n")
    assert metrics == PrefixCacheMetrics(prefix_cache_queries=3)


def test_what_is_no_text_is_named():
    with pytest.raises(InvalidRequestError, match="metrics must be a string, not b'x'"):
        PrefixCacheMetrics.parse(b"x")


@given(st.text() | st.text('vlm:cahefixprs_{}"=\\ \n10.5e+,'))
def test_no_page_breaks_the_reader(text):
    metrics = PrefixCacheMetrics.parse(text + "\nvllm:prefix_cache_hits_total 1\n")
    assert metrics.prefix_cache_hits is not None


@pytest.mark.parametrize("value", ["-5", "1e19", "1e308", "NaN", "+Inf", "-Inf", "1e999", "ten"])
def test_counts_that_cannot_be_are_skipped(value):
    lines = [
        f'vllm:prefix_cache_{name}_total{{engine="{engine}"}} {count}'
        for name in ("queries", "hits")
        for engine, count in enumerate([value, 7, value])
    ]
    metrics = PrefixCacheMetrics.parse("\n".join(lines))
    assert (metrics.prefix_cache_queries, metrics.prefix_cache_hits) == (7, 7)


def test_a_series_that_stands_twice_counts_once():
    line = 'vllm:prefix_cache_queries_total{engine="0",model_name="m"}'
    metrics = PrefixCacheMetrics.parse(f"{line} 5.0\n{line} 9.0\n")
    assert (metrics.prefix_cache_queries, metrics.engines) == (9, 1)
