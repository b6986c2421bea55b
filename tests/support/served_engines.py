"""An emulated engine at every address."""

import httpx
import pytest

from ctxreuse.serving import EmulatedEngine

URL = "http://engine.invalid/v1"
RULES = "vllm(states=junctions, prime_tokens=60)"
CONTEXTS = ("abcd", "abce", "abcf", "dg", "dh", "abdg")


def split(engine):
    """The bodies of the primes, and of the requests."""
    is_prime = [str(body.get("request_id", "")).startswith("prime-") for body in engine.requests]
    pairs = list(zip(engine.requests, is_prime, strict=True))
    return [body for body, prime in pairs if prime], [body for body, prime in pairs if not prime]


def assert_primes_pay(serve, wrapped, ask):
    """Assert that a batch reads more with primes, whose ends are shared; return the engine."""
    ratios = {}
    for prime in (False, True):
        engine, model = serve(states="junctions"), wrapped(prime=prime)
        assert len(ask(model)) == len(CONTEXTS)
        primes, requests = split(engine)
        assert len(requests) == len(CONTEXTS)
        reported = model.planner.savings.reported
        assert reported.primes == len(primes)
        assert bool(primes) is prime
        ratios[prime] = reported.hit_ratio
        whole = [engine._prompt(body) for body in requests]
        for body in primes:
            length = len(body["prompt"]) - 1  # its last token leaves the state before it
            assert length % 16 == 0
            assert sum(one[:length] == body["prompt"][:length] for one in whole) > 1
    assert ratios[True] > ratios[False] + 0.1
    return engine


@pytest.fixture
def served(monkeypatch):
    """Return a function that has an emulated engine answer at every address."""

    def serve(**options):
        emulated = EmulatedEngine(**options)
        transport = emulated.transport()

        async def handle(_, request):
            return await transport.handle_async_request(request)

        def handle_now(_, request):
            return transport.handle_request(request)

        monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", handle)
        monkeypatch.setattr(httpx.HTTPTransport, "handle_request", handle_now)
        return emulated

    return serve
