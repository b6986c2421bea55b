"""Tiers that hold the clusters that are searched most in faster memory."""
