"""An event loop whose clock jumps instead of waiting."""

import asyncio

import pytest
from virtual_time import now

from virtual_clock import run_in_virtual_time


def test_what_can_never_end_is_an_error_instead_of_a_hang():
    cleaned = []

    async def main():
        await asyncio.sleep(5)
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(now())

    with pytest.raises(RuntimeError, match="all tasks wait, and no timer will wake one"):
        run_in_virtual_time(main())
    assert cleaned == [5.0]
