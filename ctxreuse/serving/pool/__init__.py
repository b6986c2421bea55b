"""Several engines that serve one model: routing, admission, placement."""
