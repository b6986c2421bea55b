"""The papers' own algorithms, as printed, for `strategy="paper"`."""
