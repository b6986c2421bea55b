"""`ctxreuse bench`: a recording on a live engine, in the orders that are compared."""
