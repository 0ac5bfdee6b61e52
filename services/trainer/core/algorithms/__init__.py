"""The formulas of reinforcement learning, each a small pure function with its source; nothing here knows ranks.

Per-token arguments are float32 [k]: the trained tokens of a pack's samples, one sample after another. Where a formula
needs samples, `segments` int64 [k] gives each token's sample (ascending), and `count` is how many samples there are.
Every formula holds for k = 0 and for samples without a trained token.
"""
