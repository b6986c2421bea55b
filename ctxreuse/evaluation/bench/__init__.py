"""`ctxreuse bench`: ways to order blocks, side by side on public data and on your own."""
