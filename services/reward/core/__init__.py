"""Scoring rules without transport or processes."""
