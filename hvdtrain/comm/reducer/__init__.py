"""Reduction of gradient buckets over ranks."""
