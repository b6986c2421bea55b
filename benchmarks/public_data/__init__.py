"""Benchmarks on public data: orders side by side, the published peer's too, and answers scored."""
