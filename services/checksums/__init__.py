"""Checksums of weights: the trainer makes those of what it sends, a receiver those of what its engine holds.

A package of its own beside `services.common`, because it needs torch, and because both sides must be the same code.
"""
